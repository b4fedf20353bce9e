"""--preemption-mode tail: a victim keeps its blocks until somebody needs them; its end goes first (C115-C119)."""

import pytest
from support.run import Driver, check_books, preempt_last
from support.script_backend import HashBackend

from octavo.draft import Draft
from octavo.events import Observer
from octavo.request import Pooling, SamplingParams


def greedy(max_tokens=4, **kwargs):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


def tail_driver(backend=None, **config):
    return Driver(backend, **{"preemption_mode": "tail", "admission": "greedy", **config})


def assert_as_alone(driver, request_id, token_ids, params):
    """Every answer to the request is that of a run without preemption."""
    solo = Driver()
    solo.add(token_ids, params, request_id=request_id)
    solo.run()
    for i in range(params.n):
        assert driver.outcomes[request_id, i].answer == solo.outcomes[request_id, i].answer


def set_back_and_cut(driver, num_blocks):
    """Preempt the last in line and take up to `num_blocks` of the blocks that it has alone, as if they were needed."""
    line, seq = driver.engine.scheduler.line, driver.engine.scheduler.running[-1]
    preempt_last(driver.engine, keep=True)
    num_before = len(seq.block_ids)
    if num_blocks:
        line.reclaim(seq, num_blocks)
    assert len(seq.block_ids) == max(0, num_before - num_blocks)
    check_books(driver.engine)
    return seq


def test_only_what_is_needed_is_taken():
    """Two of 45 tokens in 6 blocks: the first needs a fourth block at 48, and takes it from the end of the second."""
    driver = tail_driver(num_blocks=7, enable_prefix_caching=False)
    first, second = (driver.add(prompt(45, i), greedy(30)) for i in range(2))
    while not driver.engine.scheduler.line.holding:
        driver.step()
    (seq,) = driver.engine.scheduler.line.holding
    assert (seq.request.request_id, len(seq.block_ids), seq.num_computed) == (second, 3, 48)  # one was free
    num_generated = seq.num_generated
    while len(seq.block_ids) == 3:
        driver.step()
    assert (len(seq.block_ids), seq.num_computed, seq.num_generated) == (2, 32, num_generated)
    assert driver.engine.stats().num_lost_tokens == 16
    driver.run()
    rows = [row for step in driver.engine.backend.trace for row in step if row.start == 32]
    assert [row.num_tokens for row in rows] == [45 + num_generated - 32]  # it went on where it was cut
    for i, request_id in enumerate((first, second)):
        assert driver.outcomes[request_id, 0].answer == Driver().ask(prompt(45, i), greedy(30)).answer


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 99])
@pytest.mark.parametrize("when", [[1], [3], [6], [9], [6, 7], [2, 3, 4, 8, 12]], ids=str)
@pytest.mark.parametrize(
    "params",
    [
        greedy(30, logprobs=1),
        greedy(9, prompt_logprobs=2),
        SamplingParams(max_tokens=30, seed=4, repetition_penalty=1.3, presence_penalty=1.0),
    ],
    ids=["greedy", "scores", "penalties"],
)
def test_cut_anywhere_nothing_changes(params, when, cut, caching):
    """C115, C118: before the first token, at it, at block borders, twice in a row, while it computes again."""
    driver = tail_driver(max_num_batched_tokens=16, enable_prefix_caching=caching)

    def each():
        if driver.num_steps in when and driver.engine.scheduler.running:
            set_back_and_cut(driver, cut)

    request_id = driver.add(prompt(70), params)
    driver.run(each=each)
    assert driver.engine.stats().num_preemptions > 0
    assert driver.outcomes[request_id, 0].answer == Driver().ask(prompt(70), params).answer


@pytest.mark.parametrize("caching", [True, False])
def test_the_front_takes_what_the_others_hold(caching):
    """No deadlock: four wait, and together they hold all blocks but one."""
    driver = tail_driver(num_blocks=9, enable_prefix_caching=caching, max_preemptions=100)
    ids = [driver.add(prompt(30, i), greedy(70)) for i in range(4)]
    driver.step()
    while driver.engine.scheduler.running:
        preempt_last(driver.engine, keep=True)
    assert driver.engine.stats().num_free_blocks == 1
    assert len(driver.engine.scheduler.line.holding) == 4
    driver.run(max_steps=4 * (2 + 70) * 2)
    for i, request_id in enumerate(ids):
        assert driver.outcomes[request_id, 0].answer == Driver().ask(prompt(30, i), greedy(70)).answer


