"""The compiled function that makes a packed call: from the guard to the last event.

A call whose arguments were checked before passes from Python to the driver here: it
admits one thread, looks for a failure, orders the streams, records the call, and
enqueues its steps, or the graph that was made of them (``enqueueing.py``). LLVM
compiles the function once in a process from what ``_Emitter`` emits, through llvmlite,
with which Numba compiles, too. In Python, the same would take several microseconds.

The function finds its communicator in a :class:`Gate`, and calls the driver through
addresses there: on a GPU those of libcuda, in the simulator those of Python functions.
Whatever is not plain is left to Python: a status tells what.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from numba_symm import environment
from numba_symm.gpu.compiled import ANY as _ANY
from numba_symm.gpu.compiled import I32 as _I32
from numba_symm.gpu.compiled import I64 as _I64
from numba_symm.gpu.compiled import (
    WHERE,
    WORD,
    Builtin,
    Config,
    Emitter,
    address,
    addresses,
    builtin,
    definition,
    engine_of,
    new_function,
    struct,
)

DONE, SLOW, BUSY = 0, -1, -2
"""Statuses: enqueued; or nothing was done, because the call is not plain, or another
thread is in a call."""

UNKNOWN, CAPTURED, GRAPH, STEPS = -3, -4, -5, -6
"""Statuses of a call that was admitted, and that Python goes on with: the record lacks
its text or its stream; the stream is being captured; it is time to make its graph; a
plain call has steps of Python. Nothing was enqueued or recorded."""

RESUME = -16
"""RESUME - n: Python does step n, and calls the function again for the rest.

A status above 0 is the driver's, plus 65536 times the index in ``WHERE`` of what has
failed. Nothing was enqueued after that.
"""

PLAIN, CHECKED, FIRST = 0, 1, 2
"""Modes: a plain call; a call that Python has checked; FIRST + n: the steps from n on,
without an order of streams, a record and an event."""

LAUNCH, COPY, FILL, PYTHON = range(4)
"""Kinds of steps. Their arguments: configuration, function, parameters; target, source,
bytes; address, 4 bytes; none."""

LEGACY, NO_CALL = -1, -2
"""Values of ``Gate.latest``: the legacy default stream; no call was made yet."""

CLOSED, GROUPED, DEBUG, MARKED = 1, 2, 4, 8
"""Bits of ``Gate.slow``: why no call is plain."""

NEVER = 0
"""A value of ``Head.countdown``: no graph is made of the call."""

_STREAMS = 8  # places for streams in a record; a power of two


Book = struct(
    "Book",
    number=WORD,  # of this rank's last call
    chain=WORD,  # of digests
    other=WORD,  # how many calls are not compared
    calls=WORD,  # address of the ring of calls
    others=WORD,  # address of the ring of calls that are not compared
    streams=WORD * (2 * _STREAMS),  # handle and number, at ``place_of(handle)``
)
"""A rank's place in its record of calls; ``launch/call_records.py`` explains it."""

NO_STREAMS = [-1, 0] * _STREAMS
"""``Book.streams`` before any stream is known."""

Gate = struct(
    "Gate",
    slow=WORD,  # bits; 0: calls are plain
    thread=WORD,  # the thread in a call; 0: none
    ready=WORD,  # the thread in which the GPU was last found current
    failure=WORD,  # address of the word that shows a failure of the communicator
    legacy=WORD,  # the least handle of the legacy stream; 1 is its greatest
    latest=WORD,  # the stream of the latest eager call
    event=WORD,  # recorded after that call
    book=WORD,  # address of the record's Book; 0: calls are not recorded
    driver=WORD * len(WHERE),
    scratch=WORD * 2,
)
"""What the calls of a communicator share."""

Head = struct(
    "Head",
    gate=WORD,  # address
    about=WORD,  # address of the number of its text in the record
    digest=WORD,  # 0: the call is not compared
    graph=WORD,  # an executable graph of the steps; 0: none
    countdown=WORD,  # calls until a graph is to be made; NEVER
    steps=WORD,  # how many follow
    python=WORD,  # how many of them are Python's
)
"""The beginning of a packed call. Steps of four words follow: kind, arguments."""

_STEP = 4  # words
_ENTRIES = 1024  # of a ring of the record


