"""A rank resets its flag after a peer has set it (NVIDIA/nvshmem#98)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def ping_pong(ctx, rounds):
    peer = 1 - ctx.rank
    mine = symm.peer_address(ctx, ctx.rank)
    theirs = symm.peer_address(ctx, peer)
    symm.st_relaxed_sys_u32(mine, 0)  # the reset, which no barrier follows
    for i in range(rounds):
        if ctx.rank == 0:
            symm.st_release_sys_u32(theirs, i + 1)
        while symm.ld_acquire_sys_u32(mine) != i + 1:
            pass
        if ctx.rank == 1:
            symm.st_release_sys_u32(theirs, i + 1)


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.zeros(1, np.uint32))
    ping_pong[1, 1](memory.ctx, 2)
    comm.synchronize()
