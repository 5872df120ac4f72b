"""Arrays with gaps, wherever one array is moved or reduced."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import (
    check_works,
    needs_peers,
    of_one_island,
    ordinary,
    put,
    refused,
)

PAD = -77  # what is between the elements, and must stay


def transposed(array):
    """Return a view: Numba's own ``T`` copies an array of two axes."""
    if SIMULATED or isinstance(array, np.ndarray):
        return array.T
    facts = {"shape": array.shape[::-1], "strides": array.strides[::-1]}
    found = array.__cuda_array_interface__ | facts
    view = SimpleNamespace(__cuda_array_interface__=found, array=array)
    return cuda.as_cuda_array(view)


def parts(whole):
    """Return views with gaps, each of 4 by 6 elements or of 24, of a larger array."""
    return {
        "columns": whole.reshape(16, 16)[2:6, 5:11],
        "steps": whole[3:75:3],
        "rows": whole.reshape(16, 16)[::4, :6],
        "transposed": transposed(whole.reshape(16, 16)[1:13:2, 2:6]),
        "four axes": whole.reshape(4, 4, 4, 4)[:2, 1:4, :2, 1:3],
        "more axes than a launch has": whole.reshape(4, 4, 4, 4)[:2, :2, :3, ::3],
    }


KINDS = list(parts(np.zeros(256)))


def made(kind, dtype, host=None):
    """Return an array of the device with gaps, and the whole."""
    whole = ordinary(256, dtype)
    filled = np.full(256, PAD, dtype)
    if host is not None:
        part = parts(filled)[kind]
        part[...] = host.reshape(part.shape)
    put(whole, filled)
    return parts(whole)[kind], whole


def check(whole, kind, wanted):
    """Check the elements, and that nothing between them was written."""
    found = whole.copy_to_host()
    part = parts(found)[kind]
    assert np.array_equal(part.ravel(), np.asarray(wanted).ravel())
    part[...] = PAD
    assert (found == PAD).all()


def of_rank(rank, dtype=np.float32):
    return (np.arange(24) + 100 * rank).astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_of_arrays_with_gaps(comm, world, kind):
    for dtype in (np.float32, np.int16, np.complex128):
        total = sum(of_rank(r, dtype) for r in range(comm.size))
        x, whole = made(kind, dtype, of_rank(comm.rank, dtype))
        out, into = made(kind, dtype)
        assert comm.all_reduce(x, out=out) is out
        new = comm.all_reduce(x)
        assert new.shape == x.shape
        root = comm.size - 1
        rooted = comm.reduce(x, root=root, out=out if comm.rank == root else None)
        scan = comm.scan(x)
        assert comm.all_reduce(x, out=x) is x  # in place
        comm.synchronize()
        check(into, kind, total)
        assert np.array_equal(new.copy_to_host().ravel(), total)
        assert (rooted is out) == (comm.rank == root)
        prefix = sum(of_rank(r, dtype) for r in range(comm.rank + 1))
        assert np.array_equal(scan.copy_to_host().ravel(), prefix)
        check(whole, kind, total)
    world.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_moves_of_arrays_with_gaps(comm, world, kind):
    size, rank, root = comm.size, comm.rank, comm.size - 1
    everyone = np.concatenate([of_rank(r) for r in range(size)])
    x, whole = made(kind, np.float32, of_rank(rank))
    out, into = made(kind, np.float32)
    gathered = comm.all_gather(x)
    at_root = comm.gather(x, root=root)
    counts = [24] * size
    uneven = comm.all_gather_v(x, counts=counts)
    every = ordinary(24 * size, np.float32)
    put(every, everyone)
    comm.scatter(every if rank == root else None, root=root, out=out)
    comm.synchronize()
    for found in [gathered, uneven, *([at_root] if rank == root else [])]:
        assert np.array_equal(found.copy_to_host().ravel(), everyone)
    check(into, kind, of_rank(rank))
    check(whole, kind, of_rank(rank))
    assert comm.broadcast(x, root=root) is x
    comm.reduce_scatter_v(every, counts=counts, out=out)
    comm.synchronize()
    check(whole, kind, of_rank(root))
    check(into, kind, size * of_rank(rank))
    world.barrier()


