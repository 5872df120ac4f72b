"""Runs kernels in Numba's CUDA simulator, on threads that wake one another.

Numba's own launch starts new threads for each block, and polls them without a pause
to see whether they have come to a barrier: each rank keeps a core busy. Here a team
of threads runs block after block and kernel after kernel, and the last one that
comes to a barrier wakes the others. What a kernel sees of ``cuda`` is Numba's.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba.cuda.simulator import kernel as simulator

_GRACE = 1.0  # seconds for the threads of a launch that has failed to end


def run(function: Callable[..., None], grid: int, threads: int, args: Any) -> None:
    """Run ``function`` as a kernel, one block after another.

    Args:
        function: names numba's ``cuda`` by that name.
        grid: blocks.
        threads: of each block.
        args: scalars and tuples of them.

    Raises:
        BaseException: what the first thread that failed has raised. Threads that
            meet or poll have ended then, so the caller may unmap what they wrote to.
    """
    cuda = simulator.FakeCUDAModule((grid, 1, 1), (threads, 1, 1), 0)
    with (
        simulator._push_kernel_context(cuda),  # for device functions of Numba's
        simulator.swapped_cuda_module(function, cuda),
    ):
        idle = _idle.setdefault(threads, [])
        team = idle.pop() if idle else Team(threads)
        try:
            for block in range(grid):
                team.run(function, block, args)
        except BaseException as error:  # an interrupt, too
            team.disband(error)
            raise
        idle.append(team)


class Thread(simulator.BlockThread):  # type: ignore[misc]  # Numba has no types
    """A thread of a :class:`Team`, at work on one block after another."""

    def __init__(self, team: "Team", index: int):
        super().__init__(None, team, (0, 0, 0), (index, 0, 0), debug=False)
        self.turn = _held()
        """Whoever releases it has something to do for this thread, or lets it go on."""

    def run(self) -> None:
        """Run every block that the team is given, until a thread has failed."""
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


class Team(simulator.BlockManager):  # type: ignore[misc]
    """Threads that run blocks, and meet without anyone polling them."""

    failure: BaseException | None = None
    """What the first thread that failed has raised; all end then."""

    def __init__(self, threads: int):
        super().__init__(None, None, (threads, 1, 1), debug=False)
        self.function: Callable[..., None] | None = None
        self.args: tuple[Any, ...] = ()
        self._lock = threading.Lock()  # of what follows, and of releasing turns
        self._running = 0
        self._waiting: list[Thread] = []
        self._over = _held()
        self._threads = [Thread(self, index) for index in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., None], block: int, args: Any) -> None:
        """Run one block until all threads have ended, or one has failed."""
        self.function, self.args = function, args
        self.block_state[...] = False  # what the threads count together
        with self._lock:
            self._running = len(self._threads)
            for thread in self._threads:
                thread.blockIdx = simulator.Dim3(block, 0, 0)
                thread.turn.release()
        self._over.acquire()
        if self.failure is not None:
            raise self.failure
        self.function, self.args = None, ()  # which may keep arrays

    def has_failed(self) -> bool:
        """Return whether all threads are to end."""
        return self.failure is not None

    def check(self) -> None:
        """Raise in a thread that goes on while another has failed."""
        if self.has_failed():
            raise RuntimeError("another thread of the block has failed")

    def arrive(self, thread: Thread) -> None:
        """Note that a thread has come to a barrier; wake all if it is the last."""
        with self._lock:
            self.check()
            self._waiting.append(thread)
            self._wake()

    def leave(self, thread: Thread, error: BaseException | None) -> None:
        """Note that a thread has ended its block: the others need not wait for it."""
        with self._lock:
            self._running -= 1
            if self.failure is not None:
                return
            if error is not None:
                block, index = thread.blockIdx.x, thread.threadIdx.x
                with suppress(Exception):  # of an exception that takes no notes
                    error.add_note(f"in thread {index} of block {block}")
                self._fail(error)
            self._wake()
            if self._running == 0 or error is not None:
                self._over.release()

    def disband(self, error: BaseException) -> None:
        """End all threads: those at work, at their next barrier or poll."""
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


def _held() -> threading.Lock:
    """Return a lock that is held, for others to release."""
    lock = threading.Lock()
    lock.acquire()
    return lock


_idle: dict[int, list[Team]] = {}  # by the number of threads
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads
