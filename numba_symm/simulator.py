"""Kernels and threads of Numba's CUDA simulator.

Runs kernels in Numba's CUDA simulator, on threads that wake each other.

Numba's own launch runs one block after another. It starts new threads for each block,
and polls them continuously for a barrier, so that each rank occupies a core. Here all
kernels run on the teams of ``simulator.py``, so the blocks of a program's kernel run
together where they wait. A kernel uses Numba's ``cuda`` module, with the following
exception.

Several threads of a program may launch the library's kernels simultaneously, as on a
GPU. Numba supports one kernel at a time, whose ``cuda`` object it stores in the module
of its function. Here all kernels of the library share one such object, which returns
the values of the calling thread. Numba itself launches the program's kernels, so they
are launched one at a time.

The threads of the simulator: teams, which wake each other, and the grids they run.

A team here has the threads of one block; ``device/teams.py`` has teams of ranks. It
runs other blocks and kernels afterwards. The last thread at a barrier wakes the others,
so no thread polls for a barrier.

The blocks of a program's kernel run together where they wait. The next block starts
when all threads that run wait, at a barrier or in a poll, or after ``LONGEST``. So a
grid whose blocks do not wait needs the threads of one block only. At most
``MOST_THREADS`` threads of a launch exist at a time.
"""

import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
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

from numba_symm.device.block_exchange import (
    WorkspaceContext,
    epoch_of,
    not_awaited,
)
from numba_symm.device.intrinsics import array_at, warp_or
from numba_symm.environment import warn_once
from numba_symm.errors import ArgumentError
from numba_symm.process import start

MOST_THREADS = 1024
"""The most threads of a launch that run together."""

LONGEST = 0.1
"""Seconds after which the next block starts although a thread may not wait.

A kernel may poll by ordinary loads, which the simulator does not recognize as a wait.
"""

QUIET: dict[str, Any] = {"all": "ignore"}
"""Overflow wraps or is infinite, as on a GPU."""

_RECENT = 0.02  # seconds since its last poll in which a thread counts as waiting
_LOOK = 1e-3  # seconds between two looks whether all threads wait
_SWITCH_INTERVAL = 1e-3  # seconds that a thread runs if others want to
_GRACE = 1.0  # seconds within which the threads of a failed launch should end
_KEPT = 256  # threads that wait for a next launch

Shape = tuple[int, int, int]
_idle: dict[Shape, list["ThreadTeam"]] = {}  # by the shape of a block


