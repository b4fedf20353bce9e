"""kv.pool: reference counts, the order of the free list, eviction (C109)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv.pool import BlockPool
from octavo.kv.prefix import PrefixCache


def make_pool(num_blocks):
    return BlockPool(num_blocks, PrefixCache())


def test_a_new_pool_hands_out_every_block_once():
    pool = make_pool(5)
    assert sorted(pool.allocate() for _ in range(5)) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    with pytest.raises(AssertionError):
        pool.allocate()


def test_blocks_without_cached_content_are_reused_before_cached_ones():
    pool = make_pool(4)
    a, b, c, d = (pool.allocate() for _ in range(4))
    pool.cache.register(b"a", a)
    pool.cache.register(b"c", c)
    pool.release([a])
    pool.release([b])
    pool.release([c])
    pool.release([d])
    assert {pool.allocate(), pool.allocate()} == {b, d}
    assert [pool.allocate(), pool.allocate()] == [a, c]  # least recently released first
    assert len(pool.cache) == 0


def test_the_end_of_a_sequence_is_evicted_before_its_beginning():
    pool = make_pool(3)
    table = [pool.allocate() for _ in range(3)]
    for i, block_id in enumerate(table):
        pool.cache.register(bytes([i]), block_id)
    pool.release(table)
    assert [pool.allocate() for _ in range(3)] == table[::-1]


def test_a_hit_takes_a_free_block_out_of_the_middle_of_the_list():
    pool = make_pool(3)
    table = [pool.allocate() for _ in range(3)]
    for i, block_id in enumerate(table):
        pool.cache.register(bytes([i]), block_id)
    pool.release(table)
    assert pool.num_free_of(table) == 3
    pool.retain([table[1]])
    assert pool.num_free_of(table) == 2
    pool.check([[table[1]]])
    assert [pool.allocate(), pool.allocate()] == [table[2], table[0]]
    assert table[1] in pool.cache


def test_a_shared_block_is_free_only_when_the_last_reference_goes():
    pool = make_pool(2)
    block = pool.allocate()
    pool.retain([block])
    pool.release([block])
    pool.check([[block]])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_check_notices_books_that_do_not_balance():
    pool = make_pool(3)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="references"):
        pool.check([])
    with pytest.raises(AssertionError, match="references"):
        pool.check([[block], [block]])
    pool.check([[block]])
    pool.num_free += 1
    with pytest.raises(AssertionError, match="free list"):
        pool.check([[block]])


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from("arhxs"), st.integers(0, 7)), max_size=60))
def test_books_balance_under_random_use(num_blocks, actions):
    """allocate, release, hit, register and share in any order against a plain model of the free list."""
    pool = make_pool(num_blocks)
    tables = []
    contents = {}  # digest -> block, as a cache should know it
    free = list(range(num_blocks))
    next_digest = 0
    for action, k in actions:
        if action == "a" and pool.num_free:
            block = pool.allocate()
            assert block == free.pop(0)
            contents = {d: b for d, b in contents.items() if b != block}
            tables.append([block])
        elif action == "r" and tables:
            (block,) = tables.pop(k % len(tables))
            pool.release([block])
            if [block] not in tables:
                free.insert(len(free) if block in contents.values() else 0, block)
        elif action == "s" and tables:
            tables.append(list(tables[k % len(tables)]))
            pool.retain(tables[-1])
        elif action == "h" and contents:
            block = sorted(contents.values())[k % len(contents)]
            pool.retain([block])
            tables.append([block])
            if block in free:
                free.remove(block)
        elif action == "x" and tables:
            (block,) = tables[k % len(tables)]
            if block not in contents.values():
                digest = next_digest.to_bytes(4, "big")
                next_digest += 1
                pool.cache.register(digest, block)
                contents[digest] = block
        pool.check(tables)
        assert len(pool.cache) == len(contents)
        assert pool._free_ids() == free
