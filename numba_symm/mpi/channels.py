"""Communicators of this library's own messages: envelopes, and data for MPI."""

import math
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import environment
from numba_symm.launch import duplicates, waiting
from numba_symm.launch.waiting import Wait, begin

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
        made = duplicates.duplicates(host, number, wait)
    duplicates.claim(made[0])
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
        matched: bool = False,
        into: list[MPI.Request] | None = None,
    ) -> MPI.Request:
        """Start to send a message, and keep its data until it was sent.

        Args:
            data: the data.
            dest: the rank.
            tag: the message's tag.
            matched: whether the request is done only when a receive has matched it.
            into: an empty list that gets the request, also if an interrupt follows.

        Returns:
            The request.
        """
        requests: list[MPI.Request] = [] if into is None else into
        self.keep(requests, data)
        start = self.comm.Issend if matched else self.comm.Isend
        try:
            begin(requests, start, data, dest, tag)
        finally:  # counted even if an interrupt follows the start
            if requests:
                self.sent[dest] += 1
        return requests[0]

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
            if requests[number:]:
                self.taken += 1

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
    """

    def __init__(self, comm: Any, tags: int):
        super().__init__(comm)
        self._tags = tags

    def send_parts(self, data: Any, dest: int, number: int) -> list[MPI.Request]:
        """Send the data of a message of this rank; return the requests."""
        tag = number % self._tags
        return [self.send([part, MPI.BYTE], dest, tag) for part in _parts(data)]

    def refuse_parts(self, nbytes: int, dest: int, number: int) -> None:
        """Send empty parts instead of data, so that the receiver raises."""
        tag, empty = number % self._tags, np.empty(0, np.uint8)
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
        tag = envelope.number % self._tags
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
