"""Rings of envelopes in memory that the processes of a node share.

A ring has one writer and one reader. The compiled functions here leave no moment in
which a signal's handler could lose an envelope: one publishes, and one moves all that
have arrived to a list of Python. A third one waits for envelopes or for another word.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from numba_symm import entry
from numba_symm.driver_table import WORD, struct
from numba_symm.entry import Emitter

ENTRIES = 1024
"""Envelopes in a ring, at most; a power of two."""

FIELDS = 7
"""Words of an envelope."""

Ring = struct(
    "Ring",
    sent=WORD,  # envelopes; only the writer uses it
    unused=WORD * 7,
    taken=WORD,  # envelopes; the reader stores it
    more=WORD * 7,
    entries=WORD * (ENTRIES * (FIELDS + 1)),  # number of each, fields
)
"""The words of the writer and of the reader are on cache lines of their own."""

_I64, _ANY = ir.IntType(64), ir.IntType(8).as_pointer()
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


def _emit_publish(module: ir.Module) -> None:
    """Emit ``publish(ring, bell, bit, *fields)``: 1, or 0 if the ring is full."""
    e = _Fast(module, "publish", 3 + FIELDS)
    b, (ring, bell, bit, *fields) = e.b, e.args
    number = b.add(e.load(ring), _I64(1))
    taken = e.acquire(e.at(ring, Ring.taken.offset))
    full = b.icmp_signed(">", b.sub(number, taken), _I64(ENTRIES))
    with b.if_then(full, likely=False):
        e.leave(_I64(0))
    place = e.entry(ring, number)
    for n, field in enumerate(fields):
        e.store(field, place, 8 * (n + 1))
    e.store(number, ring)
    # After the fields, and before the bell, whose reader looks for this number.
    b.store_atomic(number, e.at(place, 0), "release", 8)
    b.atomic_rmw("or", e.at(bell, 0), bit, "release")
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
    status = e.python("PyList_Append", ir.IntType(32), found, made)
    e.python("Py_DecRef", ir.VoidType(), made)
    with b.if_then(b.icmp_signed("!=", status, ir.IntType(32)(0)), likely=False):
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


NOTHING, THERE, RINGS = range(3)
"""What ``wait`` has found."""


def _emit_wait(module: ir.Module) -> None:
    """Emit ``wait(bell, word, value, looks)``, without the interpreter's lock.

    It returns THERE if a word has a value, RINGS if the bell rings, and NOTHING after
    so many looks.
    """
    e = _Fast(module, "wait", 4)
    b, (bell, word, value, looks) = e.b, e.args
    left, found = b.alloca(_I64), b.alloca(_I64)
    b.store(looks, left)
    b.store(_I64(NOTHING), found)
    saved = e.python("PyEval_SaveThread", _ANY)
    names = "loop", "other", "again", "end"
    loop, other, again, end = map(e.function.append_basic_block, names)
    b.branch(loop)
    b.position_at_end(loop)
    there = b.icmp_signed("==", e.acquire(e.at(word, 0)), value)
    b.store(b.select(there, _I64(THERE), _I64(NOTHING)), found)
    b.cbranch(there, end, other)
    b.position_at_end(other)
    rings = b.icmp_signed("!=", e.acquire(e.at(bell, 0)), _I64(0))
    b.store(b.select(rings, _I64(RINGS), _I64(NOTHING)), found)
    b.cbranch(rings, end, again)
    b.position_at_end(again)
    rest = b.sub(b.load(left), _I64(1))
    b.store(rest, left)
    b.cbranch(e.is_(">", rest, 0), loop, end)
    b.position_at_end(end)
    e.python("PyEval_RestoreThread", ir.VoidType(), saved)
    e.leave(b.load(found))


@functools.cache
def _engine() -> Any:
    return entry.engine_of(_emit_publish, _emit_take, _emit_wait)


@functools.cache
def _definition(name: str) -> Any:
    return entry.definition(_engine(), name)


@functools.cache
def compiled(name: str) -> Callable[..., int]:
    """Return ``publish``, ``take`` or ``wait``; see what emits it."""
    made: Callable[..., int] = entry.new_function(
        ctypes.addressof(_definition(name)), None, None
    )
    return made
