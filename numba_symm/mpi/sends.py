"""Sends of device arrays: a copy to memory of this process, and an envelope.

To a rank of the same island, the copy is only enqueued, and a word tells when the
receiver may read it. To other ranks, the data passes through host memory and MPI.
"""

import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate

import numpy as np
from mpi4py import MPI

from numba_symm import arrays, streams
from numba_symm.cache import Cache
from numba_symm.environment import SIMULATED, message_limit
from numba_symm.errors import SymmError
from numba_symm.mpi import buffers, packing, progress, rings
from numba_symm.mpi.calls import BUSY, PAUSE, describe, waited
from numba_symm.mpi.channels import MOST, Channel, Data
from numba_symm.mpi.errors import FREED, MPIError, P, T, refusal, unsupported
from numba_symm.mpi.parts import CopyStream, Outgoing, Unread
from numba_symm.mpi.requests import Own
from numba_symm.mpi.rings import (
    LINE,
    MATCHED,
    NONE,
    NOTHING,
    READ,
    READY,
    THERE,
    compiled,
)
from numba_symm.mpi.rooms import Room
from numba_symm.mpi.words import FIELDS, NO_SLOT, NUMBER, Words, failure_of
from numba_symm.own_arrays import Memory

LOOKS = 2000
"""Looks at memory before a waiting rank looks for failures: some microseconds."""

_ANY_SOURCE, _ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG
_BYTE = np.dtype(np.uint8)

NEVER = 1 << 62
"""A number that no message has."""


