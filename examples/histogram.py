"""Count the values in all ranks' data; all blocks take chunks from one queue.

    numba-symm run -n 4 examples/histogram.py

The queue is a number in rank 0's memory. Each block of each rank takes the next chunk
with an atomic operation, so a fast rank counts more chunks than a slow one. The chunk
may be in any rank's memory. The block counts the values in shared memory, and then adds
its counts to the common ones, of which each rank holds a part.
"""

import argparse

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED

BINS = 16
CHUNK = 100 if SIMULATED else 1 << 20  # values
BLOCKS, THREADS = (2, 8) if SIMULATED else (32, 256)


@cuda.jit
def count(data, bins, queue, chunks, taken):
    """Count all ranks' chunks; data, bins and queue are contexts."""
    ranks, thread, threads = data.size, cuda.threadIdx.x, cuda.blockDim.x
    counts = cuda.shared.array(BINS, np.int32)
    chunk = cuda.shared.array(1, np.int64)
    while True:
        if thread == 0:
            chunk[0] = symm.atomic_add(symm.peer_array(queue, 0, 1, np.int64), 0, 1)
        for b in range(thread, BINS, threads):
            counts[b] = 0
        cuda.syncthreads()  # the chunk's number and the zeros, before their use
        owner, first = chunk[0] % ranks, chunk[0] // ranks * CHUNK
        if chunk[0] >= chunks * ranks:
            break
        values = symm.peer_array(data, owner, chunks * CHUNK, np.uint8)
        for i in range(first + thread, first + CHUNK, threads):
            cuda.atomic.add(counts, values[i], 1)  # of this block only
        cuda.syncthreads()  # all counts of the chunk, before they are added
        for b in range(thread, BINS, threads):
            there = symm.peer_array(bins, b % ranks, BINS, np.int32)
            symm.atomic_add(there, b // ranks, counts[b])
        if thread == 0:
            cuda.atomic.add(taken, 0, 1)
        cuda.syncthreads()  # counts and chunk are read, before the next ones


def main():
    """Count random values, and compare with NumPy's counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--chunks", type=int, default=6, help="chunks of each rank")
    parser.add_argument(
        "--blocks", type=int, default=BLOCKS, help="blocks of each rank"
    )
    options = parser.parse_args()
    blocks, chunks = options.blocks, options.chunks
    world = MPI.COMM_WORLD
    with ns.Communicator(world) as comm:
        random = np.random.default_rng(seed=comm.rank)
        mine = random.binomial(BINS - 1, 0.3, chunks * CHUNK).astype(np.uint8)
        data = comm.empty(mine.size, np.uint8)
        data.copy_to_device(mine)
        bins, queue = comm.zeros(BINS, np.int32), comm.zeros(1, np.int64)
        contexts = [comm.rendezvous(each).ctx for each in (data, bins, queue)]
        taken = cuda.to_device(np.zeros(1, np.int64))
        comm.barrier()  # every rank's data is there, before any rank counts it
        count[blocks, THREADS](*contexts, chunks, taken)
        comm.barrier()  # every rank has counted, before any reads its bins
        comm.synchronize()
        found = bins.copy_to_host()[: len(range(comm.rank, BINS, comm.size))]
        counted = int(taken.copy_to_host()[0])
        wanted = sum(world.allgather(np.bincount(mine, minlength=BINS)))
        assert found.tolist() == wanted[comm.rank :: comm.size].tolist()
        assert world.allreduce(counted) == chunks * comm.size
        print(f"rank {comm.rank} counted {counted} of {chunks * comm.size} chunks")


if __name__ == "__main__":
    main()
