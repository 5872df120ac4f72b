"""Symmetric memory: pointers, buffers, signals, and their pads."""

import time

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.device import signals
from numba_symm.memory import pads
from tests.ranks.helpers import (
    get,
    needs_peers,
    of_one_island,
    ordinary,
    put,
    refused,
    wait_for_all,
)
from tests.ranks.memory.peeks import pad_of, pattern, read

pytestmark = of_one_island


@pytest.fixture
def shared(comm, world):
    """Memory that holds every rank's pattern."""
    x = comm.empty(40, np.float32)
    put(x, pattern(comm.rank))
    comm.barrier()
    wait_for_all(comm, world)
    return comm.rendezvous(x)


PADS = pads.CHANNELS_PER_ARENA // signals.CHANNELS


def test_members_describe_the_memory(comm, shared):
    assert (shared.rank, shared.world_size) == (comm.rank, comm.size)
    assert shared.buffer_size == 160
    here = f"rank {comm.rank} of {comm.size}"
    assert repr(shared) == f"<SymmetricMemory of 160 bytes, {here}>"
    assert shared.signal_pad_size == 128 * ((12 * comm.size + 23) // 8 * 8)
    assert len(set(shared.buffer_ptrs)) == len(shared.buffer_ptrs) == comm.size
    assert len(set(shared.signal_pad_ptrs)) == comm.size
    assert shared.ctx.buffers == tuple(shared.buffer_ptrs)
    assert shared.ctx.pads == tuple(shared.signal_pad_ptrs)
    assert (shared.ctx.rank, shared.ctx.size) == (comm.rank, comm.size)
    assert shared.ctx.guard == comm._calls.members.guard


def test_pointer_arrays_on_the_device_hold_the_pointers(comm, shared):
    for address, pointers in (
        (shared.buffer_ptrs_dev, shared.buffer_ptrs),
        (shared.signal_pad_ptrs_dev, shared.signal_pad_ptrs),
    ):
        data = read(comm, address, 8 * comm.size)
        assert np.frombuffer(data, np.uint64).tolist() == pointers
    assert shared.buffer_ptrs_dev == shared.buffer_ptrs_dev


@needs_peers
def test_what_reaches_another_island_names_both(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    with ns.Communicator(world) as comm:
        x, others = comm.zeros(4), [r for r in range(comm.size) if r != comm.rank]
        mem = comm.rendezvous(x)
        there = ", ".join(f"rank {rank} on .+" for rank in others)
        text = f"island of rank {comm.rank} on .+, which cannot access .+ of {there}$"
        for call in (
            lambda: mem.get_buffer(1, 4, np.float32),
            lambda: mem.put(x, 1),
            lambda: mem.put_signal(1),
            lambda: mem.wait_signal(1),
        ):
            with pytest.raises(ns.ArgumentError, match=text):
                call()
        parts = "; ".join(f"rank {rank}" for rank in range(comm.size))
        with pytest.raises(ns.ArgumentError, match=f"got the islands {parts}; use s"):
            comm.isend(x, dst=others[0])


def test_channels_that_do_not_exist_are_refused(comm, world, shared):
    last, other = signals.CHANNELS - 1, (comm.rank + 1) % comm.size
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
                f"expected a channel from 0 to {last}, got {channel!r}",
            )


def test_a_rank_signals_itself(comm, world, shared):
    """A copy into its own buffer, announced by a signal, works as one to a peer."""
    for step in (1.0, 2.0):
        x = ordinary(4, np.float32)
        put(x, np.full(4, step, np.float32))
        shared.put(x, comm.rank, 8)
        shared.put_signal(comm.rank, 7)
        shared.wait_signal(comm.rank, 7)
        found = shared.get(comm.rank, 4, np.float32, 8)
        wait_for_all(comm, world)
        assert get(found).tolist() == [step] * 4
    for call in (shared.put_signal, shared.wait_signal):
        text = f"expected a rank from 0 to {comm.size - 1}, got {comm.size}"
        refused(world, ns.ArgumentError, lambda f=call: f(comm.size), text)


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
        memory.barrier(signals.CHANNELS - 1)
    wait_for_all(comm, world)
    assert not pad_of(comm, memory).any()


@needs_peers
def test_a_token_is_passed_around_by_signals(comm, world):
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
    wait_for_all(comm, world)
    assert not pad_of(comm, memory).any()


@needs_peers
def test_channels_are_independent(comm, world):
    memory = comm.rendezvous(comm.empty(1, np.int64))
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for channel in (1, 0, 127):
        memory.put_signal(right, channel)
    wait_for_all(comm, world)
    pad = pad_of(comm, memory)
    assert [*zip(*pad.nonzero(), strict=True)] == [(0, left), (1, left), (127, left)]
    assert set(pad[pad != 0]) == {1}
    for channel in (127, 1, 0):  # in another order than they were put
        memory.wait_signal(left, channel)
        wait_for_all(comm, world)
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
    wait_for_all(comm, world)
    assert not pad_of(comm, memory).any()


@cuda.jit
def count_in_channels(ctx, found):
    """Each block adds to a word of its own, and meets the peers' block."""
    block = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        for rank in range(ctx.size):
            symm.signal_add(ctx, rank, block, block + 1)
    symm.barrier(ctx, block)
    if cuda.threadIdx.x == 0:
        found[block] = symm.signal_read(ctx, ctx.size - 1, block)
    symm.barrier(ctx, block)  # all have read before a rank's next launch adds


@pytest.mark.parametrize("channels", [1, 200])
def test_a_pad_has_as_many_channels_as_its_first_rendezvous_asks_for(comm, channels):
    array = comm.zeros(1, np.int64)
    memory = comm.rendezvous(array, channels=channels)
    assert memory.channels == comm.rendezvous(array).channels == channels
    stride = (12 * comm.size + 23) // 8 * 8
    assert memory.signal_pad_size == channels * stride
    found = cuda.to_device(np.zeros(channels, np.int64))
    for launches in (1, 2):
        count_in_channels[channels, 2](memory.ctx, found)
        comm.synchronize()
        wanted = [launches * (block + 1) for block in range(channels)]
        assert get(found).tolist() == wanted
    memory.barrier(channels - 1)
    with pytest.raises(ns.ArgumentError, match=rf"from 0 to {channels - 1}, got"):
        memory.barrier(channels)
    for wrong in (channels + 1, 0, True):
        text = f"rendezvous: expected channels to be an integer from 1 to {channels}, "
        with pytest.raises(ns.ArgumentError, match=text):
            comm.rendezvous(array, channels=wrong)
    if comm.size > 1:
        with pytest.raises(ns.ArgumentError, match="every rank must pass the same"):
            comm.rendezvous(comm.zeros(1), channels=channels + comm.rank)


def test_a_pad_is_zero_when_it_is_used_again(comm, world):
    memory = comm.rendezvous(comm.empty(1, np.int32))
    used = memory.signal_pad_ptrs
    comm._calls.members.backend.write(used[comm.rank], b"\1" * memory.signal_pad_size)
    assert pad_of(comm, memory).all()
    for _ in range(2 * PADS):
        del memory  # and its array
        wait_for_all(comm, world)
        memory = comm.rendezvous(comm.empty(1, np.int32))
        assert not pad_of(comm, memory).any()
        if memory.signal_pad_ptrs == used:
            break
    assert memory.signal_pad_ptrs == used, "it was not used again"
    world.Barrier()  # the next step writes into peers' pads
    memory.barrier()
    comm.synchronize()


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
