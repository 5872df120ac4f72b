"""What moves messages on: every wait of this package, and communicators of MPI.

Every wait matches the messages that have arrived, and sends the data of those that were
postponed when it may. A peer may wait for such data while this rank waits for something
else, also within MPI or on the GPU. So a thread does the same, while there are any.

Envelopes and data for other islands have communicators of their own.
"""

import math
import operator
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import environment, process
from numba_symm.gpu import streams
from numba_symm.launch import locks, waiting
from numba_symm.launch.waiting import Wait, begin

_PAUSE = 1e-3  # seconds between two looks of the thread

_pending: dict[Any, None] = {}  # of ``p2p.Sending``
_matching: list[tuple[Callable[[], None], Any]] = []
_lock = threading.Lock()  # of the thread's start and end
_thread: threading.Thread | None = None
_stopped = False


def add(message: Any, enter: Callable[[str], None]) -> None:
    """Let waits advance a message, until its ``advance`` returns True.

    A thread does the same, if several threads may call MPI.

    Args:
        message: the message.
        enter: makes the rank's GPU current in the thread, for a named call.
    """
    global _thread
    _pending[message] = None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    with _lock:
        if (_thread is None or not _thread.is_alive()) and not _stopped:
            made = threading.Thread(
                target=_serve, args=(enter,), name="numba_symm messages", daemon=True
            )
            process.start(made, "Isend")
            _thread = made


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


def remove(message: Any) -> None:
    """Let no wait advance it any more. Idempotent."""
    _pending.pop(message, None)


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


def advance(blocking: bool = True) -> None:
    """Do what can be done now for all messages. Never wait.

    Args:
        blocking: whether it may wait for locks. The thread does not, because an
            interrupt may have left a lock to the main thread for ever.
    """
    for match, lock in tuple(_matching):
        if blocking:
            match()
        elif lock.acquire(blocking=False):
            try:
                match()
            finally:
                lock.release()
    if _pending:
        with streams.relaxed():  # the program may be capturing one of its streams
            for each in list(_pending):
                if each.advance():
                    remove(each)


def _serve(enter: Callable[[str], None]) -> None:
    global _thread
    enter("Isend")
    while True:
        with _lock:
            if _stopped or not _pending or MPI.Is_finalized():
                _thread = None
                return
        advance(blocking=False)
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


MOST = 16
"""Messages that are kept before any is looked at."""


def apart(host: Any, number: int, look: Callable[[], bool]) -> list[Any]:
    """Return duplicates of mpi4py's communicator, for channels. Collective.

    Args:
        host: the communicator.
        number: how many.
        look: what the wait calls, see :func:`after_messages`.

    Raises:
        CollectiveTimeout: not all ranks have come within the set-up timeout.
    """
    wait = Wait("Comm", host.rank, environment.chosen_setup_timeout())
    with waiting.watching(look):
        made = locks.duplicates(host, number, wait)
    locks.claim(made[0])
    return made


def after_messages(
    failed: Callable[[], bool], check: Callable[[], object]
) -> Callable[[], bool]:
    """Return what a wait for messages of all ranks calls to look for failures.

    A rank may fail after it has sent its message. The message may arrive later than the
    report of the failure, but before this raises.

    Args:
        failed: returns whether the communicator has failed.
        check: raises if it has.
    """
    known = math.inf

    def look() -> bool:
        nonlocal known
        if failed():
            known = min(known, time.monotonic())
            if time.monotonic() - known >= _ARRIVES:
                check()
        return False

    return look


_ARRIVES = 1.0  # seconds after a report, in which messages that were sent before arrive


