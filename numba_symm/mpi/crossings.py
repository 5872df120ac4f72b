"""Messages that are being copied to their arrays, also data from other islands."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm import streams
from numba_symm.environment import SIMULATED
from numba_symm.events import Event
from numba_symm.mpi import buffers
from numba_symm.mpi.calls import waited
from numba_symm.mpi.channels import Channel
from numba_symm.mpi.envelopes import Envelope, not_sent
from numba_symm.mpi.inline import HostRoom
from numba_symm.mpi.rooms import Opened, Room


class Copying(NamedTuple):
    """A message that is being copied to its array.

    Attributes:
        done: the end of the copy.
        envelope: the message.
        into: the array's items, which live until then; None: it is not copied.
        block: the sender's memory, which is mapped until then; None for data that came
            by MPI.
        room: memory of this process for such data, if a kernel or a copy reads it.
        on_host: host memory of this process for a small message.
    """

    done: "Event | Crossing"
    envelope: Envelope
    into: buffers.Items | None
    block: Any
    room: Room | None = None
    on_host: HostRoom | None = None


class Crossing:
    """The end of a copy of data that has to arrive by MPI first.

    Args:
        requests: mpi4py's requests.
        envelope: the message.
        begin: starts the copy, and returns its end.
        check: raises if the communicator has failed.
        lock: is held while MPI is asked, and while the copy is started.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        envelope: Envelope,
        begin: Callable[[], Event],
        check: Callable[[], None],
        lock: AbstractContextManager[Any],
    ):
        self._requests, self._begin, self._check = requests, begin, check
        self._envelope, self._lock = envelope, lock
        self._copied: Event | None = None
        self.block: Opened | None = None
        """The sender's memory, which is mapped until the end; None for data by MPI."""
        self.error: Exception | None = None
        """Why it was not copied; for its own request, whatever call has started it."""

    def query(self) -> bool:
        """Return whether the copy has ended or failed."""
        with self._lock:
            if self.error is None and self._copied is None:
                try:
                    if self._has_arrived():
                        self._copied = self._begin()
                except Exception as error:
                    self.error = error
        if self._copied is None:
            return self.error is not None
        return self._copied.query()

    def _has_arrived(self) -> bool:
        """Return whether the data has arrived, or raise if the sender could not."""
        status = MPI.Status()
        for request in self._requests:
            if not request.Get_status(status):
                return False
            # A request that MPI has ended before has a status without a source.
            if status.source != MPI.ANY_SOURCE and not status.Get_count(MPI.BYTE):
                raise not_sent(self._envelope)
        return MPI.Request.Testall(self._requests)

    def synchronize(self) -> None:
        """Wait until the copy has ended."""
        waited(self.query, self._check)


def on_host(room: Room, nbytes: int, stream: int) -> Any:
    """Return a copy of a room in host memory, when it has ended."""
    data = np.empty(nbytes, np.uint8)
    streams.copy_to_host(data.ctypes.data, room.address, nbytes, stream)
    if not SIMULATED:
        streams.synchronize(stream)
    return data


_PART = 1 << 30  # bytes of data in one message of MPI, whose counts are C's int


class Coming(NamedTuple):
    """The data of a message from another island.

    Attributes:
        source: the rank that sends it.
        tag: its tag.
        data: where it will be.
        requests: mpi4py's, one for each part that MPI has begun to receive.
    """

    source: int
    tag: int
    data: Any
    requests: list[MPI.Request]


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

    def coming(self, envelope: Envelope) -> Coming | None:
        """Return the data that :meth:`receive_parts` receives, if MPI sends any."""
        if (
            envelope.handle
            or envelope.follows
            or envelope.data is not None
            or not envelope.nbytes
        ):
            return None
        data = np.empty(envelope.nbytes, np.uint8)
        return Coming(envelope.source, envelope.number % self._tags, data, [])

    def receive_parts(self, coming: Coming) -> None:
        """Start to receive the parts of data that are not being received yet."""
        for part in _parts(coming.data)[len(coming.requests) :]:
            self.receive(coming.requests, [part, MPI.BYTE], coming.source, coming.tag)

    def drop(self) -> None:
        """Receive the data of messages without a receive."""
        status = MPI.Status()
        while self.comm.Iprobe(status=status):
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.receive([], [data, MPI.BYTE], status.source, status.tag)


def _parts(data: Any) -> list[Any]:
    """Return the parts of data that one message of MPI each may have."""
    return [data[start : start + _PART] for start in range(0, data.size, _PART)]
