"""kv.partial: the block that shares most tokens with a text, against a plain search."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.kv.partial import TokenIndex

TOKENS = st.lists(st.sampled_from([0, 1, 2, 255, 256, 2**31 - 1]), max_size=6)


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(st.lists(st.tuples(st.sampled_from([b"x", b"y"]), TOKENS, st.integers(0, 9)), max_size=30), TOKENS)
def test_the_longest_common_beginning(actions, query):
    """Blocks are added and replaced in any order; an empty text removes the block."""
    index, model = TokenIndex(), {}
    for parent, tokens, block in actions:
        if tokens:
            index.add(parent, tokens, block)
            model[block] = (parent, tokens)
        else:
            index.remove(block)
            model.pop(block, None)
        index.check()
        assert len(index) == len(model)
    for parent in (b"x", b"y"):
        best = max((common(t, query) for p, t in model.values() if p == parent), default=0)
        found = index.find(parent, query)
        assert (found[1] if found else 0) == best
        if found:
            assert model[found[0]][0] == parent
            assert common(model[found[0]][1], query) == best
        assert index.covers(parent, query) == (bool(query) and best == len(query))
