"""Calls of all_reduce, each with its exact result."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from numba_symm.collectives.operations import ALL_REDUCE
from tests.algorithms import takes, those
from tests.ranks.helpers import (
    Window,
    bits,
    digest,
    get,
    ordinary,
    reduced,
    same,
    values,
)

ALGORITHMS = ALL_REDUCE.algorithms
MAILED = those("all_reduce", lambda made: made.transport)
LL = those("all_reduce", lambda made: made.transport == "ll")
FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
DTYPES = tuple(np.dtype(dtype) for dtype in (*FLOATS, np.int32, np.int64))
OPS = ("sum", "prod", "min", "max")


def named(item):
    return str(item)


def a_dtype(algorithm, number):
    """Return one of the dtypes that an algorithm is for."""
    kinds = [dtype for dtype in DTYPES if takes("all_reduce", algorithm, dtype)]
    return kinds[number % len(kinds)]


@dataclass
class Case:
    """One call: arguments that are equal on all ranks, and a rank's own choices."""

    algorithm: str | None
    dtype: np.dtype
    op: str
    count: int
    place: str = "out"
    symmetric: bool = True
    symmetric_out: bool = True
    offset: int = 0
    offset_out: int = 0
    special: bool = False
    seed: int = 0

    def inputs(self, size):
        """Return every rank's input."""
        return [
            values([self.seed, rank], self.count, self.dtype, self.special)
            for rank in range(size)
        ]


class Call:
    """A case on this rank: its arrays, its call, and the check of its result."""

    def __init__(self, comm, case):
        self.comm, self.case = comm, case
        self.inputs = case.inputs(comm.size)
        self.wanted = reduced(self.inputs, case.op)
        # Every rank allocates both, whichever it uses: allocating is collective.
        own = self.inputs[comm.rank]
        self.source = self._window(case.offset, case.symmetric, own)
        self.target = self._window(case.offset_out, case.symmetric_out, own[::-1])

    def _window(self, offset, symmetric, host):
        # Of one length on all ranks, whatever a rank's offset: allocations agree.
        count, longest = self.case.count, 8 + self.case.count + Window.MARGIN
        shared = self.comm.empty(longest, self.case.dtype)
        buffer = shared if symmetric else ordinary(longest, self.case.dtype)
        window = Window(buffer[: offset + count + Window.MARGIN], offset, count)
        window.fill(host)
        return window

    def enqueue(self, op=None):
        case, x = self.case, self.source.array
        out = {"new": None, "out": self.target.array, "in place": x}[case.place]
        options = {"out": out, "algorithm": case.algorithm}
        self.result = self.comm.all_reduce(x, op=op or case.op, **options)
        assert out is None or self.result is out

    def check(self):
        """Check the result and everything around it; return its digest."""
        place, own = self.case.place, self.inputs[self.comm.rank]
        source, target = self.source.read(), self.target.read()
        if place == "new":
            assert self.result.shape == (self.case.count,)
            assert self.result.dtype == self.case.dtype
            actual, unused = get(self.result), (source, own)
        elif place == "out":
            actual, unused = target, (source, own)
        else:
            actual, unused = source, (target, own[::-1])
        assert same(actual, self.wanted), f"{actual} instead of {self.wanted}"
        assert np.array_equal(bits(unused[0]), bits(np.ascontiguousarray(unused[1])))
        return digest(actual)


def run(comm, world, cases, before=lambda step: None):
    """Enqueue all cases without waiting for any, then check all results."""
    calls = [Call(comm, case) for case in cases]
    world.barrier()
    for step, call in enumerate(calls):
        before(step)
        call.enqueue()
    comm.synchronize()
    found, wrong = [], []
    for call in calls:
        try:
            found.append(call.check())
        except (
            AssertionError
        ) as error:  # raised below on all ranks, none of which waits
            wrong.append(f"{call.case}: {error}")
    everyone = world.allgather((found, wrong))
    for rank, (_, texts) in enumerate(everyone):
        assert not texts, f"rank {rank}, {len(texts)} calls, the first: {texts[0]}"
    for rank, (other, _) in enumerate(everyone):
        differing = [cases[i] for i in range(len(cases)) if other[i] != found[i]]
        assert not differing, f"rank {rank} has other bits: {differing}"
