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

``send`` and ``receive`` do all of a plain message: they match, launch the kernel of
``message_copy.py``, wait for its word, and reuse memory. Python would need longer for
each step than the GPU. What is not plain, Python does in steps: strided items, other
islands, a message above the limit, and a receive that is not the first to match.
"""

import ctypes
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import DEFAULT_MESSAGE_LIMIT, message_limit
from numba_symm.errors import ExchangeError
from numba_symm.gpu import loads, streams
from numba_symm.gpu.arrays import Memory, view
from numba_symm.gpu.compiled import ANY as _ANY
from numba_symm.gpu.compiled import I32 as _I32
from numba_symm.gpu.compiled import I64 as _I64
from numba_symm.gpu.compiled import (
    WORD,
    Builtin,
    Config,
    Emitter,
    builtin,
    engine_of,
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

ROOMS = 1 << 14
"""Rooms of a rank, and messages that were not received, at most; a power of two."""

NO_SLOT = 1 << 32
"""The slot of a message that MPI brings."""

LINE = 8
"""Words of a slot: a cache line."""

READY, READ, LATE, MATCHED, FAILED, BLOCK, OFFSET, ONCE = range(8)
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

BLOCKS = 1024
"""Blocks of a rank, at most; a power of two."""

Port = struct(
    "Port",
    launch=WORD,  # addresses of the driver's functions
    capturing=WORD,
    record=WORD,
    wait=WORD,
    query=WORD,
    legacy=WORD,  # the least handle of the legacy stream; 1 is its greatest
    scratch=WORD,
    config=WORD,  # addresses of what a launch reads
    kernel=WORD,
    parameters=WORD,
    values=WORD * message_copy.ARGUMENTS,
    busy=WORD,  # whether a thread launches
    host=WORD,  # addresses of the words for this process, and for GPUs
    words=WORD,
    counts=WORD,  # address of the counts of blocks that have copied, by slot
    rings=WORD,  # address of its rings, their number, and the bytes of one
    writers=WORD,
    stride=WORD,
    held=WORD,  # whether there is an envelope that was taken, and that Python matches
    envelope=WORD * FIELDS,
    never=WORD,  # 0
    opened=WORD,  # address of the numbers and addresses of the peers' blocks
    number=WORD,  # of this process' last message
    rooms=WORD * (5 * ROOMS),  # address, stack; number, where bytes count, bytes
    lent=WORD,  # messages that were not read
    looks=WORD,  # how many there may be before they are looked at
    unread=WORD * ROOMS,  # the slots of these
)
"""What the messages of a process share."""

Parcel = struct(
    "Parcel",
    port=WORD,  # addresses of the port, and of the stack of rooms
    stack=WORD,
    source=WORD,  # address and bytes of the items
    nbytes=WORD,
    ring=WORD,  # address of the receiver's ring
    context=WORD,  # the envelope's first fields
    place=WORD,
    unread=WORD,  # address of the number of bytes that the receiver has not read
    rests=WORD,  # bits of a message's number without which it waits for another one
)
"""A message that ``send`` sends, each time with another tag."""

Order = struct(
    "Order",
    stage=WORD,
    port=WORD,  # address
    ring=WORD,  # address of the sender's ring; 0: any sender, or one elsewhere
    context=WORD,
    address=WORD,  # of the items; 0: they have gaps
    room=WORD,  # their bytes
    wanted=WORD,  # the tag, or ANY
    stream=WORD,  # of the array, and of the copy
    on=WORD,
    event=WORD,  # what the copy follows; 0: nothing
    source=WORD,  # the fields of the envelope, once it has matched
    tag=WORD,
    nbytes=WORD,
    slot=WORD,
    number=WORD,
    asks=WORD,
)
"""A receive."""

POSTED, FOUND, BEGUN, ENDED, CANCELLED = range(5)
"""Stages of a receive: a message is awaited, has matched, is copied, was copied."""

NO_ORDER = bytearray(bytes(Order(stage=CANCELLED)))
"""Instead of a receive."""

ANY = 1 << 62
"""The tag of a receive for each tag."""

Stack = struct("Stack", free=WORD, rooms=WORD * ROOMS)
"""Slots of rooms of one size that are free."""

NOTHING, THERE, ARRIVED = range(3)
"""What ``wait`` has found: the word, or an envelope."""

LOOKS = 8000
"""Looks for a message that a send makes, in some 12 microseconds."""

SLOTS_OF_ALL = 1 << 24
"""More than there are slots of all ranks of an island."""

_ENTRY = 8 * (FIELDS + 1)


class _Stepper(Emitter):
    """Emits instructions on rings, words and launches."""

    def acquire(self, at: Any) -> Any:
        """Load a word. What was stored before it was released is seen afterwards."""
        return self.b.load_atomic(at, "acquire", 8)

    def entry(self, ring: Any, number: Any) -> Any:
        """Return the address of an envelope, by its number."""
        place = self.b.mul(self.b.and_(number, _I64(ENTRIES - 1)), _I64(_ENTRY))
        return self.b.add(self.b.add(ring, _I64(Ring.entries.offset)), place)

    def next_of(self, ring: Any) -> tuple[Any, Any]:
        """Return the number and the address of the next envelope of a reader."""
        number = self.b.add(self.load(ring, Ring.taken.offset), _I64(1))
        return number, self.entry(ring, number)

    def launch(self, *args: Any) -> Any:
        """Launch copies, which ``_emit_launch`` describes; return the status."""
        return self.python("launch_copy", _I64, *args)

    def look(self, port: Any, word: Any, value: Any, looks: Any, late: Any = 0) -> Any:
        """Return what ``wait`` finds."""
        late = late or _I64(0)
        return self.python("look", _I64, port, word, value, looks, late)

    def line(self, port: Any, slot: Any) -> Any:
        """Return the address of the words of a slot."""
        host = self.load(port, Port.host.offset)
        return self.b.add(host, self.b.mul(slot, _I64(8 * LINE)))

    def room(self, port: Any, slot: Any) -> Any:
        """Return the address of what a process knows of the room of a slot."""
        place = self.b.mul(self.b.and_(slot, _I64(ROOMS - 1)), _I64(40))
        return self.b.add(self.b.add(port, place), _I64(Port.rooms.offset))

    def count(self, at: Any, more: Any) -> None:
        """Add to a word."""
        self.store(self.b.add(self.load(at), more), at)

    def driver(self, port: Any, name: str, *args: Any) -> Any:
        """Call a function of the driver; return its status."""
        kind = ir.FunctionType(_I32, [_I64] * len(args)).as_pointer()
        address = self.load(port, getattr(Port, name).offset)
        return self.b.zext(self.b.call(self.b.inttoptr(address, kind), args), _I64)

    @contextmanager
    def each(self, count: Any) -> Iterator[Any]:
        """Repeat what is emitted for each number below a count, which it yields."""
        b = self.b
        with b.goto_entry_block():  # once, also within another loop
            next_one = b.alloca(_I64)
        b.store(_I64(0), next_one)
        names = "head", "body", "end"
        head, body, end = map(self.function.append_basic_block, names)
        b.branch(head)
        b.position_at_end(head)
        number = b.load(next_one)
        b.cbranch(b.icmp_signed("<", number, count), body, end)
        b.position_at_end(body)
        yield number
        b.store(b.add(number, _I64(1)), next_one)
        b.branch(head)
        b.position_at_end(end)


class _Fast(Builtin, _Stepper):
    """Emits a function for Python that takes these steps."""


def _emit_launch(module: ir.Module) -> None:
    """Emit ``launch_copy(port, stream, *sent, order, place, looks)``.

    It launches the copy of a message that is sent, given by target, source, bytes, slot
    and number, unless that is 0. And it launches that of a receive, unless the place of
    its message is 0, which so often looks for the message. It returns the status.
    """
    e = _Stepper(module, "launch_copy", _I64, *[_I64] * 10)
    b, (port, stream, *sent, order, place, looks) = e.b, e.function.args
    names = Order.address, Order.nbytes, Order.slot, Order.number
    address, *rest = (e.load(order, each.offset) for each in names)
    copies = (READY, sent), (READ, [address, place, *rest])
    labels = "another", "yield", "mine"
    another, yields, mine = map(e.function.append_basic_block, labels)
    b.branch(another)
    b.position_at_end(another)  # another thread may launch, without the lock
    b.cbranch(e.is_("==", e.load(port, Port.busy.offset), 0), mine, yields)
    b.position_at_end(yields)
    saved = e.python("PyEval_SaveThread", _ANY)
    e.python("PyEval_RestoreThread", ir.VoidType(), saved)
    b.branch(another)
    b.position_at_end(mine)
    e.store(_I64(1), port, Port.busy.offset)
    values, grid = [], _I64(0)
    for word, given in copies:
        target, source, nbytes, slot, number = given
        low = b.and_(b.or_(target, source), _I64(15))
        eight = e.is_("==", b.and_(low, _I64(7)), 0)
        width = b.select(eight, _I64(8), _I64(1))
        width = b.select(e.is_("==", low, 0), _I64(message_copy.VECTOR), width)
        one = b.mul(width, _I64(message_copy.THREADS))
        blocks = b.udiv(b.add(nbytes, b.sub(one, _I64(1))), one)
        blocks = b.select(e.is_("<", blocks, 1), _I64(1), blocks)
        most = message_copy.MOST_BLOCKS
        blocks = b.select(e.is_(">", blocks, most), _I64(most), blocks)
        none = e.is_("==", number if word == READY else place, 0)
        blocks = b.select(none, _I64(0), blocks)
        grid = b.add(grid, blocks)
        index = b.add(b.shl(slot, _I64(1)), _I64(word))  # of both copies of a message
        count = b.add(e.load(port, Port.counts.offset), b.shl(index, _I64(3)))
        index = b.add(b.mul(slot, _I64(LINE)), _I64(word))
        word_at = b.add(e.load(port, Port.words.offset), b.shl(index, _I64(3)))
        values += [target, source, nbytes, width, blocks, count, word_at, number]
    for n, value in enumerate([*values, looks]):
        e.store(value, port, Port.values.offset + 8 * n)
    config = e.load(port, Port.config.offset)
    e.store(grid, config, Config.grid.offset)  # and 0 as the next number
    b.store(_I32(1), e.at(config, Config.grid.offset + 4, _I32))
    e.store(stream, config, Config.stream.offset)
    rest = [e.load(port, each.offset) for each in (Port.kernel, Port.parameters)]
    saved = e.python("PyEval_SaveThread", _ANY)  # the driver's queue may be full
    status = e.driver(port, "launch", config, *rest, _I64(0))
    e.python("PyEval_RestoreThread", ir.VoidType(), saved)
    e.store(_I64(0), port, Port.busy.offset)
    with b.if_then(e.is_("!=", status, 0), likely=False):
        e.store(b.select(none, e.load(order), _I64(FOUND)), order)
    b.ret(status)


def _emit_captured(module: ir.Module) -> None:
    """Emit ``captured(port, stream)``: 0, or the stream may be captured."""
    e = _Stepper(module, "captured", _I64, _I64, _I64)
    b, (port, stream) = e.b, e.function.args
    low = e.load(port, Port.legacy.offset)
    past = b.icmp_unsigned(">", b.sub(stream, low), b.sub(_I64(1), low))
    with b.if_then(past):
        scratch = b.add(port, _I64(Port.scratch.offset))
        status = e.driver(port, "capturing", stream, scratch)
        b.ret(b.or_(status, b.zext(e.load(scratch, 0, _I32), _I64)))
    b.ret(_I64(0))


def _emit_look(module: ir.Module) -> None:
    """Emit ``look(port, word, value, looks, late)``: without the interpreter's lock.

    It looks at a word and for envelopes, or instead of these at another word.
    """
    e = _Stepper(module, "look", _I64, *[_I64] * 5)
    b, (port, word, value, looks, late) = e.b, e.function.args
    left, found = b.alloca(_I64), b.alloca(_I64)
    b.store(looks, left)
    names = Port.rings, Port.writers, Port.stride
    rings, writers, stride = (e.load(port, each.offset) for each in names)
    writers = b.select(e.is_("==", late, 0), writers, _I64(0))
    late = b.select(e.is_("==", late, 0), b.add(port, _I64(Port.never.offset)), late)
    saved = e.python("PyEval_SaveThread", _ANY)
    names = "loop", "again", "end"
    loop, again, end = map(e.function.append_basic_block, names)
    b.branch(loop)
    b.position_at_end(loop)
    is_late = e.is_("!=", e.acquire(e.at(late, 0)), 0)
    b.store(b.select(is_late, _I64(ARRIVED), _I64(NOTHING)), found)
    with e.each(writers) as n:
        number, place = e.next_of(b.add(rings, b.mul(n, stride)))
        arrived = b.icmp_signed("==", e.acquire(e.at(place, 0)), number)
        b.store(b.select(arrived, _I64(ARRIVED), b.load(found)), found)
    # Last, because the word may be that of an envelope.
    there = b.icmp_signed(">=", e.acquire(e.at(word, 0)), value)
    b.store(b.select(there, _I64(THERE), b.load(found)), found)
    b.cbranch(e.is_("!=", b.load(found), NOTHING), end, again)
    b.position_at_end(again)
    rest = b.sub(b.load(left), _I64(1))
    b.store(rest, left)
    b.cbranch(e.is_(">", rest, 0), loop, end)
    b.position_at_end(end)
    e.python("PyEval_RestoreThread", ir.VoidType(), saved)
    b.ret(b.load(found))


FULL = (1 << 63) - 1
"""What ``send`` returns if there is no room, or no place in the receiver's ring."""

