"""Kernels on the simulator's threads: barriers, blocks, failures, processes."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from numba_symm import simulator
from numba_symm.device import sim
from numba_symm.errors import ArgumentError
from tests.simulated.conftest import threads_without_teams

THREADS = 8


@pytest.fixture(autouse=True)
def hasty():
    """Let Python switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run(function, grid, *args):
    simulator.run(function, grid, (THREADS, 1), args)


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


def test_blocks_run_one_after_another_with_their_indices():
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


# Another module, whose ``cuda`` is the original one until the function is called.
elsewhere = types.ModuleType("elsewhere")
elsewhere.cuda = cuda
exec(
    "@cuda.jit(device=True)\ndef block_of_caller():\n    return cuda.blockIdx.x\n",
    vars(elsewhere),
)


def test_a_users_device_function_has_the_index_of_its_block():
    seen = []

    def kernel():
        seen.append(elsewhere.block_of_caller())

    run(kernel, 2)
    assert seen == [0] * THREADS + [1] * THREADS


@cuda.jit
def two_in_a_line(out):
    thread = cuda.threadIdx.x
    a, b = cuda.shared.array(4, np.int64), cuda.shared.array(4, np.int64)
    a[thread], b[thread] = thread, 10 + thread
    cuda.syncthreads()
    out[thread] = a[3 - thread] + 100 * b[3 - thread]


def of_one_factory(count, dtype):
    @cuda.jit(device=True)
    def shared():
        return cuda.shared.array(count, dtype)

    return shared


few, many = of_one_factory(2, np.int64), of_one_factory(4, np.int64)


@cuda.jit
def of_two_shapes(out):
    a, b = few(), many()
    out[0], out[1] = a.size, b.size


def test_shared_arrays_are_apart_as_on_a_gpu():
    out = cuda.to_device(np.zeros(4, np.int64))
    two_in_a_line[1, 4](out)
    assert out.copy_to_host().tolist() == [1303, 1202, 1101, 1000]
    of_two_shapes[1, 1](out)
    assert out.copy_to_host().tolist()[:2] == [2, 4]


@cuda.jit
def numbas(out):
    out[cuda.grid(1)] = cuda.gridsize(1) + elsewhere.block_of_caller()


def test_launches_of_several_threads_run_simultaneously():
    """Our launches run beside each other, Numba's, and a host thread that uses cuda."""
    blocks = 3, 3, 2
    synchronize = [threading.Barrier(n, timeout=300).wait for n in blocks]
    seen = {2: set(), 3: set()}

    def kernel(grid):
        shared = cuda.shared.array(1, np.int64)
        if cuda.threadIdx.x == 0:
            shared[0] = grid
            synchronize[cuda.blockIdx.x]()
        cuda.syncthreads()
        place = cuda.blockIdx.x, elsewhere.block_of_caller(), shared[0]
        seen[grid].add((*place, cuda.gridDim.x, cuda.blockDim.x))
        if cuda.threadIdx.x == 0:
            synchronize[cuda.blockIdx.x]()

    interval = sys.getswitchinterval()
    launches = [(2, 8), (3, 5)]
    threads = [
        threading.Thread(target=simulator.run, args=(kernel, grid, (size, 1), (grid,)))
        for grid, size in launches
    ]
    for thread in threads:
        thread.start()
    for block in range(3):
        synchronize[block]()
        x = cuda.to_device(np.zeros(6, np.int64))
        numbas[3, 2](x)
        assert x.copy_to_host().tolist() == [6, 6, 7, 7, 8, 8]
        synchronize[block]()
    for thread in threads:
        thread.join()
    for grid, size in launches:
        assert seen[grid] == {(block, block, grid, grid, size) for block in range(grid)}
    assert sys.getswitchinterval() == interval


def test_threads_switch_often_only_while_a_kernel_runs():
    before, seen = sys.getswitchinterval(), []

    def kernel():
        seen.append(sys.getswitchinterval())

    sys.setswitchinterval(5e-3)
    try:
        simulator.run(kernel, 1, (1, 1), ())
        assert (seen, sys.getswitchinterval()) == ([1e-3], 5e-3)
    finally:
        sys.setswitchinterval(before)


def test_threads_count_together():
    seen = []

    def kernel():
        if cuda.threadIdx.x < 4 + 4 * (cuda.blockIdx.x == 0):
            seen.append(cuda.syncthreads_count(cuda.threadIdx.x != 3))

    run(kernel, 2)
    assert seen == [7] * 8 + [3] * 4  # each block has its own count


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
    """Refuses notes, as a frozen dataclass does."""

    def add_note(self, note):
        raise TypeError(note)


@pytest.mark.parametrize("error", [SystemExit(3), Frozen(), KeyboardInterrupt()])
def test_any_exception_of_a_thread_ends_the_launch(error):
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
    """Return a kernel whose threads poll indefinitely, except one that may fail."""

    def kernel(fail):
        started.append(cuda.threadIdx.x)
        while not (fail and cuda.threadIdx.x == 1 and len(started) == THREADS):
            sim.poll_pause(0)
        raise ValueError("that went wrong")

    return kernel


