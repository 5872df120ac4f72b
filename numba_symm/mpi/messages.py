"""Messages of device arrays: their envelopes are matched, and copies move their data.

A send copies its data to memory of its process (``rooms.py``), and sends an envelope:
through memory that the ranks of an island share (``words.py``), or to other islands
through MPI. Here the receiver matches envelopes and receives by MPI's rules of source,
tag and order. The receive then copies the data, on a stream of its own, so it may run
beside the program's kernels. Words tell when each copy has ended. Above a limit of
bytes that were not received, a send copies later (``postponed.py``). The data of
messages to ranks of other islands passes through host memory and MPI. Envelopes and
data have communicators of their own, so host messages do not meet them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import environment, streams
from numba_symm.collectives.checks import check_writable
from numba_symm.errors import SymmError
from numba_symm.launch import tagged, waiting
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait, begin
from numba_symm.mpi import buffers, progress, rooms
from numba_symm.mpi.buffers import message
from numba_symm.mpi.calls import waited
from numba_symm.mpi.channels import Channel, Data, after_messages, apart, seen
from numba_symm.mpi.errors import FREED, MPIError
from numba_symm.mpi.parts import CopyStream
from numba_symm.mpi.rings import MATCHED, READ, READY
from numba_symm.mpi.sends import Sends, alone
from numba_symm.mpi.words import FIELDS, NO_SLOT, Envelope, Words, drop

_posts: "set[Post]" = set()  # of communicators that were not freed

_next = [0]  # a context that no communicator of this process has had


class Post(Sends):
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
        # Not every communicator has this attribute in Open MPI.
        most: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.tags: int = most + 1
        self._look = partial(after_messages, failed, check)
        own = apart(host, 3, self._look())
        self._envelopes, self._data = Channel(own[0]), Data(own[2], self.tags)
        self._own = own[1]
        self._interrupted = False  # whether some of them may be left in MPI
        self._exchange = StoreExchange(tagged.whole(own[1], owned=False), "Comm")
        self._freed = False
        self.words, self.context = words, -1
        words.users += 1
        self.islands, self.places = islands, places
        self.rank: int = host.rank
        same = [n for n in range(host.size) if islands[n] == islands[host.rank]]
        self.ranks = {places[rank]: rank for rank in same}
        self.to = {rank: words.to[place] for place, rank in self.ranks.items()}
        self._has_others = len(same) < host.size
        self._coming: list[MPI.Request] = []  # the receive of the next envelope by MPI
        self._text = bytearray(FIELDS.size)
        self._lock = words.lock
        self.stream = streams.handle_or_default(stream)
        self._check, self._enter = check, enter
        self.threads = threading.local()
        self.copies, self.outgoing = CopyStream(), CopyStream()
        self.timeout = environment.chosen_timeout(timeout)
        self.arriving: list[Any] = []
        self.posted: list[Any] = []
        """Receives without a message, in their order."""
        self._unexpected: list[Envelope] = []
        super().__init__(host.size)
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
        self._refuse_later()

        def taken() -> bool:
            progress.advance()
            self._refuse_unexpected()
            self._data.drop()
            self.reap()
            numbers = zip(channels, wanted.sum(0), strict=True)
            return not any(each.sends or each.taken < some for each, some in numbers)

        waited(taken, check)
        if self._has_others:
            progress.forget(self._fetch)
        for coming in self._coming:
            coming.Cancel()
            waited(coming.Test, nothing)
        waited(self._own.Ibarrier().Test, check)  # all have refused what is left
        for each in self._unread:
            self.release(each)
        self._unread.clear()
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

    def _refuse_later(self) -> None:
        """Refuse all messages from now on."""
        with self.words.lock:
            self.posted.clear()

    def _refuse_unexpected(self) -> None:
        with self.words.lock:
            while self._unexpected:
                found = self._unexpected.pop()
                self._answer(found)
                self.refuse(found)

    def _settle(self) -> None:
        """Wait for this rank's copies."""
        self.outgoing.settle()
        self.copies.settle()
        waited(self._are_copied, self._check)

    def _are_copied(self) -> bool:
        return all(
            [
                each.slot == NO_SLOT or self.words.holds(each.slot, READY, each.number)
                for each in list(self._unread)
            ]
        )

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

    @alone
    def reap(self) -> None:
        """Go on with messages that arrive, and reuse the memory of those read."""
        if self._freed:
            return
        for each in list(self.arriving):
            if each.advance():  # also if an interrupt has come before it was dropped
                drop(self.arriving, each)
        for channel in (self._envelopes, self._data):
            channel.reap()
        self.take_back()
        self.words.rooms.shrink()
        rooms.unmap_unused()

    def room(self, spec: Any) -> buffers.Items:
        """Return the items that a receive writes, or refuse it before it is posted."""
        self.check_open("Recv")
        found = message(spec)
        check_writable(found.view, "Recv")
        return found

    def match(self, found: Envelope) -> Any:
        """Return the receive that gets a message, if one does.

        The caller removes it from ``posted``.
        """
        sources, tags = (found.source, MPI.ANY_SOURCE), (found.tag, MPI.ANY_TAG)
        for each in self.posted:
            if each.envelope is None:
                source, tag = each.wanted
                if source in sources and tag in tags:
                    each.envelope = found
            if each.envelope == found:  # also if an interrupt has come after that
                if found.asks:
                    self._answer(found)
                return each
        if not (self._unexpected and self._unexpected[-1] == found):
            self._unexpected.append(found)
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
                    drop(self.posted, matched)

    def _answer(self, found: Envelope) -> None:
        """Tell a sender that asks for it that a receive has matched its message."""
        if found.asks and found.slot != NO_SLOT:
            self.words.store(found.slot, MATCHED, found.number)
        elif found.asks:
            tag = self.answer_of(found.number)
            self._envelopes.send([b"", MPI.BYTE], found.source, tag)

    def receive(self, receiving: Any) -> None:
        """Give a receive its message, or let it wait for one."""
        source, tag = receiving.wanted
        self.check_receive(source, tag)  # also of a request that was prepared before
        with self.words.lock:
            found = self._first(source, tag) if self._unexpected else None
            if found is None:
                self.posted.append(receiving)
                return
            receiving.envelope = found
            self._unexpected.remove(found)
            self._answer(found)

    def cancel(self, receiving: Any) -> None:
        """Cancel a receive, unless a message has matched it."""
        progress.advance()
        with self.words.lock:
            if receiving.envelope is None:
                receiving.cancelled = True
                drop(self.posted, receiving)

    def withdraw(self, receiving: Any) -> None:
        """Take a receive back; a message that has matched it stays for another one."""
        self.cancel(receiving)
        found = receiving.envelope
        if found is None:
            return
        with self.words.lock:  # a source's envelopes are in order
            later = (
                index
                for index, each in enumerate(self._unexpected)
                if each.source == found.source and each.number > found.number
            )
            place = next(later, len(self._unexpected))
            self._unexpected.insert(place, found._replace(asks=0))

    def probe(self, source: int, tag: int) -> Envelope | None:
        """Return the envelope that a receive would match now, which stays there."""
        self._look_for("Probe", source, tag)
        return self._first(source, tag)

    def receive_if_there(self, source: int, tag: int) -> Envelope | None:
        """Return the envelope of a message, which no other receive gets."""
        self._look_for("Mprobe", source, tag)
        with self.words.lock:
            found = self._first(source, tag)
            if found is not None:
                self._unexpected.remove(found)
                self._answer(found)
            return found

    def _look_for(self, what: str, source: int, tag: int) -> None:
        self.check_receive(source, tag, what)
        self.stream_of(None, what)  # refuses a capture before events are queried
        progress.advance()
        self.reap()

    def _first(self, source: int, tag: int) -> Envelope | None:
        """Return the first message for such a receive that no receive has matched."""
        for found in self._unexpected:
            sources, tags = (found.source, MPI.ANY_SOURCE), (found.tag, MPI.ANY_TAG)
            if source in sources and tag in tags:
                return found
        return None

    def receive_parts(self, envelope: Envelope, data: Any, requests: list[Any]) -> None:
        """Start to receive the data of a message by MPI."""
        self._data.receive_parts(envelope, data, requests, seen)

    @alone
    def refuse(self, envelope: Envelope) -> None:
        """Let the sender reuse the memory of a message, and MPI drop its data."""
        if envelope.slot != NO_SLOT:
            self.words.store(envelope.slot, READ, envelope.number)
        elif envelope.nbytes:
            data = np.empty(envelope.nbytes, np.uint8)
            self._data.receive_parts(envelope, data, [])


def nothing() -> None:
    """Check nothing, where MPI ends the wait in any case."""


def settle_all() -> None:
    """Wait for all copies, for the end of the program."""
    progress.hurry_all()
    for post in _posts:
        with suppress(SymmError):  # of a communicator that has failed
            post._settle()
        post.words.let_go()
