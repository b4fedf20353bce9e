"""A whole tiny model in one GGUF file: random weights, a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octavo.weights.formats import FORMATS
from support.fake_assembly import VOCAB_SIZE, byte_metadata
from support.gguf_writer import model_file, quantised_tensor
from support.tiny_models import TINY_SIZES, random_tensors, tiny_spec


def tiny_gguf(path: Path) -> Path:
    """A llama model of byte tokens with one Q8_0 matrix."""
    spec = tiny_spec(vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    file = model_file("llama", random_tensors(spec), {**TINY_SIZES, "context": 1024}, byte_metadata())
    at = next(i for i, tensor in enumerate(file.tensors) if tensor.name == "blk.0.ffn_up.weight")
    file.tensors[at] = quantised_tensor("blk.0.ffn_up.weight", (64, 32), FORMATS["Q8_0"], np.random.default_rng(0))
    return file.write(path)
