import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns

with ns.Communicator(MPI.COMM_WORLD) as comm:
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    mine = cuda.to_device(np.full(2, comm.rank, np.int64))
    from_left = cuda.device_array_like(mine)
    from_right = cuda.device_array_like(mine)
    with comm.group():  # all four messages proceed together
        comm.send(mine, dst=right)
        comm.send(mine, dst=left)
        comm.recv(from_left, src=left)
        comm.recv(from_right, src=right)
    comm.synchronize()
    print(comm.rank, from_left.copy_to_host(), from_right.copy_to_host())
