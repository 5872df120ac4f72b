"""Signals that count, and waits for any word, in a user's own kernels."""

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island

pytestmark = of_one_island

THREADS, DEPTH, CHUNK = 4, 3, 5
DATA, READ = 1, 2  # channels


@cuda.jit
def pipeline(ctx, base, chunks, out):
    """Send chunks to the right neighbour, several steps ahead of what it has read."""
    right = (ctx.rank + 1) % ctx.size
    left = (ctx.rank - 1 + ctx.size) % ctx.size
    there = symm.peer_array(ctx, right, (DEPTH, CHUNK), np.int64)
    here = symm.peer_array(ctx, ctx.rank, (DEPTH, CHUNK), np.int64)
    mine = cuda.shared.array(CHUNK, np.int64)
    for step in range(chunks + DEPTH - 1):
        failed = False
        if step < chunks:
            # The right neighbour has read what this step overwrites.
            if cuda.threadIdx.x == 0:
                free = base + step - DEPTH + 1
                failed = not symm.wait_until(ctx, right, READ, symm.GE, free)
            for i in range(cuda.threadIdx.x, CHUNK, cuda.blockDim.x):
                mine[i] = 1000 * ctx.rank + 10 * step + i
            if cuda.syncthreads_or(np.int32(failed)):
                break
            row = there[(base + step) % DEPTH]
            symm.put_with_signal(ctx, right, DATA, row, mine, 1)
        if step >= DEPTH - 1:
            at = step - DEPTH + 1
            if cuda.threadIdx.x == 0:
                failed = not symm.wait_until(ctx, left, DATA, symm.GE, base + at + 1)
            if cuda.syncthreads_or(np.int32(failed)):
                break
            for i in range(cuda.threadIdx.x, CHUNK, cuda.blockDim.x):
                out[at, i] = here[(base + at) % DEPTH, i]
            # All threads have read the chunk before its credit.
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                symm.signal_set(ctx, left, READ, base + at + 1)


@cuda.jit
def wait_for_words(ctx, found):
    """Wait for words of every type, which the left neighbour stores or updates."""
    if cuda.threadIdx.x == 0:
        right = (ctx.rank + 1) % ctx.size
        there = symm.peer_address(ctx, right)
        i32 = symm.peer_array(ctx, ctx.rank, (20, 2), np.int32)
        u32 = symm.peer_array(ctx, ctx.rank, 40, np.uint32)
        i64 = symm.peer_array(ctx, ctx.rank, 20, np.int64)
        u64 = symm.peer_array(ctx, ctx.rank, 20, np.uint64)
        symm.st_release_sys_u32(there, 0x80000000)
        found[0] = symm.wait_until_at(ctx, i32, (0, 0), symm.EQ, -(1 << 31))
        symm.st_release_sys_u32(there + 4, 0xF0000000)
        found[1] = symm.wait_until_at(ctx, u32, 1, symm.GT, 0x7FFFFFFF)
        symm.st_release_sys_u64(there + 8, -(1 << 40))
        found[2] = symm.wait_until_at(ctx, i64, 1, symm.LE, -(1 << 40))
        peers = symm.peer_array(ctx, right, 20, np.uint64)
        symm.atomic_add(peers, 2, 1 << 40, order="release")
        found[3] = symm.wait_until_at(ctx, u64, 2, symm.NE, 0)


def zeros(shape):
    return cuda.to_device(np.zeros(shape, np.int64))


def test_a_pipeline_is_several_steps_deep(comm, world):
    memory, chunks = comm.rendezvous(comm.zeros((DEPTH, CHUNK), np.int64)), 8
    left = (comm.rank - 1) % comm.size
    steps, places = np.ogrid[:chunks, :CHUNK]
    for base in (0, chunks):  # the words count on
        out = zeros((chunks, CHUNK))
        pipeline[1, THREADS](memory.ctx, base, chunks, out)
        comm.synchronize()
        wanted = 1000 * left + 10 * steps + places
        assert get(out).tolist() == wanted.tolist()
    world.barrier()


def test_waits_for_words_of_every_type(comm, world):
    memory, found = comm.rendezvous(comm.zeros(20, np.int64)), zeros(4)
    world.barrier()
    wait_for_words[1, 2](memory.ctx, found)
    comm.synchronize()
    assert get(found).tolist() == [1] * 4
    world.barrier()


@cuda.jit
def wait_in_vain(ctx, what, found):
    if cuda.threadIdx.x == 0:
        if what == 0:
            found[0] = symm.wait_until(ctx, 0, 3, symm.GT, 0)
        else:
            word = symm.peer_array(ctx, ctx.rank, 1, np.int64)
            found[0] = symm.wait_until_at(ctx, word, 0, symm.NE, 0)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (0, r"rank \d waited for rank 0 in wait_until, channel 3"),
        (1, r"rank \d waited in wait_until_at \(timeout: .* no.* stored a value that"),
    ],
)
def test_a_wait_in_vain_has_a_deadline(world, what, text):
    comm = ns.Communicator(world, timeout=0.2)
    memory = comm.rendezvous(comm.zeros(1, np.int64))
    found = cuda.to_device(np.full(1, 7))
    wait_in_vain[1, 2](memory.ctx, what, found)
    with pytest.raises(ns.CollectiveTimeout, match=text):
        comm.synchronize()
    assert get(found).tolist() == [0]
    world.barrier()
    comm.close()


