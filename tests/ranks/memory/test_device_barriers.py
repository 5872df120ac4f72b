"""Barriers of grids and teams in a user's own kernels, and the limit of blocks."""

import re

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island

pytestmark = of_one_island

THREADS, ROUNDS = 4, 4


@cuda.jit
def sum_over_all(ctx, blocks, rounds, out):
    """In each step, every block of every rank adds, and then all see the sum."""
    sums = symm.peer_array(ctx, ctx.rank, (rounds, ctx.size, blocks), np.int64)
    block = cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
    for step in range(rounds):
        if cuda.threadIdx.x < ctx.size:
            there = symm.peer_array(
                ctx,
                cuda.threadIdx.x,
                (rounds, ctx.size, blocks),
                np.int64,
            )
            there[step, ctx.rank, block] = 100 * step + 10 * ctx.rank + block + 1
        token = symm.grid_barrier_arrive(ctx, 7)
        passed = symm.grid_barrier_wait(ctx, 7, token)
        if cuda.threadIdx.x == 0:
            total = 0
            for r in range(ctx.size):
                for other in range(blocks):
                    total += sums[step, r, other]
            out[step, block] = total if passed else -1
        if not symm.grid_barrier(ctx, 7):
            break


@cuda.jit
def sum_over_teams(ctx, row, column, out):
    """Add along the rows of a mesh, then along its columns."""
    thread = cuda.threadIdx.x
    mine = symm.peer_array(ctx, ctx.rank, 16, np.int64)
    # A rank sees its row's sums only after the first barrier of its column.
    for k in range(thread, row.size, cuda.blockDim.x):
        symm.peer_array(ctx, row.ranks[k], 16, np.int64)[row.place] = ctx.rank + 1
    passed = symm.barrier(ctx, 1, row)
    total = 0
    for k in range(row.size):
        total += mine[k]
    for k in range(thread, column.size, cuda.blockDim.x):
        there = symm.peer_array(ctx, column.ranks[k], 16, np.int64)
        there[8 + column.place] = total
    arrived = symm.barrier_arrive(ctx, 2, column)
    passed = symm.barrier_wait(ctx, 2, arrived, column) and passed
    if thread == 0:
        out[0] = total
        out[1] = 0
        for k in range(column.size):
            out[1] += mine[8 + k]
        out[2] = passed
    symm.grid_barrier(ctx, 3, column)


def zeros(shape):
    return cuda.to_device(np.zeros(shape, np.int64))


@pytest.mark.parametrize("grid", [1, 3, (2, 2)], ids=str)
def test_all_blocks_of_all_ranks_meet(comm, world, grid):
    blocks, ranks = int(np.prod(grid)), np.arange(comm.size)
    memory = comm.rendezvous(comm.zeros((ROUNDS, comm.size, blocks), np.int64))
    steps = np.arange(ROUNDS)[:, None, None]
    values = 100 * steps + 10 * ranks[:, None] + np.arange(blocks) + 1
    wanted = values.sum((1, 2))[:, None] + np.zeros(blocks, int)
    for _ in range(2):  # the next launch continues with the channel
        out = zeros((ROUNDS, blocks))
        sum_over_all[grid, THREADS](memory.ctx, blocks, ROUNDS, out)
        comm.synchronize()
        assert get(out).tolist() == wanted.tolist()
    world.barrier()


