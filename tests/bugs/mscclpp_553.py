"""A released semaphore wakes none of two waiting threads (microsoft/mscclpp#553)."""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm


@cuda.jit
def enter(ctx, counts):
    words = symm.peer_array(ctx, 0, 1, np.int64)
    if symm.atomic_add(words, 0, -1, order="acquire") <= 0:
        while symm.atomic_load(words, 0, order="acquire") < 0:
            pass  # with two that wait, one release makes it -1 instead of -2
    counts[0] += 1
    symm.atomic_add(words, 0, 1, order="release")


with ns.Communicator(MPI.COMM_WORLD) as comm:
    words = comm.zeros(1, np.int64)
    words.copy_to_device(np.ones(1, np.int64))
    memory = comm.rendezvous(words)
    comm.barrier()
    enter[2, 1](memory.ctx, cuda.to_device(np.zeros(1, np.int64)))
    comm.synchronize()
