"""Solve a linear system with conjugate gradients, in one kernel on each GPU.

    numba-symm run -n 4 examples/conjugate_gradient.py

The matrix has 2 + SHIFT on its diagonal and -1 beside it, and each rank has some of its
rows. An iteration needs two dot products over all ranks and the neighbours' elements at
the edges. Both are collectives within the kernel, so the host neither waits nor
launches anything between two iterations. All ranks get the same bits of each product,
so all of them end after the same iteration.

Each rank launches one block here. With several blocks, each would also need the
products of the others: see ``grid_barrier``.

With ``--residuals``, the program solves one system whose size does not depend on the
number of ranks, and prints the residual of each iteration. With ``comm.dot``, their
bits are the same on any number of ranks. With sums of each rank and an all-reduce, they
are not.
"""

import argparse

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED

THREADS = 8 if SIMULATED else 256  # a power of 2; each uses 184 registers
ROWS = 12 if SIMULATED else 8192  # of each rank
SHIFT = 1.0 if SIMULATED else 0.05
EDGES = 2 * 64  # of at most 64 ranks
TOLERANCE = 1e-10
MOST_ITERATIONS = 1000
ALL_ROWS = 60 if SIMULATED else 100_000  # of all ranks, with --residuals
PRINTED = 8  # iterations


@cuda.jit(device=True)
def dot(ws, a, b, partial):
    """Return whether it succeeded, and the dot product of two arrays of all ranks."""
    thread = cuda.threadIdx.x
    total = 0.0
    for i in range(thread, ROWS, THREADS):
        total += a[i] * b[i]
    cuda.syncthreads()  # the product before has been read
    partial[thread] = total
    cuda.syncthreads()
    distance = THREADS // 2
    while distance > 0:
        if thread < distance:
            partial[thread] += partial[thread + distance]
        cuda.syncthreads()
        distance //= 2
    good = symm.all_reduce(ws, partial[:1])
    return good, partial[0]


@cuda.jit(device=True)
def multiply(ws, p, q, edge, edges):
    """Store A·p in q; return whether the neighbours' edges of p have arrived."""
    thread, rank, size = cuda.threadIdx.x, ws.rank, ws.size
    cuda.syncthreads()  # p is complete
    if thread == 0:
        edge[0], edge[1] = p[0], p[ROWS - 1]
    if not symm.all_gather(ws, edge, edges[: 2 * size]):
        return False
    for i in range(thread, ROWS, THREADS):
        before = after = 0.0
        if i > 0:
            before = p[i - 1]
        elif rank > 0:
            before = edges[2 * rank - 1]
        if i < ROWS - 1:
            after = p[i + 1]
        elif rank < size - 1:
            after = edges[2 * rank + 2]
        q[i] = (2 + SHIFT) * p[i] - before - after
    return True


@cuda.jit
def solve(ws, x, r, p, q, iterations):
    """Solve A·x = r, from x = 0 on; store the number of iterations, or -1."""
    thread = cuda.threadIdx.x
    partial = cuda.shared.array(THREADS, np.float64)
    edge = cuda.shared.array(2, np.float64)
    edges = cuda.shared.array(EDGES, np.float64)
    for i in range(thread, ROWS, THREADS):
        x[i] = 0.0
        p[i] = r[i]
    good, now = dot(ws, r, r, partial)
    enough = now * TOLERANCE**2
    count = 0
    while good and now > enough and count < MOST_ITERATIONS:
        good = multiply(ws, p, q, edge, edges)
        if not good:
            break  # in all threads of the block
        good, curvature = dot(ws, p, q, partial)
        if not good:
            break
        step = now / curvature
        for i in range(thread, ROWS, THREADS):
            x[i] += step * p[i]
            r[i] -= step * q[i]
        good, after = dot(ws, r, r, partial)
        for i in range(thread, ROWS, THREADS):
            p[i] = r[i] + after / now * p[i]
        now = after
        count += 1
    if thread == 0:
        iterations[0] = count if good else -1


@cuda.jit
def add_products(a, b, partial):
    """Store the dot product of this rank's elements; one thread for each element."""
    i = cuda.grid(1)
    if i < a.size:
        cuda.atomic.add(partial, 0, a[i] * b[i])


