"""An allreduce of numba-mpi, whose C calls read mpi4py's handles, on each rank."""

import numba_mpi
import numpy as np
from mpi4py import MPI

RANK, RANKS = MPI.COMM_WORLD.rank, range(MPI.COMM_WORLD.size)

x, out = np.full(3, RANK + 1.0), np.zeros(3)
assert numba_mpi.allreduce(x, out) == numba_mpi.SUCCESS
assert out.tolist() == [sum(RANKS) + len(RANKS)] * 3
