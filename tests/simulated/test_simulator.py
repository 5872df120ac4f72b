"""Kernels on the simulator's threads: barriers, blocks, failures, processes."""

import os
import threading

import pytest
from numba import cuda

from numba_symm import simulator
from numba_symm.device import Context, signals, sim
from numba_symm.errors import ArgumentError

THREADS = 8


def run(function, grid, *args):
    simulator.run(function, grid, THREADS, args)


def test_a_barrier_waits_for_every_thread():
    seen, late = [0] * THREADS, []

    def kernel(turns):
        thread = cuda.threadIdx.x
        for turn in range(turns):
            seen[thread] = turn
            cuda.syncthreads()
            late.extend(each for each in seen if each != turn)
            cuda.syncthreads()

    run(kernel, 1, 300)
    assert seen == [299] * THREADS
    assert late == []


def test_a_barrier_does_not_wait_for_threads_that_have_ended():
    done = []

    def kernel():
        for _ in range(cuda.threadIdx.x):
            cuda.syncthreads()
        done.append(cuda.threadIdx.x)

    for _ in range(20):
        run(kernel, 2)
    assert len(done) == 20 * 2 * THREADS
    assert {*done} == {*range(THREADS)}


def test_blocks_run_one_after_another_and_know_where_they_are():
    seen = []

    def kernel(base):
        place = base + cuda.blockIdx.x, cuda.threadIdx.x, sim.thread_index()
        seen.append((*place, cuda.gridDim.x, cuda.blockDim.x, sim.block_size()))

    for base in (0, 3):
        run(kernel, 3, base)
    assert [each[0] for each in seen] == [n for n in range(6) for _ in range(THREADS)]
    threads = [(n, n, 3, THREADS, THREADS) for n in range(THREADS)]
    for block in range(6):
        assert sorted(each[1:] for each in seen if each[0] == block) == threads


@cuda.jit(device=True)
def block_of_caller():
    return cuda.blockIdx.x


def test_a_users_device_function_sees_its_block():
    seen = []

    def kernel():
        seen.append(block_of_caller())

    run(kernel, 2)
    assert seen == [0] * THREADS + [1] * THREADS


def test_threads_count_together():
    seen = []

    def kernel():
        seen.append(cuda.syncthreads_count(cuda.threadIdx.x < 3))

    run(kernel, 1)
    assert seen == [3] * THREADS


@pytest.mark.parametrize("waiting", [False, True])
def test_a_failed_thread_fails_the_launch_and_not_the_next(waiting):
    ended = []

    def kernel(fail):
        if fail and cuda.threadIdx.x == 2 and cuda.blockIdx.x == 1:
            raise ValueError("that went wrong")
        if waiting:
            cuda.syncthreads()
        ended.append(cuda.blockIdx.x)

    with pytest.raises(ValueError, match="that went wrong") as caught:
        run(kernel, 3, True)
    assert caught.value.__notes__ == ["in thread 2 of block 1"]
    assert ended.count(0) == THREADS
    assert 2 not in ended
    ended.clear()
    run(kernel, 3, False)
    assert sorted(ended) == [0] * THREADS + [1] * THREADS + [2] * THREADS


def test_threads_stay_for_the_next_kernel():
    def kernel():
        pass

    run(kernel, 4)
    before = threading.active_count()
    for _ in range(10):
        run(kernel, 4)
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_process_has_threads_of_its_own():
    def kernel():
        cuda.syncthreads()

    run(kernel, 1)
    child = os.fork()
    if child == 0:
        run(kernel, 1)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize(
    ("dst", "channel"), [(0, signals.MAX_CHANNELS), (0, -1), (2, 0), (-1, 0)]
)
def test_signals_that_a_gpu_would_write_anywhere_are_refused(dst, channel):
    ctx = Context(0, 2, (0, 0), (0, 0), None)

    def kernel():
        signals.put_signal(ctx, dst, channel)

    with pytest.raises(ArgumentError, match=r"ranks 0 to 1 and channels 0 to 127"):
        run(kernel, 1)
