"""Block tables of sequences: taking hits, growing, freeing, and making full blocks findable."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv.pool import BlockPool
from octavo.kv.prefix import PrefixCache, extend_block_hashes
from octavo.kv.sizing import blocks_for
from octavo.request import Sequence


class BlockTables:
    """The only place that changes `Sequence.block_ids`."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, PrefixCache())

    def num_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `seq` still lacks to hold `num_tokens` tokens; not positive if none."""
        return blocks_for(num_tokens, self.block_size) - len(seq.block_ids)

    def find_hits(self, seq: Sequence) -> list[int]:
        """Cached blocks with the first tokens of `seq`; takes no reference.

        The last known token is never among them, since its logits are what the next token is drawn
        from. Tokens whose prompt logprobs are still owed are not either: a hit has no logits.
        """
        if not self.enable_prefix_caching:
            return []
        limit = seq.num_known - 1
        if seq.owes_prompt_logprobs:
            limit = min(limit, seq.prompt_logprobs_done)
        limit //= self.block_size
        if limit > len(seq.block_hashes):
            self._extend_hashes(seq, limit)
        return self.pool.cache.find(seq.block_hashes, limit)

    def take_hits(self, seq: Sequence, block_ids: list[int]) -> None:
        """Start `seq` on blocks that `find_hits` returned."""
        assert not seq.block_ids and seq.num_computed == 0
        self.pool.retain(block_ids)
        seq.block_ids = block_ids
        seq.num_registered = len(block_ids)
        seq.num_computed = len(block_ids) * self.block_size

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Allocate blocks so that `seq` can hold `num_tokens` tokens; the pool must have them."""
        for _ in range(self.num_missing(seq, num_tokens)):
            seq.block_ids.append(self.pool.allocate())

    def register(self, seq: Sequence) -> None:
        """Make the blocks findable that are full now. Only after the step that wrote them is committed."""
        num_full = seq.num_computed // self.block_size
        if num_full <= seq.num_registered or not self.enable_prefix_caching:
            return
        if num_full > len(seq.block_hashes):
            self._extend_hashes(seq, num_full)
        for i in range(seq.num_registered, num_full):
            self.pool.cache.register(seq.block_hashes[i], seq.block_ids[i])
        seq.num_registered = num_full

    def free(self, seq: Sequence, *, forget: bool = False) -> None:
        """Give all blocks back. `forget`: their content is not to be trusted, nobody may hit it."""
        if forget:
            for block_id in seq.block_ids:
                self.pool.cache.forget(block_id)
        self.pool.release(seq.block_ids)
        self._clear(seq)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Take everything back by force, whatever the books say: after a fault of the backend."""
        for seq in sequences:
            self._clear(seq)
        self.pool.reset()

    def _clear(self, seq: Sequence) -> None:
        seq.block_ids = []
        seq.num_computed = 0
        seq.num_registered = 0

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        extend_block_hashes(seq.block_hashes, seq.token_ids, num_blocks, self.block_size, seq.request.cache_salt)
