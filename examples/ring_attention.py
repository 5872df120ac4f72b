"""Compute attention over the keys of all ranks, which pass from rank to rank in a ring.

    numba-symm run -n 4 examples/ring_attention.py

Each rank has queries, keys and values of a part of a sequence, and computes the
attention of its queries to all parts. Here, one kernel does so: in each step, a block
of a head attends to one part, while a warp of the block sends this part to the next
rank. So no thread that computes waits for a copy, and no rank stores all parts.

For comparison, a host call collects all parts on each rank, before a kernel computes
the same.
"""

import math
import time

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED

HEADS, LENGTH, WIDTH = (1, 3, 2) if SIMULATED else (64, 128, 64)
PART = 2 * LENGTH, WIDTH  # of a head: the keys, and then the values
BOXES = 2, HEADS, 2 * LENGTH, WIDTH
WARP = 32
SENDER = -(-LENGTH // WARP) * WARP  # the first thread of the warp that sends
THREADS = SENDER + WARP
TIMES = 1 if SIMULATED else 20


@cuda.jit(device=True)
def attend(query, part, found, state):
    """Add a part's values to a thread's result.

    The state is the largest product so far, and the sum of the weights.
    """
    for i in range(LENGTH):
        product = np.float32(0)
        for k in range(WIDTH):
            product += query[k] * part[i, k]
        largest = max(state[0], product)
        before, weight = math.exp(state[0] - largest), math.exp(product - largest)
        state[0], state[1] = largest, state[1] * before + weight
        for k in range(WIDTH):
            found[k] = found[k] * before + weight * part[LENGTH + i, k]


@cuda.jit(device=True)
def begin(queries, query, found, state):
    """Load a thread's query, and clear its result."""
    state[0], state[1] = np.float32(-1e30), np.float32(0)
    for k in range(WIDTH):
        query[k] = np.float32(0)
        found[k] = np.float32(0)
        if cuda.threadIdx.x < LENGTH:
            query[k] = queries[cuda.blockIdx.x, cuda.threadIdx.x, k]


@cuda.jit(device=True)
def end(found, state, out):
    """Store a thread's result."""
    if cuda.threadIdx.x < LENGTH:
        for k in range(WIDTH):
            out[cuda.blockIdx.x, cuda.threadIdx.x, k] = found[k] / state[1]


@cuda.jit
def in_a_ring(ctx, queries, parts, boxes, out, before):
    """Attend to one part after another; ``before`` parts came in earlier launches."""
    query = cuda.local.array(WIDTH, np.float32)
    found = cuda.local.array(WIDTH, np.float32)
    state = cuda.local.array(2, np.float32)
    head, thread, size = cuda.blockIdx.x, cuda.threadIdx.x, ctx.size
    left, right = (ctx.rank - 1 + size) % size, (ctx.rank + 1) % size
    there = symm.peer_array(ctx, right, BOXES, np.float32)
    sent, read = 2 * head, 2 * head + 1  # channels
    begin(queries, query, found, state)
    for step in range(size):
        count = before + step
        # The part of this step is there, and the next rank has read what the one that
        # is sent now overwrites: there are two boxes.
        wanted = count, count - 1
        if not symm.wait_until_block(ctx, (left, right), (sent, read), symm.GE, wanted):
            break
        part = parts[head]
        if step > 0:
            part = boxes[(count - 1) % 2, head]
        if thread >= SENDER:
            if step + 1 < size:
                symm.put_warp(ctx, there[count % 2, head], part)
                cuda.syncwarp()  # the copies of all lanes, before the signal of one
                if thread == SENDER:
                    symm.signal_set(ctx, right, sent, count + 1)
        elif thread < LENGTH:
            attend(query, part, found, state)
        cuda.syncthreads()  # all have read the part
        if thread == 0 and step > 0:
            symm.signal_set(ctx, left, read, count)
    end(found, state, out)


@cuda.jit
def over_all(queries, gathered, out):
    """Attend to the parts of all ranks, which are in this rank's memory."""
    query = cuda.local.array(WIDTH, np.float32)
    found = cuda.local.array(WIDTH, np.float32)
    state = cuda.local.array(2, np.float32)
    begin(queries, query, found, state)
    if cuda.threadIdx.x < LENGTH:
        for rank in range(gathered.shape[0]):
            attend(query, gathered[rank, cuda.blockIdx.x], found, state)
    end(found, state, out)


def by_numpy(queries, parts):
    """Return the attention of one rank's queries to all parts."""
    keys, values = (
        np.concatenate([part[:, half] for part in parts], axis=1).astype(np.float64)
        for half in (slice(0, LENGTH), slice(LENGTH, None))
    )
    products = np.einsum("hqk,hik->hqi", queries, keys)
    weights = np.exp(products - products.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqi,hik->hqk", weights, values)


class Attention:
    """The arrays of one rank, and two ways to compute its attention."""

    def __init__(self, comm, world):
        self.comm, self.world, self.before = comm, world, 0
        lot = np.random.default_rng(3)
        parts = lot.standard_normal((comm.size, HEADS, *PART)).astype(np.float32)
        queries = lot.standard_normal((comm.size, HEADS, LENGTH, WIDTH))
        queries = queries.astype(np.float32)[comm.rank]
        self.wanted = by_numpy(queries, parts)
        self.queries, self.part = map(cuda.to_device, (queries, parts[comm.rank]))
        self.out = cuda.device_array_like(self.queries)
        self.boxes = comm.zeros(BOXES)
        self.gathered = comm.zeros((comm.size, HEADS, *PART))
        self.ctx = comm.rendezvous(self.boxes, channels=2 * HEADS).ctx

    def by_kernel(self):
        """Launch one kernel."""
        arrays = self.queries, self.part, self.boxes, self.out
        in_a_ring[HEADS, THREADS](self.ctx, *arrays, self.before)
        self.before += self.comm.size - 1

    def alone(self):
        """Compute what a rank can after it has all parts."""
        over_all[HEADS, SENDER](self.queries, self.gathered, self.out)

    def by_a_call(self):
        """Collect all parts by a call of the host, and launch a kernel."""
        self.comm.all_gather(self.part, out=self.gathered)
        self.alone()

    def checked(self, way):
        """Compute twice, and compare with NumPy's result."""
        for _ in range(2):
            self.out.copy_to_device(np.zeros(self.out.shape, np.float32))
            way()
            self.comm.synchronize()
            found = self.out.copy_to_host()
            np.testing.assert_allclose(found, self.wanted, rtol=1e-3, atol=1e-4)

    def microseconds(self, way):
        """Return the time of one computation, of several in a row."""
        self.world.Barrier()
        start = time.perf_counter()
        for _ in range(TIMES):
            way()
        self.comm.synchronize()
        return (time.perf_counter() - start) * 1e6 / TIMES


def main():
    """Compute and check the attention in each way, and compare the times."""
    world = MPI.COMM_WORLD
    with ns.Communicator(world) as comm:
        attention = Attention(comm, world)
        ways = {"in a ring": attention.by_kernel, "after a call": attention.by_a_call}
        text = f"rank {comm.rank} took these µs for {HEADS} heads"
        for way in ways.values():
            attention.checked(way)
        for name, way in (ways | {"without communication": attention.alone}).items():
            text += f"; {name} {attention.microseconds(way):.1f}"
        print(text)


if __name__ == "__main__":
    main()
