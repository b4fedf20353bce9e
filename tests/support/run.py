"""Drives an engine to the end, checking the books after every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.clock import VirtualClock
from octavo.config import EngineConfig
from octavo.draft import Draft
from octavo.engine import Engine
from octavo.events import OutputEvent
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, SamplingParams
from support.script_backend import HashBackend, SlotBackend


@dataclass
class Outcome:
    """All that a sequence told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached: int = 0
    num_events: int = 0

    def push(self, event: OutputEvent) -> None:
        assert self.finish_reason is None, "an event after the last one"
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason
        self.error = event.error
        self.num_cached = event.num_cached
        self.num_events += 1

    @property
    def answer(self) -> tuple[Any, ...]:
        """What law 1 says must not depend on the load."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish_reason, self.stop_reason


def make_engine(backend: SlotBackend | None = None, **config: Any) -> Engine:
    """An engine on a pure Python backend; keyword arguments are those of EngineConfig."""
    backend = HashBackend() if backend is None else backend
    settings = {"max_model_len": 1024, "num_blocks": 256, "block_size": backend.block_size, **config}
    return Engine(EngineConfig(**settings), backend, clock=VirtualClock(), seed=0)


class Driver:
    """An engine and what came out of it so far, by (request id, sample index)."""

    def __init__(self, backend: SlotBackend | None = None, **config: Any) -> None:
        self.engine = make_engine(backend, **config)
        self.outcomes: dict[tuple[str, int], Outcome] = defaultdict(Outcome)
        self.num_steps = 0
        self._next_id = 0

    def add(
        self, prompt: list[int], params: SamplingParams | None = None, request_id: str | None = None, **options: Any
    ) -> str:
        if request_id is None:
            request_id = f"r{self._next_id}"
            self._next_id += 1
        params = params or SamplingParams(temperature=0, max_tokens=4)
        self.engine.add_request(self.engine.make_request(request_id, prompt, params, **options))
        return request_id

    def step(self) -> list[OutputEvent]:
        self.num_steps += 1
        events = self.engine.step()
        for event in events:
            self.outcomes[event.request_id, event.index].push(event)
        check_books(self.engine)
        return events

    def run(self, max_steps: int = 20_000, each: Callable[[], None] | None = None) -> None:
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                break
            self.step()
            if each is not None:
                each()
        assert not self.engine.has_unfinished, f"not done after {max_steps} steps"
        check_idle(self.engine)

    def ask(self, prompt: list[int], params: SamplingParams | None = None, **options: Any) -> Outcome:
        """Add one request, run to the end, return its sample 0."""
        request_id = self.add(prompt, params, **options)
        self.run()
        return self.outcomes[request_id, 0]


def check_books(engine: Engine) -> None:
    """Invariants that hold between any two steps."""
    scheduler = engine.scheduler
    pool = scheduler.tables.pool
    pins = scheduler.tables.retention.pins.values()
    holding = scheduler.line.holding
    pool.check([*(seq.block_ids for seq in [*scheduler.running, *holding]), *(pin.block_ids for pin in pins)])
    assert scheduler.tables.retention.num_pinned <= scheduler.tables.retention.max_pinned
    assert pool.num_free + pool.num_used == pool.num_blocks
    live = [seq for samples in scheduler.requests.values() for seq in samples if not seq.finished]
    assert sorted(map(id, live)) == sorted(map(id, [*scheduler.running, *scheduler.waiting]))
    assert scheduler.line.num_live == len(live)
    for line in (scheduler.running, scheduler.waiting, holding):
        assert [s.order for s in line] == sorted(s.order for s in line)
    assert len(scheduler.running) <= engine.config.max_num_seqs
    for seq in live:
        assert 0 <= seq.num_computed <= seq.num_known
        assert seq.num_registered <= seq.num_computed // engine.config.block_size
        assert len(seq.block_ids) == -(-seq.num_computed // engine.config.block_size)
    assert len(scheduler.running) <= engine.config.max_num_batched_tokens  # so each has a row in every step
    assert [s for s in scheduler.waiting if s.block_ids or s.num_computed] == holding
    assert not holding or engine.config.preemption_mode == "tail"


def check_idle(engine: Engine) -> None:
    """Nothing is left of requests that are gone."""
    scheduler = engine.scheduler
    assert not scheduler.running and not scheduler.waiting and not scheduler.requests and not scheduler.line.holding
    assert scheduler.tables.pool.num_free == engine.config.num_blocks - scheduler.tables.retention.num_pinned
    assert not engine.has_unfinished


def preempt_last(engine: Engine, *, keep: bool = False) -> None:
    """Preempt the last in line between two steps, as if blocks had run out; `keep`: in tail mode it keeps its own."""
    scheduler = engine.scheduler
    seq = scheduler.running[-1]
    scheduler.preemptor.preempt(seq, Draft(0))
    while seq.block_ids and not keep:
        scheduler.line.reclaim(seq, len(seq.block_ids))
    check_books(engine)
