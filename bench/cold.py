"""What a program's first calls cost, where kernels are compiled or loaded.

The ranks share a kernel cache, which is new and empty unless ``--cache`` names one.
Every process loads each kernel once, so a second run with the same ``--cache`` shows
the cost of loading without compiling.
"""

import argparse
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numba_symm.bench import data
from numba_symm.bench.operations import (
    NO_REDUCTION,
    OPERATIONS,
    TYPES,
    BenchOperation,
    Contents,
)
from numba_symm.bench.report import Record, table, verdict
from numba_symm.bench.sweep import stride
from numba_symm.collectives.communicator import Communicator

CALLS = 400

NAMES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    *("reduce", "scan", "gather", "scatter", "sendrecv"),
)
"""The operations of the calls."""

SLOW = 50.0
"""Milliseconds above which a call is counted as slow."""

MULTIPLE = 256
"""Sizes are multiples of so many bytes, as large arrays usually are."""

VARIABLE = "XDG_CACHE_HOME"


@contextmanager
def kernel_cache(folder: Path | None, ranks: Any) -> Iterator[str]:
    """Keep compiled kernels in a folder, for all ranks of this node. Collective.

    Args:
        folder: the folder; None: a new one, which is deleted at the end.
        ranks: the mpi4py communicator.

    Yields:
        A description of the cache.
    """
    before = os.environ.get(VARIABLE)
    files = sum(each.is_file() for each in folder.rglob("*")) if folder else 0
    with ExitStack() as kept:
        if folder is None and ranks.rank == 0:
            new = tempfile.TemporaryDirectory(prefix="numba-symm-cold-")
            folder = Path(kept.enter_context(new))
        os.environ[VARIABLE] = str(ranks.bcast(folder))
        try:
            yield f"files at the start: {files}"
            ranks.Barrier()  # all ranks have stored their kernels
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


class First(NamedTuple):
    """The milliseconds of the first call, which begins when the communicator is made.

    Attributes:
        construction: until the communicator was made.
        arrays: from then on until the arrays were allocated.
        call: from then on until the call returned.
        kernel: from then on until the result was complete.
    """

    construction: float
    arrays: float
    call: float
    kernel: float

    @property
    def total(self) -> float:
        """From the communicator to the end of the call."""
        return self.arrays + self.call + self.kernel


