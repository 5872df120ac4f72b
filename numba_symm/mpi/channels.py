"""Communicators of this library's own messages: envelopes, receipts and data."""

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
from numba_symm.mpi.rooms import Room

SMALL = 1 << 16
"""Bytes of a message whose receipt may be sent later, with those of other messages."""

MOST = 16
"""The number of messages in one receipt, at most."""


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
        self._kept: list[tuple[list[MPI.Request], Any]] = []
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
        self, requests: list[MPI.Request], room: Any, source: int, tag: int = 0
    ) -> None:
        """Start to receive a message, and keep its room until it has arrived.

        Its request is appended to ``requests``.
        """
        self.keep(requests, room)
        number = len(requests)
        try:
            begin(requests, self.comm.Irecv, room, source, tag)
        finally:  # counted even if an interrupt follows the start
            if requests[number:]:
                self.taken += 1

    def keep(self, requests: list[MPI.Request], data: Any) -> None:
        """Keep data until the requests that calls will append to a list have ended."""
        # The limit grows with what is kept, so a message costs the same on average.
        if len(self._kept) >= self._looks:
            self.reap()
            self._looks = MOST + 2 * len(self._kept)
        self._kept.append((requests, data))

    def reap(self) -> None:
        """Drop the data that MPI has sent."""
        if self._kept:
            self._kept = [each for each in self._kept if not all(map(_done, each[0]))]


_done = operator.methodcaller("Test")


class Receipts(Channel):
    """Receipts, after which the sender of a message reuses the message's memory.

    Attributes:
        unread: the memory of this rank's messages without a receipt, by number.
    """

    def __init__(self, comm: Any):
        super().__init__(comm)
        self.unread: dict[int, Room | None] = {}
        self._owed: dict[int, list[int]] = {}
        # A sender may wait for receipts, so they are not kept for much of its limit.
        limit = environment.message_limit()
        self._small = min(SMALL, limit // (4 * MOST)) if limit else SMALL

    def owe(self, source: int, number: int, nbytes: int) -> None:
        """Send a receipt for a message, now or with those of later messages."""
        owed = self._owed.setdefault(source, [])
        owed.append(number)
        if nbytes > self._small or len(owed) >= MOST:
            self._give(source)

    def give_all(self) -> None:
        """Send the receipts of all messages."""
        for source in list(self._owed):
            self._give(source)

    def _give(self, source: int) -> None:
        numbers = self._owed.pop(source)  # first: an interrupt must not send them again
        self.send(np.array(numbers, np.int64), source)

    def take(self) -> list[tuple[int, Room | None]]:
        """Return the messages whose receipts have arrived: numbers and memory."""
        found: list[tuple[int, Room | None]] = []
        status = MPI.Status()
        while self.comm.Iprobe(tag=0, status=status):  # others are of set-up calls
            numbers = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            requests: list[MPI.Request] = []
            self.receive(requests, numbers, status.source)
            requests[0].Wait()
            found += [(each, self.unread.pop(each)) for each in numbers.tolist()]
        return found