REFUSED = -1 << 40
"""What functions return if the stream may be captured, which Python refuses."""


def _emit_reclaim(module: ir.Module) -> None:
    """Emit ``reclaim_all(port)``: reuse the rooms of messages that were read."""
    e = _Stepper(module, "reclaim_all", _I64, _I64)
    b, (port,) = e.b, e.function.args
    kept = b.alloca(_I64)
    b.store(_I64(0), kept)
    unread = b.add(port, _I64(Port.unread.offset))
    with e.each(e.load(port, Port.lent.offset)) as n:
        slot = e.load(b.add(unread, b.shl(n, _I64(3))))
        room, line = e.room(port, slot), e.line(port, slot)
        stack, number, count, nbytes = (e.load(room, 8 * n) for n in range(1, 5))
        # A message may be refused before it was copied.
        done = [e.acquire(e.at(line, 8 * word)) for word in (READ, READY)]
        read, ready = (b.icmp_signed(">=", each, number) for each in done)
        with b.if_else(b.and_(read, ready)) as (is_read, is_not):
            with is_read:
                e.store(slot, b.add(stack, b.shl(e.load(stack), _I64(3))), 8)
                e.count(stack, _I64(1))
                e.count(count, b.neg(nbytes))
            with is_not:
                left = b.load(kept)
                e.store(slot, b.add(unread, b.shl(left, _I64(3))))
                b.store(b.add(left, _I64(1)), kept)
    left = b.load(kept)
    e.store(left, port, Port.lent.offset)
    # It grows with what is kept, so a message costs the same on average.
    looks = b.add(b.shl(left, _I64(1)), _I64(MOST))
    e.store(looks, port, Port.looks.offset)
    b.ret(_I64(0))


