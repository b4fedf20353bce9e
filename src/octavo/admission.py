"""Admission: who of those that wait may start, and what is missing for the one at the front."""

from __future__ import annotations

from octavo.chunks import Chunks
from octavo.config import EngineConfig
from octavo.draft import Draft
from octavo.events import WaitReason
from octavo.foresight import Foresight
from octavo.kv.sizing import blocks_for
from octavo.kv.tables import Hits
from octavo.line import Line
from octavo.preemption import Preemptor
from octavo.request import Sequence, SequenceStatus
from octavo.victims import Preemption

_RUNNING = SequenceStatus.RUNNING


class Admission:
    """Lets sequences in from the front of the line, without overtaking."""

    def __init__(
        self,
        config: EngineConfig,
        line: Line,
        rules: Preemption,
        preemptor: Preemptor,
        chunks: Chunks,
        foresight: Foresight,
    ) -> None:
        self._config = config
        self._line = line
        self._rules = rules
        self._preemptor = preemptor
        self._chunks = chunks
        self._foresight = foresight

    def admit(self, draft: Draft, now: float) -> None:
        """As long as budget, places and blocks last.

        One whose prompt another is computing *rides*: it waits for it without holding up the line, and
        the place and the blocks that it will need stay reserved.
        """
        line, tables = self._line, self._line.tables
        reason: WaitReason | None = None
        computing = [seq for seq in line.running if seq.num_computed < seq.num_prompt]
        num_riding = num_places = num_reserved = 0
        while num_riding < len(line.waiting) and draft.budget > 0:
            seq = line.waiting[num_riding]
            hits = self._find_hits(seq)
            if not seq.block_ids and (num_blocks := self._rides(seq, hits, computing)) is not None:
                num_riding += 1
                num_places += not line.has_started(seq)
                num_reserved += num_blocks
                continue
            beside = seq.request.params.num_sequences - 1 if seq.request.request_id in line.searches else 0
            reserved = (num_places + beside, num_reserved + (beside if seq.request.max_tokens > 1 else 0))
            reason = self._obstacle(seq, hits, reserved)
            if reason is not None and not self._displace_for(seq, hits, reserved, draft):
                # Neither one that has just been displaced nor a pin makes everybody wait.
                if not line.running and (num_riding or tables.retention.yield_one()):
                    num_riding = num_places = num_reserved = 0
                    continue
                break
            computing.append(seq)
            self._preemptor.make_room_for_hits(seq, hits)
            if hits.num_tokens:
                tables.take_hits(seq, hits)
            line.admit(seq, hits.num_tokens, now)
            self._chunks.advance(seq, draft)
        self._tell_who_waits(num_riding, reason if draft.budget > 0 else None)

    def _find_hits(self, seq: Sequence) -> Hits:
        """One that still holds blocks goes on with them, unless more can be hit: then it lets go of them."""
        tables, sibling = self._line.tables, self._sibling_with_prompt(seq)
        hits = tables.find_hits(seq, sibling)
        if not seq.block_ids:
            return hits
        if hits.num_tokens <= seq.num_computed:
            return Hits()
        while seq.block_ids:
            self._line.reclaim(seq, len(seq.block_ids))
        return tables.find_hits(seq, sibling)

    def _tell_who_waits(self, num_riding: int, reason: WaitReason | None) -> None:
        line = self._line
        if line.observer is not None:
            for seq in line.waiting[:num_riding]:
                line.observer.held(seq, WaitReason.PREFIX)
            for seq in line.waiting[num_riding : num_riding + 1]:
                line.observer.held(seq, reason or WaitReason.BUDGET)

    def _rides(self, seq: Sequence, hits: Hits, computing: list[Sequence]) -> int | None:
        """How many blocks `seq` will need when the prompt that it waits for is computed; None if it does not wait.

        A sample waits for its sibling, with which it then shares all blocks. Others wait for whoever
        computes at least half of what they lack.
        """
        num_known, block_size = seq.num_known, self._config.block_size
        for other in computing:
            if other.status is not _RUNNING or other.num_computed >= other.num_prompt:
                continue  # preempted since, or a sample that started from its sibling
            if other.request is seq.request:
                return 1
            num_common = self._line.tables.num_common(seq, other)
            # Its tokens can be hit when their block is full or the whole prompt is there.
            done = min(other.num_prompt, blocks_for(num_common, block_size) * block_size)
            if 2 * (num_common - hits.num_tokens) >= num_known - hits.num_tokens and other.num_computed < done:
                return blocks_for(num_known, block_size) - num_common // block_size
        return None

    def _sibling_with_prompt(self, seq: Sequence) -> Sequence | None:
        """A running sibling, whose blocks hold the prompt: it serves a sample that starts later than the others."""
        if seq.request.params.num_sequences == 1:
            return None
        return next((s for s in self._line.requests[seq.request.request_id] if s.status is _RUNNING), None)

    def _obstacle(self, seq: Sequence, hits: Hits, reserved: tuple[int, int]) -> WaitReason | None:
        """What is missing to admit `seq`, beside the reserved (places, blocks): a place, or free blocks for
        all known tokens. None if nothing is.

        All, not only those of the first chunk, and one to spare where others run: otherwise admitting
        one soon preempts another, and they thrash. For the same reason the blocks that all running
        ones are expected to grow by must be there: see `octavo.foresight`.
        """
        running, tables = self._line.running, self._line.tables
        if self._lacks_places(running, reserved[0]):
            return WaitReason.PLACES
        spare = reserved[1] + (1 if running else 0)
        num_kept = tables.num_freed_by(self._others_holding(seq), but=hits.block_ids)
        num_free = tables.pool.num_free + num_kept
        needed = tables.num_missing(seq, seq.num_known) - len(hits.block_ids)
        needed += tables.pool.num_free_of(hits.block_ids)
        claimed = self._num_claimed()
        if needed + claimed + spare > num_free or not self._rules.keeps_promises(seq, running):
            return WaitReason.BLOCKS
        if self._config.admission == "greedy":
            return None
        expected = self._foresight.expects_room(
            seq, running, tables, needed, claimed + reserved[1] - num_kept, self._num_forks(seq)
        )
        return None if expected else WaitReason.GROWTH

    def _lacks_places(self, running: list[Sequence], reserved: int) -> bool:
        most = min(self._config.max_num_seqs, self._config.max_num_batched_tokens)
        return self._line.num_places_of(running) + reserved >= most

    def _others_holding(self, seq: Sequence) -> list[Sequence]:
        """Those that wait behind `seq`, which is at the front, and hold blocks that it may have."""
        return [s for s in self._line.holding if s is not seq]

    def _num_forks(self, seq: Sequence) -> int:
        """Samples that will start when `seq` has computed their prompt."""
        if seq.request.params.num_sequences == 1 or seq.num_generated:
            return 0
        return len(self._line.siblings_before_first_token(seq))

    def _num_claimed(self) -> int:
        """Blocks that running sequences which have not caught up still have to take.

        Without a cap on chunks they leave no budget to admit others, so then nobody needs to ask.
        """
        if not self._config.long_prefill_token_threshold:
            return 0
        return sum(max(0, self._line.tables.num_missing(s, s.num_known)) for s in self._line.running)

    def _displace_for(self, seq: Sequence, hits: Hits, reserved: tuple[int, int], draft: Draft) -> bool:
        """Preempt running sequences of lower priority that come after `seq` in line, if that makes room for it."""
        tables = self._line.tables
        later = [s for s in self._line.running if self._rules.may_displace(seq, s)]
        if not later:
            return False
        attainable = tables.pool.num_free + tables.num_freed_by([*later, *self._others_holding(seq)])
        stay = [s for s in self._line.running if s not in later]
        if tables.num_missing(seq, seq.num_known) > attainable or self._lacks_places(stay, reserved[0]):
            return False
        while later and self._obstacle(seq, hits, reserved):
            self._preemptor.preempt(later.pop(), draft)
        return self._obstacle(seq, hits, reserved) is None
