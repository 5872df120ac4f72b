"""Fuse an all-reduce with the addition of a residual and an RMS norm.

    numba-symm run -n 4 examples/rms_norm.py

In a model that several GPUs compute together, each rank has a part of a layer's sum.
The next layer needs the sum of all parts plus the residual, and its rows divided by
their root mean square. Here, this is one call, whose epilogue consists of two functions
of an element.

Three other versions compute the same:

- a kernel of this program with the all-reduce in it. A block takes a row: each thread
  adds up its items of all ranks in registers, and stores none of them in between
- a host call, with a kernel for the rest
- MPI through the host's memory, with that kernel

Numba takes tens of microseconds to launch a kernel. So the first three are timed in
CUDA graphs, too, without that time.
"""

import argparse
import math
import time

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED

BLOCKS, THREADS = (2, 4) if SIMULATED else (16, 512)
ITEMS = 4 if SIMULATED else 8  # elements of a row that a thread holds
ROWS, WIDTH = (3, THREADS * ITEMS) if SIMULATED else (64, THREADS * ITEMS)
TIMES = 1 if SIMULATED else 50
EPSILON = np.float32(1e-6)


def squared(value, residual, weight):
    """Return what is summed over a row."""
    return (value + residual) * (value + residual)


def normalized(value, total, residual, weight):
    """Return the normalized element, and the new residual."""
    updated = value + residual
    mean = total / np.float32(WIDTH) + EPSILON
    return updated * weight / np.float32(math.sqrt(mean)), updated


@cuda.jit(device=True)
def normalize(held, residual, weight, out, row, partial):
    """Add the residual to a thread's items of a row, and store their norm."""
    thread = cuda.threadIdx.x
    squares = np.float32(0)
    for i in range(ITEMS):
        held[i] += residual[row, thread * ITEMS + i]
        residual[row, thread * ITEMS + i] = held[i]
        squares += held[i] * held[i]
    partial[thread] = squares
    cuda.syncthreads()
    distance = THREADS // 2
    while distance > 0:
        if thread < distance:
            partial[thread] += partial[thread + distance]
        cuda.syncthreads()
        distance //= 2
    scale = np.float32(1) / np.float32(
        (partial[0] / np.float32(WIDTH) + EPSILON) ** np.float32(0.5)
    )
    for i in range(ITEMS):
        at = thread * ITEMS + i
        out[row, at] = held[i] * scale * weight[at]
    cuda.syncthreads()  # all have read the sum before the next row's


@cuda.jit
def fused(ws, x, residual, weight, out):
    """Reduce over all ranks, add the residual and normalize, row by row."""
    held = cuda.local.array(ITEMS, np.float32)
    partial = cuda.shared.array(THREADS, np.float32)
    for row in range(cuda.blockIdx.x, ROWS, cuda.gridDim.x):
        for i in range(ITEMS):
            held[i] = x[row, cuda.threadIdx.x * ITEMS + i]
        if not symm.all_reduce(ws, held, "sum", items=True):
            break  # in all threads of the block
        normalize(held, residual, weight, out, row, partial)


@cuda.jit
def rest(total, residual, weight, out):
    """Do the same with the sum of all ranks."""
    held = cuda.local.array(ITEMS, np.float32)
    partial = cuda.shared.array(THREADS, np.float32)
    for row in range(cuda.blockIdx.x, ROWS, cuda.gridDim.x):
        for i in range(ITEMS):
            held[i] = total[row, cuda.threadIdx.x * ITEMS + i]
        normalize(held, residual, weight, out, row, partial)