class Channel:
    """A communicator whose messages are counted.

    The caller ensures that one thread at a time calls it.

    Args:
        comm: a communicator of mpi4py for these messages alone.

    Attributes:
        comm: the same.
        sent: how many messages this rank has sent to each rank.
        taken: how many it has received.
    """

    def __init__(self, comm: Any):
        self.comm = comm
        self.sent = [0] * comm.size
        self.taken = 0
        self._kept: list[tuple[list[MPI.Request], Any, Ended]] = []
        self._looks = MOST

    @property
    def sends(self) -> bool:
        """Whether a message had not ended at the last call of :meth:`reap`."""
        return bool(self._kept)

    def send(
        self,
        data: Any,
        dest: int,
        tag: int = 0,
        requests: list[MPI.Request] | None = None,
    ) -> None:
        """Start to send a message, and keep its data until it was sent.

        Args:
            data: the data.
            dest: the rank.
            tag: the message's tag.
            requests: a list that gets the request, also if an interrupt follows.
        """
        requests = [] if requests is None else requests
        self.keep(requests, data)
        number = len(requests)
        try:
            begin(requests, self.comm.Isend, data, dest, tag)
        finally:  # counted even if an interrupt follows the start
            self.sent[dest] += len(requests) - number

    def receive(
        self,
        requests: list[MPI.Request],
        room: Any,
        source: int,
        tag: int = 0,
        ended: "Ended | None" = None,
    ) -> None:
        """Start to receive a message, and keep its room until it has arrived.

        Its request is appended to ``requests``; ``ended`` is as for :meth:`keep`.
        """
        self.keep(requests, room, ended)
        number = len(requests)
        try:
            begin(requests, self.comm.Irecv, room, source, tag)
        finally:  # counted even if an interrupt follows the start
            self.taken += len(requests) - number

    def keep(
        self, requests: list[MPI.Request], data: Any, ended: "Ended | None" = None
    ) -> None:
        """Keep data until the requests that calls will append to a list have ended.

        Args:
            requests: the list.
            data: the data.
            ended: returns whether a request has ended; None: its ``Test``, after which
                nobody can look at its status.
        """
        # The limit grows with what is kept, so a message costs the same on average.
        if len(self._kept) >= self._looks:
            self.reap()
            self._looks = MOST + 2 * len(self._kept)
        self._kept.append((requests, data, ended or _tested))

    def reap(self) -> None:
        """Drop the data that MPI has sent."""
        self._kept = [each for each in self._kept if not all(map(each[2], each[0]))]


Ended = Callable[[MPI.Request], bool]
_tested: Ended = operator.methodcaller("Test")
seen: Ended = operator.methodcaller("Get_status")
"""Returns whether a request has ended, whose status the caller looks at later."""


_PART = 1 << 30  # bytes of data in one message of MPI, whose counts are C's int


class Data(Channel):
    """The data of messages to other islands, as messages of MPI.

    Args:
        comm: as for :class:`Channel`.
        tags: the number of tags. That of data is the number of its message.

    Attributes:
        tags: the same.
    """

    def __init__(self, comm: Any, tags: int):
        super().__init__(comm)
        self.tags = tags

    def send_parts(
        self, data: Any, dest: int, number: int, requests: list[MPI.Request]
    ) -> None:
        """Start to send the parts of a message's data that are not being sent yet."""
        for part in _parts(data)[len(requests) :]:
            self.send([part, MPI.BYTE], dest, number % self.tags, requests)

    def refuse_parts(self, nbytes: int, dest: int, number: int) -> None:
        """Send empty parts instead of data, so that the receiver raises."""
        tag, empty = number % self.tags, np.empty(0, np.uint8)
        for _ in range(0, nbytes, _PART):
            self.send([empty, MPI.BYTE], dest, tag)

    def receive_parts(
        self,
        envelope: Any,
        data: Any,
        requests: list[Any],
        ended: Ended | None = None,
    ) -> None:
        """Start to receive the parts of data that are not being received yet."""
        tag = envelope.number % self.tags
        for part in _parts(data)[len(requests) :]:
            self.receive(requests, [part, MPI.BYTE], envelope.source, tag, ended)

    def drop(self) -> None:
        """Receive the data of messages without a receive."""
        status = MPI.Status()
        while self.comm.Iprobe(status=status):
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.receive([], [data, MPI.BYTE], status.source, status.tag)


def _parts(data: Any) -> list[Any]:
    """Return the parts of data that one message of MPI each may have."""
    return [data[start : start + _PART] for start in range(0, data.size, _PART)]
