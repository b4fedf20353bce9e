"""Block tables of sequences: taking hits, sharing, growing, freeing, and making blocks findable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.kv.pool import BlockPool
from octavo.kv.prefix import PrefixCache, extend_block_hashes, root_hash
from octavo.kv.retention import Retention
from octavo.kv.sizing import blocks_for
from octavo.request import Sequence


@dataclass(frozen=True, slots=True)
class Hits:
    """Where the KV of the first `num_tokens` tokens of a sequence already is.

    `block_ids` are full blocks, to be shared. What goes beyond them are the first tokens of the block
    `partial`: the sequence will write behind them, so it gets a copy.
    """

    num_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    partial: int | None = None


class BlockTables:
    """The only place that changes `Sequence.block_ids`.

    Copy-on-write: a block with several references is read by all their holders and written by none.
    Whoever writes next to one gets a copy first (`grow`), and the last holder writes in place. Only the
    last block of a table can be written to, so one copy per sequence and step is enough.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        max_pinned: int = 0,
        quota: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, PrefixCache())
        self.retention = Retention(self.pool, block_size, max_pinned, quota)
        self._copies: list[tuple[int, int]] = []

    def num_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before `seq` can hold `num_tokens` tokens, the copy of a shared one included."""
        return blocks_for(num_tokens, self.block_size) - len(seq.block_ids) + self._writes_shared(seq)

    def _writes_shared(self, seq: Sequence) -> bool:
        """Is the block that the next token of `seq` goes to one that others read?"""
        i = seq.num_computed // self.block_size
        return i < len(seq.block_ids) and self.pool.ref_counts[seq.block_ids[i]] > 1

    def find_hits(self, seq: Sequence, sibling: Sequence | None = None) -> Hits:
        """What is already there of `seq`, in the prefix cache or with a running `sibling`; takes no reference.

        The last known token is never part of it, since its logits are what the next token is drawn
        from. Tokens whose prompt logprobs are still owed are not either: a hit has no logits.
        """
        limit = seq.hit_limit
        cached = self._find_cached(seq, limit)
        if sibling is None:
            return cached
        num_shared = min(limit, seq.num_prompt, sibling.num_computed)
        if num_shared <= cached.num_tokens:
            return cached
        full, rest = divmod(num_shared, self.block_size)
        return Hits(num_shared, sibling.block_ids[:full], sibling.block_ids[full] if rest else None)

    def _find_cached(self, seq: Sequence, limit: int) -> Hits:
        if not self.enable_prefix_caching:
            return Hits()
        num_full = limit // self.block_size
        if num_full > len(seq.block_hashes):
            self._extend_hashes(seq, num_full)
        block_ids = self.pool.cache.find(seq.block_hashes, num_full)
        start = len(block_ids) * self.block_size
        rest = seq.token_ids[start : min(start + self.block_size, limit)]
        found = self.pool.cache.tokens.find(self._parent(seq, len(block_ids)), rest) if rest else None
        if found is None:
            return Hits(start, block_ids)
        return Hits(start + found[1], block_ids, found[0])

    def num_common(self, seq: Sequence, other: Sequence) -> int:
        """Leading tokens of `seq` that it will be able to hit once `other` has computed its prompt."""
        if not self.enable_prefix_caching or self._parent(seq, 0) != self._parent(other, 0):
            return 0
        limit = min(seq.hit_limit, other.num_prompt)
        num_equal = 0  # hashes are chained: the equal ones come first
        for mine, theirs in zip(seq.block_hashes, other.block_hashes, strict=False):
            if mine != theirs:
                break
            num_equal += 1
        start = min(num_equal * self.block_size, limit)
        for i, (a, b) in enumerate(zip(seq.token_ids[start:limit], other.token_ids[start:limit], strict=True)):
            if a != b:
                return start + i
        return limit

    def take_hits(self, seq: Sequence, hits: Hits) -> None:
        """Start `seq` on what `find_hits` returned; the pool must have a block for the copy."""
        assert not seq.block_ids and seq.num_computed == 0
        self.pool.retain(hits.block_ids)
        self.retention.hit([*hits.block_ids, *([] if hits.partial is None else [hits.partial])])
        seq.block_ids = list(hits.block_ids)
        seq.num_registered = len(seq.block_ids)
        if hits.partial is not None:
            seq.block_ids.append(self._copy(hits.partial))
        seq.num_computed = hits.num_tokens

    def share(self, seq: Sequence, sibling: Sequence) -> None:
        """Give `sibling` all that `seq` has computed, its last block included, by reference."""
        assert not sibling.block_ids and sibling.num_computed == 0
        self.pool.retain(seq.block_ids)
        sibling.block_ids = list(seq.block_ids)
        sibling.block_hashes = seq.block_hashes[: seq.num_registered]
        sibling.num_registered = seq.num_registered
        sibling.num_computed = seq.num_computed

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Allocate blocks so that `seq` can hold `num_tokens` tokens and writes to none that others read."""
        missing = blocks_for(num_tokens, self.block_size) - len(seq.block_ids)
        if self._writes_shared(seq):
            i = seq.num_computed // self.block_size
            shared = seq.block_ids[i]
            seq.block_ids[i] = self._copy(shared)
            self.pool.release([shared])
        for _ in range(missing):
            seq.block_ids.append(self.pool.allocate())

    def _copy(self, source: int) -> int:
        target = self.pool.allocate()
        if target != source:  # a free source may be the very block that is handed out: its content stays
            self._copies.append((source, target))
        return target

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies that the step being planned has to make before it writes, in their order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def register(self, seq: Sequence) -> None:
        """Make the blocks findable that are full now. Only after the step that wrote them is committed."""
        num_full = seq.num_computed // self.block_size
        if num_full <= seq.num_registered or not self.enable_prefix_caching:
            return
        if num_full > len(seq.block_hashes):
            self._extend_hashes(seq, num_full)
        for i in range(seq.num_registered, num_full):
            self._register(seq, i)
        seq.num_registered = num_full

    def _register(self, seq: Sequence, i: int) -> None:
        token_ids = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
        self.pool.cache.register(seq.block_hashes[i], seq.block_ids[i], self._parent(seq, i), token_ids)
        self.retention.registered(seq.block_ids[i], seq.block_hashes[i], seq.request.tenant)

    def register_tail(self, seq: Sequence) -> None:
        """Make the tokens in the last, partly written block findable. After `register`."""
        full = seq.num_computed // self.block_size
        token_ids = seq.token_ids[full * self.block_size : seq.num_computed]
        if token_ids and self.enable_prefix_caching:
            self.pool.cache.register_tail(self._parent(seq, full), token_ids, seq.block_ids[full])
            self.retention.registered(seq.block_ids[full], b"", seq.request.tenant)

    def num_freed_by(self, sequences: Iterable[Sequence], but: Iterable[int] = ()) -> int:
        """Blocks, other than `but`, that would become free if all these sequences gave theirs back."""
        held = Counter(block_id for seq in sequences for block_id in seq.block_ids)
        for block_id in but:
            held.pop(block_id, None)
        return sum(self.pool.ref_counts[block_id] == count for block_id, count in held.items())

    def cut(self, seq: Sequence, num_kept: int) -> None:
        """Give back all but the first `num_kept` blocks; the tokens in the others are no longer computed."""
        self.pool.release(seq.block_ids[num_kept:])
        del seq.block_ids[num_kept:]
        seq.num_computed = min(seq.num_computed, num_kept * self.block_size)
        seq.num_registered = min(seq.num_registered, num_kept)

    def free(self, seq: Sequence, *, forget: bool = False) -> None:
        """Give all blocks back. `forget`: their content is not to be trusted, nobody may hit it."""
        if forget:
            for block_id in seq.block_ids:
                self.pool.cache.forget(block_id)
        else:
            self._restore(seq)
            self.register_tail(seq)
        self.pool.release(seq.block_ids)
        self._clear(seq)

    def drop(self, seq: Sequence) -> None:
        """Give all blocks back without making the last one findable: nobody will come for this text again."""
        self._restore(seq)
        self.pool.release(seq.block_ids)
        self._clear(seq)

    def _restore(self, seq: Sequence) -> None:
        """Make blocks findable whose equals were, until they were evicted: a leaf without its root is of no use."""
        for i in range(min(seq.num_registered, len(seq.block_hashes)) if self.enable_prefix_caching else 0):
            if not self.pool.cache.find(seq.block_hashes[i : i + 1], 1):
                self._register(seq, i)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Take everything back by force, whatever the books say: after a fault of the backend."""
        for seq in sequences:
            self._clear(seq)
        self._copies.clear()
        self.retention.clear()
        self.pool.reset()

    def _clear(self, seq: Sequence) -> None:
        seq.block_ids = []
        seq.num_computed = 0
        seq.num_registered = 0

    def _parent(self, seq: Sequence, i: int) -> bytes:
        """Hash of all that comes before block `i`."""
        return seq.block_hashes[i - 1] if i else root_hash(seq.request.cache_salt)

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        extend_block_hashes(seq.block_hashes, seq.token_ids, num_blocks, self.block_size, seq.request.cache_salt)
