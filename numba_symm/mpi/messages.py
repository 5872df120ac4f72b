"""Messages of device arrays: envelopes by MPI, which matches them, and data by copies.

A send copies its data to memory of its process (``staging.py``), waits for that copy,
and sends an envelope with its place by MPI, with the tag of the message. So source,
tag, order and wildcards are MPI's. The receive copies the data from there, on a stream
of its own, so it may run beside the program's kernels. When the copy is done, it sends
a receipt, after which the sender reuses the memory. Envelopes and receipts have
communicators of their own, so host messages do not meet them.
"""

import itertools
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm import arrays, streams
from numba_symm.arrays import Memory
from numba_symm.collectives.checks import check_writable
from numba_symm.environment import SIMULATED
from numba_symm.events import Event
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.mpi import buffers, packing, staging
from numba_symm.mpi.buffers import message
from numba_symm.mpi.errors import refusal, unsupported
from numba_symm.mpi.requests import PAUSE, waited
from numba_symm.mpi.staging import Room, opened, staging_of
from numba_symm.streams import SideStream

_HEADER = struct.Struct("<qqq")
_MOST = 4096  # bytes of an envelope, at most


class Envelope(NamedTuple):
    """What a sender announces of its message.

    Attributes:
        source: the sender.
        tag: the message's tag.
        number: the message's number among the sender's.
        nbytes: its size.
        offset: its first byte in the sender's block.
        handle: names that block.
    """

    source: int
    tag: int
    number: int
    nbytes: int
    offset: int
    handle: bytes


class Copying(NamedTuple):
    """A message that is being copied to its array.

    Attributes:
        done: the end of the copy.
        envelope: the message.
        into: the array's items, which live until then.
        block: the sender's memory, which is mapped until then.
    """

    done: Event
    envelope: Envelope
    into: buffers.Message
    block: Any


_posts: "set[Post]" = set()  # of communicators that were not freed


