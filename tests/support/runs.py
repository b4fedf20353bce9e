"""Runs requests through an engine and collects what comes out, for comparisons to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.backends.base import Backend
from octavo.clock import VirtualClock
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, SamplingParams


@dataclass
class Outcome:
    """All that one sequence produced."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    error: str | None = None

    @property
    def visible(self) -> tuple[object, ...]:
        """What a client sees, and law 1 speaks of."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish_reason, self.error


def new_engine(backend: Backend, **config: object) -> Engine:
    return Engine(EngineConfig(**config), backend, clock=VirtualClock())  # type: ignore[arg-type]


def run_requests(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], *, together: bool = True
) -> list[list[Outcome]]:
    """One list of outcomes per request, one outcome per sample. Not together: each runs alone, one by one."""
    outcomes: dict[str, list[Outcome]] = {}

    def drain() -> None:
        while engine.has_unfinished:
            for event in engine.step():
                outcome = outcomes[event.request_id][event.index]
                outcome.token_ids.extend(event.token_ids)
                outcome.logprobs.extend(event.logprobs or ())
                outcome.prompt_logprobs.extend(event.prompt_logprobs)
                outcome.num_cached = event.num_cached
                outcome.finish_reason = event.finish_reason or outcome.finish_reason
                outcome.error = event.error or outcome.error

    for i, (prompt, params) in enumerate(requests):
        outcomes[f"r{i}"] = [Outcome() for _ in range(params.n)]
        engine.add_request(engine.make_request(f"r{i}", list(prompt), params))
        if not together:
            drain()
    drain()
    return list(outcomes.values())