def _emit_send(module: ir.Module) -> None:
    """Emit ``send(order, parcel, stream, tag, asks)``.

    The parcel is an address. It returns REFUSED if the stream may be captured, and FULL
    if there is no room, or no place in the ring. Otherwise the message is announced,
    and it returns its number times SLOTS_OF_ALL plus its slot; or, if the
    launch of its copy has failed, the driver's status, as -1 less it.

    The order is the first receive that was posted. Two ranks often send to each other.
    So ``send`` waits a short time for the receive's message, and launches both copies
    in one kernel if they are ordered by one stream, and not by their array. The copy
    of an ``Irecv`` must not follow what the program has enqueued since then, so its
    stream must be idle. A handle that is another stream in each thread tells nothing.
    """
    e = _Fast(module, "send", 4, block=True)
    b, order = e.b, e.block
    parcel, stream, tag, asks = e.args
    port, stack, source, nbytes, ring, context, place, unread = (
        e.load(parcel, 8 * n) for n in range(8)
    )
    refused = e.python("captured", _I64, port, stream)
    with b.if_then(e.is_("!=", refused, 0), likely=False):
        e.leave(_I64(REFUSED))
    lent, looks = (e.load(port, at.offset) for at in (Port.lent, Port.looks))
    many = b.icmp_signed(">=", lent, looks)
    with b.if_then(b.or_(many, e.is_("==", e.load(stack), 0)), likely=False):
        e.python("reclaim_all", _I64, port)
    taken = e.acquire(e.at(ring, Ring.taken.offset))
    full = e.is_(">=", b.sub(e.load(ring), taken), ENTRIES)
    with b.if_then(b.or_(full, e.is_("==", e.load(stack), 0)), likely=False):
        e.leave(_I64(FULL))
    slot = e.load(b.add(stack, b.shl(e.load(stack), _I64(3))))
    e.count(stack, _I64(-1))  # before another thread may run
    number = b.add(e.load(port, Port.number.offset), _I64(1))
    e.store(number, port, Port.number.offset)
    room, line = e.room(port, slot), e.line(port, slot)
    for n, value in enumerate((number, unread, nbytes)):
        e.store(value, room, 8 * (n + 2))
    lent = e.load(port, Port.lent.offset)
    e.store(slot, b.add(port, b.shl(lent, _I64(3))), Port.unread.offset)
    e.store(b.add(lent, _I64(1)), port, Port.lent.offset)
    e.count(unread, nbytes)
    # Before the launch, beside which the receiver matches it, and launches its copy.
    entry_number = b.add(e.load(ring), _I64(1))
    entry = e.entry(ring, entry_number)
    for n, field in enumerate((context, place, tag, nbytes, slot, number, asks)):
        e.store(field, entry, 8 * (n + 1))
    e.store(entry_number, ring)
    b.store_atomic(entry_number, e.at(entry, 0), "release", 8)  # after the fields
    other = b.alloca(_I64)
    b.store(_I64(0), other)
    names = Order.address, Order.stream, Order.on
    address, of_array, on = (e.load(order, each.offset) for each in names)
    joins = e.is_("==", e.load(order), POSTED)
    for each in (
        e.is_("!=", e.load(order, Order.ring.offset), 0),
        b.icmp_signed("==", of_array, stream),
        b.icmp_signed("!=", address, source),
        b.icmp_unsigned(">=", stream, e.load(port, Port.legacy.offset)),
        e.is_("!=", stream, streams.PER_THREAD),
    ):
        joins = b.and_(joins, each)
    busy = b.alloca(_I64)
    b.store(_I64(0), busy)
    with b.if_then(b.and_(joins, b.icmp_signed("!=", on, stream))):
        b.store(e.driver(port, "query", stream), busy)
    with b.if_then(b.and_(joins, e.is_("==", b.load(busy), 0))):
        waits = e.is_("==", b.and_(number, e.load(parcel, Parcel.rests.offset)), 0)
        looks = b.select(waits, _I64(LOOKS), _I64(1))
        e.python("match", ir.VoidType(), order, port, looks, _I64(1))
        missed = b.mul(b.zext(e.is_("==", e.load(order), POSTED), _I64), _I64(MOST - 1))
        e.store(missed, parcel, Parcel.rests.offset)
        with b.if_then(e.is_("==", e.load(order), FOUND)):
            b.store(e.python("claim", _I64, order, port, _I64(0), _I64(1)), other)
    sent = e.load(room), source, nbytes, slot, number
    more = b.lshr(e.load(order, Order.nbytes.offset), _I64(message_copy.MORE))
    looks = b.add(_I64(message_copy.LOOKS), more)
    status = e.launch(port, stream, *sent, order, b.load(other), looks)
    with b.if_then(e.is_("!=", status, 0), likely=False):
        e.store(number, line, 8 * FAILED)
        b.store_atomic(number, e.at(line, 8 * READY), "release", 8)
        e.leave(b.sub(_I64(-1), status))
    e.leave(b.add(b.mul(number, _I64(SLOTS_OF_ALL)), slot))