def together(threads: int) -> int:
    """Return how many blocks of that many threads run together, at least one."""
    return max(1, MOST_THREADS // threads)


class ThreadTeam:
    """Threads that run blocks, and wait at barriers without polling.

    Args:
        shape: of a block.
        make: returns a thread of a team, for its place in the block.
    """

    failure: BaseException | None = None
    """The error of the first thread that failed, after which all threads end."""

    def __init__(self, shape: Shape, make: Callable[..., Any]):
        self._block_dim = shape
        self._grid_dim: Shape = (1, 1, 1)
        self.block_state = np.zeros(shape, np.bool_)  # of syncthreads_count, …
        self.launch: GridRun | None = None
        self._lock = threading.Lock()  # guards the following, and releases of turns
        self.running = 0
        self._waiting: list[Any] = []
        self._at: dict[int, list[Any]] = {}  # by barrier
        x, y, z = shape
        places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        self._threads = [make(self, place) for place in places]
        for thread in self._threads:
            start(thread, "the simulator")

    def start(self, launch: "GridRun", point: Shape) -> None:
        """Start a block."""
        self.launch, self._grid_dim = launch, launch.grid
        self.shared = launch.shared()
        self.block_state[...] = False
        with self._lock:
            self.running = len(self._threads)
            for thread in self._threads:
                thread.begin(point)
                thread.turn.release()

    def release(self) -> None:
        """Let the team wait for another block; end it if enough threads wait."""
        self.launch = None  # it may refer to arrays
        waiting = sum(math.prod(shape) * len(of) for shape, of in _idle.items())
        if _idle.get(self._block_dim) and waiting >= _KEPT:
            self.disband(RuntimeError("this team is not needed any more"))
        else:
            _idle.setdefault(self._block_dim, []).append(self)

    def all_wait(self, now: float) -> bool:
        """Return whether each thread has ended its block, or waits."""
        return all(each.waits(now - _RECENT) for each in self._threads)

    def has_failed(self) -> bool:
        """Return whether a thread has failed, so that all must end."""
        return self.failure is not None

    def check(self) -> None:
        """Raise in a running thread if another one has failed."""
        if self.has_failed():
            raise RuntimeError("another thread of the block has failed")

    def arrive(self, thread: Any) -> None:
        """Record that a thread is at a barrier; wake all if it is the last."""
        with self._lock:
            self.check()
            self._waiting.append(thread)
            self._wake()
            self._check_barriers()

    def arrive_at(self, barrier: int, threads: int, thread: Any) -> None:
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
            self._check_barriers()

    def leave(self, thread: Any, error: BaseException | None) -> None:
        """Record that a thread has ended its block, so that barriers leave it out."""
        launch = self.launch
        with self._lock:
            self.running -= 1
            if self.failure is not None or launch is None:
                return
            if error is not None:
                with suppress(Exception):  # some exceptions refuse notes
                    error.add_note(f"in {launch.words(thread)}")
                self._fail(error)
            self._wake()
            try:
                self._check_barriers()
            except ArgumentError as found:
                self._fail(found)
            over = self.running == 0 or self.failure is not None
        launch.left(self, over)

    def _check_barriers(self) -> None:
        """Raise if all threads wait at barriers, of which none is complete."""
        apart = len(self._waiting) + sum(map(len, self._at.values()))
        if self._at and apart == self.running and self.failure is None:
            raise ArgumentError(
                "a function of a warp: expected every thread of the warp to call it, "
                f"got {self.running} threads of the block at different barriers"
            )

    def disband(self, error: BaseException) -> None:
        """End all threads; running ones end at their next barrier or poll."""
        with self._lock:
            self._fail(error)

    def join(self, until: float) -> None:
        """Wait for the threads of a team that was disbanded."""
        for thread in self._threads:
            thread.join(max(0, until - time.monotonic()))
        self.launch = None

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            for thread in self._threads:
                if thread.turn.locked():
                    thread.turn.release()

    def _wake(self) -> None:
        if self.failure is None and len(self._waiting) == self.running:
            for thread in self._waiting:
                thread.turn.release()
            self._waiting.clear()


class GridRun:
    """One launch of a kernel, whose blocks are started one after another.

    Args:
        grid: the shape of the grid.
        block: the shape of a block.
        call: runs the kernel on the calling thread.
        make: returns a thread of a team.
        shared: returns a block's shared memory.

    Attributes:
        errors: what arithmetic does on errors such as overflow, for ``numpy.seterr``.
        debug: whether the program asked for Numba's debug mode.
    """

    def __init__(
        self,
        grid: Shape,
        block: Shape,
        call: Callable[[], None],
        make: Callable[..., Any],
        shared: Callable[[], Any],
    ):
        self.grid, self.block = grid, block
        self.blocks, self.threads = math.prod(grid), math.prod(block)
        self.call, self.shared = call, shared
        self._make = make
        self.errors = QUIET
        self.debug = False
        self._started = 0
        self._running: set[ThreadTeam] = set()
        self._failed: BaseException | None = None
        self._changed = held()  # released when a block has ended
        self._lock = threading.Lock()  # guards the above, and the following
        self._at_grid: list[Any] = []  # threads at a barrier of the grid

    def run(self, point: Shape) -> None:
        """Run one block until all its threads have ended, or one has failed."""
        self.proceed(point, 1)

    def proceed(self, point: Shape, most: int) -> None:
        """Start a block. Return when the next one may start, or all have ended.

        Args:
            point: the block's index.
            most: the most blocks that run together.

        Raises:
            BaseException: the error of the first thread that failed. Threads that
                synchronize or poll have then ended.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, _SWITCH_INTERVAL))
        try:
            try:
                team = _idle.setdefault(self.block, []).pop()
            except IndexError:
                team = ThreadTeam(self.block, self._make)
            self._running.add(team)
            team.start(self, point)
            # Last, because a barrier of the grid counts the threads of these blocks.
            self._started += 1
            self._wake_grid()
            self._wait(most)
        except BaseException as error:  # including an interrupt
            self._disband(error)
            raise
        finally:
            if interval > _SWITCH_INTERVAL:  # otherwise another launch will restore it
                sys.setswitchinterval(interval)

    def _wait(self, most: int) -> None:
        """Wait until another block may start, or until all have ended."""
        began, last = time.monotonic(), self._started == self.blocks
        while self._running:
            room = not last and len(self._running) < most
            self._changed.acquire(timeout=_LOOK if room else -1)
            if self._failed is not None:
                raise self._failed
            now = time.monotonic()
            with self._lock:
                running = list(self._running)
            if room and (
                now - began > LONGEST or all(team.all_wait(now) for team in running)
            ):
                return
            if not last and len(running) < most and not room:
                began = now  # there is room from now on

    def has_ended(self) -> bool:
        """Return whether all blocks have ended."""
        return self._started == self.blocks and not self._running

    def left(self, team: ThreadTeam, over: bool) -> None:
        """Record that a thread has left its block, which is over if it is the last."""
        if over:
            with self._lock:
                if team.failure is not None:
                    self._failed = self._failed or team.failure
                else:
                    self._running.discard(team)
                    team.release()
                if self._changed.locked():
                    self._changed.release()
        if self._at_grid:
            self._wake_grid()

    def _disband(self, error: BaseException) -> None:
        with self._lock:
            teams, self._running = self._running, set()
        for team in teams:
            team.disband(error)
        until = time.monotonic() + _GRACE
        for team in teams:
            team.join(until)
        self.call = _nothing  # it may refer to arrays

    def synchronize(self, thread: Any) -> None:
        """Record that a thread is at a barrier of the grid; the last wakes all."""
        self.check_size("cuda.cg.this_grid().sync()")
        with self._lock:
            thread._manager.check()
            self._at_grid.append(thread)
        self._wake_grid()

    def check_size(self, what: str) -> None:
        """Refuse a barrier of a grid that does not run together."""
        if self.blocks * self.threads > MOST_THREADS and self.blocks > 1:
            raise ArgumentError(
                f"{what}: expected a grid of at most {MOST_THREADS} threads in the "
                f"simulator, got {self.blocks} blocks of {self.threads}; launch fewer"
            )

    def _wake_grid(self) -> None:
        with self._lock:
            if self._started < self.blocks or self._failed is not None:
                return
            if len(self._at_grid) == sum(team.running for team in self._running):
                for thread in self._at_grid:
                    thread.turn.release()
                self._at_grid.clear()

    @property
    def later(self) -> int:
        """The blocks that start only after others have ended, if all wait."""
        return max(0, self.blocks - together(self.threads))

    def words(self, thread: Any) -> str:
        """Return a thread's place in words."""
        index, block = list(thread.threadIdx), list(thread.blockIdx)
        flat = self.block[1:] == self.grid[1:] == (1, 1)
        if flat:
            return f"thread {index[0]} of block {block[0]}"
        return f"thread {tuple(index)} of block {tuple(block)}"


def _nothing() -> None:
    pass


def held() -> threading.Lock:
    """Return an acquired lock, which another thread releases."""
    lock = threading.Lock()
    lock.acquire()
    return lock


os.register_at_fork(after_in_child=_idle.clear)


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
    with simulator.swapped_cuda_module(function, _CUDA):
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


def _sync_warp(module: Any, mask: int = 0xFFFFFFFF) -> None:
    """Wait for all threads of the warp, which a GPU orders, too."""
    if int(mask) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise ArgumentError(
            f"cuda.syncwarp: expected the mask 0xFFFFFFFF in the simulator, got "
            f"{mask:#x}; let all threads of the warp call it"
        )
    warp_or(False)


simulator.FakeCUDAModule.syncwarp = _sync_warp


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
        launch.proceed(point, together(launch.threads))
        if launch.has_ended():
            for arg in args:
                _check_awaited(arg)


def _check_awaited(ws: Any) -> None:
    """Refuse a kernel that has started a collective and has not awaited it.

    After a failure of the communicator, a kernel need not wait.
    """
    if isinstance(ws, WorkspaceContext):
        own = ws.ring[-1] + epoch_of(ws, 0, 0)
        words = array_at(own, 2 * ws.threads * ws.blocks, np.uint32)
        board = array_at(ws.guard.board, ws.size, np.int64)
        found = not_awaited(ws, words)
        if found and not board.any():
            text, start = found
            raise ArgumentError(f"{start.file}:{start.line}: {text}")


simulator.BlockManager = _BlockRun


def _sync(group: Any) -> None:
    """Synchronize all threads of a grid."""
    thread: Any = threading.current_thread()
    thread.wait_for_grid()


GridGroup.sync = _sync


def _most_blocks(overload: Any, blockdim: Any, dynsmemsize: int = 0) -> int:
    """Return how many blocks of a cooperative grid run together."""
    return together(int(np.prod(blockdim)))


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


def _lend(array: Any, **options: Any) -> Any:
    """Lend an array to a library that asks for it by DLPack, as mpi4py does.

    It is right here, where device memory is the host's. So a program that has taken
    mpi4py's communicator for this library's would see no difference. mpi4py from 4.1 on
    passes these options; NumPy and torch pass others.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    by_mpi4py = options.keys() == {"max_version", "copy"} and options["copy"] is False
    if by_mpi4py and caller != "numba_symm":
        warn_once(
            "a call of mpi4py's own communicator got a device array: on GPUs, it needs "
            "a CUDA-aware MPI library, and does not wait for the arrays' streams; call "
            "the method of numba_symm.mpi.Comm(MPI.COMM_WORLD)"
        )
    return array._ary.__dlpack__(**options)


FakeCUDAArray.__dlpack__ = _lend


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


class Thread(simulator.BlockThread):  # type: ignore[misc]
    """A thread of a team, which runs one block after another.

    Args:
        team: the team.
        place: the thread's index.
    """

    def __init__(self, team: ThreadTeam, place: Shape):
        super().__init__(None, team, (0, 0, 0), place, debug=False)
        self.turn = held()
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

    def begin(self, point: Shape) -> None:
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
