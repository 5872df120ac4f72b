"""A closed, failed or dropped communicator leaves no resources."""

import contextlib
import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.collectives import lifetime
from numba_symm.engines.mpi import forget_served
from numba_symm.environment import SIMULATED
from numba_symm.gpu import streams
from tests.ranks.helpers import check_works, get, of_one_island, put, refused

CYCLES = 4 if SIMULATED else 20  # the driver's memory shows 20 lost pages, not 4
WARM_UP = 3  # drivers and MPI open what they need, once
SEQPACKET = "0005"
allocators = set()
"""Of all communicators so far."""

SLACK = {"GPU memory": 16 << 20, "GPU mappings": 4}
"""What the driver may keep for itself: 20 lost pages of 2 MiB would be more."""


def counted(world):
    """Count this process' resources of the kinds that a communicator uses."""
    forget_served()  # messages between islands
    gc.collect()
    streams.give_back()
    world.barrier()  # on a shared GPU, all ranks are between two steps
    links = [*filter(None, map(target, Path("/proc/self/fd").iterdir()))]
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = {
        "descriptors": len(links),
        "shared memory": sum("memfd:numba_symm" in line for line in maps),
        "GPU mappings": sum("/dev/nvidia" in line for line in maps),
        "sockets": len(own_sockets(links)),
        "threads": threading.active_count(),
        "tasks": len([*Path("/proc/self/task").iterdir()]),
        "blocks": sum(len(allocator._blocks.values()) for allocator in allocators),
    }
    if not SIMULATED:
        free, total = cuda.current_context().get_memory_info()
        found["GPU memory"] = total - free
    world.barrier()
    return found


def check_same(world, before, but=()):
    """Check that no count has changed since ``before``."""
    now = counted(world)
    for name, count in before.items():
        grown = now[name] - count
        right = grown < SLACK[name] if name in SLACK else grown == 0
        assert right or name in but, f"{name}: {count} before, {now[name]} now"


def target(file):
    try:
        return str(file.readlink())
    except FileNotFoundError:  # the folder's own descriptor
        return None


def own_sockets(links):
    """Return the lines of this process' sockets of the library's kind."""
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = map(str.split, Path("/proc/net/unix").read_text().splitlines())
    return [row for row in rows if row[6] in inodes and row[4] == SEQPACKET]


@pytest.fixture(scope="module", autouse=True)
def _warm(world):
    for _ in range(WARM_UP):
        live(world)


def live(world):
    """Make a communicator, use it and close it."""
    with ns.Communicator(world, timeout=60) as comm:
        allocators.add(comm.allocator)
        x, y = comm.empty(33, np.float32), comm.zeros(5, np.int64)
        memory = comm.rendezvous(x)
        memory.barrier()
        put(x, np.ones(33, np.float32))
        memory.get_buffer(0, 33, np.float32)
        assert get(comm.all_reduce(x, out=x)).tolist() == [comm.size] * 33
        pointer = comm.allocator.alloc(100)
        comm.allocator.rendezvous(pointer + 4, comm)
        comm.allocator.free(pointer)
        plan = comm.all_reduce_init(y, algorithm="chunked")
        assert not get(plan()).any()


def test_cycles_leave_nothing(world):
    before = counted(world)
    for _ in range(CYCLES):
        live(world)
    check_same(world, before)


def test_an_open_communicator_is_counted(world):
    """Shows that the tests here can fail."""
    before = counted(world)
    with ns.Communicator(world, timeout=60) as comm:
        x = comm.empty(33, np.float32)
        comm.rendezvous(x)
        (mine,) = (part for part in comm.islands if comm.rank in part)
        during = counted(world)
    more = {name for name in before if during[name] > before[name]}
    assert more >= {"descriptors", "shared memory", "blocks"}
    assert ("sockets" in more) == (len(mine) > 1)
    del x, comm
    check_same(world, before)


def test_many_arrays_leave_nothing(world):
    before = counted(world)
    with ns.Communicator(world, timeout=60) as comm:
        for _ in range(CYCLES):
            comm.rendezvous(comm.empty(33, np.float32))
        kept = [comm.empty(33, np.float32) for _ in range(CYCLES)]
        memories = [comm.rendezvous(x) for x in kept]
        buffers = [m.get_buffer(0, 33, np.float32) for m in memories]
    del kept, memories, buffers, comm
    check_same(world, before)


