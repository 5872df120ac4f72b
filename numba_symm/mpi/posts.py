"""Messages of device arrays: their envelopes are matched, and copies move their data.

A send copies its data to memory of its process (``rooms.py``), and sends an envelope:
through memory that the ranks of an island share (``words.py``). Here the receiver
matches envelopes and receives by MPI's rules of source, tag and order. The receive then
copies the data, on a stream of its own, so it may run beside the program's kernels.
Words tell when each copy has ended.

Messages to ranks of other islands pass through host memory and MPI, whose matched probe
finds them here. They have a communicator of their own, so host messages do not meet
them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import local
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import environment
from numba_symm.collectives.invocation import Cache
from numba_symm.environment import SIMULATED, message_limit
from numba_symm.errors import SymmError
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.compiled import WORD
from numba_symm.launch import ranks, waiting
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait, begin
from numba_symm.mpi import progress, rooms
from numba_symm.mpi.errors import FREED, MPIError, refusal, unsupported
from numba_symm.mpi.progress import Channel, after_messages, apart
from numba_symm.mpi.rooms import (
    CANCELLED,
    FOUND,
    LINE,
    MATCHED,
    NO_SLOT,
    POSTED,
    READ,
    READY,
    REFUSED,
    THERE,
    CopyStream,
    Rooms,
    compiled,
)
from numba_symm.mpi.waited import waited
from numba_symm.mpi.words import Envelope, Words, failure_of

LOOKS = 20_000
"""Looks at memory before a waiting rank looks for failures, in some 30 microseconds."""

_ANY_SOURCE, _ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG

_posts: "set[Post]" = set()  # of communicators that were not freed

_next = [0]  # a context that no communicator of this process has had


class Post:
    """The messages of one communicator on this rank.

    Args:
        host: the communicator of mpi4py, which is duplicated. Collective.
        words: of this rank's island.
        islands: by rank, the number of its island.
        places: by rank, its place in its island.
        stream: the stream of arrays that name none.
        check: raises if the communicator has failed.
        failed: returns whether it has, without making the failure known.
        enter: makes the rank's GPU current in this thread, for a named call.
        timeout: seconds that a send waits for its receiver, as of a communicator.

    Attributes:
        context: the communicator's number, which no other one of this process has.
        tags: the number of tags.
        ranks: by place in this island, the rank there.
        to: by rank of this island, this rank's ring there.
        threads: has ``ready`` in threads where the GPU is current.
        known: messages and the places for them that the program has named before.
        copies: the stream of receives.
        limit: the bytes of messages to a rank that it has not read, at most; above it,
            a send waits until a receive matches it. 0: there is no limit.
        unread: by rank, the bytes that it has not read.
        arriving: receives with a message, whose copy has not ended.
        posted: receives without a message, in their order.
        unexpected: messages without a receive, in their order.
        coming: the next message that MPI has brought, while it is matched.
        brought: by number, messages that MPI has brought, room for their data, and the
            requests that receive it once a receive has matched.
    """

    brought: dict[int, tuple[MPI.Message, Any, list[MPI.Request]]]

    def __init__(
        self,
        host: Any,
        words: Words,
        islands: list[int],
        places: list[int],
        stream: Any,
        check: Callable[[], None],
        failed: Callable[[], bool],
        enter: Callable[[str], None],
        timeout: float | None = None,
    ):
        self._look, self._check = partial(after_messages, failed, check), check
        data, self._own = apart(host, 2, self._look())
        # Not every communicator has this attribute in Open MPI.
        most: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.tags: int = most + 1
        self.words, self._lock, self.limit = words, words.lock, message_limit()
        self.unread = (WORD * host.size)()
        self.mpi = Channel(data, self.unread)
        self.rank, self.context, self._freed = host.rank, -1, False
        self.islands, self.places = islands, places
        same = [n for n in range(host.size) if islands[n] == islands[host.rank]]
        self.ranks = {places[rank]: rank for rank in same}
        self.to = {rank: words.to[place] for place, rank in self.ranks.items()}
        self.stream, self._enter = streams.handle_or_default(stream), enter
        self.timeout, self.threads = environment.chosen_timeout(timeout), local()
        words.counted.append(self.unread)
        self._send, self.expect = compiled("send"), compiled("expect")
        self.receive = compiled("receive")
        self.known = Cache(1024)
        self._interrupted = False  # whether some messages of set-up are left in MPI
        self._exchange = StoreExchange(ranks.whole(self._own, owned=False), "Comm")
        words.users += 1
        self.coming: list[MPI.Message | None] = []
        self._status = MPI.Status()
        self.brought = {}
        self.copies = CopyStream()
        self.arriving: dict[Any, None] = {}
        self.posted: dict[Any, None] = {}
        self.unexpected: list[Envelope] = []
        _posts.add(self)

    @contextmanager
    def set_up(self, what: str) -> Iterator[StoreExchange]:
        """Yield an exchange of values between all ranks, for one call of all of them.

        It raises if a rank has left. If this rank is interrupted, the others raise.
        """
        self._exchange.call = what
        try:
            with waiting.watching(self._look()):
                yield self._exchange
        except BaseException as error:
            self._interrupted = True
            # All ranks raise other errors, because they compare what each has caught.
            if not isinstance(error, Exception):
                self._exchange.leave(error)
            raise

    def open(self, value: bool) -> list[bool]:
        """Agree on the context, and begin to match messages. Collective.

        It returns the values of all ranks.
        """
        with self.set_up("Comm") as exchange:
            found = exchange.all_gather((_next[0], value), "contexts")
        self.context = max(number for number, _ in found)
        _next[0] = max(_next[0], self.context + 1)
        self.words.open(self.context, self)
        if len(self.ranks) < len(self.islands):
            progress.matching[self.fetch] = None
        return [each for _, each in found]

    def free(self) -> None:
        """Free the duplicates. Collective.

        First take what the peers sent. A slot or MPI's number could belong to another
        message when an envelope arrives later. A send without a receive ends, too.

        Raises:
            CollectiveTimeout: a rank did not come within the set-up timeout.
        """
        wait = Wait("Free", self.rank, environment.chosen_setup_timeout())

        def check(step: str) -> None:
            self._check()
            if wait.look(()):
                error = wait.error(())
                error.add_note(f"It waited for {step}.")
                raise error

        def copied() -> bool:
            self.reap()
            return not self.arriving

        waited(copied, partial(check, "this rank's receives to end"))
        self._settle()
        sent = np.array(self.mpi.sent)
        wanted = np.empty_like(sent)
        request = self._own.Ialltoall(sent, wanted)
        self.mpi.keep([request], (sent, wanted))
        # The peers send nothing after this.
        waited(request.Test, partial(check, "all ranks to call it"))
        with self.words.lock:
            self.posted.clear()  # from now on, all messages are refused

        def taken() -> bool:
            progress.advance()
            with self.words.lock:
                self.fetch()
                while self.unexpected:
                    found = self.unexpected.pop()
                    self.answer(found)
                    self.refuse(found)
            self.reap()
            ended = self.mpi.has_ended and not self.arriving
            return ended and self.mpi.taken >= wanted.sum()

        waited(taken, partial(check, "messages that MPI has to bring or to send"))
        progress.matching.pop(self.fetch, None)
        last = partial(check, "all ranks to refuse what is left")
        waited(self._own.Ibarrier().Test, last)
        self.take_back()
        self.words.counted.remove(self.unread)
        _posts.discard(self)
        self._freed = True
        self.words.forget(self.context)
        self.copies.close()
        self.words.users -= 1
        if not self.words.users:
            self.words.close()
        self.mpi.comm.Free()
        # A new communicator with the same number would get what is left of a step.
        if not self._interrupted:
            self._own.Free()
        self.words.rooms.shrink()

    def _settle(self) -> None:
        """Wait for this rank's copies."""
        self.copies.settle()
        for slot, number in self.words.lent(self.unread):
            waited(partial(self.words.holds, slot, READY, number), self._check)
        for each in list(self.arriving):  # on streams of the program
            waited(each.rests, self._check)

    def give_up(self) -> None:
        """End without the peers, after a failure. MPI keeps the duplicates."""
        self.copies.close()
        self._freed = True  # and kept, because MPI may still write a receive's room
        self.words.forget(self.context)
        progress.matching.pop(self.fetch, None)

    def check(self) -> None:
        """Raise if the communicator has failed, also after it was freed."""
        if self._freed:
            raise MPIError(MPI.ERR_COMM, FREED)
        self._check()

    def check_open(self, what: str) -> None:
        """Begin a call: refuse it after Free, and make the GPU current."""
        if self._freed:
            raise MPIError(MPI.ERR_COMM, f"{what}: {FREED}")
        if not hasattr(self.threads, "ready"):
            self._enter(what)
            self.threads.ready = True

    def stream_of(self, array: Any) -> int:
        """Return the stream for copies of an array."""
        named = None if array is None else arrays.stream_of(array)
        return self.stream if named is None else named

    def refuse_capture(self, stream: int, what: str) -> None:
        """Raise if a stream is being captured."""
        if not SIMULATED and streams.is_capturing(stream):
            raise unsupported(
                f"{what}: expected a stream that is not being captured, because the "
                "ranks' hosts take part in this call; make it before or after the "
                "capture, or use comm.communicator.send and recv"
            )

    def raise_for(self, status: int, stream: int, what: str) -> None:
        """Raise what a status of the compiled functions tells."""
        if status != REFUSED:
            raise failure_of(-1 - status)
        self.refuse_capture(stream, what)

    def check_receive(self, source: int, tag: int, what: str = "Recv") -> None:
        """Begin a receive or a probe, or refuse its source or its tag."""
        source = 0 if source == _ANY_SOURCE else source
        self.check_message(what, source, 0 if tag == _ANY_TAG else tag)

    def check_message(self, what: str, rank: int, tag: int) -> None:
        """Begin a call, or refuse a rank or a tag that no message can have."""
        if self._freed or not hasattr(self.threads, "ready"):
            self.check_open(what)
        if not 0 <= rank < len(self.islands):
            raise refusal(
                MPI.ERR_RANK,
                f"{what}: expected a rank from 0 to {len(self.islands) - 1} or "
                f"MPI.PROC_NULL, got {rank}; pass one of these",
            )
        if not 0 <= tag < self.tags:
            raise refusal(
                MPI.ERR_TAG,
                f"{what}: expected a tag from 0 to {self.tags - 1}, got {tag}; pass "
                "one of these",
            )

    def until(self, slot: int, word: int, number: int) -> None:
        """Wait for a word of a slot."""
        at = self.words.at + 8 * (LINE * slot + word)
        look = partial(self.words.look, self.words.port_at, at, number, LOOKS)
        waited(look, self.check, THERE.__eq__)

    def reap(self) -> None:
        """Go on with messages that arrive, and reuse the memory of those read."""
        with self._lock:
            if self._freed:
                return
            for each in list(self.arriving):
                if each.advance():  # also if an interrupt came before it was dropped
                    self.arriving.pop(each, None)
            self.take_back()
            self.words.rooms.shrink()
            rooms.unmap_unused()

    def take_back(self) -> None:
        """Reuse the memory of messages that were read."""
        with self._lock:
            self.mpi.reap()
            self.words.reclaim(self.words.port_at)

    def admits(self, dest: int, nbytes: int) -> bool:
        """Look for messages that were read; return whether one is below the limit now.

        One alone is never above it.
        """
        self.take_back()
        before = self.unread[dest]
        return not (before and nbytes) or before + nbytes <= self.limit

    def room_for(self, size: int) -> bool:
        """Have a room; look for messages that were read before it takes more memory.

        It returns False if there are too many rooms.
        """
        with self._lock:
            found: Rooms = self.words.rooms
            self.take_back()
            found.shrink()  # a rank that only sends makes no reap
            return found.provide(size)

    def match(self, found: Envelope) -> Any:
        """Return the receive that gets a message, if one does.

        The caller removes it from ``posted``.
        """
        for each in self.posted:
            if each._order[0] == POSTED and found.suits(*each.wanted):
                each.envelope = found
            if each.envelope == found:  # also if an interrupt has come after that
                self.arriving[each] = None  # also if its request is dropped
                self.answer(found)
                return each
        if not (self.unexpected and self.unexpected[-1] == found):
            self.unexpected.append(found)
        return None

    def fetch(self) -> None:
        """Take what MPI has brought, and match the messages of other islands."""
        with self.words.lock:
            while not self._freed:
                coming, status = self.coming, self._status
                number, again = self.mpi.taken, bool(coming)
                if not again:
                    probe = self.mpi.comm.Improbe
                    begin(coming, probe, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                if coming[0] is None:
                    coming.clear()
                    return
                source, tag = status.source, status.tag
                nbytes = status.Get_elements(MPI.BYTE)
                found = Envelope(source, tag, nbytes, NO_SLOT, number, 0)
                data: Any = np.empty(nbytes, np.uint8)
                if coming[0]:  # else it was received before an interrupt
                    self.brought.setdefault(number, (coming[0], data, []))
                known = again and found in self.unexpected
                matched = None if known else self.match(found)
                # At once, so that an interrupt counts no message twice, or never.
                self.coming, self.mpi.taken = [], number + 1
                if matched is not None:
                    self.posted.pop(matched, None)

    def answer(self, found: Envelope) -> None:
        """Tell a sender that asks for it that a receive has matched its message.

        MPI tells it, too, when it may receive the message.
        """
        if found.asks:
            self.words.store(found.slot, MATCHED, found.number)
        elif found.slot == NO_SLOT and found.number in self.brought:
            self.data_of(found)

    def data_of(self, found: Envelope) -> tuple[Any, list[MPI.Request]]:
        """Return the data that MPI receives, and its requests."""
        message, data, requests = self.brought[found.number]
        if not requests:  # else an interrupt has come after that
            self.mpi.receive(message, data, requests)
        return data, requests

    def cancel(self, receiving: Any) -> None:
        """Cancel a receive, unless a message has matched it."""
        progress.advance()
        with self.words.lock:
            if receiving._order[0] == POSTED:
                receiving._order[0] = CANCELLED
                self.posted.pop(receiving, None)

    def withdraw(self, receiving: Any) -> None:
        """Take a receive back; a message that has matched it stays for another one."""
        self.cancel(receiving)
        with self.words.lock:  # a source's envelopes are in order
            self.posted.pop(receiving, None)  # which an interrupt has left there
            found = receiving.envelope
            if found is None:
                return
            if receiving._order[0] != FOUND:
                return  # the copy goes on
            self.arriving.pop(receiving, None)
            later = (
                index
                for index, each in enumerate(self.unexpected)
                if each.source == found.source and each.number > found.number
            )
            place = next(later, len(self.unexpected))
            matched = self.match(found)  # by one that another thread has posted since
            if matched is None:
                self.unexpected.insert(place, self.unexpected.pop())
            else:
                self.posted.pop(matched, None)
            receiving._order[0] = CANCELLED

    def probe(
        self, what: str, source: int, tag: int, takes: bool = False
    ) -> Envelope | None:
        """Return the envelope that a receive would match now, or None.

        Args:
            what: the call.
            source: the source.
            tag: the tag.
            takes: whether no other receive gets it.
        """
        self.check_receive(source, tag, what)
        self.refuse_capture(self.stream, what)  # before events are queried
        progress.advance()
        self.reap()
        with self.words.lock:
            return self.take(source, tag, takes)

    def take(self, source: int, tag: int, takes: bool = True) -> Envelope | None:
        """Return the first message for such a receive that no receive has matched."""
        for found in self.unexpected:
            if found.suits(source, tag):
                if takes:
                    self.unexpected.remove(found)
                    self.answer(found)
                return found
        return None

    def refuse(self, found: Envelope) -> None:
        """Let the sender reuse the memory of a message, and MPI drop its data."""
        if found.slot != NO_SLOT:
            # After an interrupt, another message may have the slot.
            if not self.words.holds(found.slot, READ, found.number):
                self.words.store(found.slot, READ, found.number)
            return
        with self._lock:
            if found.number in self.brought:
                self.data_of(found)
                del self.brought[found.number]


def settle_all() -> None:
    """Wait for all copies, for the end of the program."""
    for post in _posts:
        with suppress(SymmError):  # of a communicator that has failed
            post._settle()
        post.words.let_go()
