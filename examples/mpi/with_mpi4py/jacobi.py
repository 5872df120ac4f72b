"""Solve Laplace's equation with Jacobi's method; each rank has some rows of the plane.

Neighbours exchange their border rows in each step. The upper border of the plane is 1,
the others are 0.
"""

import numpy as np
from mpi4py import MPI
from numba import config, cuda

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # the problem is small on purpose

ROWS, COLUMNS, STEPS = 6, 8, 20  # rows of each rank

comm = MPI.COMM_WORLD


@cuda.jit
def step(old, new, changes):
    """Set each inner point to the mean of its neighbours; note the largest change."""
    row = cuda.grid(1) + 1
    if row < old.shape[0] - 1:
        largest = 0.0
        for column in range(1, old.shape[1] - 1):
            value = 0.25 * (
                old[row - 1, column]
                + old[row + 1, column]
                + old[row, column - 1]
                + old[row, column + 1]
            )
            largest = max(largest, abs(value - old[row, column]))
            new[row, column] = value
        changes[row - 1] = largest


grid = comm.Create_cart([comm.size], periods=[False])
above, below = grid.Shift(0, 1)
plane = np.zeros((ROWS + 2, COLUMNS))
if above == MPI.PROC_NULL:
    plane[0] = 1
old, new = cuda.to_device(plane), cuda.to_device(plane)
changes = cuda.to_device(np.zeros(ROWS))
change = cuda.to_device(np.zeros(ROWS))
for _ in range(STEPS):
    grid.Sendrecv(old[1], above, recvbuf=old[ROWS + 1], source=below)
    grid.Sendrecv(old[ROWS], below, recvbuf=old[0], source=above)
    step[1, ROWS](old, new, changes)
    cuda.synchronize()  # mpi4py does not wait for streams
    grid.Allreduce(changes, change, op=MPI.MAX)
    old, new = new, old

everything = (
    cuda.device_array((comm.size, ROWS + 2, COLUMNS)) if comm.rank == 0 else None
)
comm.Gather(old, everything)
if comm.rank == 0:
    print("change", float(change.copy_to_host().max()))
    print("sum", float(everything.copy_to_host()[:, 1:-1].sum()))