def test_arrays_that_outlive_their_communicator_go_with_the_last(world):
    before = counted(world)
    for _ in range(CYCLES):
        with ns.Communicator(world, timeout=60) as comm:
            x = comm.empty(33, np.float32)
            put(x, np.full(33, 2, np.float32))
            part = x[3:]
        del x, comm
        assert get(part).tolist() == [2.0] * 30
        del part
    check_same(world, before)


@pytest.mark.parametrize("step", ["timeout", "device", "allocate", "write", "board"])
def test_a_failed_construction_leaves_nothing(world, monkeypatch, step):
    from numba_symm.launch import board
    from numba_symm.memory import backends

    create, last = backends.create, world.rank == world.size - 1

    def broken(name, ordinal):
        backend = create(name, ordinal)
        if last:
            monkeypatch.setattr(backend, step, fail)
        return backend

    def fail(*args):
        raise ns.BackendError("broken")

    arguments = {"timeout": 60}
    with monkeypatch.context() as patch:
        if step == "timeout":
            arguments["timeout"] = -1
        elif step == "device":
            arguments["device"] = 1000 if last else None
        elif step == "board":
            if last:
                patch.setattr(board, "mapped", fail)
        else:
            patch.setattr(backends, "create", broken)
        before = counted(world)
        for _ in range(CYCLES // 4):
            refused(world, ns.SymmError, lambda: ns.Communicator(world, **arguments))
        monkeypatch.undo()
    check_same(world, before)
    live(world)
    check_same(world, before)


def kept():
    """Return what a rank that leaves alone cannot give back: peers may still use it."""
    safe = all(allocator._backend.frees_while_mapped for allocator in allocators)
    return () if safe else ("GPU memory",)


def drop(last):
    last.clear()
    gc.collect()


@of_one_island
@pytest.mark.parametrize("cycle", [False, True], ids=["dropped", "in a cycle"])
def test_an_unclosed_communicator_is_reported_and_leaves_nothing(
    world, monkeypatch, cycle
):
    """It stays mapped for now, because the garbage collector may run in a capture."""
    before = counted(world)
    comm = ns.Communicator(world, timeout=60)
    unmapped, backend = [], type(comm.allocator._backend)
    real = backend.close
    monkeypatch.setattr(
        backend, "close", lambda *each: unmapped.append(1) or real(*each)
    )
    x = comm.zeros(33, np.float32)
    memory = comm.rendezvous(x)
    comm.all_reduce(x)
    comm.synchronize()
    world.barrier()  # no rank waits for another one any more
    if cycle:
        comm.itself = comm
    last = [comm]
    del comm
    with pytest.warns(ResourceWarning, match="rank .* was not closed"):
        drop(last)
    assert unmapped == []
    refused(world, ns.ClosedError, memory.barrier, "the communicator was dropped")
    assert not get(x).any()
    del memory, x
    check_same(world, before, kept())
    assert world.size == 1 or unmapped
    live(world)


def test_a_close_that_fails_leaves_another_communicator_open(world, monkeypatch):
    before, kinds = counted(world), len(lifetime._in_use)
    first, second = (ns.Communicator(world, timeout=60) for _ in range(2))

    def fail():
        raise ns.DriverError("cannot unmap")

    monkeypatch.setattr(first._calls.heap, "close", fail)
    refused(world, ns.DriverError, first.close, "cannot unmap")
    assert len(lifetime._in_use) == kinds + 1
    assert ns.backend() == second.backend
    check_works(second)
    second.close()
    assert len(lifetime._in_use) == kinds
    monkeypatch.undo()
    del first, second
    check_same(world, before, kept())


def test_a_close_after_a_failure_unmaps_what_was_dropped_before(world):
    lost, failed = (ns.Communicator(world, timeout=60) for _ in range(2))
    lost.itself, last = lost, [lost]
    del lost
    with pytest.warns(ResourceWarning, match="was not closed"):
        drop(last)
    world.barrier()
    failed._calls.members.abandon("left for a test")
    with contextlib.suppress(ns.RankLeft):  # of the rank that was first
        failed.close()
    assert not streams._queue.steps


def test_a_failed_communicator_does_not_wait_for_the_garbage_collector(world):
    comm = ns.Communicator(world, timeout=60)
    world.barrier()
    comm._calls.members.abandon("left for a test")
    gc.disable()
    try:
        with contextlib.suppress(ns.RankLeft):  # of the rank that was first
            comm.close()
        calls = weakref.ref(comm._calls)
        del comm
        assert calls() is None
    finally:
        gc.enable()
