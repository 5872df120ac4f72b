"""Receives of messages of device arrays: requests, and what probes found."""

from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import own_arrays, streams
from numba_symm.arrays import view
from numba_symm.collectives.kernels import message_copy
from numba_symm.errors import SymmError
from numba_symm.events import Event
from numba_symm.mpi import packing, progress, rooms
from numba_symm.mpi.calls import describe, waited
from numba_symm.mpi.channels import MOST
from numba_symm.mpi.errors import MPIError, refusal
from numba_symm.mpi.kinds import Kind
from numba_symm.mpi.messages import Post
from numba_symm.mpi.parts import Incoming
from numba_symm.mpi.reading import translated
from numba_symm.mpi.requests import Own
from numba_symm.mpi.rings import LINE, READ, READY
from numba_symm.mpi.rooms import Opened
from numba_symm.mpi.sends import LOOKS, NEVER
from numba_symm.mpi.words import NO_SLOT, Envelope, drop, failure_of
from numba_symm.own_arrays import Memory


class Receiving(Own):
    """A receive: a message is matched, its data is awaited, and copied.

    The sender's word tells that the data can be copied, and this rank's that it was.
    Data that MPI brings is there when MPI's requests have ended.

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

    Attributes:
        wanted: source and tag.
        envelope: the message, once one has matched.
        cancelled: whether the receive was cancelled.
    """

    _post: Post
    _into: Incoming
    _array: Any
    _stream: int
    _on: int | None
    wanted: tuple[int, int]
    envelope: Envelope | None
    _after: Event | None = None
    _taken = _tried = _begun = _copied = cancelled = False
    _error: Exception | None = None
    _data: Any = None
    _requests: Any = ()
    _block: Opened | None = None
    _done: Event | None = None

    def _is_decided(self) -> bool:
        return self.envelope is not None or self.cancelled

    def _await_start(self) -> None:
        """Wait until the copy was started."""
        post = self._post
        if not self._active or self._begun:
            return
        if post._freed:  # its stream of copies is gone
            post.check_open("Recv")
        post.refuse_capture(self._stream, "Recv")
        if self.envelope is None and not self.cancelled:
            try:
                post.until(0, 0, NEVER, self._is_decided)
            except SymmError as error:
                source, tag = self.wanted
                rank = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"
                which = "any tag" if tag == MPI.ANY_TAG else f"tag {tag}"
                error.add_note(
                    f"A receive was waiting for a message from {rank}, {which}."
                )
                raise
        found = self.envelope
        if found is None:
            return
        self._take(found)
        if found.slot == NO_SLOT:
            waited(self._begins, post.check)
        elif self._into.dense and not found.asks and found.nbytes <= message_copy.MOST:
            self._arrive(found)
        elif not self._begun:
            post.until(found.slot, READY, found.number, self._begins)
            self.advance()

    def _arrive(self, found: Envelope) -> None:
        """Start the copy of a message whose place is known, in few steps."""
        post, slot, number = self._post, found.slot, found.number
        stream, words = self._copy_stream(), post.words
        if self._after is not None:
            self._after.wait(stream)
        opened = words.opened(slot)
        assert opened is not None
        self._block, place = opened
        given = (
            self._into.address,
            place,
            found.nbytes,
            stream,
            slot,
            number,
            10 * LOOKS,
        )
        while not self._begun:
            with post._lock:
                if self._begun or self._tried:  # by another call, or an interrupt
                    break
                self._tried = True
                status = post.arrive(words.port_at, *given)
                self._tried = status != 0
                self._begun = status > 0
            if status < 0:
                raise failure_of(-1 - status)
            if not status:
                progress.advance()
                post.check()
        self.advance()

    def _finish(self, status: MPI.Status | None) -> None:
        self._await_start()
        if status is not None:
            self._describe(status)
        found = self.envelope
        if found is not None and not self._copied:
            post = self._post
            if found.slot == NO_SLOT:
                waited(self.advance, post.check)
            else:
                post.until(found.slot, READ, found.number, self.advance)
                self.advance()
        if self._error is not None:
            self._active = False
            raise self._error

    def _poll(self, status: MPI.Status | None) -> bool:
        post = self._post
        post.refuse_capture(self._stream, "Recv")
        if not self._is_decided():
            progress.advance()
        found = self.envelope
        if found is not None:
            self._take(found)
        if not (self.cancelled or self.advance()):
            post.check()
            return False
        if status is not None:
            self._describe(status)
        if self._error is not None:
            self._active = False
            raise self._error
        return True

    def _take(self, found: Envelope) -> None:
        """Begin with the message that has matched; no other receive gets it then."""
        if self._taken:
            return
        post, nbytes = self._post, found.nbytes
        if post._freed or not hasattr(post.threads, "ready"):
            post.check_open("Recv")  # after a Free, the sender reuses the memory
        self._taken = True
        if nbytes > self._into.nbytes:
            post.refuse(found)
            self._active = False
            raise refusal(
                MPI.ERR_TRUNCATE,
                f"Recv: expected at most {self._into.nbytes} bytes from rank "
                f"{found.source} with tag {found.tag}, got {nbytes}; pass a larger "
                "array",
            )
        self._copied = self._begun = not nbytes
        if not nbytes:
            return
        with post._lock:
            if found.slot == NO_SLOT:
                if self._on is not None:  # a copy from the host could wait for its work
                    self._after, self._on = post.copies.event(self._on), None
                self._data, self._requests = np.empty(nbytes, np.uint8), []
                post.receive_parts(found, self._data, self._requests)
            if len(post.arriving) >= MOST:
                post.reap()
            post.arriving.append(self)  # also if its request is dropped

    def _begins(self) -> bool:
        return self.advance() or self._begun

    def advance(self) -> bool:
        """Do what can be done now; return whether it has ended. Never wait."""
        found, post = self.envelope, self._post
        if found is None or not self._taken or post._freed:
            return self._copied
        values, slot = post.words.values, LINE * found.slot
        with post._lock:
            try:
                if not (self._begun or self._copied):
                    if found.slot == NO_SLOT:
                        there = self._has_arrived(found)
                    else:
                        there = values[slot + READY] >= found.number
                    if there and not (self._tried and self._was_begun(found)):
                        self._tried = True
                        self._begin(found)
                        self._begun = True
                if self._begun and not self._copied:
                    if self._done is not None:
                        ended = self._done.query()
                    else:
                        ended = values[slot + READ] >= found.number
                    if ended:
                        self._end()
            except Exception as error:  # for its own request, whoever calls this
                self._error = error
                self._end()
        return self._copied

    def _was_begun(self, found: Envelope) -> bool:
        """Return whether a start that an interrupt has ended need not be repeated."""
        if not self._post.idle(self._copy_stream()):
            return True
        words = self._post.words
        held = found.slot != NO_SLOT and words.holds(found.slot, READ, found.number)
        self._begun = held
        return held

    def _has_arrived(self, found: Envelope) -> bool:
        """Return whether MPI has brought the data, or raise if it was not sent."""
        status = MPI.Status()
        for request in self._requests:
            if not request.Get_status(status):
                return False
            # A request that MPI has ended before has a status without a source.
            if status.source != MPI.ANY_SOURCE and not status.Get_count(MPI.BYTE):
                raise _not_sent(found)
        MPI.Request.Waitall(self._requests)
        return True

    def _copy_stream(self) -> int:
        return self._post.copies.stream if self._on is None else self._on

    def _begin(self, found: Envelope) -> None:
        """Start the copy."""
        post, into, nbytes = self._post, self._into.items, found.nbytes
        stream = self._copy_stream()
        if found.slot != NO_SLOT:
            opened = post.words.opened(found.slot)
            if opened is None:
                raise _not_sent(found)
            self._block, place = opened
        else:
            host = self._data.ctypes.data
            self._data = self._data, own_arrays.empty((nbytes,), _BYTE, "Recv")
            place = view(self._data[1], "Recv").address
            streams.copy_from_host(place, host, nbytes, stream)
        if self._after is not None:
            self._after.wait(stream)
        if into.layout.runs is not None:
            number = -(-nbytes // max(into.layout.nbytes, 1))  # the last may be a part
            into = into._replace(array=self._array, number=number)
            packed = Memory(place, nbytes, self._block).array(nbytes, _BYTE)
            packing.unpack(into, packed)(stream)
            nbytes = 0
        if found.slot != NO_SLOT:
            word = found.slot, READ, found.number
            post.words.copy(self._into.address, place, nbytes, stream, *word)
            return
        if nbytes:
            streams.copy(self._into.address, place, nbytes, stream)
        self._done = post.copies.event(stream)

    def _end(self) -> None:
        post, found = self._post, self.envelope
        self._copied = True
        drop(post.arriving, self)
        if self._error is not None and found is not None and found.slot != NO_SLOT:
            post.words.store(found.slot, READ, found.number)
        for event in (self._after, self._done):
            if event is not None:
                post.copies.reuse(event)
        if self._block is not None and self._block.once:
            rooms.copied(self._block)
        self._array = self._block = self._data = None

    def _withdraw(self) -> None:
        if self.give_up():
            self._post.withdraw(self)

    def give_up(self) -> bool:
        """End a receive whose message was not taken; return whether that is so."""
        given_up = self._active and not self._taken
        if given_up:
            self._active = False
        return given_up

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
) -> Receiving:
    """Return a receive; ``Receiving(...)`` takes longer."""
    made = object.__new__(Receiving)
    stream = post.stream_of(array, "Recv")
    made._post, made._into, made._array, made._stream = post, into, array, stream
    made._on = stream if waits else None
    if not (waits or post.idle(stream)):
        made._after = post.copies.event(stream)
    made.wanted = source, tag
    made.envelope = envelope
    if envelope is None:
        post.receive(made)  # last, so that an error above receives no message
    return made


_BYTE = np.dtype(np.uint8)


def _not_sent(found: Envelope) -> MPIError:
    """Return the receiver's error for a message that its sender could not send."""
    return MPIError(
        MPI.ERR_OTHER,
        f"Recv: rank {found.source} could not send its message with tag {found.tag}; "
        "its own error has the cause",
    )


class DoneRequest(Own):
    """A call that was done when it was started.

    Args:
        source: the source of its status.
    """

    def __init__(self, source: int = MPI.ANY_SOURCE):
        self._source = source

    def _finish(self, status: MPI.Status | None) -> None:
        describe(status, self._source)

    def _poll(self, status: MPI.Status | None) -> bool:
        self._finish(status)
        return True


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
            if receives.give_up():  # by an interrupt, for example
                self._envelope = envelope
            raise

    @translated
    def Irecv(self, buf: Any) -> Any:
        """Start to receive the message."""
        if self._envelope is None:
            return super().Irecv(buf)
        assert self._post is not None
        into = self._post.room(buf)
        found = self._envelope
        given = Incoming.of(into), into.array, found.source, found.tag
        receives = receiving(self._post, *given, envelope=found)
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
