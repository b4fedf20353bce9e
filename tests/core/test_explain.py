"""Explanations: what a request waited for, hits and misses with their reasons, chunks, preemptions, times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run import Driver, preempt_last
from support.script_backend import HashBackend

from octavo.explain import MAX_CHUNKS, Recorder
from octavo.request import SamplingParams


def greedy(max_tokens=4, **kwargs):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


class Timed(HashBackend):
    """Every step takes one second of the virtual clock."""

    clock = None

    def execute(self, plan):
        self.clock.advance(1.0)
        return super().execute(plan)


def observed(capacity=512, **config):
    driver = Driver(Timed(), **config)
    driver.engine.backend.clock = driver.engine._clock
    driver.engine.observe(capacity)
    return driver


def sample(driver, request_id, index=0):
    return driver.engine.explain(request_id)["samples"][index]


def waits(driver, request_id, index=0):
    return {w["for"]: w["seconds"] for w in sample(driver, request_id, index)["waits"] if w["seconds"]}


def test_nothing_is_kept_unless_asked_for():
    driver = Driver()
    driver.ask(prompt(20))
    assert driver.engine.explain("r0") is None
    assert driver.engine.scheduler.line.observer is None
    assert driver.engine.stats().observed is None


def test_times_of_a_request_alone():
    """50 prompt tokens in chunks of 16: four steps, the fourth draws the first of four tokens."""
    driver = observed(max_num_batched_tokens=16)
    driver.ask(prompt(50), greedy(4))
    story = driver.engine.explain("r0")
    assert story["status"] == "finished"
    assert (story["queue_seconds"], story["prefill_seconds"], story["first_token_seconds"]) == (0, 4, 4)
    told = story["samples"][0]
    assert told["chunks"] == [16, 16, 16, 2]
    assert (told["computed_tokens"], told["generated_tokens"], told["finished_seconds"]) == (50, 4, 7)
    assert (told["hit_tokens"], told["miss_reason"], told["finish_reason"]) == (0, "never_seen", "length")


def test_what_a_request_waits_for():
    driver = observed(max_num_seqs=1, max_num_batched_tokens=16)
    first = driver.add(prompt(40), greedy(3))  # 3 steps of prompt, 2 more tokens: 5 s
    second, third = (driver.add(prompt(5, i), greedy(2)) for i in (1, 2))
    driver.run()
    assert waits(driver, first) == {}
    # While the first one's chunks fill the step there is no budget; then no place.
    assert waits(driver, second) == {"budget": 2, "places": 3}
    assert waits(driver, third) == {"line": 5, "places": 2}
    assert driver.engine.explain(third)["queue_seconds"] == 7
    totals = driver.engine.stats().observed["wait_seconds"]
    assert {k: v for k, v in totals.items() if v} == {"line": 5, "places": 5, "budget": 2}


def test_waiting_for_blocks():
    driver = observed(num_blocks=4)
    driver.add(prompt(47), greedy(10))
    second = driver.add(prompt(10, 1), greedy(2))
    driver.step()
    assert sample(driver, second)["waiting_for"] == "blocks"
    assert driver.engine.explain(second)["status"] == "waiting"
    driver.run()
    assert waits(driver, second) == {"blocks": 10}
    assert sample(driver, second)["waiting_for"] is None


@pytest.mark.parametrize(
    ("num_prompt", "options", "config", "reason"),
    [
        (16, {}, {}, "too_short"),  # the last prompt token is always computed
        (17, {}, {}, "never_seen"),
        (40, {"cache_salt": "b"}, {}, "other_salt"),
        (40, {"cache_salt": "b", "tenant": "someone else"}, {}, "never_seen"),
        (40, {}, {"enable_prefix_caching": False}, "caching_off"),
    ],
)
def test_why_nothing_was_hit(num_prompt, options, config, reason):
    driver = observed(**config)
    if options or config:
        driver.ask(prompt(40), greedy(), cache_salt="a")
    request_id = driver.add(prompt(num_prompt), greedy(), **options)
    driver.run()
    told = sample(driver, request_id)
    assert (told["hit_tokens"], told["miss_reason"]) == (0, reason)
    assert driver.engine.stats().observed["misses"][reason] >= 1


def test_a_full_hit_has_no_miss():
    driver = observed()
    driver.ask(prompt(48), greedy())
    driver.ask(prompt(48), greedy())
    told = sample(driver, "r1")
    assert told["hit_tokens"] == driver.outcomes["r1", 0].num_cached >= 32
    assert told["miss_reason"] is None
    assert sum(told["chunks"]) == 48 - told["hit_tokens"]


def test_a_hit_that_ends_early_says_why():
    driver = observed()
    driver.ask(prompt(40), greedy())
    driver.ask([*prompt(32), *prompt(30, 5)], greedy())
    assert sample(driver, "r1")["hit_tokens"] >= 32
    assert sample(driver, "r1")["miss_reason"] == "never_seen"


def test_evicted():
    driver = observed(num_blocks=6)
    driver.ask(prompt(40), greedy())
    driver.ask(prompt(90, 3), greedy())
    driver.ask(prompt(40), greedy())
    assert (sample(driver, "r2")["hit_tokens"], sample(driver, "r2")["miss_reason"]) == (0, "evicted")


def test_prompt_logprobs_look_nothing_up():
    driver = observed()
    driver.ask(prompt(40), greedy())
    driver.ask(prompt(40), greedy(prompt_logprobs=1))
    assert sample(driver, "r1")["miss_reason"] == "prompt_logprobs"


def test_preemptions_and_what_they_cost():
    driver = observed(max_num_batched_tokens=16)
    driver.add(prompt(40), greedy(5))
    driver.run(each=lambda: driver.num_steps == 4 and preempt_last(driver.engine))
    told = sample(driver, "r0")
    assert told["num_preemptions"] == 1
    # Three chunks of the prompt and one decode: 41 tokens computed; the full blocks come back from the cache.
    restored = told["preemptions"][0]["restored_tokens"]
    assert told["preemptions"][0] == {"at_seconds": 4, "lost_tokens": 41, "restored_tokens": restored}
    assert restored >= 32
    assert driver.engine.stats().num_lost_tokens == 41
    assert driver.engine.explain("r0")["prefill_seconds"] == 3  # recomputing is not prefill


def test_ttft_splits_into_queue_prefill_and_rest():
    """Preempted before the first token: the time it waits then is neither queue nor prefill."""
    driver = observed(max_num_batched_tokens=16, enable_prefix_caching=False)
    blocker = driver.add(prompt(4, 7), greedy(2))
    driver.step()
    request_id = driver.add(prompt(40), greedy(2))
    driver.run(each=lambda: driver.num_steps == 2 and preempt_last(driver.engine))
    story = driver.engine.explain(request_id)
    assert story["queue_seconds"] == 0
    assert (story["prefill_seconds"], story["first_token_seconds"]) == (4, 4)
    assert driver.engine.explain(blocker)["first_token_seconds"] == 1


def test_samples_have_their_own_stories():
    driver = observed()
    request_id = driver.add(prompt(40), SamplingParams(n=3, seed=1, max_tokens=4))
    driver.run()
    story = driver.engine.explain(request_id)
    assert [s["index"] for s in story["samples"]] == [0, 1, 2]
    assert all(s["generated_tokens"] == 4 for s in story["samples"])


def test_only_so_many_are_kept():
    driver = observed(capacity=3)
    for i in range(10):
        driver.ask(prompt(5, i))
    kept = [driver.engine.explain(f"r{i}") is not None for i in range(10)]
    assert kept == [False] * 7 + [True] * 3
    driver.add(prompt(5), request_id="live")
    assert driver.engine.explain("live")["status"] == "waiting"
    driver.run()


def test_stories_are_bounded():
    driver = observed(max_num_batched_tokens=4)
    driver.ask(prompt(1000), greedy(1))
    told = sample(driver, "r0")
    assert len(told["chunks"]) == MAX_CHUNKS
    assert told["computed_tokens"] == 1000


def test_tables_do_not_grow_with_requests():
    """C178: everything the recorder holds is bounded by its capacity and the pool."""
    driver = observed(capacity=8, num_blocks=16)
    for i in range(300):
        driver.ask([i % 128, i // 128, *prompt(30, i)], greedy(1), cache_salt=str(i % 7))
    recorder = driver.engine.scheduler.line.observer
    assert isinstance(recorder, Recorder)
    assert len(recorder) == 8
    assert not recorder._in_step
    assert len(recorder._forgotten) <= 1024


def test_a_fault_ends_the_story():
    driver = observed()
    driver.engine.backend.fail_steps = {1}
    driver.add(prompt(20), greedy(5))
    driver.run()
    told = sample(driver, "r0")
    assert (told["finish_reason"], told["generated_tokens"]) == ("error", 1)
    assert not driver.engine.scheduler.line.observer._in_step


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(5, 12),
    st.sampled_from([4, 16, 64]),
)
def test_times_add_up(requests, num_blocks, budget):
    """Waits sum to the time not running; queue + prefill never exceed the time to the first token."""
    driver = observed(num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=4)
    for i, (num_prompt, max_tokens, delay) in enumerate(requests):
        driver.add(prompt(num_prompt, i % 3), greedy(max_tokens), request_id=f"q{i}")
        for _ in range(delay):
            driver.step()
    driver.run()
    stats = driver.engine.stats()
    stories = [driver.engine.explain(f"q{i}") for i in range(len(requests))]
    for story in stories:
        told = story["samples"][0]
        assert story["queue_seconds"] + story["prefill_seconds"] <= story["first_token_seconds"]
        assert sum(w["seconds"] for w in told["waits"]) >= story["queue_seconds"]
        assert sum(w["seconds"] for w in told["waits"]) < told["finished_seconds"]
        assert sum(told["chunks"]) == told["computed_tokens"] or len(told["chunks"]) == MAX_CHUNKS
    assert sum(s["samples"][0]["num_preemptions"] for s in stories) == stats.num_preemptions
    lost = sum(p["lost_tokens"] for s in stories for p in s["samples"][0]["preemptions"])
    assert lost == stats.num_lost_tokens or max(s["samples"][0]["num_preemptions"] for s in stories) > 16
    assert sum(stats.observed["queue"]["counts"]) == sum(stats.observed["prefill"]["counts"]) == len(requests)
