"""Multiply matrices and add up the products of all ranks, tile by tile in one kernel.

    numba-symm run -n 4 examples/row_parallel.py

In a layer whose weights are divided by rows, each rank has some columns of the input
and the same rows of the weights. The layer's output is the sum of all ranks' products,
plus a bias, without negative elements. Here, one kernel computes that: it starts the
sum of a tile over all ranks, computes its next tile, and then waits for the sum.

Two other versions compute the same:

- a kernel for the product, a host call for the sum, and a kernel for the rest
- the same with an epilogue of the host call instead of the last kernel

Numba takes tens of microseconds to launch a kernel. So all are timed in CUDA graphs,
too, without that time.
"""

import sys
import time

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED

SIDE = 2 if SIMULATED else 16  # a block has SIDE x SIDE threads, of 2 x 2 elements each
TILE, THREADS, ITEMS = 2 * SIDE, SIDE * SIDE, 4
ROWS, COLUMNS, INNER = (4, 24, 4) if SIMULATED else (128, 8192, 512)
BLOCKS = 2 if SIMULATED else 528
TIMES = 1 if SIMULATED else 100


@cuda.jit(device=True)
def fetch(a, b, row, column, first, ahead):
    """Load a thread's part of the elements that a block multiplies next."""
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    for i in range(ITEMS):
        ahead[0, i] = a[row + y + i // 2 * SIDE, first + x + i % 2 * SIDE]
        ahead[1, i] = b[first + y + i // 2 * SIDE, column + x + i % 2 * SIDE]


@cuda.jit(device=True)
def multiply(a, b, tile, held):
    """Compute a thread's elements of a tile of the product."""
    left = cuda.shared.array((TILE, TILE), np.float32)
    right = cuda.shared.array((TILE, TILE), np.float32)
    ahead = cuda.local.array((2, ITEMS), np.float32)  # a thread's part of the next ones
    x, y, across = cuda.threadIdx.x, cuda.threadIdx.y, b.shape[1] // TILE
    row, column = tile // across * TILE, tile % across * TILE
    for i in range(ITEMS):
        held[i] = np.float32(0)
    fetch(a, b, row, column, 0, ahead)
    for first in range(TILE, a.shape[1] + TILE, TILE):
        cuda.syncthreads()  # all have read, before the next elements are stored
        for i in range(ITEMS):
            left[y + i // 2 * SIDE, x + i % 2 * SIDE] = ahead[0, i]
            right[y + i // 2 * SIDE, x + i % 2 * SIDE] = ahead[1, i]
        cuda.syncthreads()
        if first < a.shape[1]:
            fetch(a, b, row, column, first, ahead)
        k = 0
        while k < TILE:  # unlike a range, this is unrolled
            upper, lower = left[y, k], left[y + SIDE, k]
            one, other = right[k, x], right[k, x + SIDE]
            held[0] += upper * one
            held[1] += upper * other
            held[2] += lower * one
            held[3] += lower * other
            k += 1


@cuda.jit(device=True)
def place(tile, columns, item):
    """Return the row and the column of a thread's element of a tile."""
    across = columns // TILE
    row = tile // across * TILE + cuda.threadIdx.y + item // 2 * SIDE
    return row, tile % across * TILE + cuda.threadIdx.x + item % 2 * SIDE


@cuda.jit(launch_bounds=(THREADS, 4))  # as many blocks fit as of the product alone
def fused(ws, a, b, bias, out):
    """Compute tiles; each tile's sum over the ranks travels during the next one."""
    held = cuda.local.array(ITEMS, np.float32)
    last = cuda.local.array(ITEMS, np.float32)
    blocks, tiles = cuda.gridDim.x, out.shape[0] // TILE * (out.shape[1] // TILE)
    for tile in range(cuda.blockIdx.x, tiles + blocks, blocks):
        if tile < tiles:
            multiply(a, b, tile, held)
            symm.all_reduce_start(ws, held, items=True)
        if tile >= blocks:
            if not symm.all_reduce_wait(ws, last, "sum", items=True):
                break  # in all threads of the block
            for i in range(ITEMS):
                row, column = place(tile - blocks, out.shape[1], i)
                out[row, column] = max(np.float32(0), last[i] + bias[column])
        for i in range(ITEMS):
            last[i] = held[i]


@cuda.jit
def product(a, b, out):
    """Compute the product of this rank alone."""
    held = cuda.local.array(ITEMS, np.float32)
    tiles = out.shape[0] // TILE * (out.shape[1] // TILE)
    for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
        multiply(a, b, tile, held)
        for i in range(ITEMS):
            row, column = place(tile, out.shape[1], i)
            out[row, column] = held[i]


def activated(value, bias):
    """Return an element of the output."""
    return max(np.float32(0), value + bias)


@cuda.jit
def rest(total, bias, out):
    """Compute the output from the sum of all ranks."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        row, column = i // out.shape[1], i % out.shape[1]
        out[row, column] = max(np.float32(0), total[row, column] + bias[column])


class Layer:
    """The arrays of one rank, and three ways to compute the layer."""

    def __init__(self, comm, world, columns):
        self.comm, self.world = comm, world
        lot = np.random.default_rng(7)
        # Integers, so that no order of additions changes the sums.
        inputs = lot.integers(-3, 4, (comm.size, ROWS, INNER)).astype(np.float32)
        weights = lot.integers(-3, 4, (comm.size, INNER, columns)).astype(np.float32)
        bias = lot.integers(-9, 10, columns).astype(np.float32)
        totals = sum(inputs[rank] @ weights[rank] for rank in range(comm.size))
        self.wanted = np.maximum(0, totals + bias)
        self.a = cuda.to_device(np.ascontiguousarray(inputs[comm.rank]))
        self.b = cuda.to_device(np.ascontiguousarray(weights[comm.rank]))
        self.bias, self.out = cuda.to_device(bias), comm.zeros((ROWS, columns))
        self.part = comm.zeros((ROWS, columns))
        self.tiles = ROWS // TILE * (columns // TILE)
        nbytes = 4 * ITEMS * THREADS
        self.ws = comm.device_workspace(BLOCKS, THREADS, nbytes, depth=2)
        self.blocks = 1
        self.by_kernel()  # compiles it
        # All blocks wait, so they must fit on the GPU. All ranks have as many.
        most = min(BLOCKS, self.tiles, comm.launch_limit(fused, THREADS))
        self.blocks = min(world.allgather(most))

    def by_kernel(self, stream=0):
        """Launch one kernel."""
        arrays = self.a, self.b, self.bias, self.out
        fused[self.blocks, (SIDE, SIDE), stream](self.ws.ctx, *arrays)

    def alone(self, stream=0):
        """Compute only the product of this rank."""
        product[self.tiles, (SIDE, SIDE), stream](self.a, self.b, self.part)

    def by_calls(self, stream=0):
        """Launch a kernel, reduce by a call of the host, and launch another kernel."""
        self.alone(stream)
        self.comm.all_reduce(self.part, out=self.part, stream=stream)
        rest[BLOCKS, THREADS, stream](self.part, self.bias, self.out)

    def by_epilogue(self, stream=0):
        """Launch a kernel, and make one call."""
        self.alone(stream)
        more = {"out": self.out, "epilogue": activated, "args": (self.bias,)}
        self.comm.all_reduce(self.part, stream=stream, **more)

    def checked(self, way):
        """Compute once and compare with NumPy's result."""
        self.out.copy_to_device(np.zeros_like(self.wanted))
        way()
        self.comm.synchronize()
        assert np.array_equal(self.out.copy_to_host(), self.wanted)

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
    world = MPI.COMM_WORLD
    columns = int(sys.argv[1]) if len(sys.argv) > 1 else COLUMNS
    with ns.Communicator(world) as comm:
        layer = Layer(comm, world, columns)
        ways = {"by a kernel": layer.by_kernel, "by calls": layer.by_calls}
        if not SIMULATED:
            ways["by a call with an epilogue"] = layer.by_epilogue
        text = f"rank {comm.rank} took these µs for {ROWS} x {columns} elements"
        for way in ways.values():
            layer.checked(way)
        for name, way in (ways | {"the product alone": layer.alone}).items():
            text += f"; {name} {layer.microseconds(way):.1f}"
            if not SIMULATED:
                text += f" (in a graph {layer.in_a_graph(way):.1f})"
        print(text)


if __name__ == "__main__":
    main()