def _emit_expect(module: ir.Module) -> None:
    """Emit ``expect(order, wanted, stream, on, event)``: begin a receive.

    The event, unless it is 0, is recorded on the array's stream. It returns the
    driver's status, or REFUSED.
    """
    e = _Fast(module, "expect", 4, block=True)
    b, order, (_, stream, _, event) = e.b, e.block, e.args
    port = e.load(order, Order.port.offset)
    refused = e.python("captured", _I64, port, stream)
    with b.if_then(e.is_("!=", refused, 0), likely=False):
        e.leave(_I64(REFUSED))
    for n, value in enumerate(e.args):
        e.store(value, order, Order.wanted.offset + 8 * n)
    with b.if_then(e.is_("!=", event, 0)):
        e.leave(e.driver(port, "record", event, stream))
    e.leave(_I64(0))


def _emit_match(module: ir.Module) -> None:
    """Emit ``match(order, port, looks, alone)``: look for the message of a receive.

    It must be the next one of a ring, and the receive the first that was posted. The
    rest of matching is Python's.
    """
    e = _Stepper(module, "match", ir.VoidType(), *[_I64] * 4)
    b, (order, port, looks, alone) = e.b, e.function.args
    ring = e.load(order, Order.ring.offset)
    with b.if_then(b.or_(e.is_("==", alone, 0), e.is_("==", ring, 0))):
        e.look(port, b.add(port, _I64(Port.never.offset)), _I64(1), looks)
        b.ret_void()
    number, place = e.next_of(ring)
    fine = e.is_("==", e.look(port, place, number, looks), THERE)
    # Another thread may have taken it meanwhile, or the receive.
    again, _ = e.next_of(ring)
    context, _, tag, nbytes, slot, *_ = (e.load(place, 8 * n) for n in range(1, 8))
    wanted = e.load(order, Order.wanted.offset)
    for each in (
        b.icmp_signed("==", again, number),
        e.is_("==", e.load(port, Port.held.offset), 0),
        e.is_("==", e.load(order), POSTED),
        b.icmp_signed("==", context, e.load(order, Order.context.offset)),
        b.or_(e.is_("==", wanted, ANY), b.icmp_signed("==", wanted, tag)),
        b.icmp_signed("<=", nbytes, e.load(order, Order.room.offset)),
    ):
        fine = b.and_(fine, each)
    with b.if_then(fine):
        for n in range(5):
            e.store(e.load(place, 8 * (n + 3)), order, Order.tag.offset + 8 * n)
        e.store(_I64(FOUND), order)
        with b.if_then(e.is_("!=", e.load(order, Order.asks.offset), 0)):
            number_of_it = e.load(order, Order.number.offset)
            e.store(number_of_it, e.line(port, slot), 8 * MATCHED)
        # The writer uses the entry again.
        b.store_atomic(number, e.at(ring, Ring.taken.offset), "release", 8)
    b.ret_void()


