"""The tree by which elements of ranks are reduced: texts show its order."""

import itertools

import numpy as np
import pytest
from numba import cuda

from numba_symm import dtypes
from numba_symm.collectives.kernels import pack
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import order
from numba_symm.device.lanes import make_lanes
from tests import operators
from tests.operators import ELEMENTS, in_tree


def shown(a, b):
    return f"({a} {b})"


def leaves(first, end):
    return {number: str(number) for number in range(first, end)}


@pytest.mark.parametrize("size", range(1, 20))
def test_every_form_of_the_tree_is_the_same_one(size):
    texts = list(map(str, range(size)))
    lanes = make_lanes(ELEMENTS["int64"], "sum", False, size)._replace(
        unpack=lambda low, high: low, combine=shown, pack=lambda total: total
    )
    whole = in_tree(shown, leaves(0, size))
    late = ["none", *texts]
    assert order.make_total(size, lanes)(late, late, 1) == whole
    for part in range(1, size + 1):
        wanted = in_tree(shown, leaves(0, part))
        assert order.make_of_first(size, lanes)(texts, texts, 0, part) == wanted
        assert dtypes.in_tree(shown, texts[:part], 0) == wanted
        wanted = in_tree(shown, leaves(size - part, size))
        assert order.make_of_last(size, lanes)(texts, texts, 0, size - part) == wanted
        assert dtypes.in_tree(shown, texts[size - part :], size - part) == wanted


def test_eight_ranks_are_added_in_pairs():
    total = in_tree(shown, leaves(0, 7))
    assert total == "(((0 1) (2 3)) ((4 5) 6))"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("islands", range(1, 20))
def test_equal_islands_of_powers_of_two_have_the_tree_of_all_ranks(islands, size):
    parts = [range(at, at + size) for at in range(0, islands * size, size)]
    inputs = leaves(0, islands * size)
    assert operators.over_islands(shown, parts, inputs) == in_tree(shown, inputs)


@pytest.mark.parametrize("number", [2, 3, 8, 9, 16, 17, 64, 65, 130])
def test_shards_are_reduced_by_the_tree_of_all(number):
    """More than the kernel reduces at a time, too."""
    vectors, own = 3, number // 2
    shards = np.random.default_rng(number).standard_normal((number, 4 * vectors))
    shards = shards.astype(np.float32)
    wanted = in_tree(np.add, dict(enumerate(shards)))
    loads, more = min(number, pack.MOST), number > pack.MOST
    kernel = pack.make_reduce_shards(loads, more, ELEMENTS["float32"], "sum")
    at = shards.ctypes.data
    result = at + own * shards.strides[0]
    cuda.jit(kernel)[2, THREADS](2, at, result, vectors, number)
    assert operators.same(shards[own], wanted).all()


@pytest.mark.parametrize("name", ["bfloat16", "int8", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_vectors_in_the_order_of_a_ring_have_the_same_bits(name, size):
    lanes = make_lanes(ELEMENTS[name], "sum", False, size)
    nbytes = ELEMENTS[name].itemsize
    rows = [operators.random(name, 16 // nbytes, rank) for rank in range(size)]
    words = np.array([row.view(np.int64) for row in rows])
    vectors = [row.view("V16") for row in rows]
    for last, rank, taken in itertools.product((False, True), range(size), (1, size)):
        first = size - taken if last else 0
        wanted = lanes.fold(vectors[first:][:taken], first).view(np.int64)
        low, high = np.roll(words, -rank, 0).T.tolist()
        of_ring = order.make_of_ring(size, lanes, last)
        found = of_ring(rank, low, high, [0] * size, first if last else taken)
        found = np.array(found).view(rows[0].dtype)
        assert operators.same(found, wanted.view(rows[0].dtype)).all()
