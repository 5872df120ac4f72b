"""Postponed messages: those above the limit of bytes that a rank has not received.

The sender sends their envelopes immediately, so the order of messages holds. It copies
the data to memory of its process when a receive has matched the envelope, or when
enough earlier messages were read. So it waits at most for the matching receive, as
MPI's standard send may do. The receiver then goes on as with other messages.

If the sender fails, its word tells that the message is nowhere, or data by MPI has
empty parts. Then the receiver raises.
"""

import time
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from numba_symm.errors import BackendError, CollectiveTimeout, DriverError
from numba_symm.mpi import packing, progress
from numba_symm.mpi.calls import PAUSE, describe, waited
from numba_symm.mpi.parts import Outgoing, Unread
from numba_symm.mpi.requests import Own
from numba_symm.mpi.rings import READY
from numba_symm.mpi.sends import Sends, on_host
from numba_symm.mpi.words import NO_SLOT


class Postponed:
    """A message that is announced, and whose data is sent later.

    Attributes:
        post: of its communicator.
        ended: whether the array may be used.

    Args:
        post: of its communicator.
        outgoing: the message.
        array: its array, which must not change before :meth:`advance` is True.
        tag: its tag.
        copied: whether the caller may change the array before that.
    """

    def __init__(
        self, post: Sends, outgoing: Outgoing, array: Any, tag: int, copied: bool
    ):
        stream = post.stream_of(array, "Send")
        if copied or outgoing.items.layout.runs is not None:
            # A kernel copies items with gaps, and no other thread launches it.
            made = packing.copy_of(outgoing.items._replace(array=array), stream)
            outgoing, array = Outgoing.of(post, made, outgoing.dest), made.array
        self.post, self._outgoing, self._tag = post, outgoing, tag
        self._array: Any = array
        self._dest, self._nbytes = outgoing.dest, outgoing.nbytes
        self._asked: list[MPI.Request] | None = None  # once it was announced
        self._tried = self._started = self._hurries = self.ended = False
        self._error: Exception | None = None
        with post._lock:
            self._after = post.outgoing.event(stream)
        progress.add(self)  # first, because an interrupt may follow the start
        number, sent = -1, post._envelopes.sent[self._dest]
        asked: list[MPI.Request] = []
        try:
            with post._lock:  # envelopes are in the order of their numbers
                slot = NO_SLOT if outgoing.apart else post.words.take()
                number, rest = post.words.next_number(), (slot, None, [array])
                self._message = Unread(number, self._dest, self._nbytes, *rest)
                post.announce(outgoing, tag, slot, number, asked)
                self._asked = asked
        except BaseException:
            if post.is_announced(outgoing, number, sent):
                self._asked = asked
            self.hurry()
            raise

    def matched(self) -> bool:
        """Return whether a receive has matched it."""
        assert self._asked is not None
        number, slot = self._message.number, self._message.slot
        return self.post.is_matched(slot, number, self._asked)

    def advance(self) -> bool:
        """Do what can be done now; return whether the array may be used. Never wait."""
        lock = self.post._lock
        # The thread that has the lock may wait for one that this thread has.
        if not lock.acquire(blocking=False):
            return self.ended
        try:
            if not self.ended and self._asked is not None and self._may_advance():
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
            self.post.check_open("Send")

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
        if not self._started:
            if not (self._hurries or self.matched() or self._is_admitted()):
                return
            self._start()
        if not self._started:
            return
        number, slot = self._message.number, self._message.slot
        if slot == NO_SLOT or post.words.holds(slot, READY, number):
            self._end()

    def _is_admitted(self) -> bool:
        self.post.take_back()
        return self.post.admits(self._dest, self._nbytes)

    def _start(self) -> None:
        """Send the data by MPI, or enqueue its copy and send its place."""
        post, message = self.post, self._message
        stream = post.outgoing.stream
        # The copy to the host would wait for that, and an interrupt may have come here.
        if not self._after.query() or (self._tried and not post.idle(stream)):
            return
        self._tried = True
        if message.slot == NO_SLOT:
            found = self._outgoing.items._replace(array=self._array)
            post.send_data(on_host(found, stream), self._dest, message.number)
            self._started = True
            return
        if message.room is None:
            room = post.room_for(self._outgoing.size)
            if room is None:
                raise BackendError("Send: expected memory for a message, got none")
            message = self._message = message._replace(room=room)
            post.lend(message)
        assert message.room is not None
        slot, number = message.slot, message.number
        if not post.words.holds(slot, READY, number):
            post.fill_room(message.room, self._outgoing, stream, slot, number)
        self._started = True

    def _fail(self, error: Exception) -> None:
        """Make its request raise, and the receive that matches it."""
        self._error = error
        post, message = self.post, self._message
        try:
            if post._freed or self._started:
                pass  # the receiver gets the data, or nothing any more
            elif message.slot == NO_SLOT:
                post._data.refuse_parts(self._nbytes, self._dest, message.number)
            else:
                self._give_back()
        except Exception as another:
            error.add_note(
                f"This could not be reported to rank {self._dest}: {another!r}."
            )
        finally:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._array = None  # it may be dropped
        if self._asked is not None:  # its request may live longer than its room
            self._message.used.clear()
            self._message = self._message._replace(room=None)

    def _give_back(self) -> None:
        """Keep only the slot, for the answer of the receiver, which refuses it."""
        post, message = self.post, self._message
        with suppress(DriverError):  # whose room is not used again
            post.outgoing.settle()  # a copy may still write the room
            post.forget(message)
            post.words.end(message.slot, message.number)
            post.lend(message._replace(room=None))

    def hurry(self) -> None:
        """Copy the array now: the call raises, so its caller may change the array."""
        if self._asked is None:  # it was not announced
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
                self._error = error
                self._end()
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
        post, rank = self.post, self.post.rank
        return CollectiveTimeout(
            f"{what}: rank {rank} waited for rank {self._dest} to receive its message "
            f"of {self._nbytes} bytes with tag {self._tag}; it has "
            f"{post.unread[self._dest]} bytes of earlier ones to receive, and "
            f"NUMBA_SYMM_MESSAGE_LIMIT is {post.limit} (timeout: "
            f"{post.timeout:g} s); receive them first, or raise that limit. The "
            "message is sent nevertheless",
            ranks=(rank, self._dest),
            operation=what,
        )