@cuda.jit
def take_edges(p, edge):
    """Store the first and the last element."""
    edge[0], edge[1] = p[0], p[p.size - 1]


@cuda.jit
def apply(p, edges, rank, q):
    """Store A·p in q, with all ranks' edges of p; one thread for each element."""
    i = cuda.grid(1)
    if i < p.size:
        before = after = 0.0
        if i > 0:
            before = p[i - 1]
        elif rank > 0:
            before = edges[rank - 1, 1]
        if i < p.size - 1:
            after = p[i + 1]
        elif rank < edges.shape[0] - 1:
            after = edges[rank + 1, 0]
        q[i] = (2 + SHIFT) * p[i] - before - after


@cuda.jit
def descend(r, q, now, curvature):
    """Subtract a step along q from the residual; one thread for each element."""
    i = cuda.grid(1)
    if i < r.size:
        r[i] -= now[0] / curvature[0] * q[i]


@cuda.jit
def turn(p, r, now, after):
    """Store the next direction in p; one thread for each element."""
    i = cuda.grid(1)
    if i < p.size:
        p[i] = r[i] + after[0] / now[0] * p[i]


def residuals(comm, product):
    """Return the squared residuals of the first iterations.

    Args:
        comm: the communicator.
        product: ``product(a, b, out=…)`` stores a dot product over all ranks.
    """
    first, last = (ALL_ROWS * (comm.rank + k) // comm.size for k in (0, 1))
    r = cuda.to_device(np.random.default_rng(2).standard_normal(ALL_ROWS)[first:last])
    p, q = cuda.to_device(r), cuda.device_array_like(r)
    edge, edges = (cuda.device_array(n, np.float64) for n in (2, (comm.size, 2)))
    found, curvature = (cuda.device_array(n, np.float64) for n in (PRINTED + 1, 1))
    grid = -(-r.size // THREADS), THREADS
    product(r, r, out=found[:1])
    for k in range(PRINTED):
        now, after = found[k : k + 1], found[k + 1 : k + 2]
        take_edges[1, 1](p, edge)
        comm.all_gather(edge, out=edges)
        apply[grid](p, edges, comm.rank, q)
        product(p, q, out=curvature)
        descend[grid](r, q, now, curvature)
        product(r, r, out=after)
        turn[grid](p, r, now, after)
    comm.synchronize()
    return found.copy_to_host()


def print_residuals(comm):
    """Print the residuals with both kinds of sums, with all their bits."""

    def summed(a, b, out):
        out.copy_to_device(np.zeros(1))
        add_products[-(-a.size // THREADS), THREADS](a, b, out)
        comm.all_reduce(out, out=out)

    for name, product in ("comm.dot", comm.dot), ("an all-reduce", summed):
        found = " ".join(float(each).hex() for each in residuals(comm, product))
        if comm.rank == 0:
            print(f"residuals with {name}: {found}")


def main():
    """Solve a system whose solution is known."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--residuals", action="store_true", help="print those of another system"
    )
    given = parser.parse_args()
    with ns.Communicator(MPI.COMM_WORLD) as comm:
        if given.residuals:
            print_residuals(comm)
        else:
            solve_known(comm)


def solve_known(comm):
    """Solve the system in one kernel, and compare the solution."""
    wanted = np.random.default_rng(2).standard_normal(ROWS * comm.size)
    given = (2 + SHIFT) * wanted
    given[1:] -= wanted[:-1]
    given[:-1] -= wanted[1:]
    mine = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    r = cuda.to_device(given[mine])
    x, p, q = (cuda.device_array_like(r) for _ in range(3))
    iterations = cuda.to_device(np.zeros(1, np.int64))
    ws = comm.device_workspace(1, THREADS, 16)  # the edges
    solve[1, THREADS](ws.ctx, x, r, p, q, iterations)
    comm.synchronize()
    count = int(iterations.copy_to_host()[0])
    error = abs(x.copy_to_host() - wanted[mine]).max()
    assert 0 < count < MOST_ITERATIONS, count
    assert error < 1e-6, error
    print(f"rank {comm.rank} has its rows after {count} iterations, error {error}")


if __name__ == "__main__":
    main()