def test_threads_that_poll_end_when_another_fails():
    before, started = threads_without_teams(), []
    with pytest.raises(ValueError, match="that went wrong"):
        run(polling(started), 1, True)
    assert len(started) == THREADS
    assert threads_without_teams() == before


def test_an_interrupt_ends_a_kernel():
    before, started = threads_without_teams(), []
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
    # A shell starts jobs in the background with this signal ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(polling(started), 1, False)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(started) == THREADS
    assert threads_without_teams() == before


def test_the_launching_thread_does_not_poll():
    def kernel():
        time.sleep(0.3)

    run(kernel, 1)
    before = time.thread_time()
    run(kernel, 1)
    assert time.thread_time() - before < 0.1


def test_arguments_are_released_after_the_launch():
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


def test_a_second_thread_launches_no_kernel_of_the_program():
    started, done = threading.Event(), threading.Event()
    first = cuda.jit(lambda: (started.set(), done.wait(300)))

    @cuda.jit
    def second(out):
        out[cuda.threadIdx.x] = 1

    out = np.zeros(2)
    thread = threading.Thread(target=first[1, 1])
    thread.start()
    assert started.wait(300)
    with pytest.raises(ArgumentError, match="second: expected one launch"):
        second[1, 2](out)
    run(lambda: None, 1)  # the library's kernels run beside it
    done.set()
    thread.join()
    second[1, 2](out)
    assert out.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_process_starts_its_own_threads():
    def kernel():
        cuda.syncthreads()

    run(kernel, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        run(kernel, 1)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


@cuda.jit
def pass_around_a_warp(out, mask):
    """In each step, load what the next thread of the warp has stored."""
    thread, lanes = cuda.threadIdx.x, min(32, cuda.blockDim.x)
    held = cuda.shared.array(64, np.int64)
    held[thread] = thread
    for _ in range(3):
        cuda.syncwarp(mask)
        found = held[thread // 32 * 32 + (thread + 1) % lanes]
        cuda.syncwarp(mask)
        held[thread] = found
    out[thread] = held[thread]


@pytest.mark.parametrize("threads", [1, 5, 64])
def test_a_warp_synchronizes_apart_from_the_others(threads):
    out = cuda.to_device(np.zeros(threads, np.int64))
    pass_around_a_warp[1, threads](out, 0xFFFFFFFF)
    lanes = min(threads, 32)
    wanted = [t // 32 * 32 + (t + 3) % lanes for t in range(threads)]
    assert out.copy_to_host().tolist() == wanted
    with pytest.raises(ArgumentError, match="syncwarp: expected the mask 0xFFFFFFFF"):
        pass_around_a_warp[1, threads](out, 1)


STRAY = """
from numba import cuda
import numba_symm as ns
from numba_symm import device as symm
from tests.simulated.conftest import Alone

@cuda.jit
def stray(ctx):
    symm.st_u32(symm.peer_address(ctx, 0) + (1 << 46), 1)

comm = ns.Communicator(Alone())
stray[1, 1](comm.rendezvous(comm.zeros(1)).ctx)
"""


def test_a_crash_by_a_stray_store_shows_its_line(tmp_path):
    program = tmp_path / "stray.py"
    program.write_text(STRAY)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode < 0
    assert f'File "{program}", line 9 in stray' in ended.stderr


def test_rows_of_threads_meet_at_barriers_of_their_own():
    arrived, found = Counter(), []  # += of a count would lose some
    others_ended = threading.Event()

    def kernel():
        row = cuda.threadIdx.y
        if row == 1:  # no row waits for another
            assert others_ended.wait(300)
        for step in range(3):
            arrived[row, step, cuda.threadIdx.x] += 1
            sim.bar_sync(row, THREADS)
            # A copy, because threads of other rows change it.
            mine = [key for key in list(arrived) if key[:2] == (row, step)]
            assert len(mine) == THREADS
            here = row == 2 and sim.thread_index_x() == step
            found.append((row, step, sim.bar_red_or(row, THREADS, here)))
        if found.count((0, 2, False)) == found.count((2, 2, True)) == THREADS:
            others_ended.set()

    simulator.run(kernel, 1, (THREADS, 3), ())
    every = [(row, step) for row in range(3) for step in range(3)]
    assert Counter(found) == {(row, step, row == 2): THREADS for row, step in every}


def test_cuda_jit_accepts_the_options_that_it_has_on_a_gpu():
    options = {"max_registers": 40, "lto": False, "lineinfo": True, "fastmath": True}
    options |= {"forceinline": False, "extensions": [], "launch_bounds": (32, 2)}

    def store(out):
        out[cuda.threadIdx.x] = cuda.blockDim.x

    for kernel in (
        cuda.jit(**options)(store),
        cuda.jit("void(int64[:])", **options)(store),
        cuda.jit(store, **options | {"launch_bounds": 32}),
    ):
        out = cuda.to_device(np.zeros(32, np.int64))
        kernel[1, 32](out)
        assert out.copy_to_host().tolist() == [32] * 32
        with pytest.raises(ArgumentError, match=r"at most 32 threads.* got 33"):
            kernel[1, 33]
    with pytest.raises(TypeError, match="most_registers"):
        cuda.jit(most_registers=40)
