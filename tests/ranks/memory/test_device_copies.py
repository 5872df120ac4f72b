"""Copies by a thread, a warp or a block, in a user's own kernels."""

import functools
import itertools

import numpy as np
import pytest
from mpi4py import MPI
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
        thread, right = cuda.threadIdx.x, (ctx.rank + 1) % ctx.size
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


BOX = 5, 6, 43
BOXES = 6, 5, 6, 43


@cuda.jit
def copy_boxes(ctx, source, mailbox, found):
    """Put parts of a box into boxes at the right neighbour, and send one as packets."""
    right = (ctx.rank + 1) % ctx.size
    there = symm.peer_array(ctx, right, BOXES, np.int32)
    symm.put_block(ctx, there[0], source)  # whole
    symm.put_block(ctx, there[1, 1:4, 2:5, 3:40], source[:3, 3:, 5:42])  # long rows
    symm.put_block(ctx, there[2, :, :, 7:8], source[:, :, 2:3])  # a face
    symm.put_block(ctx, there[3, 1:3, :, :], source[3:, :, :])  # planes
    symm.put_block(ctx, there[4, ::2, 1::2, ::3], source[:3, 3:, :15])
    symm.barrier(ctx, 0)
    here = symm.peer_array(ctx, ctx.rank, BOXES, np.int32)
    symm.get_block(ctx, found, here[1, 1:4, 2:5, 3:6])
    cuda.syncthreads()
    symm.put_packets_block(ctx, mailbox, found, 1)
    symm.get_packets_block(ctx, ctx.rank, here[5, 1:4, ::2, 1:4], mailbox, 1)


def test_parts_of_boxes_are_copied(comm, world):
    source = np.arange(np.prod(BOX), dtype=np.int32).reshape(BOX) + 1
    x = comm.zeros(BOXES, np.int32)
    mailbox = comm.zeros(symm.mailbox_size(27, np.int32), np.uint64)
    found = cuda.to_device(np.zeros((3, 3, 3), np.int32))
    ctx = comm.rendezvous(x).ctx
    copy_boxes[1, THREADS](ctx, cuda.to_device(source), mailbox, found)
    comm.synchronize()
    wanted = np.zeros(BOXES, np.int32)
    wanted[0] = source
    wanted[1, 1:4, 2:5, 3:40] = source[:3, 3:, 5:42]
    wanted[2, :, :, 7:8] = source[:, :, 2:3]
    wanted[3, 1:3] = source[3:]
    wanted[4, ::2, 1::2, ::3] = source[:3, 3:, :15]
    wanted[5, 1:4, ::2, 1:4] = source[:3, 3:, 5:8]
    np.testing.assert_array_equal(get(x), wanted)
    np.testing.assert_array_equal(get(found), source[:3, 3:, 5:8])
    world.barrier()


EPOCHS, DEPTH, COUNT = 7, 3, 37
ONE, WARP, BLOCK = 0, 1, 2
READ = 4  # the channel of the credit


@functools.cache
def mailing(dtype, scope, size):
    """Return a kernel that sends columns to the right neighbour, several epochs ahead.

    Each of them has its own number of elements.
    """

    @cuda.jit
    def kernel(ctx, base, given, out):
        thread, lanes = cuda.threadIdx.x, (1, min(32, cuda.blockDim.x), cuda.blockDim.x)
        right = (ctx.rank + 1) % ctx.size
        left = (ctx.rank - 1 + ctx.size) % ctx.size
        there = symm.peer_array(ctx, right, (DEPTH, size), np.uint64)
        here = symm.peer_array(ctx, ctx.rank, (DEPTH, size), np.uint64)
        arrived = thread < lanes[scope]
        for step in range(EPOCHS + DEPTH - 1):
            epoch = base + step + 1
            if step < EPOCHS and arrived:
                # The right neighbour has read what this epoch overwrites.
                free = epoch - DEPTH
                arrived = symm.wait_until(ctx, right, READ, symm.GE, free)
                part = given[step : COUNT - step, step]
                if scope == BLOCK:
                    symm.put_packets_block(ctx, there[epoch % DEPTH], part, epoch)
                elif scope == WARP:
                    symm.put_packets_warp(ctx, there[epoch % DEPTH], part, epoch)
                else:
                    symm.put_packets(ctx, there[epoch % DEPTH], part, epoch)
            step -= DEPTH - 1
            if step >= 0 and arrived:
                epoch = base + step + 1
                box, part = here[epoch % DEPTH], out[step : COUNT - step, step]
                if scope == BLOCK:
                    arrived = symm.get_packets_block(ctx, left, part, box, epoch)
                elif scope == WARP:
                    arrived = symm.get_packets_warp(ctx, left, part, box, epoch)
                else:
                    arrived = symm.get_packets(ctx, left, part, box, epoch)
                if thread == 0 and arrived:
                    symm.signal_set(ctx, left, READ, epoch)

    return kernel