def _emit_claim(module: ir.Module) -> None:
    """Emit ``claim(order, port, ready, looks)``: let a receive begin, if it can now.

    It returns where the message is, or 0 if ``READY`` has not come to a number after so
    many looks, or if Python has to copy.
    """
    e = _Stepper(module, "claim", _I64, *[_I64] * 4)
    b, (order, port, ready, looks) = e.b, e.function.args
    names = Order.slot, Order.nbytes, Order.address
    slot, nbytes, address = (e.load(order, n.offset) for n in names)
    with b.if_then(e.is_("==", slot, NO_SLOT), likely=False):
        b.ret(_I64(0))
    line = e.line(port, slot)
    fine = e.is_("==", e.look(port, b.add(line, _I64(8 * READY)), ready, looks), THERE)
    number, block = e.load(order, Order.number.offset), e.load(line, 8 * BLOCK)
    index = b.and_(block, _I64(BLOCKS - 1))
    index = b.add(b.mul(b.udiv(slot, _I64(ROOMS)), _I64(BLOCKS)), index)
    known = b.add(e.load(port, Port.opened.offset), b.shl(index, _I64(4)))
    for each in (
        e.is_("==", e.load(order), FOUND),  # another thread may have begun it
        b.icmp_signed("==", e.load(known), block),
        b.icmp_signed("<", e.load(line, 8 * FAILED), number),
        e.is_("!=", address, 0),
        b.icmp_signed("<=", nbytes, e.load(order, Order.room.offset)),
    ):
        fine = b.and_(fine, each)
    with b.if_then(b.not_(fine)):
        b.ret(_I64(0))
    e.store(_I64(BEGUN), order)  # before another thread may run
    e.store(_I64(0), line, 8 * LATE)  # no kernel stores it now
    b.ret(b.add(e.load(known, 8), e.load(line, 8 * OFFSET)))


