"""Kernels on the simulator's threads: barriers, blocks, failures, processes."""

import gc
import os
import signal
import sys
import threading
import time
import types
import weakref

import pytest
from numba import cuda

from numba_symm import simulator
from numba_symm.device import Context, signals, sim
from numba_symm.errors import ArgumentError

THREADS = 8


@pytest.fixture(autouse=True)
def hasty():
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run(function, grid, *args):
    simulator.run(function, grid, THREADS, args)


def threads_without_teams():
    """Return how many threads there are but for those that wait for a kernel."""
    idle = sum(size * len(teams) for size, teams in simulator._idle.items())
    return threading.active_count() - idle


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


# In a module of its own, whose ``cuda`` nobody swaps before it is called.
elsewhere = types.ModuleType("elsewhere")
elsewhere.cuda = cuda
exec(
    "@cuda.jit(device=True)\ndef block_of_caller():\n    return cuda.blockIdx.x\n",
    vars(elsewhere),
)


def test_a_users_device_function_sees_its_block():
    seen = []

    def kernel():
        seen.append(elsewhere.block_of_caller())

    run(kernel, 2)
    assert seen == [0] * THREADS + [1] * THREADS


def test_threads_count_together():
    seen = []

    def kernel():
        if cuda.threadIdx.x < 4 + 4 * (cuda.blockIdx.x == 0):
            seen.append(cuda.syncthreads_count(cuda.threadIdx.x != 3))

    run(kernel, 2)
    assert seen == [7] * 8 + [3] * 4  # what block 0 counted is forgotten


@pytest.mark.parametrize("waiting", [False, True])
def test_a_failed_thread_fails_the_launch_and_not_the_next(waiting):
    ended, passed = [], []

    def kernel(fail):
        if fail and cuda.threadIdx.x == 2 and cuda.blockIdx.x == 1:
            raise ValueError("that went wrong")
        if waiting:
            cuda.syncthreads()
            passed.append(cuda.blockIdx.x)
        ended.append(cuda.blockIdx.x)

    before = threads_without_teams()
    with pytest.raises(ValueError, match="that went wrong") as caught:
        run(kernel, 3, True)
    assert caught.value.__notes__ == ["in thread 2 of block 1"]
    assert ended.count(0) == THREADS
    assert 2 not in ended
    assert 1 not in passed
    assert threads_without_teams() == before
    ended.clear()
    run(kernel, 3, False)
    assert sorted(ended) == [0] * THREADS + [1] * THREADS + [2] * THREADS


class Frozen(Exception):
    """Takes no notes, as a frozen dataclass does not."""

    def add_note(self, note):
        raise TypeError(note)


@pytest.mark.parametrize("error", [SystemExit(3), Frozen(), KeyboardInterrupt()])
def test_whatever_a_thread_raises_ends_the_launch(error):
    def kernel():
        if cuda.threadIdx.x == 5:
            raise error
        cuda.syncthreads()

    before = threads_without_teams()
    with pytest.raises(type(error)) as caught:
        run(kernel, 1)
    assert caught.value is error
    assert threads_without_teams() == before


def polling(started):
    """Return a kernel whose threads poll for what never comes, but for one."""

    def kernel(fail):
        started.append(cuda.threadIdx.x)
        while not (fail and cuda.threadIdx.x == 1 and len(started) == THREADS):
            sim.poll_pause()
        raise ValueError("that went wrong")

    return kernel


def test_threads_that_poll_end_when_another_fails():
    before, started = threads_without_teams(), []
    with pytest.raises(ValueError, match="that went wrong"):
        run(polling(started), 1, True)
    assert len(started) == THREADS
    assert threads_without_teams() == before


def test_an_interrupted_kernel_does_not_run_on():
    before, started = threads_without_teams(), []
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(polling(started), 1, False)
    timer.join()
    assert len(started) == THREADS
    assert threads_without_teams() == before


def test_a_refused_launch_keeps_no_threads():
    refused = []

    def inner():
        pass

    def kernel():
        if cuda.threadIdx.x == 0:
            try:
                run(inner, 1)
            except AssertionError as error:
                refused.append(error)

    run(kernel, 1)
    before = threading.active_count()
    for _ in range(3):
        run(kernel, 1)
    assert len(refused) == 4
    assert threading.active_count() == before


def test_the_number_of_threads_may_change():
    seen = []

    def kernel():
        seen.append(cuda.blockDim.x)
        cuda.syncthreads()

    for threads in (3, 8, 1, 3):
        simulator.run(kernel, 1, threads, ())
    assert seen == [3] * 3 + [8] * 8 + [1] + [3] * 3


def test_who_launches_does_not_poll():
    def kernel():
        time.sleep(0.3)

    run(kernel, 1)
    before = time.thread_time()
    run(kernel, 1)
    assert time.thread_time() - before < 0.1


def test_arguments_are_not_kept():
    class Kept:
        pass

    def kernel(kept):
        pass

    kept = Kept()
    left = weakref.ref(kept)
    run(kernel, 1, kept)
    del kept
    gc.collect()
    assert left() is None


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
        signal.alarm(20)
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
