"""Samples of one request: the prompt once, blocks by reference, copies on writing (C089, C091, C119, law 1)."""

import pytest
from support.run import Driver, check_books, preempt_last
from support.script_backend import HashBackend

from octavo.errors import RequestError
from octavo.request import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


def seeded(n, max_tokens=8, **kwargs):
    return SamplingParams(n=n, max_tokens=max_tokens, seed=5, **kwargs)


def used_blocks(driver):
    return driver.engine.scheduler.tables.pool.num_used


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_samples_share_the_prompt(caching, budget):
    """C089: 100 prompt tokens computed; after the first decode step 6 shared blocks and 4 private tails."""
    driver = Driver(enable_prefix_caching=caching, max_num_batched_tokens=budget)
    driver.add(prompt(100), seeded(4))
    while driver.engine.stats().num_generated_tokens < 4:
        driver.step()
    assert driver.engine.stats().num_generated_tokens == 4  # all first tokens come from one row of logits
    assert used_blocks(driver) == 7
    driver.step()
    assert used_blocks(driver) == 10
    driver.run()
    stats = driver.engine.stats()
    assert stats.num_prompt_tokens == 100
    assert stats.num_sibling_hit_tokens == 300
    assert (stats.num_hit_tokens, stats.num_query_tokens) == (0, 100 if caching else 0)
    assert {o.num_cached for o in driver.outcomes.values()} == {0}
    assert len({tuple(o.token_ids) for o in driver.outcomes.values()}) == 4


def test_a_prompt_that_fills_its_blocks_is_never_copied():
    copies = []

    class Backend(HashBackend):
        def execute(self, plan):
            copies.extend(plan.copies)
            return super().execute(plan)

    driver = Driver(Backend())
    driver.add(prompt(96), seeded(4))
    driver.run()
    assert copies == []
    driver.add(prompt(100, 1), seeded(4))
    driver.run()
    assert len(copies) == 3  # the last holder writes in place


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 50])
def test_sample_i_of_any_n_equals_sample_i_alone(caching, max_num_seqs, num_prompt):
    """Law 1: whether it forked, started later from a sibling's blocks, or ran when all others had ended."""
    wanted = Driver()
    wanted.add(prompt(num_prompt), seeded(1), request_id="one")
    wanted.add(prompt(num_prompt), seeded(6), request_id="six")
    wanted.run()
    driver = Driver(enable_prefix_caching=caching, max_num_seqs=max_num_seqs)
    driver.add(prompt(num_prompt), seeded(4), request_id="r")
    driver.run()
    assert driver.outcomes["r", 0].answer == wanted.outcomes["one", 0].answer
    for i in range(4):
        assert driver.outcomes["r", i].answer == wanted.outcomes["six", i].answer


@pytest.mark.parametrize("caching", [True, False])
def test_samples_beyond_the_places_start_from_a_siblings_blocks(caching):
    """Two places: two samples fork, each of the others computes the last prompt token again."""
    driver = Driver(enable_prefix_caching=caching, max_num_seqs=2)
    params = SamplingParams(n=4, max_tokens=8, seed=5, min_tokens=8)
    driver.add(prompt(100), params, request_id="r")
    while not driver.outcomes["r", 0].token_ids:
        driver.step()
    driver.engine.finish_sequence("r", 0)
    driver.run()
    computed = driver.engine.stats().num_prompt_tokens
    assert computed <= 100 + 2 * 4 if caching else computed <= 101 + 100


def test_a_sibling_starts_while_another_runs():
    driver = Driver(max_num_seqs=2, enable_prefix_caching=False)
    driver.add(prompt(100), seeded(3, 20), request_id="r")
    driver.step()
    driver.step()
    driver.engine.finish_sequence("r", 0)
    driver.run()
    assert driver.engine.stats().num_prompt_tokens == 101
    wanted = Driver()
    wanted.add(prompt(100), seeded(3, 20), request_id="r")
    wanted.run()
    assert driver.outcomes["r", 2].answer == wanted.outcomes["r", 2].answer


def test_others_are_admitted_while_samples_wait_for_their_prompt():
    """They hold up nobody, and their places stay reserved."""
    driver = Driver(max_num_seqs=6)
    driver.add(prompt(100), seeded(4), request_id="n")
    others = [driver.add(prompt(9, i + 1)) for i in range(4)]
    driver.step()
    assert [bool(driver.outcomes[i, 0].token_ids) for i in others] == [True, True, False, False]
    assert all(driver.outcomes["n", i].token_ids for i in range(4))
    driver.run()


