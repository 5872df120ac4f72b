"""Copies into and out of the peers' symmetric memory, ordered by signals."""

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from tests.ranks.helpers import (
    check_works,
    get,
    needs_peers,
    of_one_island,
    ordinary,
    put,
    refused,
)

pytestmark = of_one_island

COUNT = 40


def pattern(rank, count=COUNT):
    return np.arange(count, dtype=np.float32) + 100 * rank


def device(host):
    """Return a copy in memory that no peer can reach."""
    array = ordinary(host.shape, host.dtype)
    put(array, host)
    return array


@pytest.fixture
def x(comm):
    """Symmetric memory that holds every rank's pattern."""
    x = comm.empty(COUNT, np.float32)
    put(x, pattern(comm.rank))
    comm.barrier()
    comm.synchronize()
    return x


@pytest.fixture
def memory(comm, x):
    return comm.rendezvous(x)


@needs_peers
def test_halos_in_a_ring(comm, finished):
    """In each step, each rank's cells move to the right, through the neighbours' halos.

    A halo is overwritten after its rank has signalled that it was read. Signals to the
    left have their own channels, because with two ranks, left and right are the same.
    """
    cells, steps = 6, 2 * comm.size
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    halo = comm.zeros(2, np.int64)  # received from the left, from the right
    memory = comm.rendezvous(halo)

    def tell(channel):
        memory.put_signal(right, channel)
        memory.put_signal(left, channel + 1)

    def hear(channel):
        memory.wait_signal(left, channel)
        memory.wait_signal(right, channel + 1)

    came, read = 3, 5
    whole = np.arange(cells * comm.size)
    mine = slice(cells * comm.rank, cells * (comm.rank + 1))
    own, edges = whole[mine].copy(), ordinary(2, np.int64)
    for step in range(steps):
        put(edges, own[[-1, 0]])
        if step > 0:
            hear(read)
        memory.put(edges[:1], right, 0)
        memory.put(edges[1:], left, 1)
        if step % 2:
            memory.fence()
        tell(came)
        hear(came)
        before, after = get(halo)
        tell(read)
        assert after == whole[mine.stop % whole.size], f"step {step}"
        whole = np.roll(whole, 1)
        own = np.array([before, *own[:-1]])
        assert own.tolist() == whole[mine].tolist(), f"step {step}"
    hear(read)
    finished()


@pytest.mark.parametrize(
    ("shape", "dtype", "start"),
    [
        (COUNT + 1, np.float32, 0),
        (1, np.float32, COUNT),
        ((7, 6), np.float32, 0),
        (21, np.float64, 0),
        (1, np.uint8, 4 * COUNT),
        (1, np.float32, -1),
        (0, np.float32, COUNT + 1),
    ],
)
def test_what_does_not_fit_is_refused(comm, world, memory, x, shape, dtype, start):
    array = ordinary(shape, dtype)
    for name, call in (
        ("put", lambda: memory.put(array, 0, start)),
        ("get", lambda: memory.get(0, shape, dtype, start)),
        ("get", lambda: memory.get(0, shape, dtype, start, out=array)),
        ("", lambda: memory.get_buffer(0, shape, dtype, start)),
    ):
        text = f"of {np.dtype(dtype).name} from element {start}: bytes"
        refused(
            world, ns.ArgumentError, call, f"{name}: ", text, "within the 160 bytes"
        )
    assert np.array_equal(get(x), pattern(comm.rank))


