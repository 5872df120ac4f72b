"""A one-shot all-reduce without a barrier at its end (pytorch#137257)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def one_shot(ctx, x, out):
    t = cuda.threadIdx.x
    symm.peer_array(ctx, ctx.rank, 2, np.float32)[t] = x[t]
    symm.barrier(ctx, 0)
    s = np.float32(0)
    for r in range(ctx.size):
        s += symm.peer_array(ctx, r, 2, np.float32)[t]
    out[t] = s


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.empty(2, np.float32))
    x, out = cuda.to_device(np.ones(2, np.float32)), cuda.device_array(2, np.float32)
    for _ in range(2):
        one_shot[1, 2](memory.ctx, x, out)
    comm.synchronize()
