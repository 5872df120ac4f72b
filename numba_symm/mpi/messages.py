"""Messages of device arrays: MPI matches their envelopes, and copies move their data.

A send copies its data to memory of its process (``rooms.py``), and waits for that copy.
Above a limit of bytes that were not received, it copies later (``postponed.py``). Then
it sends an envelope with the data's place through MPI, with the tag of the message. So
source, tag, order and wildcards are MPI's. The receive copies the data from there, on a
stream of its own, so it may run beside the program's kernels. When the copy is done, it
sends a receipt, after which the sender reuses the memory. A small message is part of
its envelope (``inline.py``), also to a rank of another island. The data of other
messages to such a rank is a message of MPI, through host memory. Envelopes, receipts
and data have communicators of their own, so host messages do not meet them.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import environment, streams
from numba_symm.collectives.checks import check_writable
from numba_symm.events import Event
from numba_symm.launch import tagged, waiting
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.mpi import buffers, inline, progress, rooms
from numba_symm.mpi.buffers import message
from numba_symm.mpi.calls import waited
from numba_symm.mpi.channels import MOST, Channel, Receipts, after_messages, apart
from numba_symm.mpi.copies import CopyStream
from numba_symm.mpi.crossings import Coming, Copying, Crossing, Data
from numba_symm.mpi.envelopes import (
    ROOM,
    Envelope,
    Posted,
    items_of,
    nothing,
    place_in,
)
from numba_symm.mpi.errors import FREED, MPIError
from numba_symm.mpi.flow import Flow
from numba_symm.mpi.rooms import Opened, Room, opened, opened_once
from numba_symm.mpi.sends import Sends, alone

_posts: "set[Post]" = set()  # of communicators that were not freed


class Post(Sends):
    """The messages of one communicator on this rank.

    Args:
        host: the communicator of mpi4py, which is duplicated. Collective.
        allocator: allocates the memory through which messages pass.
        islands: by rank, the number of its island.
        stream: the stream of arrays that name none.
        check: raises if the communicator has failed.
        failed: returns whether it has, without making the failure known.
        enter: makes the rank's GPU current in this thread, for a named call.
        timeout: seconds that a send waits for its receiver, as of a communicator.
    """

    def __init__(
        self,
        host: Any,
        allocator: SymmetricMemoryAllocator,
        islands: list[int],
        stream: Any,
        check: Callable[[], None],
        failed: Callable[[], bool],
        enter: Callable[[str], None],
        timeout: float | None = None,
    ):
        # Not every communicator has this attribute in Open MPI.
        most: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._tags: int = most + 1
        self._look = partial(after_messages, failed, check)
        own = apart(host, 3, self._look())
        self._envelopes, self._receipts = Channel(own[0]), Receipts(own[1])
        self._data = Data(own[2], self._tags)
        # Its messages have another tag than receipts.
        self._interrupted = False  # whether some of them may be left in MPI
        self._exchange = StoreExchange(tagged.whole(own[1], owned=False), "Comm")
        self._freed = False
        self.allocator = allocator
        self.islands = islands
        self._rank: int = host.rank
        self._lock = threading.RLock()
        self._stream = stream
        self._check, self._enter = check, enter
        self._threads = threading.local()  # has ``ready`` where the GPU is current
        self.copies, self.outgoing = CopyStream(), CopyStream()
        self.timeout = environment.chosen_timeout(timeout)
        self._copying: list[Copying] = []
        self._numbers = itertools.count()
        self.flow = Flow(host.size)
        self._by_mpi = {}
        self._probed: list[Envelope] = []
        self._open: set[Posted] = set()
        inline.prepare()
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

    def free(self) -> None:
        """Free the duplicates. Collective.

        First take what the peers sent. An envelope or a receipt that arrived later
        would be taken for one of a new communicator, to which MPI gives the same
        number. A send without a receive ends, too.

        Raises:
            CollectiveTimeout: a rank did not come within the set-up timeout.
        """
        wait = Wait("Free", self._rank, environment.chosen_setup_timeout())

        def check() -> None:
            self._check()
            if wait.look(()):
                raise wait.error(())

        def copied() -> bool:
            self.reap()
            return not self._copying

        waited(copied, check)
        progress.hurry_all(self)
        self.outgoing.settle()
        self.copies.settle()
        self.reap()  # sends the last receipts
        channels = self._envelopes, self._receipts, self._data
        sent = np.array([each.sent for each in channels]).T.copy()  # a row each rank
        wanted = np.empty_like(sent)
        request = self._receipts.comm.Ialltoall(sent, wanted)
        self._receipts.keep([request], (sent, wanted))
        waited(request.Test, check)
        for posted in list(self._open):
            posted.cancel()
            posted.wait(nothing)

        def taken() -> bool:
            while self._envelopes.comm.Iprobe():
                self._arrived(MPI.ANY_SOURCE, MPI.ANY_TAG)
            self._data.drop()
            self.reap()
            numbers = zip(channels, wanted.sum(0), strict=True)
            return not any(each.sends or each.taken < some for each, some in numbers)

        waited(taken, check)
        for room in self._receipts.unread.values():  # no rank will receive these
            self._give_back(room)
        self._receipts.unread.clear()
        _posts.discard(self)
        self._freed = True
        if not _posts:
            rooms.give_back_all()
        waited(self._receipts.comm.Ibarrier().Test, check)  # the peers may end now
        for channel in channels:
            # A new communicator with the same number would get what is left of a step.
            if not (self._interrupted and channel is self._receipts):
                channel.comm.Free()
        self._rooms.shrink()

    def give_up(self) -> None:
        """End without the peers, after a failure. MPI keeps the duplicates."""
        progress.drop_all(self, MPIError(MPI.ERR_COMM, FREED))
        self.outgoing.settle()
        self.copies.settle()
        self._freed = True  # and kept, because MPI may still write a receive's room

    def check(self) -> None:
        """Raise if the communicator has failed, also after it was freed."""
        if self._freed:
            raise MPIError(MPI.ERR_COMM, FREED)
        self._check()

    @alone
    def reap(self) -> None:
        """Send the receipts of messages, and reuse the memory of those received."""
        if self._freed:
            return
        for each in [each for each in self._copying if each.done.query()]:
            self._ended(each)
        self._receipts.give_all()
        for channel in (self._envelopes, self._receipts, self._data):
            channel.reap()
        self._take_receipts()
        self._rooms.shrink()
        rooms.unmap_unused()

    def end(self, copying: Copying) -> None:
        """Note that a copy has ended; its event may be used again."""
        with self._lock:
            self._data.reap()
            if copying in self._copying:
                self._ended(copying)
            # Copies end in order; requests that were given up may have started some.
            while self._copying and self._copying[0].done.query():
                self._ended(self._copying[0])
            if isinstance(copying.done, Event):
                self.copies.reuse(copying.done)

    def _ended(self, copying: Copying) -> None:
        self._copying.remove(copying)
        self._give_back(copying.room)
        if copying.on_host is not None:
            inline.give_back(copying.on_host)
        done, block = copying.done, copying.block
        rooms.copied(done.block if isinstance(done, Crossing) else block)
        self._acknowledge(copying.envelope)

    def room(self, spec: Any) -> buffers.Items:
        """Return the items that a receive writes, or refuse it before it is posted."""
        self._check_open("Recv")
        found = message(spec)
        check_writable(found.view, "Recv")
        return found

    def receive(self, source: int, tag: int) -> "Posted":
        """Post a receive."""
        self.check_receive(source, tag)  # also of a request that was prepared before
        with self._lock:
            found = self._first_probed(source, tag)
            if found is not None:
                self._probed.remove(found)
                return Posted(envelope=found)
            return self._posted(source, tag)

    def _posted(self, source: int, tag: int) -> "Posted":
        """Post a receive of MPI, which writes its room even if a program drops it."""
        posted = Posted(bytearray(ROOM), self._read, source=source, tag=tag)
        self._open.add(posted)  # first, because an interrupt may follow the start
        try:
            posted.start(self._envelopes.comm)
        except BaseException:
            self.withdraw(posted)
            raise
        return posted

    def _read(self, posted: "Posted") -> None:
        with self._lock:
            if posted in self._open:
                self._envelopes.taken += not posted.cancelled
                self._open.discard(posted)

    @alone
    def withdraw(self, posted: "Posted") -> None:
        """Cancel a receive; a message that has matched it stays for another one."""
        posted.cancel()
        posted.wait(nothing)  # a cancelled receive ends without the peer
        self._open.discard(posted)  # if it was not started
        if posted.cancelled:
            return
        found = posted.envelope
        # A source's envelopes are in order, and earlier than those that MPI has.
        while self._envelopes.comm.Iprobe(found.source):
            self._probed.append(self._arrived(found.source, MPI.ANY_TAG))
        later = (
            index
            for index, each in enumerate(self._probed)
            if each.source == found.source and each.number > found.number
        )
        self._probed.insert(next(later, len(self._probed)), found)

    @alone
    def probe(self, source: int, tag: int) -> Envelope | None:
        """Return the envelope that a receive would match now, which stays there."""
        self.check_receive(source, tag, "Probe")
        self.stream_of(None, "Probe")  # refuses a capture before events are queried
        self.reap()
        found, status = self._first_probed(source, tag), MPI.Status()
        if found is not None or not self._envelopes.comm.Iprobe(source, tag, status):
            return found
        # This also takes what the source sent before it. So a source's envelopes here
        # are all earlier than those that MPI has, and no receive overtakes any.
        while found is None or found.tag != status.tag:
            found = self._arrived(status.source, MPI.ANY_TAG)
            self._probed.append(found)
        return found

    @alone
    def receive_if_there(self, source: int, tag: int) -> Envelope | None:
        """Return the envelope of a message, which no other receive gets."""
        self.check_receive(source, tag, "Mprobe")
        self.stream_of(None, "Mprobe")  # refuses a capture before events are queried
        self.reap()
        found = self._first_probed(source, tag)
        if found is not None:
            self._probed.remove(found)
            return found
        status = MPI.Status()
        there = self._envelopes.comm.Iprobe(source, tag, status)
        return self._arrived(status.source, status.tag) if there else None

    def _first_probed(self, source: int, tag: int) -> Envelope | None:
        """Return the first envelope that a probe has taken from MPI."""
        for found in self._probed:
            sources, tags = (found.source, MPI.ANY_SOURCE), (found.tag, MPI.ANY_TAG)
            if source in sources and tag in tags:
                return found
        return None

    def _arrived(self, source: int, tag: int) -> Envelope:
        """Receive an envelope that MPI has."""
        posted = self._posted(source, tag)
        posted.wait(self.check)
        return posted.envelope

    @alone
    def deliver(
        self,
        envelope: Envelope,
        into: buffers.Items,
        after: Event | None,
        on: int | None = None,
    ) -> Copying:
        """Start the copy of a message to its array; :meth:`end` follows it.

        Args:
            envelope: the message.
            into: the array's items.
            after: what the copy follows, if anything.
            on: the array's stream, if the caller waits for the copy. The copy is on it,
                if the data is there, and follows its work otherwise.
        """
        self._check_open("Recv")  # after a Free, the sender reuses the memory
        if len(self._copying) >= MOST:  # some may belong to requests given up
            self.reap()
        coming, room = self._data.coming(envelope), None
        try:
            if on is not None and (coming is not None or envelope.follows):
                after = self.copies.event(on)
            into = into._replace(number=items_of(envelope, into))
            if coming is not None:
                room = self._room_for(envelope.nbytes)
                self._data.receive_parts(coming)
                found = self._crossing(envelope, into, after, room, coming)
            elif envelope.follows:
                found = self._following(envelope, into, after)
            elif envelope.data is not None:
                if into.layout.runs is not None:
                    room = self._room_for(envelope.nbytes)
                found = self._inlined(envelope, into, after, on, room)
            else:
                done, block = self._copied(envelope, into, after, on)
                found = Copying(done, envelope, into, block)
        except BaseException:
            self._give_back(room)
            if envelope.follows:
                self._following(envelope, None, None)
            else:
                self._acknowledge(envelope)
            if coming is not None:
                self._data.receive_parts(coming)  # so that MPI does not keep the rest
            raise
        self._copying.append(found)
        return found

    def _crossing(
        self,
        envelope: Envelope,
        into: buffers.Items,
        after: Event | None,
        room: Room,
        coming: Coming,
    ) -> Copying:
        """Copy data from another island when it has arrived in host memory."""

        def start() -> Event:
            host, nbytes = coming.data.ctypes.data, envelope.nbytes
            streams.copy_from_host(room.address, host, nbytes, self.copies.stream)
            return self.copies.begin(into, room.address, nbytes, room.memory, after)

        done = Crossing(coming.requests, envelope, start, self.check, self._lock)
        return Copying(done, envelope, into, None, room)

    def _inlined(
        self,
        envelope: Envelope,
        into: buffers.Items,
        after: Event | None,
        on: int | None,
        room: Room | None,
    ) -> Copying:
        """Start the copy of a small message, which the envelope contains.

        Args:
            envelope: the message.
            into: the array's items.
            after: as for :meth:`deliver`.
            on: as for :meth:`deliver`.
            room: memory from which a kernel stores items that have gaps.
        """
        nbytes, small = envelope.nbytes, inline.take()
        small.data[:nbytes] = envelope.data
        if room is None:
            done = self.copies.begin(
                into, small.address, nbytes, None, after, on, from_host=True
            )
        else:
            stream = self.copies.stream if on is None else on
            streams.copy_from_host(room.address, small.address, nbytes, stream)
            done = self.copies.begin(into, room.address, nbytes, room.memory, after, on)
        return Copying(done, envelope, into, None, room, small)

    def _copied(
        self,
        envelope: Envelope,
        into: buffers.Items,
        after: Event | None,
        on: int | None = None,
    ) -> tuple[Event, Opened | None]:
        """Start the copy from a sender's block; return its end, and what keeps it."""
        block = None
        if envelope.nbytes:
            open_block = opened_once if envelope.once else opened
            block = open_block(envelope.handle)
        source = 0 if block is None else block.address + envelope.offset
        done = self.copies.begin(into, source, envelope.nbytes, block, after, on)
        return done, block

    def _following(
        self, envelope: Envelope, into: buffers.Items | None, after: Event | None
    ) -> Copying:
        """Copy data when its place has arrived; ``into`` is None: do not copy it."""
        text = bytearray(ROOM)
        requests: list[MPI.Request] = []

        def start() -> Event:
            found = place_in(text, envelope)
            if into is None:
                return Event()  # has ended
            event, done.block = self._copied(found, into, after)
            return event

        tag = envelope.number % self._tags
        self._data.receive(requests, text, envelope.source, tag)
        done = Crossing(requests, envelope, start, self.check, self._lock)
        found = Copying(done, envelope, into, None)
        if into is None:
            self._copying.append(found)
        return found

    def _acknowledge(self, envelope: Envelope) -> None:
        """Let the sender reuse the memory of a message, if it has any."""
        if envelope.handle or envelope.follows or envelope.data is not None:
            self._receipts.owe(envelope.source, envelope.number, envelope.nbytes)


def settle_all() -> None:
    """Wait for all copies to arrays, for the end of the program."""
    progress.hurry_all()
    for post in _posts:
        post.outgoing.settle()
        post.copies.settle()
