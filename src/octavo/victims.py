"""Who gives way when blocks or places run out: rules only, `preemption.py` carries them out."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from octavo.config import EngineConfig
from octavo.foresight import max_tokens_of, num_private_blocks
from octavo.kv.sizing import blocks_for
from octavo.kv.tables import BlockTables
from octavo.request import Sequence


class Preemption:
    """Who may lose its blocks, for whom, and how often.

    Three rules keep it from going on for ever: the first in line is never a victim; nobody displaces
    within a level of priority; and after `max_preemptions` a sequence is *safe*, see `keeps_promises`.
    """

    def __init__(self, config: EngineConfig, tables: BlockTables, max_known: int) -> None:
        self._by_priority = config.scheduling_policy == "priority"
        self._max_preemptions = config.max_preemptions
        self._tables = tables
        self._max_known = max_known

    def is_safe(self, seq: Sequence) -> bool:
        return seq.num_preemptions >= self._max_preemptions

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        """May `waiting` take the place of `running`? Only across levels of priority, and in the aged order.

        Together with an order that never changes this rules out that two displace each other in turn.
        """
        return (
            self._by_priority
            and waiting.request.priority < running.request.priority
            and waiting.order < running.order
            and not self.is_safe(running)
        )

    def choose_victim(self, running: ListLike[Sequence], seq: Sequence) -> Sequence:
        """Whom to preempt when blocks run out for `seq`; `running` is sorted by order.

        One that comes after `seq` in line and is not safe: of the lowest level of priority, then the one
        whose loss costs least, then the last. If there is none, `seq` itself gives way. So the first in
        line is never preempted: it finishes, then the next is first, and there is no livelock.
        """
        assert len(running) > 1, "a sequence alone in the pool always fits"
        later = [s for s in running if s.order > seq.order and not self.is_safe(s)]
        if later:
            return min(later, key=self._cost)
        return seq if seq is not running[0] else running[-1]

    def must_stay(self, seq: Sequence, running: ListLike[Sequence]) -> bool:
        """Has nobody to take blocks from, and must not give way itself: the first in line, or a safe one."""
        if seq is not running[0] and not self.is_safe(seq):
            return False
        return not any(s.order > seq.order and not self.is_safe(s) for s in running)

    def _cost(self, seq: Sequence) -> tuple[bool, int, int, float, int, int]:
        rank, serial, index = seq.order
        level = -seq.request.priority if self._by_priority else 0
        frees_nothing = num_private_blocks(seq, self._tables) == 0
        return frees_nothing, level, recompute_cost(seq, self._tables), -rank, -serial, -index

    def keeps_promises(self, seq: Sequence, running: ListLike[Sequence]) -> bool:
        """May `seq` run without endangering one that is safe from preemption?

        A safe sequence runs only when everything before it in line, every other safe one and itself fit at
        their greatest length. Then blocks never run out among these, and whoever else is short of blocks
        finds a victim outside of them. So `max_preemptions` is a bound, not a wish.
        """
        safe = [s for s in running if self.is_safe(s)]
        if self.is_safe(seq):
            safe.append(seq)
        if not safe:
            return True
        last = max(s.order for s in safe)
        guarded = [s for s in running if s.order <= last]
        if seq.order > last or not guarded:
            return True
        num_blocks = self._tables.pool.num_blocks - self._tables.retention.num_pinned
        return self._most_blocks([*guarded, seq]) <= num_blocks

    def _most_blocks(self, sequences: ListLike[Sequence]) -> int:
        """Blocks at their greatest length, as if they shared none but the beams of a search their prompt.

        The last token needs no KV. All beams of a search count, also those that have not started yet.
        """
        block_size, num_blocks, searches = self._tables.block_size, 0, set()
        for seq in sequences:
            num_known = seq.num_prompt + max_tokens_of(seq.request, self._max_known)
            most = blocks_for(max(seq.num_prompt, num_known - 1), block_size)
            if seq.request.params.use_beam_search:
                if seq.request.request_id in searches:
                    continue
                searches.add(seq.request.request_id)
                num_shared = seq.num_prompt // block_size
                most = num_shared + seq.request.params.num_sequences * (most - num_shared)
            num_blocks += most
        return num_blocks


def recompute_cost(seq: Sequence, tables: BlockTables) -> int:
    """Tokens that would have to be computed again: all, but for the full blocks that others hold anyway.

    What only the prefix cache would keep does not count as kept: one preempts when no block is free, and
    then the freed ones are handed out next.
    """
    num_shared = len(seq.block_ids) - num_private_blocks(seq, tables)
    return max(0, seq.num_computed - num_shared * tables.block_size)
