"""Runs kernels in Numba's CUDA simulator, on threads that wake each other.

Numba's own launch starts new threads for each block, and polls them continuously for a
barrier, so that each rank occupies a core. Here a team of threads is reused for all
blocks and kernels. The last thread at a barrier wakes the others. A kernel uses
Numba's ``cuda`` module, except for what follows.

Several threads of a program may launch the library's kernels simultaneously, as on a
GPU. Numba supports one kernel at a time, whose ``cuda`` object it stores in the module
of its function. Here all kernels share one such object, which returns the values of the
calling thread. Numba itself runs the program's kernels, so they are launched one at a
time.
"""

import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.np import numpy_support
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.cuda.simulator.kernelapi import (
    FakeCUDAAtomic,
    FakeCUDALocal,
    FakeCUDAShared,
    GridGroup,
)

from numba_symm.errors import ArgumentError
from numba_symm.threads import start

_GRACE = 1.0  # seconds within which the threads of a failed launch should end
_SWITCH_INTERVAL = 1e-3  # seconds that a thread runs if others want to


def run(
    function: Callable[..., None], grid: int, threads: tuple[int, int], args: Any
) -> None:
    """Run ``function`` as a kernel, one block after another.

    Args:
        function: refers to Numba's ``cuda`` by that name.
        grid: blocks.
        threads: of each block, along x and y.
        args: scalars and tuples of them.

    Raises:
        BaseException: the error of the first thread that failed. Threads that
            synchronize or poll have then ended, so the caller may unmap their memory.
    """
    if isinstance(threading.current_thread(), Thread):
        raise RuntimeError("a kernel cannot launch another kernel")
    with _hurried(), simulator.swapped_cuda_module(function, _CUDA):
        idle = _idle.setdefault(threads, [])
        try:
            team = idle.pop()
        except IndexError:
            team = Team(threads)
        team.begin(grid)
        try:
            for block in range(grid):
                team.run(function, block, args)
        except BaseException as error:  # including an interrupt
            team.disband(error)
            raise
        idle.append(team)


_as_dtype = functools.cache(numpy_support.as_dtype)


class _Local(FakeCUDALocal):  # type: ignore[misc]
    """The local arrays of a thread.

    Numba looks up the element type each time, which takes longer than all the rest.
    """

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> Any:
        """Return a new array."""
        if isinstance(dtype, types.Type):
            dtype = _as_dtype(dtype)
        return super().array(shape, dtype, alignment)


class _Cuda(simulator.FakeCUDAModule):  # type: ignore[misc]  # Numba is untyped
    """The ``cuda`` of every kernel: it returns the values of the calling thread.

    For a thread that does not run a kernel, it is Numba's own.
    """

    def __init__(self) -> None:
        super().__init__((1, 1, 1), (1, 1, 1), 0)
        self._local = _Local()
        del self.gridDim, self.blockDim  # __getattr__ returns them

    @property
    def shared(self) -> Any:
        """The shared memory of a block."""
        team = threading.current_thread()._manager  # type: ignore[attr-defined]
        return team.shared if isinstance(team, Team) else _numbas().shared

    def __getattr__(self, name: str) -> Any:
        thread = threading.current_thread()
        if not isinstance(thread, simulator.BlockThread):
            return getattr(cuda, name)
        team = thread._manager
        shapes = {"gridDim": team._grid_dim, "blockDim": team._block_dim}
        return simulator.Dim3(*shapes[name])


_CUDA = _Cuda()


def _numbas() -> Any:
    """Return the ``cuda`` object of a kernel that Numba itself runs."""
    return simulator._get_kernel_context()


_call = simulator.FakeCUDAKernel.__call__


def _called(function: Any, *args: Any) -> Any:
    """Call a function decorated by ``cuda.jit``: in our kernels, a device function."""
    thread = threading.current_thread()
    if not isinstance(thread, Thread):
        launch = not function._device and not isinstance(thread, simulator.BlockThread)
        for arg in args if launch else ():
            if not isinstance(arg, FakeCUDAArray):
                getattr(arg, "_numba_type_", None)  # as on a GPU; it may refuse
        if launch and _numbas() is not None:
            # Numba would call it as a device function, on the thread that launches it.
            raise ArgumentError(
                f"{function.__name__}: expected one launch of your kernels at a time "
                "in the simulator, got a second one while a kernel of another thread "
                "runs; launch from one thread, or guard the launches by a lock"
            )
        return _call(function, *args)
    with simulator.swapped_cuda_module(function.fn, _CUDA):
        return function.fn(*args)


