"""Pins, quotas, eviction of leaves before roots, and the trees that GET /v1/cache shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run import Driver, check_idle
from support.script_backend import HashBackend

from octavo.errors import RequestError
from octavo.kv.prefix import root_hash
from octavo.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=1)


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


def pin_id(driver):
    (pin,) = driver.engine.cache_report()["pins"]
    return pin["id"]


def flood(driver, num_prompts=30, num_tokens=40):
    """Other prompts, enough to evict all that is not kept."""
    for i in range(num_prompts):
        driver.ask([100 + i % 20, i // 20, *prompt(num_tokens, i + 50)], GREEDY)


def cached(driver, num_tokens=64, **options):
    return driver.ask([*prompt(num_tokens), 1], GREEDY, **options).num_cached


# ---------------------------------------------------------------- pins


def test_a_pin_survives_a_flood_and_what_is_not_pinned_does_not():
    driver = Driver(num_blocks=12)
    driver.ask(prompt(64), GREEDY, pin_seconds=60)
    driver.ask(prompt(48, 9), GREEDY)
    flood(driver)
    assert cached(driver) == 64
    assert driver.ask([*prompt(48, 9), 1], GREEDY).num_cached == 0


def test_a_pin_expires():
    driver = Driver(num_blocks=12)
    driver.ask(prompt(64), GREEDY, pin_seconds=60)
    (pin,) = driver.engine.cache_report()["pins"]
    assert (pin["num_tokens"], pin["expires_in_seconds"], pin["owner"]) == (64, 60, "")
    driver.engine._clock.advance(59)
    flood(driver, 5)
    assert driver.engine.stats().num_free_blocks == 8
    driver.engine._clock.advance(1)
    assert driver.engine.cache_report()["pins"] == []
    assert driver.engine.stats().num_free_blocks == 12
    flood(driver)
    assert cached(driver) == 0


def test_asking_again_renews_and_never_shortens():
    driver = Driver()
    driver.ask(prompt(64), GREEDY, pin_seconds=60)
    driver.engine._clock.advance(30)
    driver.ask(prompt(64), GREEDY, pin_seconds=60)
    (pin,) = driver.engine.cache_report()["pins"]
    assert (pin["age_seconds"], pin["expires_in_seconds"]) == (30, 60)
    driver.ask(prompt(64), GREEDY, pin_seconds=1)
    assert driver.engine.cache_report()["pins"][0]["expires_in_seconds"] == 60


def test_unpin():
    driver = Driver(num_blocks=12)
    driver.ask(prompt(64), GREEDY, pin_seconds=60, tenant="red")
    name = pin_id(driver)
    assert not driver.engine.unpin(name, "blue")
    assert not driver.engine.unpin("pin-0", "red")
    assert driver.engine.unpin(name, "red")
    assert not driver.engine.unpin(name, "red")
    assert driver.engine.stats().num_free_blocks == 12
    assert cached(driver) == 64  # still cached, until something else needs the blocks


def test_pins_of_prompts_that_begin_alike_share_blocks():
    driver = Driver()
    driver.ask(prompt(32), GREEDY, pin_seconds=60)
    driver.ask([*prompt(32), *prompt(32, 5)], GREEDY, pin_seconds=60)
    report = driver.engine.cache_report()
    assert (len(report["pins"]), report["num_pinned_blocks"]) == (2, 4)


def test_pins_have_a_limit():
    driver = Driver(num_blocks=16, cache_pin_limit=0.5)
    driver.ask(prompt(80), GREEDY, pin_seconds=60)
    driver.ask(prompt(64, 9), GREEDY, pin_seconds=60)  # 5 + 4 > 8
    report = driver.engine.cache_report()
    assert (report["max_pinned_blocks"], report["num_pinned_blocks"], len(report["pins"])) == (8, 5, 1)


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "config", "why"),
    [
        (64, 0, {}, "above 0"),
        (64, -1, {}, "above 0"),
        (64, 1e9, {}, "at most 2592000"),
        (64, float("nan"), {}, "above 0"),
        (15, 60, {}, "one KV block"),
        (160, 60, {"num_blocks": 16}, "10 KV blocks, but pins may hold 8 of 16"),
        (64, 60, {"num_blocks": 16, "tenant_cache_quota": 0.2}, "4 KV blocks, but pins may hold 3 of 16"),
        (64, 60, {"enable_prefix_caching": False}, "prefix cache"),
    ],
)
def test_pins_that_cannot_be_are_refused(num_tokens, seconds, config, why):
    driver = Driver(**config)
    with pytest.raises(RequestError, match=why) as refused:
        driver.add(prompt(num_tokens), GREEDY, pin_seconds=seconds)
    assert refused.value.param == "cache_pin"


def test_pins_yield_to_the_only_one():
    """A prompt that fits the pool but not beside the pins: the pin that expires first goes, then the next."""
    driver = Driver(num_blocks=12)
    driver.ask(prompt(48), GREEDY, pin_seconds=90)
    driver.ask(prompt(48, 9), GREEDY, pin_seconds=60)
    driver.ask(prompt(130, 3), GREEDY)  # 9 blocks
    (pin,) = driver.engine.cache_report()["pins"]
    assert pin["expires_in_seconds"] == 90
    driver.ask(prompt(180, 5), GREEDY)  # 12 blocks
    assert driver.engine.cache_report()["pins"] == []
    assert driver.engine.scheduler.tables.retention.num_yielded == 2


def test_pins_yield_to_one_that_grows():
    driver = Driver(num_blocks=10)
    driver.ask(prompt(80), GREEDY, pin_seconds=60)
    outcome = driver.ask(prompt(60, 3), SamplingParams(temperature=0, max_tokens=100))
    assert len(outcome.token_ids) == 100
    assert driver.engine.cache_report()["pins"] == []


def test_pins_do_not_yield_to_the_line():
    """Those behind the first wait or are preempted; the pin stays."""
    driver = Driver(num_blocks=12, admission="greedy")
    driver.ask(prompt(48), GREEDY, pin_seconds=60)
    for i in range(4):
        driver.add(prompt(30, 3 + i), SamplingParams(temperature=0, max_tokens=60))
    driver.run()
    assert driver.engine.stats().num_preemptions > 0
    assert len(driver.engine.cache_report()["pins"]) == 1


def test_a_prompt_alone_can_be_pinned():
    """max_tokens 0: what POST /v1/cache/pins does."""
    driver = Driver()
    driver.ask(prompt(64), SamplingParams(max_tokens=0), pin_seconds=60)
    assert len(driver.engine.cache_report()["pins"]) == 1
    assert cached(driver) == 64


def test_a_fault_takes_pins_with_it():
    driver = Driver(HashBackend(fail_steps={1}))
    driver.ask(prompt(64), GREEDY, pin_seconds=60)
    driver.ask(prompt(20, 3), GREEDY)
    assert driver.engine.cache_report()["pins"] == []
    check_idle(driver.engine)
    driver.ask(prompt(64), GREEDY, pin_seconds=60)
    assert len(driver.engine.cache_report()["pins"]) == 1


# ---------------------------------------------------------------- quotas


def kept(driver, tenant):
    trees = driver.engine.cache_report(tenant)["trees"]
    return sum(tree["num_blocks"] for tree in trees)


def test_a_tenant_keeps_no_more_than_its_quota():
    driver = Driver(num_blocks=40, tenant_cache_quota=0.25)
    driver.ask(prompt(64), GREEDY, tenant="quiet", cache_salt="q")
    for i in range(30):
        driver.ask([i, *prompt(60, i)], GREEDY, tenant="loud", cache_salt="l")
        assert kept(driver, "loud") <= 10
    assert kept(driver, "loud") == 10
    assert driver.ask([*prompt(64), 1], GREEDY, tenant="quiet", cache_salt="q").num_cached == 64
    # What the loud one keeps is what it used last.
    assert driver.ask([29, *prompt(60, 29), 1], GREEDY, tenant="loud", cache_salt="l").num_cached >= 48


def test_short_prompts_count_too():
    driver = Driver(num_blocks=40, tenant_cache_quota=0.25)
    for i in range(30):
        driver.ask([i, 1, 2, 3], GREEDY, tenant="loud")
    assert kept(driver, "loud") == 10


def test_pins_count_in_the_quota():
    driver = Driver(num_blocks=40, tenant_cache_quota=0.25)
    driver.ask(prompt(96), GREEDY, tenant="a", pin_seconds=60)
    for i in range(10):
        driver.ask([i, *prompt(40, i)], GREEDY, tenant="a")
    assert kept(driver, "a") <= 10
    driver.ask(prompt(96, 7), GREEDY, tenant="a", pin_seconds=60)  # 6 + 6 > 10
    assert len(driver.engine.cache_report("a")["pins"]) == 1
    driver.ask(prompt(96, 7), GREEDY, tenant="b", pin_seconds=60)
    assert len(driver.engine.cache_report("b")["pins"]) == 1


# ---------------------------------------------------------------- leaves before roots


def orphans(driver):
    """What cached blocks without salt go on from, though it is not cached itself: leaves without their root."""
    cache = driver.engine.scheduler.tables.pool.cache
    return {parent for parent in cache.tokens.parents() if parent not in cache._block_of} - {root_hash("")}


def test_two_that_computed_the_same_leave_a_whole_tree():
    """Both compute the prefix side by side; the first one's blocks are findable, but go first."""
    driver = Driver(num_blocks=24, max_num_batched_tokens=256)
    a = driver.add([*prompt(32), *prompt(10, 3)], SamplingParams(temperature=0, max_tokens=2))
    b = driver.add([*prompt(32), *prompt(10, 9)], SamplingParams(temperature=0, max_tokens=60))
    driver.run()
    assert driver.outcomes[a, 0].finish_reason and driver.outcomes[b, 0].finish_reason
    assert not orphans(driver)


