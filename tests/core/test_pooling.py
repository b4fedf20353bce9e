"""Requests for embeddings: no tokens, one result, the same under any schedule; the mean looks nothing up."""

import pytest
from support.script_backend import HashBackend

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import ContextLengthError, RequestError
from octavo.request import FinishReason, Pooling, SamplingParams


def new_engine(backend=None, **config):
    backend = backend or HashBackend(vocab_size=64, block_size=4, keep_trace=False)
    config = {"num_blocks": 40, "block_size": 4, "max_model_len": 100, **config}
    return Engine(EngineConfig(**config), backend, seed=0)


def run(engine, prompts, params):
    for i, prompt in enumerate(prompts):
        engine.add_request(engine.make_request(str(i), prompt, params))
    events = []
    while engine.has_unfinished:
        events += engine.step()
        engine.scheduler.tables.pool.check(seq.block_ids for seq in engine.scheduler.running)
    return {event.request_id: event for event in events}


def prompt_of(num_tokens):
    return [i * 7 % 61 for i in range(num_tokens)]


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("num_blocks", [11, 40])
def test_one_embedding_and_nothing_else(pooling, budget, num_blocks):
    params = SamplingParams(max_tokens=0, pooling=pooling)
    lengths = [1, 4, 5, 30, 30, 17]
    solo = [run(new_engine(enable_prefix_caching=False), [prompt_of(n)], params)["0"].embedding for n in lengths]
    engine = new_engine(max_num_batched_tokens=budget, num_blocks=num_blocks, max_num_seqs=4)
    for _ in range(2):  # cold, then with a warm cache
        events = run(engine, map(prompt_of, lengths), params)
        assert [events[str(i)].embedding for i in range(len(lengths))] == solo
        for event in events.values():
            assert event.finish_reason is FinishReason.STOP and event.token_ids == () and event.logprobs is None
    stats = engine.stats()
    assert stats.num_generated_tokens == 0 and stats.num_running == stats.num_waiting == 0
    if pooling is Pooling.MEAN:
        assert stats.num_hit_tokens == stats.num_query_tokens == 0
        assert stats.num_prompt_tokens >= 2 * sum(lengths)
    else:
        assert stats.num_hit_tokens > 0


def test_preempted_and_begun_again():
    params = SamplingParams(max_tokens=0, pooling=Pooling.MEAN)
    solo = run(new_engine(), [prompt_of(30)], params)["0"].embedding
    engine = new_engine(num_blocks=12, max_num_batched_tokens=8, scheduling_policy="priority")
    engine.add_request(engine.make_request("a", prompt_of(30), params, priority=5))
    engine.step()
    engine.step()
    engine.add_request(engine.make_request("b", prompt_of(40), SamplingParams(max_tokens=3), priority=0))
    found = {}
    while engine.has_unfinished:
        found |= {event.request_id: event for event in engine.step() if event.finish_reason}
    assert engine.stats().num_preemptions > 0
    assert found["a"].embedding == solo


def test_limits():
    engine = new_engine()
    params = SamplingParams(max_tokens=0, pooling=Pooling.LAST)
    assert run(engine, [prompt_of(100)], params)["0"].embedding
    with pytest.raises(ContextLengthError):
        engine.make_request("r", prompt_of(101), params)
    for wrong in ({"max_tokens": 1}, {"max_tokens": 0, "n": 2}, {"max_tokens": 0, "prompt_logprobs": 1}):
        with pytest.raises(RequestError, match="pooling"):
            SamplingParams(pooling=Pooling.MEAN, **wrong)


def test_a_backend_without_embeddings_fails_the_request_only():
    class Plain(HashBackend):
        def _pool(self, pool, contexts):
            return None

    engine = new_engine(Plain(vocab_size=64, block_size=4))
    event = run(engine, [prompt_of(5)], SamplingParams(max_tokens=0, pooling=Pooling.LAST))["0"]
    assert event.finish_reason is FinishReason.ERROR
    assert run(engine, [prompt_of(5)], SamplingParams(max_tokens=2))["0"].finish_reason is FinishReason.LENGTH
