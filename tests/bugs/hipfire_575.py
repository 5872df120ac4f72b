"""Shared memory is used again without syncthreads (warpfront/hipfire#575)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns


@cuda.jit
def prepare(x, out):
    s = cuda.shared.array(2, np.float32)
    t = cuda.threadIdx.x
    if t == 0:
        s[0] = x[0] * x[0] + x[1] * x[1]
    cuda.syncthreads()
    normed = x[t] / s[0]
    s[t] = normed  # another thread may not have loaded the sum yet
    cuda.syncthreads()
    out[t] = s[1 - t]


with ns.Communicator(MPI.COMM_WORLD) as comm:
    x, out = cuda.to_device(np.ones(2, np.float32)), cuda.device_array(2, np.float32)
    prepare[1, 2](x, out)
    comm.synchronize()