def test_what_goes_on_from_an_evicted_block_is_found_again():
    """The second one has that block too, and makes its own findable when it ends."""
    driver = Driver(num_blocks=12)
    driver.add([*prompt(16), *prompt(40, 3)], GREEDY)
    ids = [*prompt(16), *prompt(40, 4)]
    driver.add(ids, SamplingParams(temperature=0, max_tokens=20))
    driver.step()
    pool = driver.engine.scheduler.tables.pool
    pool.release([pool.allocate() for _ in range(pool.num_free)])
    assert orphans(driver)  # the second one's blocks, while it runs
    driver.run()
    assert not orphans(driver)
    assert driver.ask(ids, GREEDY).num_cached == len(ids) - 1


def test_a_leaf_goes_before_a_root_that_was_used_longer_ago():
    """Two texts with the same first block, computed side by side; the one whose block of it is findable ends first."""
    driver = Driver(num_blocks=12)
    driver.add([*prompt(16), *prompt(40, 3)], GREEDY)
    driver.add([*prompt(16), *prompt(40, 4)], SamplingParams(temperature=0, max_tokens=20))
    driver.run()
    pool = driver.engine.scheduler.tables.pool
    taken = []
    while pool.num_free:
        taken.append(pool.allocate())
        assert not orphans(driver)
    pool.release(taken)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=25))
