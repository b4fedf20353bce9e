"""Which block holds the KV of which tokens: chained hashes of full blocks, and the tokens inside of blocks."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from octavo.kv.partial import TokenIndex

_PERSON = b"octavo-kv-block1"  # BLAKE2 personalisation: these hashes never equal hashes made for something else


def root_hash(salt: str) -> bytes:
    """The parent of a first block. Different salts share nothing, so tenants cannot probe each other."""
    data = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(b"root" + struct.pack("<Q", len(data)) + data, digest_size=32, person=_PERSON).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block in its context.

    The input is tagged and length-delimited, so no two different (salt, tokens) give the same input,
    and it has no per-process seed, so equal tokens hash equally in every process. A cryptographic
    hash, because a collision would answer one user from another user's context.
    """
    data = b"next" + parent + struct.pack(f"<Q{len(token_ids)}I", len(token_ids), *token_ids)
    return hashlib.blake2b(data, digest_size=32, person=_PERSON).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, block_size: int, salt: str
) -> None:
    """Append to `hashes` until it covers the first `num_blocks` full blocks of `token_ids`."""
    assert num_blocks * block_size <= len(token_ids)
    parent = hashes[-1] if hashes else root_hash(salt)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)


class PrefixCache:
    """A one-to-one map between block hashes and the full blocks that hold their KV, and where a hit can
    end inside a block: the tokens of full blocks, and of the partly filled last ones of sequences.

    At most one entry per block, so it is bounded by the pool. It owns no block: the pool decides
    when content goes and calls `forget`.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.tokens = TokenIndex()
        self.on_forget: Callable[[bytes], None] | None = None  # hears the hash of what stops being findable

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.tokens

    def find(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest cached run that starts at the first of `hashes`, at most `limit`."""
        block_ids: list[int] = []
        for i in range(limit):
            block_id = self._block_of.get(hashes[i])
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def register(self, digest: bytes, block_id: int, parent: bytes = b"", token_ids: Sequence[int] = ()) -> None:
        """Make a fully written block findable; of two blocks with equal content the first stays.

        `digest` is the hash of `token_ids` after `parent`.
        """
        self.tokens.remove(block_id)  # what was known of it while it filled up
        if digest not in self._block_of:
            assert block_id not in self._hash_of, f"block {block_id} already holds something else"
            self._block_of[digest] = block_id
            self._hash_of[block_id] = digest
            self.tokens.add(parent, token_ids, block_id)

    def register_tail(self, parent: bytes, token_ids: Sequence[int], block_id: int) -> None:
        """Make the first tokens of a partly written block findable, unless another block has them already."""
        assert block_id not in self._hash_of, f"block {block_id} is full"
        if not self.tokens.covers(parent, token_ids):
            self.tokens.add(parent, token_ids, block_id)

    def forget(self, block_id: int) -> None:
        self.tokens.remove(block_id)
        digest = self._hash_of.pop(block_id, None)
        if digest is not None:
            del self._block_of[digest]
            if self.on_forget is not None:
                self.on_forget(digest)

    def digest_of(self, block_id: int) -> bytes | None:
        """Hash of the full block that is cached here, b"" for a partly filled one, None for nothing."""
        return self._hash_of.get(block_id, b"" if block_id in self.tokens else None)

    def children(self, block_id: int) -> list[int]:
        """Cached blocks whose text goes on from that of this one."""
        digest = self._hash_of.get(block_id)
        return [] if digest is None else self.tokens.children(digest)

    def roots(self) -> list[int]:
        """Cached blocks that go on from none that is cached: first blocks of prompts."""
        return [
            b for parent in self.tokens.parents() if parent not in self._block_of for b in self.tokens.children(parent)
        ]

    def num_tokens_of(self, block_id: int) -> int:
        return self.tokens.num_tokens_of(block_id)

    def name_of(self, block_id: int) -> str:
        """For people: the same while the content is cached."""
        return (self._hash_of.get(block_id) or b"").hex()[:16] or f"tail-{block_id}"

    def clear(self) -> None:
        if self.on_forget is not None:
            for digest in self._block_of:
                self.on_forget(digest)
        self._block_of.clear()
        self._hash_of.clear()
        self.tokens.clear()

    def check(self, num_blocks: int) -> None:
        """Assert that the maps mirror each other."""
        self.tokens.check()
        assert all(block_id in self.tokens for block_id in self._hash_of) and len(self.tokens) <= num_blocks
        assert len(self._block_of) == len(self._hash_of) <= num_blocks
        assert all(self._hash_of[block_id] == digest for digest, block_id in self._block_of.items())
