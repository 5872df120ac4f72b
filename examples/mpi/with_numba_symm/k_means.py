"""Cluster points, which are distributed over the ranks, with k-means."""

import numpy as np
from numba import config, cuda

from numba_symm import mpi as MPI

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # the problem is small on purpose

POINTS, CENTRES, STEPS = 40, 3, 5  # points of each rank

comm = MPI.Comm(MPI.COMM_WORLD)


@cuda.jit
def assign(points, centres, nearest):
    """Find each point's nearest centre."""
    i = cuda.grid(1)
    if i < points.shape[0]:
        best = 0
        least = 1e30
        for k in range(centres.shape[0]):
            x = points[i, 0] - centres[k, 0]
            y = points[i, 1] - centres[k, 1]
            if x * x + y * y < least:
                best = k
                least = x * x + y * y
        nearest[i] = best


@cuda.jit
def add_up(points, nearest, sums):
    """Add up the points of each centre, and count them."""
    k = cuda.grid(1)
    if k < sums.shape[0]:
        for j in range(3):
            sums[k, j] = 0.0
        for i in range(points.shape[0]):
            if nearest[i] == k:
                sums[k, 0] += points[i, 0]
                sums[k, 1] += points[i, 1]
                sums[k, 2] += 1.0


@cuda.jit
def move(centres, sums):
    """Move each centre to the mean of its points."""
    k = cuda.grid(1)
    if k < centres.shape[0] and sums[k, 2] > 0:
        centres[k, 0] = sums[k, 0] / sums[k, 2]
        centres[k, 1] = sums[k, 1] / sums[k, 2]


random = np.random.default_rng(comm.rank)
host = random.normal(size=(POINTS, 2)) + 4 * random.integers(0, CENTRES, (POINTS, 1))
points = cuda.to_device(host)
centres = cuda.to_device(host[:CENTRES])  # those of rank 0 count
nearest = cuda.to_device(np.zeros(POINTS, np.int32))
sums = cuda.to_device(np.zeros((CENTRES, 3)))
comm.Bcast(centres, root=0)
for _ in range(STEPS):
    assign[1, POINTS](points, centres, nearest)
    add_up[1, CENTRES](points, nearest, sums)
    cuda.synchronize()  # mpi4py does not wait for streams
    comm.Allreduce(MPI.IN_PLACE, sums)
    move[1, CENTRES](centres, sums)
if comm.rank == 0:
    for x, y in centres.copy_to_host():
        print("centre", float(x), float(y))