def _emit_begin(module: ir.Module) -> None:
    """Emit ``begin(order, port, looks)``: launch the copy of a message that is there.

    It returns the driver's status. What it does not copy, Python does.
    """
    e = _Stepper(module, "begin", _I64, *[_I64] * 3)
    b, (order, port, looks) = e.b, e.function.args
    names = Order.number, Order.on, Order.event
    number, on, event = (e.load(order, each.offset) for each in names)
    place = e.python("claim", _I64, order, port, number, looks)
    with b.if_then(e.is_("==", place, 0)):
        b.ret(_I64(0))
    with b.if_then(e.is_("!=", event, 0)):
        status = e.driver(port, "wait", on, event, _I64(0))
        with b.if_then(e.is_("!=", status, 0), likely=False):
            e.store(_I64(FOUND), order)
            b.ret(status)
    b.ret(e.launch(port, on, *5 * [_I64(0)], order, place, _I64(0)))


def _emit_receive(module: ir.Module) -> None:
    """Emit ``receive(order, stage, looks, alone)``: go on with a receive to a stage.

    It returns the stage, which is lower after so many looks, for an envelope, or if the
    next step is Python's; REFUSED; or the driver's status, as -1 less it.
    """
    e = _Fast(module, "receive", 3, block=True)
    b, order, (stage, looks, alone) = e.b, e.block, e.args
    port, stream = (e.load(order, n.offset) for n in (Order.port, Order.stream))
    refused = e.python("captured", _I64, port, stream)
    with b.if_then(e.is_("!=", refused, 0), likely=False):
        e.leave(_I64(REFUSED))
    with b.if_then(e.is_("==", e.load(order), POSTED)):
        e.python("match", ir.VoidType(), order, port, looks, alone)
    begins = b.and_(e.is_("==", e.load(order), FOUND), e.is_(">", stage, FOUND))
    with b.if_then(begins):
        status = e.python("begin", _I64, order, port, looks)
        with b.if_then(e.is_("!=", status, 0), likely=False):
            e.leave(b.sub(_I64(-1), status))
    names = Order.slot, Order.number, Order.address
    slot, number, address = (e.load(order, n.offset) for n in names)
    waits = b.and_(e.is_("!=", slot, NO_SLOT), e.is_("!=", address, 0))
    waits = b.and_(waits, e.is_("==", e.load(order), BEGUN))
    with b.if_then(b.and_(waits, e.is_(">", stage, BEGUN))):
        read, late = (b.add(e.line(port, slot), _I64(8 * n)) for n in (READ, LATE))
        found = e.look(port, read, number, looks, late)
        with b.if_then(e.is_("==", found, THERE)):
            e.store(_I64(ENDED), order)
        again = b.icmp_signed("==", e.load(late), number)
        with b.if_then(b.and_(again, e.is_("==", e.load(order), BEGUN)), likely=False):
            e.store(_I64(FOUND), order)  # so that it is launched when READY is there
    e.leave(e.load(order))


