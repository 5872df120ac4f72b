"""scan, exscan and reverse_scan against NumPy, bit for bit."""

import numpy as np
import pytest

import numba_symm as ns
from numba_symm import dtypes
from numba_symm.collectives import operations
from numba_symm.collectives.protocols.workspace import CHUNKED, THREADS
from numba_symm.environment import SIMULATED
from tests import operators
from tests.algorithms import PROTOCOLS, entry, takes, usable
from tests.ranks.helpers import (
    array_of,
    check_works,
    get,
    ordinary,
    refused,
    same,
    values,
    wait_for_all,
)

NAMES = ("scan", "exscan", "reverse_scan")
ALGORITHMS = tuple(operations.SCAN.algorithms)
F4, I8 = np.dtype(np.float32), np.dtype(np.int64)
# Every element type, every operator but the average.
PAIRS = [pair for pair in operators.PAIRS if pair[1] != "avg"]
SOME = PAIRS[:: 3 if SIMULATED else 7]  # compiling takes seconds

by_name = pytest.mark.parametrize("name", NAMES)
by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def wanted_of(name, inputs, op, rank):
    """Return what is due on ``rank``."""
    used = {
        "scan": inputs[: rank + 1],
        "exscan": inputs[:rank],
        "reverse_scan": inputs[rank:],
    }[name]
    if used:
        first = rank if name == "reverse_scan" else 0
        return operators.wanted(used, op, first)
    dtype = inputs[0].dtype
    return np.full(inputs[0].shape, dtypes.identity(op, dtype), dtype)


def edges(dtype, made, size, blocks):
    """Return counts around where another vector, chunk or epoch begins."""
    lanes = 16 // dtype.itemsize
    if not made.transport:
        unit, most = CHUNKED.tiles(size) * THREADS, blocks
    else:
        protocol = PROTOCOLS[made.region]
        unit, most = THREADS, min(blocks, protocol.blocks) * protocol.tiles(size)
    found = {1, lanes, unit * lanes, unit * lanes * most}
    if SIMULATED:  # where an epoch takes tens of milliseconds
        found = {count for count in found if count * dtype.itemsize < 20_000}
    return sorted({max(1, count + by) for count in found for by in (-1, 0, 1)})


@by_name
@by_algorithm
@pytest.mark.parametrize("dtype", [F4, I8], ids=str)
def test_every_edge_of_its_pieces(comm, world, name, algorithm, dtype):
    if not takes(name, algorithm, dtype):
        pytest.skip("for floats")
    calls, made = [], entry(name, algorithm)
    for count in edges(dtype, made, comm.size, comm._calls.end.max_blocks):
        inputs = [values([count, rank], count, dtype) for rank in range(comm.size)]
        x = array_of(comm, inputs[comm.rank], count % 2 == 0)
        calls.append((inputs, x, getattr(comm, name)(x, algorithm=algorithm)))
    comm.synchronize()
    for inputs, x, out in calls:
        assert same(get(out), wanted_of(name, inputs, "sum", comm.rank)), out.size
        assert same(get(x), inputs[comm.rank])
    wait_for_all(comm, world)


@by_name
def test_types_and_operators(comm, world, name):
    calls = []
    for step, (kind, op) in enumerate(SOME):
        count = 33
        inputs = [operators.random(kind, count, [step, r]) for r in range(comm.size)]
        x = array_of(comm, inputs[comm.rank], step % 2 == 0)
        algorithm = usable(name, ALGORITHMS[step % len(ALGORITHMS)], x.dtype)
        calls.append((inputs, op, getattr(comm, name)(x, op=op, algorithm=algorithm)))
    comm.synchronize()
    for (kind, op), (inputs, _, out) in zip(SOME, calls, strict=True):
        wanted = wanted_of(name, inputs, op, comm.rank)
        assert operators.same(get(out), wanted).all(), (kind, op)
    wait_for_all(comm, world)


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


def test_the_last_or_first_rank_has_what_all_reduce_gives(comm, world):
    x = array_of(comm, values([comm.rank], 500, F4), True)
    scanned, reverse, reduced = comm.scan(x), comm.reverse_scan(x), comm.all_reduce(x)
    comm.synchronize()
    assert comm.rank < comm.size - 1 or same(get(scanned), get(reduced))
    assert comm.rank > 0 or same(get(reverse), get(reduced))
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


def test_plans(comm, world):
    inputs = [values([3, rank], 50, F4) for rank in range(comm.size)]
    x = array_of(comm, inputs[comm.rank], True)
    plans = {name: getattr(comm, f"{name}_init")(x, op="max") for name in NAMES}
    for _ in range(3):
        results = {name: plan() for name, plan in plans.items()}
    comm.synchronize()
    for name, out in results.items():
        assert same(get(out), wanted_of(name, inputs, "max", comm.rank))
    wait_for_all(comm, world)


def test_all_have_the_same_algorithms():
    for name in NAMES:
        assert tuple(operations.OPERATIONS[name].algorithms) == ALGORITHMS
