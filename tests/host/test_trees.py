"""The tree along which ranks gather values, and how equal values are sent once."""

import pytest

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
        assert below[rank] == [*range(rank, rank + len(below[rank]))]
    assert below[0] == [*range(size)]


def gathered(values):
    """Return the values that the root has, and the bytes that it has received."""
    parts, received = {}, 0
    for rank in reversed(range(len(values))):
        parts[rank] = [values[rank]]
        received = 0
        for child in waiting.children(rank, len(values)):
            data = waiting.packed(parts.pop(child))
            parts[rank] += waiting.unpacked(data)
            received += len(data)
    return parts[0], received


def test_equal_values_of_many_ranks_need_few_bytes():
    for values in (8192 * [("what", 7)], 4096 * [("what", 7), "b" * 99]):
        found, nbytes = gathered(values)
        assert found == values
        assert nbytes < 3000


@pytest.mark.parametrize("length", [2, 4, 8])
def test_what_ranks_have_in_common_needs_few_bytes(length):
    place = "numba_symm", "communicator", *length * ["a long name of a step"]
    place = place[: length - 1]
    values = [(*place, (None, (f"uuid {rank}", "a name " * 9))) for rank in range(100)]
    assert gathered(values)[0] == values
    assert len(waiting.packed(gathered(values)[0])) < 300 + 15 * len(values)


def test_the_root_receives_few_bytes_for_each_rank():
    """Nodes have 8 ranks each, whose values name the node, as in a construction."""
    size = 1024
    nodes = [b"\0" * 6 + node.to_bytes(2) for node in range(size // 8)]

    def value(rank):
        node = nodes[rank // 8], f"node{rank // 8}.cluster"
        return b"digest's", (None, node, b"of facts")

    found, nbytes = gathered([*map(value, range(size))])
    assert found == [*map(value, range(size))]
    assert nbytes < 2 * size
