"""Envelopes, which announce messages, and the receives of them and of the data."""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from numba_symm.errors import SymmError
from numba_symm.launch.waiting import begin
from numba_symm.mpi import buffers, inline
from numba_symm.mpi.calls import waited
from numba_symm.mpi.errors import MPIError, refusal
from numba_symm.mpi.rooms import Room

HEADER = struct.Struct("<qqqq")
"""The number, the bytes and the offset of an envelope, and whether its block is for one
message only; its handle follows, or the data of a small message."""

FOLLOWS = -1
"""The offset of data that has no place yet; the place follows in another message."""

INLINE = -2
"""The offset of data that is part of the envelope, after the header."""

ROOM = HEADER.size + max(inline.MOST, 4096)
"""Bytes of an envelope, at most; a handle is shorter than 4096."""


class Envelope(NamedTuple):
    """What a sender announces of its message.

    Attributes:
        source: the sender.
        tag: the message's tag.
        number: the message's number among the sender's.
        nbytes: its size.
        offset: its first byte in the sender's block, or ``FOLLOWS`` or ``INLINE``.
        handle: names that block; empty if there is none.
        once: whether the block is for this message only.
        data: the message itself, if it is small.
    """

    source: int
    tag: int
    number: int
    nbytes: int
    offset: int
    handle: bytes
    once: bool = False
    data: memoryview | None = None

    @property
    def follows(self) -> bool:
        """Whether its place follows in a message of the channel of data."""
        return self.offset == FOLLOWS


def announced(number: int, nbytes: int, offset: int, room: Room | None) -> bytes:
    """Return an envelope of MPI."""
    handle, once = (b"", False) if room is None else (room.handle, bool(room.once))
    return HEADER.pack(number, nbytes, offset, once) + handle


def with_data(number: int, data: Any) -> bytes:
    """Return the envelope of a small message, which contains its bytes."""
    return HEADER.pack(number, data.nbytes, INLINE, False) + bytes(data)


def place(number: int, room: Room | None) -> bytes:
    """Return the message with the place of a message's data; None: it has none."""
    offset, length = (0, 0) if room is None else (room.offset, len(room.handle))
    return announced(number, length, offset, room)


def place_in(text: bytearray, envelope: Envelope) -> Envelope:
    """Return an envelope with the place in such a message, or raise."""
    _, length, offset, once = HEADER.unpack_from(text)
    if not length:
        raise not_sent(envelope)
    handle = bytes(text[HEADER.size : HEADER.size + length])
    return envelope._replace(offset=offset, handle=handle, once=bool(once))


def not_sent(envelope: Envelope) -> MPIError:
    """Return the receiver's error for a message that its sender could not send."""
    return MPIError(
        MPI.ERR_OTHER,
        f"Recv: rank {envelope.source} could not send its message with tag "
        f"{envelope.tag}; its own error has the cause",
    )


def items_of(envelope: Envelope, into: buffers.Items) -> int:
    """Return how many items a message has, or refuse it; the last may be a part."""
    if envelope.nbytes > into.nbytes:
        raise refusal(
            MPI.ERR_TRUNCATE,
            f"Recv: expected at most {into.nbytes} bytes from rank {envelope.source} "
            f"with tag {envelope.tag}, got {envelope.nbytes}; pass a larger array",
        )
    return -(-envelope.nbytes // max(into.layout.nbytes, 1))


def nothing() -> None:
    """Check nothing, where MPI ends the wait in any case or each look checks."""


class Posted:
    """A receive of an envelope.

    Args:
        room: where it arrives; None if it has arrived.
        ended: is called when it has arrived or was cancelled.
        envelope: the envelope, if it has arrived.
        source: the rank from which it is expected.
        tag: the tag that it should have.
    """

    def __init__(
        self,
        room: Any = None,
        ended: Callable[["Posted"], None] | None = None,
        envelope: Envelope | None = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
    ):
        self._requests: list[MPI.Request] = []  # mpi4py's, until it has arrived
        self._room, self._ended = room, ended
        self._envelope = envelope
        self._wanted = source, tag
        self._status = MPI.Status()
        self.cancelled = False

    def start(self, comm: Any) -> None:
        """Start the receive. This object lives until MPI no longer writes its room."""
        begin(self._requests, comm.Irecv, self._room, *self._wanted)

    @property
    def envelope(self) -> Envelope:
        """The envelope, which has arrived."""
        assert self._envelope is not None
        return self._envelope

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until it has arrived or was cancelled."""
        waited(partial(self.look, check), nothing)

    def look(self, check: Callable[[], None]) -> bool:
        """Return whether it has arrived or was cancelled; check if it has not."""
        if self.test():
            return True
        try:
            check()
        except SymmError as error:
            source, tag = self._wanted
            rank = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"
            which = "any tag" if tag == MPI.ANY_TAG else f"tag {tag}"
            error.add_note(f"A receive was waiting for a message from {rank}, {which}.")
            raise
        return False

    def test(self) -> bool:
        """Return whether it has arrived or was cancelled."""
        if not self._requests:
            return True
        # MPI reports the end once. An interrupt may have prevented that it was read.
        if self._requests[0] and not self._requests[0].Test(self._status):
            return False
        self._read()
        return True

    def cancel(self) -> None:
        """Cancel the receive, unless a message has matched it."""
        if not self._requests:
            self.cancelled = self._envelope is None  # it was not started
        elif self._requests[0]:
            self._requests[0].Cancel()

    def _read(self) -> None:
        status = self._status
        self.cancelled = status.Is_cancelled()
        if not self.cancelled:
            number, nbytes, offset, once = HEADER.unpack_from(self._room)
            handle, data = b"", None
            rest = memoryview(self._room)[HEADER.size : status.Get_count(MPI.BYTE)]
            if offset == INLINE:
                data = rest
            else:
                handle = bytes(rest)
            self._envelope = Envelope(
                source=status.source,
                tag=status.tag,
                number=number,
                nbytes=nbytes,
                offset=offset,
                handle=handle,
                once=bool(once),
                data=data,
            )
        if self._ended is not None:
            self._ended(self)
        self._ended = None
        self._requests.clear()  # last, so that an interrupt loses nothing
