"""The line: who waits, who runs, and in which order. Every change of a sequence's status is made here."""

from __future__ import annotations

import bisect
from operator import attrgetter

from octavo.beams import BeamSearch
from octavo.config import EngineConfig
from octavo.counters import Counters
from octavo.errors import QueueFullError, RequestError
from octavo.events import Observer, OutputEvent, terminal_events
from octavo.foresight import LengthEstimate
from octavo.kv.tables import BlockTables
from octavo.policies import admission_order
from octavo.request import FinishReason, Request, Sequence, SequenceStatus

_ORDER = attrgetter("order")
# A request with several samples is counted once, by the gravest of their reasons.
_GRAVITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class Line:
    """All live sequences::

        join -> waiting -> admit -> running -> finish
                   ^------ set_back ---'

    `waiting` and `running` are sorted by `Sequence.order`, so a preempted sequence returns to its own
    place in line, which is before everyone who came later. Only what runs holds KV blocks.
    """

    def __init__(self, config: EngineConfig, tables: BlockTables) -> None:
        self.tables = tables
        self.counters = Counters()
        self.lengths = LengthEstimate()  # of the answers that ended by themselves
        self.observer: Observer | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.requests: dict[str, list[Sequence]] = {}  # live requests: all their samples
        self.searches: dict[str, BeamSearch] = {}  # of live requests
        self.num_live = 0
        self._config = config
        self._order = admission_order(config.scheduling_policy)
        self._next_serial = 0

    def join(self, request: Request) -> None:
        """Queue all samples of a request. QueueFullError; RequestError if the id is taken."""
        if request.request_id in self.requests:
            raise RequestError("request_id is already in use", param="request_id", code="duplicate_request_id")
        n = request.params.num_sequences
        limit = self._config.max_num_seqs + self._config.max_num_waiting
        if n > limit:
            name = "n" if n == request.params.n else "best_of"
            raise RequestError(f"{name} must be at most {limit} on this server", param=name, code="invalid_value")
        if self.num_live + n > limit:
            raise QueueFullError(len(self.waiting))
        serial = self._next_serial
        self._next_serial += 1
        rank = self._order(request, serial)
        if request.params.use_beam_search:
            self.searches[request.request_id] = search = BeamSearch(request)
            samples = list(search.sequences)
        else:
            samples = [Sequence(request, index) for index in range(n)]
        for seq in samples:
            seq.order = (rank, serial, seq.index)
            bisect.insort(self.waiting, seq, key=_ORDER)
        self.requests[request.request_id] = samples
        self.num_live += n
        if self.observer is not None:
            self.observer.queued(samples)

    def admit(self, seq: Sequence, now: float) -> None:
        """`seq` runs from here on, with the hits that its table already has."""
        self.waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        bisect.insort(self.running, seq, key=_ORDER)
        self._count_admission(seq, now)

    def _count_admission(self, seq: Sequence, now: float) -> None:
        counters = self.counters
        if self.observer is not None:
            self.observer.admitted(seq, first=seq.num_cached is None)
        if seq.num_cached is not None:
            counters.readmission_hit_tokens += seq.num_computed
        elif seq.index > 0:
            seq.num_cached = self.requests[seq.request.request_id][0].num_cached or 0
            seq.num_shared = seq.num_computed
            counters.sibling_hit_tokens += seq.num_computed
        else:
            seq.num_cached = seq.num_computed
            counters.hit_tokens += seq.num_computed
            if self._config.enable_prefix_caching and not seq.needs_every_token:
                counters.query_tokens += seq.num_prompt
            counters.queue_seconds += max(0.0, now - seq.request.arrival)

    def set_back(self, seq: Sequence) -> None:
        """`seq` loses its blocks and waits again, at its old place in line."""
        self.running.remove(seq)
        self.counters.lost_tokens += seq.num_computed
        self.counters.preemptions += 1
        if self.observer is not None:
            self.observer.preempted(seq, seq.num_computed)
        self.tables.free(seq)
        seq.pooled = b""
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        bisect.insort(self.waiting, seq, key=_ORDER)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """`seq` ends; its request is forgotten with the last of its samples."""
        (self.running if seq.status is SequenceStatus.RUNNING else self.waiting).remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        self.tables.free(seq, forget=reason is FinishReason.ERROR)
        self.num_live -= 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.lengths.observe(seq.num_generated)
        if self.observer is not None:
            self.observer.finished(seq)
        samples = self.requests[seq.request.request_id]
        if all(s.finished for s in samples):
            del self.requests[seq.request.request_id]
            self.searches.pop(seq.request.request_id, None)
            reasons = {s.finish_reason for s in samples}
            self.counters.finished[next(r for r in _GRAVITY if r in reasons)] += 1

    def fail(self, sequences: list[Sequence], error: str) -> list[OutputEvent]:
        """These sequences end with an error; their last events."""
        for seq in sequences:
            self.finish(seq, FinishReason.ERROR)
        return terminal_events(sequences, error)

    def siblings_before_first_token(self, seq: Sequence) -> list[Sequence]:
        """Samples of the same request that wait and have drawn nothing yet."""
        samples = self.requests[seq.request.request_id]
        waiting = SequenceStatus.WAITING
        return [s for s in samples if s is not seq and s.status is waiting and not s.num_generated]

    def check_idle(self) -> None:
        """Assert that nothing is left, if nobody is here."""
        if not self.running and not self.waiting:
            used = self.tables.pool.num_used
            assert used == self.tables.retention.num_pinned and not self.requests and self.num_live == 0
