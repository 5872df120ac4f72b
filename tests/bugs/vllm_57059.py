"""A start barrier with relaxed flags (vllm-project/vllm#57059)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def kernel(ctx, flags, epoch, out):
    t = cuda.threadIdx.x
    data = symm.peer_array(ctx, ctx.rank, 4, np.uint32)
    if t == 0:
        data[0] = 5
    cuda.syncthreads()
    if t < ctx.size:
        symm.st_relaxed_sys_u32(symm.peer_address(flags, t) + 4 * ctx.rank, epoch)
        mine = symm.peer_address(flags, ctx.rank) + 4 * t
        while symm.ld_relaxed_sys_u32(mine) < epoch:
            pass
    cuda.syncthreads()
    out[t] = symm.peer_array(ctx, t, 4, np.uint32)[0]


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.empty(4, np.uint32))
    flags = comm.rendezvous(comm.zeros(4, np.uint32))
    out = cuda.device_array(2, np.uint32)
    kernel[1, 2](memory.ctx, flags.ctx, 1, out)
    comm.synchronize()
