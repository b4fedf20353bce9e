"""Preemption carried out: blocks are taken from those that come later in line."""

from __future__ import annotations

import logging

from octavo.draft import Draft
from octavo.line import Line
from octavo.policies import Preemption
from octavo.request import Sequence, SequenceStatus

logger = logging.getLogger(__name__)


class Preemptor:
    """Does what `policies.Preemption` decides. Taking back what the step had planned for a victim is part of it."""

    def __init__(self, line: Line, rules: Preemption) -> None:
        self._line = line
        self._rules = rules

    def make_room(self, seq: Sequence, end: int, draft: Draft) -> bool:
        """Have the free blocks that running `seq` needs to hold `end` tokens. False: it had to give way itself."""
        tables = self._line.tables
        while tables.num_missing(seq, end) > tables.pool.num_free:
            rivals = self._rivals(seq)
            if self._rules.must_stay(seq, rivals) and tables.retention.yield_one():
                continue
            self.preempt(self._rules.choose_victim(rivals, seq), draft)
            if seq.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _rivals(self, seq: Sequence) -> list[Sequence]:
        """All that run, but for the other beams of the same search: they stand or fall together."""
        running = self._line.running
        if seq.request.request_id not in self._line.searches:
            return running
        return [s for s in running if s is seq or s.request is not seq.request]

    def preempt(self, seq: Sequence, draft: Draft) -> None:
        """Take the blocks of `seq` away; it waits and later recomputes (or hits) what it had.

        The beams of a search go together, and the search starts again from the prompt.
        """
        search = self._line.searches.get(seq.request.request_id)
        if search is None:
            self._set_back(seq, draft)
            return
        for beam in search.sequences:
            if beam.status is SequenceStatus.RUNNING:
                self._set_back(beam, draft)
        search.restart()

    def _set_back(self, seq: Sequence, draft: Draft) -> None:
        line = self._line
        draft.drop(seq)
        line.set_back(seq)
        total = line.counters.preemptions
        if total & (total - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: the log stays short under lasting pressure
            logger.warning(
                "a sequence lost its KV blocks and will be recomputed: %d preemptions so far "
                "(%d blocks, %d running, %d waiting); more KV memory or a smaller max_num_seqs avoids it",
                total,
                line.tables.pool.num_blocks,
                len(line.running),
                len(line.waiting),
            )
