"""mpi4py's messages on device arrays: their calls, and the sends within a node.

A message takes one of two ways. To a rank of the same island, its items are copied to a
room, memory of this process (``rooms.py``), and a word tells when the receiver may read
it there. To other ranks, it passes through host memory and MPI.

Above the limit of bytes that a rank has not received, the request of a message ends
when a receive has matched it, as MPI's standard send may do. If the copy to a room
fails, a word tells so, and the receiver raises.
"""

import ctypes
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm.errors import CollectiveTimeout, SymmError
from numba_symm.gpu import streams
from numba_symm.gpu.arrays import KINDS
from numba_symm.mpi import buffers, progress
from numba_symm.mpi.buffers import message, on_device
from numba_symm.mpi.datatypes import dense, like, translated
from numba_symm.mpi.pending import Incoming, Message, receiving
from numba_symm.mpi.posts import Post
from numba_symm.mpi.rooms import (
    FULL,
    LINE,
    MATCHED,
    NO_ORDER,
    NO_SLOT,
    POSTED,
    READY,
    SLOTS_OF_ALL,
    Parcel,
    size_of,
)
from numba_symm.mpi.started import Own, Prequest, Started
from numba_symm.mpi.waited import StartedCall, describe, paused, waited

_BYTE = np.dtype(np.uint8)


class Outgoing(NamedTuple):
    """A message of certain items to a rank, which can be sent many times.

    Attributes:
        items: the items, without their array.
        dest: the rank.
        nbytes: the message's size.
        parcel: what the compiled ``send`` sends; None to another island.
        parcel_at: its address.
    """

    items: buffers.Items
    dest: int
    nbytes: int
    parcel: Any
    parcel_at: int

    @classmethod
    def of(cls, post: Post, found: buffers.Items, dest: int) -> "Outgoing":
        """Return the message, or refuse its destination."""
        post.check_message("Send", dest, 0)
        if not found.nbytes:  # an empty array's address may be 0, which has no places
            found = found._replace(layout=dense(_BYTE), number=0)
        nbytes, parcel, at = found.nbytes, None, 0
        items = found._replace(array=None)
        if dest in post.to:
            stack = ctypes.addressof(post.words.rooms.stack(size_of(nbytes)))
            unread = ctypes.addressof(post.unread) + 8 * dest
            envelope = post.to[dest], post.context, post.places[post.rank], unread
            parcel = Parcel(post.words.port_at, stack, found.address, nbytes, *envelope)
            at = ctypes.addressof(parcel)
        return cls(items, dest, nbytes, parcel, at)


def send(
    post: Post,
    outgoing: Outgoing,
    array: Any,
    tag: int,
    matched: bool = False,
    limited: bool = True,
    stream: int | None = None,
) -> "Sending":
    """Send a message; return its request.

    Args:
        post: of its communicator.
        outgoing: the message.
        array: the array of its items.
        tag: its tag.
        matched: whether the request is done only when a receive has matched it.
        limited: whether the request may wait for the receiver above the limit.
        stream: of the array; None: the array is asked.
    """
    if post._freed or not (hasattr(post.threads, "ready") and 0 <= tag < post.tags):
        post.check_message("Send", outgoing.dest, tag)
    stream = post.stream_of(array) if stream is None else stream
    if outgoing.items.layout.runs is not None:
        post.refuse_capture(stream, "Send")
        packed = buffers.packed(outgoing.items._replace(array=array), stream)
        outgoing = Outgoing.of(post, packed, outgoing.dest)
        array = array, packed.array
    made = object.__new__(Sending)  # Sending(...) takes longer
    made.post, made.outgoing, made.tag = post, outgoing, tag
    made._array, made._matched = array, matched
    over = limited and 0 < post.limit < post.unread[outgoing.dest] + outgoing.nbytes
    made._over = over and not post.admits(outgoing.dest, outgoing.nbytes)
    if outgoing.parcel is None:
        post.refuse_capture(stream, "Send")
        made._by_mpi(stream)
        return made
    looks, since, asks = 0, 0.0, matched or made._over
    while True:
        with post._lock:
            first = next(iter(post.posted), None)
            order = NO_ORDER if first is None else first._order
            try:
                found = post._send(order, outgoing.parcel_at, stream, tag, asks)
            finally:  # an interrupt may come after that
                if first is not None and order[0] != POSTED:
                    post.arriving[first] = None  # also if its request is dropped
                    # After an interrupt, its message is matched there again.
                    if not (post.words.port.held or post.coming):
                        post.posted.pop(first, None)
            if found == FULL:
                post.room_for(size_of(outgoing.nbytes))
            if found == FULL or len(post.arriving) >= progress.MOST:
                post.reap()
        if found != FULL:
            break
        if since:
            looks = paused(looks, partial(made._check, since))
        since = since or time.monotonic()  # at first again at once: there is a new room
    if found < 0:
        post.raise_for(found, stream, "Send")
    made.number, made.slot = divmod(found, SLOTS_OF_ALL)
    return made