simulator.FakeCUDAKernel.__call__ = _called


def _sync(group: Any) -> None:
    """Synchronize a grid of one block, or refuse a larger one.

    Numba synchronizes each block by itself, so results would be silently wrong.
    """
    thread: Any = threading.current_thread()
    blocks = math.prod(thread._manager._grid_dim)
    if blocks > 1:
        raise ArgumentError(
            "cuda.cg.this_grid().sync(): expected 1 block in the simulator, which runs "
            f"blocks one after another, got {blocks}; launch at most "
            "max_cooperative_grid_blocks, which is 1 there"
        )
    thread.syncthreads()


GridGroup.sync = _sync

_configure = simulator.FakeCUDAKernel.__getitem__


def _configured(function: Any, configuration: Any) -> Any:
    """Configure a launch, or refuse a stream on which Numba launches no kernel."""
    for stream in configuration[2:3]:
        if stream and not isinstance(stream, cuda.stream):
            raise ArgumentError(
                f"{function.__name__}[grid, block, stream]: expected a stream of Numba "
                f"or cuda.core, got {type(stream).__name__}; for a launch on an "
                "ns.Stream, pass its attribute core"
            )
    return _configure(function, configuration)


simulator.FakeCUDAKernel.__getitem__ = _configured

_peers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def add_peer(address: int, memory: Any) -> None:
    """Refuse Numba's atomics on a peer's memory, which would lose updates on a GPU.

    Args:
        address: where it is mapped.
        memory: the mapping, as long as it lives.
    """
    _peers[address] = memory


def _of_this_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse an atomic operation on a peer's array."""

    @functools.wraps(method)
    def atomic(self: Any, array: Any, *args: Any) -> Any:
        address = array.ctypes.data
        if any(at <= address < at + len(peer) for at, peer in list(_peers.items())):
            raise ArgumentError(
                f"cuda.atomic.{method.__name__}: expected an array of this rank, got a "
                "peer's; it is atomic for the threads of one GPU only. Give each rank "
                "its own part of the peer's buffer, in which no other rank stores"
            )
        return method(self, array, *args)

    return atomic


for _name, _method in list(vars(FakeCUDAAtomic).items()):
    if not _name.startswith("_"):
        setattr(FakeCUDAAtomic, _name, _of_this_rank(_method))

_running = 0  # number of launches
_interval = 0.0  # the program's switch interval
_lock = threading.Lock()  # guards these two


@contextmanager
def _hurried() -> Iterator[None]:
    """Shorten Python's switch interval while any kernel runs."""
    global _running, _interval
    with _lock:
        if _running == 0:
            _interval = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval, _SWITCH_INTERVAL))
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                sys.setswitchinterval(_interval)


class Thread(simulator.BlockThread):  # type: ignore[misc]
    """A thread of a :class:`Team`, which runs one block after another."""

    def __init__(self, team: "Team", x: int, y: int):
        super().__init__(None, team, (0, 0, 0), (x, y, 0), debug=False)
        self.turn = _held()
        """Held while this thread waits for work or at a barrier; a release wakes it."""

    def run(self) -> None:
        """Run every block of the team until a thread fails."""
        # Overflow wraps or is infinite, as on a GPU.
        np.seterr(all="ignore")  # in this thread
        team = self._manager
        while not team.has_failed():
            self.turn.acquire()
            if team.has_failed():
                return
            error = None
            try:
                team.function(*team.args)
            except BaseException as raised:
                error = raised
            team.leave(self, error)

    def syncthreads(self) -> None:
        """Wait for the other threads that have not ended."""
        self._manager.arrive(self)
        self.turn.acquire()
        self._manager.check()

    def wait_at(self, barrier: int, threads: int, condition: bool) -> bool:
        """Wait at a barrier of that many threads; return if any has ``condition``."""
        self.condition = condition
        self._manager.arrive_at(barrier, threads, self)
        self.turn.acquire()
        self._manager.check()
        return self.condition


