"""reduce against NumPy, bit for bit, to every root."""

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives import operations
from numba_symm.collectives.algorithms import GENERAL
from numba_symm.collectives.kernels.direct_reduce import LOADS
from numba_symm.collectives.protocols.handshake import BLOCKS
from numba_symm.collectives.protocols.partition import LINE
from numba_symm.collectives.protocols.workspace import (
    CHUNKED,
    THREADS,
    layout,
)
from numba_symm.environment import SIMULATED
from tests import operators
from tests.algorithms import ONE_SHOTS, PROTOCOLS, entry, takes, usable
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
F4, I8 = np.dtype(np.float32), np.dtype(np.int64)
SOME = operators.PAIRS[:: 3 if SIMULATED else 7]  # compiling takes seconds

by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def edges(dtype, algorithm, size, blocks):
    """Return counts around where another vector, shard, chunk or epoch begins."""
    lanes = 16 // dtype.itemsize
    made = entry("reduce", algorithm)
    if made.copies:  # a line, and full slots of three halving chunks
        slot = layout(2).copied
        room = (slot.end - slot.slots) // 2 // dtype.itemsize
        counts = [7 * LINE * lanes] + ([] if SIMULATED else [room, 7 * room // 4])
        return sorted({1, 2, *(each + by for each in counts for by in (-1, 0, 1))})
    if not made.transport:
        of_two = 1 if made.handshake else 2
        shares = size - 1 if size > 2 else min(size, of_two)
        unit, most = CHUNKED.tiles(size) * THREADS * shares, (2 * blocks, 5 * blocks)
    else:
        protocol = PROTOCOLS[made.region]
        shares = 1 if made.region in ONE_SHOTS else size
        unit = THREADS * shares
        most = (min(blocks, protocol.blocks) * protocol.tiles(size),)
    found = {1, lanes, LINE * lanes * shares}
    if algorithm == GENERAL and size == 2:  # one way up to a chunk of all blocks
        found |= {blocks * CHUNKED.tiles(2) * THREADS * lanes}
    found |= {unit * lanes * times for times in (1, *most)}
    if made.handshake:  # a vector for each thread of an owner, and a batch
        grid = min(blocks, BLOCKS) * THREADS * shares
        found |= {grid * lanes, grid * lanes * max(1, LOADS // size)}
    if SIMULATED:  # where an epoch takes tens of milliseconds
        found = {count for count in found if count * dtype.itemsize < 40_000}
    return sorted({max(1, count + by) for count in found for by in (-1, 0, 1)})


def check(comm, out, wanted, root, what=None):
    if comm.rank == root:
        assert operators.same(get(out), wanted).all(), what
    else:
        assert out is None


@by_algorithm
@pytest.mark.parametrize("dtype", [F4, I8], ids=str)
def test_every_edge_of_its_pieces(comm, world, algorithm, dtype):
    if not takes("reduce", algorithm, dtype):
        pytest.skip("for floats")
    calls = []
    for step, count in enumerate(
        edges(dtype, algorithm, comm.size, comm._calls.end.max_blocks)
    ):
        root = step % comm.size
        inputs = [values([count, rank], count, dtype) for rank in range(comm.size)]
        symmetric = entry("reduce", algorithm).handshake or count % 2 == 0
        x = array_of(comm, inputs[comm.rank], symmetric)
        out = comm.empty(count, dtype) if symmetric else None
        out = comm.reduce(
            x, root=root, out=out if comm.rank == root else None, algorithm=algorithm
        )
        calls.append((root, inputs, x, out))
    comm.synchronize()
    for root, inputs, x, out in calls:
        check(comm, out, operators.wanted(inputs, "sum"), root, x.size)
        assert same(get(x), inputs[comm.rank])
    wait_for_all(comm, world)


def test_types_and_operators(comm, world):
    calls = []
    for step, (kind, op) in enumerate(SOME):
        root = step % comm.size
        inputs = [operators.random(kind, 33, [step, r]) for r in range(comm.size)]
        x = array_of(comm, inputs[comm.rank], step % 2 == 0)
        algorithm = usable("reduce", ALGORITHMS[step % len(ALGORITHMS)], x.dtype)
        out = comm.reduce(x, op=op, root=root, algorithm=algorithm)
        calls.append((operators.wanted(inputs, op), root, out))
    comm.synchronize()
    for pair, (wanted, root, out) in zip(SOME, calls, strict=True):
        check(comm, out, wanted, root, pair)
    wait_for_all(comm, world)


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


def test_plans(comm, world):
    inputs = [values([3, rank], 50, F4) for rank in range(comm.size)]
    x = array_of(comm, inputs[comm.rank], True)
    plans = [comm.reduce_init(x, op="max", root=root) for root in range(comm.size)]
    for _ in range(3):
        results = [plan() for plan in plans]
    comm.synchronize()
    for root, out in enumerate(results):
        check(comm, out, operators.wanted(inputs, "max"), root)
    wait_for_all(comm, world)
