"""A payload is overwritten while peers may read it (tokenspeed#1017, #351)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def all_reduce(ctx, ready, x, out, epoch):
    payload = symm.peer_array(ctx, ctx.rank, 1, np.float32)
    payload[0] = x[0] * epoch
    total = np.float32(0)
    for r in range(ctx.size):
        there = symm.peer_address(ready, r) + 8 * ctx.rank
        symm.st_release_sys_u64(there, epoch)
    for r in range(ctx.size):
        here = symm.peer_address(ready, ctx.rank) + 8 * r
        while symm.ld_acquire_sys_u64(here) < epoch:
            pass
        total += symm.peer_array(ctx, r, 1, np.float32)[0]
    out[0] = total


with ns.Communicator(MPI.COMM_WORLD) as comm:
    memory = comm.rendezvous(comm.empty(1, np.float32))
    ready = comm.rendezvous(comm.zeros(comm.size, np.int64))
    x, out = cuda.to_device(np.ones(1, np.float32)), cuda.device_array(1, np.float32)
    for epoch in range(1, 3):
        all_reduce[1, 1](memory.ctx, ready.ctx, x, out, epoch)
    comm.synchronize()