def on_host(found: buffers.Items, stream: int) -> Any:
    """Return the bytes of a message in host memory, when the stream has come there."""
    data = np.empty(found.nbytes, _BYTE)
    streams.copy_to_host(data.ctypes.data, found.address, found.nbytes, stream)
    streams.synchronize(stream)
    return data


class Sending(Own):
    """A send, whose copy was enqueued, or that MPI sends.

    Attributes:
        post: of its communicator.
        outgoing: the message.
        tag: its tag.
        number: the message's.
        slot: of its words; ``NO_SLOT``: MPI sends it.
    """

    post: Post
    outgoing: Outgoing
    tag: int
    number, slot = -1, NO_SLOT
    _array: Any  # until it may be used
    _matched: bool  # whether it is done only when a receive has matched it
    _over: bool  # whether it is above the limit
    _requests: Sequence[MPI.Request] = ()  # of MPI, if that sends it

    def _by_mpi(self, stream: int) -> None:
        """Send the message by MPI, when the stream has come there."""
        post, outgoing = self.post, self.outgoing
        data = on_host(outgoing.items, stream)
        self._array, self._requests = None, []
        given = data, outgoing.dest, self.tag, self._matched or self._over
        with post._lock:
            post.mpi.send(*given, self._requests)

    def _is_matched(self) -> bool:
        """Return whether a receive has matched the message."""
        if self.slot != NO_SLOT:
            return bool(self.post.words.holds(self.slot, MATCHED, self.number))
        with self.post._lock:  # two threads must not ask MPI at a time
            return all([request.Test() for request in self._requests])

    def _is_done(self) -> bool:
        slot, words = self.slot, self.post.words
        done = slot == NO_SLOT or words.holds(slot, READY, self.number)
        if done:
            self._array = None  # the program may drop the array
            done = not (self._matched or self._over) or self._is_matched()
        if not done:
            self.post.check()
        return done

    def _withdraw(self) -> None:
        """Wait for the copy: the call raises, so its caller may change the array."""
        if self.slot != NO_SLOT:
            with suppress(SymmError):
                self.post.until(self.slot, READY, self.number)

    def _finish(self, status: MPI.Status | None) -> None:
        post, slot, number = self.post, self.slot, self.number
        if slot != NO_SLOT and post.words.values[LINE * slot + READY] < number:
            post.until(slot, READY, number)
        if (self._matched or self._over) and not self._is_done():
            waited(self._is_done, partial(self._check, time.monotonic()))
        self._array = None
        if status is not None:
            describe(status)

    def _check(self, since: float) -> None:
        """Raise after a failure, or if a message above the limit has waited long."""
        post = self.post
        post.check()
        seconds = 0 if self._matched else post.timeout
        if seconds and time.monotonic() - since > seconds:
            raise self._late()

    def _late(self) -> CollectiveTimeout:
        post, rank, dest = self.post, self.post.rank, self.outgoing.dest
        rest = "raise that limit. The message is sent nevertheless"
        if self.number < 0 and self.outgoing.parcel is not None:
            rest = "send fewer ahead. The message is not sent"
        return CollectiveTimeout(
            f"Send: rank {rank} waited for rank {dest} to receive its message of "
            f"{self.outgoing.nbytes} bytes with tag {self.tag}; it has "
            f"{post.unread[dest]} bytes of earlier ones to receive, and "
            f"NUMBA_SYMM_MESSAGE_LIMIT is {post.limit} (timeout: "
            f"{post.timeout:g} s); receive them first, or {rest}",
            ranks=(rank, dest),
            operation="Send",
        )


