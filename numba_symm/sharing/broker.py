"""Sends file descriptors, which cannot be pickled, from a producer to its consumers.

The producer has one thread that waits for callers on a Unix socket. Its name is in
Linux' abstract namespace. So no file remains after a crash, and the processes must
share a network namespace. Callers and producer must belong to the same user.
"""

import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from numba_symm import process
from numba_symm.errors import ClosedError, ExchangeError
from numba_symm.launch.fds import credentials
from numba_symm.sharing.counters import log

COUNTERS, MEMORY = range(2)
"""The kinds of requests: for a counter file; for the memory of a shared array."""

Answer = tuple[int, int]
"""A descriptor and a number that belongs to it."""

_Received = tuple[bytes, list[tuple[int, int, bytes]], int, Any]  # by recvmsg

_REQUEST = struct.Struct("=16sBqqq")  # token, what, file, slot, serial
_REPLY = struct.Struct("=Bq")  # whether a descriptor is sent with it, its number
_GRANTED, _REFUSED, _FAILED = range(3)
_TEXT_BYTES = 4096
_BACKLOG = 1024
_PATIENCE = 30  # seconds a caller waits for the producer
_SILENCE = 5.0  # seconds that a caller may be silent
_CALLERS = 256  # that may be silent at a time, because each uses a descriptor


@dataclass(frozen=True)
class Address:
    """The address of a producer's broker.

    Attributes:
        name: the name of its socket.
        token: a secret that callers must send, because every process can list names.
    """

    name: bytes
    token: bytes = field(repr=False)


class Broker:
    """Answers requests for descriptors in its own thread.

    Requests are answered in the order in which they arrive. A caller that sends nothing
    does not delay other callers.

    Args:
        answer: returns the descriptor for a request (what, file, slot, serial), which
            is closed here after it was sent. Called in the broker's thread. It must not
            wait for anything that may wait for a caller.

    Raises:
        ExchangeError: no socket can be made.
    """

    def __init__(self, answer: Callable[[int, int, int, int], Answer]):
        self.address = Address(
            b"\0numba_symm-" + secrets.token_hex(16).encode(), secrets.token_bytes(16)
        )
        self._answer = answer
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ExchangeError(f"share: no socket for the broker: {error}") from error
        self._socket.setblocking(False)
        self._socket.bind(self.address.name)
        self._socket.listen(_BACKLOG)
        thread = threading.Thread(
            target=self._serve, name="numba_symm broker", daemon=True
        )
        process.start(thread, "share")

    def close(self) -> None:
        """Close the socket in a forked child, which does not have the thread."""
        self._socket.close()

    def _serve(self) -> None:
        # The time until which each caller may be silent, in the order of arrival.
        callers: dict[socket.socket, float] = {}
        with selectors.PollSelector() as selector:  # has no descriptor, unlike epoll
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                end = min(callers.values(), default=None)
                seconds = None if end is None else end - time.monotonic()
                for key, _ in selector.select(seconds):
                    ready = cast(socket.socket, key.fileobj)
                    if ready is not self._socket:
                        self._serve_one(ready)
                        callers[ready] = 0.0
                        continue
                    caller = self._accept()
                    if caller is not None:
                        selector.register(caller, selectors.EVENT_READ)
                        callers[caller] = time.monotonic() + _SILENCE
                now = time.monotonic()
                done = [caller for caller, end in callers.items() if end <= now]
                for caller in done or [*callers][:-_CALLERS]:
                    selector.unregister(caller)
                    del callers[caller]
                    caller.close()

    def _accept(self) -> socket.socket | None:
        """Return a new caller, or None if there is none of this user."""
        try:
            caller, _ = self._socket.accept()
        except BlockingIOError:  # it has ended
            return None
        except OSError as error:
            log.warning("a request for a shared array was lost: %s", error)
            time.sleep(0.1)  # too many files may be open, and one may be closed now
            return None
        caller.setblocking(False)
        if credentials(caller).uid == os.geteuid():
            return caller
        caller.close()  # a caller of another user finds that out by itself
        return None

    def _serve_one(self, caller: socket.socket) -> None:
        try:
            self._answer_one(caller)
        except Exception as error:  # the caller may have ended
            log.info("a request for a shared array failed: %s", error)

    def _answer_one(self, caller: socket.socket) -> None:
        request = caller.recv(_REQUEST.size + 1)
        if len(request) != _REQUEST.size:
            return
        token, *asked = _REQUEST.unpack(request)
        if not secrets.compare_digest(token, self.address.token):
            caller.send(_reply(_REFUSED, "it was not shared by this process"))
            return
        try:
            fd, number = self._answer(*asked)
        except ClosedError as error:
            caller.send(_reply(_REFUSED, str(error)))
            return
        except Exception as error:
            caller.send(_reply(_FAILED, f"{type(error).__name__}: {error}"))
            return
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
            caller.sendmsg([_REPLY.pack(_GRANTED, number)], rights)
        finally:
            os.close(fd)


