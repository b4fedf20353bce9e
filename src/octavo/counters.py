"""Totals that the scheduler keeps since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.request import FinishReason


@dataclass(slots=True)
class Counters:
    """None ever goes down.

    Hits are counted where they save a request's own work for the first time: hits after a preemption
    and what a sample takes from a sibling are counted apart, so hit_tokens / query_tokens is the rate at
    which *other* requests' work was reused. Requests that want prompt logprobs look nothing up.
    """

    steps: int = 0
    prompt_tokens_computed: int = 0  # put through the model, again after a preemption
    generated_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    readmission_hit_tokens: int = 0
    sibling_hit_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0  # computed tokens given up by preemptions; readmission_hit_tokens of them came back
    queue_seconds: float = 0.0  # from arrival to first admission, summed over requests
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
