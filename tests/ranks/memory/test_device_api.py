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
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island

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
