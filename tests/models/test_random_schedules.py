"""Law 1 with a real (tiny, random) model on the CPU backend, over schedules that hypothesis draws.

Arrivals, lengths, samples, beams, aborts, priorities, salts, pool sizes and budgets are drawn; every answer
equals, to the bit, that of the request alone in an engine without a prefix cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run import check_books, check_idle
from support.runs import new_engine
from support.tiny_models import random_tensors, tiny_spec

from octavo.backends.cpu.backend import CpuBackend
from octavo.engine import Engine
from octavo.errors import NeverFitsError, RequestError
from octavo.models.loading import LoadedModel
from octavo.request import FinishReason, SamplingParams
from octavo.weights.files import TensorView

VOCAB = 40
EOS = frozenset({3})
NUM_BLOCKS = 24

KINDS = (
    SamplingParams(temperature=0, max_tokens=14, logprobs=2),
    SamplingParams(n=4, max_tokens=9, seed=1, logprobs=0),
    SamplingParams(n=2, best_of=3, max_tokens=12, seed=2, repetition_penalty=1.2),
    SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8, length_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=20, min_tokens=5),
)


@cache
def model() -> LoadedModel:
    spec = tiny_spec(vocab_size=VOCAB, max_position_embeddings=256)
    views = {}
    for name, values in random_tensors(spec, seed=5).items():
        scaled = values if values.ndim == 1 else values * np.float32(0.25)
        views[name] = TensorView(name, values.shape, "F32", np.ascontiguousarray(scaled).view(np.uint8).ravel(), "test")
    return LoadedModel(name="tiny", spec=spec, tensors=views, tokenizer_source=None)


def engine_for(kv_cache_dtype: str = "bfloat16", **config: Any) -> Engine:
    settings = {"max_model_len": 256, "num_blocks": NUM_BLOCKS, "max_num_seqs": 8, **config}
    settings.setdefault("max_num_batched_tokens", 64)
    backend = CpuBackend(
        model(),
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        max_model_len=settings["max_model_len"],
        kv_cache_dtype=kv_cache_dtype,
        poison=True,
    )
    return new_engine(backend, **settings)


def make_prompt(num_tokens: int, family: int) -> list[int]:
    """Prompts of one family are prefixes of each other; families share their first three tokens."""
    return [(i * i + 5) % VOCAB if i < 3 else (family * 7 + 3 * i * i + i) % VOCAB for i in range(num_tokens)]


class Outcomes(dict[tuple[str, int], list[Any]]):
    """[tokens, logprobs, prompt logprobs, finish reason, score] by request and sample."""

    def take(self, engine: Engine) -> None:
        for event in engine.step():
            found = self.setdefault((event.request_id, event.index), [(), (), (), None, None])
            assert found[3] is None, "an event after the last one"
            found[0] += event.token_ids
            found[1] += event.logprobs or ()
            found[2] += event.prompt_logprobs
            found[3], found[4] = event.finish_reason, event.score


@cache
def alone(num_tokens: int, family: int, kind: int, num_blocks: int, kv: str) -> dict[tuple[str, int], list[Any]]:
    engine = engine_for(kv, num_blocks=num_blocks, enable_prefix_caching=False)
    add(engine, "r", num_tokens, family, kind)
    outcomes = Outcomes()
    while engine.has_unfinished:
        outcomes.take(engine)
    return outcomes


def add(engine: Engine, request_id: str, num_tokens: int, family: int, kind: int, **options: Any) -> None:
    prompt = make_prompt(num_tokens, family)
    engine.add_request(engine.make_request(request_id, prompt, KINDS[kind], eos_token_ids=EOS, **options))


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 75),  # prompt tokens
        st.integers(0, 1),  # family
        st.integers(0, len(KINDS) - 1),
        st.integers(0, 4),  # steps before the next one comes
        st.sampled_from([None, None, None, 1, 3]),  # aborted after so many steps more
        st.integers(-1, 1),  # priority
        st.sampled_from(["", "", "a"]),  # salt
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=100, deadline=None)
@given(
    REQUESTS,
    st.integers(7, NUM_BLOCKS),
    st.sampled_from([4, 7, 16, 64]),
    st.integers(3, 8),
    st.booleans(),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from(["full", "tail"]),
    st.sampled_from(["greedy", "foresight"]),
    st.sampled_from(["bfloat16", "bfloat16", "int8"]),
)
def test_answers_do_not_depend_on_the_schedule(
    requests: list[Any],
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    caching: bool,
    policy: str,
    mode: str,
    admission: str,
    kv: str,
) -> None:
    engine = engine_for(
        kv,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
        preemption_mode=mode,
        admission=admission,
    )
    outcomes, aborts, asked = Outcomes(), {}, {}
    step = work = 0

    def advance() -> None:
        nonlocal step
        for request_id, when in aborts.items():
            if when == step:
                engine.abort(request_id)
        outcomes.take(engine)
        check_books(engine)
        step += 1

    for i, (num_tokens, family, kind, delay, abort_after, priority, salt) in enumerate(requests):
        request_id = f"r{i}"
        try:
            add(engine, request_id, num_tokens, family, kind, priority=priority, cache_salt=salt)
        except NeverFitsError:
            continue
        asked[request_id] = (num_tokens, family, kind, num_blocks, kv)
        params = KINDS[kind]
        work += params.num_sequences * (num_tokens + (params.max_tokens or 0)) + delay
        if abort_after is not None:
            aborts[request_id] = step + abort_after
        for _ in range(delay):
            advance()
    # Liveness: a step computes a token of somebody, and none is computed more often than it may be preempted.
    limit = work * (1 + engine.config.max_preemptions) + len(requests)
    while engine.has_unfinished:
        advance()
        assert step <= limit
    check_idle(engine)
    for request_id, arguments in asked.items():
        for (_, index), want in alone(*arguments).items():
            got = outcomes.get((request_id, index), [(), (), (), None, None])
            if got[3] is FinishReason.ABORT:
                assert got[0] == want[0][: len(got[0])]
            else:
                assert got == want


def test_a_search_wider_than_the_budget_is_refused() -> None:
    with pytest.raises(RequestError):
        add(engine_for(max_num_batched_tokens=2, max_num_seqs=8), "r", 5, 0, 3)
