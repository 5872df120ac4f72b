"""Atomic operations on peers' arrays, in a user's own kernels."""

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island, put

pytestmark = of_one_island

THREADS, ROUNDS = 4, 3
STRIDE = 8  # a line of cache for each element
LOW = -(1 << 40)


@cuda.jit
def update_all(ctx, rounds, olds):
    """Update the first rank's words by every operation and type."""
    thread = cuda.grid(1)
    who = ctx.rank * cuda.gridsize(1) + thread + 1
    i32 = symm.peer_array(ctx, 0, (18, 16), np.int32)
    u32 = symm.peer_array(ctx, 0, (18, 16), np.uint32)
    f32 = symm.peer_array(ctx, 0, (18, 16), np.float32)
    i64 = symm.peer_array(ctx, 0, 144, np.int64)
    u64 = symm.peer_array(ctx, 0, 144, np.uint64)
    f64 = symm.peer_array(ctx, 0, 144, np.float64)
    for i in range(rounds):
        olds[i, thread] = symm.atomic_add(i32, (0, 0), 1)
        symm.atomic_add(u32, (1, 0), 0xFFFFFFFF)
        symm.atomic_add(i64, 2 * 8, 1 << 33, order="acquire")
        symm.atomic_add(u64, 3 * 8, 1 << 62, order="release")
        symm.atomic_add(f32, (4, 0), 0.5)
        symm.atomic_add(f64, 5 * 8, 0.25)
    symm.atomic_min(i32, (6, 0), -who)
    symm.atomic_max(u32, (7, -16), who + 0x80000000)
    symm.atomic_min(i64, 8 * 8, -(1 << 40) - who, order="release")
    symm.atomic_max(u64, 9 * 8, np.uint64(1 << 63) + np.uint64(who), order="acquire")
    bit = 1 << (who % 31)
    symm.atomic_and(i32, (10, 0), ~bit)
    symm.atomic_or(u32, (11, 0), bit, order="release")
    symm.atomic_xor(i64, 12 * 8, bit)
    olds[rounds, thread] = symm.atomic_exch(u64, 13 * 8, who)
    # Which thread finds 0 depends on the schedule, but one does.
    olds[rounds + 1, thread] = symm.atomic_cas(i64, 14 * 8, 0, who)
    symm.atomic_max(f32, (15, 0), -0.5 / who, order="acquire")
    symm.atomic_min(f32, (15, 1), who, order="release")
    symm.atomic_max(f64, 16 * 8, who - 0.25)
    # One thread's zero remains, whoever comes before or after: -0.0 is less than 0.0.
    zero = 0.0 if who == 2 else -0.0
    symm.atomic_max(f32, (15, 2), zero)
    symm.atomic_min(f32, (15, 3), -zero)
    symm.atomic_max(f64, 16 * 8 + 1, zero)
    symm.atomic_min(f64, 16 * 8 + 2, -zero)
    # So does one thread's NaN.
    symm.atomic_min(f64, 17 * 8, np.nan if who == 2 else -who)


@cuda.jit
def load_all(ctx, out):
    """Load the first rank's words of every type."""
    i32 = symm.peer_array(ctx, 0, (18, 16), np.int32)
    u32 = symm.peer_array(ctx, 0, (18, 16), np.uint32)
    f32 = symm.peer_array(ctx, 0, (18, 16), np.float32)
    i64 = symm.peer_array(ctx, 0, 144, np.int64)
    u64 = symm.peer_array(ctx, 0, 144, np.uint64)
    f64 = symm.peer_array(ctx, 0, 144, np.float64)
    out[0] = symm.atomic_load(i32, (6, 0)) == i32[6, 0] < 0
    out[1] = symm.atomic_load(u32, (7, -16), order="acquire") == u32[7, 0] > 1 << 31
    out[2] = symm.atomic_load(i64, 64, order="relaxed") == i64[64] < -(1 << 40)
    out[3] = symm.atomic_load(u64, 72, order="acquire") == u64[72] > np.uint64(1 << 63)
    out[4] = symm.atomic_load(f32, (15, 0)) == f32[15, 0] < 0
    out[5] = symm.atomic_load(f64, 128, order="acquire") == f64[128] > 0


@cuda.jit
def count_under_a_lock(ctx, times, done):
    """Increment a word of the first rank by plain accesses, under a lock there."""
    if cuda.threadIdx.x == 0:
        words = symm.peer_array(ctx, 0, 2, np.int64)
        for _ in range(times):
            tries = 0
            while (
                symm.atomic_cas(words, 0, 0, 1, order="acquire") != 0
                and tries < 1 << 22
            ):
                tries += 1
            words[1] += 1
            symm.atomic_exch(words, 0, 0, order="release")
            done[0] += tries < 1 << 22


@cuda.jit
def last_one_adds(ctx, out):
    """Store a number and count it; the rank that counts last adds those of all."""
    if cuda.threadIdx.x == 0:
        mine = symm.peer_array(ctx, ctx.rank, 2, np.int64)
        mine[1] = ctx.rank + 1
        counts = symm.peer_array(ctx, 0, 2, np.int64)
        if symm.atomic_add(counts, 0, 1, order="release") == ctx.size - 1:
            symm.fence_acq_rel_sys()
            for r in range(ctx.size):
                out[0] += symm.peer_array(ctx, r, 2, np.int64)[1]


def launched(comm, world, kernel, shape, host, *args):
    """Run a kernel on every rank; return the first rank's memory, as words."""
    x = comm.zeros(len(host), np.int64)
    put(x, host)
    memory = comm.rendezvous(x)
    world.barrier()
    kernel[shape](memory.ctx, *args)
    comm.synchronize()
    world.barrier()
    return world.bcast(get(x))


