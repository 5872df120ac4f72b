"""A user's own kernels over symmetric memory, by numba_symm.device."""

import gc
import runpy
import time
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.device import signals
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island, put

pytestmark = of_one_island

ONE_SHOT = Path(__file__).parents[3] / "docs/programs/one_shot.py"

THREADS = 8  # the simulator's threads are slow
BLOCKS = 3
COUNT = 61  # the last block has less to do


@cuda.jit
def shift(ctx, source, out, count):
    """Store each block's elements at the right neighbour; load the left one's."""
    right = (ctx.rank + 1) % ctx.size
    there = symm.peer_array(ctx, right, count, np.float32)
    here = symm.peer_array(ctx, ctx.rank, count, np.float32)
    stride = cuda.gridDim.x * cuda.blockDim.x
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, count, stride):
        there[i] = source[i]
    # The left neighbour's block of this index has stored what this block loads.
    symm.barrier(ctx, cuda.blockIdx.x)
    for i in range(first, count, stride):
        out[i] = here[i]
    # This block has loaded what the left one's overwrites in the next launch.
    symm.barrier(ctx, cuda.blockIdx.x)


@cuda.jit
def pass_token(ctx, laps, channel, seen):
    """Pass a counter around the ranks: each stores it at the next, and signals."""
    if cuda.threadIdx.x == 0:
        left = (ctx.rank - 1 + ctx.size) % ctx.size
        right = (ctx.rank + 1) % ctx.size
        mine = symm.peer_array(ctx, ctx.rank, 1, np.int64)
        theirs = symm.peer_array(ctx, right, 1, np.int64)
        for lap in range(laps):
            if ctx.rank > 0 or lap > 0:
                symm.wait_signal(ctx, left, channel)
            seen[lap] = mine[0]
            theirs[0] = seen[lap] + 1
            symm.put_signal(ctx, right, channel)
        if ctx.rank == 0:
            symm.wait_signal(ctx, left, channel)
            seen[laps] = mine[0]


@cuda.jit
def all_to_all(ctx, rounds, sums):
    """In each step, store a number for the block of this index on every rank."""
    block, thread = cuda.blockIdx.x, cuda.threadIdx.x
    width = ctx.size
    for step in range(rounds):
        if thread < width:
            peer = symm.peer_array(ctx, thread, (cuda.gridDim.x, width), np.int32)
            peer[block, ctx.rank] = 1000 * step + 10 * block + ctx.rank
        # All ranks have stored the numbers of this step before any rank adds them.
        symm.barrier(ctx, block)
        if thread == 0:
            mine = symm.peer_array(ctx, ctx.rank, (cuda.gridDim.x, width), np.int32)
            total = 0
            for r in range(width):
                total += mine[block, r]
            sums[step, block] = total
        # All ranks have loaded them before the next step overwrites them.
        symm.barrier(ctx, block)


@cuda.jit
def store_by_width(ctx):
    """Store at the right neighbour by every store instruction."""
    if cuda.threadIdx.x == 0:
        there = symm.peer_address(ctx, (ctx.rank + 1) % ctx.size)
        tag = ctx.rank + 1
        symm.st_u16(there, 0xFE00 + tag)
        symm.st_u16(there + 2, 7)
        symm.st_u32(there + 4, 0xFEDCBA00 + tag)
        symm.st_u64(there + 8, (tag << 56) + 0x1234)
        symm.st_v2_u64(there + 16, (tag + 1, tag + 2))
        symm.st_relaxed_sys_v2_u64(there + 32, (tag, tag + 1))
        symm.st_relaxed_sys_u32(there + 48, tag + 4)
        symm.st_release_sys_u32(there + 52, tag + 5)
        symm.st_relaxed_sys_u64(there + 56, tag + 6)
        symm.fence_acq_rel_sys()
        symm.st_release_sys_u64(there + 64, tag + 7)
    symm.barrier(ctx, 0)


@cuda.jit
def load_by_width(ctx, found):
    """Load the left neighbour's memory by every load instruction."""
    symm.barrier(ctx, 0)
    if cuda.threadIdx.x == 0:
        there = symm.peer_address(ctx, (ctx.rank - 1 + ctx.size) % ctx.size)
        found[0] = symm.ld_u16(there)
        found[1] = symm.ld_u32(there + 4)
        found[2] = symm.ld_u64(there + 8)
        found[3], found[4] = symm.ld_v2_u64(there + 16)
        found[5], found[6] = symm.ld_relaxed_sys_v2_u64(there + 32)
        found[7] = symm.ld_relaxed_sys_u32(there + 48)
        found[8] = symm.ld_acquire_sys_u32(there + 52)
        found[9] = symm.ld_relaxed_sys_u64(there + 56)
        found[10] = symm.ld_acquire_sys_u64(there + 64)


