"""File descriptors between the ranks of a host, over Unix sockets. No CUDA in it.

The sockets live in Linux' abstract namespace under random names: no file, so no
TMPDIR, no name left behind by a crash, and no right to trace another process is
needed. Ranks must share a network namespace, which is where such names live.
"""

import errno
import os
import secrets
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from numba_symm.errors import ArgumentError, ClosedError, ExchangeError
from numba_symm.launch.exchange import StoreExchange

_HEADER = struct.Struct("=16sI")  # the receiver's token, the sender's rank
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_CONTROL_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4)

# The receiver's queue is full, or too many descriptors of this user are in flight.
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
# An unconnected datagram socket always polls writable, so a full queue is retried.
_RETRY_SECONDS = 0.001


class IpcChannel:
    """Sends file descriptors between ranks; several may exist at once.

    Creating one is collective. What follows is not checked across ranks: wrap it in
    ``exchange.agreed`` so that a failure is every rank's. Descriptors of one sender
    arrive in the order they were sent. The caller closes every descriptor that it
    receives; one is never inherited by a child process. One thread at a time.

    Args:
        exchange: the ranks; it carries the sockets' names.
        timeout: seconds that one send or receive may wait.

    Raises:
        SymmError: on all ranks, if one could not create its socket.
    """

    def __init__(self, exchange: StoreExchange, timeout: float = 30.0) -> None:
        self.rank = exchange.rank
        self.size = exchange.size
        self._timeout = timeout
        self._token = secrets.token_bytes(16)
        self._stash: list[deque[int]] = [deque() for _ in range(self.size)]
        with ExitStack() as undo:
            with exchange.agreed("opening a channel for file descriptors"):
                self._socket = undo.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                )
                _bind(self._socket)
            # Gathering the names also says that every socket is bound.
            self._peers = exchange.all_gather(
                (self._socket.getsockname(), self._token),
                "names of the channels for file descriptors",
            )
            undo.pop_all()

    def send_fd(self, dst: int, fd: int) -> None:
        """Send a descriptor of ``fd``'s file to rank ``dst``; ``fd`` stays open.

        Raises:
            ExchangeError: ``dst`` is gone, or its queue stayed full.
        """
        self._check(dst)
        name, token = self._peers[dst]
        message = [_HEADER.pack(token, self.rank)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
        deadline = time.monotonic() + self._timeout
        while True:
            try:  # socket.send_fds ignores its address
                self._socket.sendmsg(message, rights, 0, name)
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise ExchangeError(self._unsent(dst, error)) from error
            if time.monotonic() > deadline:
                raise ExchangeError(
                    f"rank {self.rank} waited {self._timeout:g} s to send a file "
                    f"descriptor to rank {dst}, which does not receive: that rank "
                    "may have failed, be stuck or have made another call"
                )
            # The peer may itself be waiting to send to us: make room.
            self._receive(_RETRY_SECONDS)

    def recv_fd(self, src: int) -> int:
        """Return the next descriptor from rank ``src``.

        Raises:
            ExchangeError: none came before the deadline, or it was lost because
                this process has too many open files.
        """
        self._check(src)
        deadline = time.monotonic() + self._timeout
        while not self._stash[src]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ExchangeError(
                    f"rank {self.rank} waited {self._timeout:g} s for a file "
                    f"descriptor from rank {src}: that rank may have failed, be "
                    "stuck or have made another call"
                )
            self._receive(remaining)
        return self._stash[src].popleft()

    def all_gather_fds(self, fd: int) -> list[int]:
        """Return a descriptor of every rank's file, in rank order. Collective.

        The own entry is a duplicate of ``fd``, so that every entry may be closed.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        for dst in others:
            self.send_fd(dst, fd)
        with ExitStack() as undo:
            gathered = {self.rank: os.dup(fd)}
            undo.callback(os.close, gathered[self.rank])
            for src in others:
                gathered[src] = self.recv_fd(src)
                undo.callback(os.close, gathered[src])
            undo.pop_all()
        return [gathered[rank] for rank in range(self.size)]

    def broadcast_fds(self, src: int, fd: int | None = None) -> int:
        """Return a descriptor of rank ``src``'s file ``fd``. Collective.

        Args:
            src: the rank that sends; the same on all ranks.
            fd: what ``src`` sends, which gets a duplicate of it; unused elsewhere.
        """
        self._check(src)
        if self.rank != src:
            return self.recv_fd(src)
        if fd is None:
            raise ArgumentError(f"broadcast_fds: rank {src} sends, and passed no fd")
        for dst in range(self.size):
            if dst != src:
                self.send_fd(dst, fd)
        return os.dup(fd)

    def discard(self) -> None:
        """Close all descriptors that have come and that nobody took. Local.

        For a failed collective: once every rank has left it, none is under way.
        """
        more = True
        while more:
            with suppress(ExchangeError):  # what was lost need not be closed
                more = self._receive(0)
        for stashed in self._stash:
            _close_all(stashed)
            stashed.clear()

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took. Local, idempotent."""
        self._socket.close()
        for stashed in self._stash:
            _close_all(stashed)
            stashed.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise ArgumentError(f"rank {peer}: there are ranks 0 to {self.size - 1}")
        if self._socket.fileno() < 0:
            raise ClosedError("the channel for file descriptors was closed")

    def _receive(self, seconds: float) -> bool:
        """Wait for one message and stash its descriptor, or drop a stranger's.

        Returns False if none came.
        """
        ready = select.poll()  # unlike select.select, right for descriptors past 1023
        ready.register(self._socket, select.POLLIN)
        if not ready.poll(seconds * 1000):
            return False
        data, control, flags, _ = self._socket.recvmsg(
            _HEADER.size + 1, _CONTROL_SPACE, socket.MSG_CMSG_CLOEXEC
        )
        uid, fds = _parse(control)
        src = self._sender(data, uid)
        truncated = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        if src is not None and len(fds) == 1 and not truncated:
            self._stash[src].append(fds[0])
            return True
        _close_all(fds)
        if src is not None:
            raise ExchangeError(
                f"the file descriptor that rank {src} sent to rank {self.rank} was "
                "lost: this process may have too many open files (see ulimit -n)"
            )
        return True

    def _sender(self, data: bytes, uid: int | None) -> int | None:
        """Return the rank that a message came from, None if it is a stranger's."""
        # Process ids are not compared: each pid namespace has its own.
        if len(data) != _HEADER.size or uid != os.getuid():
            return None
        token, src = _HEADER.unpack(data)
        known = secrets.compare_digest(token, self._token) and src < self.size
        return src if known else None

    def _unsent(self, dst: int, error: OSError) -> str:
        text = f"rank {self.rank} could not send a file descriptor to rank {dst}"
        if error.errno == errno.ECONNREFUSED:
            return (
                f"{text}, whose channel is gone: that rank has ended or closed it, "
                "or runs in another network namespace (containers of one job must "
                "share one)"
            )
        return f"{text}: {error.strerror}"


def _bind(sock: socket.socket) -> None:
    """Bind ``sock`` to a random abstract name."""
    sock.setblocking(False)
    # Before binding, so that no message comes without its sender's credentials.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    sock.bind(b"\0numba_symm-" + secrets.token_hex(16).encode())


def _parse(control: list[tuple[int, int, bytes]]) -> tuple[int | None, list[int]]:
    """Return the sender's user id, None if not told, and the descriptors."""
    uid = None
    fds = array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            uid = _CREDENTIALS.unpack(data)[1]
    return uid, fds.tolist()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
