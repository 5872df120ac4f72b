"""Runs kernels in Numba's CUDA simulator, on threads that wake one another.

Numba's own launch starts new threads for each block, and polls them without a pause
to see whether they have come to a barrier: each rank keeps a core busy. Here a team
of threads runs block after block and kernel after kernel, and the last one that
comes to a barrier wakes the others. What a kernel sees of ``cuda`` is Numba's.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

from numba.cuda.simulator import kernel as simulator


def run(function: Callable[..., None], grid: int, threads: int, args: Any) -> None:
    """Run ``function`` as a kernel, one block after another.

    Args:
        function: names numba's ``cuda`` by that name.
        grid: blocks.
        threads: of each block.
        args: scalars and tuples of them.

    Raises:
        BaseException: what the first thread that failed has raised.
    """
    cuda = simulator.FakeCUDAModule((grid, 1, 1), (threads, 1, 1), 0)
    idle = _idle.setdefault(threads, [])
    team = idle.pop() if idle else Team(threads)
    with (
        simulator._push_kernel_context(cuda),  # for device functions of Numba's
        simulator.swapped_cuda_module(function, cuda),
    ):
        for block in range(grid):
            team.run(function, block, args)
    idle.append(team)  # not after a failure, when threads may still be at work


class Thread(simulator.BlockThread):  # type: ignore[misc]  # Numba has no types
    """A thread of a :class:`Team`, at work on one block after another."""

    def __init__(self, team: "Team", index: int):
        super().__init__(None, team, (0, 0, 0), (index, 0, 0), debug=False)
        self.turn = _held()
        """Whoever releases it has something to do for this thread, or lets it go on."""

    def run(self) -> None:
        """Run every block that the team is given."""
        while True:
            self.turn.acquire()
            try:
                self._manager.function(*self._manager.args)
            except BaseException as error:
                block, index = self.blockIdx.x, self.threadIdx.x
                error.add_note(f"in thread {index} of block {block}")
                self.exception = error
            self._manager.leave(self)

    def syncthreads(self) -> None:
        """Wait for the other threads that have not ended."""
        self._manager.arrive(self)
        self.turn.acquire()
        if self._manager.failure is not None:
            raise RuntimeError("another thread of the block has failed")


class Team(simulator.BlockManager):  # type: ignore[misc]
    """Threads that run blocks, and meet without anyone polling them."""

    failure: BaseException | None = None
    function: Callable[..., None]
    args: tuple[Any, ...]

    def __init__(self, threads: int):
        super().__init__(None, None, (threads, 1, 1), debug=False)
        self._lock = threading.Lock()  # of what follows
        self._running = 0
        self._waiting: list[Thread] = []
        self._over = _held()
        self._threads = [Thread(self, index) for index in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., None], block: int, args: Any) -> None:
        """Run one block until all threads have ended, or one has failed."""
        self.function, self.args = function, args
        self._running = len(self._threads)
        for thread in self._threads:
            thread.blockIdx = simulator.Dim3(block, 0, 0)
            thread.turn.release()
        self._over.acquire()
        if self.failure is not None:
            raise self.failure

    def arrive(self, thread: Thread) -> None:
        """Note that a thread has come to a barrier; wake all if it is the last."""
        with self._lock:
            self._waiting.append(thread)
            self._wake()

    def leave(self, thread: Thread) -> None:
        """Note that a thread has ended its block: the others need not wait for it."""
        with self._lock:
            self._running -= 1
            if self.failure is None:
                self.failure = thread.exception
                over = self._running == 0 or self.failure is not None
            else:
                over = False  # told already
            self._wake()
            if over:
                self._over.release()

    def _wake(self) -> None:
        if len(self._waiting) == self._running or self.failure is not None:
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
