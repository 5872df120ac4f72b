"""Blocks of a program's kernels, which run together where they wait."""

import math
import threading

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm import simulator
from numba_symm.errors import ArgumentError
from tests.simulated.conftest import threads_without_teams


@cuda.jit
def pass_down(ctx, out):
    """Each block waits for the one after it, then signals the one before it."""
    block, blocks = cuda.blockIdx.x, cuda.gridDim.x
    if cuda.threadIdx.x == 0:
        if block + 1 < blocks:
            symm.wait_signal(ctx, 0, block + 1)
            out[block] = out[block + 1]
        out[block] += 1
        if block > 0:
            symm.put_signal(ctx, 0, block)


@cuda.jit
def poll_by_loads(ctx, order):
    """The first block polls by loads until the last one has stored."""
    flag = symm.peer_address(ctx, 0)
    if cuda.blockIdx.x == cuda.gridDim.x - 1:
        symm.st_release_sys_u32(flag, 7)
    while symm.ld_acquire_sys_u32(flag) != 7:
        pass
    order.append(cuda.blockIdx.x)


def test_blocks_wait_for_later_blocks(comm):
    ctx = comm.rendezvous(comm.zeros(2, np.uint32)).ctx
    for blocks in (2, 5):
        out = np.zeros(blocks, np.int64)
        pass_down[blocks, 2](ctx, out)
        assert out.tolist() == [*range(blocks, 0, -1)]
    order = []
    poll_by_loads[3, 1](ctx, order)
    assert sorted(order) == [0, 1, 2]
    comm.check()


@cuda.jit
def call_in_one_thread_of_a_warp(ctx, others_wait):
    if cuda.threadIdx.x == 0:
        box = symm.peer_array(ctx, 0, 4, np.uint64)
        symm.get_packets_warp(ctx, 0, box[:0], box, 1)
    if others_wait:
        cuda.syncthreads()


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_warp_that_is_not_complete_is_an_error(comm, others_wait):
    """On a GPU, it may wait indefinitely."""
    ctx = comm.rendezvous(comm.zeros(4, np.uint64)).ctx
    with pytest.raises(ArgumentError, match=r"thread of the warp to call it, got \d"):
        call_in_one_thread_of_a_warp[1, 3](ctx, others_wait)


@cuda.jit
def wait_for_the_last_block(ctx):
    if cuda.blockIdx.x == 0:
        symm.wait_signal(ctx, 0, 3)
    elif cuda.blockIdx.x < cuda.gridDim.x - 1:
        symm.wait_signal(ctx, 0, 4)
    else:
        symm.put_signal(ctx, 0, 3)


@pytest.mark.parametrize("blocks", [6, 1])
def test_a_timeout_of_a_wait_for_too_late_a_block_has_the_reason(
    comm, blocks, monkeypatch
):
    monkeypatch.setattr(simulator, "MOST_THREADS", 4)
    memory = comm.rendezvous(comm.empty(1))
    wait_for_the_last_block[blocks, 1](memory.ctx)
    with pytest.raises(ns.CollectiveTimeout, match=r"signal, channel \d ") as raised:
        comm.check()
    explained = "so 2 of its blocks start only after others" in str(raised.value)
    assert explained == (blocks == 6)


@cuda.jit
def note_threads(seen):
    cuda.syncthreads()
    seen.append(threading.get_ident())


def test_blocks_that_do_not_wait_for_others_use_the_threads_of_one():
    seen = []
    note_threads[30, 4](seen)
    assert len(seen) == 30 * 4
    # A block may start while the threads of the one before it leave their barrier.
    assert len(set(seen)) <= 3 * 4


@cuda.jit
def fail_in_the_last_block(ended):
    grid = cuda.cg.this_grid()
    if cuda.blockIdx.x == cuda.gridDim.x - 1 and cuda.threadIdx.x == 1:
        raise ValueError("that went wrong")
    grid.sync()
    ended.append(cuda.blockIdx.x)


def test_a_failure_of_one_block_ends_those_that_wait_for_it():
    before, ended = threads_without_teams(), []
    with pytest.raises(ValueError, match="that went wrong") as caught:
        fail_in_the_last_block[(3, 2), 2](ended)
    assert caught.value.__notes__ == ["in thread (1, 0, 0) of block (2, 0, 0)"]
    assert ended == []
    assert threads_without_teams() == before


@cuda.jit
def sum_over_the_grid(x, steps):
    """In each step, every thread adds, and then sees what all have added."""
    grid = cuda.cg.this_grid()
    block = cuda.shared.array(1, np.int64)
    for step in range(steps):
        block[0] = cuda.blockIdx.x
        cuda.atomic.add(x, step, 1)
        grid.sync()
        found = x[step]
        cuda.atomic.max(x, steps, found)
        cuda.atomic.min(x, steps + 1, found)
        assert block[0] == cuda.blockIdx.x  # no two blocks share it


@pytest.mark.parametrize("blocks", [1, 3, (2, 2, 1)], ids=str)
def test_grids_synchronize(blocks):
    x = np.zeros(7, np.int64)
    x[6] = 99
    sum_over_the_grid[blocks, 4](x, 5)
    threads = 4 * math.prod(np.atleast_1d(blocks))
    assert x.tolist() == [threads] * 7


def test_grids_that_cannot_run_together_do_not_synchronize():
    sum_over_the_grid[1, 4](np.zeros(7, np.int64), 1)
    most = sum_over_the_grid.overloads[()].max_cooperative_grid_blocks(256)
    assert most == 4
    text = r"at most 1024 threads in the simulator, got 5 blocks of 256; launch fewer"
    with pytest.raises(ArgumentError, match=text):
        sum_over_the_grid[most + 1, 256](np.zeros(7, np.int64), 1)
