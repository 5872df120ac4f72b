"""broadcast from every root, and reduce_scatter_v, against NumPy."""

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives import operations, select
from numba_symm.collectives.algorithms import Arrays
from numba_symm.collectives.kernels.direct_broadcast import BATCH
from numba_symm.collectives.protocols.handshake import BLOCKS
from numba_symm.collectives.protocols.partition import LINE
from numba_symm.collectives.protocols.workspace import (
    CHUNKED,
    THREADS,
)
from numba_symm.environment import SIMULATED
from tests import operators
from tests.algorithms import ONE_SHOTS, PROTOCOLS, entry
from tests.ranks.helpers import (
    Window,
    array_of,
    get,
    ordinary,
    put,
    refused,
    values,
    wait_for_all,
)

ALGORITHMS = tuple(operations.BROADCAST.algorithms)
F4 = np.dtype(np.float32)
KINDS = [np.dtype(kind) for kind in (np.uint8, np.int16, F4, np.float64, np.complex128)]
KINDS += [np.dtype([("a", np.int32), ("b", np.float64)])]

by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def content(count, dtype, *seed):
    """Return elements of any bits, also those of a NaN that means "empty" elsewhere."""
    random = np.random.default_rng([*seed, count])
    found = random.integers(0, 256, count * dtype.itemsize, np.uint8)
    found[random.integers(0, 2, found.size // 16 + 1).repeat(16)[: found.size] > 0] = (
        255
    )
    return found.view(dtype)


def edges(dtype, algorithm, comm):
    """Return counts around where another vector, shard, chunk or epoch begins."""
    lanes = max(1, 16 // dtype.itemsize)
    shares = max(1, comm.size - 1)
    made = entry("broadcast", algorithm)
    if not made.transport:
        unit = CHUNKED.tiles(comm.size) * THREADS * shares
        blocks = min(comm._calls.end.max_blocks, CHUNKED.blocks)
        most = (2 * blocks, 5 * blocks)
    else:
        protocol = PROTOCOLS[made.region]
        shares = 1 if made.region in ONE_SHOTS else shares
        unit = THREADS * shares
        most = (
            min(comm._calls.end.max_blocks, protocol.blocks)
            * protocol.tiles(comm.size),
        )
    found = {1, lanes, LINE * lanes * shares}
    found |= {unit * lanes * times for times in (1, *most)}
    if made.handshake:  # a vector for each thread of an owner, and a batch
        grid = min(comm._calls.end.max_blocks, BLOCKS) * THREADS * shares
        found |= {grid * lanes, grid * lanes * BATCH}
    if SIMULATED:  # where an epoch takes tens of milliseconds
        found = {count for count in found if count * dtype.itemsize < 40_000}
    return sorted({max(1, count + by) for count in found for by in (-1, 0, 1)})


@by_algorithm
@pytest.mark.parametrize("dtype", [F4, KINDS[-1]], ids=["float32", "12 bytes"])
def test_every_edge_of_its_pieces(comm, world, algorithm, dtype):
    calls = []
    for step, count in enumerate(edges(dtype, algorithm, comm)):
        # Off 16-byte boundaries nothing is direct.
        symmetric = entry("broadcast", algorithm).x is Arrays.SYMMETRIC
        offsets = (0, 0, 0, 1) if symmetric else (0, 1, 3)
        root, offset = step % comm.size, offsets[step % len(offsets)]
        nbytes, before = count * dtype.itemsize, offset * dtype.itemsize
        symmetric = comm.empty(before + nbytes + Window.MARGIN, np.uint8)
        window = Window(symmetric, before, nbytes)
        window.fill(content(count, dtype, comm.rank, step).view(np.uint8))
        x = window.array.view(dtype)
        assert comm.broadcast(x, root=root, algorithm=algorithm) is x
        calls.append((window, content(count, dtype, root, step)))
    comm.synchronize()
    for window, wanted in calls:
        assert window.read().tobytes() == wanted.tobytes(), wanted.size
    wait_for_all(comm, world)


def test_any_rank_may_have_any_memory(comm, world):
    """Between the ranks' own arrays, one that is not symmetric makes all refuse."""
    calls = []
    for step in range(2 * comm.size + 4):
        root, other = step % comm.size, step // 2
        symmetric = comm.empty(400, np.float32)
        # Symmetric on all ranks first; on the other ranks elsewhere, now and then off
        # 16-byte boundaries; then on one rank ordinary.
        x = symmetric[12 * comm.rank + step // 3 :][:300]
        if comm.rank == other - 2:
            x = ordinary(300, np.float32)
        put(x, content(300, F4, comm.rank, step))
        comm.broadcast(x, root=root, algorithm="direct")
        calls.append((x, content(300, F4, root, step)))
    comm.synchronize()
    for x, wanted in calls:
        assert get(x).tobytes() == wanted.tobytes()
    wait_for_all(comm, world)


def test_the_algorithm_follows_from_the_size(world, monkeypatch):
    if SIMULATED:  # there, chunks are for up to MiB, which take seconds
        steps = select.CHOICES["broadcast"].floats
        few = [s._replace(most=tuple(min(m, 16 << 10) for m in s.most)) for s in steps]
        steps = (*few[:-2], *steps[-2:])  # the last two are for all that is larger
        monkeypatch.setitem(select.CHOICES, "broadcast", select.Choice(steps, steps))
    bound, bind = [], operations.Operation.bind

    def noting(operation, algorithm, *given):
        bound.append(algorithm)
        return bind(operation, algorithm, *given)

    monkeypatch.setattr(operations.Operation, "bind", noting)
    with ns.Communicator(world, timeout=60) as comm:
        for symmetric in (True, False):
            for kilobytes in (0, 1, 8, 20) if SIMULATED else (0, 768, 49152):
                count, root = 256 * kilobytes + 1, comm.size - 1
                x = array_of(comm, content(count, F4, comm.rank, 3), symmetric)
                comm.broadcast(x, root=root)
                comm.synchronize()
                assert get(x).tobytes() == content(count, F4, root, 3).tobytes()
        wait_for_all(comm, world)
    assert len(set(bound)) >= (3 if SIMULATED else 2) or comm.size == 1


def test_plans_and_empty_arrays(comm, world):
    x = array_of(comm, np.full(100, comm.rank, np.int16), True)
    plan = comm.broadcast_init(x, root=comm.size - 1)
    for _ in range(3):
        assert plan() is x
    comm.broadcast(comm.zeros((0, 3)))
    comm.synchronize()
    assert (get(x) == comm.size - 1).all()
    wait_for_all(comm, world)


def test_bad_calls(comm, world):
    x = comm.zeros(4)
    for root in (-1, comm.size, 0.0, None):
        refused(
            world,
            ns.ArgumentError,
            lambda r=root: comm.broadcast(x, root=r),
            f"got {root}",
        )
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.broadcast(x, algorithm="one_shot_sentinel"),
        "got 'one_shot_sentinel'",
    )
    refused(world, ns.ArgumentError, lambda: comm.broadcast(np.zeros(3)), "host")
    wait_for_all(comm, world)


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_reduce_scatter_v(comm, world, op):
    calls = []
    for step in range(3 if SIMULATED else 12):
        counts = [(r * 77 + 19 * step) % (150 if SIMULATED else 9000) for r in range(8)]
        counts = counts[: comm.size]
        total = sum(counts)
        inputs = [values([step, rank], total, F4) for rank in range(comm.size)]
        x = array_of(comm, inputs[comm.rank], step % 2 == 0)
        first = sum(counts[: comm.rank])
        own = slice(first, first + counts[comm.rank])
        out = x[own] if step % 3 == 1 and counts[comm.rank] else None
        found = comm.reduce_scatter_v(x, counts=counts, op=op, out=out)
        calls.append((found, operators.wanted(inputs, op)[own]))
    comm.synchronize()
    for found, wanted in calls:
        assert operators.same(get(found), wanted).all()
    for counts, text in (
        ([1], "one for each rank"),
        ([7] * comm.size, "the sum of counts"),
    ):
        refused(
            world,
            ns.ArgumentError,
            lambda c=counts: comm.reduce_scatter_v(comm.zeros(5), counts=c),
            text if comm.size > 1 or counts == [7] else "",
        )
    wait_for_all(comm, world)
