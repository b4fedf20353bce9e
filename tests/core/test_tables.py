"""Nothing grows with the number of requests (C178), and the walker that looks for it finds what does."""

import gc
import logging
import random
from collections import deque

from support.run import check_books, check_idle
from support.tables import table_sizes

from octavo.clock import VirtualClock
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.request import SamplingParams
from octavo.virtual import END_ID, StepCost, VirtualBackend

NUM_BLOCKS = 32
NUM_RECENT = 64
PLAIN = SamplingParams(temperature=0, max_tokens=1)
KINDS = (
    *[PLAIN] * 12,
    SamplingParams(n=3, max_tokens=4),
    SamplingParams(n=2, best_of=4, max_tokens=3),
    SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0, max_tokens=5),
    SamplingParams(temperature=0, max_tokens=80),
    SamplingParams(temperature=0, max_tokens=80),
    SamplingParams(temperature=0, max_tokens=0),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, logprobs=2),
)
SYSTEM = [7 + i % 50 for i in range(70)]

# What is remembered on purpose: of the last answers, stories and evicted blocks, and one note per block.
BOUNDS = {
    "BeamSpread._recent": 256,
    "LengthEstimate._recent": 256,
    "LengthEstimate._sorted": 256,
    "LengthEstimate._sums": 257,
    "LengthEstimate._sums.*": 0,
    "Recorder._forgotten": 1024,
    "Recorder._first_blocks": 4096,
    "Recorder._first_blocks.*": 8192,
    "Recorder._recent": NUM_RECENT,
    "Story.samples": NUM_RECENT,
    "_Sample.chunks": NUM_RECENT,
    "_Sample.waits": NUM_RECENT,
    "_Sample.preemptions": 0,
    "Retention.notes": NUM_BLOCKS,
}


def new_engine():
    clock = VirtualClock()
    config = EngineConfig(
        max_model_len=256,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        admission="greedy",
        tenant_cache_quota=0.4,
    )
    backend = VirtualBackend(clock, StepCost(), length_of=lambda spec: 1 + (spec.seed + spec.sample_index) % 50)
    engine = Engine(config, backend, clock=clock, seed=0)
    engine.observe(NUM_RECENT)
    return engine


def serve(engine, rng, first, last):
    """Requests first .. last - 1, a dozen at a time: samples, beams, hits, tenants, pins, aborts, text that stops."""
    for i in range(first, last):
        ids = [1 + i % 4000, 1 + i // 4000, *SYSTEM[: rng.randint(0, 40)]]
        if i % 5 == 0:
            ids = SYSTEM + ids
        tenant = "" if i % 3 else f"tenant {i}"
        options = {"tenant": tenant, "cache_salt": tenant, "priority": i % 2, "eos_token_ids": frozenset({END_ID})}
        if i % 50 == 0:
            options["pin_seconds"] = 0.5
        engine.add_request(engine.make_request(f"r{i}", ids, rng.choice(KINDS), **options))
        while len(engine.scheduler.requests) >= 12:
            engine.step()
        if i % 17 == 0:
            engine.abort(f"r{i - rng.randint(0, 3)}")
        if i % 19 == 0:
            engine.finish_sequence(f"r{i - rng.randint(0, 3)}", 0)
        if i % 100 == 0:
            check_books(engine)


def at_rest(engine):
    """All table sizes with nothing in flight, the pins run out, the cache evicted, and the last stories alike."""
    while engine.has_unfinished:
        engine.step()
    engine._clock.advance(10.0)
    for i in range(NUM_RECENT):
        engine.add_request(engine.make_request(f"rest {i}", [5, 6 + i], PLAIN))
        engine.step()
    check_idle(engine)
    pool = engine.scheduler.tables.pool
    assert pool.num_free == NUM_BLOCKS
    pool.release([pool.allocate() for _ in range(NUM_BLOCKS)])
    return table_sizes(engine)


def test_twenty_thousand_requests_leave_every_table_as_it_was(caplog):
    """C178: at the end every table is what it was half way, and all but bounded memories as at the start."""
    caplog.set_level(logging.CRITICAL)  # nothing is kept of the log
    engine, rng = new_engine(), random.Random(178)
    start = at_rest(engine)
    serve(engine, rng, 0, 10_000)
    half = at_rest(engine)
    gc.collect()
    num_objects = len(gc.get_objects())
    serve(engine, rng, 10_000, 20_000)
    end = at_rest(engine)
    gc.collect()
    assert len(gc.get_objects()) < num_objects + 1000  # nor does anything grow that no table shows
    assert end == half
    assert {path: size for path, size in end.items() if path not in BOUNDS} == {
        path: size for path, size in start.items() if path not in BOUNDS
    }
    assert all(end.get(path, 0) <= bound for path, bound in BOUNDS.items())
    stats = engine.stats()
    assert sum(stats.num_finished.values()) == 20_000 + 3 * NUM_RECENT
    finished = {reason.value: num for reason, num in stats.num_finished.items()}
    assert finished["error"] == 0 and finished["abort"] > 500 and finished["stop"] > 500 and finished["length"] > 10_000
    assert stats.num_hit_tokens > 100_000 and stats.num_preemptions > 100 and stats.num_sibling_hit_tokens > 1000
    assert engine.scheduler.tables.retention.pins == {}


def test_the_walker_finds_what_grows():
    class Table:
        __slots__ = ("entries", "names", "self")

    Table.__module__ = "octavo.somewhere"
    table = Table()
    table.entries, table.names, table.self = {"a": [1, 2], "b": [3]}, deque(["x"]), table
    expected = {"Table.entries": 2, "Table.entries.*": 3, "Table.names": 1}
    assert table_sizes(table) == expected
    table.entries["a"].append(4)
    assert table_sizes(table) == {**expected, "Table.entries.*": 4}
    engine = new_engine()
    before = table_sizes(engine)
    engine.scheduler.line.searches["left behind"] = table
    assert table_sizes(engine)["Line.searches"] == before["Line.searches"] + 1
