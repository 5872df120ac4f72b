"""The tree along which ranks gather values, and how equal values are sent once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_symm.launch import waiting


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 33, 1000])
def test_every_rank_has_one_parent_and_few_children(size):
    most = (size - 1).bit_length()
    below = {}
    for rank in reversed(range(size)):
        children = waiting.children(rank, size)
        assert len(children) + (rank > 0) <= most
        assert all(waiting.parent_of(child) == rank for child in children)
        parts = [below[child] for child in children]
        below[rank] = [rank, *(each for part in parts for each in part)]
        assert below[rank] == [*range(rank, rank + waiting.below(rank, size))]
    assert below[0] == [*range(size)]


ITEMS = st.sampled_from([0, 1, True, None, "a", b"\0" * 300, (), (1,), [2]])
LENGTHS = st.sampled_from([0, 1, 2, waiting.MOST, waiting.MOST + 1])
VALUES = ITEMS | LENGTHS.flatmap(lambda n: st.tuples(*[ITEMS] * n))


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(VALUES, st.integers(1, 3)), min_size=1), st.data())
def test_values_are_those_of_the_ranks_in_their_order(runs, data):
    """Whatever they are, and in whatever parts they arrive, packed or not."""
    wanted = [value for value, many in runs for _ in range(many)]
    parts = [waiting.gathered(value, many) for value, many in runs]
    while len(parts) > 1:
        first = data.draw(st.integers(0, len(parts) - 2))
        last = data.draw(st.integers(first + 2, len(parts)))
        part = waiting.merged(parts[first:last])
        assert waiting.unpacked(part.packed()) == part
        parts[first:last] = [waiting.unpacked(part.packed())]
    found = waiting.merged(parts).each()
    assert [*map(repr, found)] == [*map(repr, wanted)]


def test_equal_values_of_many_ranks_need_few_bytes():
    one = waiting.gathered(("what", 7))
    many = waiting.merged([one] * 10_000)
    assert len(many.packed()) <= len(one.packed()) + 1
    in_turn = waiting.merged([one, waiting.gathered("b" * 99)] * 5000)
    assert len(in_turn.packed()) < 10_000 * 2 + 150
    for found in (one, many, in_turn):
        assert waiting.unpacked(found.packed()) == found


@pytest.mark.parametrize("length", [2, 4, waiting.MOST])
def test_only_items_in_which_ranks_differ_are_contained_for_each_rank(length):

    place = "numba_symm", "communicator", *length * ["a long name of a step"]
    place = place[: length - 1]
    values = [(*place, (None, (f"uuid {rank}", "a name " * 9))) for rank in range(100)]
    found = waiting.merged(map(waiting.gathered, values))
    assert found.each() == values
    assert len(found.packed()) < 300 + 15 * len(values)
    assert waiting.unpacked(found.packed()) == found
    large = [b"x" * 99, b"y" * (1 << 17)]  # with several frames in its pickle
    found = waiting.merged(map(waiting.gathered, large))
    assert waiting.unpacked(found.packed()).each() == large
    wide = [(rank, tuple(range(rank, 10_000))) for rank in range(3)]
    parts = map(waiting.gathered, wide)  # of which only the pair is divided
    assert waiting.merged(parts).each() == wide
    for most, divided in ((waiting.MOST, waiting.MOST), (waiting.MOST + 1, 0)):
        parts = [waiting.gathered((number,) * most) for number in range(2)]
        assert len(waiting.merged(parts).items) == divided


def test_the_root_receives_few_bytes_for_each_rank():
    """Nodes have 8 ranks each, whose values name the node, as in a construction."""
    size = 1024
    nodes = [b"\0" * 6 + node.to_bytes(2) for node in range(size // 8)]

    def value(rank):
        node = nodes[rank // 8], f"node{rank // 8}.cluster"
        return b"digest's", (None, node, b"of facts")

    parts = {}
    for rank in reversed(range(size)):
        below = [parts[child] for child in waiting.children(rank, size)]
        parts[rank] = waiting.merged([waiting.gathered(value(rank)), *below])
    assert parts[0].each() == [*map(value, range(size))]
    sent = sum(len(parts[child].packed()) for child in waiting.children(0, size))
    assert sent < 6 * size
