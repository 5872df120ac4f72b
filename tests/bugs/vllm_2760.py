"""A two-stage all-reduce without release between its stages (vllm#2760)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def two_stage(ctx, x, out, flags, epoch):
    t, n = cuda.threadIdx.x, ctx.size
    mine = symm.peer_array(ctx, ctx.rank, 4, np.float32)
    mine[t] = x[t]
    symm.barrier(ctx, 0)
    if t == ctx.rank:
        s = np.float32(0)
        for r in range(n):
            s += symm.peer_array(ctx, r, 4, np.float32)[t]
        mine[2] = s
    cuda.syncthreads()
    if t < n:
        symm.st_relaxed_sys_u32(symm.peer_address(flags, t) + 4 * ctx.rank, epoch)
        flag = symm.peer_address(flags, ctx.rank) + 4 * t
        while symm.ld_acquire_sys_u32(flag) != epoch:
            pass
    out[t] = symm.peer_array(ctx, t, 4, np.float32)[2]


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.empty(4, np.float32))
    flags = comm.rendezvous(comm.zeros(4, np.uint32))
    x, out = cuda.to_device(np.ones(2, np.float32)), cuda.device_array(2, np.float32)
    two_stage[1, 2](memory.ctx, x, out, flags.ctx, 1)
    comm.synchronize()
