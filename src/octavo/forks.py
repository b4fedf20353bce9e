"""Samples that start together: where their prompt is complete, they begin on the blocks of the one that computed it."""

from __future__ import annotations

from dataclasses import replace

from octavo.config import EngineConfig
from octavo.draft import Draft, sample_spec
from octavo.line import Line
from octavo.request import MAX_SAMPLES, Sequence
from octavo.victims import Preemption


class Forks:
    """Plans forks, and starts them when the step is committed."""

    def __init__(self, config: EngineConfig, line: Line, rules: Preemption) -> None:
        self._line = line
        self._rules = rules
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)

    def plan(self, draft: Draft) -> None:
        """Samples that wait for their prompt draw their first token from the logits of the sibling that has it.

        As many as there are places and blocks for the step after this one; the others are admitted later.
        """
        line, pool = self._line, self._line.tables.pool
        beams: dict[Sequence, list[Sequence]] = {}  # their places are kept from the start of the search
        for seq, row in draft.rows.items():
            if row.start + len(row.token_ids) != seq.num_known or seq.num_generated > 0:
                continue
            if seq.request.request_id in line.searches:
                beams[seq] = [s for s in line.requests[seq.request.request_id] if s is not seq]
                continue
            others = line.num_places_of(line.running) + draft.num_forks
            most = self._max_rows - others
            if any(map(self._rules.is_safe, line.running)):
                most = 0  # admission looks whether the promise to those can be kept; forking does not
            most = min(most, pool.num_free - (others > 1)) if row.sample is not None else MAX_SAMPLES
            siblings = line.siblings_before_first_token(seq)
            if most > 0 and siblings:
                draft.forks[seq] = siblings[:most]
        for seq, forks in draft.forks.items():
            row = draft.rows[seq]
            if row.sample is not None:
                draft.rows[seq] = replace(row, forks=tuple(sample_spec(fork) for fork in forks))
        draft.forks |= beams

    def start(self, fork: Sequence, seq: Sequence) -> None:
        """`fork` runs from here on, on the blocks of its sibling `seq`, whose prompt has just been computed."""
        line = self._line
        line.tables.share(seq, fork)
        line.admit(fork, fork.num_computed, 0.0)  # its queue time is its request's
