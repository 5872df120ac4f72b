"""Blocks of memory: the allocator, and how long each lives."""

import bisect
import gc
import sys

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from numba_symm.gpu import arrays, kernels
from numba_symm.gpu.arrays import Memory
from tests.ranks.helpers import (
    check_works,
    get,
    of_one_island,
    put,
    refused,
    wait_for_all,
)
from tests.ranks.memory.peeks import pattern, read

pytestmark = of_one_island


@cuda.jit
def load(ctx, found):
    found[0] = symm.ld_u32(symm.peer_address(ctx, ctx.size - 1))


@cuda.jit
def signal(ctx, found):
    found[0] = symm.put_signal(ctx, ctx.rank, 0)  # a barrier of one rank uses no pad


def refused_in_kernels(world, ctx, text):
    """Check that the simulator refuses memory that was unmapped."""
    found = cuda.device_array(1, np.uint32)
    for kernel in (load, signal) if SIMULATED else ():
        refused(world, ns.ClosedError, lambda k=kernel: k[1, 1](ctx, found), text)


# The allocator


def test_blocks_are_found_from_any_pointer_inside(comm):
    allocator = comm.allocator
    assert isinstance(allocator, ns.SymmetricMemoryAllocator)
    pointer, other = allocator.alloc(1000), allocator.alloc(8)
    for inside in (0, 1, 500, 999):
        assert allocator.get_alloc_size(pointer + inside) == 1000
    assert allocator.get_alloc_size(other + 7) == 8
    for outside in (pointer - 1, pointer + 1000, other + 8):
        with pytest.raises(ns.ArgumentError, match=f"an allocation, got {outside:#x}"):
            allocator.get_alloc_size(outside)
        assert not allocator.is_rendezvous_completed(outside)
    assert read(comm, pointer, 1000) == bytes(1000)
    allocator.free(pointer)
    with pytest.raises(
        ns.ArgumentError, match="expected an address within an allocation"
    ):
        allocator.get_alloc_size(pointer + 1)
    assert allocator.get_alloc_size(other) == 8
    allocator.free(other)


def test_what_is_no_block_cannot_be_freed(comm):
    allocator = comm.allocator
    pointer = allocator.alloc(64)
    for wrong in (pointer + 1, pointer - 8, 0):
        with pytest.raises(ns.ArgumentError, match=f"alloc returned, got {wrong:#x}"):
            allocator.free(wrong)
    allocator.free(pointer)
    with pytest.raises(
        ns.ArgumentError, match="expected an address that alloc returned"
    ):
        allocator.free(pointer)


@pytest.mark.parametrize("nbytes", [-1, 1.5, "8", None])
def test_sizes_that_are_none_are_refused(comm, nbytes):
    with pytest.raises(ns.ArgumentError, match="expected a number of bytes"):
        comm.allocator.alloc(nbytes)


def test_a_rendezvous_completes_a_block(comm, world):
    allocator = comm.allocator
    pointer = allocator.alloc(256)
    assert not allocator.is_rendezvous_completed(pointer)
    memory = allocator.rendezvous(pointer + 16, comm)
    assert allocator.is_rendezvous_completed(pointer)
    assert allocator.is_rendezvous_completed(pointer + 255)
    assert memory.buffer_size == 240
    put(memory.get_buffer(comm.rank, 60, "f4"), pattern(comm.rank, 60))
    memory.barrier()
    for rank in range(comm.size):
        assert np.array_equal(get(memory.get_buffer(rank, 60, "f4")), pattern(rank, 60))
    wait_for_all(comm, world)
    allocator.free(pointer)
    assert not allocator.is_rendezvous_completed(pointer)


# How long it lives


def entries(comm):
    """Return the numbers of the blocks that are mapped on all ranks."""
    gc.collect()
    return set(comm._calls.heap._entries)


def test_a_block_is_found_though_an_array_is_dropped_meanwhile(comm, monkeypatch):
    """A finalizer may run in the same thread, between any two steps."""

    def address_of(array):
        return arrays.view(array, "test").address

    kept = sorted((comm.zeros(3) for _ in range(3)), key=address_of)
    wanted = address_of(kept[2])
    real = bisect.bisect_right

    def dropping(*given):
        found = real(*given)
        del kept[:2]
        gc.collect()
        return found

    monkeypatch.setattr(bisect, "bisect_right", dropping)
    block = comm.allocator.find(wanted)
    monkeypatch.undo()
    assert block.address == wanted
    assert len(kept) == 1


def count(event, call):
    """Return how many events of a tracer this thread has in a call."""
    found = []

    def trace(frame, kind, argument):
        if kind == event:
            found.append(frame.f_code.co_qualname)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return len(found)


def test_remembered_calls_survive_what_cannot_change_them(comm, monkeypatch):
    """They are forgotten when memory that they were bound to is mapped or unmapped."""
    monkeypatch.setattr(kernels, "simulate", lambda *args: None)
    monkeypatch.setattr(kernels.Launch, "simulate", lambda *args: None)
    gc.collect()  # no finalizer runs within a count
    address = comm.allocator.alloc(64)  # not symmetric yet
    ordinary = Memory(address, 64, None).array(16, np.float32)
    x, y = (comm.zeros(16, np.float32) for _ in range(2))

    def call():
        for each in (x, ordinary):
            comm.all_reduce(each, out=y, algorithm="direct")

    def place():
        return comm._calls.heap.place(address, 64)

    for _ in range(4):  # on a GPU, the third one makes the graph
        call()
    known = count("call", call)
    z = comm.empty(8)
    assert count("call", call) == known
    comm.rendezvous(z)
    assert count("call", call) == known
    assert place() is None
    comm.allocator.rendezvous(address, comm)
    assert place().addresses[comm.rank] == address
    assert count("call", call) > known
    assert count("call", call) == known
    del z
    comm.empty(8)  # after z is unmapped, so other memory may get its addresses
    assert count("call", call) > known
    assert count("call", call) == known
    comm.allocator.free(address)