def first_call(
    operation: BenchOperation,
    options: argparse.Namespace,
    comm: Communicator,
    allocate: Callable[[int], Any],
    begun: float,
) -> First:
    """Return what this rank's first call took, of floats.

    Args:
        operation: the operation.
        options: the command line; ``first`` is the size.
        comm: our communicator.
        allocate: returns a new array of a number of bytes. Collective.
        begun: the time before ``Communicator(…)``, which has just returned.
    """
    times = [begun, time.perf_counter()]
    dtype = TYPES["float"]
    counts = operation.shapes(max(1, options.first // dtype.itemsize), comm.size)
    x, out = (allocate(count * dtype.itemsize).view(dtype) for count in counts)
    times.append(time.perf_counter())
    operation.call(comm, x, out, _reduction(operation), None)(0)
    times.append(time.perf_counter())
    comm.synchronize()
    times.append(time.perf_counter())
    return First(*((b - a) * 1e3 for a, b in itertools.pairwise(times)))


@dataclass(frozen=True)
class ColdCase:
    """The arguments of one call."""

    operation: BenchOperation
    type: str
    counts: tuple[int, int]

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of the elements."""
        return TYPES[self.type]

    @property
    def sides(self) -> tuple[int, int]:
        """Bytes of the input and of the output."""
        a, b = (count * self.dtype.itemsize for count in self.counts)
        return a, b

    @property
    def facts(self) -> dict[str, Any]:
        """The call's record, without its time."""
        return {
            "operation": self.operation.name,
            "bytes": max(self.sides),
            "count": max(self.counts),
            "type": self.type,
            "op": _reduction(self.operation),
        }


def cases(options: argparse.Namespace, ranks: int) -> list[ColdCase]:
    """Return the calls: every operation and type in each size, small sizes first."""
    steps = max(1, CALLS // (len(NAMES) * len(options.types)))
    found = []
    for nbytes in _sizes(options.first, options.last, steps):
        for type_, name in itertools.product(options.types, NAMES):
            operation = OPERATIONS[name]
            count = max(1, nbytes // TYPES[type_].itemsize)
            found.append(ColdCase(operation, type_, operation.shapes(count, ranks)))
    return found


def _sizes(first: int, last: int, steps: int) -> list[int]:
    """Return sizes from the first to the last, at equal ratios."""
    found = np.geomspace(first, last, steps)
    return [math.ceil(nbytes / MULTIPLE) * MULTIPLE for nbytes in found]


def _reduction(operation: BenchOperation) -> str:
    return "sum" if operation.reductions else NO_REDUCTION


class ColdCalls:
    """Makes the calls, each for the first time. Its methods are collective.

    Args:
        options: the command line.
        comm: our communicator.
        ranks: the mpi4py communicator.
        stream: a stream of :mod:`numba_symm.bench.streams`.
        allocate: returns a new array of a number of bytes. Collective.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        comm: Communicator,
        ranks: Any,
        stream: Any,
        allocate: Callable[[int], Any],
    ):
        self._check = bool(options.check)
        self._comm = comm
        self._ranks = ranks
        self._stream = stream
        self._contents = Contents(np.random.default_rng(options.seed), comm)
        self._cases = cases(options, comm.size)
        rooms = zip(*(case.sides for case in self._cases), strict=True)
        self._memory = [allocate(stride(max(room))) for room in rooms]

    def __len__(self) -> int:
        return len(self._cases)

    def __iter__(self) -> Iterator[Record]:
        """Yield a record of each call, with the slowest rank's milliseconds."""
        for case in self._cases:
            yield case.facts | self._call(case)

    def _call(self, case: ColdCase) -> dict[str, Any]:
        pairs = zip(self._memory, case.sides, strict=True)
        source, target = (memory[:nbytes] for memory, nbytes in pairs)
        if case.operation.in_place:
            source = target
        op = _reduction(case.operation)
        given = case.operation, case.type, op, case.counts[0]
        contents, expected = self._contents.of(*given)
        data.poison(target)
        data.fill(source, contents)
        data.arrived()
        x, out = source.view(case.dtype), target.view(case.dtype)
        call = case.operation.call(self._comm, x, out, op, None)
        self._ranks.Barrier()
        start = time.perf_counter()
        call(self._stream.handle)
        self._stream.synchronize()
        milliseconds = (time.perf_counter() - start) * 1e3
        self._comm.check()
        wrong = data.count_wrong(target, expected) if self._check else 0
        everyone = self._ranks.allgather((milliseconds, wrong))
        times, wrongs = zip(*everyone, strict=True)
        total = int(sum(wrongs)) if self._check else None
        return {"milliseconds": max(times), "wrong": total}


def report(name: str, first: First, calls: Sequence[Record]) -> list[str]:
    """Return the text of a run.

    Args:
        name: the first call's operation.
        first: what it took on the slowest rank.
        calls: the records of the other calls.
    """
    titles = ("operation", "calls", "total (ms)", f"over {SLOW:.0f} ms", "slowest (ms)")
    widths = (16, 8, 14, 14, 14)
    parts = ", ".join(f"{part} {taken:.1f}" for part, taken in first._asdict().items())
    title = (
        f"# From Communicator(...) to the end of the first {name}: "
        f"{first.total:.1f} ms ({parts})"
    )
    lines = []
    for operation in dict.fromkeys(each["operation"] for each in calls):
        group = [each for each in calls if each["operation"] == operation]
        found = summary(group)
        cells = [operation, str(len(group)), f"{found['total']:.1f}"]
        lines.append([*cells, str(found["over"]), f"{found['slowest']:.1f}"])
    found = summary(calls)
    return [
        *table(title, widths, titles, lines),
        f"# {len(calls)} calls: {found['total']:.1f} ms, over {SLOW:.0f} ms: "
        f"{found['over']}",
        f"# The slowest: {found['slowest']:.1f} ms, {found['which']}",
        verdict([calls]),
    ]


def summary(calls: Sequence[Record]) -> dict[str, Any]:
    """Return the total, the slow calls' number, and the slowest call with its name."""
    slowest = max(calls, key=lambda each: float(each["milliseconds"]))
    call = "{operation} of {bytes} bytes, {type} {op}".format(**slowest)
    return {
        "total": sum(each["milliseconds"] for each in calls),
        "over": sum(each["milliseconds"] > SLOW for each in calls),
        "slowest": slowest["milliseconds"],
        "which": call,
    }