def test_one_that_must_stay_takes_from_those_before_it():
    """The only one that runs comes after one that waits and holds: it takes that one's blocks rather than stop."""
    driver = tail_driver(num_blocks=6, enable_prefix_caching=False)
    first = driver.add(prompt(30), greedy(40))
    second = driver.add(prompt(30, 1), greedy(60))
    driver.step()
    line, preemptor = driver.engine.scheduler.line, driver.engine.scheduler.preemptor
    seq = line.requests[first][0]
    preemptor.preempt(seq, Draft(0))
    driver.engine.scheduler._admission.admit = lambda draft, now: None  # nobody is let in
    for _ in range(59):
        driver.step()
    assert not seq.block_ids  # 89 tokens of the second took all six blocks
    del driver.engine.scheduler._admission.admit
    driver.run()
    for i, (request_id, n) in enumerate(((first, 40), (second, 60))):
        assert driver.outcomes[request_id, 0].answer == Driver().ask(prompt(30, i), greedy(n)).answer


@pytest.mark.parametrize("caching", [True, False])
def test_samples_lose_what_is_their_own_first(caching):
    """C119: what siblings share is given up last, and only if nobody would be left to run."""
    params = SamplingParams(n=4, seed=3, max_tokens=40)
    driver = tail_driver(num_blocks=12, enable_prefix_caching=caching, max_preemptions=100)
    request_id = driver.add(prompt(40), params)
    for _ in range(12):
        driver.step()
    seq = set_back_and_cut(driver, 1)
    assert (len(seq.block_ids), seq.num_computed) == (3, 48)
    driver.engine.scheduler.line.reclaim(seq, 1)
    assert (len(seq.block_ids), seq.num_computed) == (2, 32)  # the full blocks of the prompt, shared with three others
    driver.engine.scheduler.line.reclaim(seq, 1)
    assert not seq.block_ids
    driver.run()
    assert_as_alone(driver, request_id, prompt(40), params)


def test_kept_blocks_go_to_the_front_while_others_run():
    """One that comes before the keeper need not wait until the running one ends."""
    driver = tail_driver(num_blocks=8, scheduling_policy="priority", enable_prefix_caching=False)
    driver.add(prompt(30), greedy(40), priority=0)
    driver.add(prompt(60, 1), greedy(4), request_id="keeper", priority=9)
    driver.step()
    seq = set_back_and_cut(driver, 0)
    driver.add(prompt(60, 2), greedy(4), request_id="front", priority=5)
    assert (len(seq.block_ids), driver.engine.stats().num_free_blocks) == (4, 2)
    driver.step()
    assert [s.request.request_id for s in driver.engine.scheduler.running] == ["r0", "front"]
    assert len(seq.block_ids) == 2  # of the four blocks that it needs two were free
    driver.run()
    for request_id, start in (("keeper", 1), ("front", 2)):
        assert driver.outcomes[request_id, 0].answer == Driver().ask(prompt(60, start), greedy(4)).answer


def test_what_others_would_free():
    driver = tail_driver(num_blocks=8)
    driver.add(prompt(40), greedy(4))
    driver.step()
    tables, (seq,) = driver.engine.scheduler.tables, driver.engine.scheduler.running
    assert tables.num_freed_by([seq]) == 3
    assert tables.num_freed_by([seq], but=[*seq.block_ids[:2], 7]) == 1  # those are wanted themselves
    tables.pool.retain(seq.block_ids[:1])
    assert tables.num_freed_by([seq]) == 2
    tables.pool.release(seq.block_ids[:1])


def test_all_samples_hold_and_share():
    """Nobody runs, and every block that is held is held by several: the front gets what it needs all the same."""
    params = SamplingParams(n=3, seed=3, max_tokens=90)
    driver = tail_driver(num_blocks=7, enable_prefix_caching=False, max_preemptions=1000)
    request_id = driver.add(prompt(20), params)
    for _ in range(40):
        driver.step()
        while driver.engine.scheduler.running:
            preempt_last(driver.engine, keep=True)
    driver.run()
    assert_as_alone(driver, request_id, prompt(20), params)


