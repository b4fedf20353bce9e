"""How many tokens each running sequence gets in a step."""

from __future__ import annotations

from octavo.draft import Draft
from octavo.line import Line
from octavo.preemption import Preemptor
from octavo.request import Sequence, SequenceStatus

_RUNNING = SequenceStatus.RUNNING


class Chunks:
    """`cap`: most tokens of one sequence in a step where others run or wait; 0: no limit but the budget."""

    def __init__(self, line: Line, preemptor: Preemptor, cap: int) -> None:
        self._line = line
        self._preemptor = preemptor
        self._cap = cap

    def advance_running(self, draft: Draft) -> None:
        """Sequences that need one token first, so that long prompts never hold up a running answer."""
        behind = []
        for seq in tuple(self._line.running):
            if len(seq.token_ids) - seq.num_computed == 1:
                self.advance(seq, draft)
            else:
                behind.append(seq)
        for seq in behind:
            self.advance(seq, draft)

    def advance(self, seq: Sequence, draft: Draft) -> None:
        """Give `seq` as many tokens as the budget has; preempt others after it in line for its blocks."""
        if seq.status is not _RUNNING:
            return  # preempted a moment ago, for one before it in line
        line, computed = self._line, seq.num_computed
        most = draft.budget
        if self._cap and len(line.running) + len(line.waiting) > 1:
            most = min(most, self._cap)
        end = min(len(seq.token_ids), computed + most)
        if end <= computed:
            return
        tables = line.tables
        if tables.num_missing(seq, end) > tables.pool.num_free and not self._preemptor.make_room(seq, end, draft):
            return
        tables.grow(seq, end)
        if line.observer is not None and (end - computed > 1 or computed < seq.num_prompt):
            line.observer.computing(seq, end - computed)
        draft.add(seq, end)
