"""Messages of device arrays that were started: requests, and what probes found."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from numba_symm.mpi import buffers
from numba_symm.mpi.calls import describe, waited
from numba_symm.mpi.crossings import Copying, Crossing
from numba_symm.mpi.envelopes import Envelope, Posted
from numba_symm.mpi.kinds import Kind
from numba_symm.mpi.messages import Post
from numba_symm.mpi.reading import translated
from numba_symm.mpi.requests import Own


class Receiving(Own):
    """A receive.

    Args:
        post: of its communicator.
        into: the items that it writes.
        stream: the stream of their array; None: its work has ended.
        begin: posts the receive of its envelope.
        on: instead of ``stream``, if the caller only waits for the receive: the copy is
            on this stream then, because the program enqueues nothing before it.
    """

    def __init__(
        self,
        post: Post,
        into: buffers.Items,
        stream: int | None,
        begin: Callable[[], Posted],
        on: int | None = None,
    ):
        self._post, self._into, self._on = post, into, on
        # The copy follows what is enqueued before the receive, not what is later.
        self._after = None if stream is None else post.copies.event(stream)
        self._started = False
        self._copying: Copying | None = None
        self._posted = begin()  # last, so that an error above receives no message

    def _finish(self, status: MPI.Status | None) -> None:
        self._refuse_capture()
        if not self._started:
            self._posted.wait(self._post.check)
        self._describe(status)
        self._start()
        if self._copying is not None:
            self._copying.done.synchronize()
            self._finished(self._copying)

    def _poll(self, status: MPI.Status | None) -> bool:
        self._refuse_capture()
        if not self._posted.look(self._post.check):
            return False
        self._describe(status)
        self._start()
        if self._copying is not None:
            if not self._copying.done.query():
                return False
            self._finished(self._copying)
        return True

    def _finished(self, copying: Copying) -> None:
        self._copying = None
        self._post.end(copying)
        if isinstance(copying.done, Crossing) and copying.done.error is not None:
            self._active = False
            raise copying.done.error

    def _progress(self) -> bool:
        if not self._active or self._started:
            return True
        self._refuse_capture()
        if not self._posted.look(self._post.check):
            return False
        self._start()
        return True

    def _withdraw(self) -> None:
        if self.give_up():
            self._post.withdraw(self._posted)

    def give_up(self) -> bool:
        """End a receive whose copy was not started; return whether that is so."""
        given_up = self._active and not self._started
        if given_up:
            self._active = False
        return given_up

    def _refuse_capture(self) -> None:
        """Raise within a capture; the request stays active."""
        self._post.stream_of(self._into.array, "Recv")

    def _start(self) -> None:
        """Start the copy of the message that has arrived, once."""
        if self._started or self._posted.cancelled:
            return
        found = self._posted.envelope
        try:
            self._started = True
            self._copying = self._post.deliver(found, self._into, self._after, self._on)
        except BaseException:
            self._active = False
            raise

    def _describe(self, status: MPI.Status | None) -> None:
        if status is None:
            return
        if self._posted.cancelled:
            describe(status, cancelled=True)
            return
        found = self._posted.envelope
        describe(status, found.source, found.tag, min(found.nbytes, self._into.nbytes))

    def Cancel(self) -> None:
        """Cancel the receive, unless a message has matched it."""
        self._posted.cancel()


class Sending(Own):
    """A send that is done when a receive has matched it.

    Args:
        matched: returns whether its envelope was matched.
        check: raises if the communicator has failed.
    """

    def __init__(self, matched: Callable[[], bool], check: Callable[[], None]):
        super().__init__()
        self._matched, self._check = matched, check

    def _finish(self, status: MPI.Status | None) -> None:
        waited(self._matched, self._check)
        describe(status)

    def _poll(self, status: MPI.Status | None) -> bool:
        if not self._matched():
            self._check()
            return False
        describe(status)
        return True


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
        stream = self._post.stream_of(into.array, "Recv")
        begin = partial(Posted, envelope=self._envelope)
        receives = Receiving(self._post, into, stream, begin)
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