class _Emitter(Emitter):
    """Emits instructions that concern a gate."""

    def me(self) -> Any:
        """Return a number that no other thread has had. A thread's ident may recur."""
        state = self.python("PyThreadState_Get", _ANY)
        return self.python("PyThreadState_GetID", _I64, state)

    def reasons(self, gate: Any, me: Any) -> Any:
        """Return bits that show why a thread's call is not plain; 0: it is."""
        slow, ready = (self.load(gate, at.offset) for at in (Gate.slow, Gate.ready))
        failure = self.load(self.load(gate, Gate.failure.offset))
        return self.b.or_(self.b.or_(slow, self.b.xor(me, ready)), failure)


def _emit_note(module: ir.Module) -> None:
    """Emit ``note(book, about, digest, stream)``: store a call in the record.

    The number is the entry's first word and part of its last one, so that a reader sees
    whether it is whole.
    """
    e = _Emitter(module, "note", ir.VoidType(), *4 * [_I64])
    b, (book, about, digest, stream) = e.b, e.function.args
    clock = b.alloca(_I64, 2)
    address = b.ptrtoint(clock, _I64)
    e.python("clock_gettime", _I32, _I32(1), clock)  # CLOCK_MONOTONIC
    now = b.add(b.mul(e.load(address), _I64(10**9)), e.load(address, 8))
    rest = b.or_(about, b.shl(stream, _I64(32)))

    def store(count: str, ring: str, chain: Any) -> None:
        at = getattr(Book, count).offset
        number = b.add(e.load(book, at), _I64(1))
        place = b.shl(b.and_(number, _I64(_ENTRIES - 1)), _I64(5))
        entry = b.add(e.load(book, getattr(Book, ring).offset), place)
        words = number, now, chain, b.or_(rest, b.shl(number, _I64(48)))
        for n, word in enumerate(words):
            # Ordered for readers in other processes.
            b.store_atomic(word, e.at(entry, 8 * n), "release", 8)
        e.store(number, book, at)

    with b.if_else(e.is_("!=", digest, 0)) as (compared, other):
        with compared:
            chain = b.add(b.mul(e.load(book, Book.chain.offset), _I64(31)), digest)
            e.store(chain, book, Book.chain.offset)
            store("number", "calls", chain)
        with other:
            store("other", "others", e.load(book, Book.number.offset))
    b.ret_void()


class _Builtin(Builtin, _Emitter):
    """Emits a function for Python that concerns a gate."""


def _emit_claim(module: ir.Module) -> None:
    """Emit ``claim(gate, bits)``: admit this thread.

    It returns DONE, and sets these bits of ``Gate.slow``, or BUSY if another thread is
    in a call. Otherwise SLOW: the thread is admitted, but calls are not plain.
    """
    e = _Builtin(module, "claim", 2)
    b, (gate, bits) = e.b, e.args
    me, word = e.me(), e.at(gate, Gate.thread.offset)
    found = b.cmpxchg(word, _I64(0), me, "acquire", "monotonic")
    old = b.extract_value(found, 0)
    other = b.and_(e.is_("!=", old, 0), b.icmp_signed("!=", old, me))
    plain = e.is_("==", e.reasons(gate, me), 0)
    admitted = b.select(plain, _I64(DONE), _I64(SLOW))
    status = b.select(other, _I64(BUSY), admitted)
    with b.if_then(e.is_("==", status, DONE)):
        e.store(bits, gate, Gate.slow.offset)  # which was 0
    e.leave(status)


