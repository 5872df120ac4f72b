import numpy as np
from mpi4py import MPI

import numba_symm as ns

with ns.Communicator(MPI.COMM_WORLD) as comm:
    gradient = comm.empty(4, np.float32)
    average = comm.all_reduce_init(gradient, op="avg", out=gradient)
    for step in range(3):
        gradient.copy_to_device(np.full(4, step + comm.rank, np.float32))
        average()
    comm.synchronize()
    print(comm.rank, gradient.copy_to_host())
