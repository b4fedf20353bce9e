"""The prefix cache as trees, for people: what is cached, whose it is, how often and when it was of use."""

from __future__ import annotations

from typing import Any

from octavo.kv.tables import BlockTables


def cache_trees(tables: BlockTables, now: float, *, tenant: str | None, limit: int) -> dict[str, Any]:
    """Totals of the pool; the `limit` largest trees and all pins, of one tenant or of everyone (None).

    A tree is a first block of some prompt with all that goes on from it. Ages are in seconds.
    """
    pool, retention, size = tables.pool, tables.retention, tables.block_size
    retention.tick(now)
    trees = [_tree(tables, root, now) for root in pool.cache.roots()]
    trees = [tree for tree in trees if tenant is None or tenant in tree["owners"]]
    trees.sort(key=lambda tree: (-tree["num_tokens"], tree["id"]))
    pins = [
        {
            "id": pin.pin_id,
            "owner": pin.tenant,
            "num_tokens": len(pin.block_ids) * size,
            "age_seconds": round(now - pin.created, 3),
            "expires_in_seconds": round(pin.expires - now, 3),
        }
        for pin in retention.pins.values()
        if tenant is None or pin.tenant == tenant
    ]
    return {
        "block_size": size,
        "num_blocks": pool.num_blocks,
        "num_cached_blocks": len(pool.cache),
        "num_pinned_blocks": retention.num_pinned,
        "max_pinned_blocks": retention.max_pinned,
        "tenant_quota_blocks": retention.quota,
        "num_trees": len(trees),
        "trees": trees[:limit],
        "pins": pins,
    }


def _tree(tables: BlockTables, root: int, now: float) -> dict[str, Any]:
    pool = tables.pool
    pinned = {block_id for pin in tables.retention.pins.values() for block_id in pin.block_ids}
    blocks, todo, deepest = [], [(root, 0)], 0
    while todo:
        block_id, before = todo.pop()
        end = before + pool.cache.num_tokens_of(block_id)
        deepest = max(deepest, end)
        blocks.append(block_id)
        todo += [(child, end) for child in pool.cache.children(block_id)]
    known = [note for block_id in blocks if (note := tables.retention.note_of(block_id)) is not None]
    return {
        "id": pool.cache.name_of(root),
        "num_blocks": len(blocks),
        "num_tokens": sum(map(pool.cache.num_tokens_of, blocks)),
        "longest_tokens": deepest,
        "owners": sorted({note.tenant for note in known}),
        "hits": sum(note.num_hits for note in known),
        "age_seconds": round(now - min((note.created for note in known), default=now), 3),
        "idle_seconds": round(now - max((note.last_used for note in known), default=now), 3),
        "num_blocks_in_use": sum(pool.ref_counts[b] > (b in pinned) for b in blocks),
        "num_blocks_pinned": sum(b in pinned for b in blocks),
    }