@pytest.mark.parametrize(
    ("scope", "dtype"),
    [(ONE, np.uint8), (WARP, np.int32), *((BLOCK, dtype) for dtype in DTYPES)],
)
def test_packets_carry_every_type(comm, world, scope, dtype):
    size = np.dtype(dtype).itemsize
    random = np.random.default_rng(comm.rank)
    bits = random.integers(0, 256, (COUNT, EPOCHS * size), np.uint8)
    length = symm.mailbox_size(COUNT, dtype)
    x = comm.zeros((DEPTH, length), np.uint64)
    ctx, given = comm.rendezvous(x).ctx, cuda.to_device(bits.view(dtype))
    theirs = world.sendrecv(bits, (comm.rank + 1) % comm.size, source=comm.rank - 1)
    wanted = np.zeros_like(bits)
    for step in range(EPOCHS):
        part = np.s_[step : COUNT - step, step * size : (step + 1) * size]
        wanted[part] = theirs[part]
    for base in (0, EPOCHS):  # the epochs count on
        out = cuda.to_device((0 * bits).view(dtype))
        mailing(dtype, scope, length)[1, THREADS](ctx, base, given, out)
        comm.synchronize()
        np.testing.assert_array_equal(get(out).view(np.uint8), wanted)
    world.barrier()


@cuda.jit
def wait_for_packets(ctx, words, sent, count, wanted, found):
    """Wait for all words of an epoch, after this rank has sent some epochs to itself.

    It has received these: the first one of all words, the others of ``count``.
    """
    box = symm.peer_array(ctx, ctx.rank, 8, np.uint64)
    for i in range(sent.size):
        some = words if i == 0 else words[:count]
        symm.put_packets_block(ctx, box, some, sent[i])
        if sent.size > 1:
            symm.get_packets_block(ctx, 0, some, box, sent[i])
    if sent.size > 1:
        symm.put_packets_block(ctx, box, words[:count], wanted)
    arrived = symm.get_packets_block(ctx, 0, words, box, wanted)
    if cuda.threadIdx.x == 0:
        found[0] = arrived


NONE_CAME = ns.CollectiveTimeout, r"rank \d waited for rank 0 in get_packets, block 0"
LATER_CAME = ns.CollectiveError, r"packets of rank 0 of epoch 1, which a later one has"


@pytest.mark.parametrize(
    ("sent", "wanted", "error"),
    [
        ([], 1, NONE_CAME),
        ([2], 1, LATER_CAME),
        # Epochs wrap around, and packets of the same epoch modulo 2**32 are there.
        ([], 2**32, NONE_CAME),
        ([5, 2**31 - 1], 2**32 + 5, NONE_CAME),
    ],
)
def test_packets_that_do_not_arrive_end_the_wait(world, sent, wanted, error):
    comm = ns.Communicator(MPI.COMM_SELF, timeout=0.2)
    memory = comm.rendezvous(comm.zeros(8, np.uint64))
    found = cuda.to_device(np.full(1, 7))
    words, sent = cuda.to_device(np.zeros(4)), cuda.to_device(np.array(sent, np.int64))
    wait_for_packets[1, 2](memory.ctx, words, sent, 2, wanted, found)
    kind, text = error
    with pytest.raises(kind, match=text):
        comm.synchronize()
    assert get(found).tolist() == [0]
    world.barrier()
    comm.close()


@cuda.jit
def misuse(ctx, what):
    words = symm.peer_array(ctx, ctx.size if what == 0 else 0, 8, np.int32)
    if what == 1:
        symm.put(ctx, words[4:], words[:3])
    elif what == 2:
        symm.get_block(ctx, symm.peer_array(ctx, 0, 8, np.float32), words)
    elif what == 3:
        symm.put_warp(ctx, symm.peer_array(ctx, 0, 9, np.int32)[1:], words)
    elif what == 4:
        symm.put(ctx, symm.peer_array(ctx, 0, (1, 2, 2, 2), np.int32), words)
    elif what == 5:
        symm.put(ctx, words, 3)
    elif what == 6:
        symm.put_packets(ctx, words, words, 1)
    elif what == 7:
        symm.put_packets(ctx, symm.peer_array(ctx, 0, 4, np.uint64), words, 1)
    elif what == 8:
        box = symm.peer_array(ctx, 0, 4, np.uint64)[1:]
        symm.get_packets(ctx, 0, words[:0], box, 1)
    else:
        box = symm.peer_array(ctx, 0, 4, np.uint64)
        symm.get_packets(ctx, ctx.size, words[:4], box, 1)


REFUSED = [
    r"rank \d's buffer: expected a rank of the context, 0 to \d;",
    r"a copy of 3 elements: .* of the same shape, got \(3,\) into \(4,\);",
    "a copy: expected .* the same dtype, got .* of float32 and .* of int32",
    r"of 36 bytes: expected at most the buffer's, 32, got shape \(?9,?\)? of int32;",
    r"a copy: expected two arrays of one to three dim.* got \(1, 2, 2, 2\) of",
    "a copy: expected two arrays .* and int",
    r"a copy with packets: expected a contiguous .* of uint64 .* got \(8,\) of int32",
    "at least 8 elements, .*; see mailbox_size, got 4 elements 0 bytes after a mult",
    "at least 0 elements, aligned to 16 bytes; .* got 3 elements 8 bytes after a mult",
    r"rank \d's buffer: expected a rank of the context, 0 to \d;",
]


@pytest.mark.skipif(not SIMULATED, reason="a GPU checks this in debug mode only")
@pytest.mark.parametrize("what", range(len(REFUSED)))
def test_misuse_is_refused(comm, what):
    ctx = comm.rendezvous(comm.zeros(8, np.int32)).ctx
    with pytest.raises(ns.ArgumentError, match=REFUSED[what]):
        misuse[1, 1](ctx, what)
    comm.barrier()