def alone(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """Let one thread at a time make such a call. None of them waits for a peer."""

    @functools.wraps(method)
    def locked(post: Any, /, *args: P.args, **options: P.kwargs) -> T:
        with post._lock:
            return method(post, *args, **options)

    return locked


class Sends:
    """The sending part of :class:`numba_symm.mpi.messages.Post`, which sets all this.

    Attributes:
        limit: the bytes of messages to a rank that it has not read, at most; above it,
            a message is postponed. 0: there is no limit.
        words: of the island.
        context: the communicator's number, which no other one of this process has.
        outgoing: copies of messages that were postponed.
        timeout: seconds that such a message waits at most; 0: indefinitely.
        islands: the number of each rank's island.
        places: by rank, its place in its island.
        threads: has ``ready`` in threads where the GPU is current.
        tags: the number of tags.
        rank: this one.
        stream: that of arrays that name none.
    """

    words: Words
    context: int
    outgoing: CopyStream
    timeout: float
    islands: list[int]
    places: list[int]
    threads: threading.local
    tags: int
    _envelopes: Channel
    _data: Data
    rank: int
    to: dict[int, tuple[int, int]]
    _freed: bool
    stream: int
    _lock: threading.RLock
    _enter: Callable[[str], None]

    def __init__(self, ranks: int) -> None:
        self.limit = message_limit()
        self.unread = [0] * ranks
        """By rank, the bytes that it has not read."""
        self._unread: list[Unread] = []
        self._send, self.arrive = compiled("send"), compiled("arrive")
        self._looks = MOST
        self.known = Cache(1024)
        """Messages and the places for them that the program has named before."""

    def reap(self) -> None:
        """Reuse the memory of messages that were read."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise if the communicator has failed, also after it was freed."""
        raise NotImplementedError

    def check_open(self, what: str) -> None:
        """Begin a call: refuse it after Free, and make the GPU current."""
        if self._freed:
            raise MPIError(MPI.ERR_COMM, f"{what}: {FREED}")
        if not hasattr(self.threads, "ready"):
            self._enter(what)
            self.threads.ready = True

    def stream_of(self, array: Any, what: str) -> int:
        """Return the stream for copies of an array."""
        kind = arrays.KINDS.get(type(array))
        if kind is not None:
            named = None if kind.stream is None else kind.stream(array)
        else:
            named = None if array is None else arrays.stream_of(array)
        found = self.stream if named is None else named
        if not SIMULATED:
            self.refuse_capture(found, what)
        return found

    def refuse_capture(self, stream: int, what: str) -> None:
        """Raise if a stream is being captured."""
        if not SIMULATED and streams.is_capturing(stream):
            raise unsupported(
                f"{what}: expected a stream that is not being captured, because the "
                "ranks' hosts take part in this call; make it before or after the "
                "capture, or use comm.communicator.send and recv"
            )

    def tag_of(self, number: int) -> int:
        """Return the tag of what the channel of data brings of a message."""
        return number % self.tags

    def answer_of(self, number: int) -> int:
        """Return the tag of the answer that a receive has matched a message."""
        return 1 + number % (self.tags - 1)

    def idle(self, stream: int) -> bool:
        """Return whether all work of a stream is done."""
        return SIMULATED or streams.is_done(stream)

    def admits(self, dest: int, nbytes: int) -> bool:
        """Return whether a message may be sent now; above the limit, only alone."""
        before = self.unread[dest]
        if not before or not self.limit or before + nbytes <= self.limit:
            return True
        self.take_back()
        before = self.unread[dest]
        return not before or before + nbytes <= self.limit

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

    def send(
        self, outgoing: Outgoing, array: Any, tag: int, matched: bool = False
    ) -> "Sending":
        """Start to send a message, and return its request.

        Args:
            outgoing: the message.
            array: the array of its items.
            tag: its tag.
            matched: whether the request is done only when a receive has matched it.
        """
        stream, words, nbytes = self.stream_of(array, "Send"), self.words, outgoing[2]
        used, slot, room = [array], NO_SLOT, None
        requests: list[MPI.Request] | None = [] if matched else None
        with self._lock:
            if outgoing.plain is not None:
                before, after = outgoing.plain
                found = self._send(*before, stream, *after, tag, matched)
                if found < 0:
                    raise failure_of(-1 - found)
                if found != NONE:
                    slot, number = found & 0xFFFFFFFF, words.port.number
                    room = words.rooms.all[found >> 32]
                    self.lend(Unread(number, outgoing.dest, nbytes, slot, room, used))
                    return sending(self, slot, number, used, requests)
            number = words.next_number()
            if nbytes and not outgoing.apart:
                slot = words.take()
            if slot != NO_SLOT:
                room = self.fill(outgoing, stream, slot, number)
                if room is None:
                    slot = NO_SLOT
                else:
                    self.lend(Unread(number, outgoing.dest, nbytes, slot, room, used))
            if slot == NO_SLOT and nbytes:
                data = on_host(outgoing.items._replace(array=array), stream)
                self.send_data(data, outgoing.dest, number)
            try:
                self.announce(outgoing, tag, slot, number, requests)
            except BaseException:
                if slot != NO_SLOT and not self.is_announced(outgoing, number, 0):
                    words.values[LINE * slot + READ] = number
                raise
        return sending(self, slot, number, used, requests)

    def announce(
        self,
        outgoing: Outgoing,
        tag: int,
        slot: int,
        number: int,
        asked: list[MPI.Request] | None,
    ) -> None:
        """Send the envelope of a message.

        Args:
            outgoing: the message.
            tag: its tag.
            slot: of its words, or ``NO_SLOT``.
            number: the message's.
            asked: an empty list, if the sender asks whether a receive has matched it.
                It gets the requests of MPI that tell that, or none if the slot does.
        """
        dest, nbytes, asks = outgoing.dest, outgoing.nbytes, asked is not None
        if asked is not None and slot == NO_SLOT:
            empty = np.empty(0, np.uint8)
            self._envelopes.receive(asked, empty, dest, self.answer_of(number))
        if outgoing.apart:
            rest = tag, nbytes, slot, number, asks
            text = FIELDS.pack(self.context, self.rank, *rest)
            self._envelopes.send([text, MPI.BYTE], dest)
            return
        to, here = self.to[dest], self.places[self.rank]
        fields = self.context, here, tag, nbytes, slot, number, asks
        while not self.words.publish(*to, *fields):
            self.check()  # the receiver has looked at none of very many envelopes
            progress.advance()
            time.sleep(PAUSE)

    def is_announced(self, outgoing: Outgoing, number: int, sent: int) -> bool:
        """Return whether the envelope of a message was sent before an interrupt.

        Args:
            outgoing: the message.
            number: the message's.
            sent: envelopes that MPI had sent before.
        """
        if outgoing.apart:
            return self._envelopes.sent[outgoing.dest] > sent
        return bool(rings.last(self.to[outgoing.dest][0], NUMBER) == number)

    def fill(
        self, outgoing: Outgoing, stream: int, slot: int, number: int
    ) -> Room | None:
        """Enqueue the copy of a message to a room; give the slot back if there is none.

        It returns the room.
        """
        room = None
        try:
            room = self.room_for(outgoing.size)
            if room is not None:
                self.fill_room(room, outgoing, stream, slot, number)
                return room
        except Exception:  # an interrupt may follow the launch, so both stay unused
            if room is not None:
                self.give_back(room)
            self.words.give_back(slot)
            raise
        self.words.give_back(slot)
        return None

    def fill_room(
        self, room: Room, outgoing: Outgoing, stream: int, slot: int, number: int
    ) -> None:
        """Enqueue the copy of a message's items to a room, and its word."""
        items, nbytes, target = outgoing.items, outgoing.nbytes, room.address
        if items.layout.runs is not None:
            packed = Memory(target, nbytes, room.memory).array(nbytes, _BYTE)
            packing.pack(items, packed)(stream)
            nbytes = 0
        self.words.put(slot, room)
        word = slot, READY, number
        self.words.copy(target, outgoing.address, nbytes, stream, *word)

    def lend(self, message: Unread) -> None:
        """Keep the room of a message until it was read."""
        self._unread.append(message)
        self.unread[message.dest] += message.nbytes
        # The limit grows with what is kept, so a message costs the same on average.
        if len(self._unread) >= self._looks:
            self.take_back()
            self._looks = MOST + 2 * len(self._unread)

    def send_data(self, data: Any, dest: int, number: int) -> None:
        """Send the data of a message by MPI."""
        requests = self._data.send_parts(data, dest, number)
        self.lend(Unread(number, dest, data.nbytes, NO_SLOT, None, requests))

    @alone
    def take_back(self) -> None:
        """Reuse the memory of messages that were read."""
        self._data.reap()
        for each in [each for each in self._unread if self._was_read(each)]:
            self._unread.remove(each)
            self.release(each)

    def _was_read(self, message: Unread) -> bool:
        number, slot = message.number, message.slot
        if slot == NO_SLOT:
            return all([request.Test() for request in message.used])
        # A message may be refused before it was copied.
        words = self.words
        return words.holds(slot, READ, number) and words.holds(slot, READY, number)

    def forget(self, message: Unread) -> None:
        """Use the room of a message again, if it has one."""
        if message in self._unread:
            self._unread.remove(message)
            self.release(message._replace(slot=NO_SLOT))

    def release(self, message: Unread) -> None:
        """Use the memory of a message again."""
        self.unread[message.dest] -= message.nbytes
        if message.room is not None:
            self.give_back(message.room)
        if message.slot != NO_SLOT:
            self.words.give_back(message.slot)

    def is_matched(self, slot: int, number: int, requests: list[MPI.Request]) -> bool:
        """Return whether a receive has matched a message that asked for that."""
        if slot != NO_SLOT:
            return self.words.holds(slot, MATCHED, number)
        with self._lock:  # two threads must not ask MPI at a time
            return all([request.Test() for request in requests])

    def room_for(self, size: int) -> Room | None:
        """Return room; look for messages that were read before it takes more memory.

        It returns None if there are too many blocks.
        """
        found = self.words.rooms.take_free(size)
        if found is None:
            self.take_back()
            found = self.words.rooms.take(size)
        return found

    def give_back(self, room: Room) -> None:
        """Let other messages use a room."""
        self.words.rooms.give_back(room)

    def until(self, slot: int, word: int, number: int, done: Callable[[], Any]) -> None:
        """Wait until a word has a number, or ``done()``.

        Args:
            slot: of the word.
            word: which one.
            number: the word's number; ``NEVER``: wait only for ``done()``.
            done: is called whenever a message has arrived, and now and then.
        """
        words, looks = self.words, 0
        at, bell = words.at + 8 * (LINE * slot + word), words.bell
        while (found := words.look(bell, at, number, LOOKS)) != THERE:
            progress.advance()
            if done():
                return
            if found == NOTHING:
                os.sched_yield()  # to a rank that shares this processor
                self.check()
                looks += 1
                if looks > BUSY:
                    time.sleep(PAUSE)


def on_host(found: buffers.Items, stream: int) -> Any:
    """Return the bytes of a message in host memory, when the stream has come there."""
    data = np.empty(found.nbytes, _BYTE)
    if found.layout.runs is not None:
        found = packing.copy_of(found, stream)
    streams.copy_to_host(data.ctypes.data, found.address, found.nbytes, stream)
    if not SIMULATED:
        streams.synchronize(stream)
    return data


class Sending(Own):
    """A send that was started.

    Args:
        post: of its communicator.
        slot: of its words; ``NO_SLOT``: the array may be used.
        number: the message's.
        used: keeps the array.
        matched: what :meth:`Sends.announce` has filled.
    """

    _post: Sends
    _slot: int
    _number: int
    _used: list[Any]
    _matched: list[MPI.Request] | None

    def _is_copied(self) -> bool:
        if self._slot != NO_SLOT:
            if self._post.words.values[LINE * self._slot + READY] < self._number:
                return False
            self._used.clear()  # the program may drop the array
        return True

    def _is_done(self) -> bool:
        if not self._is_copied():
            return False
        return self._matched is None or self._post.is_matched(
            self._slot, self._number, self._matched
        )

    def _finish(self, status: MPI.Status | None) -> None:
        if self._slot != NO_SLOT:
            self._post.until(self._slot, READY, self._number, self._is_copied)
            self._used.clear()
        if self._matched is not None:
            waited(self._is_done, self._post.check)
        if status is not None:
            describe(status)

    def _poll(self, status: MPI.Status | None) -> bool:
        if not self._is_done():
            self._post.check()
            return False
        describe(status)
        return True

    def _withdraw(self) -> None:
        with suppress(SymmError):
            waited(self._is_copied, self._post.check)


def sending(
    post: Sends,
    slot: int,
    number: int,
    used: list[Any],
    matched: list[MPI.Request] | None,
) -> Sending:
    """Return a send; ``Sending(...)`` takes longer."""
    made = object.__new__(Sending)
    made._post, made._slot, made._number = post, slot, number
    made._used, made._matched = used, matched
    return made
