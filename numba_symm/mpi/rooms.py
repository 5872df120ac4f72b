"""The memory through which messages within a node pass, and rings of envelopes.

Memory of this process through which its messages pass, and streams of copies.

A sender copies a message here, and the receiver copies it from here. So up to the limit
in ``mpi/p2p.py``, a send does not wait for its receiver. Each allocation is shared once
(:func:`numba_symm.share`), and opened once by each peer.

Rooms are kept and used again, up to ``Rooms.most`` bytes of blocks with one room. A
further block serves one message: its receiver unmaps it afterwards, and its sender
frees it. Both operations wait for the GPU. A kernel there may wait for a rank that
waits for this one. So each rank does it in a later call, in which it finds its GPU
idle.

Compiled functions of messages between the processes of a node.

Envelopes pass through rings in memory that the processes share. A ring has one writer
and one reader. No signal's handler runs within a function, so none loses an envelope:
``publish`` sends one, and ``take`` moves all that have arrived to a list of Python.
``wait`` waits for envelopes or for another word.

``copy``, ``send`` and ``arrive`` launch the kernel of ``message_copy.py``. Each message
needs two copies, and Python would need longer for each of them than the GPU.
"""

import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import DEFAULT_MESSAGE_LIMIT, SIMULATED, message_limit
from numba_symm.errors import ExchangeError
from numba_symm.gpu import loads, streams
from numba_symm.gpu.arrays import Memory, view
from numba_symm.gpu.compiled import ANY as _ANY
from numba_symm.gpu.compiled import I32 as _I32
from numba_symm.gpu.compiled import I64 as _I64
from numba_symm.gpu.compiled import (
    WORD,
    Config,
    Emitter,
    definition,
    engine_of,
    new_function,
    struct,
)
from numba_symm.gpu.events import Event
from numba_symm.gpu.streams import SideStream
from numba_symm.memory.allocator import (
    Block,
    SymmetricMemoryAllocator,
    on_allocation_failure,
)
from numba_symm.mpi.progress import MOST
from numba_symm.sharing import SharedHandle, collect, open_shared, share
from numba_symm.sharing.sent import leave_out

ENTRIES = 8192
"""Envelopes in a ring, at most; a power of two."""

FIELDS = 7
"""Words of an envelope."""

SLOTS = 4096
"""Messages of a rank that were not received, at most. Others pass through MPI."""

NO_SLOT = 1 << 32
"""The slot of a message whose data MPI has, if it has any."""

ROOMS = 1 << 14
"""Rooms of a rank, at most."""

LINE = 8
"""Words of a slot: a cache line."""

READY, READ, MATCHED, BLOCK, OFFSET, ONCE = range(6)
"""The words of a slot; see ``words.py``."""

Ring = struct(
    "Ring",
    sent=WORD,  # envelopes; only the writer uses it
    unused=WORD * 7,
    taken=WORD,  # envelopes; the reader stores it
    more=WORD * 7,
    entries=WORD * (ENTRIES * (FIELDS + 1)),  # number of each, fields
)
"""The words of the writer and of the reader are on cache lines of their own."""

Port = struct(
    "Port",
    launch=WORD,  # address of the driver's function
    config=WORD,  # addresses of what it reads
    kernel=WORD,
    parameters=WORD,
    values=WORD * 8,  # the kernel's arguments
    host=WORD,  # addresses of the words for this process, and for GPUs
    words=WORD,
    counts=WORD,  # address of the counts of blocks that have copied, by slot
    bell=WORD,  # address of this process' bell
    number=WORD,  # of this process' last message
    free=WORD,  # how many slots are free
    slots=WORD * SLOTS,  # these slots
    rooms=WORD * (3 * ROOMS),  # address, block and offset of each room
)
"""What the messages of a process share."""

Stack = struct("Stack", free=WORD, rooms=WORD * ROOMS)
"""Rooms of one size that are free."""

NOTHING, THERE, RINGS = range(3)
"""What ``wait`` has found."""

_ENTRY = 8 * (FIELDS + 1)


