"""Copies by a thread, a warp or a block, in a user's own kernels."""

import functools
import itertools

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island

pytestmark = of_one_island

THREADS = 4 if SIMULATED else 64  # in the simulator, these are one warp
DTYPES = np.uint8, np.float16, np.int32, np.complex64, np.complex128


@functools.cache
def copying(dtype, shift, length):
    """Return a kernel that puts parts of rows at the right neighbour, and gets them.

    The rows begin ``shift`` bytes after the buffer.

    A row of ``cases`` has the first element of the target, of the source, the count,
    and whether a thread, a warp or a block copies.
    """

    @cuda.jit
    def kernel(ctx, cases, source, out):
        thread, right = cuda.threadIdx.x, (ctx.rank + 1) % ctx.world_size
        first = symm.peer_address(ctx, right) + shift
        there = symm.array_at(first, (cases.shape[0], length), dtype)
        for c in range(cases.shape[0]):
            to, of, scope = cases[c, 0], cases[c, 1], cases[c, 3]
            given = source[c, of : of + cases[c, 2]]
            target = there[c, to : to + cases[c, 2]]
            if scope == 2:
                symm.put_block(ctx, target, given)
            elif scope == 1 and thread < 32:
                symm.put_warp(ctx, target, given)
            elif thread == 0:
                symm.put(ctx, target, given)
        symm.barrier(ctx, 0)
        for c in range(cases.shape[0]):
            to, of, scope = cases[c, 0], cases[c, 1], cases[c, 3]
            found = there[c, to : to + cases[c, 2]]
            target = out[c, of : of + cases[c, 2]]
            if scope == 2:
                symm.get_block(ctx, target, found)
            elif scope == 1 and thread < 32:
                symm.get_warp(ctx, target, found)
            elif thread == 0:
                symm.get(ctx, target, found)

    return kernel


def cases_of(size):
    """Return cases of every alignment, short and long, each by another scope."""
    units = 16 // min(size, 8)  # of alignment
    step = 1 if size == 16 else 3
    places = sorted({*range(0, units, step), units // 2, units - 1})
    counts = [0, 1, 40 // size + 1, (16 * 4 * THREADS + 75) // size]
    every = itertools.product(places, places, counts)
    return np.array([(*each, k % 3) for k, each in enumerate(every)])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_parts_of_every_alignment_are_copied(comm, world, dtype):
    size = np.dtype(dtype).itemsize
    cases = cases_of(size)
    most = int(cases[:, :3].max(0)[[0, 2]].sum())
    length = (most * size + 31) // 16 * 16 // size
    random = np.random.default_rng(comm.rank)
    bits = random.integers(0, 256, (len(cases), length * size), np.uint8)
    source, out = (
        cuda.to_device(bits.view(dtype)),
        cuda.to_device((0 * bits).view(dtype)),
    )
    shift = 8 if size == 16 else 0  # elements of 16 bytes may be off their vectors
    x = comm.zeros(bits.size + 16, np.uint8)
    args = comm.rendezvous(x).ctx, cuda.to_device(cases), source, out
    copying(dtype, shift, length)[1, THREADS](*args)
    comm.synchronize()
    given = world.sendrecv(bits, (comm.rank + 1) % comm.size, source=comm.rank - 1)
    everywhere, back = np.zeros(bits.size + 16, np.uint8), np.zeros_like(bits)
    here = everywhere[shift : shift + bits.size].reshape(bits.shape)
    for c, (to, of, count, _) in enumerate(cases * [size, size, size, 1]):
        here[c, to : to + count] = given[c, of : of + count]
        back[c, of : of + count] = bits[c, of : of + count]
    np.testing.assert_array_equal(get(x), everywhere)
    np.testing.assert_array_equal(get(out).view(np.uint8), back)
    world.barrier()


ROWS, COLUMNS = 5, 47


@cuda.jit
def copy_blocks(ctx, source, block):
    """Put parts of a matrix into matrices at the right neighbour, one after another."""
    right = (ctx.rank + 1) % ctx.world_size
    there = symm.peer_array(ctx, right, (7, ROWS, COLUMNS), np.int32)
    symm.put_block(ctx, there[0], source)  # whole
    symm.put_block(ctx, there[1, 1:4, 2:40], source[:3, 1:39])  # long rows
    symm.put_block(ctx, there[2, :, 2:5], source[:, :3])  # short ones
    symm.put_block(ctx, there[3, :, 7], source[2, :5])  # a row into a column
    symm.put_block(ctx, there[4, ::2, ::3], source[1:4, 5:21])
    symm.put_block(ctx, there[5, 4:, 1:], source[:1, :-1])
    symm.put_block(ctx, there[6, 2:, 4:44], block)
    symm.barrier(ctx, 0)


def test_blocks_of_matrices_are_copied(comm, world):
    source = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS) + 1
    block = -source.ravel()[:120].reshape(3, 40)
    x = comm.zeros((7, ROWS, COLUMNS), np.int32)
    args = comm.rendezvous(x).ctx, cuda.to_device(source), cuda.to_device(block)
    copy_blocks[1, THREADS](*args)
    comm.synchronize()
    wanted = np.zeros((7, ROWS, COLUMNS), np.int32)
    wanted[0] = source
    wanted[1, 1:4, 2:40] = source[:3, 1:39]
    wanted[2, :, 2:5] = source[:, :3]
    wanted[3, :, 7] = source[2, :5]
    wanted[4, ::2, ::3] = source[1:4, 5:21]
    wanted[5, 4:, 1:] = source[:1, :-1]
    wanted[6, 2:, 4:44] = block
    np.testing.assert_array_equal(get(x), wanted)
    world.barrier()


@cuda.jit
def misuse(ctx, what):
    words = symm.peer_array(ctx, ctx.world_size if what == 0 else 0, 8, np.int32)
    if what == 1:
        symm.put(ctx, words[4:], words[:3])
    elif what == 2:
        symm.get_block(ctx, symm.peer_array(ctx, 0, 8, np.float32), words)
    elif what == 3:
        symm.put_warp(ctx, symm.peer_array(ctx, 0, 9, np.int32)[1:], words)
    elif what == 4:
        symm.put(ctx, symm.peer_array(ctx, 0, (2, 2, 2), np.int32), words)
    else:
        symm.put(ctx, words, 3)


REFUSED = [
    r"rank \d's buffer: expected ranks 0 to",
    r"a copy: expected arrays of the same shape, got \(3,\) into \(4,\)",
    "a copy: expected .* the same dtype, got .* of float32 and .* of int32",
    "peer_array: expected at most 32 bytes, the buffer's size, got 36",
    r"a copy: expected two arrays of one or two dimensions .* got \(2, 2, 2\) of",
    "a copy: expected two arrays .* and int",
]


@pytest.mark.skipif(not SIMULATED, reason="a GPU checks this in debug mode only")
@pytest.mark.parametrize("what", range(len(REFUSED)))
def test_misuse_is_refused(comm, what):
    ctx = comm.rendezvous(comm.zeros(8, np.int32)).ctx
    with pytest.raises(ns.ArgumentError, match=REFUSED[what]):
        misuse[1, 1](ctx, what)
    comm.barrier()
