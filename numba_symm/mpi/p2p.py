"""mpi4py's messages on device arrays: their calls, and the sends within a node.

Sends of device arrays: a copy to memory of this process, and an envelope.

To a rank of the same island, the copy is only enqueued, and a word tells when the
receiver may read it. To other ranks, the data passes through host memory and MPI.

Above the limit of bytes that a rank has not received, a message is postponed. The
sender sends its envelope immediately, so the order of messages holds. It copies the
data when a receive has matched the envelope, or when enough earlier messages were read.
So it waits at most for the matching receive, as MPI's standard send may do. If it
fails, its word tells that the message is nowhere, or data by MPI has empty parts. Then
the receiver raises.
"""

import ctypes
import time
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import SIMULATED
from numba_symm.errors import BackendError, CollectiveTimeout, SymmError
from numba_symm.gpu import streams
from numba_symm.gpu.arrays import KINDS, Memory
from numba_symm.gpu.events import Event
from numba_symm.mpi import buffers, progress, rooms
from numba_symm.mpi.buffers import message, on_device
from numba_symm.mpi.calls import PAUSE, StartedCall, describe, waited
from numba_symm.mpi.datatypes import translated
from numba_symm.mpi.messages import Post
from numba_symm.mpi.pending import DoneRequest, Incoming, Message, receiving
from numba_symm.mpi.requests import Own, Prequest
from numba_symm.mpi.rooms import (
    LINE,
    MATCHED,
    NO_SLOT,
    NONE,
    READ,
    READY,
    SLOTS_OF_ALL,
    Parcel,
    Room,
    size_of,
)
from numba_symm.mpi.words import FIELDS, NUMBER, failure_of

_BYTE = np.dtype(np.uint8)


class Outgoing(NamedTuple):
    """A message of certain items to a rank, which can be sent many times.

    Attributes:
        items: the items, without their array.
        dest: the rank.
        nbytes: the message's size.
        address: of the first item.
        size: of the room that it needs.
        apart: whether the rank is on another island.
        parcel: what the compiled ``send`` sends; None: it is not for this message.
        parcel_at: its address.
    """

    items: buffers.Items
    dest: int
    nbytes: int
    address: int
    size: int
    apart: bool
    parcel: Any
    parcel_at: int

    @classmethod
    def of(cls, post: Post, found: buffers.Items, dest: int) -> "Outgoing":
        """Return the message, or refuse its destination."""
        post.check_message("Send", dest, 0)
        nbytes, apart = found.nbytes, post.islands[dest] != post.islands[post.rank]
        address, size, parcel, at = found.address, size_of(nbytes), None, 0
        if not apart and found.layout.runs is None and 0 < nbytes <= message_copy.MOST:
            stack = ctypes.addressof(post.words.rooms.stack(size))
            unread = ctypes.addressof(post.unread) + 8 * dest
            envelope = *post.to[dest], post.context, post.places[post.rank]
            parcel = Parcel(
                post.words.port_at, stack, address, nbytes, *envelope, unread
            )
            at = ctypes.addressof(parcel)
        items = found._replace(array=None)
        return cls(items, dest, nbytes, address, size, apart, parcel, at)


def send(
    post: Post,
    outgoing: Outgoing,
    array: Any,
    tag: int,
    matched: bool = False,
    limited: bool = True,
    copied: bool = False,
) -> "Sending":
    """Send a message now, or above the limit later; return its request.

    Args:
        post: of its communicator.
        outgoing: the message.
        array: the array of its items.
        tag: its tag.
        matched: whether the request is done only when a receive has matched it.
        limited: whether it may be postponed.
        copied: whether the caller may change the array before the request is done.
    """
    if post._freed or not (hasattr(post.threads, "ready") and 0 <= tag < post.tags):
        post.check_message("Send", outgoing.dest, tag)
    stream = post.stream_of(array)
    made = object.__new__(Sending)  # Sending(...) takes longer
    made.post, made.outgoing, made.tag = post, outgoing, tag
    made._array, made._matched = array, matched
    limit = post.limit if limited else 0
    if outgoing.parcel_at:
        with post._lock:
            found = post._send(outgoing.parcel_at, stream, tag, matched, limit)
        if 0 <= found < NONE:
            made.number, made.slot = divmod(found, SLOTS_OF_ALL)
            return made
        if found < 0:
            raise failure_of(-1 - found)
    post.refuse_capture(stream, "Send")
    made._send(stream, limit > 0 and not post.admits(outgoing), copied)
    return made