@cuda.jit
def store_outcomes(ctx, outcomes):
    """Store what the waiting functions return without a failure."""
    if cuda.threadIdx.x == 0:
        right = (ctx.rank + 1) % ctx.size
        left = (ctx.rank - 1 + ctx.size) % ctx.size
        outcomes[0] = symm.put_signal(ctx, right, 5)
        outcomes[1] = symm.wait_signal(ctx, left, 5)
    if not symm.barrier(ctx, 6):
        outcomes[2] = False


@cuda.jit
def count_at(ctx, rank, out):
    """Add to a rank's array, then to one of this rank."""
    cuda.atomic.max(out, 0, cuda.atomic.add(out, 0, 5))
    cuda.atomic.add(symm.peer_array(ctx, rank, 4, np.int32)[1:], 2, 1)


@cuda.jit
def exchange_at(out):
    cuda.atomic.compare_and_swap(out[2:], 0, 1)


@pytest.mark.skipif(not SIMULATED, reason="a GPU loses updates, and does not refuse")
def test_atomics_on_a_peers_array_are_refused(comm):
    """On a GPU, Numba's are atomic for its own threads only."""
    memory, out = comm.rendezvous(comm.zeros(4, np.int32)), device(np.zeros(1, "i4"))
    count_at[1, 1](memory.ctx, comm.rank, out)
    own = memory.get_buffer(comm.rank, 4, np.int32)
    assert (own.copy_to_host().tolist(), out[0]) == ([0, 0, 0, 1], 5)
    exchange_at[1, 1](own)
    for peer in set(range(comm.size)) - {comm.rank}:
        with pytest.raises(
            ns.ArgumentError, match=r"atomic\.add: .* symm\.atomic_add "
        ):
            count_at[1, 1](memory.ctx, peer, out)
        with pytest.raises(ns.ArgumentError, match="for the threads of one GPU only"):
            exchange_at[1, 1](memory.get_buffer(peer, 4, np.int32))
    comm.barrier()
    assert own.copy_to_host().tolist() == [0, 0, 1, 1]


def test_a_kernel_takes_the_context_of_a_memory(comm):
    memory = comm.rendezvous(comm.zeros(4, np.int32))
    with pytest.raises(ns.ArgumentError, match=r"SymmetricMemory; pass mem\.ctx"):
        exchange_at[1, 1](memory)


@cuda.jit
def flat_barrier(ctx, wide):
    """Use all threads of a block of three dimensions."""
    thread = cuda.threadIdx.x + cuda.blockDim.x * (
        cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z
    )
    threads = cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z
    right = (ctx.rank + 1) % ctx.size
    symm.peer_array(ctx, right, threads, np.int32)[thread] = 100 * right + thread
    symm.barrier(ctx, 9)
    # Every thread of this block sees the stores of every thread of the left block.
    here = symm.peer_array(ctx, ctx.rank, threads, np.int32)
    wide[thread] = here[threads - 1 - thread]


def device(host):
    return cuda.to_device(np.asarray(host))


def zeroed(comm, memory):
    """Return whether this rank's signal pad is all zero, once nothing runs."""
    comm.synchronize()
    own = memory.signal_pad_ptrs[comm.rank]
    return not any(comm._calls.members.backend.read(own, memory.signal_pad_size))


def flattened(value):
    """Return what a tuple of tuples is made of."""
    if not isinstance(value, tuple):
        return [value]
    return [scalar for member in value for scalar in flattened(member)]


def test_the_context_is_an_ordinary_tuple_of_scalars(comm):
    memory = comm.rendezvous(comm.empty(4, np.float32))
    assert isinstance(memory.ctx, ns.Context)
    assert ns.Context is symm.Context

    flat = flattened(memory.ctx)
    assert {type(scalar) for scalar in flat} == {int}
    assert len(flat) == 2 + 2 * comm.size + len(symm.Guard._fields)