@contextmanager
def asked(
    address: Address, what: int, file: int, slot: int, serial: int
) -> Iterator[Answer]:
    """Request a descriptor from a producer. Close it at the end of the block.

    Raises:
        ClosedError: the producer has ended, or refuses.
        ExchangeError: it does not answer, or the descriptor was lost.
    """
    received: list[_Received] = []
    fds: list[int] = []
    try:
        request = _REQUEST.pack(address.token, what, file, slot, serial)
        try:
            _exchange(address.name, request, received)
        except OSError as error:
            raise _failure(error) from error
        fds = _descriptors(received)
        yield _answer_of(received)
    finally:
        for fd in fds or _descriptors(received):
            os.close(fd)


def _exchange(name: bytes, request: bytes, received: list[_Received]) -> None:
    """Send a request, and append the answer to a list."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as broker:
        _limit(broker, _PATIENCE)
        broker.connect(name)
        if credentials(broker).uid != os.geteuid():
            raise ClosedError("a shared array's producer belongs to another user")
        broker.send(request)
        space = socket.CMSG_SPACE(4)
        flags = socket.MSG_CMSG_CLOEXEC
        # No Python function between the receipt and the list, because a signal handler
        # could raise there, and the descriptor would be lost.
        received.extend(map(broker.recvmsg, [_TEXT_BYTES], [space], [flags]))


def _descriptors(received: list[_Received]) -> list[int]:
    fds = array("i")
    for _, control, _, _ in received:
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _answer_of(received: list[_Received]) -> Answer:
    """Return the descriptor and its number, or raise the reason for none."""
    ((reply, _, flags, _),) = received
    if not reply:
        raise ClosedError(ENDED)
    status, number = _REPLY.unpack_from(reply)
    reason = reply[_REPLY.size :].decode(errors="replace")
    if status == _REFUSED:
        raise ClosedError(f"the producer refuses to send a shared array: {reason}")
    if status == _FAILED:
        raise ExchangeError(f"the producer cannot send a shared array: {reason}")
    fds = _descriptors(received)
    if not fds or flags & socket.MSG_CTRUNC:
        raise ExchangeError(
            "the file descriptor of a shared array was lost: this process may have "
            f"too many open files; {process.advice()}"
        )
    return fds[0], int(number)


ENDED = (
    "the process that shared this array has ended (or it runs in another network "
    "namespace: containers must share one); keep the producer running until its "
    "consumers are done"
)
"""The text for consumers after the producer has ended."""


def _failure(error: OSError) -> ClosedError | ExchangeError:
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
        return ClosedError(ENDED)
    if error.errno == errno.EAGAIN:
        return ExchangeError(
            f"the process that shared this array did not answer for {_PATIENCE} s: it "
            "may be stopped, or stuck in a call that keeps Python's lock"
        )
    return ExchangeError(f"cannot ask the process that shared this array: {error}")


def _reply(status: int, reason: str) -> bytes:
    text = reason.encode()[: _TEXT_BYTES - _REPLY.size]
    return _REPLY.pack(status, 0) + text


def _limit(connection: socket.socket, seconds: int) -> None:
    # Of the socket, not by settimeout(), which would make connect() fail immediately
    # if many callers wait.
    limit = struct.pack("ll", seconds, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
