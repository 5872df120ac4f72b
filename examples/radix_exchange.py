"""Send keys to the ranks of their highest bits, in one kernel: a step of a radix sort.

    numba-symm run -n 4 examples/radix_exchange.py

Each block divides its keys by their ranks in shared memory. Meanwhile, the blocks of
the same index on all ranks exchange how many keys they have for each rank. From these
numbers, a block knows where in each rank's array its keys belong, and puts them there.

For comparison, three kernels count the keys and divide them, and a host call sends
them. It reads the numbers of keys on the GPU, so that the host need not wait.
"""

import argparse
import time

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED

BLOCKS, THREADS, KEYS = (2, 4, 10) if SIMULATED else (256, 256, 8192)  # of a block
MOST = 4 if SIMULATED else 8  # ranks
PAIRS = MOST * MOST
TIMES = 1 if SIMULATED else 100


@cuda.jit(device=True)
def rank_of(key, size):
    """Return the rank of a key."""
    return np.int64(key) * size >> 32


@cuda.jit(device=True)
def count(keys, size, starts):
    """Count how many of a thread's keys belong to each rank."""
    thread = cuda.threadIdx.x
    for rank in range(size):
        starts[rank, thread] = 0
    for i in range(thread, KEYS, cuda.blockDim.x):
        starts[rank_of(keys[i], size), thread] += 1
    cuda.syncthreads()


@cuda.jit(device=True)
def add_up(starts, size, counts):
    """Replace the threads' numbers by those of all threads before; keep the sums."""
    rank, total = cuda.threadIdx.x, 0
    if rank < size:
        for i in range(cuda.blockDim.x):
            number = starts[rank, i]
            starts[rank, i] = total
            total += number
        counts[rank] = total
    cuda.syncthreads()


@cuda.jit
def in_a_kernel(ctx, ws, keys, kept):
    """Divide the keys of each block, and put them into the ranks' arrays."""
    block, thread, size = cuda.blockIdx.x, cuda.threadIdx.x, ctx.size
    starts = cuda.shared.array((MOST, THREADS), np.int32)
    counts = cuda.shared.array(MOST, np.int32)
    every = cuda.shared.array(PAIRS, np.int32)
    divided = cuda.shared.array(KEYS, np.uint32)
    # When all have arrived, no rank reads what earlier launches have put.
    arrived = symm.barrier_arrive(ctx, block)
    count(keys[block], size, starts)
    add_up(starts, size, counts)
    symm.all_gather_start(ws, counts[:size])
    for i in range(thread, KEYS, cuda.blockDim.x):
        key = keys[block, i]
        rank = rank_of(key, size)
        at = starts[rank, thread]
        starts[rank, thread] += 1
        for before in range(rank):
            at += counts[before]
        divided[at] = key
    # The waits order these keys before the puts of other threads, too.
    good = symm.all_gather_wait(ws, counts[:size], every[: size * size])
    good = symm.barrier_wait(ctx, block, arrived) and good
    if good:
        for k in range(size):
            rank = (ctx.rank + k) % size  # each rank begins with another one
            first, at = 0, 0
            for before in range(rank):
                first += counts[before]
            for source in range(ctx.rank):
                at += every[source * size + rank]
            shape = BLOCKS, KEYS * size
            there = symm.peer_array(ctx, rank, shape, np.uint32)[block]
            last = first + counts[rank]
            symm.put_block(ctx, there[at : at + last - first], divided[first:last])
        total = 0
        for source in range(size):
            total += every[source * size + ctx.rank]
        if thread == 0:
            kept[block] = total
        symm.barrier(ctx, block)  # all keys have arrived


@cuda.jit
def count_blocks(keys, numbers):
    """Count the keys of each block for each rank."""
    starts = cuda.shared.array((MOST, THREADS), np.int32)
    size = numbers.shape[0]
    count(keys[cuda.blockIdx.x], size, starts)
    add_up(starts, size, numbers[:, cuda.blockIdx.x])


@cuda.jit
def add_up_blocks(numbers, totals):
    """Replace the blocks' numbers by those of all blocks before; keep the sums."""
    rank, total = cuda.threadIdx.x, np.int64(0)
    for block in range(numbers.shape[1]):
        number = numbers[rank, block]
        numbers[rank, block] = total
        total += number
    totals[rank] = total


