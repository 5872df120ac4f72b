"""The compiled function of calls with a driver of Python functions."""

import contextlib
import ctypes
from types import SimpleNamespace

from numba_symm.collectives import enqueueing
from numba_symm.gpu import compiled, entry


class Table:
    """Stands for the driver that packed calls call.

    Args:
        functions: by the driver's name, takes the driver's arguments as integers and
            returns its status or None; other functions do nothing.
    """

    def __init__(self, **functions):
        self._kept = [
            _function(functions.get(name), count)
            for name, count in zip(compiled.WHERE, compiled.ARGUMENTS, strict=True)
        ]
        self.addresses = [compiled.address_of(each) for each in self._kept]


def _function(function, arguments):
    def call(*args):
        return function(*args) or 0 if function else 0

    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * arguments)(call)


def answered(address, value, kind=ctypes.c_int64):
    """Store what a function of the driver answers."""
    kind.from_address(address).value = value


@contextlib.contextmanager
def intercepted(comm, name, act):
    """Call ``act()`` before each call of a function of the driver by packed calls.

    If it raises, the function is not called.
    """
    addresses, at = comm._calls.enqueuer.gate.driver, compiled.WHERE.index(name)
    kinds = [ctypes.c_int, *[ctypes.c_int64] * compiled.ARGUMENTS[at]]
    real = ctypes.CFUNCTYPE(*kinds)(addresses[at])
    status = []

    def call(*args):
        act()
        status.append(real(*args))

    own = compiled.callback(call, len(kinds) - 1)
    before, addresses[at] = addresses[at], compiled.address_of(own)
    try:
        yield
    finally:
        addresses[at] = before
    assert not any(status)


class Board:
    """A status board with a failure word, and without a record."""

    def __init__(self):
        self.record = None
        self.failed = ctypes.c_int64(0)

    def open(self, gate):
        gate.failure = ctypes.addressof(self.failed)
        if self.record is not None:
            gate.book = ctypes.addressof(self.record.book)
        gate.slow &= ~entry.CLOSED
        gate.kept = self


def gate(monkeypatch, **functions):
    """Return an open gate of this thread, and its board."""
    table = Table(**functions)
    monkeypatch.setattr(enqueueing, "places", lambda: None)
    monkeypatch.setattr(entry, "addresses", lambda: table.addresses)
    made, board = entry.new_gate(), Board()
    board.open(made)
    made.table = table
    entry.compiled("ready")(ctypes.addressof(made))
    return SimpleNamespace(gate=made, board=board)
