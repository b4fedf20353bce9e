"""When a sequence ends, and why (tokens part of C010 C011 C014; C053 C056 C059)."""

import pytest
from support.run import Driver
from support.script_backend import ScriptBackend

from octavo.request import FinishReason, SamplingParams

EOS = 2
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ask(script, num_prompt=3, eos=frozenset({EOS}), end_id=None, config=None, **params):
    driver = Driver(ScriptBackend(script=script, end_id=end_id), **(config or {}))
    return driver.ask([9] * num_prompt, SamplingParams(temperature=0, **params), eos_token_ids=eos)


def told(outcome):
    return outcome.token_ids, outcome.finish_reason, outcome.stop_reason


def test_max_tokens():
    assert told(ask([10, 11, 12, 13], max_tokens=3)) == ([10, 11, 12], LENGTH, None)


def test_eos_ends_and_is_reported():
    assert told(ask([10, EOS, 12], max_tokens=9)) == ([10, EOS], STOP, None)


def test_any_of_several_eos_ids_ends():
    assert told(ask([10, 7, 12], eos=frozenset({2, 7}), max_tokens=9)) == ([10, 7], STOP, None)


def test_ignore_eos():
    assert told(ask([10, EOS, 12], max_tokens=3, ignore_eos=True)) == ([10, EOS, 12], LENGTH, None)


def test_ignore_eos_does_not_ban_it_before_min_tokens():
    assert told(ask([EOS, EOS, 12], max_tokens=3, min_tokens=3, ignore_eos=True)) == ([EOS, EOS, 12], LENGTH, None)


def test_stop_token_ends_and_is_the_stop_reason():
    assert told(ask([10, 50, 12], max_tokens=9, stop_token_ids=[50, 51])) == ([10, 50], STOP, 50)


def test_stop_token_works_with_ignore_eos():
    assert told(ask([EOS, 50], max_tokens=9, ignore_eos=True, stop_token_ids=[50])) == ([EOS, 50], STOP, 50)
    assert told(ask([EOS], max_tokens=9, ignore_eos=True, stop_token_ids=[EOS])) == ([EOS], STOP, EOS)


@pytest.mark.parametrize("last", [EOS, 50])
def test_stop_wins_over_length_on_the_same_token(last):
    """C014."""
    outcome = ask([10, 11, last], max_tokens=3, stop_token_ids=[50])
    assert outcome.finish_reason is STOP
    assert len(outcome.token_ids) == 3


def test_min_tokens_bans_every_eos_id():
    """C011: EOS 2 and 7, the second made irresistible: five other tokens, then EOS."""
    outcome = ask([], eos=frozenset({2, 7}), logit_bias={7: 100}, min_tokens=5, max_tokens=8)
    assert len(outcome.token_ids) == 6
    assert not {2, 7} & set(outcome.token_ids[:5])
    assert told(outcome)[1:] == (STOP, None)
    assert outcome.token_ids[5] == 7


def test_min_tokens_bans_stop_tokens():
    outcome = ask([50] * 6, stop_token_ids=[50], min_tokens=4, max_tokens=6)
    assert 50 not in outcome.token_ids[:4]
    assert told(outcome)[1:] == (STOP, 50)
    assert len(outcome.token_ids) == 5


def test_max_tokens_below_min_tokens_still_ends():
    assert told(ask([EOS] * 9, min_tokens=9, max_tokens=2))[1] is LENGTH


@pytest.mark.parametrize("num_prompt", [1, 16, 17, 63, 64])
def test_max_tokens_0_generates_nothing(num_prompt):
    """C053, C059: even a prompt that fills the context can be scored."""
    outcome = ask([10], num_prompt, max_tokens=0, prompt_logprobs=1, config={"max_model_len": 64})
    assert told(outcome) == ([], LENGTH, None)
    assert len(outcome.prompt_logprobs) == num_prompt - 1


def test_max_tokens_0_over_chunks_ends_once():
    outcome = ask([10], 50, max_tokens=0, config={"max_num_batched_tokens": 16})
    assert told(outcome) == ([], LENGTH, None)
    assert outcome.num_events == 1


@pytest.mark.parametrize("max_tokens", [24, 25, 10**9, 2**63, None])
def test_max_tokens_is_clamped_to_the_context(max_tokens):
    """C056: L = 64, P = 40."""
    outcome = ask([], 40, max_tokens=max_tokens, config={"max_model_len": 64})
    assert (len(outcome.token_ids), outcome.finish_reason) == (24, LENGTH)


def test_prompt_of_context_minus_one_gives_one_token():
    """C059."""
    outcome = ask([], 63, max_tokens=5, config={"max_model_len": 64})
    assert (len(outcome.token_ids), outcome.finish_reason) == (1, LENGTH)


def test_samples_end_one_by_one():
    """C088: sample 1 ends after 2 tokens, the others after 6; the request lives until the last."""

    def script(spec):
        return EOS if spec.sample_index == 1 and len(spec.token_ids) - spec.num_prompt == 1 else 10

    driver = Driver(ScriptBackend(script=script))
    params = SamplingParams(n=3, max_tokens=6, seed=0)
    driver.add([9] * 3, params, request_id="r", eos_token_ids=frozenset({EOS}))
    driver.run()
    assert [len(driver.outcomes["r", i].token_ids) for i in range(3)] == [6, 2, 6]
    assert [driver.outcomes["r", i].finish_reason for i in range(3)] == [LENGTH, STOP, LENGTH]
    assert driver.engine.stats().num_finished[LENGTH] == 1  # one request, by its gravest reason


def test_scripted_logprobs_are_a_distribution():
    """The test backend itself: chosen token, rank and top list from one log-softmax."""
    outcome = ask([10, 11], max_tokens=2, logprobs=3, logit_bias={5: 100})
    assert outcome.token_ids == [5, 5]
    first = outcome.logprobs[0]
    assert first.token_id == 5
    assert first.rank == 7  # 10 is first by script, then 0 .. 4 by ties, then 5
    assert [i for i, _ in first.top] == [10, 0, 1]
    assert first.top[0][1] == pytest.approx(0, abs=1e-9)