class _Fast(Emitter):
    """Emits a function that takes integers, and returns an integer."""

    def __init__(self, module: ir.Module, name: str, numbers: int):
        super().__init__(module, name, _ANY, _ANY, _ANY.as_pointer(), _I64)
        _, self.given, _ = self.function.args
        self.args = [self.number(self.object(n)) for n in range(numbers)]

    def object(self, n: int) -> Any:
        """Return an argument."""
        return self.b.load(self.b.gep(self.given, [_I64(n)]))

    def leave(self, result: Any) -> None:
        """Return an integer."""
        self.b.ret(self.python("PyLong_FromLong", _ANY, result))

    def acquire(self, at: Any) -> Any:
        """Load a word. What was stored before it was released is seen afterwards."""
        return self.b.load_atomic(at, "acquire", 8)

    def entry(self, ring: Any, number: Any) -> Any:
        """Return the address of an envelope, by its number."""
        place = self.b.mul(self.b.and_(number, _I64(ENTRIES - 1)), _I64(_ENTRY))
        return self.b.add(self.b.add(ring, _I64(Ring.entries.offset)), place)

    def is_full(self, ring: Any) -> Any:
        """Return whether a ring has no place."""
        taken = self.acquire(self.at(ring, Ring.taken.offset))
        return self.is_(">=", self.b.sub(self.load(ring), taken), ENTRIES)

    def publish(self, ring: Any, bell: Any, fields: Sequence[Any]) -> None:
        """Put an envelope into a ring that is not full."""
        b, number = self.b, self.b.add(self.load(ring), _I64(1))
        place = self.entry(ring, number)
        for n, field in enumerate(fields):
            self.store(field, place, 8 * (n + 1))
        self.store(number, ring)
        # After the fields, and before the bell, whose reader looks for this number.
        b.store_atomic(number, self.at(place, 0), "release", 8)
        b.atomic_rmw("or", self.at(bell, 0), _I64(1), "release")

    def launch(self, *args: Any) -> Any:
        """Launch a copy, whose arguments are those of ``copy``; return the status."""
        return self.python("launch_copy", _I64, *args)


def _emit_launch(module: ir.Module) -> None:
    """Emit the launch of a copy, for the functions here."""
    e = Emitter(module, "launch_copy", _I64, *[_I64] * 8)
    b = e.b
    port, target, source, nbytes, stream, slot, word, number = e.function.args
    low = b.and_(b.or_(target, source), _I64(15))
    eight = e.is_("==", b.and_(low, _I64(7)), 0)
    width = b.select(eight, _I64(8), _I64(1))
    width = b.select(e.is_("==", low, 0), _I64(message_copy.VECTOR), width)
    one = b.mul(width, _I64(message_copy.THREADS))
    blocks = b.udiv(b.add(nbytes, b.sub(one, _I64(1))), one)
    blocks = b.select(e.is_("<", blocks, 1), _I64(1), blocks)
    most = message_copy.MOST_BLOCKS
    blocks = b.select(e.is_(">", blocks, most), _I64(most), blocks)
    count = b.add(e.load(port, Port.counts.offset), b.shl(slot, _I64(3)))
    index = b.add(b.mul(slot, _I64(LINE)), word)
    place = b.add(e.load(port, Port.words.offset), b.shl(index, _I64(3)))
    given = target, source, nbytes, width, blocks, count, place, number
    for n, value in enumerate(given):
        e.store(value, port, Port.values.offset + 8 * n)
    config = e.load(port, Port.config.offset)
    e.store(blocks, config, Config.grid.offset)  # and 0 as the next number
    b.store(_I32(1), e.at(config, Config.grid.offset + 4, _I32))
    e.store(stream, config, Config.stream.offset)
    kind = ir.FunctionType(_I32, [_I64] * 4).as_pointer()
    function = b.inttoptr(e.load(port, Port.launch.offset), kind)
    rest = (
        e.load(port, getattr(Port, name).offset) for name in ("kernel", "parameters")
    )
    saved = e.python("PyEval_SaveThread", _ANY)  # the driver's queue may be full
    status = b.call(function, [config, *rest, _I64(0)])
    e.python("PyEval_RestoreThread", ir.VoidType(), saved)
    b.ret(b.zext(status, _I64))


