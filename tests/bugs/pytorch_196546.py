"""Each rank zeroes its signals after peers may have stored there (pytorch#196546)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def clear(pad):
    pad[cuda.threadIdx.x] = 0


@cuda.jit
def exchange(ctx, out):
    right = (ctx.rank + 1) % ctx.size
    symm.atomic_exch(symm.peer_array(ctx, right, 2, np.int64), 0, 1, order="release")
    mine = symm.peer_array(ctx, ctx.rank, 2, np.int64)
    out[0] = symm.wait_until_at(ctx, mine, 0, symm.EQ, 1)


with ns.Communicator(MPI.COMM_WORLD) as comm:
    pad, out = comm.empty(2, np.int64), cuda.device_array(1, np.int64)
    memory = comm.rendezvous(pad)  # from here on, peers may signal
    clear[1, 2](pad)
    exchange[1, 1](memory.ctx, out)
    comm.synchronize()