def test_no_leaf_is_cached_without_its_root(asked):
    """Whatever is asked one after the other or together: each tree hangs together (equal salts, one root each)."""
    driver = Driver(HashBackend(block_size=4, keep_trace=False), num_blocks=10)
    for family, num_blocks, tail, wait in asked:
        ids = [family, *[(family * 3 + i) % 7 for i in range(4 * num_blocks - 1)], *[tail] * tail]
        driver.add(ids, GREEDY)
        if wait:
            driver.run()
    driver.run()
    assert not orphans(driver)


# ---------------------------------------------------------------- trees


def test_trees():
    driver = Driver()
    driver.ask([*prompt(32), *prompt(20, 3)], GREEDY, tenant="red")
    driver.engine._clock.advance(10)
    driver.ask([*prompt(32), *prompt(40, 9)], GREEDY, tenant="blue")
    driver.ask([9, 9, 9], GREEDY, tenant="blue")
    driver.engine._clock.advance(5)
    report = driver.engine.cache_report()
    big, small = report["trees"]
    # 32 shared, 16 + 4 of one and 32 + 8 of the other.
    assert (big["num_tokens"], big["longest_tokens"], big["num_blocks"]) == (32 + 20 + 40, 72, 2 + 2 + 3)
    assert big["owners"] == ["blue", "red"]
    assert (big["hits"], big["age_seconds"], big["idle_seconds"]) == (2, 15, 5)
    assert (small["num_tokens"], small["owners"], small["hits"]) == (3, ["blue"], 0)
    assert (report["num_trees"], report["num_cached_blocks"]) == (2, 8)
    red = driver.engine.cache_report("red")
    assert [tree["id"] for tree in red["trees"]] == [big["id"]]
    assert len(driver.engine.cache_report(limit=1)["trees"]) == 1
    assert driver.engine.cache_report("nobody")["trees"] == []


def test_trees_tell_what_is_in_use_and_pinned():
    driver = Driver()
    driver.ask(prompt(64), GREEDY, pin_seconds=60)
    (tree,) = driver.engine.cache_report()["trees"]
    assert (tree["num_blocks_pinned"], tree["num_blocks_in_use"]) == (4, 0)
    driver.add([*prompt(32), 1], SamplingParams(temperature=0, max_tokens=5))
    driver.step()
    (tree,) = driver.engine.cache_report()["trees"]
    assert tree["num_blocks_in_use"] == 2 + 1
    driver.run()


def test_notes_are_bounded_by_the_pool():
    driver = Driver(num_blocks=12, tenant_cache_quota=0.5)
    for i in range(200):
        driver.ask([i % 128, i // 128, *prompt(30, i)], GREEDY, tenant=f"t{i}")
    retention = driver.engine.scheduler.tables.retention
    assert len(retention.notes) <= 12
    assert sum(map(len, retention._free_of.values())) <= 12
    assert all(retention._free_of.values())