def _emit_look(module: ir.Module) -> None:
    """Emit the looks at a word and a bell, without the interpreter's lock."""
    e = Emitter(module, "look", _I64, *[_I64] * 4)
    b, (bell, word, value, looks) = e.b, e.function.args
    left, found = b.alloca(_I64), b.alloca(_I64)
    b.store(looks, left)
    saved = e.python("PyEval_SaveThread", _ANY)
    names = "loop", "other", "again", "end"
    loop, other, again, end = map(e.function.append_basic_block, names)
    b.branch(loop)
    b.position_at_end(loop)
    there = b.icmp_signed(">=", b.load_atomic(e.at(word, 0), "acquire", 8), value)
    b.store(b.select(there, _I64(THERE), _I64(NOTHING)), found)
    b.cbranch(there, end, other)
    b.position_at_end(other)
    rings = e.is_("!=", b.load_atomic(e.at(bell, 0), "acquire", 8), 0)
    b.store(b.select(rings, _I64(RINGS), _I64(NOTHING)), found)
    b.cbranch(rings, end, again)
    b.position_at_end(again)
    rest = b.sub(b.load(left), _I64(1))
    b.store(rest, left)
    b.cbranch(e.is_(">", rest, 0), loop, end)
    b.position_at_end(end)
    e.python("PyEval_RestoreThread", ir.VoidType(), saved)
    b.ret(b.load(found))


def _emit_copy(module: ir.Module) -> None:
    """Emit ``copy(port, target, source, nbytes, stream, slot, word, number)``.

    It enqueues a copy, which may have no bytes, and the store of a word after it, and
    returns the driver's status. One thread at a time.
    """
    e = _Fast(module, "copy", 8)
    e.leave(e.launch(*e.args))


NONE = 1 << 62
"""What ``send`` returns if Python has to send the message."""


def _emit_send(module: ir.Module) -> None:
    """Emit ``send(port, stack, source, nbytes, stream, ring, bell, *fields)``.

    The fields are the first three of the envelope, and whether it asks. It returns
    NONE if there is no slot, no room or no place in the ring. Otherwise the message is
    sent, the port has its number, and it returns its slot plus 2**32 times its room; a
    negative number, less one, is the driver's status.
    """
    e = _Fast(module, "send", 11)
    b = e.b
    port, stack, source, nbytes, stream, ring, bell, *fields, asks = e.args
    slots, rooms = e.load(port, Port.free.offset), e.load(stack)
    none = b.or_(e.is_("==", slots, 0), e.is_("==", rooms, 0))
    none = b.or_(none, e.is_full(ring))
    with b.if_then(none, likely=False):
        e.leave(_I64(NONE))
    slots, rooms = b.sub(slots, _I64(1)), b.sub(rooms, _I64(1))
    slot = e.load(b.add(port, b.shl(slots, _I64(3))), Port.slots.offset)
    room = e.load(b.add(stack, b.shl(rooms, _I64(3))), Stack.rooms.offset)
    place = b.add(port, b.mul(room, _I64(24)))
    number = b.add(e.load(port, Port.number.offset), _I64(1))
    e.store(number, port, Port.number.offset)
    line = b.add(e.load(port, Port.host.offset), b.mul(slot, _I64(8 * LINE)))
    target = e.load(place, Port.rooms.offset)
    for n, word in enumerate((BLOCK, OFFSET)):
        e.store(e.load(place, Port.rooms.offset + 8 * (n + 1)), line, 8 * word)
    e.store(_I64(0), line, 8 * ONCE)
    words = slot, _I64(READY), number
    status = e.launch(port, target, source, nbytes, stream, *words)
    with b.if_then(e.is_("!=", status, 0), likely=False):
        e.leave(b.sub(_I64(-1), status))
    e.store(slots, port, Port.free.offset)
    e.store(rooms, stack)
    e.publish(ring, bell, (*fields, nbytes, slot, number, asks))
    e.leave(b.add(slot, b.mul(room, _I64(1 << 32))))


def _emit_arrive(module: ir.Module) -> None:
    """Emit ``arrive(port, target, source, nbytes, stream, slot, number, looks)``.

    It starts the copy of a message to its array when it is there, and returns 1; or 0
    after so many looks, or when the bell rings. A negative number, less one, is the
    driver's status.
    """
    e = _Fast(module, "arrive", 8)
    b = e.b
    port, target, source, nbytes, stream, slot, number, looks = e.args
    line = b.add(e.load(port, Port.host.offset), b.mul(slot, _I64(8 * LINE)))
    word, bell = b.add(line, _I64(8 * READY)), e.load(port, Port.bell.offset)
    found = e.python("look", _I64, bell, word, number, looks)
    with b.if_then(e.is_("!=", found, THERE), likely=False):
        e.leave(_I64(0))
    status = e.launch(port, target, source, nbytes, stream, slot, _I64(READ), number)
    with b.if_then(e.is_("!=", status, 0), likely=False):
        e.leave(b.sub(_I64(-1), status))
    e.leave(_I64(1))


