import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns

with ns.Communicator(MPI.COMM_WORLD) as comm:
    inbox = comm.zeros(4, np.int64)
    mem = comm.rendezvous(inbox)
    mine = cuda.to_device(np.full(4, comm.rank, np.int64))
    mem.put(mine, (comm.rank + 1) % comm.size)  # a copy into the peer's inbox
    mem.put_signal((comm.rank + 1) % comm.size)  # follows the copy
    mem.wait_signal((comm.rank - 1) % comm.size)
    comm.synchronize()
    print(comm.rank, inbox.copy_to_host())
