"""Symmetric memory: its members, its signals, and how long it lives."""

import bisect
import gc
import time

import numpy as np
import pytest

import numba_symm as ns
from numba_symm import arrays, pads
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import check_works, get, needs_peers, put, refused


def read(comm, address, nbytes):
    """Return the bytes at a device address, once all work is done."""
    comm.synchronize()
    return comm._group.backend.read(address, nbytes)


def pad_of(comm, memory):
    """Return this rank's signal pad, a row a channel."""
    data = read(comm, memory.signal_pad_ptrs[comm.rank], memory.signal_pad_size)
    return np.frombuffer(data, np.uint32).reshape(pads.MAX_CHANNELS, comm.size)


def meet(comm, world):
    """Wait until all ranks' work is done."""
    comm.synchronize()
    world.barrier()


def pattern(rank, count=40):
    return np.arange(count, dtype=np.float32) + 100 * rank


@pytest.fixture
def shared(comm, world):
    """Memory that holds every rank's pattern."""
    x = comm.empty(40, np.float32)
    put(x, pattern(comm.rank))
    comm.barrier()
    meet(comm, world)
    return comm.rendezvous(x)


def test_members_describe_the_memory(comm, shared):
    assert (shared.rank, shared.world_size) == (comm.rank, comm.size)
    assert shared.buffer_size == 160
    assert shared.signal_pad_size == 4 * pads.MAX_CHANNELS * comm.size
    assert len(set(shared.buffer_ptrs)) == len(shared.buffer_ptrs) == comm.size
    assert len(set(shared.signal_pad_ptrs)) == comm.size
    assert shared.ctx.buffers == tuple(shared.buffer_ptrs)
    assert shared.ctx.pads == tuple(shared.signal_pad_ptrs)
    assert (shared.ctx.rank, shared.ctx.world_size) == (comm.rank, comm.size)
    assert shared.ctx.guard == comm.guard


def test_pointers_lead_to_every_ranks_memory(comm, shared):
    for rank, address in enumerate(shared.buffer_ptrs):
        assert read(comm, address, 160) == pattern(rank).tobytes()


def test_pointer_arrays_on_the_device_hold_the_pointers(comm, shared):
    for address, pointers in (
        (shared.buffer_ptrs_dev, shared.buffer_ptrs),
        (shared.signal_pad_ptrs_dev, shared.signal_pad_ptrs),
    ):
        data = read(comm, address, 8 * comm.size)
        assert np.frombuffer(data, np.uint64).tolist() == pointers
    assert shared.buffer_ptrs_dev == shared.buffer_ptrs_dev


def test_buffers_show_what_the_peers_wrote(comm, shared):
    for rank in range(comm.size):
        assert np.array_equal(get(shared.get_buffer(rank, 40, "f4")), pattern(rank))
        matrix = shared.get_buffer(rank, (3, 5), np.float32, storage_offset=7)
        assert matrix.shape == (3, 5)
        assert np.array_equal(get(matrix), pattern(rank)[7:22].reshape(3, 5))
        halves = shared.get_buffer(rank, np.int64(2), np.int16, storage_offset=78)
        assert get(halves).tobytes() == pattern(rank)[39:].tobytes()
        assert shared.get_buffer(rank, 0, np.float32, storage_offset=40).shape == (0,)


def test_what_is_written_into_a_peers_buffer_arrives(comm, world, shared):
    meet(comm, world)  # everybody has the fixture's pattern read or left alone
    right = (comm.rank + 1) % comm.size
    put(shared.get_buffer(right, 5, np.float32, 10), np.full(5, comm.rank, "f4"))
    comm.barrier()
    wanted = pattern(comm.rank)
    wanted[10:15] = (comm.rank - 1) % comm.size
    assert np.array_equal(get(shared.get_buffer(comm.rank, 40, np.float32)), wanted)


@pytest.mark.parametrize("offset", [3, 39])
def test_a_rendezvous_may_begin_inside_an_array(comm, world, offset):
    x = comm.empty(40, np.float32)
    put(x, pattern(comm.rank))
    inside, whole = comm.rendezvous(x[offset:]), comm.rendezvous(x)
    assert inside.buffer_size == 160 - 4 * offset
    moved = [address - 4 * offset for address in inside.buffer_ptrs]
    assert moved == whole.buffer_ptrs
    assert inside.signal_pad_ptrs == whole.signal_pad_ptrs  # one pad a block
    comm.barrier()
    for rank in range(comm.size):
        rest = get(inside.get_buffer(rank, 40 - offset, np.float32))
        assert np.array_equal(rest, pattern(rank)[offset:])
    meet(comm, world)


