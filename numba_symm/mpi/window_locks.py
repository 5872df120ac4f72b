"""Locks of a window's accumulates, and its fences, without MPI, which cannot be polled.

All ranks map one file. A lock is a byte of it, which a rank locks while it changes the
memory of one rank (:mod:`numba_symm.launch.locks`). So a rank that waits for a lock has
a deadline, and runs Python's signal handlers. The Linux kernel releases the lock of a
process that ends. But the memory may then be changed in part. So the holder also stores
its number in the file. It stores the number after it has got the lock, and clears it
before it releases the lock. A rank that gets the lock and finds a number raises.

Each rank also keeps a byte of its own locked. So the others see when its process ends,
in their calls and while they wait for it in a fence.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from numba_symm import forks, open_files
from numba_symm.backends.host import memory_file
from numba_symm.errors import ClosedError, CollectiveTimeout, RankLeft, SymmError
from numba_symm.launch import locks
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait

# Beyond the file's end: a byte for each rank.
_LOCKS = 1 << 40  # locked by the rank that changes its memory
_ALIVE = 1 << 41  # locked by the rank itself while it uses the window


class WindowLocks:
    """The locks of one window, one for the memory of each rank. Collective.

    Args:
        exchange: the ranks.
        what: the call that makes the window.
        seconds: how long a rank waits for a lock; 0: indefinitely.
    """

    def __init__(self, exchange: StoreExchange, what: str, seconds: float):
        self._rank, self._seconds, size = exchange.rank, seconds, exchange.size
        self._fd = -1
        open_files.note(self, what)
        self._threads = threading.RLock()  # threads of one process share its locks
        self._inside = [False] * size  # whether this rank is in ``held``
        with ExitStack() as undo:
            channel, fd = undo.enter_context(IpcChannel(exchange)), -1
            with exchange.agreed("making the locks of a window"):
                if self._rank == 0:
                    fd = memory_file("numba_symm window", 16 * size)
                    undo.callback(os.close, fd)
                    for rank in range(1, size):
                        channel.send_fd(rank, fd)
            with ExitStack() as made:
                made.callback(self.close)
                with exchange.agreed("mapping the locks of a window"):
                    if self._rank != 0:
                        fd = channel.recv_fd(0)
                        undo.callback(os.close, fd)
                    self._fd = locks.reopened(fd)
                    locks.lock(self._fd, _ALIVE + self._rank)
                    memory = mmap.mmap(fd, 16 * size)
                    self._holders, self._met = np.frombuffer(memory, "i8").reshape(
                        2, size
                    )
                made.pop_all()
        forks.watch(self)

    @contextmanager
    def held(self, target: int, what: str) -> Iterator[None]:
        """Hold the lock of a rank's memory during the block.

        Args:
            target: the rank.
            what: the call, for errors.

        Raises:
            CollectiveTimeout: another rank has held it for too long.
            RankLeft: a rank has ended while it held the lock.
            SymmError: this thread holds it, so a signal handler makes this call.
        """
        self._check()
        mine, release = self._rank + 1, locks.unlocking(_LOCKS + target)
        with self._threads:
            # The file's lock would admit the handler, and its end would release it.
            if self._inside[target]:
                raise SymmError(
                    f"{what}: expected no signal handler to make this call while it "
                    "interrupts another change of the same memory in this window; let "
                    "the handler set a flag, and make the call after it"
                )
            try:
                self._inside[target] = True
                self._acquire(target, what)
                holder = int(self._holders[target])
                if holder:
                    raise RankLeft(
                        f"{what}: rank {holder - 1} ended while it changed the memory "
                        f"of rank {target} in this window; free the window, and make "
                        "a new one of the remaining ranks",
                        ranks=(holder - 1,),
                        operation=what,
                    )
                self._holders[target] = mine
                yield
            finally:
                # Not only after the store: a signal handler may have raised before it.
                if self._holders[target] == mine:
                    self._holders[target] = 0
                self._inside[target] = False
                # The first call here, because a signal handler may raise after it.
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, release)

    def _acquire(self, target: int, what: str) -> None:
        wait = Wait(what, self._rank, self._seconds)
        while not locks.try_lock(self._fd, _LOCKS + target):
            number = int(self._holders[target])  # 0: it has just got the lock
            holder = (number - 1,) if number else ()
            if wait.pause(holder):
                raise CollectiveTimeout(
                    f"{what}: rank {self._rank} {wait.text(holder)}, which changes the "
                    f"memory of rank {target} in this window (timeout: "
                    f"{self._seconds:g} s); continue or end the rank that changes it, "
                    "or pass a longer timeout= to MPI.Comm",
                    ranks=(self._rank, *holder),
                    operation=what,
                )

    def meet(self, what: str, seconds: float = 0) -> list[int]:
        """Wait until every rank has called this as often as this one, or has ended.

        Collective. After an exception, a rank may call it again in the same place.

        Args:
            what: the call, for errors.
            seconds: how long to wait; 0: indefinitely.

        Returns:
            The ranks that have ended before.

        Raises:
            CollectiveTimeout: a rank did not come in time.
        """
        self._check()
        wait, met = Wait(what, self._rank, seconds), self._met
        met[self._rank] += 1
        try:
            while True:
                absent = [
                    rank for rank in range(len(met)) if met[rank] < met[self._rank]
                ]
                running = [rank for rank in absent if self._runs(rank)]
                if not running:
                    return absent
                if wait.pause(running):
                    raise wait.error(running)
        except BaseException:
            met[self._rank] -= 1
            raise

    def check(self, what: str, ranks: Sequence[int]) -> None:
        """Raise RankLeft if the process of one of these ranks has ended."""
        self._check()
        for rank in ranks:
            if rank != self._rank and not self._runs(rank):
                raise RankLeft(
                    f"{what}: rank {rank} has ended without freeing the window; free "
                    "the window, and make a new one of the remaining ranks",
                    ranks=(rank,),
                    operation=what,
                )

    def _runs(self, rank: int) -> bool:
        return locks.is_locked(self._fd, _ALIVE + rank)

    def _check(self) -> None:
        if self._fd < 0:
            raise ClosedError("Win: Free was called on the window; make a new one")

    def close(self) -> None:
        """Close the file, and so release this rank's locks. Local and idempotent."""
        open_files.forget(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def disown(self) -> None:
        """Close a forked child's copy, which would keep its parent's locks."""
        self.close()
