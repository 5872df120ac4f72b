import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def running_sum(ctx, mine):
    i = cuda.threadIdx.x
    before = symm.peer_array(ctx, ctx.rank, mine.size, np.int64)
    if ctx.rank > 0:
        if i == 0:
            symm.wait_signal(ctx, ctx.rank - 1, 0)
        cuda.syncthreads()  # now every thread sees what the peer stored
        mine[i] += before[i]
    if ctx.rank + 1 < ctx.size:
        theirs = symm.peer_array(ctx, ctx.rank + 1, mine.size, np.int64)
        theirs[i] = mine[i]
        cuda.syncthreads()  # every thread has stored
        if i == 0:
            symm.put_signal(ctx, ctx.rank + 1, 0)


with ns.Communicator(MPI.COMM_WORLD) as comm:
    mem = comm.rendezvous(comm.empty(4, np.int64))
    mine = cuda.to_device(np.full(4, comm.rank + 1, np.int64))
    running_sum[1, 4](mem.ctx, mine)
    comm.synchronize()
    print(comm.rank, mine.copy_to_host())
