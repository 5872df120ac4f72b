"""Run a pipeline: blocks pass through all ranks, and each rank applies its own step.

The tag of a message is the number of its block. The last rank receives the blocks as
they arrive.
"""

import numpy as np
from mpi4py import MPI
from numba import config, cuda

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # the problem is small on purpose

BLOCKS, COUNT = 6, 16

comm = MPI.COMM_WORLD


@cuda.jit
def apply(block, rank):
    """Do this rank's work on a block."""
    i = cuda.grid(1)
    if i < block.size:
        block[i] = 0.5 * block[i] + rank + 1


status = MPI.Status()
block = cuda.device_array(COUNT)
results = {}
for number in range(BLOCKS):
    if comm.rank == 0:
        block = cuda.to_device(np.arange(COUNT, dtype=np.float64) + number)
        tag = number
    else:
        comm.Recv(block, comm.rank - 1, MPI.ANY_TAG, status)
        tag = status.Get_tag()
        assert status.Get_count(MPI.DOUBLE) == COUNT
    apply[1, COUNT](block, comm.rank)
    cuda.synchronize()  # mpi4py does not wait for streams
    if comm.rank < comm.size - 1:
        comm.Send(block, comm.rank + 1, tag)
    else:
        results[tag] = float(block.copy_to_host().sum())
if comm.rank == comm.size - 1:
    print(*(results[number] for number in sorted(results)))
