"""Two barriers with one set of counters that are compared for equality (vllm#8558)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def kernel(ctx):
    r = cuda.threadIdx.x
    for count in range(1, 3):
        there = symm.peer_address(ctx, r) + 4 * ctx.rank
        symm.st_release_sys_u32(there, count)
        mine = symm.peer_address(ctx, ctx.rank) + 4 * r
        while symm.ld_acquire_sys_u32(mine) != count:
            pass  # the peer may be at its second barrier already


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.zeros(comm.size, np.uint32))
    kernel[1, comm.size](memory.ctx)
    comm.synchronize()