def _emit_take(module: ir.Module) -> None:
    """Emit ``take(port, ring)``: hold a ring's next envelope; return 1, or else 0."""
    e = _Fast(module, "take", 2)
    b, (port, ring) = e.b, e.args
    number, place = e.next_of(ring)
    there = b.icmp_signed("==", e.acquire(e.at(place, 0)), number)
    with b.if_then(there):
        for n in range(FIELDS):
            field = e.load(place, 8 * (n + 1))
            e.store(field, port, Port.envelope.offset + 8 * n)
        e.store(_I64(1), port, Port.held.offset)
        # The writer uses the entry again.
        b.store_atomic(number, e.at(ring, Ring.taken.offset), "release", 8)
    e.leave(b.zext(there, _I64))


def _emit_parts(module: ir.Module) -> None:
    """Emit functions for Python of what the others call.

    ``wait(port, word, value, looks)`` returns THERE if a word has at least a value,
    ARRIVED if there is an envelope, and NOTHING after so many looks. ``reclaim(port)``
    returns nothing of use.
    """
    e = _Fast(module, "wait", 4)
    e.leave(e.look(*e.args))
    e = _Fast(module, "reclaim", 1)
    e.leave(e.python("reclaim_all", _I64, *e.args))


@functools.cache
def _engine() -> Any:
    return engine_of(
        *(_emit_launch, _emit_captured, _emit_look, _emit_reclaim),
        *(_emit_expect, _emit_match, _emit_claim, _emit_begin, _emit_send),
        *(_emit_receive, _emit_take, _emit_parts),
    )


def compiled(name: str) -> Callable[..., int]:
    """Return ``send``, ``take`` and so on; see what emits it."""
    return builtin(_engine, name)


LEAST = 1 << 12
"""Bytes of the smallest room; others are twice as large, and so on."""

BLOCK_BYTES = 1 << 21
"""Bytes of the smallest block."""

_OPENS = 1 << 20  # more than there are peers: the memory stays until the process ends
_BYTE = np.dtype(np.uint8)