def _emit_publish(module: ir.Module) -> None:
    """Emit ``publish(ring, bell, *fields)``: 1, or 0 if the ring is full."""
    e = _Fast(module, "publish", 2 + FIELDS)
    ring, bell, *fields = e.args
    with e.b.if_then(e.is_full(ring), likely=False):
        e.leave(_I64(0))
    e.publish(ring, bell, fields)
    e.leave(_I64(1))


def _emit_take(module: ir.Module) -> None:
    """Emit ``take(rings, writers, stride, bell, found)``.

    It appends the fields of all envelopes in the rings of these writers to a list of
    Python, as bytes, and returns their number.
    """
    e = _Fast(module, "take", 4)
    b, (ring, writers, stride, bell) = e.b, e.args
    found = e.object(4)
    number, at, left = b.alloca(_I64), b.alloca(_I64), b.alloca(_I64)
    b.store(_I64(0), number)
    b.store(ring, at)
    b.store(writers, left)
    b.atomic_rmw("xchg", e.at(bell, 0), _I64(0), "acquire")
    names = "rings", "envelopes", "more", "after", "end"
    rings, envelopes, more, after, end = map(e.function.append_basic_block, names)
    b.branch(rings)
    b.position_at_end(rings)
    b.cbranch(e.is_(">", b.load(left), 0), envelopes, end)
    b.position_at_end(envelopes)
    here = b.load(at)
    next_one = b.add(e.load(here, Ring.taken.offset), _I64(1))
    place = e.entry(here, next_one)
    there = b.icmp_signed("==", e.acquire(e.at(place, 0)), next_one)
    b.cbranch(there, more, after)
    b.position_at_end(more)
    text = b.inttoptr(b.add(place, _I64(8)), _ANY)
    made = e.python("PyBytes_FromStringAndSize", _ANY, text, _I64(8 * FIELDS))
    with b.if_then(b.icmp_unsigned("==", made, _ANY(None)), likely=False):
        b.ret(_ANY(None))
    status = e.python("PyList_Append", _I32, found, made)
    e.python("Py_DecRef", ir.VoidType(), made)
    with b.if_then(b.icmp_signed("!=", status, _I32(0)), likely=False):
        b.ret(_ANY(None))
    # The writer uses the entry again.
    b.store_atomic(next_one, e.at(here, Ring.taken.offset), "release", 8)
    b.store(b.add(b.load(number), _I64(1)), number)
    b.branch(envelopes)
    b.position_at_end(after)
    b.store(b.add(here, stride), at)
    b.store(b.sub(b.load(left), _I64(1)), left)
    b.branch(rings)
    b.position_at_end(end)
    e.leave(b.load(number))


def _emit_wait(module: ir.Module) -> None:
    """Emit ``wait(bell, word, value, looks)``.

    It returns THERE if a word has at least a value, RINGS if the bell rings, and
    NOTHING after so many looks.
    """
    e = _Fast(module, "wait", 4)
    e.leave(e.python("look", _I64, *e.args))


def last(ring: int, field: int) -> int:
    """Return a field of the envelope that was published last. For the writer.

    An interrupt may have hidden whether it was published.
    """
    words = Ring.from_address(ring)
    return int(words.entries[words.sent % ENTRIES * (FIELDS + 1) + 1 + field])


@functools.cache
def _engine() -> Any:
    return engine_of(
        *(_emit_launch, _emit_look, _emit_copy, _emit_send, _emit_arrive),
        *(_emit_publish, _emit_take, _emit_wait),
    )


@functools.cache
def _definition(name: str) -> Any:
    return definition(_engine(), name)


@functools.cache
def compiled(name: str) -> Callable[..., int]:
    """Return ``publish``, ``take`` or ``wait``; see what emits it."""
    made: Callable[..., int] = new_function(
        ctypes.addressof(_definition(name)), None, None
    )
    return made


LEAST = 1 << 12
"""Bytes of the smallest room; others are twice as large, and so on."""

BLOCK_BYTES = 1 << 21
"""Bytes of the smallest block."""

_OPENS = 1 << 20  # more than there are peers: the memory stays until the process ends
_BYTE = np.dtype(np.uint8)


class Room(NamedTuple):
    """Room for one message.

    Attributes:
        memory: the block.
        block: its number in this rank's list of blocks.
        offset: the room's first byte in it.
        nbytes: the room's size.
        number: its number among this rank's rooms that are used again; -1: it is not.
        once: the handle, if the block is for one message only.
    """

    memory: Memory
    block: int
    offset: int
    nbytes: int
    number: int
    once: SharedHandle | None = None

    @property
    def address(self) -> int:
        """The room's address here."""
        return self.memory.address + self.offset


