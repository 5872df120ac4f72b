"""Receives of messages of device arrays: requests, and what probes found."""

from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm.collectives.invocation import check_writable
from numba_symm.environment import SIMULATED
from numba_symm.errors import SymmError
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.arrays import Memory, view
from numba_symm.gpu.events import Event
from numba_symm.mpi import buffers, progress, rooms
from numba_symm.mpi.buffers import Kind
from numba_symm.mpi.datatypes import translated
from numba_symm.mpi.errors import MPIError, refusal
from numba_symm.mpi.posts import LOOKS, Post
from numba_symm.mpi.progress import MOST
from numba_symm.mpi.rooms import (
    ANY,
    BEGUN,
    CANCELLED,
    ENDED,
    FOUND,
    LATE,
    NO_SLOT,
    POSTED,
    READ,
    READY,
    REFUSED,
    Opened,
    Order,
)
from numba_symm.mpi.started import Own
from numba_symm.mpi.waited import describe, paused
from numba_symm.mpi.words import Envelope, failure_of


class Incoming(NamedTuple):
    """The items that a receive writes.

    Attributes:
        items: the items, without their array.
        nbytes: their size.
        address: of the first item.
        dense: whether they have no gaps.
        order: an ``Order``, from which that of each receive is copied.
    """

    items: buffers.Items
    nbytes: int
    address: int
    dense: bool
    order: bytes

    @classmethod
    def of(cls, post: Post, found: buffers.Items, source: int) -> "Incoming":
        """Return the items, or refuse them before the receive is posted."""
        post.check_receive(source, _ANY_TAG)
        check_writable(found.view, "Recv")
        items, dense = found._replace(array=None), found.layout.runs is None
        nbytes, address = found.nbytes, found.address
        order = Order(port=post.words.port_at, context=post.context, source=source)
        if source in post.to:
            order.ring = post.words.rings[post.places[source]]
        order.address, order.room = address if dense else 0, nbytes
        return cls(items, nbytes, address, dense, bytes(order))