def test_buffers_outside_of_the_memory_are_refused(comm, world, shared):
    for shape, dtype, start in (
        (41, np.float32, 0),
        (1, np.float32, 40),
        ((20, 3), np.float32, 0),
        (21, np.float64, 0),
        (1, np.uint8, 160),
        (1, np.float32, -1),
    ):
        refused(
            world,
            ns.ArgumentError,
            lambda s=shape, d=dtype, o=start: shared.get_buffer(0, s, d, o),
            f"of {np.dtype(dtype).name} from element {start} takes bytes",
            "of a buffer of 160",
        )


def test_ranks_that_do_not_exist_are_refused(comm, world, shared):
    for rank in (-1, comm.size, 1000):
        refused(
            world,
            ns.ArgumentError,
            lambda r=rank: shared.get_buffer(r, 1, np.float32),
            f"rank {rank}; there are ranks 0 to {comm.size - 1}",
        )
        for call in (shared.put_signal, shared.wait_signal):
            refused(world, ns.ArgumentError, lambda c=call, r=rank: c(r), f"{rank}")


def test_channels_that_do_not_exist_are_refused(comm, world, shared):
    last, other = pads.MAX_CHANNELS - 1, (comm.rank + 1) % comm.size
    for channel in (-1, last + 1, 0.0, "0"):
        for call in (
            lambda c: shared.barrier(c),
            lambda c: shared.put_signal(other, c),
            lambda c: shared.wait_signal(other, c),
        ):
            refused(
                world,
                ns.ArgumentError,
                lambda f=call, c=channel: f(c),
                f"channel {channel!r}; a signal pad has channels 0 to {last}",
            )


def test_signals_to_oneself_are_refused(comm, world, shared):
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for call in (shared.put_signal, shared.wait_signal):
        texts = refused(world, ns.ArgumentError, lambda f=call: f(comm.rank))
        assert str(others) in texts[comm.rank]


def test_a_barrier_puts_writes_before_reads(comm, world):
    mine = comm.zeros(comm.size, np.int64)
    memory = comm.rendezvous(mine)
    peers = [
        memory.get_buffer(peer, 1, np.int64, comm.rank) for peer in range(comm.size)
    ]
    for step in range(1, 5):
        if step % comm.size == comm.rank:
            time.sleep(0.02)
        for slot in peers:
            put(slot, np.array([step]))
        memory.barrier(step % 2)
        assert get(mine).tolist() == [step] * comm.size, f"step {step}"
        memory.barrier(pads.MAX_CHANNELS - 1)
    meet(comm, world)
    assert not pad_of(comm, memory).any()


@needs_peers
def test_a_token_goes_round_by_signals(comm, world):
    token = comm.zeros(1, np.int64)
    memory = comm.rendezvous(token)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    there, laps, channel = memory.get_buffer(right, 1, np.int64), 3, 17
    seen = []
    for lap in range(laps):
        if comm.rank > 0 or lap > 0:
            memory.wait_signal(left, channel)
        seen.append(int(get(token)[0]))
        put(there, np.array([seen[-1] + 1]))
        memory.put_signal(right, channel)
    if comm.rank == 0:
        memory.wait_signal(left, channel)
        assert get(token)[0] == laps * comm.size
    assert seen == [lap * comm.size + comm.rank for lap in range(laps)]
    meet(comm, world)
    assert not pad_of(comm, memory).any()


@needs_peers
def test_channels_are_independent(comm, world):
    memory = comm.rendezvous(comm.empty(1, np.int64))
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for channel in (1, 0, 127):
        memory.put_signal(right, channel)
    meet(comm, world)
    pad = pad_of(comm, memory)
    assert [*zip(*pad.nonzero(), strict=True)] == [(0, left), (1, left), (127, left)]
    assert set(pad[pad != 0]) == {1}
    for channel in (127, 1, 0):  # in another order than they came
        memory.wait_signal(left, channel)
        meet(comm, world)
        assert not pad_of(comm, memory)[channel].any()
    assert not pad_of(comm, memory).any()


