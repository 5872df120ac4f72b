import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns

x = cuda.to_device(np.ones(4, np.float32))
comm = ns.Communicator(MPI.COMM_WORLD)
comm.all_reduce(x, out=x, algorithm="chunked")
op = "max" if comm.rank == 1 else "sum"
comm.all_reduce(x, out=x, op=op, algorithm="chunked")
comm.barrier()
MPI.COMM_WORLD.Barrier()  # all ranks have made these calls
try:
    comm.synchronize()
except ns.CallMismatch as error:
    if comm.rank == 0:
        print(*str(error).splitlines()[1:], sep="\n")
comm.close()
