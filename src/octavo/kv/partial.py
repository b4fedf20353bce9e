"""Which cached block goes on like a given text, and for how many tokens: prefix hits that end inside a block."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence


class TokenIndex:
    """The tokens of every findable block, by the hash of what comes before it (its parent).

    Blocks with the same parent are sorted by their tokens, packed big-endian so that bytes sort like the
    tokens do. The block with the longest common beginning with a text is then next to the place where the
    text itself would be: one binary search, however many continuations a prefix has.
    """

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}
        self._entry_of: dict[int, tuple[bytes, bytes]] = {}  # block -> parent, packed tokens

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entry_of

    def add(self, parent: bytes, token_ids: Sequence[int], block_id: int) -> None:
        """`block_id` holds the KV of `token_ids` after `parent`; replaces what was known of it."""
        self.remove(block_id)
        packed = _pack(token_ids)
        bisect.insort(self._children.setdefault(parent, []), (packed, block_id))
        self._entry_of[block_id] = (parent, packed)

    def remove(self, block_id: int) -> None:
        entry = self._entry_of.pop(block_id, None)
        if entry is None:
            return
        parent, packed = entry
        children = self._children[parent]
        del children[bisect.bisect_left(children, (packed, block_id))]
        if not children:
            del self._children[parent]

    def find(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """(block, n) with the largest n such that the block begins with the first n of `token_ids`; None if 0."""
        children = self._children.get(parent)
        if not children or not token_ids:
            return None
        packed = _pack(token_ids)
        place = bisect.bisect_left(children, (packed,))
        found = [(_num_common(packed, tokens), -i, block_id) for i, (tokens, block_id) in
                 enumerate(children[max(0, place - 1) : place + 1])]  # fmt: skip
        num_common, _, block_id = max(found)
        return (block_id, num_common) if num_common else None

    def covers(self, parent: bytes, token_ids: Sequence[int]) -> bool:
        """Is there a block that begins with all of `token_ids`?"""
        found = self.find(parent, token_ids)
        return found is not None and found[1] == len(token_ids)

    def children(self, parent: bytes) -> list[int]:
        """Blocks that go on after `parent`."""
        return [block_id for _, block_id in self._children.get(parent, ())]

    def parents(self) -> list[bytes]:
        return list(self._children)

    def num_tokens_of(self, block_id: int) -> int:
        return len(self._entry_of[block_id][1]) // 4

    def clear(self) -> None:
        self._children.clear()
        self._entry_of.clear()

    def check(self) -> None:
        """Assert that both tables say the same."""
        listed = {block_id: (parent, packed) for parent, c in self._children.items() for packed, block_id in c}
        assert listed == self._entry_of and all(c == sorted(c) and c for c in self._children.values())


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def _num_common(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed lists share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // 4
    return next(i for i in range(0, length, 4) if a[i : i + 4] != b[i : i + 4]) // 4