class Post:
    """The messages of one communicator on this rank.

    Args:
        host: the communicator of mpi4py, which is duplicated twice. Collective.
        allocator: allocates the memory through which messages pass.
        stream: the stream of arrays that name none.
        check: raises if the communicator has failed.
    """

    def __init__(
        self,
        host: Any,
        allocator: SymmetricMemoryAllocator | None,
        stream: Any,
        check: Callable[[], None],
    ):
        self._envelopes, self._receipts = host.Dup(), host.Dup()
        self.allocator = allocator
        self.islands = [0] * host.size
        """The number of each rank's island; ``Comm`` finds them."""
        self._rank: int = host.rank
        self._stream = stream
        self.check = check
        self._side: SideStream | None = None  # of the copies to arrays
        self._copying: list[Copying] = []
        self._events: list[Event] = []  # which are not in use
        self._numbers = itertools.count()
        self._unread: dict[int, Room | None] = {}
        self._sent: list[tuple[MPI.Request, Any]] = []
        self._probed: list[Envelope] = []
        self._open: set[Posted] = set()
        self._counts = np.zeros((2, host.size), np.int64)  # envelopes and receipts sent
        self._taken = np.zeros(2, np.int64)
        _posts.add(self)

    def free(self) -> None:
        """Free the duplicates. Collective.

        First take what the peers sent: an envelope or a receipt that arrived later
        would be taken for one of a new communicator, to which MPI gives the same
        number. So ends also a send that waits for its receive, of which there is none.
        """
        self.settle()
        self.reap()  # sends the receipts of all copies
        coming = self._receipts.alltoall([tuple(each) for each in self._counts.T])
        wanted = np.sum(coming, axis=0)
        for posted in list(self._open):
            posted.cancel()
            posted.wait(_nothing)
        while self._sent or (self._taken < wanted).any():
            while self._envelopes.Iprobe():
                self._arrived(MPI.ANY_SOURCE, MPI.ANY_TAG)
            self.reap()
            time.sleep(PAUSE)
        for room in self._unread.values():  # which nobody will read
            self._give_back(room)
        self._unread.clear()
        _posts.discard(self)
        if not _posts:
            staging.give_back_all()
        self._receipts.Barrier()  # after which the peers may end
        self._envelopes.Free()
        self._receipts.Free()

    def stream_of(self, array: Any, what: str) -> int:
        """Return the stream for copies of an array."""
        named = None if array is None else arrays.stream_of(array)
        found = streams.handle_or_default(self._stream) if named is None else named
        if not SIMULATED and streams.is_capturing(found):
            raise unsupported(
                f"{what}: expected a stream that is not being captured, because the "
                "ranks' hosts take part in this call; make it before or after the "
                "capture, or use comm.communicator.send and recv"
            )
        return found

    # Sending.

    def send(
        self, spec: Any, dest: int, tag: int, matched: bool = False
    ) -> MPI.Request:
        """Send a message, whose array may be used afterwards.

        Returns:
            The request of the envelope. If ``matched``, it is done when a receive has
            matched it.
        """
        self.reap()
        if not 0 <= dest < len(self.islands):
            raise refusal(
                MPI.ERR_RANK,
                f"Send: expected a rank from 0 to {len(self.islands) - 1} or "
                f"MPI.PROC_NULL, got {dest}",
            )
        if self.islands[dest] != self.islands[self._rank]:
            raise unsupported(
                f"Send: rank {dest} is on another island, and messages of device "
                "arrays pass through memory that both ranks have mapped; use "
                "comm.communicator.send and recv, or host arrays"
            )
        found = message(spec)
        stream = self.stream_of(found.array, "Send")
        room = self._stage(found, stream) if found.nbytes else None
        number = next(self._numbers)
        place = (0, b"") if room is None else (room.offset, room.handle)
        text = _HEADER.pack(number, found.nbytes, place[0]) + place[1]
        send = self._envelopes.Issend if matched else self._envelopes.Isend
        try:
            request: MPI.Request = send([text, MPI.BYTE], dest, tag)
        except BaseException:
            self._give_back(room)
            raise
        self._sent.append((request, text))
        self._counts[0, dest] += 1
        self._unread[number] = room
        return request

    def _stage(self, found: buffers.Message, stream: int) -> Room:
        assert self.allocator is not None
        room = staging_of(self.allocator).take(found.nbytes)
        if found.layout.runs is None:
            streams.copy(room.address, found.address, found.nbytes, stream)
        else:
            memory = Memory(room.address, found.nbytes, room.memory)
            packed = memory.array(found.nbytes, np.dtype(np.uint8))
            packing.pack(found, packed)(stream)
        if not SIMULATED:
            streams.synchronize(stream)
        return room

    def reap(self) -> None:
        """Send the receipts of messages, and reuse the memory of those received."""
        for each in [each for each in self._copying if each.done.query()]:
            self._copying.remove(each)
            self._acknowledge(each.envelope)
        self._sent = [each for each in self._sent if not each[0].Test()]
        number = np.empty(1, np.int64)
        while self._receipts.Iprobe():
            self._receipts.Recv(number)
            self._taken[1] += 1
            self._give_back(self._unread.pop(int(number[0])))

    def _give_back(self, room: Room | None) -> None:
        if room is not None:
            assert self.allocator is not None
            staging_of(self.allocator).give_back(room)

    # Receiving.

    def room(self, spec: Any) -> buffers.Message:
        """Return the items that a receive writes, or refuse it before it is posted."""
        found = message(spec)
        check_writable(found.view, "Recv")
        self.stream_of(found.array, "Recv")
        return found

    def receive(self, source: int, tag: int) -> "Posted":
        """Post a receive."""
        found = self._first_probed(source, tag)
        if found is not None:
            self._probed.remove(found)
            return Posted(envelope=found)
        return self._posted(source, tag)

    def _posted(self, source: int, tag: int) -> "Posted":
        """Post a receive of MPI, which writes its room even if a program drops it."""
        room = np.empty(_MOST, np.uint8)
        posted = Posted(self._envelopes.Irecv(room, source, tag), room, self._read)
        self._open.add(posted)
        return posted

    def _read(self, posted: "Posted") -> None:
        self._open.discard(posted)
        self._taken[0] += not posted.cancelled

    def probe(self, source: int, tag: int) -> Envelope | None:
        """Return the envelope that a receive would match now, which stays there."""
        self.reap()
        found = self._first_probed(source, tag)
        status = MPI.Status()
        if found is not None or not self._envelopes.Iprobe(source, tag, status):
            return found
        # This also takes what the source sent before it. So a source's envelopes here
        # are all earlier than those that MPI has, and no receive overtakes any.
        while found is None or found.tag != status.tag:
            found = self._arrived(status.source, MPI.ANY_TAG)
            self._probed.append(found)
        return found

    def receive_if_there(self, source: int, tag: int) -> Envelope | None:
        """Return the envelope of a message, which no other receive gets."""
        self.reap()
        found = self._first_probed(source, tag)
        if found is not None:
            self._probed.remove(found)
            return found
        status = MPI.Status()
        if not self._envelopes.Iprobe(source, tag, status):
            return None
        return self._arrived(status.source, status.tag)

    def _first_probed(self, source: int, tag: int) -> Envelope | None:
        """Return the first envelope that a probe has taken from MPI."""
        for found in self._probed:
            if source in (found.source, MPI.ANY_SOURCE) and tag in (
                found.tag,
                MPI.ANY_TAG,
            ):
                return found
        return None

    def _arrived(self, source: int, tag: int) -> Envelope:
        """Receive an envelope that MPI has."""
        posted = self._posted(source, tag)
        posted.wait(self.check)
        return posted.envelope

    def event(self, stream: int) -> Event:
        """Return the end of a stream's work so far."""
        found = self._events.pop() if self._events else Event()
        found.record(stream)
        return found

    def deliver(self, envelope: Envelope, into: buffers.Message, after: Event) -> Event:
        """Start the copy of a message to its array; return the end of the copy.

        The receipt follows it, in a call of :meth:`reap`.

        Args:
            envelope: the message.
            into: the array's items.
            after: what the copy follows.
        """
        try:
            if envelope.nbytes > into.nbytes:
                raise refusal(
                    MPI.ERR_TRUNCATE,
                    f"Recv: expected at most {into.nbytes} bytes from rank "
                    f"{envelope.source} with tag {envelope.tag}, got {envelope.nbytes};"
                    " pass a larger array",
                )
            if self._side is None:
                self._side = SideStream(0)
            after.wait(self._side.stream)
            block = None
            if envelope.nbytes:
                block = opened(envelope.handle)
                self._copy(envelope, block, into, self._side.stream)
        except BaseException:
            self._acknowledge(envelope)
            raise
        self.reuse(after)
        done = self.event(self._side.stream)
        self._copying.append(Copying(done, envelope, into, block))
        return done

    def reuse(self, event: Event) -> None:
        """Take an event back that nobody will ask any more."""
        self._events.append(event)

    def settle(self) -> None:
        """Wait for the copies to arrays; later ones have a new stream."""
        if self._side is not None:
            if not SIMULATED:
                streams.synchronize(self._side.stream)
            self._side.close()
            self._side = None

    def _acknowledge(self, envelope: Envelope) -> None:
        number = np.array([envelope.number], np.int64)
        self._counts[1, envelope.source] += 1
        self._sent.append((self._receipts.Isend(number, envelope.source), number))

    def _copy(
        self, envelope: Envelope, block: Any, into: buffers.Message, stream: int
    ) -> None:
        source = arrays.view(block, "Recv").address + envelope.offset
        if into.layout.runs is None:
            streams.copy(into.address, source, envelope.nbytes, stream)
            return
        number, rest = divmod(envelope.nbytes, into.layout.nbytes)
        if rest:
            raise unsupported(
                f"Recv: expected whole items of {into.layout.nbytes} bytes, got "
                f"{envelope.nbytes} bytes; send whole items"
            )
        memory = Memory(source, envelope.nbytes, block)
        packed = memory.array(envelope.nbytes, np.dtype(np.uint8))
        packing.unpack(into._replace(number=number), packed)(stream)


