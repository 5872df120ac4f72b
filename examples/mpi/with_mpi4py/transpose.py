"""Transpose a matrix with one Alltoall; each rank has some rows of the matrix.

A derived datatype describes the columns that go to each rank.
"""

import numpy as np
from mpi4py import MPI
from numba import config, cuda

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # the problem is small on purpose

ROWS = 3  # of each rank

comm = MPI.COMM_WORLD


@cuda.jit
def turn_blocks(received, out):
    """Transpose the block of each rank."""
    row = cuda.grid(1)
    if row < out.shape[0]:
        for rank in range(received.shape[0]):
            for column in range(received.shape[1]):
                place = rank * received.shape[1] + column
                out[row, place] = received[rank, column, row]


columns = ROWS * comm.size
first = ROWS * comm.rank
matrix = np.arange(first * columns, (first + ROWS) * columns, dtype=np.float32)
mine = cuda.to_device(matrix.reshape(ROWS, columns))
received = cuda.device_array((comm.size, ROWS, ROWS), np.float32)
block = MPI.FLOAT.Create_vector(ROWS, ROWS, columns).Create_resized(0, 4 * ROWS)
block.Commit()
comm.Alltoall([mine, 1, block], [received, ROWS * ROWS, MPI.FLOAT])
block.Free()
transposed = cuda.device_array((ROWS, columns), np.float32)
turn_blocks[1, ROWS](received, transposed)

wanted = np.arange(columns * columns, dtype=np.float32).reshape(columns, columns).T
right = np.array_equal(transposed.copy_to_host(), wanted[first : first + ROWS])
if comm.allreduce(right, op=MPI.LAND) and comm.rank == 0:
    print("transposed", columns, "x", columns)
