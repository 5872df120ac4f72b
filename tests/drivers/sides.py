"""The two libraries that run one program, and what they leave to chance.

A program runs first with device arrays under ``numba_symm.mpi``. That run notes what
MPI does not determine: the source that a wildcard has found, the request that was done
first, the answer of a test. Then the program runs with host arrays under mpi4py, which
repeats these choices: the wildcard becomes that source, the test a wait. All that is
left is determined by MPI. So the two runs must note the same, and a choice that MPI
does not permit ends in other bytes, another status, or a wait for ever.
"""

import random
from collections import deque

import numpy as np
from mpi4py import MPI as plain

from numba_symm.environment import message_limit

SMALL = 900  # bytes; MPI sends as many without waiting for the receiver
KINDS = ("u1", "i2", "i4", "f8", "c16")
UNTOUCHED = 0xA5  # of each byte that nothing may write


def rng(*seed):
    """Return a generator that all ranks and both runs have for a seed."""
    return random.Random(repr(seed))


def content(key, count, kind):
    """Return elements of a message: small integers, which every type has."""
    found = np.random.default_rng(list(key)).integers(0, 100, count)
    return found.astype(kind)


def untouched(count, kind):
    """Return elements of a room for a result."""
    itemsize = np.dtype(kind).itemsize
    return np.full(count * itemsize, UNTOUCHED, np.uint8).view(kind)


class Side:
    """A run of a program.

    Args:
        MPI: ``numba_symm.mpi`` or ``mpi4py.MPI``.
        comms: its communicators: of all ranks, of all in the reverse order, and again,
            for messages of host arrays.
        first: the run on the device, whose choices this one repeats; None: it is.

    Attributes:
        noted: what the runs must have in common.
        errors: the texts of errors.
        limited: whether a send may wait until another message was received.
    """

    def __init__(self, MPI, comms, first=None):
        self.MPI, self.comms = MPI, comms[:2]
        self.of_host = comms[2]
        self.on_device = first is None
        self.sources = {} if first is None else first.sources
        self._choices = deque() if first is None else deque(first._choices)
        self.noted, self.errors = [], []
        self.limited = message_limit() < 1 << 20

    def array(self, host):
        """Return an array of this side."""
        if not self.on_device:
            return host.copy()
        from numba import cuda

        return cuda.to_device(host)

    def read(self, array):
        """Return an array's contents."""
        return array.copy_to_host() if self.on_device else array.copy()

    def write(self, array, host):
        """Change an array, as its owner may."""
        if self.on_device:
            array.copy_to_device(host)
        else:
            array[:] = host

    def choose(self, ask):
        """Return what MPI does not determine: the answer, or that of the first run."""
        if self.on_device:
            self._choices.append(ask())
            return self._choices[-1]
        return self._choices.popleft()

    def note(self, *facts):
        """Note what both runs must have."""
        self.noted.append(facts)

    def refused(self, call):
        """Return the class of MPI's error that a call raises, or its kind, or None."""
        try:
            call()
        except plain.Exception as error:
            self.errors.append(str(error))
            return error.Get_error_class()
        except (ValueError, TypeError, OverflowError) as error:
            self.errors.append(str(error))
            return "refused"
        return None


def difference(first, second):
    """Return where two runs differ, as text, or None."""
    for step, (one, other) in enumerate(zip(first.noted, second.noted, strict=False)):
        if one != other:
            texts = shortened(one, other), shortened(other, one)
            return "step {}:\n  numba_symm {}\n  mpi4py     {}".format(step, *texts)
    if len(first.noted) != len(second.noted):
        return f"{len(first.noted)} steps, and {len(second.noted)} with mpi4py"
    return None


def shortened(facts, others):
    """Return facts as text; of bytes, where they begin to differ from others."""

    def text(one, other):
        if not isinstance(one, bytes) or not isinstance(other, bytes):
            return repr(one)
        pairs = enumerate(zip(one, other, strict=False))
        place = next((at for at, (a, b) in pairs if a != b), None)
        at = max(0, (place or 0) - 8)
        return f"{len(one)} bytes, differ at {place}, from {at}: {one[at:][:32].hex()}"

    return ", ".join(map(text, facts, [*others, *facts[len(others) :]]))


# Where the elements of a message are.


def _shapes(basic, unit):
    """Return derived types of as many elements, the same for both runs."""
    return [
        basic.Create_contiguous(unit),
        basic.Create_vector(unit, 1, 2),
        basic.Create_vector(1, unit, unit),
        basic.Create_indexed([1] * unit, [3 * (unit - 1 - i) for i in range(unit)]),
        basic.Create_indexed_block(1, [2 * i + 1 for i in range(unit)]),
        basic.Create_vector(unit, 1, 3).Create_resized(0, 4 * unit * basic.size),
        basic.Create_subarray([unit + 2, 3], [unit, 1], [1, 1]),
        basic.Create_struct([unit], [basic.size], [basic]),
    ]


_made = {}


def shapes(basic, unit):
    """Return derived types, made at the first use."""
    key = basic.name, unit
    if key not in _made:
        _made[key] = [each.Commit() for each in _shapes(basic, unit)]
    return _made[key]


class Layout:
    """How an argument names elements of an array: all of it, a range, a derived type.

    Args:
        draw: the generator.
        count: the number of elements, a multiple of ``unit``.
        kind: the element's dtype.
        unit: the elements of a derived type.
        derived: whether it may be one.
        blocks: the parts of these elements, of each of which a call names the items.
    """

    def __init__(self, draw, count, kind, unit=1, derived=True, blocks=1):
        self.count, self.kind, self._blocks = count, kind, blocks
        self.basic = plain.Datatype.fromcode(np.dtype(kind).char)
        self.datatype, self.items, self.displ = self.basic, count, 0
        self._form = draw.choice(["whole", "count", "typed", "displ", "displ"])
        if derived and draw.random() < 0.4:
            self.datatype = draw.choice(shapes(self.basic, unit))
            self.items = count // unit
            self._form = draw.choice(["typed", "displ"])
        if self._form == "displ":
            self.displ = draw.randrange(4)
        self.room = self._end() + (0 if self._form == "whole" else draw.randrange(6))

    def _end(self):
        """Return how many elements the array needs."""
        itemsize = np.dtype(self.kind).itemsize
        extent = self.datatype.Get_extent()[1]
        low, true = self.datatype.Get_true_extent()
        end = self.displ * extent
        if self.items:
            end += max(0, (self.items - 1) * extent + low + true)
        return -(-end // itemsize)

    def widen(self, more):
        """Let the array be longer than the argument tells."""
        self.room += more
        self._form = "count" if self._form == "whole" else self._form

    def spec(self, array):
        """Return the argument of a call."""
        items = self.items // self._blocks
        return {
            "whole": array,
            "count": [array, items],
            "typed": [array, items, self.datatype],
            "displ": [array, (items, self.displ), self.datatype],
        }[self._form]
