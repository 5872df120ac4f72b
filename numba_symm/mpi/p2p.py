"""mpi4py's sends, receives and probes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from numba_symm.mpi import buffers
from numba_symm.mpi.buffers import array_in, message, on_device
from numba_symm.mpi.calls import StartedCall, describe, waited
from numba_symm.mpi.messages import Post
from numba_symm.mpi.pending import DoneRequest, Message, Receiving, Sending
from numba_symm.mpi.postponed import SendingLater, later
from numba_symm.mpi.reading import translated
from numba_symm.mpi.requests import Own, Prequest, Request

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

    @translated
    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message. The array may be used when this returns."""
        if on_device(buf) and dest != NOBODY:
            found = message(buf)
            postponed = later(self.post, found, dest, tag)
            if postponed is None:
                self.post.send(found, dest, tag)
            else:
                postponed.wait("Send")
        else:
            self.host.Send(None if dest == NOBODY else buf, dest, tag)

    Rsend = Send

    @translated
    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message, regardless of the limit."""
        if on_device(buf) and dest != NOBODY:
            self.post.send(message(buf), dest, tag)
        else:
            self.host.Bsend(None if dest == NOBODY else buf, dest, tag)

    @translated
    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message, and wait until a receive has matched it, without a deadline.

        A receive waits as long for its message. Both raise if the communicator fails.
        """
        self.Issend(buf, dest, tag).Wait()

    @translated
    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message; return a request, which is done unless it copies later."""
        if dest == NOBODY:
            return DoneRequest()
        if not on_device(buf):
            return self.host.Isend(buf, dest, tag)
        return self._send(message(buf), dest, tag)

    def _send(
        self, found: buffers.Items, dest: int, tag: int, copied: bool = False
    ) -> Request:
        postponed = later(self.post, found, dest, tag, copied)
        if postponed is not None:
            return SendingLater(postponed, matched=False)
        return self._send_now(found, dest, tag)

    def _send_now(self, found: buffers.Items, dest: int, tag: int) -> Request:
        self.post.send(found, dest, tag)
        return DoneRequest()

    Irsend = Isend

    @translated
    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message, regardless of the limit; return a request that is done."""
        if dest == NOBODY:
            return DoneRequest()
        if not on_device(buf):
            return self.host.Ibsend(buf, dest, tag)
        return self._send_now(message(buf), dest, tag)

    @translated
    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message; return a request, which is done when it was matched."""
        if dest == NOBODY:
            return DoneRequest()
        if not on_device(buf):
            return self.host.Issend(buf, dest, tag)
        return self._send_matched(message(buf), dest, tag)

    def _send_matched(self, found: buffers.Items, dest: int, tag: int) -> Request:
        postponed = later(self.post, found, dest, tag)
        if postponed is not None:
            return SendingLater(postponed, matched=True)
        matched = self.post.send(found, dest, tag, matched=True)
        return Sending(partial(self.post.has_ended, matched), self.post.check)

    @translated
    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Receive a message, which may be shorter than the room for it."""
        if on_device(buf) and source != NOBODY:
            post, into = self.post, self.post.room(buf)
            begin = partial(post.receive, source, tag)
            on = post.stream_of(into.array, "Recv")
            _complete(Receiving(post, into, None, begin, on), status)
        else:
            self.host.Recv(None if source == NOBODY else buf, source, tag, status)

    @translated
    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Any:
        """Receive a message; return a request, which is done when it has arrived.

        The data is copied in ``Wait`` or ``Test``.
        """
        if source == NOBODY:
            return DoneRequest(NOBODY)
        if not on_device(buf):
            return self.host.Irecv(buf, source, tag)
        return self._receive(self.post.room(buf), source, tag)

    def _receive(self, into: buffers.Items, source: int, tag: int) -> Receiving:
        stream = self.post.stream_of(into.array, "Recv")
        begin = partial(self.post.receive, source, tag)
        return Receiving(self.post, into, stream, begin)

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

        def start() -> Any:
            return self.Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag)

        if NOBODY in (dest, source) or not (on_device(sendbuf) and on_device(recvbuf)):
            _complete(start(), status)
            return
        post, found = self.post, message(sendbuf)
        stream = post.stream_of(array_in(recvbuf), "Recv")  # refuses a capture first
        if not post.admits(found, dest, sendtag):
            _complete(start(), status)
            return
        staged = post.stage(found, dest, sendtag)
        try:  # what the host can do while the send's copy runs
            into = post.room(recvbuf)
            idle = staged.nbytes > 0 and staged.stream == stream
            begin = partial(post.receive, source, recvtag)
            receives = Receiving(post, into, None if idle else stream, begin)
        except BaseException:
            post.drop(staged)
            raise
        try:
            post.announce(staged)  # when its copy has ended
        except BaseException:
            receives._withdraw()
            raise
        _complete(receives, status)

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
        if dest == NOBODY:
            return self.Irecv(buf, source, recvtag)
        if source != NOBODY:  # before the send, which is not taken back
            self.post.check_receive(source, recvtag)
        sends = self._send(message(buf), dest, sendtag, copied=True)
        return Together(self.Irecv(buf, source, recvtag), sends)

    # Persistent ones.

    @translated
    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send."""
        if not on_device(buf):
            return self.host.Send_init(buf, dest, tag)
        return self._prepared(self._send, buf, dest, tag)

    Rsend_init = Send_init

    @translated
    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send."""
        if not on_device(buf):
            return self.host.Bsend_init(buf, dest, tag)
        return self._prepared(self._send_now, buf, dest, tag)

    @translated
    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send that is done when a receive has matched it."""
        if not on_device(buf):
            return self.host.Ssend_init(buf, dest, tag)
        return self._prepared(self._send_matched, buf, dest, tag)

    @translated
    def Recv_init(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Any:
        """Prepare a receive."""
        if not on_device(buf):
            return self.host.Recv_init(buf, source, tag)
        if source == NOBODY:
            return Prequest(partial(DoneRequest, NOBODY))
        self.post.check_receive(source, tag)
        into = self.post.room(buf)
        return Prequest(partial(self._receive, into, source, tag), [into.array])

    def _prepared(
        self, start: Callable[..., Request], buf: Any, dest: int, tag: int
    ) -> Prequest:
        """Return a send whose argument is read now."""
        if dest == NOBODY:
            return Prequest(DoneRequest)
        self.post.check_send(dest, tag)
        found = message(buf)
        return Prequest(partial(start, found, dest, tag), [found.array])

    # Probes.

    @translated
    def Iprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> bool:
        """Return whether a message has arrived, of a device array or of a host one."""
        found = None if source == NOBODY else self.post.probe(source, tag)
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
        found = None if source == NOBODY else self.post.receive_if_there(source, tag)
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


def _complete(request: Request, status: MPI.Status | None) -> None:
    """Wait for a request that the program does not get, so it cannot wait again."""
    try:
        request._finish(status)
    except BaseException:
        request._withdraw()
        raise


class Together(Own):
    """A receive and a send, whose status is that of the receive."""

    def __init__(self, receives: Any, sends: Any):
        super().__init__()
        self._receives, self._sends = receives, sends

    def _progress(self) -> bool:
        return not isinstance(self._receives, StartedCall) or self._receives._progress()

    def _withdraw(self) -> None:
        for each in (self._receives, self._sends):
            if isinstance(each, StartedCall):
                each._withdraw()

    def _finish(self, status: MPI.Status | None) -> None:
        self._receives.Wait(status)
        self._sends.Wait()

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