@cuda.jit
def wait_for_many(ctx, team, step, found):
    """Wait in all forms for words and signals that thread 0 of every rank sends."""
    thread, size = cuda.threadIdx.x, ctx.size
    right, ok = (ctx.rank + 1) % size, True
    if thread == 0:
        for rank in range(size):
            symm.signal_set(ctx, rank, 10, step + ctx.rank)
            symm.signal_set(ctx, rank, 11, step)
            symm.put_signal(ctx, rank, 12)
            symm.put_signal(ctx, rank, 13)
    ok = symm.wait_until_block(ctx, None, 10, symm.GE, step) and ok
    ok = symm.wait_until_block(ctx, right, 10, symm.EQ, step + right) and ok
    sources, channels = (right, ctx.rank, -1), (10, 11, -1)
    words = step + right, step, -1
    ok = symm.wait_until_block(ctx, sources, channels, symm.EQ, words) and ok
    ok = symm.wait_until_block(ctx, team, 11, symm.GE, step) and ok
    ok = symm.wait_until_block(ctx, None, 11, symm.GE, step, mask=1 << right) and ok
    ok = symm.wait_signal_block(ctx, None, 12) and ok
    ok = symm.wait_signal_block(ctx, ctx.rank, 12) and ok
    ok = symm.wait_signal_block(ctx, team, 13) and ok
    ok = symm.wait_signal_block(ctx, (-1, ctx.rank), 13, 1 << ctx.rank) and ok
    found[thread] = ok
    symm.barrier(ctx, 14)


def test_a_block_waits_for_one_rank_or_several(comm, world):
    ctx = comm.rendezvous(comm.zeros(1, np.int64)).ctx
    team = symm.Team.of(ctx, list(reversed(range(comm.size))))
    for step in (1, 20):
        found = zeros(THREADS)
        wait_for_many[1, THREADS](ctx, team, step, found)
        comm.synchronize()
        assert get(found).all()
    world.barrier()


@cuda.jit
def wait_for_many_in_vain(ctx, what, found):
    ok = True
    if what == 0:
        ok = symm.wait_until_block(ctx, (ctx.rank, ctx.rank), (3, 4), symm.GE, 0)
        ok = symm.wait_until_block(ctx, (ctx.rank, ctx.rank), (3, 4), symm.GE, (0, 1))
    else:
        ok = symm.wait_signal_block(ctx, (-1, ctx.rank), 5)
    found[cuda.threadIdx.x] = 1 + ok


@pytest.mark.parametrize("what", [0, 1])
def test_all_threads_of_a_block_see_that_one_gave_up(world, what):
    with ns.Communicator(world, timeout=0.3) as comm:
        ctx, found = comm.rendezvous(comm.zeros(1)).ctx, zeros(THREADS)
        wait_for_many_in_vain[1, THREADS](ctx, what, found)
        with pytest.raises(ns.CollectiveTimeout):
            comm.synchronize()
        assert get(found).tolist() == [1] * THREADS
        world.barrier()


@cuda.jit
def misuse(ctx, what):
    if what == 0:
        symm.signal_add(ctx, ctx.size, 0, 1)
    elif what == 1:
        symm.wait_until(ctx, 0, 128, symm.GE, 1)
    elif what == 2:
        symm.test(ctx, 0, 0, 6, 1)
    elif what == 3:
        floats = symm.peer_array(ctx, 0, 1, np.float32)
        symm.wait_until_at(ctx, floats, 0, symm.GE, 1)
    elif what == 4:
        words = symm.peer_array(ctx, 0, 1, np.int32)
        symm.wait_until_at(ctx, words, 1, symm.GE, 1)
    elif what == 5:
        symm.test(ctx, 0, 0, 2.5, 1)
    elif what == 6:
        symm.wait_until(ctx, 0, 0, ">=", 1)
    else:
        words = symm.peer_array(ctx, 0, 2, np.int32)
        symm.put_with_signal(ctx, 0, 3, words[1:], words, 1)


REFUSED = [
    (
        ns.ArgumentError,
        r"channel 0 .*, got a signal to rank \d from rank \d of ranks 0 to \d, of ",
    ),
    (
        ns.ArgumentError,
        r"channel 128 .* got a signal to rank \d from rank 0 of .* channels 0 to 127",
    ),
    (ns.ArgumentError, "comparison 6: expected symm.EQ, NE, GT, GE, LT or LE"),
    (ns.ArgumentError, "wait_until_at: expected an array of int64, .* got float32"),
    (ns.ArgumentError, r"wait_until_at: expected an index within the shape \(1,\), "),
    (ns.ArgumentError, r"comparison 2\.5: expected symm.EQ, NE, GT, GE, LT or LE"),
    (ns.ArgumentError, "comparison >=: expected symm.EQ, NE, GT, GE, LT or LE"),
    (
        ns.ArgumentError,
        r"a copy of 2 elements: .* the same shape, got \(2,\) into \(1,\);",
    ),
]


@pytest.mark.skipif(not SIMULATED, reason="a GPU does not check this")
@pytest.mark.parametrize("what", range(len(REFUSED)))
def test_misuse_is_refused(comm, what):
    ctx = comm.rendezvous(comm.zeros(1, np.int64)).ctx
    kind, text = REFUSED[what]
    with pytest.raises(kind, match=text):
        misuse[1, 1](ctx, what)
    comm.barrier()
