"""Postponed messages: those above the limit of bytes that a rank has not received.

The sender sends their envelopes immediately, so MPI's order of messages holds. It
copies the data to memory of its process when a receive has matched the envelope, or
when enough earlier messages were received. So it waits at most for the matching
receive, as MPI's standard send may do. Then it sends the place of the data, through the
channel of data. The order of steps:

1. The sender starts the envelope's synchronous send. MPI ends it after a receive has
   matched.
2. The receiver posts a receive of the place, with the tag of the message's number.
3. The sender copies the data, and sends the place when the copy has ended.
4. The receiver copies the data from there. Then it sends a receipt, as for others.

To another island, the sender sends the data instead of the place. If the sender fails,
the place is empty, or the data has empty parts. Then the receiver raises.
"""

import time
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import own_arrays, streams
from numba_symm.environment import SIMULATED
from numba_symm.errors import CollectiveTimeout, DriverError
from numba_symm.events import Event
from numba_symm.mpi import buffers, packing, progress
from numba_symm.mpi.calls import PAUSE, describe, waited
from numba_symm.mpi.envelopes import FOLLOWS, announced, place
from numba_symm.mpi.requests import Own
from numba_symm.mpi.rooms import Room
from numba_symm.mpi.sends import Sends


class Postponed:
    """A message that is announced, and whose data is sent later.

    Attributes:
        post: of its communicator.
        ended: whether the array may be used.

    Args:
        post: of its communicator.
        found: its items, whose array must not change before :meth:`advance` is True.
        dest: the rank to which it is sent.
        tag: its tag.
        copied: whether the caller may change the array before that.
    """

    def __init__(
        self,
        post: Sends,
        found: buffers.Items,
        dest: int,
        tag: int,
        copied: bool = False,
    ):
        stream = post.stream_of(found.array, "Send")
        if copied or found.layout.runs is not None:
            found = _copy_of(found, stream)  # a kernel, which no other thread launches
        self.post, self._dest, self._tag = post, dest, tag
        self._found: buffers.Items | None = found
        self._nbytes = found.nbytes
        self._requests: list[MPI.Request] = []  # of the envelope
        self._placing: list[MPI.Request] = []  # of the place
        self._room: Room | None = None
        self._done: Event | None = None  # the end of the copy
        self._hurries = self.ended = False
        self._error: Exception | None = None
        with post._lock:
            self._after = post.outgoing.event(stream)
        progress.add(self)  # first, because an interrupt may follow the start
        try:
            offset = 0 if post.is_apart(dest) else FOLLOWS
            with post._lock:  # envelopes are in the order of their numbers
                self._number = next(post._numbers)
                text = announced(self._number, self._nbytes, offset, None)
                post._envelopes.send(text, dest, tag, True, self._requests)
        except BaseException:
            self.hurry()
            raise

    def matched(self) -> bool:
        """Return whether a receive has matched it."""
        with self.post._lock:
            return bool(self._requests[0].Test())

    def advance(self) -> bool:
        """Do what can be done now; return whether the array may be used. Never wait."""
        lock = self.post._lock
        # The thread that has the lock may wait for one that this thread has.
        if not lock.acquire(blocking=False):
            return self.ended
        try:
            if not self.ended and self._requests and self._may_advance():
                try:
                    self._advance()
                except Exception as error:  # for its own request, whoever calls this
                    self._fail(error)
            return self.ended
        finally:
            lock.release()

    def _enter(self) -> None:
        """Make the rank's GPU current in this thread, or raise."""
        if not self.post._freed:
            self.post._check_open("Send")

    def _may_advance(self) -> bool:
        """Return whether the rank's GPU is current in this thread."""
        try:
            self._enter()
        except Exception:  # another one is, and the message is not this thread's
            return False
        return True

    def _advance(self) -> None:
        post = self.post
        if post._freed:
            self._end()
            return
        if self._done is None:
            if not (self._hurries or self.matched() or self._is_admitted()):
                return
            self._start()
        if self._done is not None and self._done.query():
            self._place()

    def _is_admitted(self) -> bool:
        self.post._take_receipts()
        return self.post.flow.admits(self._dest, self._nbytes)

    def _start(self) -> None:
        """Start the copy of the data, unless it goes to host memory."""
        post, found = self.post, self._found
        assert found is not None
        post.flow.sent(self._number, self._dest, self._nbytes)  # before others look
        if post.is_apart(self._dest):
            self._done = self._after  # the copy waits for it, and must not wait here
            return
        if self._room is None:
            self._room = post._room_for(self._nbytes)
        stream = post.outgoing.stream
        self._after.wait(stream)
        streams.copy(self._room.address, found.address, self._nbytes, stream)
        self._done = post.outgoing.event(stream)

    def _place(self) -> None:
        """Send the place of the data, or to another island the data."""
        post, room, number = self.post, self._room, self._number
        if self._placing or number in post._by_mpi:  # before an interrupt
            self._end()
            return
        if room is None:
            assert self._found is not None
            data = np.empty(self._nbytes, np.uint8)
            stream = post.outgoing.stream
            at = data.ctypes.data
            streams.copy_to_host(at, self._found.address, self._nbytes, stream)
            if not SIMULATED:
                streams.synchronize(stream)
            post.send_data(data, self._dest, number)
        else:
            if number not in post._receipts.unread:
                post.lend(room, self._dest, number, self._nbytes)
            self._send_place(place(number, room))
        self._end()

    def _send_place(self, text: bytes) -> None:
        tag = self._number % self.post._tags
        self.post._data.send(text, self._dest, tag, into=self._placing)

    def _fail(self, error: Exception) -> None:
        """Make its request raise, and the receive that matches it."""
        self._error = error
        post, number = self.post, self._number
        try:
            if post._freed or self._placing or number in post._by_mpi:
                pass  # the receiver gets the data, or nothing any more
            elif post.is_apart(self._dest):
                post.flow.received(number)  # no receipt arrives
                post._data.refuse_parts(self._nbytes, self._dest, number)
            else:
                room = self._room
                post._receipts.unread[number] = None  # the receipt arrives anyway
                self._send_place(place(number, None))
                self._give_back(room)
        except Exception as another:
            error.add_note(
                f"This could not be reported to rank {self._dest}: {another!r}."
            )
        finally:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._found = self._room = None  # both may be dropped

    def _give_back(self, room: Room | None) -> None:
        """Let other messages use a room that the receiver does not know."""
        if room is not None:
            with suppress(DriverError):  # whose room is not used again
                self.post.outgoing.settle()  # a copy may still write the room
                self.post._give_back(room)

    def hurry(self) -> None:
        """Copy the array now: the call raises, so its caller may change the array."""
        if not self._requests:  # it was not announced
            self._end()
            progress.remove(self)
        if not self.ended:
            self._enter()  # or else this thread would never advance it
        self._hurries = True
        while not self.advance():
            time.sleep(PAUSE)

    def drop(self, error: Exception) -> None:
        """End without the receiver, in a communicator that was freed or has failed."""
        with self.post._lock:
            if not self.ended:
                self._error, room = error, self._room
                self._end()
                if room is not None and not self._placing:
                    self.post._receipts.unread.pop(self._number, None)
                    self._give_back(room)
        progress.remove(self)

    def wait(self, what: str, matched: bool = False) -> None:
        """Wait until the array may be used, and if asked, until a receive has matched.

        Args:
            what: the call, for errors.
            matched: whether to wait for the match, indefinitely, as MPI does.

        Raises:
            ArgumentError: another GPU is current in this thread; it may be waited for
                again.
        """
        if not self.ended:
            self._enter()
        begin = time.monotonic()

        def look() -> bool:
            return self.advance() and (not matched or self.matched())

        def check() -> None:
            try:
                self.post.check()
            except Exception as error:
                self.drop(error)
                raise
            seconds = 0 if matched else self.post.timeout
            if seconds and time.monotonic() - begin > seconds:
                raise self._late(what)

        try:
            waited(look, check)
        except BaseException:
            self.hurry()
            raise
        finally:
            if self.ended:
                progress.remove(self)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error by which it was not sent, if there is one."""
        if self._error is not None:
            raise self._error

    def _late(self, what: str) -> CollectiveTimeout:
        flow, rank = self.post.flow, self.post._rank
        return CollectiveTimeout(
            f"{what}: rank {rank} waited for rank {self._dest} to receive its message "
            f"of {self._nbytes} bytes with tag {self._tag}; it has "
            f"{flow.unreceived[self._dest]} bytes of earlier ones to receive, and "
            f"NUMBA_SYMM_MESSAGE_LIMIT is {flow.limit} (timeout: "
            f"{self.post.timeout:g} s); receive them first, or raise that limit. The "
            "message is sent nevertheless",
            ranks=(rank, self._dest),
            operation=what,
        )


def _copy_of(found: buffers.Items, stream: int) -> buffers.Items:
    """Return a copy of a message's elements, without gaps."""
    made = own_arrays.empty((found.nbytes,), np.dtype(np.uint8), "Send")
    copy = buffers.message(made)
    if found.layout.runs is None:
        streams.copy(copy.address, found.address, found.nbytes, stream)
    else:
        packing.pack(found, made)(stream)
    return copy


class SendingLater(Own):
    """The request of such a message.

    Args:
        message: the message.
        matched: whether it is done only when a receive has matched it.
    """

    def __init__(self, message: Postponed, matched: bool):
        super().__init__()
        self._message, self._matched = message, matched
        progress.in_background(message.post._enter)

    def _finish(self, status: MPI.Status | None) -> None:
        try:
            self._message.wait("Wait", self._matched)
        finally:
            self._active = not self._message.ended
        describe(status)

    def _withdraw(self) -> None:
        self._message.hurry()

    def _poll(self, status: MPI.Status | None) -> bool:
        message = self._message
        if not message.advance() or (self._matched and not message.matched()):
            message.post.check()
            return False
        self._active = False
        message.raise_error()
        describe(status)
        return True


def later(
    post: Any, found: buffers.Items, dest: int, tag: int, copied: bool = False
) -> Postponed | None:
    """Return a message above the limit, which was announced; None if it is not."""
    if post.admits(found, dest, tag):
        return None
    return Postponed(post, found, dest, tag, copied)