def _emit_others(module: ir.Module) -> None:
    """Emit functions that only Python calls, and of which only the last has a result.

    ``ready(gate)`` notes that the GPU is current in this thread. ``leave(gate, bits)``
    clears bits of ``Gate.slow``, and lets other threads in. ``noted`` calls ``note``.
    ``call(address, a, b, c)`` calls a function of the driver, which has not
    more arguments, and returns its status.
    """
    e = _Builtin(module, "ready", 1)
    e.store(e.me(), e.args[0], Gate.ready.offset)
    e.leave(_I64(DONE))
    e = _Builtin(module, "leave", 2)
    gate, bits = e.args
    rest = e.b.and_(e.load(gate, Gate.slow.offset), e.b.not_(bits))
    e.store(rest, gate, Gate.slow.offset)
    e.b.store_atomic(_I64(0), e.at(gate, Gate.thread.offset), "release", 8)
    e.leave(_I64(DONE))
    e = _Builtin(module, "noted", 4)
    e.python("note", ir.VoidType(), *e.args)
    e.leave(_I64(DONE))
    e = _Builtin(module, "call", 4)
    address, *args = e.args  # a function does not see those that it does not have
    kind = ir.FunctionType(_I32, [_I64] * len(args)).as_pointer()
    saved = e.python("PyEval_SaveThread", _ANY)  # the driver may wait
    status = e.b.call(e.b.inttoptr(address, kind), args)
    e.python("PyEval_RestoreThread", ir.VoidType(), saved)
    e.leave(e.b.zext(status, _I64))


