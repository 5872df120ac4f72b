"""Memory of the host that the ranks of an island share: words, envelopes, blocks.

The ranks map one file. In it, each rank has

- slots, one for each room, and so for each message that was not received;
- rings of envelopes, one from each rank;
- the handles of its blocks, in which its messages wait for their receivers.

A slot is a line of words. Most hold the number of the message for which they were
stored, or of a later one: a slot is used again when its message was read, perhaps
before a rank looks at the words. Numbers only grow, so what earlier messages have left
there does not matter:

- ``READY``: the sender's GPU has copied the message into its block.
- ``READ``: the receiver's GPU has copied it from there, or its host has refused it.
- ``LATE``: the receiver's GPU has not found ``READY`` soon, and copied nothing. Its
  host launches the copy again when ``READY`` is there, and resets this word before.
- ``MATCHED``: a receive has matched it; stored only if the sender asks for that.
- ``FAILED``: the sender could not copy it; stored before ``READY``.
- ``BLOCK``, ``OFFSET``, ``ONCE``: not a number, but where the room is, and whether its
  block is for one message alone.

Memory order. The receiver's host or kernel reads ``READY`` before it copies, and the
sender's host ``READ`` before it uses slot and room again. The sender stores ``BLOCK``,
``OFFSET`` and ``ONCE`` when it makes the room, before the envelope of any message.
"""

import ctypes
import threading
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import SIMULATED, zero_is_per_thread
from numba_symm.gpu import arrays, compiled, driver
from numba_symm.gpu.compiled import WORD, struct
from numba_symm.launch import waiting
from numba_symm.launch.members import Members
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.memory.backends import address_of, file_of_all, mapped
from numba_symm.mpi import buffers, progress, rooms
from numba_symm.mpi.rooms import (
    BLOCK,
    BLOCKS,
    FAILED,
    LINE,
    OFFSET,
    ONCE,
    READ,
    ROOMS,
    Opened,
    Port,
    Ring,
    Rooms,
)

_UNKNOWN = -1  # the number of no block

HANDLE = 2048
"""Bytes of the handle of a block, at most, with its length."""

_DEVICEMAP = 0x02  # CU_MEMHOSTREGISTER_DEVICEMAP


class Envelope(NamedTuple):
    """What a sender announces of its message.

    Attributes:
        source: the sender.
        tag: the message's tag.
        nbytes: its size.
        slot: of its words, or ``NO_SLOT``.
        number: the message's number among those of the sender's process; without a
            slot, among those that MPI has brought.
        asks: 1 if the sender waits until a receive has matched it, else 0.
    """

    source: int
    tag: int
    nbytes: int
    slot: int
    number: int
    asks: int

    def suits(self, source: int, tag: int) -> bool:
        """Return whether it is for a receive of this source and tag."""
        sources, tags = (self.source, MPI.ANY_SOURCE), (self.tag, MPI.ANY_TAG)
        return source in sources and tag in tags


_envelope = partial(tuple.__new__, Envelope)  # in less time than ``Envelope(...)``


def failure_of(status: int) -> BaseException:
    """Return the error of a launch that has failed."""
    return compiled.raised() or driver.failure("cuLaunchKernelEx", status)


