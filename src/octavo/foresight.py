"""Admission with foresight: how long answers will get, and whether the pool can hold what is then known.

Admitting everyone whose prompt fits fills the pool with sequences that all still grow; they then preempt
each other and compute the same tokens again. So a sequence is admitted only if the expected peak of the
blocks in use, over the time until the last one ends, stays within the pool.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence as ListLike
from itertools import accumulate

from octavo.kv.tables import BlockTables
from octavo.request import Request, Sequence

WINDOW = 256  # finished answers that the estimate remembers
PRIOR_TOKENS = 512  # what an answer is taken to have before any has finished ...
PRIOR_WEIGHT = 2  # ... counted as so many finished answers


class LengthEstimate:
    """Expected length of answers, from those that finished last.

    An answer that already has g tokens is compared to the finished ones with more than g only: that of
    a sequence that outlived the average is longer than the average.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # sums of the first 0, 1, 2 ... of `_sorted`

    def observe(self, num_generated: int) -> None:
        """An answer ended by itself (not because its client left) after so many tokens."""
        if len(self._recent) == WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(num_generated)
        bisect.insort(self._sorted, num_generated)
        self._sums = None

    def remaining(self, num_generated: int, max_tokens: int) -> float:
        """Expected number of tokens that a sequence will still generate.

        The mean of min(length, max_tokens) over the finished answers longer than `num_generated`, and a prior:
        PRIOR_TOKENS, or for one that is already longer, as much again as it has.
        """
        if self._sums is None:
            self._sums = list(accumulate(self._sorted, initial=0))
        longer = bisect.bisect_right(self._sorted, num_generated)
        capped = bisect.bisect_right(self._sorted, max_tokens, lo=longer)
        total = float(self._sums[capped] - self._sums[longer] + (len(self._sorted) - capped) * max_tokens)
        count = len(self._sorted) - longer
        prior = PRIOR_TOKENS if num_generated < PRIOR_TOKENS else 2 * num_generated
        total += PRIOR_WEIGHT * min(prior, max_tokens)
        return max(0.0, total / (count + PRIOR_WEIGHT) - num_generated)


class BeamSpread:
    """Which part of what its beams generate a search keeps apart: 1 if they share nothing but the prompt.

    Beams come from common ancestors, so most of their text is one text, in the same blocks.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def observe(self, beams: ListLike[Sequence], block_size: int) -> None:
        """A search ended with these beams, which still hold their blocks."""
        num_tokens = sum(seq.num_generated for seq in beams)
        held = {block_id for seq in beams for block_id in seq.block_ids[seq.num_prompt // block_size :]}
        self._recent.append(min(1.0, len(held) * block_size / max(1, num_tokens)))

    @property
    def expected(self) -> float:
        """The mean over the last searches, and a prior of 1."""
        return (sum(self._recent) + PRIOR_WEIGHT) / (len(self._recent) + PRIOR_WEIGHT)


def max_tokens_of(request: Request, max_known: int) -> int:
    """Most tokens that one sequence of the request can generate; the last one needs no KV."""
    return max(0, min(request.max_tokens, max_known - len(request.prompt_token_ids)))


def expected_peak(num_used: int, sequences: ListLike[tuple[float, int, float]], block_size: int) -> float:
    """Blocks in use at the worst expected moment.

    `num_used` blocks now; `sequences`: (expected remaining tokens, blocks that it gives back at its end, tokens
    that it grows by in a step: 1, or for a beam what it does not share with the others). So use is highest just
    before one of them ends. Growing by t tokens takes t / block_size blocks on average, wherever in its last block
    a sequence is.
    """
    peak = float(num_used)
    freed = 0
    growth = sum(rate for _, _, rate in sequences)
    for remaining, num_private, rate in sorted(sequences):
        peak = max(peak, num_used + growth * remaining / block_size - freed)
        # From here on neither what it had nor what it grew by counts.
        freed += num_private
        growth -= rate
    return peak


class Experience:
    """What the requests of this engine were like so far."""

    def __init__(self) -> None:
        self.lengths = LengthEstimate()  # of the answers that ended by themselves
        self.spread = BeamSpread()


class Foresight:
    """Says whether one more sequence is expected to fit until the end, if answers are like those that `experience` has
    seen."""

    def __init__(self, num_blocks: int, block_size: int, max_known: int, experience: Experience) -> None:
        self._limit = num_blocks
        self._block_size = block_size
        self._max_known = max_known
        self._experience = experience

    def expects_room(
        self,
        seq: Sequence,
        running: ListLike[Sequence],
        tables: BlockTables,
        needed: int,
        claimed: int = 0,
        num_forks: int = 0,
    ) -> bool:
        """`needed`: blocks that `seq` takes for its known tokens; `claimed`: that others will take in any case, less
        those in use that it could have; `num_forks`: samples that start when it has computed the prompt, each in
        a block of its own."""
        if not running:
            return True
        growth = [(self._remaining(s), num_private_blocks(s, tables), self._rate(s)) for s in running]
        growth.append((self._remaining(seq), needed + num_private_blocks(seq, tables), self._rate(seq)))
        growth += [(self._remaining(seq), 1, self._rate(seq))] * num_forks
        num_used = tables.pool.num_used + claimed + needed + num_forks
        return expected_peak(num_used, growth, self._block_size) <= self._limit

    def _remaining(self, seq: Sequence) -> float:
        return self._experience.lengths.remaining(seq.num_generated, max_tokens_of(seq.request, self._max_known))

    def _rate(self, seq: Sequence) -> float:
        return self._experience.spread.expected if seq.request.params.use_beam_search else 1.0


def num_private_blocks(seq: Sequence, tables: BlockTables) -> int:
    """Blocks that nobody else holds. What is shared is the beginning, so this is a binary search."""
    ref_counts = tables.pool.ref_counts
    shared = bisect.bisect_left(seq.block_ids, True, key=lambda block_id: ref_counts[block_id] == 1)
    return len(seq.block_ids) - shared