@pytest.mark.skipif("config.pluginmanager.get_plugin('agreement').comm.size > 1")
def test_many_arrays_cost_no_more_than_a_few(comm, monkeypatch):
    """Counted in lines of Python, on a rank that waits for no other one."""
    monkeypatch.setattr(kernels, "simulate", lambda *args: None)
    monkeypatch.setattr(kernels.Launch, "simulate", lambda *args: None)
    many = []

    def steps():
        x, y = comm.empty(16, np.float32), comm.zeros(16, np.float32)
        comm.rendezvous(x)
        comm.rendezvous(x[2:])
        comm.all_reduce(x, out=y, algorithm="direct")
        comm._calls.heap.place(arrays.view(y, "test").address, 64)
        many.append((x, y))

    def lines():
        gc.collect()
        return min(count("line", steps) for _ in range(3))

    few = lines()
    many += [comm.empty(1) for _ in range(400)]
    assert lines() <= few * 1.05


def test_a_block_of_the_allocator_is_unmapped_once_all_have_freed_it(comm, world):
    pointer = comm.allocator.alloc(64)
    memory = comm.allocator.rendezvous(pointer, comm)
    before, ctx = len(entries(comm)), memory.ctx
    comm.allocator.free(pointer)
    keep = comm.empty(1, np.int8)
    assert len(entries(comm)) == before
    for call in (
        memory.barrier,
        lambda: memory.get_buffer(comm.rank, 1, np.uint8),
        lambda: memory.ctx,
        lambda: memory.buffer_ptrs_dev,
        lambda: memory.signal_pad_ptrs_dev,
    ):
        refused(world, ns.ClosedError, call, "closed")
    refused_in_kernels(world, ctx, "closed by its communicator")
    del keep


def test_arrays_stay_readable_after_close(world):
    comm = ns.Communicator(world, timeout=60)
    x, y = comm.empty(40, np.float32), comm.zeros(7, np.float16)
    put(x, pattern(comm.rank))
    result = comm.all_reduce(y)
    comm.synchronize()
    tail = x[30:]
    comm.close()
    del x
    gc.collect()
    assert np.array_equal(get(tail), pattern(world.rank)[30:])
    put(tail, np.ones(10, np.float32))
    assert np.array_equal(get(tail), np.ones(10))
    assert not get(result).any()
    assert not get(y).any()


def test_nothing_works_after_close(world):
    comm = ns.Communicator(world, timeout=60)
    x = comm.empty(5, np.float32)
    memory, pointer = comm.rendezvous(x), comm.allocator.alloc(64)
    plan, ctx = comm.all_reduce_init(x), memory.ctx
    comm.close()
    calls = [
        comm.check,
        comm.synchronize,
        comm.barrier,
        plan,
        memory.barrier,
        lambda: comm.empty(5),
        lambda: comm.zeros(5),
        lambda: comm.rendezvous(x),
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce_init(x),
        lambda: comm.allocator.rendezvous(pointer, comm),
        lambda: memory.get_buffer(0, 1, np.float32),
        lambda: memory.ctx,
        lambda: memory.buffer_ptrs_dev,
        lambda: memory.signal_pad_ptrs_dev,
        comm.__enter__,
    ]
    if world.size > 1:
        other = (world.rank + 1) % world.size
        calls += [lambda: memory.put_signal(other), lambda: memory.wait_signal(other)]
    for call in calls:
        refused(world, ns.ClosedError, call, "was closed")
    refused_in_kernels(world, ctx, "was closed")
    comm.allocator.free(pointer)


def test_closing_again_does_nothing(world):
    comm = ns.Communicator(world, timeout=60)
    comm.close()
    comm.close()
    with ns.Communicator(world, timeout=60) as comm:
        comm.close()
    with ns.Communicator(world, timeout=60) as comm:
        check_works(comm)


def test_memory_outlives_its_communicator_only_here(world):
    first = ns.Communicator(world, timeout=60)
    x = first.empty(6, np.float32)
    put(x, pattern(world.rank, 6))
    first.close()
    with ns.Communicator(world, timeout=60) as second:
        # It is still a block of the allocator: it can be mapped anew.
        memory = second.rendezvous(x)
        memory.barrier()
        for rank in range(second.size):
            assert np.array_equal(
                get(memory.get_buffer(rank, 6, "f4")), pattern(rank, 6)
            )
        memory.barrier()
        second.synchronize()
        del memory


def test_a_freed_block_has_no_rendezvous(comm, world):
    address = comm.allocator.alloc(64)
    comm.allocator.rendezvous(address, comm)
    comm.allocator.free(address)
    with pytest.raises(ns.SymmError, match="rendezvous failed on"):
        comm.allocator.rendezvous(address, comm)
    wait_for_all(comm, world)
