"""One warp publishes rows of all others without a fence (Primus-Turbo#482)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm

ROWS = 2


@cuda.jit
def dispatch(ctx, x, out):
    t, right = cuda.threadIdx.x, (ctx.rank + 1) % ctx.size
    there = symm.peer_array(ctx, right, ROWS + 1, np.int64)
    there[t] = x[t]
    cuda.syncthreads()
    if t == 0:  # the rows of all threads are stored, but the tail does not release them
        symm.st_relaxed_sys_u64(symm.peer_address(ctx, right) + 8 * ROWS, ROWS)
        tail = symm.peer_address(ctx, ctx.rank) + 8 * ROWS
        while symm.ld_acquire_sys_u64(tail) != ROWS:
            pass
    cuda.syncthreads()
    out[t] = symm.peer_array(ctx, ctx.rank, ROWS + 1, np.int64)[t]


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.zeros(ROWS + 1, np.int64))
    x = cuda.to_device(np.arange(ROWS))
    out = cuda.device_array_like(x)
    dispatch[1, ROWS](memory.ctx, x, out)
    comm.synchronize()
