import numpy as np
from mpi4py import MPI

import numba_symm as ns

try:
    with ns.Communicator(MPI.COMM_WORLD, timeout=1) as comm:
        x = comm.zeros(4, np.float32)
        comm.all_reduce(x)
        comm.synchronize()
        if comm.rank != 1:  # rank 1 makes no second call
            comm.all_reduce(x)
        comm.synchronize()
except ns.CollectiveTimeout as error:
    print(f"{comm.rank}: {error.operation}, waited for rank {error.ranks[1]}")
