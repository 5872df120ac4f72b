"""Runs kernels in Numba's CUDA simulator, on threads that wake each other.

Numba's own launch runs one block after another. It starts new threads for each block,
and polls them continuously for a barrier, so that each rank occupies a core. Here all
kernels run on the teams of ``grids.py``, so the blocks of a program's kernel run
together where they wait. A kernel uses Numba's ``cuda`` module, with the following
exception.

Several threads of a program may launch the library's kernels simultaneously, as on a
GPU. Numba supports one kernel at a time, whose ``cuda`` object it stores in the module
of its function. Here all kernels of the library share one such object, which returns
the values of the calling thread. Numba itself launches the program's kernels, so they
are launched one at a time.
"""

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
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

from numba_symm import grids
from numba_symm.errors import ArgumentError
from numba_symm.grids import GridRun, ThreadTeam

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
    block = (*threads, 1)
    call = functools.partial(function, *args)
    launch = GridRun((grid, 1, 1), block, call, Thread, _BlockMemory)
    with _hurried(), simulator.swapped_cuda_module(function, _CUDA):
        # Their blocks pair with those of the same index on other ranks only.
        for index in range(grid):
            launch.run((index, 0, 0))


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
                "runs; launch from one thread, or guard the launches with a lock"
            )
        return _call(function, *args)
    with simulator.swapped_cuda_module(function.fn, _CUDA):
        return function.fn(*args)


simulator.FakeCUDAKernel.__call__ = _called


def _shared(module: Any) -> Any:
    """Return the shared memory of the calling thread's block."""
    return threading.current_thread()._manager.shared  # type: ignore[attr-defined]


simulator.FakeCUDAModule.shared = property(_shared)


_WARNING = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_RAISING = _WARNING | {"divide": "raise"}


class _BlockRun:
    """A block of a program's kernel, in place of Numba's ``BlockManager``."""

    def __init__(self, function: Any, grid: Any, block: Any, debug: bool):
        self._function, self._shape, self._debug = function, (grid, block), debug

    def run(self, point: Any, *args: Any) -> None:
        """Start the block. Return when the next one may start, or all have ended."""
        kernel = _numbas()
        launch = getattr(kernel, "launch", None)
        if launch is None:
            call = functools.partial(self._function, *args)
            size = kernel._shared._dynshared_size
            shared = functools.partial(_BlockMemory, size)
            launch = kernel.launch = GridRun(*self._shape, call, Thread, shared)
            launch.debug = self._debug
            launch.errors = _RAISING if self._debug else _WARNING
        with _hurried():
            launch.proceed(point, grids.together(launch.threads))


simulator.BlockManager = _BlockRun


def _sync(group: Any) -> None:
    """Synchronize all threads of a grid."""
    thread: Any = threading.current_thread()
    thread.wait_for_grid()


GridGroup.sync = _sync


def _most_blocks(overload: Any, blockdim: Any, dynsmemsize: int = 0) -> int:
    """Return how many blocks of a cooperative grid run together."""
    return grids.together(int(np.prod(blockdim)))


simulator.FakeOverload.max_cooperative_grid_blocks = _most_blocks

_jit = cuda.jit
_OF_COMPILER = ("extensions", "forceinline", "lineinfo", "lto", "max_registers")
"""Options of numba-cuda's ``cuda.jit`` that its simulator's lacks. They change no
result."""


@functools.wraps(_jit)
def _decorated(*args: Any, launch_bounds: Any = None, **options: Any) -> Any:
    """Do as the simulator's ``cuda.jit``, with all options that numba-cuda's has."""
    for name in _OF_COMPILER:
        options.pop(name, None)
    made = _jit(*args, **options)
    if launch_bounds is None:
        return made
    most = launch_bounds[0] if isinstance(launch_bounds, tuple) else launch_bounds

    def bounded(kernel: Any) -> Any:
        kernel.most_threads = most
        return kernel

    if isinstance(made, simulator.FakeCUDAKernel):
        return bounded(made)
    return lambda function: bounded(made(function))


cuda.jit = _decorated

_configure = simulator.FakeCUDAKernel.__getitem__