def by_numpy(parts, residual, weight):
    """Return the new residual and the result."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part  # in rank order, as all ranks reduce
    total = total + residual
    mean = (total.astype(np.float64) ** 2).mean(1, keepdims=True)
    return total, total / np.sqrt(mean + EPSILON) * weight


class Layer:
    """The arrays of one rank, and four ways to compute the layer."""

    def __init__(self, comm, world):
        self.comm, self.world = comm, world
        lot = np.random.default_rng(1)
        shape = comm.size, ROWS, WIDTH
        self.parts = lot.standard_normal(shape).astype(np.float32)
        self.before = lot.standard_normal(shape[1:]).astype(np.float32)
        self.factors = lot.standard_normal(WIDTH).astype(np.float32)
        self.x = cuda.to_device(self.parts[comm.rank])
        self.total = cuda.device_array_like(self.x)
        self.residual = cuda.to_device(self.before)
        self.weight = cuda.to_device(self.factors)
        self.out = cuda.device_array_like(self.x)
        self.host = self.parts[comm.rank].copy()
        nbytes = 4 * THREADS * ITEMS
        self.ws = comm.device_workspace(BLOCKS, THREADS, nbytes)

    def by_epilogue(self, stream=0):
        """Make one call."""
        args = self.residual, self.weight
        functions = {"epilogue": normalized, "row_sum": squared, "args": args}
        out = self.out, self.residual
        self.comm.all_reduce(self.x, out=out, stream=stream, **functions)

    def by_kernel(self, stream=0):
        """Launch one kernel."""
        arrays = self.x, self.residual, self.weight, self.out
        fused[BLOCKS, THREADS, stream](self.ws.ctx, *arrays)

    def by_calls(self, stream=0):
        """Reduce by a call of the host, and launch a kernel for the rest."""
        self.comm.all_reduce(self.x, out=self.total, stream=stream)
        rest[BLOCKS, THREADS, stream](self.total, self.residual, self.weight, self.out)

    def through_the_host(self):
        """Copy the data to the host, reduce there by MPI, and copy it back."""
        self.x.copy_to_host(self.host)
        self.world.Allreduce(MPI.IN_PLACE, self.host)
        self.total.copy_to_device(self.host)
        rest[BLOCKS, THREADS](self.total, self.residual, self.weight, self.out)

    def checked(self, way):
        """Compute once and compare with NumPy's result."""
        self.residual.copy_to_device(self.before)
        way()
        self.comm.synchronize()
        residual, out = by_numpy(self.parts, self.before, self.factors)
        close = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(self.residual.copy_to_host(), residual, **close)
        np.testing.assert_allclose(self.out.copy_to_host(), out, **close)

    def microseconds(self, way):
        """Return the time of one computation, of several in a row."""
        self.world.Barrier()
        start = time.perf_counter()
        for _ in range(TIMES):
            way()
        self.comm.synchronize()
        return (time.perf_counter() - start) * 1e6 / TIMES

    def in_a_graph(self, way):
        """Return the same, of computations that are captured in one graph."""
        from cuda.core import Device  # the simulator has no graphs

        stream = Device().create_stream()
        with cuda.defer_cleanup():  # Numba frees no memory during the capture
            builder = stream.create_graph_builder().begin_building()
            for _ in range(TIMES):
                way(cuda.external_stream(int(builder.stream.handle)))
            graph = builder.end_building().complete()

        def replay():
            graph.launch(stream)
            self.comm.synchronize(stream)

        replay()
        self.world.Barrier()
        start = time.perf_counter()
        replay()
        return (time.perf_counter() - start) * 1e6 / TIMES


def main():
    """Compute and check the layer in each way, and compare the times."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", nargs="+", help="compute in these ways; else in all")
    only = parser.parse_args().only
    world = MPI.COMM_WORLD
    with ns.Communicator(world) as comm:
        layer = Layer(comm, world)
        ways = {
            "by an epilogue": layer.by_epilogue,
            "by a kernel": layer.by_kernel,
            "by a call and a kernel": layer.by_calls,
            "through the host": layer.through_the_host,
        }
        text = f"rank {comm.rank} took these µs for {ROWS} rows"
        for name in only or ways:
            way = ways[name]
            layer.checked(way)
            text += f"; {name} {layer.microseconds(way):.1f}"
            if not SIMULATED and way != layer.through_the_host:
                text += f" (in a graph {layer.in_a_graph(way):.1f})"
        print(text)


if __name__ == "__main__":
    main()
