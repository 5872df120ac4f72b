"""Locks that show who is alive, and duplicates of the user's communicators.

Locks on bytes of a file, which show whether the process that holds them is alive.

They are Linux' open-file-description locks. The Linux kernel releases them when no
process has the description any more, and thus when the process ends in any way. Bytes
beyond the end of the file can be locked, too.
"""

import copy
import fcntl
import functools
import os
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

from numba_symm.launch import ranks, waiting
from numba_symm.launch.ranks import Comm, TaggedComm, checked, is_mpi
from numba_symm.launch.waiting import Wait, begin

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


_begun: list[list[tuple[Any, Any]]] = []  # Idup's results, of each communicator


@functools.cache
def _key() -> int:
    """Return the key of a communicator's own list in ``_begun``, its attribute.

    MPI drops the attribute when the communicator is freed. A new one may have the same
    handle, but has no attribute.
    """
    create = sys.modules["mpi4py.MPI"].Comm.Create_keyval
    return int(create(delete_fn=_never_used))


def _never_used(comm: object, key: int, begun: list[tuple[Any, Any]]) -> None:
    """Give up the duplicates of a communicator that is freed before a claim."""
    _begun[:] = [each for each in _begun if each is not begun]
    waiting.unfinished.extend(begun)  # MPI may still store the handles
    begun.clear()


def duplicate(comm: Comm, wait: Wait) -> Comm | TaggedComm:
    """Return a communicator whose messages cannot mix with the user's.

    Collective. An mpi4py communicator is duplicated, see :func:`duplicates`; pass
    the result to :func:`numba_symm.launch.ranks.release` in the end. Any other object
    is returned unchanged.
    """
    comm = checked(comm)
    if not is_mpi(comm):
        return comm
    (made,) = duplicates(comm, 1, wait)
    return ranks.whole(made, owned=True)


def duplicates(comm: Any, number: int, wait: Wait) -> list[Any]:
    """Return duplicates of mpi4py's communicator. Collective.

    MPI cannot cancel this call. So a rank that is interrupted before it calls
    :func:`claim` continues with the same duplicates in its next call. Otherwise it
    might use one for another purpose than the other ranks do. All duplicates of a
    communicator have the same purposes, in the same order.

    Raises:
        CollectiveTimeout: not all ranks have arrived in time; MPI cannot name them.
    """
    begun: list[tuple[Any, Any]] | None = comm.Get_attr(_key())
    if begun is None:
        begun = []
        comm.Set_attr(_key(), begun)
    if not any(each is begun for each in _begun):
        _begun.append(begun)  # first, because an interrupt may follow the start
    for index in range(number):
        if index == len(begun):
            begin(begun, comm.Idup)
        wait.until(begun[index][1].Test)
    return [made for made, _ in begun[:number]]


def has_begun(comm: Comm) -> bool:
    """Return whether an earlier call has begun the next duplicate. Local."""
    return is_mpi(comm) and bool(comm.Get_attr(_key()))  # type: ignore[attr-defined]


def claim(comm: Any) -> None:
    """Note that this rank uses duplicates, so that no later call returns them. Local.

    The other ranks may wait for this rank's messages by then, so whoever calls it
    reports a later interrupt to them.

    Args:
        comm: what :func:`duplicate` returned, or one of :func:`duplicates`.
    """
    used = comm.mpi if isinstance(comm, TaggedComm) else comm
    for each in list(_begun):
        if any(made is used for made, _ in each):
            # Of more duplicates than are used now, MPI may still store the handles.
            waiting.unfinished.extend(each)
            each.clear()
            _begun[:] = [other for other in _begun if other is not each]
    waiting.drop_finished()
