"""Worker threads on CPUs of their own."""

from __future__ import annotations

import os
from pathlib import Path

from octavo import _native


def threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def test_workers_are_pinned_and_the_calling_thread_is_not() -> None:
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    before = threads()
    program = _native.Program("scalar", 3, 1, 1)
    workers = sorted(threads() - before)
    assert [os.sched_getaffinity(worker) for worker in workers] == [allowed] * 2
    program.pin_workers([[cpu], sorted(allowed)])
    assert sorted(len(os.sched_getaffinity(worker)) for worker in workers) == sorted([1, len(allowed)])
    program.pin_workers([[cpu], [cpu], [cpu]])  # more than there are workers
    assert [os.sched_getaffinity(worker) for worker in workers] == [{cpu}] * 2
    assert os.sched_getaffinity(0) == allowed


def test_cpus_that_are_not_there_change_nothing() -> None:
    before = threads()
    program = _native.Program("scalar", 2, 1, 1)
    (worker,) = threads() - before
    for cpus in ([-1], [1023], [100_000], []):
        program.pin_workers([cpus])
        assert os.sched_getaffinity(worker) == os.sched_getaffinity(0)
