"""A block clears its signal while another block still polls it (ROCm/mori#494)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def combine(ctx):
    mine = symm.peer_address(ctx, ctx.rank)
    if cuda.blockIdx.x == 0:
        symm.barrier(ctx, 0)  # the other ranks' block 0
        symm.st_release_sys_u32(mine, 1)
        symm.st_relaxed_sys_u32(mine, 0)  # for the next call
    else:
        while symm.ld_acquire_sys_u32(mine) != 1:
            pass


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.zeros(1, np.uint32))
    combine[2, 1](memory.ctx)
    comm.synchronize()