def _configured(function: Any, configuration: Any) -> Any:
    """Configure a launch, or refuse one that a GPU would refuse.

    That is on a stream of another library, or with larger blocks than its
    ``launch_bounds`` permit.
    """
    most = getattr(function, "most_threads", None)
    threads = int(np.prod(configuration[1]))
    if most is not None and threads > most:
        raise ArgumentError(
            f"{function.__name__}[grid, block]: expected a block of at most {most} "
            f"threads, its launch_bounds, got {threads}; launch smaller blocks"
        )
    for stream in configuration[2:3]:
        if stream and not isinstance(stream, cuda.stream):
            raise ArgumentError(
                f"{function.__name__}[grid, block, stream]: expected a stream of Numba "
                f"or cuda.core, got {type(stream).__name__}; for a launch on an "
                "ns.Stream, pass its attribute core"
            )
    return _configure(function, configuration)


simulator.FakeCUDAKernel.__getitem__ = _configured

_arrays: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""The arrays that live, by their ids. Other threads may make arrays at any time."""

_new_array = FakeCUDAArray.__init__


@functools.wraps(_new_array)
def _noted(array: Any, *args: Any, **options: Any) -> None:
    _new_array(array, *args, **options)
    _arrays[id(array)] = array


FakeCUDAArray.__init__ = _noted


def end_of_array(addresses: Collection[int]) -> int | None:
    """Return the end of the array that has one of these addresses, or None."""
    for each in _arrays.valuerefs():  # a copy
        array = each()
        if array is not None:
            first = array._ary.__array_interface__["data"][0]
            if any(first <= address < first + array.nbytes for address in addresses):
                return int(first + array.nbytes)
    return None


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
                "peer's; it is atomic for the threads of one GPU only. Call "
                "symm.atomic_add or another function of numba_symm.device that is "
                "atomic for all GPUs"
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
    """A thread of a team, which runs one block after another.

    Args:
        team: the team.
        place: the thread's index.
    """

    def __init__(self, team: ThreadTeam, place: grids.Shape):
        super().__init__(None, team, (0, 0, 0), place, debug=False)
        self.turn = grids.held()
        """Held while this thread waits for work or at a barrier; a release wakes it."""
        self.polled = 0.0  # the time of its last poll
        self._stopped = True  # between two blocks, or at a barrier

    def run(self) -> None:
        """Run every block of the team until a thread fails."""
        team, errors = self._manager, None
        while not team.has_failed():
            self.turn.acquire()
            if team.has_failed():
                return
            error, launch = None, team.launch
            if launch.errors is not errors:
                errors = launch.errors
                np.seterr(**errors)  # in this thread
            try:
                launch.call()
            except BaseException as raised:
                error = raised
            self._stopped, launch = True, None  # it may refer to arrays
            team.leave(self, error)

    def begin(self, point: grids.Shape) -> None:
        """Prepare for a block."""
        self.blockIdx = simulator.Dim3(*point)
        self.debug = self._manager.launch.debug
        self.polled, self._stopped = 0.0, False

    def waits(self, since: float) -> bool:
        """Return whether it has ended its block, is at a barrier or has just polled."""
        return self._stopped or self.polled > since

    def _wait(self) -> None:
        self.turn.acquire()
        self._manager.check()
        self._stopped = False

    def syncthreads(self) -> None:
        """Wait for the other threads that have not ended."""
        self._stopped = True
        self._manager.arrive(self)
        self._wait()

    def wait_at(self, barrier: int, threads: int, condition: bool) -> bool:
        """Wait at a barrier of that many threads; return if any has ``condition``."""
        self.condition = condition
        self._stopped = True
        self._manager.arrive_at(barrier, threads, self)
        self._wait()
        return self.condition

    def wait_for_grid(self) -> None:
        """Wait for all threads of the grid that have not ended."""
        self._stopped = True
        self._manager.launch.synchronize(self)
        self._wait()


class _BlockMemory(FakeCUDAShared):  # type: ignore[misc]
    """The shared memory of a block.

    In Numba's, two threads that reach one ``cuda.shared.array`` simultaneously may get
    an array each, and two calls in one line get the same array.
    """

    def __init__(self, dynamic: int = 0) -> None:
        super().__init__(dynamic)
        self._lock = threading.Lock()

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> Any:
        """Return the array of the place in the code that calls this, as on a GPU."""
        if alignment is not None or shape == 0:
            return super().array(shape, dtype, alignment)
        if isinstance(dtype, types.Type):
            dtype = numpy_support.as_dtype(dtype)
        frame = sys._getframe(1)
        caller = frame.f_code, frame.f_lasti, str(shape), dtype
        with self._lock:
            if caller not in self._allocations:
                self._allocations[caller] = np.empty(shape, dtype)
            return self._allocations[caller]


def _start_anew() -> None:
    """Reset, in a forked child, the state of its parent's threads."""
    global _running, _lock
    _running, _lock = 0, threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