def test_ranks_and_numbers_that_are_none_are_refused(comm, world, memory):
    y = ordinary(1, np.float32)
    for rank in (-1, comm.size, 1.0, "0", None):
        text = f"expected a rank from 0 to {comm.size - 1}, got {rank!r}"
        for call in (
            lambda r=rank: memory.put(y, r),
            lambda r=rank: memory.get(r, 1, np.float32),
            lambda r=rank: memory.get_buffer(r, 1, np.float32),
        ):
            refused(world, ns.ArgumentError, call, text)
    for call, text in (
        (lambda: memory.put(y, 0, 0.0), "storage_offset to be an integer, got 0.0"),
        (lambda: memory.get(0, 1, np.float32, "1"), "to be an integer, got '1'"),
        (lambda: memory.get(0, 1.5, np.float32), "integers from 0, got shape=1.5"),
        (lambda: memory.get_buffer(0, (1, 2.0), np.float32), "integers from 0, got"),
        (lambda: memory.get_buffer(0, -1, np.float32), "integers from 0, got shape=-1"),
        (
            lambda: memory.get_buffer(0, (-2, -2), np.float32),
            "expected integers from 0",
        ),
    ):
        refused(world, ns.ArgumentError, call, text)
    for call in (memory.get, memory.get_buffer):
        for dtype in ("no such type", object):
            args = (0, 1, dtype)
            refused(world, ns.ArgumentError, lambda c=call, a=args: c(*a), "dtype=")
    check_works(comm)


def test_arrays_that_cannot_be_copied_are_refused(comm, world, memory, x):
    host = np.zeros(4, np.float32)
    matrix = ordinary((3, 4), np.float32)
    columns = ordinary((3, 4), np.float32, "F")
    cases = (
        (host, "put", "in host memory"),
        ("array", "put", "expected a device array"),
        (matrix[:, 1], "put", "expected a contiguous array"),
        (columns, "put", "got one in Fortran order"),
        (x[1:5], "put", "apart from its place"),
        (x[:4], "put", "apart from its place"),
        (host, "get", "in host memory"),
        (matrix[:, 1], "get", "expected a contiguous array"),
        (columns, "get", "got one in Fortran order"),
        (matrix, "get", "of shape (4,) and float32, got one of shape (3, 4)"),
        (ordinary(4, np.int32), "get", "one of shape (4,) and int32"),
        (x[2:6], "get", "apart from its place"),
    )
    for array, name, text in cases:
        if name == "put":
            call = lambda a=array: memory.put(a, comm.rank)  # noqa: E731
        else:
            call = lambda a=array: memory.get(  # noqa: E731
                comm.rank, 4, np.float32, out=a
            )
        refused(world, ns.ArgumentError, call, f"{name}: ", text)
    assert np.array_equal(get(x), pattern(comm.rank))
    check_works(comm)


def test_a_mistake_on_one_rank_is_its_own(comm, world, memory, x, finished):
    """Copies are not collective: those of other ranks continue."""
    target, error = (comm.rank + 1) % comm.size, None
    try:
        memory.put(device(pattern(-1, 3)), 1000 if comm.rank == 0 else target)
    except ns.ArgumentError as found:
        error = str(found)
    assert (error is not None) == (comm.rank == 0)
    finished()
    left = (comm.rank - 1) % comm.size
    wanted = pattern(comm.rank)
    if left != 0:
        wanted[:3] = pattern(-1, 3)
    assert np.array_equal(get(x), wanted)
    finished()


def calls_of(memory):
    y = cuda.to_device(np.zeros(1, np.float32))
    return (
        lambda: memory.put(y, 0),
        lambda: memory.get(0, 1, np.float32),
        memory.fence,
    )


def test_nothing_works_after_close(world):
    comm = ns.Communicator(world, timeout=60)
    memory = comm.rendezvous(comm.empty(5, np.float32))
    comm.close()
    assert repr(memory).endswith(f"rank {world.rank} of {world.size}, closed>")
    for call in calls_of(memory):
        refused(world, ns.ClosedError, call, "was closed")


def test_no_method_works_after_the_memory_was_freed(comm, world):
    pointer = comm.allocator.alloc(64)
    memory = comm.allocator.rendezvous(pointer, comm)
    comm.allocator.free(pointer)
    keep = comm.empty(1, np.int8)
    for call in calls_of(memory):
        refused(world, ns.ClosedError, call, "was closed")
    del keep


def test_nothing_works_after_a_failure(world):
    comm = ns.Communicator(world, timeout=60)
    memory = comm.rendezvous(comm.empty(5, np.float32))
    world.barrier()
    comm._calls.members.abandon("is away")
    world.barrier()
    for call in calls_of(memory):
        refused(world, ns.RankLeft, call, "is away; ")
    comm.close()  # every rank has raised the failure
