"""A backend that computes nothing and takes virtual time for it: for scheduling experiments in seconds.

The scheduler, the engine and the KV books are the real ones; only `execute` is replaced by a cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.backends.base import Capabilities
from octavo.clock import VirtualClock
from octavo.plan import PlanRow, RowResult, SampleSpec, StepPlan, StepResult, TokenLogprobs

VOCAB_SIZE = 32_768
END_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: `base` (weights are read once), per token computed, per position of KV read.

    The defaults are of the order of a 135M model on two CPU cores.
    """

    base: float = 4e-3
    per_token: float = 5e-4
    per_kv: float = 5e-7

    def seconds(self, plan: StepPlan) -> float:
        num_kv = sum(row.start + len(row.token_ids) for row in plan.rows)
        return self.base + self.per_token * plan.num_tokens + self.per_kv * num_kv


class VirtualBackend:
    """Draws END_ID once `length_of` says that the answer is complete, and some other token before.

    Where logprobs are asked for, the drawn token has -0.5 and the next ones of the vocabulary one less each.
    `num_tokens` and `num_steps` count what was computed.
    """

    def __init__(
        self, clock: VirtualClock, cost: StepCost, *, length_of: Callable[[SampleSpec], int] | None = None
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._length_of = length_of
        self.num_tokens = 0
        self.num_steps = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="virtual", vocab_size=VOCAB_SIZE, weight_bytes=0, kv_bytes_per_block=1)

    def allocate_kv(self, num_blocks: int) -> None:
        pass

    def close(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        self._clock.advance(self._cost.seconds(plan))
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        return StepResult(tuple(self._result(row) for row in plan.rows))

    def _result(self, row: PlanRow) -> RowResult:
        scores = tuple(TokenLogprobs(token_id, 0.0, 1) for token_id in row.score_ids)
        if row.sample is None:
            return RowResult(scores=scores)
        first, *forks = (RowResult(*self._drawn(spec)) for spec in (row.sample, *row.forks))
        return RowResult(first.token_id, first.logprobs, scores, forks=tuple(forks))

    def _drawn(self, spec: SampleSpec) -> tuple[int, TokenLogprobs | None]:
        token_id, num_top = self._draw(spec), spec.num_logprobs
        if num_top is None:
            return token_id, None
        top = tuple(((token_id + rank) % VOCAB_SIZE, -0.5 - rank) for rank in range(num_top))
        return token_id, TokenLogprobs(token_id, -0.5, 1, top)

    def _draw(self, spec: SampleSpec) -> int:
        num_generated = spec.position - spec.num_prompt
        if self._length_of is not None and num_generated + 1 >= self._length_of(spec):
            return END_ID
        return 1 + spec.position % (VOCAB_SIZE - 1)