def of_all(world, array):
    """Return the array of every rank."""
    return world.allgather(get(array))


def test_updates_of_every_kind_are_atomic(comm, world):
    blocks, host = 2, np.zeros(18 * STRIDE, np.int64)
    host[10 * STRIDE] = -1
    floats = np.array([-np.inf, np.inf, -0.0, 0.0], np.float32)
    host[15 * STRIDE :][:2] = floats.view(np.int64)
    host.view(np.float64)[16 * STRIDE + 1] = -0.0
    threads = blocks * THREADS
    total = threads * comm.size
    olds = cuda.to_device(np.zeros((ROUNDS + 2, threads), np.int64))
    words = launched(comm, world, update_all, (blocks, THREADS), host, ROUNDS, olds)
    for of, place in ((np.float32, 15 * STRIDE + 1), (np.float64, 16 * STRIDE + 1)):
        zeros = words[place:].view(of)[:2]
        assert np.signbit(zeros).tolist() == [False, True]
    words = words[::STRIDE].copy()
    halves = words.view(np.int32)[::2].copy()
    everyone = np.arange(1, total + 1)
    bits = [1 << int(who) % 31 for who in everyone]
    assert halves[0] == total * ROUNDS
    assert halves[1] == -total * ROUNDS
    assert words[2] == total * ROUNDS << 33
    assert words[3] == np.uint64(total * ROUNDS % 4 << 62).astype(np.int64)
    assert halves.view(np.float32)[4] == total * ROUNDS / 2
    assert words.view(np.float64)[5] == total * ROUNDS / 4
    assert halves[6] == -total
    assert halves.view(np.uint32)[7] == 0x80000000 + total
    assert words[8] == LOW - total
    assert words.view(np.uint64)[9] == (1 << 63) + total
    assert halves[10] == np.bitwise_and.reduce([~bit for bit in bits])
    assert halves[11] == np.bitwise_or.reduce(bits)
    assert words[12] == np.bitwise_xor.reduce(bits)
    found = np.stack(of_all(world, olds), axis=1).reshape(ROUNDS + 2, total)
    # Each thread has got a number of its own, and each value was taken out once.
    assert sorted(found[:ROUNDS].ravel()) == list(range(total * ROUNDS))
    assert sorted([*found[ROUNDS], words[13]]) == [0, *everyone]
    winners = everyone[found[ROUNDS + 1] == 0]
    assert winners.tolist() == [words[14]]
    assert words[15:16].view(np.float32).tolist() == [np.float32(-0.5 / total), 1]
    assert words.view(np.float64)[16] == total - 0.25
    assert np.isnan(words.view(np.float64)[17])


def test_elements_of_every_type_are_loaded(comm, world):
    host, out = np.zeros(18 * STRIDE, np.int64), cuda.to_device(np.zeros(6, np.int64))
    host[[6 * STRIDE, 8 * STRIDE, 9 * STRIDE]] = 1 << 31, LOW - 9, -5
    host[7 * STRIDE] = 0xFFFFFFFF
    host.view(np.float32)[2 * 15 * STRIDE] = -0.5
    host.view(np.float64)[16 * STRIDE] = 0.5
    launched(comm, world, load_all, (1, 1), host, out)
    assert get(out).tolist() == [1] * 6


@cuda.jit
def misuse(ctx, what):
    if what == 0:
        symm.atomic_exch(symm.peer_array(ctx, 0, 4, np.float32), 0, 1)
    elif what == 1:
        symm.atomic_add(symm.peer_array(ctx, 0, 4, np.int32), 4, 1)
    elif what == 2:
        symm.atomic_cas(symm.peer_array(ctx, 0, (2, 2), np.int32), 0, 1, 2)
    elif what == 3:
        symm.atomic_exch(symm.peer_array(ctx, 0, 4, np.int32), 1.5, 1)
    elif what == 4:
        symm.atomic_add(3, 0, 1)
    elif what == 5:
        symm.atomic_load(symm.peer_array(ctx, 0, 4, np.int32), 0, order="release")
    elif what == 6:
        symm.atomic_load(symm.peer_array(ctx, 0, 4, np.int16), 0)
    elif what == 7:
        symm.atomic_load(symm.peer_array(ctx, 0, 4, np.int32), -5)
    else:
        symm.atomic_xor(symm.peer_array(ctx, 0, 4, np.int32), 0, 1, order="acq_rel")


REFUSED = [
    r"atomic_exch: expected an array of int32, .*, got float32",
    r"atomic_add: expected an index within the shape \(4,\), got 4; a GPU does",
    r"atomic_cas: expected 2 integers as the index, got 0",
    r"atomic_exch: expected an index within the shape \(4,\), got 1\.5",
    r"atomic_add: expected an array of .* float64, got int",
    r"atomic_load: expected order to be 'relaxed', 'acquire', got 'release'",
    r"atomic_load: expected an array of .* float64, got int16",
    r"atomic_load: expected an index within the shape \(4,\), got -5",
    r"atomic_xor: expected order to be 'relaxed', 'acquire', 'release', got 'acq_rel'",
]


@pytest.mark.skipif(not SIMULATED, reason="a GPU refuses types when it compiles")
@pytest.mark.parametrize("what", range(len(REFUSED)))
def test_misuse_is_refused(comm, what):
    ctx = comm.rendezvous(comm.zeros(2, np.int64)).ctx
    with pytest.raises(ns.ArgumentError, match=REFUSED[what]):
        misuse[1, 1](ctx, what)
    comm.barrier()