class Rooms:
    """The rooms of this process, by size.

    Args:
        allocator: allocates the blocks.
        blocks: the words, whose list of blocks the peers read.
        port: has the rooms for the compiled functions.

    Attributes:
        most: the bytes of blocks with one room that are kept.
    """

    def __init__(self, allocator: SymmetricMemoryAllocator, blocks: Any, port: Any):
        self.most = message_limit() or DEFAULT_MESSAGE_LIMIT
        self._allocator, self._blocks, self._port = allocator, blocks, port
        self.all: list[Room] = []
        """Those that are used again, by index."""
        self._free: dict[int, Any] = {}
        self._kept = 0  # bytes of blocks with one room
        self._leaving = 0  # blocks that are to be freed
        self._freeable: deque[tuple[Block, int]] = deque()  # those that no process uses
        on_allocation_failure(self._free_for_others)

    def stack(self, size: int) -> Any:
        """Return the rooms of a size that are free."""
        found = self._free.get(size)
        if found is None:
            found = self._free[size] = Stack()
        return found

    def take_free(self, size: int) -> Room | None:
        """Return room of a size, or None if none is free."""
        stack = self.stack(size)
        if not stack.free:
            return None
        stack.free -= 1
        room: Room = self.all[stack.rooms[stack.free]]
        return room

    def take(self, size: int) -> Room | None:
        """Return room of a size, which may be new; None: there are too many."""
        if not self.stack(size).free:
            if size > BLOCK_BYTES and self._kept + size > self.most:
                return self._for_once(size)
            self._make(size)
        return self.take_free(size)

    def give_back(self, room: Room) -> None:
        """Reuse a room, whose message was received, or free its block later."""
        if room.once is None:
            stack = self._free[room.nbytes]
            stack.rooms[stack.free] = room.number
            stack.free += 1
            return
        room.once.cancel()  # if no receiver has opened it
        self._leaving += 1

    def shrink(self) -> None:
        """Free the blocks that no process uses any more, if the GPU is idle."""
        if not self._leaving or not loads.idle():
            return
        try:
            collect()
        finally:
            while self._freeable:
                block, number = self._freeable.popleft()
                self._blocks.remove(number)
                self._allocator.release(block)
                self._leaving -= 1

    def _free_for_others(self) -> None:
        """Free such blocks after an allocation has failed."""
        with suppress(ExchangeError):  # a later call reports it; some were freed
            self.shrink()

    def _for_once(self, size: int) -> Room | None:
        made = self._shared(size, 1)
        if made is None:
            return None
        memory, number, shared = made
        unused = weakref.finalize(memory, self._freeable.append, (memory.owner, number))
        unused.atexit = False  # the process' end frees it
        return Room(memory, number, 0, size, -1, shared)

    def _make(self, size: int) -> None:
        """Make rooms of a size, unless there are too many blocks or rooms."""
        nbytes, places = max(size, BLOCK_BYTES), self._port.rooms
        starts = range(0, nbytes - size + 1, size)
        if len(self.all) + len(starts) > ROOMS:
            return
        made = self._shared(nbytes, _OPENS)
        if made is None:
            return
        memory, number, _ = made
        self._kept += nbytes if size >= BLOCK_BYTES else 0
        for offset in starts:
            room = Room(memory, number, offset, size, len(self.all))
            first = 3 * room.number
            places[first : first + 3] = room.address, number, offset
            self.all.append(room)
            self.give_back(room)

    def _shared(
        self, nbytes: int, opens: int
    ) -> tuple[Memory, int, SharedHandle] | None:
        """Return a new block, its number and its handle; None: there are too many."""
        block = self._allocator.allocate(nbytes)
        memory = Memory(block.address, nbytes, block)
        shared = share(memory.array(nbytes, _BYTE), opens=opens)
        leave_out(shared)  # the program itself has not shared it
        number = self._blocks.add(shared.to_bytes())
        if number is not None:
            return memory, number, shared
        shared.cancel()
        self._allocator.release(block)
        return None


