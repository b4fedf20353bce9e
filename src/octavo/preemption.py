"""Preemption carried out: blocks are taken from those that come later in line.

Whole, a victim loses all its blocks. With `tail` it keeps them while it waits, and those that need blocks take
them from its end, as many as they need. Kept blocks never make anything wait for ever: whoever comes before the
keeper in line may take them, the front of the line among them, and so may one that must not give way itself.
"""

from __future__ import annotations

import logging

from octavo.draft import Draft
from octavo.kv.tables import Hits
from octavo.line import Line
from octavo.request import Sequence, SequenceStatus
from octavo.victims import Preemption

logger = logging.getLogger(__name__)


class Preemptor:
    """Does what `victims.Preemption` decides. Taking back what the step had planned for a victim is part of it."""

    def __init__(self, line: Line, rules: Preemption, *, tail: bool) -> None:
        self._line = line
        self._rules = rules
        self._tail = tail

    def make_room(self, seq: Sequence, end: int, draft: Draft) -> bool:
        """Have the free blocks that running `seq` needs to hold `end` tokens. False: it had to give way itself."""
        tables = self._line.tables
        while (num_lacking := tables.num_missing(seq, end) - tables.pool.num_free) > 0:
            if self.reclaim(num_lacking, after=seq):
                continue
            rivals = self._rivals(seq)
            if self._rules.must_stay(seq, rivals) and (self.reclaim(num_lacking) or tables.retention.yield_one()):
                continue
            self.preempt(self._rules.choose_victim(rivals, seq), draft)
            if seq.status is not SequenceStatus.RUNNING:
                return False
        return True

    def make_room_for_hits(self, seq: Sequence, hits: Hits) -> None:
        """A hit that ends inside of a block is copied: have a free block for that, beside those that are taken."""
        pool = self._line.tables.pool
        while hits.partial is not None and pool.num_free <= pool.num_free_of(hits.block_ids):
            found = self.reclaim(1, after=seq)
            assert found, "admitted without a block for the copy"

    def reclaim(self, num_blocks: int, after: Sequence | None = None) -> bool:
        """Take kept blocks from the last in line that keeps any, if it comes after this one (None: any). See `Line`."""
        holding = self._line.holding
        if not holding or (after is not None and holding[-1].order <= after.order):
            return False
        self._line.reclaim(holding[-1], num_blocks)
        return True

    def _rivals(self, seq: Sequence) -> list[Sequence]:
        """All that run, but for the other beams of the same search: they stand or fall together."""
        running = self._line.running
        if seq.request.request_id not in self._line.searches:
            return running
        return [s for s in running if s is seq or s.request is not seq.request]

    def preempt(self, seq: Sequence, draft: Draft) -> None:
        """`seq` waits again and later recomputes (or hits) what it loses.

        The beams of a search go together, and the search starts again from the prompt. What pooling has made of
        the tokens so far cannot be cut, so it starts again as well.
        """
        search = self._line.searches.get(seq.request.request_id)
        if search is None:
            self._set_back(seq, draft, keep=self._tail and seq.request.params.pooling is None)
            return
        for beam in search.sequences:
            if beam.status is SequenceStatus.RUNNING:
                self._set_back(beam, draft, keep=False)
        num_preemptions = max(beam.num_preemptions for beam in search.sequences)
        for beam in search.sequences:  # those that had not started yet wait for the same search
            beam.num_preemptions = num_preemptions
        search.restart()

    def _set_back(self, seq: Sequence, draft: Draft, *, keep: bool) -> None:
        line = self._line
        draft.drop(seq)
        line.set_back(seq, keep=keep)
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
