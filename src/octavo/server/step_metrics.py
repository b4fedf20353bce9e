"""Measures every step of an engine from outside: how long it took, and what was in it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from octavo.backends.base import Backend, Capabilities
from octavo.plan import StepPlan, StepResult

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
TOKENS = (1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)


class Counts:
    """How many values lie at or below each bound and above the one before it; the last count has no bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def as_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "total": self.total}


class MeasuredBackend:
    """A backend that counts what it is asked to do; faulty steps count too."""

    def __init__(self, backend: Backend, now: Callable[[], float] = time.perf_counter) -> None:
        self._backend = backend
        self._now = now
        self._seconds, self._sequences, self._tokens = Counts(SECONDS), Counts(SEQUENCES), Counts(TOKENS)

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def allocate_kv(self, num_blocks: int) -> None:
        self._backend.allocate_kv(num_blocks)

    def execute(self, plan: StepPlan) -> StepResult:
        begun = self._now()
        try:
            return self._backend.execute(plan)
        finally:
            self._seconds.add(self._now() - begun)
            self._sequences.add(len(plan.rows))
            self._tokens.add(plan.num_tokens)

    def close(self) -> None:
        self._backend.close()

    def totals(self) -> dict[str, Any]:
        """Plain values, by what is counted."""
        return {
            "seconds": self._seconds.as_dict(),
            "sequences": self._sequences.as_dict(),
            "tokens": self._tokens.as_dict(),
        }