def test_every_block_stores_at_the_neighbour(comm, finished):
    memory = comm.rendezvous(comm.empty(COUNT, np.float32))
    left = (comm.rank - 1) % comm.size
    for step in range(3):
        source = device(np.arange(COUNT, dtype=np.float32) + 100 * comm.rank + step)
        out = device(np.zeros(COUNT, np.float32))
        shift[BLOCKS, THREADS](memory.ctx, source, out, COUNT)
        wanted = np.arange(COUNT, dtype=np.float32) + 100 * left + step
        assert np.array_equal(get(out), wanted)
    finished()
    assert zeroed(comm, memory)


@pytest.mark.parametrize("channel", [0, 63, signals.CHANNELS - 1])
def test_a_token_is_passed_around_by_signals(comm, finished, channel):
    memory, laps = comm.rendezvous(comm.zeros(1, np.int64)), 4
    seen = device(np.full(laps + 1, -1))
    pass_token[1, 2](memory.ctx, laps, channel, seen)
    wanted = [lap * comm.size + comm.rank for lap in range(laps)]
    last = laps * comm.size if comm.rank == 0 else -1
    assert get(seen).tolist() == [*wanted, last]
    finished()
    assert zeroed(comm, memory)


def test_blocks_synchronize_on_channels_of_their_own(comm, finished):
    memory = comm.rendezvous(comm.empty((BLOCKS, comm.size), np.int32))
    rounds = 5
    for _ in range(2):
        sums = device(np.zeros((rounds, BLOCKS), np.int64))
        all_to_all[BLOCKS, THREADS](memory.ctx, rounds, sums)
        n = comm.size
        wanted = [
            [
                n * (1000 * step + 10 * block) + n * (n - 1) // 2
                for block in range(BLOCKS)
            ]
            for step in range(rounds)
        ]
        assert get(sums).tolist() == wanted
    finished()
    assert zeroed(comm, memory)


def test_stores_of_every_width_arrive(comm, finished):
    x = comm.zeros(18, np.uint32)
    memory = comm.rendezvous(x)
    store_by_width[1, THREADS](memory.ctx)
    finished()
    tag = (comm.rank - 1) % comm.size + 1
    data = get(x).tobytes()
    assert np.frombuffer(data, np.uint16, 2).tolist() == [0xFE00 + tag, 7]
    assert np.frombuffer(data, np.uint32, 1, 4)[0] == 0xFEDCBA00 + tag
    words = np.frombuffer(data, np.uint64, 3, 8).tolist()
    assert words == [(tag << 56) + 0x1234, tag + 1, tag + 2]
    assert np.frombuffer(data, np.uint64, 2, 32).tolist() == [tag, tag + 1]
    assert np.frombuffer(data, np.uint32, 2, 48).tolist() == [tag + 4, tag + 5]
    assert np.frombuffer(data, np.uint64, 2, 56).tolist() == [tag + 6, tag + 7]


def test_loads_of_every_width_see_a_peers_memory(comm, finished):
    x = comm.empty(18, np.uint32)
    memory = comm.rendezvous(x)
    host = np.arange(18, dtype=np.uint32) * 3 + 1000 * comm.rank + 0x80000000
    put(x, host)
    found = device(np.zeros(11, np.int64))
    load_by_width[1, THREADS](memory.ctx, found)
    left = (comm.rank - 1) % comm.size
    words = np.arange(18, dtype=np.uint32) * 3 + 1000 * left + 0x80000000
    data = words.tobytes()
    signed = np.frombuffer(data, np.int64).tolist()  # data words are bit patterns
    assert get(found).tolist() == [
        int(words[0]) & 0xFFFF,
        int(words[1]),
        *signed[1:4],
        *signed[4:6],
        *words[12:14].tolist(),
        *signed[7:9],
    ]
    finished()
    assert np.array_equal(get(x), host)


def test_waits_without_a_failure_return_true(comm, finished):
    memory = comm.rendezvous(comm.empty(1, np.int32))
    outcomes = device(np.array([False, False, True]))
    store_outcomes[1, THREADS](memory.ctx, outcomes)
    assert get(outcomes).tolist() == [True, True, True]
    finished()
    assert zeroed(comm, memory)


