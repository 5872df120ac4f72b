"""scan, exscan and reverse_scan against NumPy, bit for bit."""

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives import operations
from tests import operators
from tests.ranks.helpers import (
    array_of,
    check_works,
    get,
    ordinary,
    refused,
    values,
    wait_for_all,
)

NAMES = ("scan", "exscan", "reverse_scan")
ALGORITHMS = tuple(operations.SCAN.algorithms)
F4 = np.dtype(np.float32)

by_name = pytest.mark.parametrize("name", NAMES)
by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def first_less_second(a, b):
    return a - 2 * b


@by_algorithm
def test_a_function_is_applied_in_rank_order(comm, world, algorithm):
    inputs = [values([4, rank], 21, F4) for rank in range(comm.size)]
    x = array_of(comm, inputs[comm.rank], True)
    out = array_of(comm, np.full(21, 7, F4), False)
    scanned = comm.scan(x, op=first_less_second, algorithm=algorithm)
    comm.exscan(x, op=first_less_second, out=out, algorithm=algorithm)
    reverse = comm.reverse_scan(x, op=first_less_second, algorithm=algorithm)
    comm.synchronize()
    exact = [each.astype(np.float64) for each in inputs]

    def check(found, first, last):
        total = operators.in_order(first_less_second, exact[first:last], first)
        np.testing.assert_allclose(get(found), total, 1e-4, 1e-2)

    check(scanned, 0, comm.rank + 1)
    check(reverse, comm.rank, comm.size)
    if comm.rank == 0:  # a function's identity is not known
        assert (get(out) == 7).all()
    else:
        check(out, 0, comm.rank)
    wait_for_all(comm, world)


@by_name
def test_shapes(comm, world, name):
    for order in "CF":
        x = ordinary((3, 5), np.int32, order)
        out = getattr(comm, name)(x, op="max")
        assert out.shape == (3, 5)
        assert out.is_c_contiguous() == (order == "C")
    assert getattr(comm, name)(comm.zeros((0, 3), np.int32)).shape == (0, 3)
    wait_for_all(comm, world)


@by_name
def test_bad_calls(comm, world, name):
    scan = getattr(comm, name)
    x = comm.zeros(8, np.float32)
    refused(
        world,
        ns.ArgumentError,
        lambda: scan(x, op="avg"),
        name,
        "op='avg' is not defined",
    )
    refused(world, ns.ArgumentError, lambda: scan(x, op="band"), name, "got op='band'")
    short = ordinary(7, np.float32)
    refused(world, ns.ArgumentError, lambda: scan(x, out=short), "got 7")
    refused(
        world,
        ns.ArgumentError,
        lambda: scan(x, algorithm="pull"),
        "got 'pull'",
    )
    check_works(comm)
    wait_for_all(comm, world)


def test_all_have_the_same_algorithms():
    for name in NAMES:
        assert tuple(operations.OPERATIONS[name].algorithms) == ALGORITHMS