def _nothing() -> None:
    """Check nothing: the communicator ends."""


def settle_all() -> None:
    """Wait for all copies to arrays, for the end of the program."""
    for post in _posts:
        post.settle()


class Posted:
    """A receive of an envelope.

    Args:
        request: mpi4py's request, if it has not arrived.
        room: where it arrives.
        ended: is called when it has arrived or was cancelled.
        envelope: the envelope, if it has arrived.
    """

    def __init__(
        self,
        request: MPI.Request | None = None,
        room: Any = None,
        ended: Callable[["Posted"], None] | None = None,
        envelope: Envelope | None = None,
    ):
        self._request, self._room, self._ended = request, room, ended
        self._envelope = envelope
        self.cancelled = False

    @property
    def envelope(self) -> Envelope:
        """The envelope, which has arrived."""
        assert self._envelope is not None
        return self._envelope

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until it has arrived or was cancelled."""
        waited(self.test, check)

    def test(self) -> bool:
        """Return whether it has arrived or was cancelled."""
        status = MPI.Status()
        if self._request is not None and self._request.Test(status):
            self._read(status)
        return self._request is None

    def cancel(self) -> None:
        """Cancel the receive, unless a message has matched it."""
        if self._request is not None:
            self._request.Cancel()

    def _read(self, status: MPI.Status) -> None:
        self._request = None
        self.cancelled = status.Is_cancelled()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self)
        if self.cancelled:
            return
        data = self._room[: status.Get_count(MPI.BYTE)].tobytes()
        number, nbytes, offset = _HEADER.unpack_from(data)
        handle = data[_HEADER.size :]
        source, tag = status.source, status.tag
        self._envelope = Envelope(source, tag, number, nbytes, offset, handle)
