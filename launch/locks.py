"""Locks on bytes of a file, which show whether the process that holds them is alive.

They are Linux' open-file-description locks. The Linux kernel releases them when no
process has the description any more, and thus when the process ends in any way. Bytes
beyond the end of the file can be locked, too.
"""

import copy
import fcntl
import os
import struct
import threading
from collections.abc import Sequence

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def reopened(fd: int) -> int:
    """Return a new description of ``fd``'s file; a duplicate would share its locks."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def lock(fd: int, byte: int) -> None:
    """Lock a byte that no other description has locked."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)


def try_lock(fd: int, byte: int) -> bool:
    """Lock a byte, and return whether no other description has it locked."""
    try:
        lock(fd, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlocking(byte: int) -> bytes:
    """Return the argument of F_OFD_SETLK that unlocks a byte."""
    return _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)


def unlock(fd: int, byte: int) -> None:
    """Unlock a byte."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, unlocking(byte))


def locked_by_another(fd: int, start: int, stop: int) -> tuple[int, int] | None:
    """Return a range of bytes in [start, stop) that another description locks."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request)
    kind, _, first, length, _ = _FLOCK.unpack(answer)
    if kind == fcntl.F_UNLCK:
        return None
    return max(first, start), min(first + length, stop)


def is_locked(fd: int, byte: int) -> bool:
    """Return whether another description locks a byte."""
    return locked_by_another(fd, byte, byte + 1) is not None


_users = threading.RLock()  # a finalizer may close an object in between


class Presence:
    """Locks that show which ranks' processes run.

    Args:
        fd: a descriptor of the locks' file, which the caller may close.
        start: the byte of rank 0; this rank locks the byte of its own.
        size: the number of ranks.
        rank: this rank.
    """

    def __init__(self, fd: int, start: int, size: int, rank: int):
        self._bytes: Sequence[int] = range(start, start + size)
        self._users = [1]  # of the descriptor
        self._fd = reopened(fd)
        try:
            lock(self._fd, self._bytes[rank])
        except BaseException:
            self.close()
            raise

    def part(self, members: Sequence[int]) -> "Presence":
        """Return the locks of some of the ranks. Either object may be closed first."""
        made = copy.copy(self)
        made._bytes = [self._bytes[member] for member in members]
        with _users:
            self._users[0] += 1
        return made

    def runs(self, rank: int) -> bool:
        """Return whether another rank's process runs."""
        return is_locked(self._fd, self._bytes[rank])

    def close(self) -> None:
        """Release this rank's lock, unless another object uses it."""
        with _users:
            self._users[0] -= 1
            last = self._users == [0]
        if last:
            os.close(self._fd)
