"""KV blocks: reference counts and an O(1) free list whose order is the eviction order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from octavo.kv.prefix import PrefixCache


class BlockPool:
    """Hands out block ids 0 .. num_blocks-1.

    Every block is either in use (reference count >= 1) or in the free list. A free block that the
    prefix cache still knows stays findable until it is handed out for something else.

    The free list is a doubly linked ring through two arrays, written by hand because a cached block
    must leave it from the middle in O(1) when a request hits it (a deque cannot). Its order is the
    policy: blocks without content worth keeping wait at the head, cached ones at the tail, so the head
    is always the block whose loss costs least::

        head -> [not cached ...] -> [cached, least recently released ... most recently released] -> tail
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.cache = cache
        self.on_free: Callable[[int], None] | None = None  # hears when a cached block joins the free list ...
        self.on_take: Callable[[int], None] | None = None  # ... and when a block leaves it
        self.reset()

    def reset(self) -> None:
        """Take every block back and forget all cached content."""
        n = self.num_blocks
        self.cache.clear()
        self.ref_counts: list[int] = [0] * n
        self._next: list[int] = [*range(1, n + 1), 0]  # entry n is the ring's anchor
        self._prev: list[int] = [n, *range(n)]
        self.num_free = n

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Take the cheapest free block, with reference count 1; its old content stops being findable."""
        assert self.num_free > 0, "allocate() from an empty pool"
        block_id = self._leaf_of(self._next[self.num_blocks])
        self._unlink(block_id)
        self.cache.forget(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def _leaf_of(self, block_id: int) -> int:
        """A free block at the end of what goes on from this one, usually itself: leaves go before roots."""
        while True:
            free = next((b for b in self.cache.children(block_id) if self.ref_counts[b] == 0), None)
            if free is None:
                return block_id
            block_id = free

    def give_up(self, block_id: int) -> None:
        """Forget what a free block (or, rather, a leaf of it) holds, and hand it out next."""
        block_id = self._leaf_of(block_id)
        self._unlink(block_id)
        self.cache.forget(block_id)
        self._link(block_id, at_tail=False)

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks that the prefix cache found, whether in use or free."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                self._unlink(block_id)
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a sequence, `block_ids` in the order of the tokens.

        The last block goes first, so that of one sequence the end is evicted before the beginning:
        a prefix without its end is still useful, an end without its prefix is not.
        """
        for block_id in reversed(block_ids):
            count = self.ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than retained"
            self.ref_counts[block_id] = count
            if count == 0:
                cached = block_id in self.cache
                self._link(block_id, at_tail=cached)
                if cached and self.on_free is not None:
                    self.on_free(block_id)

    def num_free_of(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are free now, that is, would leave the free list on `retain`."""
        return sum(self.ref_counts[block_id] == 0 for block_id in block_ids)

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that the books balance: O(num_blocks), for tests and for idle moments.

        `block_tables` are the tables of all sequences that hold blocks.
        """
        held = Counter(block_id for table in block_tables for block_id in table)
        free = self._free_ids()
        assert len(free) == len(set(free)) == self.num_free, "the free list holds a block twice or lost its count"
        for block_id, count in enumerate(self.ref_counts):
            assert count == held[block_id], f"block {block_id}: {count} references, {held[block_id]} uses in tables"
        assert set(free) == {b for b, count in enumerate(self.ref_counts) if count == 0}
        self.cache.check(self.num_blocks)

    def _free_ids(self) -> list[int]:
        """The free list from head to tail."""
        anchor = self.num_blocks
        ids: list[int] = []
        block_id = self._next[anchor]
        while block_id != anchor and len(ids) <= self.num_blocks:
            assert self._prev[self._next[block_id]] == block_id, f"broken link at block {block_id}"
            ids.append(block_id)
            block_id = self._next[block_id]
        return ids

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1
        if self.on_take is not None:
            self.on_take(block_id)

    def _link(self, block_id: int, *, at_tail: bool) -> None:
        anchor = self.num_blocks
        before, after = (self._prev[anchor], anchor) if at_tail else (anchor, self._next[anchor])
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id] = before
        self._next[block_id] = after
        self.num_free += 1
