import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm

VALUE, FLAG = 0, 4  # bytes


@cuda.jit
def send_right(ctx, step, out):
    mine = symm.peer_address(ctx, ctx.rank)
    theirs = symm.peer_address(ctx, (ctx.rank + 1) % ctx.size)
    symm.st_u32(theirs + VALUE, 10 * ctx.rank)
    symm.st_release_sys_u32(theirs + FLAG, step)  # after the value
    while symm.ld_acquire_sys_u32(mine + FLAG) != step:
        pass
    out[0] = symm.ld_u32(mine + VALUE)


with ns.Communicator(MPI.COMM_WORLD) as comm:
    mem = comm.rendezvous(comm.zeros(2, np.uint32))
    out = cuda.device_array(1, np.uint32)
    send_right[1, 1](mem.ctx, 1, out)
    comm.synchronize()
    print(comm.rank, out.copy_to_host())
