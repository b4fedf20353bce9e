"""Law 1 with the real model: token ids and logprobs are equal to the bit whatever else the engine does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import Outcome, new_engine, run_requests

from octavo.backends.cpu.backend import CpuBackend
from octavo.engine import Engine
from octavo.models.loading import LoadedModel
from octavo.request import SamplingParams

DATA = Path(__file__).parents[1] / "data"
MAX_MODEL_LEN = 512
NUM_PROMPTS = 24
NUM_TOKENS = 12

Requests = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def requests() -> Requests:
    """24 prompts of 1 to 139 tokens, some sharing prefixes; each once greedy and once seeded."""
    text: list[int] = json.loads((DATA / "perplexity.json").read_text())["ids"]
    out: Requests = []
    for i in range(NUM_PROMPTS):
        length = 1 + 6 * i
        start = 0 if i % 3 == 0 else 40 * i  # every third prompt is a prefix of the next such one
        prompt = text[start : start + length]
        greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
        seeded = SamplingParams(
            temperature=0.9, top_p=0.95, top_k=50, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3,
            repetition_penalty=1.1 if i % 2 else 1.0, n=2 if i == 5 else 1,
        )  # fmt: skip
        out += [(prompt, greedy), (prompt, seeded)]
    return out


def engine_for(
    model: LoadedModel, *, budget: int = 256, threads: int = 2, num_blocks: int = 800, **config: Any
) -> Engine:
    backend = CpuBackend(
        model, max_num_seqs=64, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN, threads=threads, poison=True
    )
    return new_engine(
        backend,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=num_blocks,
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        **config,
    )


@pytest.fixture(scope="module")
def alone(smollm2: LoadedModel, requests: Requests) -> list[list[Outcome]]:
    """Every request by itself, from a cold cache: what all other runs must equal."""
    return run_requests(engine_for(smollm2, enable_prefix_caching=False), requests, together=False)


def assert_equal(runs: list[list[Outcome]], expected: list[list[Outcome]]) -> None:
    for i, (got, want) in enumerate(zip(runs, expected, strict=True)):
        for sample, (a, b) in enumerate(zip(got, want, strict=True)):
            assert len(b.token_ids) == NUM_TOKENS
            assert a.visible == b.visible, f"request {i}, sample {sample}"


@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_together_in_any_chunks(
    smollm2: LoadedModel, requests: Requests, alone: list[list[Outcome]], budget: int
) -> None:
    assert_equal(run_requests(engine_for(smollm2, budget=budget), requests), alone)


def test_one_thread(smollm2: LoadedModel, requests: Requests, alone: list[list[Outcome]]) -> None:
    assert_equal(run_requests(engine_for(smollm2, threads=1), requests), alone)


def test_warm_prefix_cache(smollm2: LoadedModel, requests: Requests, alone: list[list[Outcome]]) -> None:
    engine = engine_for(smollm2)
    assert_equal(run_requests(engine, requests), alone)
    again = run_requests(engine, list(reversed(requests)))
    assert sum(o[0].num_cached for o in again) > 2000
    assert_equal(list(reversed(again)), alone)


def test_pool_so_small_that_sequences_are_preempted(
    smollm2: LoadedModel, requests: Requests, alone: list[list[Outcome]]
) -> None:
    engine = engine_for(smollm2, num_blocks=24, budget=64, admission="greedy")
    assert_equal(run_requests(engine, requests), alone)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_free_blocks == 24
