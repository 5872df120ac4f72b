"""The tree along which ranks gather values, and how equal values are sent once."""

import pickle

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
    assert len(pickle.dumps(many)) < len(pickle.dumps(one)) + 8
    in_turn = trees.merged([one, trees.gathered("b" * 99)] * 5000)
    assert len(pickle.dumps(in_turn)) < 10_000 * 10
