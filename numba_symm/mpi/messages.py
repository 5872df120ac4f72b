"""Messages of device arrays: their envelopes are matched, and copies move their data.

A send copies its data to memory of its process (``rooms.py``), and sends an envelope:
through memory that the ranks of an island share (``words.py``), or to other islands
through MPI. Here the receiver matches envelopes and receives by MPI's rules of source,
tag and order. The receive then copies the data, on a stream of its own, so it may run
beside the program's kernels. Words tell when each copy has ended. Above a limit of
bytes that were not received, a send copies later (``mpi/p2p.py``). The data of
messages to ranks of other islands passes through host memory and MPI. Envelopes and
data have communicators of their own, so host messages do not meet them.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import local
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import environment
from numba_symm.collectives.invocation import Cache
from numba_symm.environment import SIMULATED
from numba_symm.errors import SymmError
from numba_symm.gpu import arrays, streams
from numba_symm.launch import ranks, waiting
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait, begin
from numba_symm.mpi import progress, rooms
from numba_symm.mpi.calls import BUSY, PAUSE, waited
from numba_symm.mpi.errors import FREED, MPIError, refusal, unsupported
from numba_symm.mpi.progress import Channel, Data, after_messages, apart
from numba_symm.mpi.rooms import (
    LINE,
    MATCHED,
    NO_SLOT,
    READ,
    READY,
    THERE,
    CopyStream,
    Unread,
    compiled,
)
from numba_symm.mpi.words import FIELDS, Envelope, Words

LOOKS = 20_000
"""Looks at memory before a waiting rank looks for failures, in some 30 microseconds."""

_ANY_SOURCE, _ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG

_posts: "set[Post]" = set()  # of communicators that were not freed

_next = [0]  # a context that no communicator of this process has had


class Post(Unread):
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
        to: by rank of this island, this rank's ring there, and the bell.
        threads: has ``ready`` in threads where the GPU is current.
        known: messages and the places for them that the program has named before.
        copies: the stream of receives.
        outgoing: the stream of messages that were postponed.
        arriving: receives whose copy has not ended.
        posted: receives without a message, in their order.
        unexpected: messages without a receive, in their order.
    """

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
        envelopes, self._own, data = apart(host, 3, self._look())
        # Not every communicator has this attribute in Open MPI.
        most: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.tags: int = most + 1
        self._envelopes = Channel(envelopes)
        super().__init__(words, Data(data, self.tags), host.size)
        self.rank, self.context, self._freed = host.rank, -1, False
        self.islands, self.places = islands, places
        same = [n for n in range(host.size) if islands[n] == islands[host.rank]]
        self.ranks = {places[rank]: rank for rank in same}
        self.to = {rank: words.to[place] for place, rank in self.ranks.items()}
        self.stream, self._enter = streams.handle_or_default(stream), enter
        self.timeout, self.threads = environment.chosen_timeout(timeout), local()
        words.counted.append(self.unread)
        self._send, self.expect = compiled("send"), compiled("expect")
        self.receive, self.arrive = compiled("receive"), compiled("arrive")
        self.known = Cache(1024)
        self._interrupted = False  # whether some messages of set-up are left in MPI
        self._exchange = StoreExchange(ranks.whole(self._own, owned=False), "Comm")
        words.users += 1
        self._has_others = len(self.ranks) < host.size
        self._coming: list[MPI.Request] = []  # the receive of the next envelope by MPI
        self._text = bytearray(FIELDS.size)
        self.copies, self.outgoing = CopyStream(), CopyStream()
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
        if self._has_others:
            progress.match_by(self._fetch, self.words.lock)
        return [each for _, each in found]

    def free(self) -> None:
        """Free the duplicates. Collective.

        First take what the peers sent. A slot or MPI's number could belong to another
        message when an envelope arrives later. A send without a receive ends, too.

        Raises:
            CollectiveTimeout: a rank did not come within the set-up timeout.
        """
        wait = Wait("Free", self.rank, environment.chosen_setup_timeout())

        def check() -> None:
            self._check()
            if wait.look(()):
                raise wait.error(())

        def copied() -> bool:
            self.reap()
            return not self.arriving

        waited(copied, check)
        progress.hurry_all(self)
        self._settle()
        channels = self._envelopes, self._data
        sent = np.array([each.sent for each in channels]).T.copy()  # a row each rank
        wanted = np.empty_like(sent)
        request = self._own.Ialltoall(sent, wanted)
        self._data.keep([request], (sent, wanted))
        waited(request.Test, check)  # the peers send nothing after this
        with self.words.lock:
            self.posted.clear()  # from now on, all messages are refused

        def taken() -> bool:
            progress.advance()
            with self.words.lock:
                while self.unexpected:
                    found = self.unexpected.pop()
                    self.answer(found)
                    self.refuse(found)
            self._data.drop()
            self.reap()
            numbers = zip(channels, wanted.sum(0), strict=True)
            return not any(each.sends or each.taken < some for each, some in numbers)

        waited(taken, check)
        if self._has_others:
            progress.forget(self._fetch)
        for coming in self._coming:
            coming.Cancel()
            coming.Wait()  # which ends in any case
        waited(self._own.Ibarrier().Test, check)  # all have refused what is left
        self.take_back()
        for each in list(self._unread):
            self.release(each)
        self.words.counted.remove(self.unread)
        _posts.discard(self)
        self._freed = True
        self.words.forget(self.context)
        self.outgoing.close()
        self.copies.close()
        self.words.users -= 1
        if not self.words.users:
            self.words.close()
        self._envelopes.comm.Free()
        self._data.comm.Free()
        # A new communicator with the same number would get what is left of a step.
        if not self._interrupted:
            self._own.Free()
        self.words.rooms.shrink()

    def _settle(self) -> None:
        """Wait for this rank's copies."""
        self.outgoing.settle()
        self.copies.settle()
        sent = [(each.slot, each.number) for each in self._unread]
        for slot, number in sent + self.words.lent(self.unread):
            if slot != NO_SLOT:
                waited(partial(self.words.holds, slot, READY, number), self._check)

    def give_up(self) -> None:
        """End without the peers, after a failure. MPI keeps the duplicates."""
        progress.drop_all(self, MPIError(MPI.ERR_COMM, FREED))
        self.outgoing.close()
        self.copies.close()
        self._freed = True  # and kept, because MPI may still write a receive's room
        self.words.forget(self.context)
        if self._has_others:
            progress.forget(self._fetch)

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
        kind = arrays.KINDS.get(type(array))
        if kind is not None:
            named = None if kind.stream is None else kind.stream(array)
        else:
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

    def answer_of(self, number: int) -> int:
        """Return the tag of the answer that a receive has matched a message."""
        return 1 + number % (self.tags - 1)

    def idle(self, stream: int) -> bool:
        """Return whether all work of a stream is done."""
        return SIMULATED or streams.is_done(stream)

    def check_receive(self, source: int, tag: int, what: str = "Recv") -> None:
        """Begin a receive or a probe, or refuse its source or its tag."""
        if (
            self._freed
            or not hasattr(self.threads, "ready")
            or not (0 <= source < len(self.islands) or source == _ANY_SOURCE)
            or not (0 <= tag < self.tags or tag == _ANY_TAG)
        ):
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
        words, looks = self.words, 0
        at, bell = words.at + 8 * (LINE * slot + word), words.bell
        while words.look(bell, at, number, LOOKS) != THERE:
            progress.advance()
            looks = self.pause(looks)

    def pause(self, looks: int) -> int:
        """Let others run between two looks; return how many there were."""
        os.sched_yield()  # to a rank that shares this processor
        self.check()
        if looks > BUSY:
            time.sleep(PAUSE)
        return looks + 1

    def reap(self) -> None:
        """Go on with messages that arrive, and reuse the memory of those read."""
        with self._lock:
            if self._freed:
                return
            for each in list(self.arriving):
                if each.advance():  # also if an interrupt came before it was dropped
                    self.arriving.pop(each, None)
            self._envelopes.reap()
            self.take_back()
            self.words.rooms.shrink()
            rooms.unmap_unused()

    def match(self, found: Envelope) -> Any:
        """Return the receive that gets a message, if one does.

        The caller removes it from ``posted``.
        """
        sources, tags = (found.source, MPI.ANY_SOURCE), (found.tag, MPI.ANY_TAG)
        for each in self.posted:
            if not each.is_decided:
                source, tag = each.wanted
                if source in sources and tag in tags:
                    each.envelope = found
            if each.envelope == found:  # also if an interrupt has come after that
                if found.asks:
                    self.answer(found)
                return each
        if not (self.unexpected and self.unexpected[-1] == found):
            self.unexpected.append(found)
        return None

    def _fetch(self) -> None:
        """Match the envelopes that MPI has brought."""
        with self.words.lock:
            while not self._freed:
                if not self._coming:
                    receive = self._envelopes.comm.Irecv
                    begin(self._coming, receive, self._text, MPI.ANY_SOURCE, 0)
                request = self._coming[0]
                if request and not request.Test():
                    return
                _, source, tag, nbytes, slot, number, asks = FIELDS.unpack(self._text)
                found = Envelope(source, tag, nbytes, slot, number, asks)
                matched = self.match(found)
                self._coming.clear()
                self._envelopes.taken += 1
                if matched is not None:
                    self.posted.pop(matched, None)
                    if not matched._active:
                        matched.receive_alone()

    def answer(self, found: Envelope) -> None:
        """Tell a sender that asks for it that a receive has matched its message."""
        if found.asks and found.slot != NO_SLOT:
            self.words.store(found.slot, MATCHED, found.number)
        elif found.asks:
            tag = self.answer_of(found.number)
            self._envelopes.send([b"", MPI.BYTE], found.source, tag)

    def cancel(self, receiving: Any) -> None:
        """Cancel a receive, unless a message has matched it."""
        progress.advance()
        with self.words.lock:
            if not receiving.is_decided:
                receiving.cancelled = True
                self.posted.pop(receiving, None)

    def withdraw(self, receiving: Any) -> None:
        """Take a receive back; a message that has matched it stays for another one."""
        self.cancel(receiving)
        with self.words.lock:  # a source's envelopes are in order
            self.posted.pop(receiving, None)  # which an interrupt has left there
            found = receiving.envelope
            if found is None:
                return
            if receiving.is_begun:
                receiving.receive_alone()
                return
            later = (
                index
                for index, each in enumerate(self.unexpected)
                if each.source == found.source and each.number > found.number
            )
            place = next(later, len(self.unexpected))
            if found.slot == NO_SLOT:  # its sender takes one answer
                found = found._replace(asks=0)
            # With a slot it asks again: until READY it has no place to copy from.
            self.unexpected.insert(place, found)
            receiving.cancelled = True

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
            found = self.first(source, tag)
            if found is not None and takes:
                self.unexpected.remove(found)
                self.answer(found)
            return found

    def first(self, source: int, tag: int) -> Envelope | None:
        """Return the first message for such a receive that no receive has matched."""
        for found in self.unexpected:
            sources, tags = (found.source, MPI.ANY_SOURCE), (found.tag, MPI.ANY_TAG)
            if source in sources and tag in tags:
                return found
        return None

    def refuse(self, envelope: Envelope) -> None:
        """Let the sender reuse the memory of a message, and MPI drop its data."""
        if envelope.slot != NO_SLOT:
            self.words.store(envelope.slot, READ, envelope.number)
        elif envelope.nbytes:
            with self._lock:
                data = np.empty(envelope.nbytes, np.uint8)
                self._data.receive_parts(envelope, data, [])


def settle_all() -> None:
    """Wait for all copies, for the end of the program."""
    progress.hurry_all()
    for post in _posts:
        with suppress(SymmError):  # of a communicator that has failed
            post._settle()
        post.words.let_go()