@of_one_island
@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_arrays_with_gaps(comm, world, kind):
    """They work alone, in groups, as plans, as requests, and shorter than the room."""
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    x, whole = made(kind, np.float32, of_rank(rank))
    out, into = made(kind, np.float32)
    ring = {"dst": right, "src": left}
    assert comm.sendrecv(x, out=out, **ring) is out
    comm.synchronize()
    check(into, kind, of_rank(left))
    count = ordinary(1, np.int64)
    put(into, np.full(256, PAD, np.float32))
    plan = comm.sendrecv_init(
        x[:7] if x.ndim == 1 else x[:1], out=out, count=count, **ring
    )
    for _ in range(2):
        comm.all_reduce(x)  # uses the memory of the communicator
        plan()
    comm.synchronize()
    arrived = count.copy_to_host()[0]
    wanted = np.full(24, PAD, np.float32)
    part = parts(np.arange(256))[kind]
    first = of_rank(left).reshape(part.shape)[: 7 if part.ndim == 1 else 1].ravel()
    wanted[: first.size] = first
    assert arrived == first.size
    found = parts(into.copy_to_host())[kind].ravel()
    assert np.array_equal(found, wanted)
    check(whole, kind, of_rank(rank))
    world.barrier()


@needs_peers
def test_a_group_packs_each_of_its_messages(comm, world):
    """A halo exchange of columns, plain and as a plan within another group."""
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    field, other = (ordinary((6, 8), np.float64) for _ in range(2))
    with comm.group_init() as plan:
        comm.sendrecv(field[:, 1], dst=left, out=field[:, 7], src=right)
        comm.sendrecv(field[:, 6], dst=right, out=field[:, 0], src=left)
    for together in (False, True):
        for array in (field, other):
            host = np.full((6, 8), PAD, np.float64)
            host[:, 1:7] = 10 * rank + np.arange(1, 7) + np.arange(6)[:, None] / 8
            put(array, host)
        with comm.group() if together else contextlib.nullcontext():
            plan()
        with comm.group():
            plan()
            comm.sendrecv(other[:, 1], dst=left, out=other[:, 7], src=right)
            total = comm.all_reduce(other[::2, 2])
            comm.sendrecv(other[:, 6], dst=right, out=other[:, 0], src=left)
        comm.synchronize()
        rows = np.arange(6) / 8
        for array in (field, other):
            found = array.copy_to_host()
            assert np.array_equal(found[:, 7], 10 * right + 1 + rows)
            assert np.array_equal(found[:, 0], 10 * left + 6 + rows)
        every = 10 * sum(range(size)) + size * (2 + rows[::2])
        assert np.array_equal(total.copy_to_host(), every)
    world.barrier()


@of_one_island
@needs_peers
def test_requests_of_arrays_with_gaps(world):
    with ns.Communicator(world, timeout=60, requests=True) as comm:
        if not SIMULATED:  # loading a kernel later would wait for pending requests
            comm.prepare("all_reduce", dtypes=("int32",))
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        pairs = [[made(k, np.int32, of_rank(comm.rank, np.int32)) for k in KINDS]]
        pairs.append([made(k, np.int32) for k in KINDS])
        sent, taken = pairs
        requests = [comm.isend(x, dst=right) for x, _ in sent]
        comm.all_reduce(sent[0][0])
        requests += [comm.irecv(out, src=left) for out, _ in taken]
        for request in requests:
            request.synchronize()
        for kind, (_, into) in zip(KINDS, taken, strict=True):
            check(into, kind, of_rank(left, np.int32))


def test_outputs_that_cannot_be_unpacked_are_refused(comm, world):
    x, whole = comm.zeros(24), ordinary((4, 6), np.float32)
    if SIMULATED:
        same = np.broadcast_to(whole[0], (4, 6))
        kind = type(whole)
        out = kind(same) if not isinstance(same, kind) else same
        refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, out=out), "all_red")
        # NumPy's and CuPy's stride of a new axis is 0.
        half, added = ordinary(12, np.float32), whole[None, :, ::2]
        put(half, np.ones(12, np.float32))
        assert comm.all_reduce(half, out=added) is added
        assert (whole.copy_to_host()[:, ::2] == comm.size).all()
    short = whole[:, ::2]
    refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, out=short), "got 12")
    check_works(comm)


def test_debug_mode_compares_what_arrays_with_gaps_have(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        x, _ = made("columns", np.float32, of_rank(comm.rank))
        y = comm.zeros(24)
        total = comm.all_reduce(x if comm.rank % 2 else y.reshape(4, 6))
        gathered = comm.gather(x)
        assert total.shape == (4, 6)
        assert (gathered is None) == (comm.rank > 0)
