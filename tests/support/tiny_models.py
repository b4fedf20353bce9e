"""Tiny models as numbers: a spec, random float32 tensors under Hugging Face names, and files made from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.models.loading import expected_shapes
from octavo.models.spec import ModelSpec
from octavo.models.spec_from import spec_from_config

TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TINY_SIZES: dict[str, int] = {
    "num_layers": 2, "hidden": 32, "inner": 64, "heads": 4, "kv_heads": 2, "context": 128,
}  # fmt: skip


def tiny_spec(**changes: Any) -> ModelSpec:
    return spec_from_config({**TINY_CONFIG, **changes})


def random_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in expected_shapes(spec).items()}