class Rooms:
    """The rooms of this process, by size.

    Args:
        allocator: allocates the blocks.
        words: have the rooms for the peers, and for the compiled functions.
        slots: of this process.
        copies: the stream on which new rooms are cleared. To make one then would wait
            for the GPU, where a kernel may wait for a message of this rank.

    Attributes:
        most: the bytes of blocks with one room that are kept.
    """

    def __init__(
        self,
        allocator: SymmetricMemoryAllocator,
        words: Any,
        slots: Sequence[int],
        copies: "CopyStream",
    ):
        self.most = message_limit() or DEFAULT_MESSAGE_LIMIT
        self._copies, self._allocator, self._words = copies, allocator, words
        self._rooms: dict[int, tuple[Memory, SharedHandle]] = {}
        self._unused = list(slots)
        self._free: dict[int, Any] = defaultdict(Stack)
        self._used = Stack()
        """Rooms for one message, which was received."""
        self._kept = 0  # bytes of blocks with one room
        self._leaving = 0  # blocks that are to be freed
        self._freeable: deque[tuple[Block, int]] = deque()  # those that no process uses
        on_allocation_failure(self._free_for_others)

    def stack(self, size: int) -> Any:
        """Return the rooms of a size that are free."""
        return self._free[size]

    def provide(self, size: int) -> bool:
        """Have a room of a size; return False if there are too many."""
        stack = self.stack(size)
        if not stack.free:
            self._make(size, stack)
        return bool(stack.free)

    def shrink(self) -> None:
        """Free the blocks of messages that were received, if the GPU is idle."""
        used = self._used
        while used.free:
            used.free -= 1
            slot = used.rooms[used.free]
            self._unused.append(slot)
            self._leaving += 1
            self._rooms.pop(slot)[1].cancel()  # if no receiver has opened it
        self._free_unused()

    def _free_unused(self) -> None:
        """Free such blocks that no process uses any more."""
        if not self._leaving or not loads.idle():
            return
        try:
            collect()
        finally:
            while self._freeable:
                block, number = self._freeable.popleft()
                self._words.remove(number)
                self._allocator.release(block)
                self._leaving -= 1

    def _free_for_others(self) -> None:
        """Free them after an allocation has failed, perhaps in another thread."""
        with suppress(ExchangeError):  # a later call reports it; some were freed
            self._free_unused()

    def _make(self, size: int, stack: Any) -> None:
        """Make rooms of a size, unless there are too many blocks or rooms."""
        step = size + message_copy.HEAD
        nbytes = max(step, BLOCK_BYTES)
        once = size > BLOCK_BYTES and self._kept + size > self.most
        starts = range(message_copy.HEAD, nbytes - size + 1, step)
        if len(self._unused) < len(starts) or not self._words.entries:
            return
        block = self._allocator.allocate(nbytes)
        memory = Memory(block.address, nbytes, block)
        zeros, copies = np.zeros(min(nbytes, BLOCK_BYTES), _BYTE), self._copies
        given = block.address, zeros.ctypes.data, zeros.size
        streams.copy_from_host(*given, copies.stream)  # the numbers before the rooms
        copies.settle()
        shared = share(memory.array(nbytes, _BYTE), opens=1 if once else _OPENS)
        leave_out(shared)  # the program itself has not shared it
        number = self._words.add(shared.to_bytes())
        if number is None:
            shared.cancel()
            self._allocator.release(block)
            return
        if once:
            unused = weakref.finalize(memory, self._freeable.append, (block, number))
            unused.atexit = False  # the process' end frees it
        elif size >= BLOCK_BYTES:
            self._kept += nbytes
        later = ctypes.addressof(self._used if once else stack)
        for offset in starts:
            slot = self._unused.pop()
            for word, value in ((BLOCK, number), (OFFSET, offset), (ONCE, once)):
                self._words.store(slot, word, value)
            room = 5 * (slot % ROOMS)
            self._words.port.rooms[room : room + 2] = memory.address + offset, later
            self._rooms[slot] = memory, shared
            stack.rooms[stack.free] = slot
            stack.free += 1


def size_of(nbytes: int) -> int:
    """Return the size of the room for a message; large ones are at most 1/8 larger."""
    if nbytes > 8 * BLOCK_BYTES:
        unit = 1 << nbytes.bit_length() - 4
        return -(-nbytes // unit) * unit
    return max(LEAST, 1 << (nbytes - 1).bit_length())


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

    def take(self) -> Event:
        """Return an event, to be recorded."""
        return self._events.pop() if self._events else Event()

    def event(self, stream: int) -> Event:
        """Return the end of a stream's work so far."""
        found = self.take()
        found.record(stream)
        return found

    def reuse(self, event: Event) -> None:
        """Take back an event that no caller will query any more."""
        self._events.append(event)

    def settle(self) -> None:
        """Wait for all copies."""
        streams.synchronize(self.stream)

    def close(self) -> None:
        """Wait for all copies; there are none later."""
        self.settle()
        self._side.close()
        self.stream = self._side.stream  # which is none of ours: the end settles all


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
