"""Embeddings of tiny random models equal those of transformers, and to the bit those of any other schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.test_transformers_oracle import TEXT, load, tiny

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.request import FinishReason, Pooling, SamplingParams

torch = pytest.importorskip("torch")


def oracle(model: Any, token_ids: list[int], pooling: Pooling) -> np.ndarray:
    with torch.no_grad():
        hidden = model.model(torch.tensor([token_ids])).last_hidden_state[0]
    return (hidden[-1] if pooling is Pooling.LAST else hidden.double().mean(0)).numpy()


def embeddings(path: Path, prompts: list[list[int]], pooling: Pooling, **config: Any) -> list[bytes]:
    backend = CpuBackend(
        load(path), max_num_seqs=4, max_num_batched_tokens=512, max_model_len=256, kv_cache_dtype="float32", poison=True
    )
    engine = Engine(EngineConfig(**{"max_model_len": 256, "num_blocks": 40, **config}), backend)
    params = SamplingParams(max_tokens=0, pooling=pooling)
    for i, prompt in enumerate(prompts):
        engine.add_request(engine.make_request(str(i), prompt, params))
    found: dict[str, bytes] = {}
    while engine.has_unfinished:
        for event in engine.step():
            assert event.finish_reason is FinishReason.STOP and not event.token_ids and event.embedding
            found[event.request_id] = event.embedding
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window-16"])
def test_equal_to_transformers(name: str, pooling: Pooling, tmp_path: Path) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path)
    prompts = [TEXT[:70], TEXT[5:6], TEXT[3:36]]
    got = embeddings(tmp_path, prompts, pooling, enable_prefix_caching=False)
    for prompt, embedding in zip(prompts, got, strict=True):
        np.testing.assert_allclose(
            np.frombuffer(embedding, "<f4"), oracle(model, prompt, pooling), atol=2e-4, rtol=2e-4
        )


@pytest.mark.parametrize("pooling", list(Pooling))
def test_any_schedule_gives_the_same_bytes(pooling: Pooling, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    prompts = [TEXT[:70], TEXT[:70], TEXT[:40], TEXT[:33], TEXT[:1]]
    solo = [embeddings(tmp_path, [p], pooling, enable_prefix_caching=False)[0] for p in prompts]
    for budget in (7, 16, 33, 300):
        for caching in (False, True):
            got = embeddings(
                tmp_path, prompts, pooling, max_num_batched_tokens=budget, enable_prefix_caching=caching, max_num_seqs=3
            )
            assert got == solo
