"""Where a step is put together: plan, commit, and how requests come and go in between.

There are no prefill and decode phases: a step gives a sequence some tokens so that `num_computed`
catches up with `num_known`; when it does, the step draws one more token.
"""

from __future__ import annotations

from octavo.admission import Admission
from octavo.chunks import Chunks
from octavo.config import EngineConfig
from octavo.draft import Draft
from octavo.events import OutputEvent, terminal_events
from octavo.foresight import Foresight
from octavo.forks import Forks
from octavo.kv.tables import BlockTables
from octavo.line import Line
from octavo.outcomes import Outcomes
from octavo.plan import StepPlan, StepResult
from octavo.preemption import Preemptor
from octavo.request import FinishReason, Request, Sequence, SequenceStatus
from octavo.searches import Top, advance_search
from octavo.victims import Preemption

_RUNNING = SequenceStatus.RUNNING


class Scheduler:
    """Owns the line and the KV books. `plan` and `commit` alternate; everything else in between.

    A step is planned in three parts, each a module of its own: running sequences get their tokens
    (`chunks`), waiting ones are admitted (`admission`), samples whose prompt is complete start (`forks`).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tables = BlockTables(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            max_pinned=int(config.num_blocks * config.cache_pin_limit),
            quota=None if config.tenant_cache_quota >= 1 else int(config.num_blocks * config.tenant_cache_quota),
        )
        self.line = line = Line(config, self.tables)
        self.waiting, self.running, self.requests = line.waiting, line.running, line.requests
        self.counters = line.counters
        # A sequence may know one token more than the pool holds: the last one needs no KV.
        max_known = min(config.max_model_len, config.num_blocks * config.block_size + 1)
        rules = Preemption(config, self.tables, max_known)
        foresight = Foresight(config.num_blocks, config.block_size, max_known, line.experience)
        self.preemptor = Preemptor(line, rules, tail=config.preemption_mode == "tail")
        self._chunks = Chunks(line, self.preemptor, config.long_prefill_token_threshold)
        self._admission = Admission(config, line, rules, self.preemptor, self._chunks, foresight)
        self._forks = Forks(config, line, rules)
        self._outcomes = Outcomes(line, self._forks, max_known)
        self._in_flight: tuple[Sequence, ...] = ()  # the rows' sequences of the plan not yet committed ...
        self._forking: dict[Sequence, list[Sequence]] = {}  # ... and their forks
        self._pending: list[OutputEvent] = []  # events that did not come from a step

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting or self._pending)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue all samples of a request. QueueFullError; RequestError if the id is taken."""
        self.line.join(request)

    def abort(self, request_id: str) -> None:
        """End all samples now; their last events come with the next step. Unknown ids are ignored."""
        for seq in self.requests.get(request_id, ()):
            if not seq.finished:
                self.line.finish(seq, FinishReason.ABORT)
                self._pending += terminal_events([seq])

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End one sample now, as its text asked for it; it has no further events."""
        samples = self.requests.get(request_id, [])
        if request_id in self.line.searches:
            return  # beams tell nothing before the search is settled, so nobody can have found a stop in them
        if index < len(samples) and not samples[index].finished:
            self.line.finish(samples[index], FinishReason.STOP)

    # ------------------------------------------------------------------ plan, commit

    def plan(self, now: float) -> StepPlan:
        """The next step. `now` in seconds of the clock that also stamped the arrivals."""
        assert not self._in_flight, "plan() before the previous plan was committed"
        draft = Draft(self.config.max_num_batched_tokens)
        self.tables.retention.tick(now)
        self._chunks.advance_running(draft)
        self._admission.admit(draft, now)
        assert draft.rows or not (self.running or self.waiting), "work is waiting, but nothing was planned"
        self._forks.plan(draft)
        self._in_flight = tuple(draft.rows)
        self._forking = draft.forks
        return StepPlan(tuple(draft.rows.values()), self.tables.take_copies())

    def commit(self, plan: StepPlan, result: StepResult) -> list[OutputEvent]:
        """Enter the results of a step into the books; the events of the step and those pending."""
        line, enter, forking = self.line, self._outcomes.enter, self._forking
        events = []
        tops: dict[Sequence, Top] = {}
        for seq, row, out in zip(self._in_flight, plan.rows, result.rows, strict=True):
            if seq.status is _RUNNING:  # else it was aborted while the step ran
                events += enter(seq, forking.get(seq, ()), row, out)
                if line.searches and out.logprobs is not None:
                    tops[seq] = out.logprobs.top
        for search in tuple(line.searches.values()):
            if search.sequences[0] in tops:
                events += advance_search(line, search, tops)
        self._in_flight = ()
        self._forking = {}
        self.counters.steps += 1
        if line.observer is not None:
            line.observer.step_committed()
        line.check_idle()
        return self.take_pending() + events

    def take_pending(self) -> list[OutputEvent]:
        pending, self._pending = self._pending, []
        return pending

    # ------------------------------------------------------------------ faults

    def fail_in_flight(self, message: str) -> list[OutputEvent]:
        """A step failed: end the requests in it (all, if none was planned) and start from clean KV books.

        What a failed step left in the KV blocks is unknown, so nothing cached survives. Those that wait
        go on, and those that run but had no token in the step start again.
        """
        line = self.line
        live = {s.request.request_id: s for s in (self._in_flight or [*line.running, *line.waiting])}
        self._in_flight = ()
        self._forking = {}
        self.tables.reset([*line.running, *line.holding])
        line.holding.clear()
        for request_id in live:
            for seq in self.requests.get(request_id, ()):
                if not seq.finished:
                    self._pending += line.fail([seq], message)
        return self.take_pending()