class Team(simulator.BlockManager):  # type: ignore[misc]
    """Threads that run blocks, and wait at barriers without polling."""

    failure: BaseException | None = None
    """The error of the first thread that failed, after which all threads end."""

    def __init__(self, threads: tuple[int, int]):
        super().__init__(None, None, (*threads, 1), debug=False)
        self.function: Callable[..., None] | None = None
        self.args: tuple[Any, ...] = ()
        self.shared: Any = None
        self._lock = threading.Lock()  # guards the following, and releases of turns
        self._running = 0
        self._waiting: list[Thread] = []
        self._at: dict[int, list[Thread]] = {}  # by barrier
        self._over = _held()
        x, y = threads
        self._threads = [Thread(self, i, j) for j in range(y) for i in range(x)]
        for thread in self._threads:
            start(thread, "the simulator")

    def begin(self, grid: int) -> None:
        """Prepare for a launch of ``grid`` blocks."""
        self._grid_dim = (grid, 1, 1)
        self.shared = _Shared()

    def run(self, function: Callable[..., None], block: int, args: Any) -> None:
        """Run one block until all threads have ended it, or one has failed."""
        self.function, self.args = function, args
        self.block_state[...] = False  # the state of syncthreads_count and its kin
        with self._lock:
            self._running = len(self._threads)
            for thread in self._threads:
                thread.blockIdx = simulator.Dim3(block, 0, 0)
                thread.turn.release()
        self._over.acquire()
        if self.failure is not None:
            raise self.failure
        self.function, self.args = None, ()  # they may refer to arrays

    def has_failed(self) -> bool:
        """Return whether a thread has failed, so that all must end."""
        return self.failure is not None

    def check(self) -> None:
        """Raise in a running thread if another one has failed."""
        if self.has_failed():
            raise RuntimeError("another thread of the block has failed")

    def arrive(self, thread: Thread) -> None:
        """Record that a thread is at a barrier; wake all if it is the last."""
        with self._lock:
            self.check()
            self._waiting.append(thread)
            self._wake()

    def arrive_at(self, barrier: int, threads: int, thread: Thread) -> None:
        """Record that a thread is at a barrier of that many; the last wakes all.

        Each of them then has the disjunction of their conditions.
        """
        with self._lock:
            self.check()
            here = self._at.setdefault(barrier, [])
            here.append(thread)
            if len(here) == threads:
                del self._at[barrier]
                found = any(each.condition for each in here)
                for each in here:
                    each.condition = found
                    each.turn.release()

    def leave(self, thread: Thread, error: BaseException | None) -> None:
        """Record that a thread has ended its block, so that barriers leave it out."""
        with self._lock:
            self._running -= 1
            if self.failure is not None:
                return
            if error is not None:
                block, index = thread.blockIdx.x, thread.thread_id
                with suppress(Exception):  # some exceptions refuse notes
                    error.add_note(f"in thread {index} of block {block}")
                self._fail(error)
            self._wake()
            if self._running == 0 or error is not None:
                self._over.release()

    def disband(self, error: BaseException) -> None:
        """End all threads; running ones end at their next barrier or poll."""
        with self._lock:
            self._fail(error)
        until = time.monotonic() + _GRACE
        for thread in self._threads:
            thread.join(max(0, until - time.monotonic()))
        self.function, self.args = None, ()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            for thread in self._threads:
                if thread.turn.locked():
                    thread.turn.release()

    def _wake(self) -> None:
        if self.failure is None and len(self._waiting) == self._running:
            for thread in self._waiting:
                thread.turn.release()
            self._waiting.clear()


class _Shared(FakeCUDAShared):  # type: ignore[misc]
    """The shared memory of a block.

    In Numba's, two threads that reach one ``cuda.shared.array`` simultaneously may get
    an array each.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._lock = threading.Lock()

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> Any:
        """Return the array of the line that calls this."""
        if alignment is not None or shape == 0:
            return super().array(shape, dtype, alignment)
        if isinstance(dtype, types.Type):
            dtype = numpy_support.as_dtype(dtype)
        frame = sys._getframe(1)
        caller = frame.f_code.co_filename, frame.f_lineno
        with self._lock:
            if caller not in self._allocations:
                self._allocations[caller] = np.empty(shape, dtype)
            return self._allocations[caller]


def _held() -> threading.Lock:
    """Return an acquired lock, which another thread releases."""
    lock = threading.Lock()
    lock.acquire()
    return lock


_idle: dict[tuple[int, int], list[Team]] = {}  # by number of threads


def _start_anew() -> None:
    """Reset, in a forked child, the state of its parent's threads."""
    global _running, _lock
    _idle.clear()
    _running, _lock = 0, threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
