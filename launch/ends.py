"""The sockets of channels for file descriptors, and the descriptors that arrive."""

import os
import socket
import struct
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

_UCRED = struct.Struct("=iII")


class Credentials(NamedTuple):
    """The process at the other end of a connection, as the Linux kernel reports it."""

    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    """Return the credentials of the other end of a connected Unix socket.

    Its process id is that of this process' pid namespace; 0 for a process outside it.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Credentials._make(_UCRED.unpack(found))


class Links:
    """Connected sockets to other ranks, and what has arrived, for several channels.

    Attributes:
        ends: by the rank's number in the first channel, until that end closes.
        stash: by channel and rank, what has arrived; None: a descriptor that was lost.
        users: how many channels have not been closed.
        lock: held by a thread that receives, for any channel.
    """

    def __init__(self) -> None:
        self.ends: dict[int, socket.socket] = {}
        self.stash: defaultdict[tuple[int, int], deque[int | None]]
        self.stash = defaultdict(deque)
        self.users = 1
        self.lock = threading.RLock()

    def drop(self, number: int) -> None:
        """Close what has arrived for a channel; with the last channel, the sockets."""
        with self.lock:
            self.users -= 1
            while not self.users and self.ends:
                self.ends.popitem()[1].close()
            kept = [key for key in self.stash if key[0] == number or not self.users]
            for key in kept:
                close_all(self.stash.pop(key))


def descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that were sent with a message."""
    fds = array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_all(fds: Iterable[int | None]) -> None:
    """Close descriptors; None stands for one that was lost."""
    for fd in fds:
        if fd is not None:
            os.close(fd)
