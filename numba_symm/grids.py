"""The threads of the simulator: teams, which wake each other, and the grids they run.

A team here has the threads of one block; ``device/teams.py`` has teams of ranks. It
runs other blocks and kernels afterwards. The last thread at a barrier wakes the others,
so no thread polls for a barrier.

The blocks of a program's kernel run together where they wait. The next block starts
when all threads that run wait, at a barrier or in a poll, or after ``LONGEST``. So a
grid whose blocks do not wait needs the threads of one block only. At most
``MOST_THREADS`` threads of a launch exist at a time.
"""

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.threads import start

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
_GRACE = 1.0  # seconds within which the threads of a failed launch should end
_KEPT = 256  # threads that wait for a next launch

Shape = tuple[int, int, int]
_idle: dict[Shape, list["ThreadTeam"]] = {}  # by the shape of a block


def together(threads: int) -> int:
    """Return how many blocks of that many threads run together, at least one."""
    return max(1, MOST_THREADS // threads)


def most_blocks(kernel: Any, threads: int) -> int:
    """Return how many blocks of a program's kernel run together on an idle GPU.

    Raises:
        ArgumentError: it is not a kernel of ``cuda.jit``, or was never compiled.
    """
    overloads = getattr(kernel, "overloads", None)
    if overloads is None:
        raise ArgumentError(
            f"launch_limit: expected a kernel of cuda.jit, got {type(kernel).__name__}"
        )
    if SIMULATED:
        return together(threads)
    if not overloads:
        raise ArgumentError(
            f"launch_limit: expected a compiled kernel, got {kernel.__name__}; give "
            "cuda.jit its signature, or launch it once with one block"
        )
    every = overloads.values()
    return min(int(each.max_cooperative_grid_blocks(threads)) for each in every)


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
