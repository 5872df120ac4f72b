"""Workers reset their barriers after they have exchanged them (apache/tvm#16797)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def reset(ctx):
    mine = symm.peer_array(ctx, ctx.rank, 1, np.int32)
    symm.atomic_exch(mine, 0, 0)


@cuda.jit
def barrier(ctx):
    for r in range(ctx.size):
        symm.atomic_add(symm.peer_array(ctx, r, 1, np.int32), 0, 1, order="release")
    mine = symm.peer_array(ctx, ctx.rank, 1, np.int32)
    symm.wait_until_at(ctx, mine, 0, symm.GE, ctx.size)


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.zeros(1, np.int32))
    reset[1, 1](memory.ctx)
    barrier[1, 1](memory.ctx)
    comm.synchronize()