class _Enqueue(_Emitter):
    """Emits ``enqueue(stream, mode=PLAIN) -> status``, with a packed call as self."""

    def __init__(self, module: ir.Module):
        super().__init__(module, "enqueue", _ANY, _ANY, _ANY.as_pointer(), _I64)
        b, (block, args, count) = self.b, self.function.args
        self.call = b.ptrtoint(self.python("PyByteArray_AsString", _ANY, block), _I64)
        self.stream = self.number(b.load(args))
        self.status, self.step = b.alloca(_I64), b.alloca(_I64)
        mode = b.alloca(_I64)
        b.store(_I64(DONE), self.status)
        b.store(_I64(0), self.step)
        b.store(_I64(PLAIN), mode)
        with b.if_then(self.is_(">", count, 1), likely=False):
            b.store(self.number(b.load(b.gep(args, [_I64(1)]))), mode)
        self.mode = b.load(mode)
        self.gate = self.of_call("gate")
        self._admit()
        with b.if_then(self.is_("<", self.mode, FIRST)):
            self._begin()
        with b.if_then(self.is_(">=", self.mode, FIRST), likely=False):
            b.store(b.sub(self.mode, _I64(FIRST)), self.step)
        self._enqueue()

    def of_call(self, field: str) -> Any:
        return self.load(self.call, getattr(Head, field).offset)

    def of_gate(self, field: str) -> Any:
        return self.load(self.gate, getattr(Gate, field).offset)

    def leave(self, status: int) -> None:
        """Return a status. Python goes on, if the call was admitted."""
        self.b.ret(self.python("PyLong_FromLong", _ANY, _I64(status)))

    def ok(self) -> Any:
        return self.is_("==", self.b.load(self.status), DONE)

    def driver(self, name: str, *args: Any) -> None:
        """Call a function of the driver, and note its status."""
        b, index = self.b, WHERE.index(name)
        kind = ir.FunctionType(_I32, [_I64] * len(args)).as_pointer()
        address = self.load(self.gate, Gate.driver.offset + 8 * index)
        found = b.call(b.inttoptr(address, kind), args)
        with b.if_then(b.icmp_unsigned("!=", found, _I32(0)), likely=False):
            b.store(b.add(b.zext(found, _I64), _I64(index << 16)), self.status)

    def _admit(self) -> None:
        """Refuse a call that is not plain; admit this thread, and no other one."""
        b, me = self.b, self.me()
        reasons = self.reasons(self.gate, me)
        plain = self.is_("==", self.mode, PLAIN)
        with b.if_then(b.and_(plain, self.is_("!=", reasons, 0)), likely=False):
            self.leave(SLOW)
        self.thread = self.at(self.gate, Gate.thread.offset)
        found = b.cmpxchg(self.thread, _I64(0), me, "acquire", "monotonic")
        self.before = b.extract_value(found, 0)
        other = b.icmp_signed("!=", self.before, me)
        with b.if_then(b.and_(other, self.is_("!=", self.before, 0)), likely=False):
            self.leave(BUSY)

    def _begin(self) -> None:
        """Order the streams, and record the call; nothing is enqueued before that."""
        b, stream = self.b, self.stream
        book, about = self.of_gate("book"), self.load(self.of_call("about"))
        recorded = self.is_("!=", book, 0)
        place = self._place(book, recorded)
        strange = b.icmp_signed("!=", self.load(place), stream)
        strange = b.or_(strange, self.is_("==", about, 0))
        with b.if_then(b.and_(recorded, strange), likely=False):
            self.leave(UNKNOWN)
        identity = b.alloca(_I64)
        b.store(_I64(LEGACY), identity)
        low = self.of_gate("legacy")
        past = b.icmp_unsigned(">", b.sub(stream, low), b.sub(_I64(1), low))
        with b.if_then(past):
            self._ask(identity)
        left, graph = self.of_call("countdown"), self.of_call("graph")
        counts = b.and_(self.is_("==", graph, 0), self.is_("!=", left, NEVER))
        with b.if_then(b.and_(self.ok(), counts), likely=False):
            left = b.sub(left, _I64(1))
            self.store(left, self.call, Head.countdown.offset)
            with b.if_then(self.is_("==", left, 0), likely=False):
                self.leave(GRAPH)
        # A signal's handler may raise before Python takes its first step.
        python = self.is_("!=", self.of_call("python"), 0)
        python = b.and_(python, self.is_("==", graph, 0))
        plain = self.is_("==", self.mode, PLAIN)
        with b.if_then(b.and_(b.and_(self.ok(), plain), python), likely=False):
            self.leave(STEPS)
        here, latest = b.load(identity), self.of_gate("latest")
        moved = b.icmp_signed("!=", here, latest)
        with b.if_then(b.and_(self.ok(), moved), likely=False):
            with b.if_then(self.is_("!=", latest, NO_CALL)):
                event = self.of_gate("event")
                self.driver("cuStreamWaitEvent", stream, event, _I64(0))
            self.store(here, self.gate, Gate.latest.offset)
        with b.if_then(b.and_(self.ok(), recorded)):
            digest, number = self.of_call("digest"), self.load(place, 8)
            self.python("note", ir.VoidType(), book, about, digest, number)

    def _place(self, book: Any, recorded: Any) -> Any:
        """Return the address of the stream's place in the record, if there is one."""
        b = self.b
        slot = b.lshr(b.mul(self.stream, _I64(_GOLDEN)), _I64(64 - _BITS))
        place = b.add(b.add(book, _I64(Book.streams.offset)), b.shl(slot, _I64(4)))
        anywhere = b.add(self.gate, _I64(Gate.scratch.offset))
        return b.select(recorded, place, anywhere)

    def _ask(self, identity: Any) -> None:
        """Ask for the stream's identity, unless it is being captured."""
        b = self.b
        scratch = b.add(self.gate, _I64(Gate.scratch.offset))
        self.driver("cuStreamIsCapturing", self.stream, scratch)
        found = b.icmp_signed("!=", self.load(scratch, 0, _I32), _I32(0))
        with b.if_then(b.and_(self.ok(), found), likely=False):
            self.leave(CAPTURED)
        with b.if_then(self.ok()):
            self.driver("cuStreamGetId", self.stream, scratch)
            b.store(self.load(scratch), identity)

    def _enqueue(self) -> None:
        """Enqueue the steps or their graph, then record the event."""
        b, stream = self.b, self.stream
        # The driver waits while its queue is full, perhaps for another thread's call.
        saved = self.python("PyEval_SaveThread", _ANY)
        graph = self.of_call("graph")
        whole = b.and_(self.is_("!=", graph, 0), self.is_("<", self.mode, FIRST))
        with b.if_else(b.and_(self.ok(), whole)) as (at_once, in_steps):
            with at_once:
                self.driver("cuGraphLaunch", graph, stream)
            with in_steps:
                self._loop()
        paused = self.is_("<", b.load(self.status), DONE)
        ends = b.and_(b.not_(paused), self.is_("<", self.mode, FIRST))
        with b.if_then(ends):  # also after a failure: what was enqueued precedes it
            earlier = b.load(self.status)
            self.driver("cuEventRecord", self.of_gate("event"), stream)
            with b.if_then(self.is_("!=", earlier, DONE), likely=False):
                b.store(earlier, self.status)
        self.python("PyEval_RestoreThread", ir.VoidType(), saved)
        with b.if_then(b.not_(paused)):
            plain = self.is_("==", self.mode, PLAIN)  # so no other call holds the claim
            before = b.select(plain, _I64(0), self.before)
            b.store_atomic(before, self.thread, "release", 8)
        b.ret(self.python("PyLong_FromLong", _ANY, b.load(self.status)))

    def _loop(self) -> None:
        """Enqueue the steps, up to one that has failed, or that is Python's."""
        b, stream = self.b, self.stream
        loop, body, end = (self.function.append_basic_block() for _ in range(3))
        b.branch(loop)
        b.position_at_end(loop)
        index, steps = b.load(self.step), self.of_call("steps")
        more = b.and_(self.ok(), b.icmp_signed("<", index, steps))
        b.cbranch(more, body, end)
        b.position_at_end(body)
        offset = b.mul(index, _I64(8 * _STEP))
        place = b.add(b.add(self.call, _I64(ctypes.sizeof(Head))), offset)
        kind, *words = (self.load(place, 8 * n) for n in range(_STEP))
        b.store(b.add(index, _I64(1)), self.step)
        with b.if_then(self.is_("==", kind, LAUNCH)):
            self.store(stream, words[0], Config.stream.offset)
            self.driver("cuLaunchKernelEx", *words, _I64(0))
        with b.if_then(self.is_("==", kind, COPY)):
            self.driver("cuMemcpyDtoDAsync", *words, stream)
        with b.if_then(self.is_("==", kind, FILL)):
            self.driver("cuMemsetD32Async", words[0], words[1], _I64(1), stream)
        with b.if_then(self.is_("==", kind, PYTHON)):
            b.store(b.sub(_I64(RESUME), index), self.status)
        b.branch(loop)
        b.position_at_end(end)


