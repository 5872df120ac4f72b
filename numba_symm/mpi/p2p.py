"""mpi4py's sends, receives and probes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from numba_symm.arrays import KINDS
from numba_symm.mpi import buffers
from numba_symm.mpi.buffers import message, on_device
from numba_symm.mpi.calls import StartedCall, describe, waited
from numba_symm.mpi.messages import Post
from numba_symm.mpi.pending import DoneRequest, Incoming, Message, receiving
from numba_symm.mpi.reading import translated
from numba_symm.mpi.requests import Own, Prequest
from numba_symm.mpi.sends import Outgoing, send

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
        of = make, rank if make is Outgoing else NOBODY
        known = self.post.known
        if key is not None and (made := known.young.get((key, of))) is not None:
            return made, array
        if not on_device(buf):
            return None, array
        found = message(buf)
        made = make.of(self.post, found, rank)
        if key is not None:
            known.put((key, of), made)
        return made, found.array

    def _sent(
        self, plain: Callable[..., Any], buf: Any, dest: int, tag: int, **how: bool
    ) -> Any:
        """Start a send, whose options are those of ``Sends.send``; return its request.

        From the host, ``plain`` sends, and to nobody, nothing does.
        """
        found, array = self._items(buf, dest, Outgoing)
        if found is not None:
            return send(self.post, found, array, tag, **how)
        return DoneRequest() if dest == NOBODY else plain(buf, dest, tag)

    @translated
    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message. The array may be used when this returns."""
        _complete(self._sent(self.host.Send, buf, dest, tag))

    Rsend = Send

    @translated
    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message, regardless of the limit."""
        _complete(self._sent(self.host.Bsend, buf, dest, tag, limited=False))

    @translated
    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a message, and wait until a receive has matched it, without a deadline.

        A receive waits as long for its message. Both raise if the communicator fails.
        """
        _complete(self._sent(self.host.Ssend, buf, dest, tag, matched=True))

    @translated
    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message; return a request, which is done when it was copied."""
        return self._sent(self.host.Isend, buf, dest, tag)

    Irsend = Isend

    @translated
    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message, regardless of the limit; return a request."""
        return self._sent(self.host.Ibsend, buf, dest, tag, limited=False)

    @translated
    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message; return a request, which is done when it was matched."""
        return self._sent(self.host.Issend, buf, dest, tag, matched=True)

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

    def _prepared(
        self, plain: Callable[..., Any], buf: Any, dest: int, tag: int, **how: bool
    ) -> Any:
        """Prepare what :meth:`_sent` does; ``plain`` prepares a send from the host."""
        found, array = self._items(buf, dest, Outgoing)
        if found is None:
            return Prequest(DoneRequest) if on_device(buf) else plain(buf, dest, tag)
        self.post.check_message("Send", dest, tag)
        return Prequest(partial(send, self.post, found, array, tag, **how), [array])

    @translated
    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send."""
        return self._prepared(self.host.Send_init, buf, dest, tag)

    Rsend_init = Send_init

    @translated
    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send."""
        return self._prepared(self.host.Bsend_init, buf, dest, tag, limited=False)

    @translated
    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Prepare a send that is done when a receive has matched it."""
        return self._prepared(self.host.Ssend_init, buf, dest, tag, matched=True)

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
