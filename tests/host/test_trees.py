"""The tree along which ranks gather values, and how equal values are sent once."""

import pytest

from numba_symm.launch import trees


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 33, 1000])
def test_every_rank_has_one_parent_and_few_children(size):
    most = (size - 1).bit_length()
    below = {}
    for rank in reversed(range(size)):
        children = trees.children(rank, size)
        assert len(children) + (rank > 0) <= most
        assert all(trees.parent(child) == rank for child in children)
        parts = [below[child] for child in children]
        below[rank] = [rank, *(each for part in parts for each in part)]
        assert below[rank] == [*range(rank, rank + trees.below(rank, size))]
    assert below[0] == [*range(size)]


def test_values_are_those_of_the_ranks_in_their_order():
    values = ["a", "a", "b", 1, True, "a", "a"]
    parts = [trees.gathered(values[:1]), *map(trees.gathered, values[1:])]
    assert trees.merged(parts).each() == [["a"], *values[1:]]
    found = trees.merged([trees.gathered("x", 3), trees.gathered("y")]).each()
    assert found == ["x", "x", "x", "y"]
    assert [*map(type, trees.merged(parts).each())][3:5] == [int, bool]


def test_equal_values_of_many_ranks_need_few_bytes():
    one = trees.gathered(("what", 7))
    many = trees.merged([one] * 10_000)
    assert len(many.packed()) <= len(one.packed()) + 1
    in_turn = trees.merged([one, trees.gathered("b" * 99)] * 5000)
    assert len(in_turn.packed()) < 10_000 * 2 + 150
    for found in (one, many, in_turn):
        assert trees.unpacked(found.packed()) == found


@pytest.mark.parametrize("length", [2, 4, trees.MOST])
def test_only_items_in_which_ranks_differ_are_contained_for_each_rank(length):
    """Ranks with other values than tuples of that length are contained, too."""
    place = "numba_symm", "communicator", *length * ["a long name of a step"]
    place = place[: length - 1]
    values = [(*place, (None, (f"uuid {rank}", "a name " * 9))) for rank in range(100)]
    found = trees.merged(map(trees.gathered, values))
    assert found.each() == values
    assert len(found.packed()) < 300 + 15 * len(values)
    assert trees.unpacked(found.packed()) == found
    mixed = [*values[:3], None, values[4][:3], ((1,), ()), *values[5:9], [1], (1,)]
    parts = [trees.merged(map(trees.gathered, each)) for each in (mixed[:5], mixed[5:])]
    assert trees.merged(parts).each() == mixed
    large = [b"x" * 99, b"y" * (1 << 17)]  # with several frames in its pickle
    found = trees.merged(map(trees.gathered, large))
    assert trees.unpacked(found.packed()).each() == large
    wide = [(rank, tuple(range(rank, 10_000))) for rank in range(3)]
    parts = map(trees.gathered, wide)  # of which only the pair is divided
    assert trees.merged(parts).each() == wide


def test_the_root_receives_few_bytes_for_each_rank():
    """Nodes have 8 ranks each, whose values name the node, as in a construction."""
    size = 1024
    nodes = [b"\0" * 6 + node.to_bytes(2) for node in range(size // 8)]

    def value(rank):
        node = nodes[rank // 8], f"node{rank // 8}.cluster"
        return b"digest's", (None, node, b"of facts")

    parts = {}
    for rank in reversed(range(size)):
        below = [parts[child] for child in trees.children(rank, size)]
        parts[rank] = trees.merged([trees.gathered(value(rank)), *below])
    assert parts[0].each() == [*map(value, range(size))]
    sent = sum(len(parts[child].packed()) for child in trees.children(0, size))
    assert sent < 6 * size