class Words:
    """The memory of this rank's island. Collective.

    Args:
        ranks: the island, in a set-up call of all its ranks.
        allocator: allocates the memory through which messages pass.

    Attributes:
        lock: is held while envelopes are matched.
        posts: by context, the messages of a communicator.
        freed: contexts of communicators that were freed.
        allocator: allocates the memory through which messages pass.
        rooms: memory of this rank for its messages.
        entries: numbers for its blocks that no block has.
        users: how many communicators use it.
        values: all words.
        at: the address of the first word in this process.
        to: by place, this rank's ring there.
        rings: by place, the ring from that rank here.
        reclaim: see ``mpi/rooms.py``.
        look: see ``mpi/rooms.py``: ``wait``.
    """

    def __init__(self, ranks: Members, allocator: SymmetricMemoryAllocator):
        self.port = Port()
        self.port_at = ctypes.addressof(self.port)
        self.allocator = allocator
        self._opened: dict[int, Opened] = {}
        self.lock = threading.RLock()
        self.posts: dict[int, Any] = {}
        self.freed: set[int] = set()
        self.users = 0
        self.counted: list[Any] = []  # what the compiled functions count in
        self._early: dict[int, list[tuple[int, ...]]] = {}
        channel, exchange = ranks.channel, ranks.exchange
        self._rank = rank = channel.rank
        self._size = size = channel.size
        memory = struct(
            "Memory",
            words=WORD * (LINE * ROOMS * size),
            handles=ctypes.c_char * (HANDLE * BLOCKS * size),
            rings=Ring * (size * size),  # by reader, and by writer
        )
        nbytes = ctypes.sizeof(memory)
        with (
            file_of_all(exchange, channel, "memory of messages", nbytes) as fd,
            ExitStack() as undo,
        ):
            with exchange.agreed("mapping the memory of messages"):
                self._mapping = mapped(fd, nbytes)
                self._memory = memory.from_buffer(self._mapping)
                self._undo = undo  # in case a rank fails
                self._on_gpu = waiting.undisturbed(self._register)
                self._counts = buffers.copied_to_device(
                    np.zeros(2 * ROOMS * size, np.int64)
                )
                self._counts_at = arrays.view(self._counts, "Comm").address
                self._launch = self._bound()
                copies = rooms.CopyStream()
                undo.callback(copies.close)
                slots = range(ROOMS * rank, ROOMS * (rank + 1))
                self.rooms = Rooms(allocator, self, slots, copies)
            self._undo = undo.pop_all()
        self.values = self._memory.words
        self.port.host, self.port.words = ctypes.addressof(self.values), self._on_gpu
        self.port.counts = self._counts_at
        self.entries = deque(range(BLOCKS))
        self._take = rooms.compiled("take")
        self.reclaim, self.look = rooms.compiled("reclaim"), rooms.compiled("wait")
        address = ctypes.addressof(self._memory)
        self.at, self._handles = address, address + int(memory.handles.offset)
        at, ring = address + memory.rings.offset, ctypes.sizeof(Ring)
        self.to = [at + ring * (place * size + rank) for place in range(size)]
        self.rings = [at + ring * (size * rank + place) for place in range(size)]
        self._places = (WORD * (2 * BLOCKS * size))(*[_UNKNOWN] * 2 * BLOCKS * size)
        self.port.rings, self.port.writers, self.port.stride = (
            self.rings[0],
            size,
            ring,
        )
        self.port.opened = ctypes.addressof(self._places)
        progress.matching[self.progress] = None

    def _register(self) -> int:
        """Map the words for this process' kernels."""
        address, nbytes = address_of(self._mapping), ctypes.sizeof(self._memory.words)
        if SIMULATED:
            return address
        driver.call("cuMemHostRegister", address, nbytes, _DEVICEMAP)
        self._undo.callback(driver.call, "cuMemHostUnregister", address)
        return int(driver.call("cuMemHostGetDevicePointer", address, 0))

    def _bound(self) -> Any:
        """Bind the kernel of copies to the port's arguments; return what it needs."""
        port, launch = (
            self.port,
            message_copy.kernel().bind(1, *message_copy.ARGUMENTS * [0]),
        )
        _, port.config, port.kernel, _ = launch.steps[0]
        first, number = self.port_at + Port.values.offset, message_copy.ARGUMENTS
        pointers = (WORD * number)(*range(first, first + 8 * number, 8))
        port.parameters = ctypes.addressof(pointers)
        for name, function in (
            *(("launch", "cuLaunchKernelEx"), ("capturing", "cuStreamIsCapturing")),
            *(("record", "cuEventRecord"), ("wait", "cuStreamWaitEvent")),
            ("query", "cuStreamQuery"),
        ):
            setattr(port, name, compiled.address(function))
        port.legacy, port.looks = zero_is_per_thread(), progress.MOST
        if not SIMULATED:
            return launch, pointers
        simulated = message_copy.Simulated(port.values, port.config)
        port.kernel = compiled.stand_in(simulated)
        return launch, pointers, simulated

    def holds(self, slot: int, word: int, number: int) -> bool:
        """Return whether a word was stored for a message."""
        return bool(self.values[LINE * slot + word] >= number)

    def store(self, slot: int, word: int, number: int) -> None:
        """Store a word."""
        self.values[LINE * slot + word] = number

    def add(self, handle: bytes) -> int | None:
        """Return the number of a block of this rank; None: there are too many."""
        if not self.entries or len(handle) > HANDLE - 8:
            return None
        number = self.entries.popleft()
        text = len(handle).to_bytes(8, "little") + handle
        ctypes.memmove(self._handle_at(self._rank, number), text, len(text))
        return number

    def remove(self, number: int) -> None:
        """Forget a block, whose messages were all received."""
        self.entries.append(number + BLOCKS)  # with a new number

    def _handle_at(self, place: int, number: int) -> int:
        return self._handles + HANDLE * (BLOCKS * place + number % BLOCKS)

    def lent(self, unread: Any) -> list[tuple[int, int]]:
        """Return slots and numbers of messages that their receivers have not read.

        Args:
            unread: where their bytes are counted.
        """
        first, port = ctypes.addressof(unread), self.port
        last = first + ctypes.sizeof(unread)
        found = [(slot, 5 * (slot % ROOMS)) for slot in port.unread[: port.lent]]
        counts = ((slot, port.rooms[at + 2], port.rooms[at + 3]) for slot, at in found)
        return [(slot, number) for slot, number, at in counts if first <= at < last]

    def opened(self, slot: int, message: int) -> tuple[Opened, int] | None:
        """Return the block that has a message, mapped here, and the address there.

        It returns None if the sender could not copy the message of this number.
        """
        first, place = LINE * slot, slot // ROOMS
        number, offset = self.values[first + BLOCK], self.values[first + OFFSET]
        if self.holds(slot, FAILED, message):
            return None
        index = BLOCKS * place + number % BLOCKS
        found = self._opened.get(index)
        if found is None or self._places[2 * index] != number:
            at = self._handle_at(place, number)
            handle = ctypes.string_at(at + 8, WORD.from_address(at).value)
            found = rooms.opened(handle, bool(self.values[first + ONCE]))
            self._places[2 * index : 2 * index + 2] = [number, found.address]
            if not found.once:
                self._opened[index] = found
        return found, found.address + offset

    def progress(self) -> None:
        """Match the envelopes that have arrived."""
        with self.lock:
            for ring in self.rings:
                # In this order, an interrupt loses no envelope, and doubles none.
                while self.port.held or self._take(self.port_at, ring):
                    post, matched = self._deliver(tuple(self.port.envelope))
                    self.port.held = 0
                    if matched is not None:
                        post.posted.pop(matched, None)

    def _deliver(self, fields: tuple[int, ...]) -> tuple[Any, Any]:
        """Give an envelope to its communicator; return that, and what it matches."""
        context, place, *rest = fields
        post = self.posts.get(context)
        if post is not None:
            return post, post.match(_envelope((post.ranks[place], *rest)))
        if context in self.freed:
            *_, slot, number, _ = fields
            self.store(slot, READ, number)
            return None, None
        kept = self._early.setdefault(context, [])  # this rank has not made it yet
        if fields not in kept[-1:]:
            kept.append(fields)
        return None, None

    def open(self, context: int, post: Any) -> None:
        """Match the messages of a communicator from now on."""
        with self.lock:
            self.posts[context] = post
            for fields in self._early.pop(context, []):
                self._deliver(fields)
        self.progress()

    def forget(self, context: int) -> None:
        """Refuse what arrives for a communicator from now on."""
        with self.lock:
            self.freed.add(context)
            self.posts.pop(context, None)

    def let_go(self) -> None:
        """Unmap the blocks of other processes."""
        for index in self._opened:
            self._places[2 * index] = _UNKNOWN
        self._opened.clear()

    def close(self) -> None:
        """Unmap the words, which no kernel may store any more."""
        progress.matching.pop(self.progress, None)
        self.let_go()
        self._undo.close()
