"""Solve a linear system with the matrix (-1, 2, -1) by conjugate gradients.

Each rank has a part of the vectors. The product with the matrix needs one element of
each neighbour; the scalar products are reductions over all ranks.
"""

import numpy as np
from mpi4py import MPI
from numba import config, cuda

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # the problem is small on purpose

COUNT, STEPS = 12, 5  # elements of each rank

comm = MPI.COMM_WORLD


@cuda.jit
def product(p, halo, q):
    """Compute q = A p; ``halo`` has the neighbours' elements."""
    i = cuda.grid(1)
    if i < p.size:
        left = p[i - 1] if i > 0 else halo[0]
        right = p[i + 1] if i < p.size - 1 else halo[1]
        q[i] = 2.0 * p[i] - left - right


@cuda.jit
def dot(a, b, out):
    """Compute this rank's part of a scalar product."""
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    out[0] = total


@cuda.jit
def update(x, r, p, q, sums):
    """Go along p: x += alpha p, r -= alpha q; sums has r.r and p.q."""
    i = cuda.grid(1)
    if i < x.size:
        alpha = sums[0] / sums[1]
        x[i] += alpha * p[i]
        r[i] -= alpha * q[i]


@cuda.jit
def turn(p, r, sums):
    """Choose the next direction; sums has the old and the new r.r."""
    i = cuda.grid(1)
    if i < p.size:
        p[i] = r[i] + sums[2] / sums[0] * p[i]


left = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
right = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
x, q = cuda.to_device(np.zeros(COUNT)), cuda.to_device(np.zeros(COUNT))
r, p = cuda.to_device(np.ones(COUNT)), cuda.to_device(np.ones(COUNT))
halo, sums = cuda.to_device(np.zeros(2)), cuda.to_device(np.zeros(3))


def scalar_product(a, b, out):
    """Compute a scalar product over all ranks."""
    dot[1, 1](a, b, out)
    cuda.synchronize()  # mpi4py does not wait for streams
    comm.Allreduce(MPI.IN_PLACE, out)


for _ in range(STEPS):
    requests = [comm.Irecv(halo[:1], left), comm.Irecv(halo[1:], right)]
    requests += [comm.Isend(p[:1], left), comm.Isend(p[COUNT - 1 :], right)]
    MPI.Request.Waitall(requests)
    product[1, COUNT](p, halo, q)
    scalar_product(r, r, sums[:1])
    scalar_product(p, q, sums[1:2])
    update[1, COUNT](x, r, p, q, sums)
    scalar_product(r, r, sums[2:])
    turn[1, COUNT](p, r, sums)
    cuda.synchronize()

whole = cuda.device_array(comm.size * COUNT)
comm.Allgather(x, whole)
if comm.rank == 0:
    print("residual", float(sums.copy_to_host()[2]))
    print("sum", float(whole.copy_to_host().sum()))
