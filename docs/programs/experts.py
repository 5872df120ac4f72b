import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns

with ns.Communicator(MPI.COMM_WORLD) as comm:
    moe = comm.experts(2 * comm.size, top_k=2, hidden=4, tokens=3)
    x = cuda.to_device(np.full((3, 4), 1 + comm.rank, np.float32))
    ids = np.array([[0, 1], [0, 5], [7, -1]], np.int32)
    ids = cuda.to_device(np.minimum(ids, 2 * comm.size - 1))
    found = moe.dispatch(x, ids)
    y = moe.combine(found.tokens)  # no experts: tokens as results
    comm.synchronize()
    print(comm.rank, found.counts.copy_to_host(), y.copy_to_host()[:, 0])
