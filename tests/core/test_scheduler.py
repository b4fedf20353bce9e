"""Budget, admission, preemption, order (C112 C113 C115 C116 C118 C121, C085, C086)."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run import Driver, preempt_last
from support.script_backend import HashBackend

from octavo.errors import ConfigError, NeverFitsError
from octavo.policies import AGEING_SECONDS, admission_order
from octavo.request import FinishReason, SamplingParams


def greedy(max_tokens=4, **kwargs):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


def tokens_per_step(driver):
    return [sum(row.num_tokens for row in step) for step in driver.engine.backend.trace]


# ---------------------------------------------------------------- budget


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_prompt_does_not_stop_running_answers(policy):
    """C121: four decodes in every step, the rest of the budget for the prompt, done in ceil(2000 / 60) steps.

    Also where the prompt comes before the answers in line.
    """
    driver = Driver(max_model_len=4096, max_num_batched_tokens=64, scheduling_policy=policy)
    for i in range(4):
        driver.add(prompt(8, i), greedy(500), priority=5)
    while driver.engine.stats().num_generated_tokens < 8:
        driver.step()
    before = driver.num_steps
    request_id = driver.add(prompt(2000), greedy(2))
    while not driver.outcomes[request_id, 0].token_ids:
        driver.step()
    steps = driver.engine.backend.trace[before:]
    assert len(steps) == 34
    assert all(sum(row.num_tokens for row in step) <= 64 for step in steps)
    assert all([row.num_tokens for row in step[:4]] == [1, 1, 1, 1] for step in steps)
    assert all(sum(row.sampled for row in step) >= 4 for step in steps)


def test_no_step_exceeds_the_budget_even_if_more_sequences_run():
    driver = Driver(max_num_batched_tokens=4, max_num_seqs=8)
    ids = [driver.add(prompt(3, i), greedy(6)) for i in range(8)]
    driver.run()
    assert max(tokens_per_step(driver)) <= 4
    assert all(len(driver.outcomes[i, 0].token_ids) == 6 for i in ids)


def test_at_most_max_num_seqs_run():
    driver = Driver(max_num_seqs=3)
    for i in range(7):
        driver.add(prompt(5, i), greedy(5))
    driver.run(each=lambda: None)
    assert max(len(step) for step in driver.engine.backend.trace) == 3


def test_tokens_of_a_prompt_are_sampled_only_at_its_end():
    driver = Driver(max_num_batched_tokens=16)
    driver.ask(prompt(50), greedy(2))
    rows = [step[0] for step in driver.engine.backend.trace]
    assert [(r.start, r.num_tokens, r.sampled) for r in rows] == [
        (0, 16, False),
        (16, 16, False),
        (32, 16, False),
        (48, 2, True),
        (50, 1, True),
    ]


def test_blocks_are_allocated_on_demand():
    driver = Driver()
    driver.add(prompt(15), greedy(20))
    used = []
    driver.run(each=lambda: used.append(driver.engine.scheduler.tables.pool.num_used))
    # KV of 15, 16, 17, ... tokens; the last token has none, and after it nothing is held.
    assert used == [1, 1, *[2] * 16, 3, 0]


# ---------------------------------------------------------------- admission


def test_a_request_that_never_fits_is_refused_with_the_arithmetic():
    """C112: 10 blocks, 160 tokens."""
    driver = Driver(num_blocks=10)
    with pytest.raises(NeverFitsError, match=r"200 tokens .* 13 KV blocks of 16 tokens.* 10 "):
        driver.add(prompt(200))
    with pytest.raises(NeverFitsError):
        driver.add(prompt(160))
    small = driver.add(prompt(10))
    driver.run()
    assert driver.outcomes[small, 0].finish_reason is FinishReason.LENGTH


def test_a_request_that_outgrows_the_pool_ends_with_length():
    """C112: the last token needs no KV, so 161 tokens fit; with others around exactly the same."""
    for others in (0, 3):
        driver = Driver(num_blocks=10)
        request_id = driver.add(prompt(150), greedy(100))
        for i in range(others):
            driver.add(prompt(40, i), greedy(30))
        driver.run()
        outcome = driver.outcomes[request_id, 0]
        assert (len(outcome.token_ids), outcome.finish_reason) == (11, FinishReason.LENGTH)
        assert len(driver.outcomes) == 1 + others


def test_cached_blocks_count_as_free():
    """C113: the pool is full of cached blocks, nothing runs, the front of the line needs most of it."""
    driver = Driver(num_blocks=8)
    driver.ask(prompt(100), greedy(28))
    assert driver.engine.stats().num_cached_blocks == 8
    a, b = driver.add(prompt(110, 1), greedy(2)), driver.add(prompt(20, 2), greedy(2))
    driver.step()
    assert len(driver.outcomes[a, 0].token_ids) == 1
    driver.run()
    assert len(driver.outcomes[b, 0].token_ids) == 2


def test_nobody_overtakes():
    """The front of the line does not fit beside what runs; the small one behind it waits all the same."""
    driver = Driver(num_blocks=10)
    first = driver.add(prompt(80), greedy(20))
    driver.step()
    big, small = driver.add(prompt(100, 1), greedy(2)), driver.add(prompt(5, 2), greedy(2))
    while not driver.outcomes[first, 0].finish_reason:
        driver.step()
        assert not driver.outcomes[big, 0].token_ids
        assert not driver.outcomes[small, 0].token_ids
    driver.run()


def test_admission_covers_the_whole_prompt_and_what_others_still_need():
    """C116: chunks of 16 of two prompts that need 60 % of the pool each never run side by side."""
    driver = Driver(num_blocks=10, max_num_batched_tokens=16)
    ids = [driver.add(prompt(90, i), greedy(4)) for i in range(2)]
    driver.run()
    assert driver.engine.stats().num_preemptions == 0
    assert all(len(driver.outcomes[i, 0].token_ids) == 4 for i in ids)
    assert driver.num_steps == 2 * (6 + 3)


def test_one_block_is_left_to_spare():
    """A holds 3 of 4 blocks. B would just fit, and would be preempted as soon as A needs its fourth."""
    driver = Driver(num_blocks=4)
    first = driver.add(prompt(47), greedy(10))
    second = driver.add(prompt(10, 1), greedy(2))
    while not driver.outcomes[first, 0].finish_reason:
        driver.step()
        assert not driver.outcomes[second, 0].token_ids
    driver.run()
    assert driver.engine.stats().num_preemptions == 0


def test_twenty_large_requests_make_progress():
    """C116: bounded steps and preemptions, and the first in line is never preempted."""
    driver = Driver(num_blocks=10, max_num_batched_tokens=16, admission="greedy")
    params = greedy(40)
    for i in range(20):
        driver.add(prompt(60, i), params)
    sequential = 20 * (4 + 39)

    def first_was_not_preempted():
        running = driver.engine.scheduler.running
        waiting = driver.engine.scheduler.waiting
        if running and waiting:
            assert running[0].order < waiting[0].order

    driver.run(each=first_was_not_preempted)
    assert driver.num_steps <= 2 * sequential
    assert driver.engine.stats().num_preemptions <= 40


# ---------------------------------------------------------------- preemption


def force_preemption(driver):
    while driver.engine.scheduler.running:
        preempt_last(driver.engine)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "when",
    [[1], [2], [7], [8], [8, 9], [9, 10, 11], [3, 12, 13, 30], [2, 11, 20, 29]],
    ids=str,
)
def test_preemption_at_any_time_changes_nothing(when, caching):
    """C115: before the first token, at it, on a block border, twice in a row, in the middle of a recompute."""
    params = SamplingParams(max_tokens=30, seed=11, logprobs=2, frequency_penalty=0.5)
    solo = Driver().ask(prompt(100), params)
    driver = Driver(max_num_batched_tokens=16, enable_prefix_caching=caching)
    request_id = driver.add(prompt(100), params)

    def preempt():
        if driver.num_steps in when and driver.engine.scheduler.running:
            force_preemption(driver)

    driver.run(each=preempt)
    assert driver.engine.stats().num_preemptions == len(when)
    assert driver.outcomes[request_id, 0].answer == solo.answer


def test_every_position_is_drawn_once():
    """C074: a recompute restores, it never draws again."""
    drawn = []

    class Backend(HashBackend):
        def logits(self, context, spec):
            drawn.append(spec.position)
            return super().logits(context, spec)

    driver = Driver(Backend(), max_num_batched_tokens=16)
    driver.add(prompt(40), SamplingParams(max_tokens=20, seed=1))
    driver.run(each=lambda: force_preemption(driver) if driver.num_steps in (2, 9, 12) else None)
    assert drawn == list(range(40, 60))


@pytest.mark.parametrize(
    "params",
    [
        greedy(30, frequency_penalty=1.0, min_tokens=20),  # C077
        SamplingParams(max_tokens=30, seed=4, repetition_penalty=1.3, presence_penalty=1.0),
        SamplingParams(max_tokens=30, seed=4, logprobs=3),
    ],
)
def test_a_small_pool_changes_nothing(params):
    """C077, C115: several requests of which the later ones are preempted, some of them twice."""
    driver = Driver(num_blocks=7, max_num_batched_tokens=24, admission="greedy")
    ids = [driver.add(prompt(20, i), params, eos_token_ids=frozenset({3, 5})) for i in range(6)]
    driver.run()
    assert driver.engine.stats().num_preemptions > 0
    for i, request_id in enumerate(ids):
        solo = Driver().ask(prompt(20, i), params, eos_token_ids=frozenset({3, 5}))
        assert driver.outcomes[request_id, 0].answer == solo.answer


def test_one_that_still_catches_up_gives_way_within_the_step():
    """Step 3: three answers each need a block, two are free, the long prompt that has its turn later goes."""
    driver = Driver(num_blocks=8, max_num_batched_tokens=48, admission="greedy")
    short = [driver.add(prompt(15, i), greedy(6)) for i in range(3)]
    long = driver.add(prompt(60, 9), greedy(6))
    for _ in range(3):
        driver.step()
    assert [row.num_tokens for row in driver.engine.backend.trace[2]] == [1, 1, 1]
    assert driver.engine.stats().num_preemptions == 1
    driver.run()
    for i, request_id in enumerate(short):
        assert driver.outcomes[request_id, 0].answer == Driver().ask(prompt(15, i), greedy(6)).answer
    assert driver.outcomes[long, 0].answer == Driver().ask(prompt(60, 9), greedy(6)).answer


def test_preemption_is_logged_now_and_then(caplog):
    driver = Driver()
    with caplog.at_level(logging.WARNING, logger="octavo.preemption"):
        driver.add(prompt(20), greedy(60))
        driver.run(each=lambda: force_preemption(driver) if driver.num_steps < 40 else None)
    assert driver.engine.stats().num_preemptions == 39
    assert len(caplog.records) == 6  # 1, 2, 4, 8, 16, 32
    assert "256 blocks" in caplog.text


# ---------------------------------------------------------------- prompt logprobs


SCORE = greedy(1, prompt_logprobs=1, logprobs=1)


def scores(driver, num_tokens=100, params=SCORE, each=None):
    request_id = driver.add(prompt(num_tokens), params)
    driver.run(each=each)
    return driver.outcomes[request_id, 0]


@pytest.mark.parametrize("budget", [1, 7, 16, 33, 99, 100, 512])
def test_prompt_logprobs_do_not_depend_on_chunks(budget):
    """C085."""
    whole = scores(Driver())
    assert [lp.token_id for lp in whole.prompt_logprobs] == prompt(100)[1:]
    assert all(len(lp.top) == 1 for lp in whole.prompt_logprobs)
    assert scores(Driver(max_num_batched_tokens=budget)).answer == whole.answer


def test_prompt_logprobs_with_a_warm_cache():
    """C086: nothing is looked up, and that does not enter the hit rate."""
    driver = Driver()
    first, second = scores(driver), scores(driver)
    assert second.answer == first.answer
    assert (first.num_cached, second.num_cached) == (0, 0)
    assert driver.engine.stats().num_query_tokens == 0
    plain = driver.ask(prompt(100))
    assert plain.num_cached == 99  # it did register its blocks
    assert scores(driver).answer == first.answer
    assert (driver.engine.stats().num_query_tokens, driver.engine.stats().num_hit_tokens) == (100, 99)


@pytest.mark.parametrize("when", [[4], [1, 2], [4, 5, 6], [6], [7]], ids=str)
@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_over_preemption(when, caching):
    """C118: preempted at chunk 4 and elsewhere; each value is reported once."""
    params = greedy(3, prompt_logprobs=2)
    driver = Driver(max_num_batched_tokens=16, enable_prefix_caching=caching)
    outcome = scores(driver, params=params, each=lambda: driver.num_steps in when and force_preemption(driver))
    assert driver.engine.stats().num_preemptions == len(when)
    assert outcome.answer == scores(Driver(), params=params).answer


def test_prompt_logprobs_over_preemption_with_other_chunk_borders():
    """Chunks of 15 beside an answer, then of 16 without it: the chunk that straddles scores some twice."""
    driver = Driver(max_num_batched_tokens=16, enable_prefix_caching=False)
    driver.add(prompt(1, 5), greedy(4))
    outcome = scores(driver, each=lambda: driver.num_steps == 4 and force_preemption(driver))
    assert driver.engine.backend.trace[3][1].start == 45
    assert outcome.answer == scores(Driver()).answer


def test_prompt_logprobs_come_with_the_first_sample_only():
    driver = Driver()
    driver.add(prompt(40), SamplingParams(n=3, max_tokens=2, seed=0, prompt_logprobs=0), request_id="n")
    driver.run()
    assert [len(driver.outcomes["n", i].prompt_logprobs) for i in range(3)] == [39, 0, 0]


def test_prompt_of_one_token_has_no_prompt_logprobs():
    assert scores(Driver(), num_tokens=1).prompt_logprobs == []


# ---------------------------------------------------------------- order


def test_unknown_policy():
    with pytest.raises(ConfigError, match="fcfs, priority"):
        admission_order("random")


def order_of_finish(driver, ids):
    last = {}
    driver.run(each=lambda: [last.setdefault(i, driver.num_steps) for i in ids if driver.outcomes[i, 0].finish_reason])
    return sorted(ids, key=last.__getitem__)


def test_priority_goes_before_arrival():
    driver = Driver(max_num_seqs=1, scheduling_policy="priority")
    ids = [driver.add(prompt(5, i), greedy(3), request_id=str(p), priority=p) for i, p in enumerate((5, 0, -2, 3))]
    assert order_of_finish(driver, ids) == ["-2", "0", "3", "5"]


def test_fcfs_ignores_priority():
    driver = Driver(max_num_seqs=1)
    ids = [driver.add(prompt(5, i), greedy(3), priority=-i) for i in range(3)]
    assert order_of_finish(driver, ids) == ids


def test_a_higher_priority_displaces_a_lower_one():
    driver = Driver(max_num_seqs=2, scheduling_policy="priority")
    low = [driver.add(prompt(20, i), greedy(20), priority=1) for i in range(2)]
    for _ in range(3):
        driver.step()
    high = driver.add(prompt(20, 9), greedy(5), priority=0)
    driver.step()
    assert len(driver.outcomes[high, 0].token_ids) == 1
    assert order_of_finish(driver, [*low, high]) == [high, *low]
    assert driver.engine.stats().num_preemptions == 1
    assert driver.outcomes[low[1], 0].token_ids == Driver().ask(prompt(20, 1), greedy(20)).token_ids


def test_the_budget_of_one_displaced_goes_to_the_one_before_it():
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=8, scheduling_policy="priority")
    for i in range(2):
        driver.add(prompt(3, i), greedy(20), priority=1)
    driver.step()
    driver.add(prompt(20, 9), greedy(5), priority=0)
    driver.step()
    assert [row.num_tokens for row in driver.engine.backend.trace[1]] == [1, 7]
    driver.run()


def test_nothing_is_displaced_in_vain():
    """Not even all that comes later in line would make room."""
    driver = Driver(num_blocks=10, scheduling_policy="priority")
    driver.add(prompt(100), greedy(30), priority=0)
    driver.add(prompt(20, 1), greedy(9), priority=9)
    driver.step()
    driver.add(prompt(60, 2), greedy(3), priority=5)
    driver.step()
    assert driver.engine.stats().num_preemptions == 0
    driver.run()


def test_waiting_is_worth_priority():
    driver = Driver(max_num_seqs=1, scheduling_policy="priority")
    running = driver.add(prompt(5), greedy(5), priority=-5)
    driver.step()
    old = driver.add(prompt(5, 1), greedy(5), priority=1)
    driver.engine._clock.advance(1.5 * AGEING_SECONDS)
    new = driver.add(prompt(5, 2), greedy(5), priority=0)
    assert order_of_finish(driver, [running, new, old]) == [running, old, new]


# ---------------------------------------------------------------- law 1 over random schedules


@st.composite
def loads(draw):
    sizes = st.integers(1, 70)
    requests = draw(st.lists(st.tuples(sizes, st.integers(0, 25), st.integers(0, 3)), min_size=1, max_size=8))
    config = {
        "num_blocks": draw(st.integers(6, 14)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 5, 16, 64, 512])),
        "max_num_seqs": draw(st.integers(1, 8)),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "admission": draw(st.sampled_from(["greedy", "foresight"])),
        "max_preemptions": draw(st.sampled_from([1, 2, 4])),
        "preemption_mode": draw(st.sampled_from(["full", "tail"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3, 16])),
    }
    return requests, config, draw(st.integers(0, 20))


def params_of(kind, max_tokens):
    return [
        greedy(max_tokens, logprobs=1),
        SamplingParams(n=2, seed=kind, max_tokens=max_tokens, min_tokens=2),
        SamplingParams(seed=kind, max_tokens=max_tokens, frequency_penalty=0.7, stop_token_ids=(1, 2, 3)),
        greedy(max_tokens, prompt_logprobs=1),
    ][kind]


@given(loads())
def test_answers_do_not_depend_on_the_schedule(load):
    """Law 1. Prompts share prefixes, the pool is small, arrivals are spread over the run."""
    requests, config, delay = load
    driver = Driver(HashBackend(keep_trace=False), **config)
    limit = config["num_blocks"] * 16
    wanted = []
    for i, (num_prompt, max_tokens, kind) in enumerate(requests):
        request_id, params = f"r{i}", params_of(kind, max_tokens)
        options = {"eos_token_ids": frozenset(range(4)), "request_id": request_id}
        driver.add(prompt(num_prompt, i % 2), params, priority=kind, **options)
        solo = Driver(HashBackend(keep_trace=False), num_blocks=limit // 16, enable_prefix_caching=False)
        solo.add(prompt(num_prompt, i % 2), params, **options)
        solo.run()
        wanted += [((request_id, s), solo.outcomes[request_id, s].answer) for s in range(params.n)]
        for _ in range(delay % 5):
            driver.step()
    driver.run()
    assert [(key, driver.outcomes[key].answer) for key, _ in wanted] == wanted