@pytest.mark.parametrize("mode", ["full", "tail"])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_that_fit_only_while_shared(caching, mode):
    """C119: outputs equal those of a large pool, and no sibling's blocks are freed with another's."""
    params = seeded(4, 40)
    large, small = Driver(), Driver(num_blocks=9, enable_prefix_caching=caching, preemption_mode=mode)
    for driver in (large, small):
        driver.add(prompt(70), params, request_id="r")
        driver.run()
    assert small.engine.stats().num_preemptions > 0
    assert [small.outcomes["r", i].answer for i in range(4)] == [large.outcomes["r", i].answer for i in range(4)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("when", [[2], [3], [1, 2, 3, 4], [4, 4, 4], [2, 2, 2, 2]], ids=str)
def test_preempting_siblings_at_any_time_changes_nothing(when, caching):
    wanted = Driver()
    wanted.add(prompt(50), seeded(4, 12), request_id="r")
    wanted.run()
    driver = Driver(enable_prefix_caching=caching, max_num_batched_tokens=24)
    driver.add(prompt(50), seeded(4, 12), request_id="r")

    def preempt():
        for _ in range(when.count(driver.num_steps)):
            if driver.engine.scheduler.running:
                preempt_last(driver.engine)

    driver.run(each=preempt)
    assert driver.engine.stats().num_preemptions > 0
    for i in range(4):
        assert driver.outcomes["r", i].answer == wanted.outcomes["r", i].answer


def test_a_fork_aborted_while_its_first_token_is_drawn():
    driver = Driver()
    driver.add(prompt(20), seeded(3), request_id="r")
    scheduler = driver.engine.scheduler
    plan = scheduler.plan(0.0)
    assert len(plan.rows[0].forks) == 2
    result = driver.engine.backend.execute(plan)
    driver.engine.finish_sequence("r", 1)
    events = scheduler.commit(plan, result)
    assert [e.index for e in events] == [0, 2]
    assert events[1].token_ids == (result.rows[0].forks[1].token_id,)
    check_books(driver.engine)
    driver.run()


def test_a_row_error_ends_the_forks_too():
    driver = Driver(HashBackend(row_error=lambda row: "logits are NaN" if row.forks else None))
    driver.add(prompt(20), seeded(3), request_id="r")
    driver.run()
    assert [driver.outcomes["r", i].error for i in range(3)] == ["logits are NaN"] * 3


def test_first_tokens_that_end_some_samples():
    """EOS as the first token of some: the others go on from blocks that the ended ones shared."""
    eos = frozenset(range(64))
    driver = Driver()
    driver.add(prompt(20), seeded(16, 5), request_id="r", eos_token_ids=eos)
    driver.step()
    ended = sum(o.finish_reason is FinishReason.STOP for o in driver.outcomes.values())
    assert 0 < ended < 16
    driver.run()


def test_prompt_scoring_without_an_answer_runs_once():
    driver = Driver()
    driver.add(prompt(40), SamplingParams(n=3, max_tokens=0, prompt_logprobs=0), request_id="r")
    driver.run()
    assert [driver.outcomes["r", i].finish_reason for i in range(3)] == [FinishReason.LENGTH] * 3
    assert driver.engine.stats().num_prompt_tokens == 40


def test_cached_tokens_of_samples_are_those_of_the_first():
    driver = Driver()
    driver.ask(prompt(40), GREEDY)
    driver.add(prompt(40), SamplingParams(n=3, max_tokens=2, seed=1), request_id="n")
    driver.run()
    assert len({driver.outcomes["n", i].num_cached for i in range(3)}) == 1
    assert driver.outcomes["n", 0].num_cached >= 32


# ---------------------------------------------------------------- best_of


def test_best_of_runs_that_many_samples_with_logprobs():
    """C068: ranking needs the logprobs of the drawn tokens, whatever the client asked for."""
    driver = Driver()
    driver.add(prompt(20), SamplingParams(n=2, best_of=5, max_tokens=3, seed=1), request_id="r")
    driver.run()
    assert len(driver.outcomes) == 5
    assert all(len(o.logprobs) == 3 for o in driver.outcomes.values())


def test_best_of_equal_to_n_changes_nothing():
    plain, same = Driver(), Driver()
    plain.add(prompt(20), SamplingParams(n=2, max_tokens=3, seed=1), request_id="r")
    same.add(prompt(20), SamplingParams(n=2, best_of=2, max_tokens=3, seed=1), request_id="r")
    plain.run()
    same.run()
    assert [plain.outcomes["r", i].answer for i in range(2)] == [same.outcomes["r", i].answer for i in range(2)]


@pytest.mark.parametrize(("n", "best_of"), [(2, 1), (1, 0), (1, 129), (1, 10**9), (1, 2.0), (1, True)])
def test_best_of_is_checked(n, best_of):
    with pytest.raises(RequestError) as caught:
        SamplingParams(n=n, best_of=best_of)
    assert caught.value.param == "best_of"