@needs_peers
def test_a_second_signal_waits_until_the_first_was_taken(comm, world):
    memory = comm.rendezvous(comm.empty(1, np.int64))
    steps = 5
    if comm.rank == 0:
        for _ in range(steps):
            memory.put_signal(1)
    if comm.rank == 1:
        for _ in range(steps):
            time.sleep(0.01)
            memory.wait_signal(0)
    meet(comm, world)
    assert not pad_of(comm, memory).any()


def test_pads_do_not_alias(comm, world):
    arrays = [comm.empty(1, np.int32) for _ in range(pads.PADS_PER_ARENA + 6)]
    memories = [comm.rendezvous(array) for array in arrays]
    nbytes = memories[0].signal_pad_size
    for rank in range(comm.size):
        starts = sorted(memory.signal_pad_ptrs[rank] for memory in memories)
        apart = np.diff(np.array(starts, np.uint64))
        assert len(starts) == len(arrays)
        assert (apart >= nbytes).all()
    buffers = {memory.buffer_ptrs[comm.rank] for memory in memories}
    assert len(buffers) == len(arrays)
    for number, memory in enumerate(memories):  # they are theirs on every rank
        for peer in range(comm.size):
            slot = memory.signal_pad_ptrs[peer] + 4 * comm.rank
            comm._group.backend.write(slot, (number + 1).to_bytes(4, "little"))
    meet(comm, world)
    for number, memory in enumerate(memories):
        assert pad_of(comm, memory)[0].tolist() == [number + 1] * comm.size
        assert not pad_of(comm, memory)[1:].any()


def test_a_pad_is_zero_when_it_is_used_again(comm, world):
    memory = comm.rendezvous(comm.empty(1, np.int32))
    used = memory.signal_pad_ptrs
    comm._group.backend.write(used[comm.rank], b"\1" * memory.signal_pad_size)
    assert pad_of(comm, memory).all()
    for _ in range(2 * pads.PADS_PER_ARENA):
        del memory  # and its array
        meet(comm, world)
        memory = comm.rendezvous(comm.empty(1, np.int32))
        assert not pad_of(comm, memory).any()
        if memory.signal_pad_ptrs == used:
            break
    assert memory.signal_pad_ptrs == used, "it was not used again"
    world.Barrier()  # all have looked: what comes next writes into peers' pads
    memory.barrier()
    comm.synchronize()


def test_rendezvous_of_one_block_share_its_mappings(comm):
    x = comm.empty(8, np.float64)
    first, second = comm.rendezvous(x), comm.rendezvous(x)
    assert first.buffer_ptrs == second.buffer_ptrs
    assert first.signal_pad_ptrs == second.signal_pad_ptrs


def test_communicators_do_not_share_pads(comm, world):
    with ns.Communicator(world, timeout=60) as other:
        pointer = comm.allocator.alloc(64)
        here = comm.allocator.rendezvous(pointer, comm)
        there = comm.allocator.rendezvous(pointer, other)
        own = comm.rank
        assert here.buffer_ptrs[own] == there.buffer_ptrs[own] == pointer
        assert here.signal_pad_ptrs[own] != there.signal_pad_ptrs[own]
        here.barrier()
        there.barrier()
        comm.allocator.free(pointer)


# The allocator


def test_blocks_are_found_from_any_pointer_inside(comm):
    allocator = comm.allocator
    assert isinstance(allocator, ns.SymmetricMemoryAllocator)
    pointer, other = allocator.alloc(1000), allocator.alloc(8)
    for inside in (0, 1, 500, 999):
        assert allocator.get_alloc_size(pointer + inside) == 1000
    assert allocator.get_alloc_size(other + 7) == 8
    for outside in (pointer - 1, pointer + 1000, other + 8):
        with pytest.raises(ns.ArgumentError, match=f"{outside:#x} is in no block"):
            allocator.get_alloc_size(outside)
        assert not allocator.is_rendezvous_completed(outside)
    assert read(comm, pointer, 1000) == bytes(1000)
    allocator.free(pointer)
    with pytest.raises(ns.ArgumentError, match="is in no block"):
        allocator.get_alloc_size(pointer + 1)
    assert allocator.get_alloc_size(other) == 8
    allocator.free(other)


def test_what_is_no_block_cannot_be_freed(comm):
    allocator = comm.allocator
    pointer = allocator.alloc(64)
    for wrong in (pointer + 1, pointer - 8, 0):
        with pytest.raises(ns.ArgumentError, match=f"begins at {wrong:#x}"):
            allocator.free(wrong)
    allocator.free(pointer)
    with pytest.raises(ns.ArgumentError, match="no block of this allocator"):
        allocator.free(pointer)


