"""Prefix cache: hashes, salts, hits, and what must never be hit (C098 C100 C101 C103 C104 C106 C107 C109 C110)."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run import Driver, preempt_last
from support.script_backend import HashBackend

from octavo.kv.prefix import PrefixCache, block_hash, extend_block_hashes, root_hash
from octavo.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


# ---------------------------------------------------------------- hashes


def test_equal_hashes_in_processes_with_different_hash_seeds():
    code = "from octavo.kv.prefix import *; print(block_hash(block_hash(root_hash('s'), [1, 2]), [3]).hex())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().strip()) == 64


def test_salt_and_tokens_never_give_the_same_hash_input():
    """C104: a salt that spells the bytes of a block, salts that look like tokens."""
    hashes = {
        block_hash(root_hash("1"), [2]),
        block_hash(root_hash(""), [1, 2]),
        block_hash(root_hash("12"), []),
        block_hash(root_hash(""), [12]),
        block_hash(root_hash(""), [2]),
        root_hash(""),
        root_hash("1"),
        root_hash("root"),
        root_hash("\x01\x00\x00\x00\x02\x00\x00\x00"),
    }
    assert len(hashes) == 9


def test_a_lone_surrogate_in_a_salt_is_just_another_salt():
    assert root_hash("\ud800") != root_hash("\ud801")


def test_hashes_chain_and_extend():
    tokens = list(range(40))
    at_once, in_parts = [], []
    extend_block_hashes(at_once, tokens, 10, 4, "s")
    for n in (1, 1, 4, 10):
        extend_block_hashes(in_parts, tokens, n, 4, "s")
    assert at_once == in_parts
    assert len(set(at_once)) == 10
    changed = []
    extend_block_hashes(changed, [99, *tokens[1:]], 10, 4, "s")
    assert not set(changed) & set(at_once)  # another first token changes every hash after it


def test_of_two_blocks_with_equal_content_the_first_stays():
    cache = PrefixCache()
    cache.register(b"x", 3)
    cache.register(b"x", 5)
    assert cache.find([b"x"], 1) == [3]
    cache.forget(5)
    assert 3 in cache
    cache.forget(3)
    assert cache.find([b"x"], 1) == []
    cache.check(8)


def test_find_stops_at_the_first_gap():
    cache = PrefixCache()
    cache.register(b"a", 0)
    cache.register(b"c", 2)
    assert cache.find([b"a", b"b", b"c"], 3) == [0]
    cache.register(b"b", 1)
    assert cache.find([b"a", b"b", b"c"], 3) == [0, 1, 2]
    assert cache.find([b"a", b"b", b"c"], 2) == [0, 1]


# ---------------------------------------------------------------- hits


@pytest.mark.parametrize("num_prompt", [1, 2, 16, 17, 31, 32, 33, 48])
def test_identical_prompt(num_prompt):
    """C098: all but the last token of the prompt, whose logits are needed."""
    driver = Driver()
    cold, warm = driver.ask(prompt(num_prompt), GREEDY), driver.ask(prompt(num_prompt), GREEDY)
    assert (cold.num_cached, warm.num_cached) == (0, num_prompt - 1)
    assert warm.answer == cold.answer
    assert driver.engine.stats().num_prompt_tokens == num_prompt + 1


@given(st.integers(0, 70), st.integers(1, 40), st.integers(1, 40))
def test_prompts_that_share_k_tokens_hit_k(num_common, num_first, num_second):
    """Whether k falls into a full block of the first prompt, its last block, or what it generated."""
    driver = Driver(HashBackend(keep_trace=False))
    first = [*prompt(num_common), 1, *prompt(num_first, 5)]
    second = [*prompt(num_common), 2, *prompt(num_second, 9)]
    driver.ask(first, GREEDY)
    warm = driver.ask(second, GREEDY)
    assert warm.num_cached == num_common
    assert warm.answer == Driver(HashBackend(keep_trace=False)).ask(second, GREEDY).answer
    again = driver.ask(second[:-1], GREEDY)  # its last token is computed, whatever is cached
    assert again.num_cached == len(second) - 2


def test_without_prefix_caching_nothing_is_hit_or_kept():
    driver = Driver(enable_prefix_caching=False)
    outcomes = [driver.ask(prompt(50), GREEDY) for _ in range(2)]
    assert [o.num_cached for o in outcomes] == [0, 0]
    stats = driver.engine.stats()
    assert (stats.num_cached_blocks, stats.num_query_tokens, stats.num_prompt_tokens) == (0, 0, 100)


def test_salts_isolate():
    """C103."""
    driver = Driver()
    salts = ["a", "a", "b", "", ""]
    outcomes = [driver.ask(prompt(40), GREEDY, cache_salt=salt) for salt in salts]
    assert [o.num_cached for o in outcomes] == [0, 39, 0, 0, 39]
    assert len({tuple(o.token_ids) for o in outcomes}) == 1


def test_generated_tokens_are_reusable_in_the_next_turn():
    """C110: 20 + 30 tokens, of which the last has no KV: 49 positions."""
    driver = Driver()
    turn1 = driver.ask(prompt(20), SamplingParams(temperature=0, max_tokens=30))
    turn2 = [*prompt(20), *turn1.token_ids, 1, 2, 3, 4, 5]
    warm = driver.ask(turn2, GREEDY)
    assert warm.num_cached == 49
    assert warm.answer == Driver().ask(turn2, GREEDY).answer


def test_a_reply_that_ends_on_a_block_border_is_not_hit_to_its_last_token():
    driver = Driver()
    turn1 = driver.ask(prompt(16), SamplingParams(temperature=0, max_tokens=16))
    warm = driver.ask([*prompt(16), *turn1.token_ids, 9], GREEDY)
    assert warm.num_cached == 31


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_aborted_prefill_leaves_only_what_was_written(num_steps):
    """C107."""
    driver = Driver(max_num_batched_tokens=32)
    request_id = driver.add(prompt(400))
    for _ in range(num_steps):
        driver.step()
    driver.engine.abort(request_id)
    driver.run()
    warm = driver.ask(prompt(400), GREEDY)
    assert warm.num_cached == 32 * num_steps
    assert warm.token_ids == Driver().ask(prompt(400), GREEDY).token_ids


def test_blocks_are_findable_only_after_the_step_that_wrote_them():
    """Two prompts with a common beginning that is not worth waiting for, in the same step: each computes its own."""
    driver = Driver(max_num_batched_tokens=512)
    first, second = driver.add([*prompt(16), *prompt(60, 3)]), driver.add([*prompt(16), *prompt(60, 4)])
    driver.run()
    assert driver.outcomes[first, 0].num_cached == driver.outcomes[second, 0].num_cached == 0
    assert driver.engine.stats().num_prompt_tokens == 152


@pytest.mark.parametrize("budget", [16, 24, 512])
@pytest.mark.parametrize("num_prompt", [2, 10, 16, 33, 100])
def test_identical_prompts_that_arrive_together_are_computed_once(num_prompt, budget):
    """The others wait for the first, with nobody behind them waiting for it."""
    driver = Driver(max_num_batched_tokens=budget)
    ids = [driver.add(prompt(num_prompt)) for _ in range(5)]
    other = driver.add(prompt(9, 77))
    driver.run()
    assert driver.engine.stats().num_prompt_tokens == num_prompt + 4 + 9
    assert [driver.outcomes[i, 0].num_cached for i in ids] == [0, *[num_prompt - 1] * 4]
    assert driver.outcomes[other, 0].num_cached == 0
    assert len({tuple(driver.outcomes[i, 0].token_ids) for i in ids}) == 1


def test_one_that_waits_for_a_prompt_does_not_hold_up_the_line():
    driver = Driver(max_num_batched_tokens=512)
    first, twin, other = driver.add(prompt(40)), driver.add(prompt(40)), driver.add(prompt(40, 5))
    driver.step()
    assert [bool(driver.outcomes[i, 0].token_ids) for i in (first, twin, other)] == [True, False, True]
    driver.run()


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_who_waits_for_a_prompt_computes_it_if_its_computer_goes(end):
    driver = Driver(max_num_batched_tokens=32)
    first, twin = driver.add(prompt(100)), driver.add(prompt(100))
    driver.step()
    if end == "abort":
        driver.engine.abort(first)
    else:
        preempt_last(driver.engine)
    driver.run()
    assert driver.outcomes[twin, 0].answer == Driver().ask(prompt(100)).answer


def test_nobody_waits_for_another_tenants_prompt():
    driver = Driver(max_num_batched_tokens=512)
    ids = [driver.add(prompt(40), cache_salt=salt) for salt in ("a", "b", "a")]
    driver.step()
    assert [bool(driver.outcomes[i, 0].token_ids) for i in ids] == [True, True, False]
    driver.run()
    assert [driver.outcomes[i, 0].num_cached for i in ids] == [0, 0, 39]


def test_a_failed_step_leaves_nothing_findable():
    """C107: the fault of chunk 3 may have written anything anywhere."""
    driver = Driver(HashBackend(fail_steps={2}), max_num_batched_tokens=32)
    assert driver.ask(prompt(400), GREEDY).error is not None
    warm = driver.ask(prompt(400), GREEDY)
    assert warm.num_cached == 0
    assert warm.token_ids == Driver().ask(prompt(400), GREEDY).token_ids


def test_a_failed_step_also_clears_what_others_had_cached():
    driver = Driver(HashBackend(fail_steps={6}))
    assert [driver.ask(prompt(40), GREEDY).num_cached for _ in range(2)] == [0, 39]  # fails in its third step
    assert driver.ask(prompt(40), GREEDY).num_cached == 0


def test_a_failed_row_leaves_none_of_its_blocks_findable():
    """What made the row fail may already be in KV that an earlier step wrote."""
    driver = Driver(HashBackend(row_error=lambda row: "logits are NaN" if row.start == 42 else None))
    outcome = driver.ask(prompt(40), SamplingParams(temperature=0, max_tokens=9))
    assert (len(outcome.token_ids), outcome.error) == (3, "logits are NaN")
    assert driver.engine.stats().num_cached_blocks == 0


def test_a_block_in_use_is_never_evicted():
    """C109: one long request on prefix A while fifty others churn through a small pool."""
    params = SamplingParams(temperature=0, max_tokens=120)
    solo = Driver().ask(prompt(64), params)
    driver = Driver(num_blocks=16, max_num_seqs=3)
    request_id = driver.add(prompt(64), params)
    for i in range(50):
        driver.add(prompt(30, start=i + 1), SamplingParams(temperature=0, max_tokens=3))
    driver.run()
    assert driver.outcomes[request_id, 0].token_ids == solo.token_ids


def test_cached_tokens_are_those_of_the_first_admission():
    """C100: a warm request that is preempted later still reports what it found at first."""
    driver = Driver(num_blocks=12, max_num_seqs=4, admission="greedy")
    driver.ask(prompt(33), GREEDY)
    params = SamplingParams(temperature=0, max_tokens=100)
    ids = [driver.add(prompt(33), params), driver.add(prompt(33), params)]
    driver.run()
    assert driver.engine.stats().num_preemptions > 0
    assert [driver.outcomes[i, 0].num_cached for i in ids] == [32, 32]


@pytest.mark.parametrize("mode", ["full", "tail"])
def test_hits_of_preempted_requests_do_not_count_as_hit_rate(mode):
    """C101."""
    driver = Driver(num_blocks=14, max_num_seqs=8, admission="greedy", preemption_mode=mode)
    for i in range(6):
        driver.add([(i * 19 + 31 * j) % 128 for j in range(20)], SamplingParams(temperature=0, max_tokens=60))
    driver.run()
    stats = driver.engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_readmission_hit_tokens > 0) == (mode == "full")  # with tail only what is gone is lost
    assert stats.num_hit_tokens == 0
    assert stats.num_query_tokens == 6 * 20
    assert all(o.num_cached == 0 for o in driver.outcomes.values())
