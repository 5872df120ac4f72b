import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm

BLOCKS, THREADS = 2, 8  # the same in every launch, on every rank
SLOTS = 2, BLOCKS, THREADS  # for each thread, one in each half
FAILED = -1


@cuda.jit
def all_reduce(ctx, epochs, x, out):
    """Store in ``out`` the sum of all ranks' ``x``, which may be the same array."""
    block, thread = cuda.blockIdx.x, cuda.threadIdx.x
    own = symm.peer_array(ctx, ctx.rank, SLOTS, np.float32)
    epoch = epochs[block]
    start = block * THREADS
    while start < x.size and epoch != FAILED:
        i = start + thread
        half = epoch % 2
        if i < x.size:
            own[half, block, thread] = x[i]
        if symm.barrier(ctx, block):  # the blocks of all ranks have stored
            if i < x.size:
                total = np.float32(0)
                for rank in range(ctx.size):
                    theirs = symm.peer_array(ctx, rank, SLOTS, np.float32)
                    total += theirs[half, block, thread]
                out[i] = total
            epoch += 1
        else:
            epoch = FAILED
        start += BLOCKS * THREADS
    cuda.syncthreads()  # every thread has loaded the epoch
    if thread == 0:
        epochs[block] = epoch


def main():
    with ns.Communicator(MPI.COMM_WORLD) as comm:
        mem = comm.rendezvous(comm.empty(SLOTS, np.float32))
        epochs = cuda.to_device(np.zeros(BLOCKS, np.int64))
        x = cuda.to_device(np.arange(40, dtype=np.float32) + comm.rank)
        y = cuda.device_array_like(x)
        all_reduce[BLOCKS, THREADS](mem.ctx, epochs, x, y)
        all_reduce[BLOCKS, THREADS](mem.ctx, epochs, y, y)  # in place
        comm.synchronize()  # raises if a rank did not arrive
        print(comm.rank, y.copy_to_host()[:4], epochs.copy_to_host())


if __name__ == "__main__":
    main()