def behind_another(backend=None, **config):
    """One request is cut down to a block and waits; one of higher priority then takes the whole budget of each step."""
    driver = tail_driver(backend, max_num_batched_tokens=16, scheduling_policy="priority", **config)
    driver.add(prompt(100), greedy(5), request_id="holds", priority=5)
    driver.step()
    driver.step()
    set_back_and_cut(driver, 1)
    driver.add(prompt(100), greedy(1), request_id="other", priority=0)
    return driver


def test_it_lets_go_where_the_cache_knows_more():
    """The other one computes the same prompt: what it has is hit, and what it has not yet is waited for."""
    driver = behind_another()
    (seq,) = driver.engine.scheduler.line.holding
    for _ in range(4):
        driver.step()
        assert seq.block_ids and seq.num_computed == 16
    driver.run()
    assert driver.engine.stats().num_prompt_tokens == 32 + (100 - 32) + 1
    assert driver.outcomes["holds", 0].answer == Driver().ask(prompt(100), greedy(5)).answer


def test_pooling_starts_again():
    """A mean over tokens cannot be cut: what it has made goes with the blocks."""
    params = SamplingParams(max_tokens=0, pooling=Pooling.MEAN)
    found = []
    for preempt in (False, True):
        driver = tail_driver(max_num_batched_tokens=16)
        driver.add(prompt(60), params)
        events = driver.step()
        if preempt:
            preempt_last(driver.engine, keep=True)
            assert not driver.engine.scheduler.line.holding
        while driver.engine.has_unfinished:
            events += driver.step()
        found.append([event.embedding for event in events if event.finish_reason])
    assert found[0] == found[1] != [None]


def test_searches_start_again():
    params = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=20)
    driver = tail_driver()
    driver.add(prompt(40), params, request_id="r")
    for _ in range(5):
        driver.step()
    preempt_last(driver.engine, keep=True)
    assert not driver.engine.scheduler.line.holding
    driver.run()
    assert_as_alone(driver, "r", prompt(40), params)


def test_what_is_lost_is_told():
    driver = tail_driver(enable_prefix_caching=False)
    driver.engine.observe()
    request_id = driver.add(prompt(40), greedy(20))
    for _ in range(4):
        driver.step()
    seq = set_back_and_cut(driver, 1)
    assert seq.num_computed == 32
    driver.engine.scheduler.line.reclaim(seq, 1)
    driver.run()
    (told,) = driver.engine.explain(request_id)["samples"][0]["preemptions"]
    assert told == {"at_seconds": 0.0, "lost_tokens": 27, "restored_tokens": 0}
    stats = driver.engine.stats()
    assert (stats.num_lost_tokens, stats.num_readmission_hit_tokens, stats.num_preemptions) == (27, 0, 1)


def test_abort_of_one_that_holds():
    driver = behind_another()
    driver.engine.abort("holds")
    assert not driver.engine.scheduler.line.holding
    check_books(driver.engine)
    driver.run()


def test_a_fault_takes_what_is_held():
    """The content of no block can be trusted then: the one that waits begins again, and answers."""
    driver = behind_another(HashBackend(fail_steps={4}))
    driver.run()
    assert driver.outcomes["other", 0].error
    assert driver.outcomes["holds", 0].answer == Driver().ask(prompt(100), greedy(5)).answer


def test_the_oldest_is_never_the_victim():
    """C116, also in pools where everybody holds something."""

    class Victims(Observer):
        def preempted(self, seq, num_lost):
            live = [*line.running, *line.waiting]
            assert any(s.order < seq.order for s in live if s is not seq)

    driver = tail_driver(num_blocks=10, max_num_batched_tokens=16, max_preemptions=2)
    line = driver.engine.scheduler.line
    line.observer = Victims()
    ids = [driver.add(prompt(40, i), greedy(56)) for i in range(20)]
    driver.run(max_steps=5 * 20 * (3 + 55))
    assert all(len(driver.outcomes[i, 0].token_ids) == 56 for i in ids)