@pytest.mark.parametrize("block", [(2, 2, 2), (1, 3, 1), (1, 1, 1), (5, 1, 2)], ids=str)
def test_a_barrier_takes_a_block_of_any_shape(comm, finished, block):
    threads = int(np.prod(block))
    memory = comm.rendezvous(comm.zeros(threads, np.int32))
    wide = device(np.zeros(threads, np.int32))
    flat_barrier[1, block](memory.ctx, wide)
    assert get(wide).tolist() == [100 * comm.rank + t for t in reversed(range(threads))]
    finished()
    assert zeroed(comm, memory)


def test_a_context_inside_an_array_begins_there(comm, finished):
    x = comm.zeros(COUNT + 5, np.float32)
    memory = comm.rendezvous(x[5:])
    source = device(np.full(COUNT, comm.rank + 1, np.float32))
    out = device(np.zeros(COUNT, np.float32))
    shift[1, THREADS](memory.ctx, source, out, COUNT)
    finished()
    left = (comm.rank - 1) % comm.size
    assert get(x).tolist() == [0.0] * 5 + [left + 1.0] * COUNT


def test_a_context_keeps_its_memory(comm, finished):
    """Nothing else keeps it; later allocations get other memory."""
    ctx = comm.rendezvous(comm.zeros(COUNT, np.float32)).ctx
    later = [comm.zeros(COUNT, np.float32) for _ in range(2)]
    source = device(np.full(COUNT, comm.rank + 1, np.float32))
    out = device(np.zeros(COUNT, np.float32))
    shift[1, THREADS](ctx, source, out, COUNT)
    finished()
    left = (comm.rank - 1) % comm.size
    assert get(out).tolist() == [left + 1.0] * COUNT
    assert [get(each).any() for each in later] == [False, False]
    kept = len(comm._calls.heap._entries)
    del ctx
    gc.collect()
    comm.zeros(COUNT, np.float32)
    assert len(comm._calls.heap._entries) == kept  # one more, and the context's less


def test_kernels_and_collectives_alternate(comm, finished):
    x = comm.zeros(COUNT, np.float32)
    memory = comm.rendezvous(x)
    out = device(np.zeros(COUNT, np.float32))
    for step in range(3):
        source = device(np.full(COUNT, comm.rank + step, np.float32))
        shift[BLOCKS, THREADS](memory.ctx, source, out, COUNT)
        total = comm.all_reduce(out)
        comm.barrier()
        memory.barrier(1)
        n = comm.size
        assert get(total).tolist() == [n * (n - 1) / 2 + n * step] * COUNT
    finished()
    assert zeroed(comm, memory)


@pytest.fixture(scope="module")
def one_shot():
    """The program of docs/own-collective.md."""
    return runpy.run_path(str(ONE_SHOT))


def test_a_pages_all_reduce(comm, finished, one_shot):
    """Calls have any size, in place or not, and another rank is late in each."""
    launch = one_shot["all_reduce"][one_shot["BLOCKS"], one_shot["THREADS"]]
    memory = comm.rendezvous(comm.empty(one_shot["SLOTS"], np.float32))
    epochs = device(np.zeros(one_shot["BLOCKS"], np.int64))
    whole = one_shot["BLOCKS"] * one_shot["THREADS"]
    for step, count in enumerate([COUNT, 0, 1, whole, whole + 1, 3 * whole, 2, COUNT]):
        x = device(np.arange(count, dtype=np.float32) + comm.rank * step)
        out = x if step % 2 else cuda.device_array_like(x)
        if step % comm.size == comm.rank:
            time.sleep(0.02)
        launch(memory.ctx, epochs, x, out)
        n = comm.size
        wanted = np.arange(count) * n + n * (n - 1) // 2 * step
        assert get(out).tolist() == wanted.tolist()
    finished()
    assert zeroed(comm, memory)


def test_a_pages_all_reduce_on_values_whose_order_matters(comm, finished, one_shot):
    """Every rank adds in rank order, so all have the same bits."""
    launch = one_shot["all_reduce"][one_shot["BLOCKS"], one_shot["THREADS"]]
    memory = comm.rendezvous(comm.empty(one_shot["SLOTS"], np.float32))
    epochs = device(np.zeros(one_shot["BLOCKS"], np.int64))
    values = [np.float32(2**24), np.float32(1), np.float32(1), np.float32(-(2**24))]
    x = device(np.full(COUNT, values[comm.rank % 4]))
    launch(memory.ctx, epochs, x, x)
    total = np.float32(0)
    for rank in range(comm.size):
        total += values[rank % 4]
    assert get(x).tolist() == [total] * COUNT
    finished()
