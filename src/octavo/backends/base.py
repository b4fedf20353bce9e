"""The seam between the engine and whatever computes: about five members, three implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from octavo.plan import StepPlan, StepResult

Progress = Callable[[float], None]
"""Called with the fraction of a long task that is done, from 0.0 to 1.0."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded backend is. `kv_bytes_per_block` is what one more block of KV costs, in bytes.

    `details` are lines for people (`octavo doctor`, the start-up log): chosen kernels per op and the like.
    """

    name: str
    vocab_size: int
    weight_bytes: int
    kv_bytes_per_block: int
    details: dict[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """Executes step plans. Built loaded (see `octavo.backends.create`); not thread-safe."""

    @property
    def capabilities(self) -> Capabilities: ...

    def allocate_kv(self, num_blocks: int) -> None:
        """Make room for `num_blocks` KV blocks; called once, before the first step."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A fault of one row is that row's `error`; an exception is the whole step's."""
        ...

    def close(self) -> None: ...
