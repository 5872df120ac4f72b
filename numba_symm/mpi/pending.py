"""Receives of messages of device arrays: requests, and what probes found."""

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm.collectives.invocation import check_writable
from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import SIMULATED
from numba_symm.errors import SymmError
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.arrays import Memory, view
from numba_symm.gpu.events import Event
from numba_symm.mpi import buffers, progress, rooms
from numba_symm.mpi.buffers import Kind
from numba_symm.mpi.calls import describe
from numba_symm.mpi.datatypes import translated
from numba_symm.mpi.errors import MPIError, refusal
from numba_symm.mpi.messages import LOOKS, Post
from numba_symm.mpi.progress import MOST, seen
from numba_symm.mpi.requests import Own
from numba_symm.mpi.rooms import LINE, NO_SLOT, READ, READY, Opened
from numba_symm.mpi.words import Envelope, failure_of


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
    def of(cls, post: Post, found: buffers.Items, source: int) -> "Incoming":
        """Return the items, or refuse them before the receive is posted."""
        post.check_open("Recv")
        check_writable(found.view, "Recv")
        items, dense = found._replace(array=None), found.layout.runs is None
        return cls(items, found.nbytes, found.address, dense)


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
    _stream: int  # of the array
    _on: int
    wanted: tuple[int, int]
    envelope: Envelope | None
    _after: Event | None = None
    _taken = _tried = _begun = _copied = cancelled = False
    _error: Exception | None = None
    _data: Any = None  # in host memory, and on the GPU
    _staged: Any = None
    _requests: Any = ()
    _block: Opened | None = None
    _done: Event | None = None

    def _is_decided(self) -> bool:
        return self.envelope is not None or self.cancelled

    def _begins(self) -> bool:
        return self.advance() or self._begun

    def _await_start(self) -> None:
        """Wait until the copy was started."""
        post = self._post
        if not self._active or self._begun:
            return
        if post._freed:  # its stream of copies is gone
            post.check_open("Recv")
        if not SIMULATED and streams.is_capturing(self._stream):
            post.refuse_capture(self._stream, "Recv")
        if self.envelope is None and not self.cancelled:
            try:
                post.until(NO_SLOT, 0, 0, self._is_decided)
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
        small = self._into.dense and found.nbytes <= message_copy.MOST
        if small and found.slot != NO_SLOT and not found.asks:
            # One launch copies the message, whose place is known already.
            while not (self.advance(10 * LOOKS) or self._begun):
                progress.advance()
                post.check()
        elif not self._begun:
            post.until(found.slot, READY, found.number, self._begins)

    def _finish(self, status: MPI.Status | None) -> None:
        if not self._begun:
            self._await_start()
        if status is not None:
            self._describe(status)
        found = self.envelope
        if found is not None and not self._copied:
            self._post.until(found.slot, READ, found.number, self.advance)
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
                if self._on != post.copies.stream:
                    # A copy from the host could wait for that stream's work.
                    self._after = post.copies.event(self._on)
                    self._on = post.copies.stream
                self._data, self._requests = np.empty(nbytes, np.uint8), []
                post._data.receive_parts(found, self._data, self._requests, seen)
            if len(post.arriving) >= MOST:
                post.reap()
            post.arriving[self] = None  # also if its request is dropped

    def advance(self, looks: int = 0) -> bool:
        """Do what can be done now; return whether it has ended.

        Args:
            looks: at the word of a message whose place is known; 0: never wait.
        """
        found, post = self.envelope, self._post
        if found is None or not self._taken or post._freed:
            return self._copied
        with post._lock:
            try:
                done = self._begun or self._copied
                if not done and not (self._tried and self._was_begun(found)):
                    self._begin(found, looks)
                if self._begun and not self._copied:
                    if self._done is not None:
                        ended = self._done.query()
                    else:
                        at = LINE * found.slot + READ
                        ended = post.words.values[at] >= found.number
                    if ended:
                        self._end()
            except Exception as error:  # for its own request, whoever calls this
                self._error = error
                self._end()
        return self._copied

    def _was_begun(self, found: Envelope) -> bool:
        """Return whether a start that an interrupt has ended need not be repeated."""
        if not self._post.idle(self._on):
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

    def _begin(self, found: Envelope, looks: int) -> None:
        """Start the copy, if the data is there. The caller has the lock."""
        post, into, nbytes, stream = self._post, self._into, found.nbytes, self._on
        words, slot, number = post.words, found.slot, found.number
        if slot == NO_SLOT:
            if not self._has_arrived(found):
                return
            self._staged = arrays.empty((nbytes,), _BYTE, "Recv")
            place, self._tried = view(self._staged, "Recv").address, True
            streams.copy_from_host(place, self._data.ctypes.data, nbytes, stream)
        elif looks or words.values[LINE * slot + READY] >= number:
            opened = words.opened(slot)
            if opened is None:
                raise _not_sent(found)
            self._block, place = opened
        else:
            return
        self._tried = True
        if self._after is not None:
            after, self._after = self._after, None
            after.wait(stream)
            post.copies.reuse(after)
        if not into.dense:
            items = into.items
            count = -(-nbytes // max(items.layout.nbytes, 1))  # the last may be a part
            items = items._replace(array=self._array, number=count)
            packed = Memory(place, nbytes, self._block).array(nbytes, _BYTE)
            buffers.unpack(items, packed)(stream)
            nbytes = 0
        elif slot == NO_SLOT or nbytes > message_copy.MOST:
            streams.copy(into.address, place, nbytes, stream)
            nbytes = 0
        if slot == NO_SLOT:
            self._done, self._begun = post.copies.event(stream), True
            return
        given = into.address, place, nbytes, stream, slot, number, looks
        status = post.arrive(words.port_at, *given)
        if status < 0:
            raise failure_of(-1 - status)
        self._begun = status > 0
        self._tried = self._begun

    def _end(self) -> None:
        post, found = self._post, self.envelope
        self._copied = True
        post.arriving.pop(self, None)
        if self._error is not None and found is not None and found.slot != NO_SLOT:
            post.words.store(found.slot, READ, found.number)
        for event in (self._after, self._done):
            if event is not None:
                post.copies.reuse(event)
        if self._block is not None and self._block.once:
            rooms.copied(self._block)
        self._array = self._block = self._data = self._staged = None

    def _withdraw(self) -> None:
        if self._active and not self._taken:
            try:
                self._post.withdraw(self)
            finally:
                # Not before: a dropped receive takes a message that matches it.
                self._active = False

    def Free(self) -> None:
        """Give the request up; its message is received nevertheless."""
        super().Free()
        self.receive_alone()

    def receive_alone(self) -> None:
        """Begin with the message of a request that was given up, if there is one."""
        # The lock: a thread that matches a message now would take it, too.
        with self._post.words.lock, suppress(SymmError):  # nobody waits for it
            if self.envelope is not None:
                self._take(self.envelope)

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
    made._on = stream if waits else post.copies.stream
    if not (waits or post.idle(stream)):
        made._after = post.copies.event(stream)
    made.wanted = source, tag
    made.envelope = envelope
    if envelope is not None:
        return made
    post.check_receive(source, tag)  # also of a request that was prepared before
    with post.words.lock:
        # Last, so that an error above receives no message.
        made.envelope = found = post.first(source, tag) if post.unexpected else None
        if found is None:
            post.posted[made] = None
        else:
            post.unexpected.remove(found)
            post.answer(found)
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
            if receives._active and not receives._taken:  # by an interrupt, for example
                receives._active = False
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