class Receiving(Own):
    """A receive: a message is matched, its data is awaited, and copied.

    The sender's word tells that the data can be copied, and this rank's that it was.
    Data that MPI brings is there when MPI's requests have ended.

    Attributes:
        wanted: source and tag.
    """

    _starts = True
    _post: Post
    _into: Incoming
    _array: Any
    _order: bytearray  # an ``Order``; its first byte is the stage
    _stream: int  # of the array
    _on: int  # of the copy
    wanted: tuple[int, int]
    _after: Event | None = None
    _error: Exception | None = None
    _data: Any = None  # in host memory, and on the GPU
    _staged: Any = None
    _block: Opened | None = None
    _done: Event | None = None

    @property
    def envelope(self) -> Envelope | None:
        """The message, once one has matched."""
        if self._order[0] in (POSTED, CANCELLED):
            return None
        return Envelope(*_ENVELOPE.unpack_from(self._order, Order.source.offset))

    @envelope.setter
    def envelope(self, found: Envelope) -> None:
        _ENVELOPE.pack_into(self._order, Order.source.offset, *found)
        self._order[0] = FOUND

    def _await_start(self) -> None:
        """Wait until the copy was started."""
        if self._active and self._order[0] < BEGUN:
            self._await(BEGUN)

    def _await(self, stage: int) -> None:
        """Wait until the receive has come to a stage, or was cancelled."""
        post, order = self._post, self._order
        if post._freed or not hasattr(post.threads, "ready"):
            post.check_open("Recv")  # after a Free, the sender reuses the memory
        try:
            # An interrupt may have left one that is matched again, so not after that.
            if len(progress.matching) > 1 or post.words.port.held:
                progress.advance()
            looks = 0
            while True:
                with post._lock:  # another thread may post a receive meanwhile
                    is_first = next(iter(post.posted), None) is self
                found = post.receive(order, stage, LOOKS, is_first)
                if found < 0:
                    post.raise_for(found, self._stream, "Recv")
                if found < stage:
                    self.advance()
                if order[0] >= stage:
                    break
                looks = paused(looks, post.check)
        except BaseException as error:
            if order[0] == POSTED and isinstance(error, SymmError):
                source, tag = self.wanted
                rank = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"
                which = "any tag" if tag == MPI.ANY_TAG else f"tag {tag}"
                error.add_note(
                    f"A receive was waiting for a message from {rank}, {which}."
                )
            raise
        finally:
            if order[0] in (FOUND, BEGUN):
                post.arriving[self] = None  # the array lives until the copy has ended
        with post._lock:  # another thread may look through them to match a message
            post.posted.pop(self, None)
            if order[0] >= ENDED:
                self._end()

    def _finish(self, status: MPI.Status | None) -> None:
        if self._order[0] < ENDED:
            self._await(ENDED)
        if status is not None:
            self._describe(status)
        if self._error is not None:
            self._active = False
            raise self._error

    def _is_done(self) -> bool:
        self._post.refuse_capture(self._stream, "Recv")
        done = self.advance()
        if not done:
            self._post.check()
        return done

    def rests(self) -> bool:
        """Return whether no kernel copies a message that has arrived in a room."""
        found, words = self.envelope, self._post.words
        if found is None or self._order[0] != BEGUN or self._done is not None:
            return True
        slot, number = found.slot, found.number
        return any(words.holds(slot, word, number) for word in (READ, LATE))

    def advance(self) -> bool:
        """Do what can be done now; return whether it has ended. Never wait."""
        post, order = self._post, self._order
        if order[0] not in (FOUND, BEGUN) or post._freed:
            return order[0] >= ENDED
        with post._lock:
            found = self.envelope
            assert found is not None
            try:
                if order[0] == FOUND:
                    self._begin(found)
                if self._done is None:
                    status = post.receive(order, ENDED, 1, 0)
                    if REFUSED < status < 0:
                        raise failure_of(-1 - status)
                elif self._done.query():
                    post.refuse(found)
                    order[0] = ENDED
            except Exception as error:  # for its own request, whoever calls this
                self._error, order[0] = error, ENDED
                post.refuse(found)
            if order[0] == ENDED:
                self._end()
        return order[0] == ENDED

    def _begin(self, found: Envelope) -> None:
        """Start the copy, if the data is there. The caller has the lock."""
        post, into, nbytes, slot = self._post, self._into, found.nbytes, found.slot
        if nbytes > into.nbytes:
            raise refusal(
                MPI.ERR_TRUNCATE,
                f"Recv: expected at most {into.nbytes} bytes from rank "
                f"{found.source} with tag {found.tag}, got {nbytes}; pass a larger "
                "array",
            )
        if not nbytes:
            post.refuse(found)
            self._order[0] = ENDED
            return
        if slot == NO_SLOT:
            data, requests = post.data_of(found)
            if not all([request.Test() for request in requests]):
                return
            if self._after is None:
                self._after = post.copies.event(self._stream)
            # A copy from the host could wait for the work of the array's stream.
            self._on = post.copies.stream
            self._data = data
            self._staged = arrays.empty((nbytes,), _BYTE, "Recv")
            place = view(self._staged, "Recv").address
            streams.copy_from_host(place, data.ctypes.data, nbytes, self._on)
        else:
            if not post.words.holds(slot, READY, found.number):
                return
            opened = post.words.opened(slot, found.number)
            if opened is None:
                raise _not_sent(found)
            self._block, place = opened
            if into.dense:
                return  # because ``receive`` copies them
        stream = self._on
        if self._after is not None:
            self._after.wait(stream)
        if not into.dense:
            items = into.items
            count = -(-nbytes // max(items.layout.nbytes, 1))  # the last may be a part
            items = items._replace(array=self._array, number=count)
            packed = Memory(place, nbytes, self._block).array(nbytes, _BYTE)
            buffers.unpack(items, packed)(stream)
        else:
            streams.copy(into.address, place, nbytes, stream)
        self._done, self._order[0] = post.copies.event(stream), BEGUN

    def _end(self) -> None:
        """Let go of what the copy has needed. The caller has the lock."""
        post, self._array = self._post, None
        events, self._after, self._done = (self._after, self._done), None, None
        block, self._block = self._block, None
        for event in events:
            if event is not None:
                post.copies.reuse(event)
        if block is not None and block.once:
            rooms.copied(block)
        self._data = self._staged = None
        post.arriving.pop(self, None)  # last, so that an interrupt leaves nothing

    def _withdraw(self) -> None:
        if self._active:
            try:
                self._post.withdraw(self)
            finally:
                # Not before: a dropped receive takes a message that matches it.
                self._active = False

    def _describe(self, status: MPI.Status) -> None:
        found = self.envelope
        if found is None:
            describe(status, cancelled=True)
            return
        describe(status, found.source, found.tag, min(found.nbytes, self._into.nbytes))

    def Cancel(self) -> None:
        """Cancel the receive, unless a message has matched it."""
        self._post.cancel(self)


def receiving(
    post: Post,
    into: Incoming,
    array: Any,
    source: int,
    tag: int,
    waits: bool = False,
    envelope: Envelope | None = None,
    stream: int | None = None,
) -> Receiving:
    """Return a receive; ``Receiving(...)`` takes longer.

    Args:
        post: of its communicator.
        into: the items that it writes.
        array: their array.
        source: the rank from which it is expected.
        tag: the tag that it should have.
        waits: whether the caller only waits for the receive. Then the copy is on the
            array's stream, because the program enqueues nothing before it. Otherwise it
            follows what is enqueued there now, but not what is later.
        envelope: the message, if a probe has matched it.
        stream: of the array; None: the array is asked.
    """
    fine = 0 <= tag < post.tags or tag == _ANY_TAG
    if post._freed or not (fine and hasattr(post.threads, "ready")):
        post.check_receive(source, tag)  # also of a request that was prepared before
    made = object.__new__(Receiving)
    stream = post.stream_of(array) if stream is None else stream
    made._post, made._into, made._array, made._stream = post, into, array, stream
    made._order, made.wanted = bytearray(into.order), (source, tag)
    made._on, event = stream, 0
    if not waits:
        made._on = post.copies.stream
        if not SIMULATED:
            made._after = post.copies.take()
            event = int(made._after._handle)
    wanted = ANY if tag == _ANY_TAG else tag
    status = post.expect(made._order, wanted, stream, made._on, event)
    if status:
        post.raise_for(status if status == REFUSED else -1 - status, stream, "Recv")
    with post.words.lock:
        if post.words.port.held or post.coming:  # left by an interrupt
            progress.advance()
        # Last, so that an error above receives no message.
        if envelope is None and post.unexpected:
            envelope = post.take(source, tag)
        if envelope is None:
            post.posted[made] = None
            return made
        made.envelope = envelope
        post.arriving[made] = None  # also if its request is dropped
    if len(post.arriving) >= MOST:
        post.reap()
    return made


_ANY_TAG = MPI.ANY_TAG
_ENVELOPE = Struct("<6q")
_BYTE = np.dtype(np.uint8)


def _not_sent(found: Envelope) -> MPIError:
    """Return the receiver's error for a message that its sender could not send."""
    return MPIError(
        MPI.ERR_OTHER,
        f"Recv: rank {found.source} could not send its message with tag {found.tag}; "
        "its own error has the cause",
    )


class Message(MPI.Message, metaclass=Kind):
    """A message that a matched probe has found, of a device array."""

    _plain = MPI.Message
    _post: Post | None = None
    _envelope: Envelope | None = None

    def __bool__(self) -> bool:
        return self._envelope is not None or super().__bool__()

    __hash__ = MPI.Message.__hash__

    @classmethod
    def of(cls, post: Post, envelope: Envelope) -> "Message":
        """Return the message of an envelope."""
        made = cls()
        made._post, made._envelope = post, envelope
        return made

    @translated
    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receive the message."""
        if self._envelope is None:
            super().Recv(buf, status)
            return
        envelope = self._envelope
        receives: Receiving = self.Irecv(buf)
        try:
            receives.Wait(status)
        except BaseException:
            if receives._order[0] == FOUND:  # by an interrupt, for example
                receives._order[0] = CANCELLED
                receives._post.arriving.pop(receives, None)
                self._envelope = envelope
            raise

    @translated
    def Irecv(self, buf: Any) -> Any:
        """Start to receive the message."""
        if self._envelope is None:
            return super().Irecv(buf)
        assert self._post is not None
        post, items, found = self._post, buffers.message(buf), self._envelope
        given = Incoming.of(post, items, found.source), items.array
        receives = receiving(post, *given, found.source, found.tag, envelope=found)
        self._envelope = None
        return receives

    @classmethod
    @translated
    def Probe(
        cls,
        comm: MPI.Comm,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Wait for a message; return it, so that no other receive gets it."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    @translated
    def Iprobe(
        cls,
        comm: MPI.Comm,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Return a message, so that no other receive gets it, or None."""
        return comm.Improbe(source, tag, status)
