"""Solve Laplace's equation with Jacobi's method; one kernel also exchanges the halos.

    numba-symm run -n 4 examples/jacobi.py --picture field.png

Each rank has some rows of the plane, and each block of its kernel a band of these rows.
One launch computes all steps. After each step, a block announces its band to the blocks
beside it, with signals that count. If one of these blocks is on another rank, the block
first puts its border row into that rank's halo. So a block waits for two others only,
and no GPU waits for its host.

For comparison, two other versions launch a kernel for each step: with this library's
messages between the launches, and with mpi4py's messages of rows that the host copies.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI
from numba import config, cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # the simulated problem is small on purpose

ROWS, COLUMNS, STEPS = (8, 24, 10) if SIMULATED else (512, 2048, 500)  # of a rank
BLOCKS, THREADS = (2, 4) if SIMULATED else (64, 512)
WARM_UP = 2  # steps
TOP = 1  # the upper border; the others are 0
SHAPE = 2, ROWS + 2, COLUMNS  # old and new values, in turn; the first row is a halo
FROM_ABOVE, FROM_BELOW = 0, 1


@cuda.jit(device=True)
def relax(old, new, first, end):
    """Set the inner points of some rows to the mean of their neighbours."""
    for row in range(first, end):
        for column in range(1 + cuda.threadIdx.x, COLUMNS - 1, cuda.blockDim.x):
            above_and_below = old[row - 1, column] + old[row + 1, column]
            beside = old[row, column - 1] + old[row, column + 1]
            new[row, column] = (above_and_below + beside) * np.float32(0.25)


@cuda.jit
def relax_once(old, new):
    """Make one step of this rank's rows, a band in each block."""
    block, blocks = cuda.blockIdx.x, cuda.gridDim.x
    relax(old, new, 1 + block * ROWS // blocks, 1 + (block + 1) * ROWS // blocks)


@cuda.jit
def relax_all(ctx, steps, before):
    """Make all steps, after ``before`` steps of earlier launches."""
    block, blocks, thread = cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x
    first, end = 1 + block * ROWS // blocks, 1 + (block + 1) * ROWS // blocks
    above, block_above = ctx.rank, block - 1
    if block == 0:
        above, block_above = ctx.rank - 1, blocks - 1
    below, block_below = ctx.rank, block + 1
    if block == blocks - 1:
        below, block_below = ctx.rank + 1, 0
    has_above, has_below = above >= 0, below < ctx.size
    for step in range(steps):
        planes = symm.peer_array(ctx, ctx.rank, SHAPE, np.float32)
        old, new = planes[step % 2], planes[1 - step % 2]
        relax(old, new, first, end)
        # All threads have computed the band before it is copied or announced.
        cuda.syncthreads()
        if has_above and above != ctx.rank:
            there = symm.peer_array(ctx, above, SHAPE, np.float32)[1 - step % 2]
            symm.put_block(ctx, there[ROWS + 1], new[1])
        if has_below and below != ctx.rank:
            there = symm.peer_array(ctx, below, SHAPE, np.float32)[1 - step % 2]
            symm.put_block(ctx, there[0], new[ROWS])
        cuda.syncthreads()  # the copies, before the signals of one thread
        done = before + step + 1
        if thread == 0:
            # Each block has two channels, for the block above and the one below.
            if has_above:
                symm.signal_set(ctx, above, 2 * block_above + FROM_BELOW, done)
            if has_below:
                symm.signal_set(ctx, below, 2 * block_below + FROM_ABOVE, done)
        # The others have stored what the next step reads, and have read what it
        # overwrites. At the ends there is no other, whose number is negative.
        sources = above, below if has_below else -1
        channels = 2 * block + FROM_ABOVE, 2 * block + FROM_BELOW
        if not symm.wait_until_block(ctx, sources, channels, symm.GE, done):
            break


def in_the_kernel(comm, planes):
    """Return a function that makes steps by one launch."""
    ctx, before = comm.rendezvous(planes).ctx, 0
    relax_all[1, THREADS](ctx, 0, 0)  # compiles it
    # All blocks wait, so they must fit on the GPU. All ranks have as many.
    most = comm.launch_limit(relax_all, THREADS)
    blocks = MPI.COMM_WORLD.allreduce(min(BLOCKS, most), MPI.MIN)

    def run(steps):
        nonlocal before
        relax_all[blocks, THREADS](ctx, steps, before)
        before += steps

    return run


def by_messages(comm, planes):
    """Return a function that makes steps with this library's messages in between."""
    above = comm.rank - 1 if comm.rank > 0 else None
    below = comm.rank + 1 if comm.rank + 1 < comm.size else None
    halos = []
    for plane in planes[0], planes[1]:
        with comm.group_init() as halo:
            comm.send(plane[1], dst=above)
            comm.send(plane[ROWS], dst=below)
            comm.recv(plane[0], src=above)
            comm.recv(plane[ROWS + 1], src=below)
        halos.append(halo)

    def run(steps):
        for step in range(steps):
            old, new = step % 2, 1 - step % 2
            relax_once[BLOCKS, THREADS](planes[old], planes[new])
            halos[new]()

    return run


def through_the_host(comm, planes):
    """Return a function that makes steps with mpi4py's messages in between."""
    world = MPI.COMM_WORLD
    above = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    below = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    sent, received = np.zeros((2, 2, COLUMNS), np.float32)

    def run(steps):
        for step in range(steps):
            old, new = planes[step % 2], planes[1 - step % 2]
            relax_once[BLOCKS, THREADS](old, new)
            new[1].copy_to_host(sent[0])
            new[ROWS].copy_to_host(sent[1])
            world.Sendrecv(sent[0], above, recvbuf=received[1], source=below)
            world.Sendrecv(sent[1], below, recvbuf=received[0], source=above)
            if above != MPI.PROC_NULL:
                new[0].copy_to_device(received[0])
            if below != MPI.PROC_NULL:
                new[ROWS + 1].copy_to_device(received[1])

    return run


WAYS = {
    "in the kernel": in_the_kernel,
    "by messages": by_messages,
    "mpi4py through the host": through_the_host,
}


def start_plane(ranks):
    """Return the whole plane before the first step."""
    plane = np.zeros((ranks * ROWS + 2, COLUMNS), np.float32)
    plane[0] = TOP
    return plane


def expected(ranks):
    """Return the whole plane after all steps, computed by NumPy."""
    old = start_plane(ranks)
    new = old.copy()
    for _ in range(STEPS):
        sides = old[:-2, 1:-1] + old[2:, 1:-1], old[1:-1, :-2] + old[1:-1, 2:]
        new[1:-1, 1:-1] = (sides[0] + sides[1]) * np.float32(0.25)
        old, new = new, old
    return old


def draw(plane, image):
    """Draw the field; the image's suffix selects the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    picture = panel.imshow(plane, cmap="inferno", aspect="auto")
    figure.colorbar(picture, label="value")
    panel.set(title=f"after {STEPS} steps", xlabel="column", ylabel="row")
    figure.savefig(image, dpi=150)


def main():
    """Make the same steps in each way, compare the results, and print the times."""
    parser = argparse.ArgumentParser(description="Jacobi's method on several GPUs.")
    parser.add_argument("--picture", help="the file for a picture (needs matplotlib)")
    parser.add_argument("--only", choices=WAYS, help="run one way; without it, all")
    options = parser.parse_args()
    ways = {name: WAYS[name] for name in WAYS if options.only in (None, name)}
    world = MPI.COMM_WORLD
    seconds = {}
    with ns.Communicator(world) as comm:
        mine = np.s_[comm.rank * ROWS : (comm.rank + 1) * ROWS + 2]
        first, wanted = start_plane(comm.size)[mine], expected(comm.size)[mine]
        planes = comm.empty(SHAPE, np.float32)
        for name, way in ways.items():
            run = way(comm, planes)
            for steps in (WARM_UP, STEPS):
                planes.copy_to_device(np.stack([first, first]))
                comm.barrier()  # all ranks have the first plane
                comm.synchronize()
                started = time.perf_counter()
                run(steps)
                comm.synchronize()  # raises if a rank has failed
                cuda.synchronize()
                passed = time.perf_counter() - started
                comm.barrier()  # no rank starts anew before all have ended
                comm.synchronize()
            found = planes[STEPS % 2].copy_to_host()
            assert np.array_equal(found[1:-1], wanted[1:-1]), name
            seconds[name] = world.allreduce(passed, MPI.MAX)
        print(f"rank {comm.rank} has the rows that NumPy computes")
        rows = world.gather(found[1:-1])
    if comm.rank == 0:
        least = seconds[next(iter(seconds))]
        for name, passed in seconds.items():
            each = 1e6 * passed / STEPS
            print(f"{name}: {each:.1f} µs a step, factor {passed / least:.2f}")
        if options.picture:
            draw(np.concatenate(rows), options.picture)


if __name__ == "__main__":
    sys.exit(main())
