"""What sends and receives keep: items, messages that were not read, a stream."""

import ctypes
from typing import Any, NamedTuple

from numba_symm import streams
from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import SIMULATED
from numba_symm.events import Event
from numba_symm.mpi import buffers
from numba_symm.mpi.rooms import Room, size_of
from numba_symm.streams import SideStream


class CopyStream:
    """The stream of one communicator's copies, which may run beside the program's work.

    Its events are used again, because to make one takes longer than to record it.

    Attributes:
        stream: its handle.
    """

    def __init__(self) -> None:
        self._side = SideStream(0)
        self.stream = self._side.stream
        self._events: list[Event] = []  # those that are not in use

    def event(self, stream: int) -> Event:
        """Return the end of a stream's work so far."""
        try:
            found = self._events.pop()
        except IndexError:
            found = Event()
        found.record(stream)
        return found

    def reuse(self, event: Event) -> None:
        """Take back an event that no caller will query any more."""
        self._events.append(event)

    def settle(self) -> None:
        """Wait for all copies."""
        if not SIMULATED:
            streams.synchronize(self.stream)

    def close(self) -> None:
        """Wait for all copies; there are none later."""
        self.settle()
        self._side.close()


class Outgoing(NamedTuple):
    """A message of certain items to a rank, which can be sent many times.

    Attributes:
        items: the items, without their array.
        dest: the rank.
        nbytes: the message's size.
        address: of the first item.
        size: of the room that it needs.
        apart: whether the rank is on another island.
        plain: the first and the last of the arguments of the compiled ``send``; None:
            it is not for this message.
    """

    items: buffers.Items
    dest: int
    nbytes: int
    address: int
    size: int
    apart: bool
    plain: tuple[tuple[int, ...], tuple[int, ...]] | None

    @classmethod
    def of(cls, post: Any, found: buffers.Items, dest: int) -> "Outgoing":
        """Return the message, or refuse its destination."""
        post.check_message("Send", dest, 0)
        nbytes, apart = found.nbytes, post.islands[dest] != post.islands[post.rank]
        items, address, size = (
            found._replace(array=None),
            found.address,
            size_of(nbytes),
        )
        plain = None
        if not apart and found.layout.runs is None and 0 < nbytes <= message_copy.MOST:
            stack = ctypes.addressof(post.words.rooms.stack(size))
            before = post.words.port_at, stack, address, nbytes
            plain = before, (*post.to[dest], post.context, post.places[post.rank])
        return cls(items, dest, nbytes, address, size, apart, plain)


class Incoming(NamedTuple):
    """The items that a receive writes.

    Attributes:
        items: the items, without their array.
        nbytes: their size.
        address: of the first item.
        dense: whether they have no gaps.
    """

    items: buffers.Items
    nbytes: int
    address: int
    dense: bool

    @classmethod
    def of(cls, found: buffers.Items) -> "Incoming":
        """Return the items of an array."""
        items, dense = found._replace(array=None), found.layout.runs is None
        return cls(items, found.nbytes, found.address, dense)


class Unread(NamedTuple):
    """A message of this rank that its receiver has not read.

    Attributes:
        number: the message's.
        dest: the rank to which it was sent.
        nbytes: its size.
        slot: of its words, or ``NO_SLOT``.
        room: the memory from which it is read.
        used: what it needs: the array until it was copied, or MPI's requests.
    """

    number: int
    dest: int
    nbytes: int
    slot: int
    room: Room | None
    used: list[Any]