class SendingLater(Own):
    """The request of such a message.

    Args:
        message: the message.
        matched: whether it is done only when a receive has matched it.

    Attributes:
        call: the call that waits for it, for errors.
    """

    def __init__(self, message: Postponed, matched: bool):
        super().__init__()
        self._message, self._matched = message, matched
        self.call = "Wait"
        progress.in_background(message.post._enter)

    def _finish(self, status: MPI.Status | None) -> None:
        try:
            self._message.wait(self.call, self._matched)
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


def start(
    post: Sends,
    outgoing: Outgoing,
    array: Any,
    tag: int,
    matched: bool = False,
    copied: bool = False,
) -> Own:
    """Send a message now, or above the limit later; return its request.

    Args:
        post: of its communicator.
        outgoing: the message.
        array: the array of its items.
        tag: its tag.
        matched: whether the request is done only when a receive has matched it.
        copied: whether the caller may change the array before the request is done.
    """
    post.check_message("Send", outgoing.dest, tag)
    dest = outgoing.dest
    if not post.unread[dest] or post.admits(dest, outgoing.nbytes):
        return post.send(outgoing, array, tag, matched)
    return SendingLater(Postponed(post, outgoing, array, tag, copied), matched)


def start_at_once(post: Sends, outgoing: Outgoing, array: Any, tag: int) -> Own:
    """Send a message now, regardless of the limit; return its request."""
    post.check_message("Send", outgoing.dest, tag)
    return post.send(outgoing, array, tag)