def on_host(found: buffers.Items, stream: int) -> Any:
    """Return the bytes of a message in host memory, when the stream has come there."""
    data = np.empty(found.nbytes, _BYTE)
    if found.layout.runs is not None:
        found = buffers.copy_of(found, stream)
    streams.copy_to_host(data.ctypes.data, found.address, found.nbytes, stream)
    if not SIMULATED:
        streams.synchronize(stream)
    return data


class Sending(Own):
    """A send: its data is copied at once, or later if it was postponed.

    Attributes:
        post: of its communicator.
        outgoing: the message.
        tag: its tag.
        number: the message's.
        slot: of its words; ``NO_SLOT``: MPI sends the data, if there is any.
        room: the memory from which the message is read.
    """

    post: Post
    outgoing: Outgoing
    tag: int
    number = -1
    slot, room = NO_SLOT, None
    _array: Any  # until it may be used
    _matched: bool  # whether it is done only when a receive has matched it
    _asked: list[MPI.Request] | None = None  # requests of MPI, or none: see _is_matched
    _requests: list[MPI.Request]  # of MPI, which sends the data
    _begun = _announced = True
    _tried = _hurries = False
    _after: Event | None = None  # what has written the array of a postponed message
    _error: Exception | None = None

    def _send(self, stream: int, later: bool = False, copied: bool = False) -> None:
        """Send a message that the compiled function does not send."""
        post, outgoing = self.post, self.outgoing
        sent = post._envelopes.sent.copy()
        self._begun = self._announced = False
        self._asked = [] if self._matched or later else None
        self._requests = []
        if later and (copied or outgoing.items.layout.runs is not None):
            # A kernel copies items with gaps, and no other thread launches it.
            items = outgoing.items._replace(array=self._array)
            found = buffers.copy_of(items, stream)
            self.outgoing = outgoing = Outgoing.of(post, found, outgoing.dest)
            self._array = found.array
        try:
            with post._lock:  # envelopes are in the order of their numbers
                if later:
                    self._after = Event()
                    self._after.record(stream)
                    progress.add(self, post._enter)
                self.number = post.words.next_number()
                if outgoing.nbytes and not outgoing.apart:
                    self.slot = post.words.take()
                if not later:
                    self._begin(stream)
                self._announce()
                self._announced = True
        except BaseException as error:
            self._announced = self._is_announced(sent)
            if not self._announced:
                self._cancel(isinstance(error, Exception) or post.idle(stream))
            elif later:
                self.hurry()
            raise

    def _announce(self) -> None:
        """Send the envelope."""
        post, dest, slot, number = self.post, self.outgoing.dest, self.slot, self.number
        if self._asked is not None and slot == NO_SLOT:
            empty = np.empty(0, np.uint8)
            post._envelopes.receive(self._asked, empty, dest, post.answer_of(number))
        asks = self._asked is not None
        rest = self.tag, self.outgoing.nbytes, slot, number, asks
        if self.outgoing.apart:
            text = FIELDS.pack(post.context, post.rank, *rest)
            post._envelopes.send([text, MPI.BYTE], dest)
            return
        fields = *post.to[dest], post.context, post.places[post.rank], *rest
        while not post.words.publish(*fields):
            post.check()  # the receiver has looked at none of very many envelopes
            progress.advance()
            time.sleep(PAUSE)

    def _is_announced(self, sent: list[int]) -> bool:
        """Return whether the envelope was sent before an interrupt.

        Args:
            sent: by rank, the envelopes that MPI had sent before.
        """
        dest = self.outgoing.dest
        if self.outgoing.apart:
            return self.post._envelopes.sent[dest] > sent[dest]
        return bool(rooms.last(self.post.to[dest][0], NUMBER) == self.number)

    def _cancel(self, ended: bool) -> None:
        """Use the memory again, which nobody knows of.

        Args:
            ended: whether no copy may write there later. After an exception of a
                signal's handler, one that was launched may.
        """
        post, words, slot, number = self.post, self.post.words, self.slot, self.number
        progress.remove(self)
        if slot == NO_SLOT:
            return
        with post._lock:
            if self not in post._unread:
                words.give_back(slot)
            elif self._begun or ended:
                words.store(slot, READ, number)
                if not self._begun:
                    words.store(slot, READY, number)
            else:  # slot and room stay unused
                self.slot, self.room = NO_SLOT, None
                post.release(self)

    def _begin(self, stream: int) -> None:
        """Enqueue the copy to a room, or send the data. The caller has the lock."""
        post, slot, number = self.post, self.slot, self.number
        if slot != NO_SLOT and self not in post._unread:
            post.lend(self, slot, number, None)
        if slot != NO_SLOT and self.room is None:
            self.room = post.room_for(self.outgoing.size)
        if self.room is not None:
            if not post.words.holds(slot, READY, number):
                self._fill(self.room, stream)
        elif self._announced and slot != NO_SLOT:
            raise BackendError("Send: expected memory for a message, got none")
        else:
            if slot != NO_SLOT:
                post.release(self)
                self.slot = NO_SLOT
            if self.outgoing.nbytes:
                self._send_data(stream)
        self._begun = True

    def _fill(self, room: Room, stream: int) -> None:
        """Enqueue the copy of the items to a room, and its word."""
        outgoing, words, target = self.outgoing, self.post.words, room.address
        items, nbytes = outgoing.items, outgoing.nbytes
        if items.layout.runs is not None:
            packed = Memory(target, nbytes, room.memory).array(nbytes, _BYTE)
            buffers.pack(items, packed)(stream)
            nbytes = 0
        elif nbytes > message_copy.MOST:
            streams.copy(target, outgoing.address, nbytes, stream)
            nbytes = 0
        words.put(self.slot, room)
        given = target, outgoing.address, nbytes, stream, self.slot, READY, self.number
        status = words.copy(words.port_at, *given)
        if status:
            raise failure_of(status)

    def _send_data(self, stream: int) -> None:
        """Send the data by MPI."""
        post, dest, number = self.post, self.outgoing.dest, self.number
        data = on_host(self.outgoing.items._replace(array=self._array), stream)
        post._data.send_parts(data, dest, number, self._requests)
        post.lend(self, NO_SLOT, number, None)

    def advance(self) -> bool:
        """Do what can be done now; return whether the array may be used. Never wait."""
        lock = self.post._lock
        # The thread that has the lock may wait for one that this thread has.
        if not self._begun and self._announced and lock.acquire(blocking=False):
            try:
                if self._may_begin():
                    self._tried = True
                    self._begin(self.post.outgoing.stream)
            except Exception as error:  # for its own request, whoever calls this
                self._fail(error)
            finally:
                lock.release()
        return self._is_copied()

    def _may_begin(self) -> bool:
        post = self.post
        try:
            post.check_open("Send")
        except Exception:  # another GPU is current in this thread
            return False
        if self._begun or not (
            self._hurries or self._is_matched() or post.admits(self.outgoing)
        ):
            return False
        # The copy to the host would wait for that, and an interrupt may have come here.
        assert self._after is not None
        idle = not self._tried or post.idle(post.outgoing.stream)
        return self._after.query() and idle

    def _is_matched(self) -> bool:
        """Return whether a receive has matched a message that asked for that."""
        if self.slot != NO_SLOT:
            return bool(self.post.words.holds(self.slot, MATCHED, self.number))
        with self.post._lock:  # two threads must not ask MPI at a time
            return all([request.Test() for request in self._asked or ()])

    def _is_copied(self) -> bool:
        if self._array is not None:
            there = self.slot == NO_SLOT or self.post.words.holds(
                self.slot, READY, self.number
            )
            if not (self._begun and there):
                return False
            self._array = None  # the program may drop the array
        return True

    def _is_done(self) -> bool:
        return self.advance() and (not self._matched or self._is_matched())

    def _fail(self, error: Exception) -> None:
        """Make its request raise, and the receive that matches it."""
        post, slot, dest = self.post, self.slot, self.outgoing.dest
        self._error, self._begun = error, True
        try:
            if slot == NO_SLOT:
                post._data.refuse_parts(self.outgoing.nbytes, dest, self.number)
            else:  # it keeps the slot until the receiver has refused it
                post.outgoing.settle()  # a copy may still write the room
                post.give_back(self)
                post.words.end(slot, self.number)
        except Exception as another:
            error.add_note(f"This could not be reported to rank {dest}: {another!r}.")
        self._array = None

    def hurry(self) -> None:
        """Copy the array now: the call raises, so its caller may change the array."""
        if not self._begun:
            self.post.check_open("Send")  # or this thread would never advance it
        self._hurries = True
        with suppress(SymmError):
            waited(self.advance, self.post.check)

    _withdraw = hurry

    def drop(self, error: Exception) -> None:
        """End without the receiver, in a communicator that was freed or has failed."""
        with self.post._lock:
            if not self._begun:
                self._error, self._begun, self._array = error, True, None
        progress.remove(self)

    def _finish(self, status: MPI.Status | None) -> None:
        post, slot, number = self.post, self.slot, self.number
        if not self._begun:
            self._wait_for_limit()
        if self._error is not None:
            self._active = False
            raise self._error
        if slot != NO_SLOT and post.words.values[LINE * slot + READY] < number:
            post.until(slot, READY, number)
        if self._matched:
            waited(self._is_done, post.check)
        self._array = None
        if status is not None:
            describe(status)

    def _wait_for_limit(self) -> None:
        """Wait until the array may be used, or, if asked, until a receive has matched.

        Raises:
            ArgumentError: another GPU is current in this thread; it may be waited for
                again.
        """
        post, begin = self.post, time.monotonic()
        post.check_open("Send")

        def check() -> None:
            try:
                post.check()
            except Exception as error:
                self.drop(error)
                raise
            seconds = 0 if self._matched else post.timeout
            if seconds and time.monotonic() - begin > seconds:
                raise self._late()

        try:
            waited(self._is_done, check)
        except BaseException:
            self.hurry()
            self._active = False
            raise
        finally:
            if self._array is None:
                progress.remove(self)

    def _late(self) -> CollectiveTimeout:
        post, rank, dest = self.post, self.post.rank, self.outgoing.dest
        return CollectiveTimeout(
            f"Send: rank {rank} waited for rank {dest} to receive its message of "
            f"{self.outgoing.nbytes} bytes with tag {self.tag}; it has "
            f"{post.unread[dest]} bytes of earlier ones to receive, and "
            f"NUMBA_SYMM_MESSAGE_LIMIT is {post.limit} (timeout: "
            f"{post.timeout:g} s); receive them first, or raise that limit. The "
            "message is sent nevertheless",
            ranks=(rank, dest),
            operation="Send",
        )

    def _poll(self, status: MPI.Status | None) -> bool:
        if self._is_done():
            self._finish(status)
            return True
        self.post.check()
        return False


