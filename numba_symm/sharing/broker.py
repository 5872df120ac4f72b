"""File descriptors from a producer to whoever asks, since they cannot be pickled.

The producer has one thread that waits for callers on a Unix socket. Its name is in
Linux' abstract namespace: no file is left behind by a crash, and the processes must
share a network namespace. Callers and producer must be of the same user.
"""

import errno
import os
import secrets
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from numba_symm.errors import ClosedError, ExchangeError
from numba_symm.sharing.guard import log

COUNTERS, MEMORY = range(2)
"""What one may ask for: a counter file; the memory of a shared array."""

Answer = tuple[int, int]
"""A descriptor, which the receiver closes, and a number that belongs to it."""

_REQUEST = struct.Struct("=16sBqqq")  # token, what, file, slot, serial
_REPLY = struct.Struct("=?q")  # whether a descriptor comes along, its number
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_TEXT_BYTES = 4096
_BACKLOG = 1024
_PATIENCE = 30  # seconds a caller waits for the producer
_SHORT_PATIENCE = 5  # seconds the producer waits for a caller, others waiting behind it


@dataclass(frozen=True)
class Address:
    """Where a producer's broker is.

    Attributes:
        name: of its socket.
        token: what callers must know besides, as names can be listed by everyone.
    """

    name: bytes
    token: bytes = field(repr=False)


class Broker:
    """Answers requests for descriptors in a thread of its own.

    Args:
        answer: returns the descriptor for a request (what, file, slot, serial), which
            is closed here once it is sent. Called in the broker's thread; it must not
            wait for anything that may wait for a caller.
    """

    def __init__(self, answer: Callable[[int, int, int, int], Answer]):
        self.address = Address(
            b"\0numba_symm-" + secrets.token_hex(16).encode(), secrets.token_bytes(16)
        )
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.address.name)
        self._socket.listen(_BACKLOG)
        threading.Thread(
            target=self._serve, name="numba_symm broker", daemon=True
        ).start()

    def close(self) -> None:
        """Let go of the socket, for a forked child, where the thread is not."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError as error:
                if self._socket.fileno() < 0:
                    return
                log.warning("a request for a shared array was lost: %s", error)
                time.sleep(0.1)  # too many open files, say: let somebody close some
                continue
            with caller:
                try:
                    self._serve_one(caller)
                except Exception as error:  # the caller has gone, or is stuck
                    log.info("a request for a shared array failed: %s", error)

    def _serve_one(self, caller: socket.socket) -> None:
        _limit(caller, _SHORT_PATIENCE)
        if _uid(caller) != os.geteuid():
            caller.send(_refusal("it belongs to another user"))
            return
        request = caller.recv(_REQUEST.size + 1)
        if len(request) != _REQUEST.size:
            return
        token, *asked = _REQUEST.unpack(request)
        if not secrets.compare_digest(token, self.address.token):
            caller.send(_refusal("it was not shared here"))
            return
        try:
            fd, number = self._answer(*asked)
        except Exception as error:
            caller.send(_refusal(f"{type(error).__name__}: {error}"))
            return
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
            caller.sendmsg([_REPLY.pack(True, number)], rights)
        finally:
            os.close(fd)


def ask(address: Address, what: int, file: int, slot: int, serial: int) -> Answer:
    """Ask a producer for a descriptor, which the caller closes.

    Raises:
        ClosedError: the producer has ended, or refuses.
        ExchangeError: it does not answer, or the descriptor was lost.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as broker:
        _limit(broker, _PATIENCE)
        try:
            broker.connect(address.name)
            if _uid(broker) != os.geteuid():
                raise ClosedError("a shared array's producer belongs to another user")
            broker.send(_REQUEST.pack(address.token, what, file, slot, serial))
            reply, control, flags, _ = broker.recvmsg(
                _TEXT_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise _failure(error) from error
    fds = array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not reply:
        raise ClosedError(ENDED)
    granted, number = _REPLY.unpack_from(reply)
    if not granted:
        reason = reply[_REPLY.size :].decode(errors="replace")
        raise ClosedError(f"the producer refuses to hand out a shared array: {reason}")
    if not fds or flags & socket.MSG_CTRUNC:
        raise ExchangeError(
            "the file descriptor of a shared array was lost: this process may have "
            "too many open files (see ulimit -n)"
        )
    return fds[0], number


ENDED = (
    "the process that shared this array has ended (or it runs in another network "
    "namespace: containers must share one); keep the producer running until its "
    "consumers are done"
)
"""What a consumer is told once the producer is gone."""


def _failure(error: OSError) -> ClosedError | ExchangeError:
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
        return ClosedError(ENDED)
    if error.errno == errno.EAGAIN:
        return ExchangeError(
            f"the process that shared this array did not answer for {_PATIENCE} s: it "
            "may be stopped, or stuck in a call that keeps Python's lock"
        )
    return ExchangeError(f"cannot ask the process that shared this array: {error}")


def _refusal(reason: str) -> bytes:
    text = reason.encode()[: _TEXT_BYTES - _REPLY.size]
    return _REPLY.pack(False, 0) + text


def _limit(connection: socket.socket, seconds: int) -> None:
    # Of the socket, not by settimeout(), which would make connect() fail at once
    # when many callers wait.
    limit = struct.pack("ll", seconds, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _uid(connection: socket.socket) -> int:
    """Return the user that the other end belongs to."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    return int(_CREDENTIALS.unpack(credentials)[1])
