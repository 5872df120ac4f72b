"""reduce against NumPy, bit for bit, to every root."""

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives import operations
from numba_symm.environment import SIMULATED
from tests import operators
from tests.ranks.helpers import (
    array_of,
    check_works,
    get,
    needs_peers,
    ordinary,
    put,
    refused,
    same,
    values,
    wait_for_all,
)

ALGORITHMS = tuple(operations.REDUCE.algorithms)
F4 = np.dtype(np.float32)

by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def check(comm, out, wanted, root, what=None):
    if comm.rank == root:
        assert operators.same(get(out), wanted).all(), what
    else:
        assert out is None


def first_less_second(a, b):
    return a - 2 * b


@by_algorithm
def test_a_function_is_applied_in_rank_order(comm, world, algorithm):
    inputs = [values([4, rank], 21, F4) for rank in range(comm.size)]
    x = array_of(comm, inputs[comm.rank], True)
    root = comm.size - 1
    out = comm.reduce(x, op=first_less_second, root=root, algorithm=algorithm)
    comm.synchronize()
    if comm.rank == root:
        wide = [each.astype(np.float64) for each in inputs]
        total = operators.in_order(first_less_second, wide)
        np.testing.assert_allclose(get(out), total, 1e-4, 1e-2)
    wait_for_all(comm, world)


@by_algorithm
def test_the_root_has_what_all_reduce_gives(comm, world, algorithm):
    host = values([comm.rank], 900, F4, special=True)
    x = array_of(comm, host, True)
    found = comm.reduce(x, root=comm.size - 1, algorithm=algorithm)
    everyones = comm.all_reduce(x)
    comm.synchronize()
    assert found is None or same(get(found), get(everyones))
    wait_for_all(comm, world)


def test_any_rank_may_have_any_memory(comm, world):
    """Between the ranks' own arrays, one that is not symmetric makes all refuse."""
    calls = []
    for step in range(2 * comm.size + 4):
        root, other = step % comm.size, step // 2
        inputs = [values([step, rank], 300, F4) for rank in range(comm.size)]
        # Symmetric on all ranks first; on the other ranks elsewhere; the output, too.
        x, out = comm.empty(400, F4)[12 * comm.rank :][:300], comm.empty(300, F4)
        if comm.rank == other - 2:
            x = ordinary(300, F4)
        put(x, inputs[comm.rank])
        out = (x, out, None)[step % 3] if comm.rank == root else None
        out = comm.reduce(x, root=root, out=out, algorithm="direct")
        calls.append((operators.wanted(inputs, "sum"), root, out))
    comm.synchronize()
    for wanted, root, out in calls:
        check(comm, out, wanted, root)
    wait_for_all(comm, world)


def test_shapes(comm, world):
    for order in "CF":
        out = comm.reduce(ordinary((3, 5), np.int32, order), op="max")
        if comm.rank == 0:
            assert out.shape == (3, 5)
            assert out.is_c_contiguous() == (order == "C")
    out = comm.reduce(comm.zeros((0, 3), np.int32))
    assert out is None if comm.rank else out.shape == (0, 3)
    wait_for_all(comm, world)


def test_the_algorithm_follows_from_the_size(comm, world):
    for kilobytes in (0, 2048) if SIMULATED else (0, 2048, 49152):
        count = 256 * kilobytes + 1
        if SIMULATED:
            count = min(count, 1500)
        inputs = [values([5, rank], count, F4) for rank in range(comm.size)]
        x = array_of(comm, inputs[comm.rank], True)
        last = comm.size - 1
        symmetric = comm.empty(count, F4)  # or a new array, which is not
        for out in (None, symmetric if comm.rank == last else None):
            out = comm.reduce(x, op="max", root=last, out=out)
            comm.synchronize()
            check(comm, out, operators.wanted(inputs, "max"), last)
    wait_for_all(comm, world)


@pytest.mark.parametrize("root", [-1, 99, 0.0, None, "0"])
def test_a_root_that_is_no_rank(comm, world, root):
    x = comm.zeros(8, np.float32)
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.reduce(x, root=root),
        f"reduce: root: expected a rank from 0 to {comm.size - 1}, got {root!r}",
    )
    check_works(comm)
    wait_for_all(comm, world)


def test_bad_calls(comm, world):
    x = comm.zeros(8, np.float32)
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.reduce(x, root=comm.rank, out=ordinary(7, np.float32)),
        "got 7",
    )
    check_works(comm)
    wait_for_all(comm, world)


@needs_peers
@pytest.mark.parametrize("name", ["reduce", "reduce_init"])
def test_debug_mode_reports_differing_roots(careful, world, name):
    x = careful.zeros(8, np.float32)
    mine = 1 if careful.rank == careful.size - 1 else 0
    call = getattr(careful, name)
    refused(
        world, ns.ArgumentError, lambda: call(x, root=mine), "root 0", "root 1", "same"
    )
    refused(
        world,
        ns.ArgumentError,
        lambda: call(x, root=-mine),
        f"rank {careful.size - 1}: reduce: root: expected a rank",
    )
    check_works(careful)
