"""Only the computing warps reach syncthreads (flashinfer#2996)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns


@cuda.jit
def kernel(out):
    s = cuda.shared.array(2, np.int64)
    t = cuda.threadIdx.x
    if t < 2:
        s[t] = t
        cuda.syncthreads()
        out[t] = s[1 - t]


with ns.Communicator(MPI.COMM_WORLD) as comm:
    out = cuda.to_device(np.zeros(2, np.int64))
    kernel[1, 4](out)
    comm.synchronize()