_BITS = (_STREAMS - 1).bit_length()
_GOLDEN = 0x9E3779B97F4A7C15


def place_of(handle: int) -> int:
    """Return the place of a stream in ``Book.streams``."""
    return 2 * ((handle * _GOLDEN & (1 << 64) - 1) >> (64 - _BITS))


@functools.cache
def _engine() -> Any:
    """Return LLVM's engine, which keeps the machine code."""
    return engine_of(_emit_note, _emit_claim, _emit_others, _Enqueue)


def compiled(name: str) -> Callable[..., int]:
    """Return ``claim``, ``leave``, ``ready``, ``noted`` or ``call``."""
    return builtin(_engine, name)


@functools.cache
def driver_function(name: str) -> Callable[[int, int, int], int]:
    """Return a function of ``WHERE``, which returns its status, 0 if it has succeeded.

    It takes integers, 0 for each of the three that the function does not have. It takes
    a tenth of the time of that of ``driver.py``.
    """
    return functools.partial(compiled("call"), address(name))


@functools.cache
def _definition() -> Any:
    return definition(_engine(), "enqueue")


Enqueue = Callable[..., int]
"""``enqueue(stream, mode=PLAIN)`` of a packed call: returns a status."""


def block_of(
    gate: Any, about: int, digest: int, steps: Sequence[tuple[int, ...]], countdown: int
) -> bytearray:
    """Return a packed call.

    Args:
        gate: the communicator's.
        about: the address of the number of its text in the record.
        digest: of what is compared; 0: nothing.
        steps: the kind of each, and its arguments.
        countdown: after how many calls a graph is made; NEVER.
    """
    python = sum(step[0] == PYTHON for step in steps)
    numbers = about, digest, 0, countdown, len(steps), python
    head = Head(ctypes.addressof(gate), *numbers)
    words = (WORD * (_STEP * len(steps)))()
    for n, step in enumerate(steps):
        words[_STEP * n : _STEP * n + len(step)] = [*step]
    return bytearray(bytes(head) + bytes(words))


def function_of(block: bytearray, owned: object) -> Enqueue:
    """Return the function of a packed call, which keeps it and what its steps need.

    The block must keep its size.
    """
    made: Enqueue = new_function(ctypes.addressof(_definition()), block, owned)
    return made


def new_gate() -> Any:
    """Return a gate through which no call passes before it has a record of failures."""
    gate = Gate(slow=CLOSED, latest=NO_CALL)
    gate.legacy = int(environment.zero_is_per_thread())
    gate.failure = ctypes.addressof(gate)  # ``slow``
    gate.driver[:] = addresses()
    return gate
