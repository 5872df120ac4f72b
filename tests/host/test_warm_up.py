"""The thread that compiles device functions while a communicator is constructed."""

import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.collectives import kernel_set
from numba_symm.collectives.islands import construction
from numba_symm.collectives.kernel_set import first_kernel, while_constructing
from numba_symm.collectives.kernels import one_shot
from numba_symm.collectives.lifetime import Options
from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.device import compiler
from numba_symm.gpu import kernels
from numba_symm.gpu.kernels import Kernel

RANKS = 11  # no other test of this folder compiles for as many


@pytest.fixture
def compiled(monkeypatch):
    """Return which thread has compiled which device function or kernel."""
    found = []
    compile_it = compiler.compiled

    def compile_one(function, args, *options):
        result = compile_it(function, args, *options)
        found.append((threading.current_thread().name, function, args))
        return result

    monkeypatch.setattr(compiler, "compiled", compile_one)
    return found


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_the_thread_has_compiled_is_not_compiled_again(
    cache, compiled, monkeypatch
):
    stopped, join, compile_one = (
        threading.Event(),
        threading.Thread.join,
        compiler.compiled,
    )
    main = threading.current_thread()

    def joined(thread, *timeout):
        stopped.set()
        join(thread, *timeout)

    def held(*given):
        if len(compiled) >= 5 and threading.current_thread() is not main:
            assert stopped.wait(300)
        return compile_one(*given)

    monkeypatch.setattr(threading.Thread, "join", joined)
    monkeypatch.setattr(compiler, "compiled", held)
    with while_constructing(RANKS):
        wait_until(lambda: len(compiled) >= 5)
    assert len(compiled) < 15  # one had begun, and compiles those that it calls
    first = len(compiled)
    first_kernel(RANKS).compile_functions(lambda: len(compiled) >= first + 5)
    threads, functions, args = zip(*compiled, strict=True)
    mine = threading.current_thread().name
    assert mine not in threads[:first]
    assert set(threads[first:]) == {mine}
    assert len(set(zip(functions, args, strict=True))) == len(compiled)


@pytest.fixture
def begun(monkeypatch):
    """Compile nothing; return the kernels whose functions would be compiled."""
    found = []

    def begin(kernel, is_stopped):
        found.append(kernel)

    monkeypatch.setattr(Kernel, "compile_functions", begin)
    return found


def test_it_compiles_nothing_if_kernels_were_compiled_before(cache, begun, monkeypatch):
    monkeypatch.setattr(Kernel, "cubin", lambda kernel, cc: b"code")
    kernels._leave_mark.cache_clear()
    assert not kernels.were_compiled()
    first_kernel(2).code((9, 0))
    assert kernels.were_compiled()
    with while_constructing(2):
        time.sleep(0.1)
    assert not begun
    monkeypatch.setattr(kernels, "_device_sources", lambda: "changed")
    assert not kernels.were_compiled()
    with while_constructing(2):
        wait_until(lambda: begun)
    assert begun == [first_kernel(2)]


def test_an_error_of_the_compiler_is_a_warning(cache, monkeypatch):
    def fail(kernel, is_stopped):
        raise ImportError("no module named llvmlite")

    monkeypatch.setattr(Kernel, "compile_functions", fail)
    with (
        pytest.warns(RuntimeWarning, match="cannot be compiled.*no module named"),
        while_constructing(2),
    ):
        pass


@pytest.fixture
def waiting(monkeypatch):
    """Have the thread only wait until it is stopped; return the threads."""
    threads = []

    def wait(size, stop, errors):
        threads.append(threading.current_thread())
        stop.wait(300)

    monkeypatch.setattr(kernel_set, "_compile", wait)
    return threads


def test_it_ends_with_a_construction_that_fails(waiting, monkeypatch):
    interval = sys.getswitchinterval()

    def island(*given):
        wait_until(lambda: waiting)
        assert sys.getswitchinterval() < interval
        raise KeyboardInterrupt

    monkeypatch.setattr(construction, "Island", island)
    comm = SimpleNamespace(rank=0, size=2, allgather=None, barrier=None)
    with pytest.raises(KeyboardInterrupt):
        construction.begin(comm, None, None, Options(None, False, None, False))
    assert not waiting[0].is_alive()
    assert sys.getswitchinterval() == interval


def test_a_process_without_threads_is_constructed(waiting, monkeypatch):
    """Other ranks would wait for it."""
    interval, done = sys.getswitchinterval(), []

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with while_constructing(2):
            done.append(1)
    assert done
    assert sys.getswitchinterval() == interval
    with while_constructing(2):  # the next one may have a thread
        wait_until(lambda: waiting)


def test_the_thread_calls_no_finalizers_of_the_program(cache, monkeypatch):
    class Cyclic:
        def __init__(self):
            self.itself = self

    called = []

    def allocate():
        weakref.finalize(Cyclic(), lambda: called.append(threading.current_thread()))
        kept = [[] for _ in range(100 * gc.get_threshold()[0])]
        return bool(kept)

    monkeypatch.setattr(kernel_set, "were_compiled", allocate)
    with while_constructing(2):
        pass
    assert gc.isenabled()
    gc.collect()
    assert called == [threading.current_thread()]


def test_one_thread_runs_at_a_time(waiting):
    with while_constructing(2):
        wait_until(lambda: waiting)
        with while_constructing(2):
            pass
        assert waiting[0].is_alive()
    with while_constructing(2):
        wait_until(lambda: len(waiting) == 2)


def test_one_rank_needs_none(waiting):
    running = threading.active_count()
    with while_constructing(1):
        assert threading.active_count() == running
    assert not waiting


def test_the_first_kernel_is_that_of_whole_vectors():
    float32, kind = dtypes.element(np.float32, "test"), ALL_REDUCE.exchange
    given = 4, float32, "sum", False, "sentinel", 1, kind
    assert first_kernel(4) is one_shot.kernel(*given)


def test_more_ranks_than_an_island_has_are_no_error(cache, begun):
    with while_constructing(1000):
        wait_until(lambda: begun)
    assert begun == [first_kernel(64)]