def test_rows_and_columns_of_a_mesh_meet(comm, world):
    columns = 2 if comm.size % 2 == 0 else comm.size
    memory, out = comm.rendezvous(comm.zeros(16, np.int64)), zeros(3)
    row, column = (
        make(memory.ctx, columns) for make in (symm.Team.row, symm.Team.column)
    )
    sum_over_teams[1, THREADS](memory.ctx, row, column, out)
    comm.synchronize()
    rows = np.arange(1, comm.size + 1).reshape(-1, columns).sum(1)
    assert get(out).tolist() == [rows[comm.rank // columns], rows.sum(), 1]
    world.barrier()


def test_teams_know_their_ranks(comm):
    ctx, last = comm.rendezvous(comm.zeros(1)).ctx, comm.size - 1
    ends = list(dict.fromkeys([last, 0]))
    team = symm.Team.of(ctx, ends)
    assert team == (ends.index(comm.rank) if comm.rank in ends else -1, *team[1:])
    assert team[1:] == (len(ends), tuple(ends))
    team = symm.Team.masked(ctx, 1 << last | 1)
    assert team.ranks == tuple(sorted(ends))
    assert symm.Team.strided(ctx, last, -1, comm.size).place == last - comm.rank
    for ranks in ([], [0, 0], [comm.size], [-1], [0.0]):
        with pytest.raises(ns.ArgumentError, match="expected different ranks from 0"):
            symm.Team.of(ctx, ranks)
    for columns in (0, comm.size + 1, 1.0):
        with pytest.raises(ns.ArgumentError, match="columns that divides"):
            symm.Team.row(ctx, columns)


@cuda.jit
def wait_for_the_absent(ctx, found):
    if cuda.blockIdx.x + 1 < cuda.gridDim.x or ctx.rank > 0:
        passed = symm.grid_barrier(ctx, 4)
        if cuda.threadIdx.x == 0:
            found[cuda.blockIdx.x] = passed


def test_a_block_that_does_not_come_ends_all_waits(world):
    comm = ns.Communicator(world, timeout=0.3)
    memory = comm.rendezvous(comm.zeros(1, np.int64))
    found = cuda.to_device(np.full(3, 7))
    wait_for_the_absent[3, 2](memory.ctx, found)
    text = r"waited for rank \d in grid_barrier, channel 4 .* does not fit on its GPU"
    with pytest.raises(ns.CollectiveTimeout, match=text):
        comm.synchronize()
    assert get(found).tolist() == [0, 0, 0 if comm.rank else 7]
    world.barrier()
    comm.close()


def test_the_limit_of_blocks_that_wait(comm, world):
    memory, blocks = comm.rendezvous(comm.zeros(6, np.int64)), 1
    sum_over_all[1, THREADS](memory.ctx, blocks, 1, zeros((1, 1)))  # compiles it
    limits = [comm.launch_limit(sum_over_all, threads) for threads in (1024, 128)]
    assert 1 <= limits[0] < limits[1]
    if SIMULATED:
        assert limits == [1, 8]
    for threads in (0, 1025, 1.5):
        with pytest.raises(ns.ArgumentError, match="integer from 1 to 1024, got"):
            comm.launch_limit(sum_over_all, threads)
    with pytest.raises(ns.ArgumentError, match=r"a kernel of cuda\.jit, got func"):
        comm.launch_limit(zeros, 32)
    world.barrier()


@cuda.jit
def misuse(ctx, team):
    symm.grid_barrier(ctx, 1, team)


@pytest.mark.skipif(not SIMULATED, reason="a GPU checks this in debug mode only")
def test_misuse_is_refused(comm):
    ctx = comm.rendezvous(comm.zeros(1, np.int64)).ctx
    larger = symm.Context(comm.rank, comm.size + 1, (), (), None)
    wrong = [symm.Team.of(larger, [comm.rank, comm.size]), [comm.rank]]
    if comm.size > 1:
        right = (comm.rank + 1) % comm.size
        wrong.append(symm.Team.of(ctx, [right]))
        of_another = symm.Context(right, comm.size, (), (), None)
        wrong.append(symm.Team.of(of_another, range(comm.size)))
    for team in wrong:
        text = re.escape(f"a team of this rank, {comm.rank}, or None, got {team!r}; ")
        with pytest.raises(ns.ArgumentError, match=text):
            misuse[1, 1](ctx, team)
    text = "at most 1024 threads in the simulator, got 5 blocks of 256; launch fewer"
    with pytest.raises(ns.ArgumentError, match=f"grid_barrier: .* {text}"):
        misuse[5, 256](ctx, None)
    comm.barrier()
