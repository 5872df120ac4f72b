"""What moves messages on: every wait of this package, and communicators of MPI.

Every wait matches the messages that have arrived, and calls MPI, if messages pass
through it. These have a communicator of their own.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from numba_symm import environment
from numba_symm.launch import locks, waiting
from numba_symm.launch.waiting import Wait, begin

matching: dict[Callable[[], None], None] = {}
"""What every wait calls to match the messages that have arrived."""


def advance() -> None:
    """Match what has arrived. Never wait."""
    for match in tuple(matching):
        match()


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
    """Messages of MPI: those to other islands, and those without a slot or a room.

    The caller ensures that one thread at a time calls it.

    Args:
        comm: a communicator of mpi4py for these messages alone.
        unread: by rank, the bytes of messages that it has not received.

    Attributes:
        comm: the same.
        taken: how many it has matched.
    """

    def __init__(self, comm: Any, unread: Any):
        self.comm, self._unread = comm, unread
        self._sent = [0] * comm.size
        self._last: tuple[int, int, list[MPI.Request]] = 0, 0, []
        self.taken = 0
        self._kept: dict[int, tuple[list[MPI.Request], Any, int, int]] = {}
        self._looks = MOST

    @property
    def sent(self) -> list[int]:
        """How many messages this rank has sent to each rank."""
        # The last one is counted here, so that no interrupt comes before that.
        dest, before, requests = self._last
        self._sent[dest] = before + len(requests)
        return self._sent

    @property
    def has_ended(self) -> bool:
        """Whether all messages had ended at the last call of :meth:`reap`."""
        return not self._kept

    def send(
        self,
        data: Any,
        dest: int,
        tag: int,
        matched: bool,
        requests: list[MPI.Request],
    ) -> None:
        """Start to send a message, and keep its data until it was sent.

        Args:
            data: the bytes.
            dest: the rank.
            tag: the message's tag.
            matched: whether the request ends only when the message is received.
            requests: a list that gets the request, also if an interrupt follows.
        """
        self.keep(requests, data, dest, data.size)
        self._last = dest, self.sent[dest], requests
        start = self.comm.Issend if matched else self.comm.Isend
        with _spec(data) as spec:
            begin(requests, start, spec, dest, tag)

    def receive(
        self, message: MPI.Message, data: Any, requests: list[MPI.Request]
    ) -> None:
        """Start to receive a message, and keep the room for it until it has arrived."""
        self.keep(requests, data)
        with _spec(data) as spec:
            begin(requests, message.Irecv, spec)

    def keep(
        self, requests: list[MPI.Request], data: Any, dest: int = 0, nbytes: int = 0
    ) -> None:
        """Keep data until the requests that calls will append to a list have ended.

        Args:
            requests: the list.
            data: the data.
            dest: a rank that has some bytes to receive until then.
            nbytes: their number.
        """
        # The limit grows with what is kept, so a message costs the same on average.
        if len(self._kept) >= self._looks:
            self.reap()
            self._looks = MOST + 2 * len(self._kept)
        self._kept[id(requests)] = requests, data, dest, nbytes
        self._unread[dest] += nbytes  # no interrupt comes between these two

    def reap(self) -> None:
        """Drop the data that MPI has sent."""
        for key, (requests, _, dest, nbytes) in list(self._kept.items()):
            if all([each.Test() for each in requests]):
                del self._kept[key]
                self._unread[dest] -= nbytes


_MOST = (1 << 31) - 1  # items in one message of MPI, whose counts are C's int


@contextmanager
def _spec(data: Any) -> Iterator[Any]:
    """Yield what mpi4py takes to start to send or receive bytes, also very many."""
    if data.size <= _MOST:
        yield [data, MPI.BYTE]
        return
    parts, rest = divmod(data.size, _MOST)
    part = MPI.BYTE.Create_contiguous(_MOST)
    places = [0, parts * _MOST]
    made = MPI.Datatype.Create_struct([parts, rest], places, [part, MPI.BYTE])
    part.Free()
    try:
        yield [data, 1, made.Commit()]
    finally:
        made.Free()  # when the calls that were started have ended