@cuda.jit
def divide(keys, numbers, totals, divided):
    """Store the keys by their ranks."""
    starts = cuda.shared.array((MOST, THREADS), np.int32)
    counts = cuda.shared.array(MOST, np.int32)
    block, thread, size = cuda.blockIdx.x, cuda.threadIdx.x, totals.size
    count(keys[block], size, starts)
    add_up(starts, size, counts)
    for i in range(thread, KEYS, cuda.blockDim.x):
        key = keys[block, i]
        rank = rank_of(key, size)
        at = numbers[rank, block] + starts[rank, thread]
        starts[rank, thread] += 1
        for before in range(rank):
            at += totals[before]
        divided[at] = key


class Exchange:
    """The keys of one rank, and two ways to exchange them."""

    def __init__(self, comm, world):
        self.comm, self.world = comm, world
        lot = np.random.default_rng(5)
        shape = comm.size, BLOCKS, KEYS
        keys = lot.integers(0, 1 << 32, shape, dtype=np.uint32)
        owners = keys.astype(np.int64) * comm.size >> 32
        self.wanted = np.sort(keys[owners == comm.rank])
        self.keys = cuda.to_device(keys[comm.rank])
        self.received = comm.zeros((BLOCKS, KEYS * comm.size), np.uint32)
        self.kept = cuda.to_device(np.zeros(BLOCKS, np.int64))
        self.ctx = comm.rendezvous(self.received, channels=BLOCKS).ctx
        self.ws = comm.device_workspace(BLOCKS, THREADS, 4 * MOST).ctx
        self.numbers = cuda.to_device(np.zeros((comm.size, BLOCKS), np.int32))
        self.totals, self.counts = (
            cuda.to_device(np.zeros(comm.size, np.int64)) for _ in range(2)
        )
        self.divided = comm.zeros(BLOCKS * KEYS, np.uint32)
        self.out = comm.zeros((comm.size, BLOCKS * KEYS), np.uint32)

    def by_kernel(self):
        """Launch one kernel."""
        in_a_kernel[BLOCKS, THREADS](self.ctx, self.ws, self.keys, self.kept)

    def by_a_call(self):
        """Launch three kernels, and send by a call of the host."""
        count_blocks[BLOCKS, THREADS](self.keys, self.numbers)
        add_up_blocks[1, self.comm.size](self.numbers, self.totals)
        arrays = self.numbers, self.totals, self.divided
        divide[BLOCKS, THREADS](self.keys, *arrays)
        self.comm.all_to_all_v(
            self.divided,
            send_counts=self.totals,
            recv_counts=self.counts,
            capacity=BLOCKS * KEYS,
            out=self.out.reshape(-1),
        )

    def check_kernel(self):
        """Exchange twice, and compare with all keys that belong to this rank."""
        for _ in range(2):
            self.by_kernel()
            self.comm.synchronize()
            found, kept = self.received.copy_to_host(), self.kept.copy_to_host()
            rows = [row[:number] for row, number in zip(found, kept, strict=True)]
            assert np.array_equal(np.sort(np.concatenate(rows)), self.wanted)

    def check_call(self):
        """Do the same with the host's call."""
        self.by_a_call()
        self.comm.synchronize()
        found, counts = self.out.copy_to_host(), self.counts.copy_to_host()
        rows = [row[:number] for row, number in zip(found, counts, strict=True)]
        assert np.array_equal(np.sort(np.concatenate(rows)), self.wanted)

    def microseconds(self, way):
        """Return the time of one exchange, of several in a row."""
        self.world.Barrier()
        start = time.perf_counter()
        for _ in range(TIMES):
            way()
        self.comm.synchronize()
        return (time.perf_counter() - start) * 1e6 / TIMES


def main():
    """Exchange the keys in each way, check the results, and compare the times."""
    parser = argparse.ArgumentParser(description="A step of a radix sort.")
    parser.add_argument("--kernel", action="store_true", help="run only the kernel")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    with ns.Communicator(world) as comm:
        exchange = Exchange(comm, world)
        exchange.check_kernel()
        text = f"rank {comm.rank} took these µs for {BLOCKS * KEYS} keys; in a kernel "
        text += f"{exchange.microseconds(exchange.by_kernel):.1f}"
        if not options.kernel:
            exchange.check_call()
            text += f"; by a call {exchange.microseconds(exchange.by_a_call):.1f}"
        print(text)


if __name__ == "__main__":
    main()
