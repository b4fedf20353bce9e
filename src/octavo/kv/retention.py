"""What the prefix cache keeps: pinned prefixes, quotas of tenants, and notes on who uses what.

A *pin* holds a reference on the full blocks of a prompt, so that they are not evicted until it expires.
Pins are wishes, not guarantees: where the first in line, or a sequence that must not be preempted, would
otherwise not fit, the pin that expires first yields. So pins never make anything wait for ever.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass

from octavo.kv.pool import BlockPool
from octavo.request import Sequence


@dataclass(slots=True)
class Note:
    """On one findable block: whose request computed it, when, and what came of it. `digest` is its content's hash."""

    digest: bytes
    tenant: str
    created: float
    last_used: float
    num_hits: int = 0


@dataclass(frozen=True, slots=True)
class Pin:
    pin_id: str
    tenant: str
    block_ids: tuple[int, ...]
    created: float
    expires: float


class Retention:
    """Pins, quotas and notes of one pool. `now` is the clock's time, set by `tick`.

    `max_pinned`: blocks that all pins together may hold. `quota`: cached blocks that one tenant may keep
    while no sequence uses them, pinned ones included; None: no limit but the pool.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_pinned: int, quota: int | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self.max_pinned = max_pinned
        self.quota = quota
        self.now = 0.0
        self.pins: dict[str, Pin] = {}
        self.notes: dict[int, Note] = {}  # by block; at most one per block, of its present or last content
        self.num_yielded = 0  # pins given up for want of blocks
        self._pinned: Counter[int] = Counter()  # block -> pins that hold it
        self._free_of: dict[str, OrderedDict[int, None]] = {}  # tenant -> its cached blocks nobody uses, LRU first
        if quota is not None:
            pool.on_free, pool.on_take = self._became_free, self._taken

    @property
    def num_pinned(self) -> int:
        """Blocks held by pins."""
        return len(self._pinned)

    def num_pinned_of(self, tenant: str) -> int:
        return len({block_id for pin in self.pins.values() if pin.tenant == tenant for block_id in pin.block_ids})

    def tick(self, now: float) -> None:
        """Time goes on: pins that have expired are released."""
        self.now = now
        for pin in [pin for pin in self.pins.values() if pin.expires <= now]:
            self._release(pin)

    # ------------------------------------------------------------------ pins

    def pin(self, seq: Sequence) -> str | None:
        """Pin the full blocks of a prompt that has just been computed; the pin's id, or None if the limits forbid.

        The same prefix of the same tenant has one pin: asking again renews it.
        """
        seconds = seq.request.pin_seconds
        num_full = seq.num_prompt // self._block_size
        if seconds is None or num_full == 0:
            return None
        block_ids = self._pool.cache.find(seq.block_hashes, num_full)
        if len(block_ids) < num_full:
            return None
        tenant, expires = seq.request.tenant, self.now + seconds
        pin_id = pin_id_of(tenant, seq.block_hashes[num_full - 1])
        old = self.pins.get(pin_id)
        if old is not None:
            self.pins[pin_id] = Pin(pin_id, tenant, old.block_ids, old.created, max(old.expires, expires))
            return pin_id
        num_new = sum(block_id not in self._pinned for block_id in block_ids)
        over_quota = self.quota is not None and self.num_pinned_of(tenant) + num_full > self.quota
        if self.num_pinned + num_new > self.max_pinned or over_quota:
            return None
        self._pool.retain(block_ids)
        self._pinned.update(block_ids)
        self.pins[pin_id] = Pin(pin_id, tenant, tuple(block_ids), self.now, expires)
        return pin_id

    def unpin(self, pin_id: str, tenant: str | None) -> bool:
        """Release a pin; False if the tenant has no such pin (None: anyone's)."""
        pin = self.pins.get(pin_id)
        if pin is None or tenant not in (None, pin.tenant):
            return False
        self._release(pin)
        return True

    def yield_one(self) -> bool:
        """Give up the pin that expires first; False if there is none."""
        if not self.pins:
            return False
        self._release(min(self.pins.values(), key=lambda pin: pin.expires))
        self.num_yielded += 1
        return True

    def _release(self, pin: Pin) -> None:
        del self.pins[pin.pin_id]
        self._pinned.subtract(pin.block_ids)
        self._pinned = +self._pinned
        self._pool.release(pin.block_ids)

    def clear(self) -> None:
        """The pool starts afresh: nothing is held or known any more."""
        self.pins.clear()
        self.notes.clear()
        self._pinned.clear()
        self._free_of.clear()

    # ------------------------------------------------------------------ notes

    def registered(self, block_id: int, digest: bytes, tenant: str) -> None:
        """A block (`digest` b"": a partly filled one) is findable, unless another one had its content already."""
        if self._pool.cache.digest_of(block_id) == digest:
            self.notes[block_id] = Note(digest, tenant, self.now, self.now)

    def note_of(self, block_id: int) -> Note | None:
        """On what the block holds now."""
        note = self.notes.get(block_id)
        return note if note is not None and note.digest == self._pool.cache.digest_of(block_id) else None

    def hit(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            note = self.note_of(block_id)
            if note is not None:
                note.num_hits += 1
                note.last_used = self.now

    # ------------------------------------------------------------------ quotas

    def _became_free(self, block_id: int) -> None:
        """The last user of a cached block is gone; its tenant may now keep one too many."""
        note = self.note_of(block_id)
        if note is None or self.quota is None:
            return
        kept = self._free_of.setdefault(note.tenant, OrderedDict())
        kept[block_id] = None
        while kept and len(kept) + self.num_pinned_of(note.tenant) > self.quota:
            self._pool.give_up(next(iter(kept)))

    def _taken(self, block_id: int) -> None:
        note = self.note_of(block_id)
        kept = None if note is None else self._free_of.get(note.tenant)
        if note is not None and kept is not None:
            kept.pop(block_id, None)
            if not kept:
                del self._free_of[note.tenant]


def pin_id_of(tenant: str, digest: bytes) -> str:
    """Says nothing about the content to anyone who does not know it already."""
    return "pin-" + hashlib.blake2b(digest + tenant.encode(), digest_size=12, person=b"octavo-pin").hexdigest()