@pytest.mark.parametrize("nbytes", [-1, 1.5, "8", None])
def test_sizes_that_are_none_are_refused(comm, nbytes):
    with pytest.raises(ns.ArgumentError, match="expected a number of bytes"):
        comm.allocator.alloc(nbytes)


def test_an_allocation_of_nothing_has_an_address(comm):
    pointer = comm.allocator.alloc(0)
    assert pointer
    assert comm.allocator.get_alloc_size(pointer) == 0
    comm.allocator.free(pointer)


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
    meet(comm, world)
    allocator.free(pointer)
    assert not allocator.is_rendezvous_completed(pointer)


def test_arrays_of_the_communicator_are_blocks_of_the_allocator(comm):
    x = comm.empty(10, np.float64)
    memory = comm.rendezvous(x)
    pointer = memory.buffer_ptrs[comm.rank]
    assert comm.allocator.get_alloc_size(pointer + 79) == 80
    assert comm.allocator.is_rendezvous_completed(pointer)


# How long it lives


def entries(comm):
    """Return the numbers of the blocks that are mapped on all ranks."""
    gc.collect()
    return set(comm.heap._entries)


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


def test_arrays_go_once_all_ranks_have_dropped_them(comm, world):
    before = entries(comm)
    x = comm.empty(100, np.float32)
    (number,) = entries(comm) - before
    put(x, pattern(comm.rank, 100))
    last = comm.size - 1
    if comm.rank != last:
        del x
    first = comm.empty(1, np.int8)
    assert number in entries(comm)  # the last rank still has its array
    if comm.rank == last:
        assert np.array_equal(get(x), pattern(last, 100))
        del x
    world.barrier()
    assert number in entries(comm)  # nothing goes but at an allocation
    second = comm.empty(1, np.int8)
    assert number not in entries(comm)
    assert len(entries(comm) - before) == 2
    del first, second


def test_memory_keeps_what_it_was_made_of(comm):
    memory = comm.rendezvous(comm.empty(40, np.float32))
    before = len(entries(comm))
    put(memory.get_buffer(comm.rank, 40, "f4"), pattern(comm.rank))
    more = [comm.empty(40, np.float32) for _ in range(3)]
    assert len(entries(comm)) == before + 3
    memory.barrier()
    for rank in range(comm.size):
        assert np.array_equal(get(memory.get_buffer(rank, 40, "f4")), pattern(rank))
    memory.barrier()
    del more


def test_slices_keep_the_memory(comm):
    x = comm.empty(40, np.float32)
    put(x, pattern(comm.rank))
    tail = x[30:]
    del x
    before = len(entries(comm))
    more = [comm.zeros(40, np.float32) for _ in range(3)]
    assert len(entries(comm)) == before + 3
    assert np.array_equal(get(tail), pattern(comm.rank)[30:])
    del more


def test_much_more_can_be_allocated_in_turn_than_at_once(comm):
    before = len(entries(comm))
    for step in range(30):
        x = comm.empty(1000, np.float32)
        put(x, np.full(1000, step, "f4"))
        del x
    assert len(entries(comm)) <= before + 1


def test_a_block_of_the_allocator_is_unmapped_once_all_have_freed_it(comm, world):
    pointer = comm.allocator.alloc(64)
    memory = comm.allocator.rendezvous(pointer, comm)
    before = len(entries(comm))
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
    plan = comm.all_reduce_init(x)
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


@pytest.mark.skipif(SIMULATED, reason="the simulator has no memory of cudaMalloc")
def test_ordinary_device_memory_is_registered(comm, world):
    from numba import cuda

    x = cuda.device_array(40, np.float32)
    put(x, pattern(comm.rank))
    memory = comm.rendezvous(x)
    memory.barrier()
    for rank in range(comm.size):
        assert np.array_equal(get(memory.get_buffer(rank, 40, "f4")), pattern(rank))
    meet(comm, world)


def test_a_freed_block_has_no_rendezvous(comm, world):
    address = comm.allocator.alloc(64)
    comm.allocator.rendezvous(address, comm)
    comm.allocator.free(address)
    with pytest.raises(ns.SymmError, match="rendezvous failed on"):
        comm.allocator.rendezvous(address, comm)
    meet(comm, world)
