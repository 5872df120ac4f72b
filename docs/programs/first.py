import numpy as np
from mpi4py import MPI

import numba_symm as ns

with ns.Communicator(MPI.COMM_WORLD) as comm:  # binds this rank to a GPU
    x = comm.empty(4, np.float32)  # a Numba device array, which every rank maps
    x.copy_to_device(np.full(4, comm.rank, np.float32))
    y = comm.all_reduce(x, op="sum")  # asynchronous; with out=x, in place
    comm.synchronize()  # raises if a rank did not make the call
    print(comm.rank, y.copy_to_host())