NOBODY = MPI.PROC_NULL


class Messages:
    """The point-to-point methods of a communicator.

    A send copies its array and returns: ``Send``, ``Bsend``, ``Rsend`` and the
    nonblocking ones do not wait for the receiver; ``Ssend`` does. Above the limit of
    bytes that the receiver has not received, ``Send`` and ``Rsend`` wait, and so do
    the requests of the nonblocking ones. ``Bsend`` never waits. Only a receive into a
    device array receives a message of a device array. The same holds for host arrays.
    """

    host: Any
    post: Post
    Isend: Any

    def _items(self, buf: Any, rank: int, make: Any) -> tuple[Any, Any, Any]:
        """Return the message that a send names or the items that a receive writes.

        They come with their array and its stream, or None to ask for that. There are
        none if the array is on the host, or for nobody.

        Args:
            buf: what the program has passed.
            rank: to which it sends, or from which it receives.
            make: ``Outgoing`` or ``Incoming``.
        """
        kind, stream = KINDS.get(type(buf)), None
        if kind is not None and kind.always:
            array, key = buf, (kind.read(buf, "message"), None)
            stream = kind.stream(buf) if kind.stream else self.post.stream
        else:
            key, array = buffers.key_of(buf)
        if rank == NOBODY:
            return None, array, stream
        known = self.post.known
        named = key, make, rank
        if key is not None and (made := known.young.get(named)) is not None:
            return made, array, stream
        if not on_device(buf):
            return None, array, stream
        found = message(buf)
        made = make.of(self.post, found, rank)
        if key is not None:
            known.put(named, made)
        return made, found.array, stream

    def _sent(
        self,
        name: str,
        buf: Any,
        dest: int,
        tag: int,
        matched: bool = False,
        limited: bool = True,
    ) -> Any:
        """Start a send, whose options are those of ``send``; return its request.

        From the host, mpi4py's method of this name sends, and to nobody, nothing does.
        """
        found, array, stream = self._items(buf, dest, Outgoing)
        if found is not None:
            return send(self.post, found, array, tag, matched, limited, stream)
        if dest == NOBODY:
            return Started()
        return getattr(self.host, name)(buf, dest, tag)

    @translated
    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Receive a message, which may be shorter than the room for it."""
        into, array, stream = self._items(buf, source, Incoming)
        if into is None:
            self.host.Recv(None if source == NOBODY else buf, source, tag, status)
        else:
            given = self.post, into, array, source, tag, True, None, stream
            _complete(status, receiving(*given))

    @translated
    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Any:
        """Receive a message; return a request, which is done when it has arrived.

        The data is copied in ``Wait`` or ``Test``.
        """
        into, array, stream = self._items(buf, source, Incoming)
        if into is None:
            if source == NOBODY:
                return Started(source=NOBODY)
            return self.host.Irecv(buf, source, tag)
        return receiving(self.post, into, array, source, tag, False, None, stream)

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
        given = sendbuf, dest, sendtag, recvbuf, source, recvtag
        _complete(status, *self._exchanged(*given, waits=True))

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
        given = sendbuf, dest, sendtag, recvbuf, source, recvtag
        return Together(*self._exchanged(*given))

    def _exchanged(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int,
        recvbuf: Any,
        source: int,
        recvtag: int,
        waits: bool = False,
    ) -> tuple[Any, Any]:
        """Start to receive a message as ``receiving`` does, and to send one.

        It returns the requests, of either kind.
        """
        into, array, on = self._items(recvbuf, source, Incoming)
        sent, of_sent, stream = self._items(sendbuf, dest, Outgoing)
        if into is None or sent is None:
            if NOBODY not in (dest, source):
                on_device(sendbuf, recvbuf)  # refuses one of each kind
            receives = self.Irecv(recvbuf, source, recvtag)
            try:
                return receives, self.Isend(sendbuf, dest, sendtag)
            except BaseException:
                if isinstance(receives, StartedCall):
                    receives._withdraw()
                else:
                    receives.Cancel()
                    receives.Wait()
                raise
        given = self.post, into, array, source, recvtag, waits, None, on
        receives = sends = None
        try:
            if waits:  # so that one launch copies both messages
                receives = receiving(*given)
            else:
                self.post.check_receive(source, recvtag)  # before the send
            sends = send(self.post, sent, of_sent, sendtag, stream=stream)
            return receiving(*given) if receives is None else receives, sends
        except BaseException:
            _withdraw(receives, sends)
            raise

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
            given = buf, dest, sendtag, buf, source, recvtag
            _complete(status, *self._exchanged(*given))
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
        given = buf, dest, sendtag, buf, source, recvtag
        return Together(*self._exchanged(*given))

    # Persistent ones.

    def _prepared(
        self,
        name: str,
        buf: Any,
        dest: int,
        tag: int,
        matched: bool = False,
        limited: bool = True,
    ) -> Any:
        """Prepare what :meth:`_sent` does; mpi4py's method prepares one of the host."""
        found, array, _ = self._items(buf, dest, Outgoing)
        if found is None:
            if on_device(buf):
                return Prequest(Started)
            return getattr(self.host, name)(buf, dest, tag)
        self.post.check_message("Send", dest, tag)
        given = self.post, found, array, tag, matched, limited
        return Prequest(partial(send, *given), [array])

    @translated
    def Recv_init(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Any:
        """Prepare a receive."""
        into, array, _ = self._items(buf, source, Incoming)
        if into is None:
            if on_device(buf):
                return Prequest(partial(Started, source=NOBODY))
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


def _sends(kind: str, *how: bool) -> None:
    """Add the three methods of a kind of sends, with these options of ``send``."""
    name = f"{kind}send"

    def blocking(self: Messages, buf: Any, dest: int, tag: int) -> None:
        _complete(None, self._sent(name.capitalize(), buf, dest, tag, *how))

    def nonblocking(self: Messages, buf: Any, dest: int, tag: int) -> Any:
        return self._sent(f"I{name}", buf, dest, tag, *how)

    def persistent(self: Messages, buf: Any, dest: int, tag: int) -> Any:
        return self._prepared(f"{name.capitalize()}_init", buf, dest, tag, *how)

    each = name.capitalize(), f"I{name}", f"{name.capitalize()}_init"
    for own, method in zip(each, (blocking, nonblocking, persistent), strict=True):
        setattr(Messages, own, like(getattr(MPI.Comm, own), method))


for _kind, *_how in (("",), ("r",), ("s", True), ("b", False, False)):
    _sends(_kind, *_how)


def _complete(status: MPI.Status | None, *requests: Any) -> None:
    """Wait for requests that the program does not get, so it cannot wait again.

    The status is that of the first one. None is a call that mpi4py has made.
    """
    try:
        for request in requests:
            if isinstance(request, StartedCall):
                request._finish(status)
            elif request is not None:
                request.Wait(status)
            status = None
    except BaseException:
        _withdraw(*requests)
        raise


def _withdraw(*requests: Any) -> None:
    for each in requests:
        if isinstance(each, StartedCall):
            each._withdraw()


class Together(Own):
    """A receive and a send, whose status is that of the receive."""

    _starts = True

    def __init__(self, receives: Any, sends: Any):
        self._receives, self._sends = receives, sends

    def _await_start(self) -> None:
        if isinstance(self._receives, StartedCall):
            self._receives._await_start()

    def _withdraw(self) -> None:
        _withdraw(self._receives, self._sends)

    def _finish(self, status: MPI.Status | None) -> None:
        for each, found in ((self._receives, status), (self._sends, None)):
            if isinstance(each, StartedCall):
                each._complete(found)
            else:
                each.Wait(found)

    def _is_done(self) -> bool:
        return self.Get_status()

    @translated
    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return what :meth:`Test` would return; the request stays active."""
        if not self._active:
            return super().Get_status(status)
        return all([self._receives.Get_status(status), self._sends.Get_status()])