def size_of(nbytes: int) -> int:
    """Return the size of the room for a message; large ones are at most 1/8 larger."""
    if nbytes > 8 * BLOCK_BYTES:
        unit = 1 << nbytes.bit_length() - 4
        return -(-nbytes // unit) * unit
    return max(LEAST, 1 << (nbytes - 1).bit_length())


class Unread:
    """The messages of a communicator that were not read, and the memory they need.

    Args:
        words: of this rank's island.
        data: brings data to other islands.
        ranks: the number of ranks.

    Attributes:
        limit: the bytes of messages to a rank that it has not read, at most; above it,
            a message is postponed. 0: there is no limit.
        unread: by rank, the bytes that it has not read.
    """

    def __init__(self, words: Any, data: Any, ranks: int):
        self.words, self._data, self._lock = words, data, words.lock
        self.limit = message_limit()
        self.unread = [0] * ranks
        self._unread: dict[Any, None] = {}  # of ``p2p.Sending``
        self._looks = MOST

    def lend(self, made: Any, slot: int, number: int, room: Room | None) -> None:
        """Keep what a message needs until it was read: slot and room, or requests."""
        made.slot, made.number, made.room = slot, number, room
        self._unread[made] = None
        self.unread[made.outgoing.dest] += made.outgoing.nbytes
        # The limit grows with what is kept, so a message costs the same on average.
        if len(self._unread) >= self._looks:
            self.take_back()
            self._looks = MOST + 2 * len(self._unread)

    def take_back(self) -> None:
        """Reuse the memory of messages that were read."""
        with self._lock:
            self._data.reap()
            for each in [each for each in self._unread if self._was_read(each)]:
                self.release(each)

    def _was_read(self, made: Any) -> bool:
        if made.slot == NO_SLOT:
            return all([request.Test() for request in made._requests])
        # A message may be refused before it was copied.
        at, values = LINE * made.slot, self.words.values
        return bool(min(values[at + READ], values[at + READY]) >= made.number)

    def release(self, made: Any) -> None:
        """Use the memory of a message again."""
        del self._unread[made]
        self.unread[made.outgoing.dest] -= made.outgoing.nbytes
        self.give_back(made)
        if made.slot != NO_SLOT:
            self.words.give_back(made.slot)

    def give_back(self, made: Any) -> None:
        """Let other messages use a message's room, if it has one."""
        room, made.room = made.room, None
        if room is not None:
            self.words.rooms.give_back(room)

    def admits(self, outgoing: Any) -> bool:
        """Return whether a message may be sent now; above the limit, only alone."""
        dest, nbytes = outgoing.dest, outgoing.nbytes
        if not self.limit or not nbytes or self.unread[dest] + nbytes <= self.limit:
            return True
        self.take_back()
        before = self.unread[dest]
        return not before or before + nbytes <= self.limit

    def room_for(self, size: int) -> Room | None:
        """Return room; look for messages that were read before it takes more memory.

        It returns None if there are too many blocks.
        """
        rooms: Rooms = self.words.rooms
        found = rooms.take_free(size)
        if found is None:
            self.take_back()
            rooms.shrink()  # a rank that only sends makes no reap
            found = rooms.take(size)
        return found


class CopyStream:
    """The stream of one communicator's copies, which may run beside the program's work.

    Its events are used again, because to make one takes longer than to record it.

    Attributes:
        stream: its handle.
    """

    def __init__(self) -> None:
        self._side = SideStream(0)
        self.stream = self._side.stream
        self._events: list[Event] = []  # those that are not in use

    def event(self, stream: int) -> Event:
        """Return the end of a stream's work so far."""
        try:
            found = self._events.pop()
        except IndexError:
            found = Event()
        found.record(stream)
        return found

    def reuse(self, event: Event) -> None:
        """Take back an event that no caller will query any more."""
        self._events.append(event)

    def settle(self) -> None:
        """Wait for all copies."""
        if not SIMULATED:
            streams.synchronize(self.stream)

    def close(self) -> None:
        """Wait for all copies; there are none later."""
        self.settle()
        self._side.close()


class Opened(NamedTuple):
    """The block of another process, mapped here.

    Attributes:
        array: keeps it mapped.
        address: its address here.
        once: whether it is for one message only.
    """

    array: Any
    address: int
    once: bool


def opened(handle: bytes, once: bool) -> Opened:
    """Return the block of another process, mapped here."""
    array = open_shared(SharedHandle.from_bytes(handle))
    return Opened(array, view(array, "Recv").address, once)


_read: "deque[Opened]" = deque()  # blocks for one message, which was copied


def copied(block: Opened) -> None:
    """Unmap a block later that served only one message, which was copied."""
    _read.append(block)
    unmap_unused()


def unmap_unused() -> None:
    """Unmap such blocks if the GPU is idle."""
    if _read and loads.idle():
        while _read:
            _read.popleft().array.close()
