import numpy as np
from mpi4py import MPI

import numba_symm as ns

with ns.Communicator(MPI.COMM_WORLD) as comm:
    x = comm.empty(4, np.float32)
    x.copy_to_device(np.full(4, comm.rank, np.float32))
    y = comm.all_reduce(x, op="sum")
    comm.synchronize()
    print(comm.rank, y.copy_to_host())
