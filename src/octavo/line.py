"""The line: who waits, who runs, and in which order. Every change of a sequence's status is made here."""

from __future__ import annotations

import bisect
from operator import attrgetter

from octavo.beams import BeamSearch
from octavo.config import EngineConfig
from octavo.counters import Counters
from octavo.errors import QueueFullError, RequestError
from octavo.events import Observer, OutputEvent, terminal_events
from octavo.foresight import Experience, num_private_blocks
from octavo.kv.sizing import blocks_for
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
    place in line, which is before everyone who came later. KV blocks are held by what runs, and by what
    was set back and keeps them until somebody needs them: `holding`, sorted as well.
    """

    def __init__(self, config: EngineConfig, tables: BlockTables) -> None:
        self.tables = tables
        self.counters = Counters()
        self.experience = Experience()
        self.observer: Observer | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.holding: list[Sequence] = []
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

    def admit(self, seq: Sequence, num_hits: int, now: float) -> None:
        """`seq` runs from here on; `num_hits` of its computed tokens it has just taken from others or the cache."""
        self.waiting.remove(seq)
        if seq in self.holding:
            self.holding.remove(seq)
        seq.status = SequenceStatus.RUNNING
        bisect.insort(self.running, seq, key=_ORDER)
        counters = self.counters
        if self.observer is not None:
            self.observer.admitted(seq, num_hits, first=seq.num_cached is None)
        if seq.num_cached is not None:
            counters.readmission_hit_tokens += num_hits
        elif seq.index > 0:
            seq.num_cached = self.requests[seq.request.request_id][0].num_cached or 0
            seq.num_shared = num_hits
            counters.sibling_hit_tokens += num_hits
        else:
            seq.num_cached = num_hits
            counters.hit_tokens += num_hits
            if self._config.enable_prefix_caching and not seq.needs_every_token:
                counters.query_tokens += seq.num_prompt
            counters.queue_seconds += max(0.0, now - seq.request.arrival)

    def set_back(self, seq: Sequence, *, keep: bool) -> None:
        """`seq` waits again, at its old place in line. It loses its blocks, or `keep`s those that hold something."""
        num_lost = 0 if keep else seq.num_computed
        self.running.remove(seq)
        self.counters.lost_tokens += num_lost
        self.counters.preemptions += 1
        if self.observer is not None:
            self.observer.preempted(seq, num_lost)
        if keep and seq.num_computed:
            self.tables.cut(seq, blocks_for(seq.num_computed, self.tables.block_size))
            bisect.insort(self.holding, seq, key=_ORDER)
        else:
            self.tables.free(seq)
            seq.pooled = b""
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        bisect.insort(self.waiting, seq, key=_ORDER)

    def reclaim(self, seq: Sequence, num_blocks: int) -> None:
        """Take blocks back from one of `holding`: of the last ones that nobody else holds at most `num_blocks`.

        If others hold all of them, it lets go of all: then they may be somebody's own.
        """
        num_before, num_private = seq.num_computed, num_private_blocks(seq, self.tables)
        if num_private:
            self.tables.cut(seq, len(seq.block_ids) - min(num_blocks, num_private))
        else:
            self.tables.free(seq)
        if not seq.block_ids:
            self.holding.remove(seq)
        self.counters.lost_tokens += num_before - seq.num_computed
        if self.observer is not None:
            self.observer.reclaimed(seq, num_before - seq.num_computed)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """`seq` ends; its request is forgotten with the last of its samples."""
        (self.running if seq.status is SequenceStatus.RUNNING else self.waiting).remove(seq)
        if seq in self.holding:
            self.holding.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        self.tables.free(seq, forget=reason is FinishReason.ERROR)
        self.num_live -= 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.experience.lengths.observe(seq.num_generated)
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

    def num_places_of(self, running: list[Sequence]) -> int:
        """Rows that these will have in a step: all beams of a search count from its start."""
        num_to_come = 0
        for search in self.searches.values():
            if search.sequences[0] in running:
                num_to_come += sum(beam.status is SequenceStatus.WAITING for beam in search.sequences)
        return len(running) + num_to_come

    def has_started(self, seq: Sequence) -> bool:
        """Does the search run that this is a beam of?"""
        search = self.searches.get(seq.request.request_id)
        return search is not None and search.sequences[0].status is SequenceStatus.RUNNING

    def siblings_before_first_token(self, seq: Sequence) -> list[Sequence]:
        """Samples of the same request that wait, have drawn nothing yet and hold nothing of their own."""
        samples = self.requests[seq.request.request_id]
        waiting = SequenceStatus.WAITING
        return [s for s in samples if s is not seq and s.status is waiting and not (s.num_generated or s.block_ids)]

    def check_idle(self) -> None:
        """Assert that nothing is left, if nobody is here."""
        if not self.running and not self.waiting:
            used = self.tables.pool.num_used
            assert used == self.tables.retention.num_pinned and not self.requests and self.num_live == 0