NOBODY = MPI.PROC_NULL


class Messages:
    """The point-to-point methods of a communicator.

    A send copies its array and returns: ``Send``, ``Bsend``, ``Rsend`` and the
    nonblocking ones do not wait for the receiver; ``Ssend`` does. Above the limit of
    bytes that the receiver has not received, ``Send`` and ``Rsend`` wait, too, and the
    nonblocking ones copy later. Only a receive into a device array receives a message
    of a device array. The same holds for host arrays.
    """

    host: Any
    post: Post

    def _items(self, buf: Any, rank: int, make: Any) -> tuple[Any, Any]:
        """Return the message that a send names or the items that a receive writes.

        They come with their array. There are none if the array is on the host, or for
        nobody.

        Args:
            buf: what the program has passed.
            rank: to which it sends, or from which it receives.
            make: ``Outgoing`` or ``Incoming``.
        """
        kind = KINDS.get(type(buf))
        if kind is not None and kind.always:
            array, key = buf, (kind.read(buf, "message"), None)
        else:
            key, array = buffers.key_of(buf)
        if rank == NOBODY:
            return None, array
        known = self.post.known
        named = key, make, rank
        if key is not None and (made := known.young.get(named)) is not None:
            return made, array
        if not on_device(buf):
            return None, array
        found = message(buf)
        made = make.of(self.post, found, rank)
        if key is not None:
            known.put(named, made)
        return made, found.array

    def _sent(self, name: str, buf: Any, dest: int, tag: int, **how: bool) -> Any:
        """Start a send, whose options are those of ``send``; return its request.

        From the host, mpi4py's method of this name sends, and to nobody, nothing does.
        """
        found, array = self._items(buf, dest, Outgoing)
        if found is not None:
            return send(self.post, found, array, tag, **how)
        if dest == NOBODY:
            return DoneRequest()
        return getattr(self.host, name)(buf, dest, tag)

    @translated
    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message. The array may be used when this returns."""
        _complete(self._sent("Send", buf, dest, tag))

    Rsend = Send

    @translated
    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message, regardless of the limit."""
        _complete(self._sent("Bsend", buf, dest, tag, limited=False))

    @translated
    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message, and wait until a receive has matched it, without a deadline.

        A receive waits as long for its message. Both raise if the communicator fails.
        """
        _complete(self._sent("Ssend", buf, dest, tag, matched=True))

    @translated
    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message; return a request, which is done when it was copied."""
        return self._sent("Isend", buf, dest, tag)

    Irsend = Isend

    @translated
    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message, regardless of the limit; return a request."""
        return self._sent("Ibsend", buf, dest, tag, limited=False)

    @translated
    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message; return a request, which is done when it was matched."""
        return self._sent("Issend", buf, dest, tag, matched=True)

    @translated
    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Receive a message, which may be shorter than the room for it."""
        into, array = self._items(buf, source, Incoming)
        if into is None:
            self.host.Recv(None if source == NOBODY else buf, source, tag, status)
        else:
            _complete(receiving(self.post, into, array, source, tag, True), status)

    @translated
    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Any:
        """Receive a message; return a request, which is done when it has arrived.

        The data is copied in ``Wait`` or ``Test``.
        """
        into, array = self._items(buf, source, Incoming)
        if into is None:
            if source == NOBODY:
                return DoneRequest(NOBODY)
            return self.host.Irecv(buf, source, tag)
        return receiving(self.post, into, array, source, tag)

    @translated
    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Send a message and receive one."""
        into, array = self._items(recvbuf, source, Incoming)
        sent, of_sent = self._items(sendbuf, dest, Outgoing)
        if into is None or sent is None:
            both = self.Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag)
            _complete(both, status)
            return
        self.post.check_receive(source, recvtag)  # before the send is announced
        sends = send(self.post, sent, of_sent, sendtag)
        try:
            receives = receiving(self.post, into, array, source, recvtag, True)
        except BaseException:
            sends._withdraw()
            raise
        _complete(Together(receives, sends), status)

    @translated
    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
    ) -> Any:
        """Send a message and receive one; return a request."""
        if NOBODY not in (dest, source):
            on_device(sendbuf, recvbuf)  # refuses one of each kind
        receives = self.Irecv(recvbuf, source, recvtag)
        try:
            sends = self.Isend(sendbuf, dest, sendtag)
        except BaseException:
            if isinstance(receives, StartedCall):
                receives._withdraw()
            else:
                receives.Cancel()
                receives.Wait()
            raise
        return Together(receives, sends)

    @translated
    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Send an array's message, and receive another one into the array."""
        if on_device(buf):
            both = self.Isendrecv_replace(buf, dest, sendtag, source, recvtag)
            _complete(both, status)
        else:
            self.host.Sendrecv_replace(buf, dest, sendtag, source, recvtag, status)

    @translated
    def Isendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
    ) -> Any:
        """Send an array's message, and receive another one into it; a request."""
        if not on_device(buf):
            return self.host.Isendrecv_replace(buf, dest, sendtag, source, recvtag)
        if source != NOBODY:  # before the send, which is not taken back
            self.post.check_receive(source, recvtag)
        found, array = self._items(buf, dest, Outgoing)
        if found is None:
            return self.Irecv(buf, source, recvtag)
        sends = send(self.post, found, array, sendtag, copied=True)
        return Together(self.Irecv(buf, source, recvtag), sends)

    # Persistent ones.

    def _prepared(self, name: str, buf: Any, dest: int, tag: int, **how: bool) -> Any:
        """Prepare what :meth:`_sent` does; mpi4py's method prepares one of the host."""
        found, array = self._items(buf, dest, Outgoing)
        if found is None:
            if on_device(buf):
                return Prequest(DoneRequest)
            return getattr(self.host, name)(buf, dest, tag)
        self.post.check_message("Send", dest, tag)
        return Prequest(partial(send, self.post, found, array, tag, **how), [array])

    @translated
    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send."""
        return self._prepared("Send_init", buf, dest, tag)

    Rsend_init = Send_init

    @translated
    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send."""
        return self._prepared("Bsend_init", buf, dest, tag, limited=False)

    @translated
    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send that is done when a receive has matched it."""
        return self._prepared("Ssend_init", buf, dest, tag, matched=True)

    @translated
    def Recv_init(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Any:
        """Prepare a receive."""
        into, array = self._items(buf, source, Incoming)
        if into is None:
            if on_device(buf):
                return Prequest(partial(DoneRequest, NOBODY))
            return self.host.Recv_init(buf, source, tag)
        self.post.check_receive(source, tag)
        return Prequest(
            partial(receiving, self.post, into, array, source, tag), [array]
        )

    # Probes.

    @translated
    def Iprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> bool:
        """Return whether a message has arrived, of a device array or of a host one."""
        found = None if source == NOBODY else self.post.probe("Probe", source, tag)
        if found is None:
            return bool(self.host.Iprobe(source, tag, status))
        describe(status, found.source, found.tag, found.nbytes)
        return True

    @translated
    def Probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> bool:
        """Wait for a message."""
        return bool(waited(partial(self.Iprobe, source, tag, status), self.post.check))

    @translated
    def Improbe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Return a message, so that no other receive gets it, or None."""
        found = None
        if source != NOBODY:
            found = self.post.probe("Mprobe", source, tag, takes=True)
        if found is None:
            return self.host.Improbe(source, tag, status)
        describe(status, found.source, found.tag, found.nbytes)
        return Message.of(self.post, found)

    @translated
    def Mprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Wait for a message; return it, so that no other receive gets it."""
        return waited(partial(self.Improbe, source, tag, status), self.post.check)


def _complete(request: Any, status: MPI.Status | None = None) -> None:
    """Wait for a request that the program does not get, so it cannot wait again."""
    if request is None:  # mpi4py has waited
        return
    try:
        request._finish(status)
    except BaseException:
        request._withdraw()
        raise


class Together(Own):
    """A receive and a send, whose status is that of the receive."""

    _starts = True

    def __init__(self, receives: Any, sends: Any):
        self._receives, self._sends = receives, sends

    def _await_start(self) -> None:
        if isinstance(self._receives, StartedCall):
            self._receives._await_start()

    def _withdraw(self) -> None:
        for each in (self._receives, self._sends):
            if isinstance(each, StartedCall):
                each._withdraw()

    def _finish(self, status: MPI.Status | None) -> None:
        for each, found in ((self._receives, status), (self._sends, None)):
            if isinstance(each, StartedCall):
                each._complete(found)
            else:
                each.Wait(found)

    def _poll(self, status: MPI.Status | None) -> bool:
        if not all([each.Get_status() for each in (self._receives, self._sends)]):
            return False
        self._finish(status)
        return True


_attached: list[Any] = []


def Attach_buffer(buf: Any) -> None:
    """Attach memory for ``Bsend``; sends of device arrays do not need it."""
    if on_device(buf):
        _attached.append(buf)
    else:
        MPI.Attach_buffer(buf)


def Detach_buffer() -> Any:
    """Return the memory that was attached."""
    return _attached.pop() if _attached else MPI.Detach_buffer()
