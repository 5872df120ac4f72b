"""A wait for equality with a count that goes on (tenstorrent/tt-metal#54590)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def sort(ctx, steps):
    peer = 1 - ctx.rank
    for step in range(steps):
        symm.signal_add(ctx, peer, 0, 1)
        symm.wait_until(ctx, peer, 0, symm.EQ, 2 * step + 1)
        symm.signal_add(ctx, peer, 0, 1)
        symm.wait_until(ctx, peer, 0, symm.EQ, 2 * step + 2)


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.zeros(1, np.int64))
    sort[1, 1](memory.ctx, 1)
    comm.synchronize()
