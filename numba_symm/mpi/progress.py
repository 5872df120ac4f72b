"""Postponed messages: every wait of this package sends their data when it may.

A peer may wait for such data while this rank waits for something else, also within MPI
or on the GPU. So a thread does the same, while there are any.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from mpi4py import MPI

from numba_symm import streams, threads

_PAUSE = 1e-3  # seconds between two looks of the thread


class StartedMessage(Protocol):
    """Such a message."""

    @property
    def post(self) -> object:
        """Return what identifies its communicator."""

    def hurry(self) -> None:
        """Send it now; wait for nothing but the copy."""

    def drop(self, error: Exception) -> None:
        """End without the receiver; its request raises an error."""

    def advance(self) -> bool:
        """Do what can be done now; return whether it has ended. Never wait or raise."""


_pending: list[StartedMessage] = []
_matching: list[tuple[Callable[[], None], Any]] = []
_lock = threading.Lock()  # of the thread's start and end
_thread: threading.Thread | None = None
_stopped = False


def add(message: StartedMessage) -> None:
    """Let waits advance a message, until its ``advance`` returns True."""
    _pending.append(message)


def hurry_all(post: object = None) -> None:
    """Send those of a communicator, or all, whatever their receivers do."""
    for each in list(_pending):
        if post in (None, each.post):
            each.hurry()
            remove(each)


def drop_all(post: object, error: Exception) -> None:
    """Drop those of a communicator, which ends; their requests raise an error."""
    for each in list(_pending):
        if each.post is post:
            each.drop(error)


def remove(message: StartedMessage) -> None:
    """Let no wait advance it any more. Idempotent."""
    with suppress(ValueError):  # also if another thread removes it now
        _pending.remove(message)


def match_by(match: Callable[[], None], lock: Any) -> None:
    """Call this in every wait; it matches the messages that have arrived.

    Args:
        match: what to call.
        lock: the lock that it takes.
    """
    _matching.append((match, lock))


def forget(match: Callable[[], None]) -> None:
    """Call this no more."""
    _matching[:] = [each for each in _matching if each[0] != match]


def advance() -> None:
    """Do what can be done now for all messages. Never wait."""
    for match, _ in tuple(_matching):
        match()
    _advance_pending()


def _advance_beside() -> None:
    """Do the same in the thread, which waits for no lock.

    An interrupt may have left a lock to the main thread for ever.
    """
    for match, lock in tuple(_matching):
        if lock.acquire(blocking=False):
            try:
                match()
            finally:
                lock.release()
    _advance_pending()


def _advance_pending() -> None:
    if not _pending:
        return
    with streams.relaxed():  # the program may be capturing one of its streams
        for each in list(_pending):
            if each.advance():
                remove(each)


def in_background(enter: Callable[[str], None]) -> None:
    """Start a thread that advances messages, if several threads may call MPI.

    Args:
        enter: makes the rank's GPU current in the thread, for a named call.
    """
    global _thread
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    with _lock:
        if (_thread is None or not _thread.is_alive()) and not _stopped:
            made = threading.Thread(
                target=_serve, args=(enter,), name="numba_symm messages", daemon=True
            )
            threads.start(made, "Isend")
            _thread = made


def _serve(enter: Callable[[str], None]) -> None:
    global _thread
    enter("Isend")
    while True:
        with _lock:
            if _stopped or not _pending or MPI.Is_finalized():
                _thread = None
                return
        _advance_beside()
        time.sleep(_PAUSE)


def stop() -> None:
    """End the thread, at the end of the program."""
    global _stopped
    thread, _stopped = _thread, True
    try:
        if thread is not None:
            thread.join()
    finally:
        _stopped = False
