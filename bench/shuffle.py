"""Random calls: sizes, types, reductions and algorithms are drawn for each.

The host enqueues a batch without waiting between the calls. Hosts do not synchronize
with each other, so a rank may begin its next batch while a peer checks the last one.
Each call has its own buffers, so that every result can be checked.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_symm.bench import data
from numba_symm.bench.calls import EnqueueOn
from numba_symm.bench.data import PERIOD
from numba_symm.bench.operations import TYPES, BenchOperation, Contents
from numba_symm.bench.sweep import stride
from numba_symm.collectives.communicator import Communicator
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError

BATCH = 8 if SIMULATED else 64
"""The most calls that the host enqueues before it waits."""

ROOM = (1 if SIMULATED else 256) << 20
"""Bytes for the inputs of a batch, unless a single message needs more."""

MISALIGNED = 4
"""Arrays begin fewer than this many elements after an aligned address."""


@dataclass(frozen=True)
class Drawn:
    """A call with random arguments, equal on all ranks.

    Attributes:
        counts: elements of a rank's input and output.
        type: of the elements, by its name in nccl-tests.
        op: the reduction.
        in_place: whether input and output are the same array.
        planned: whether a plan makes the call, instead of a plain call.
        algorithm: its name, or None for the one chosen by size.
        shifts: distance of input and output from an aligned address, in elements.
        start: index in the pattern of the input's first element.
    """

    counts: tuple[int, int]
    type: str
    op: str
    in_place: bool
    planned: bool
    algorithm: str | None
    shifts: tuple[int, int]
    start: int

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return int(TYPES[self.type].itemsize)

    @property
    def needs(self) -> tuple[int, int]:
        """Bytes of the input buffer and of the output buffer."""
        a, b = (
            stride((count + shift) * self.itemsize)
            for count, shift in zip(self.counts, self.shifts, strict=True)
        )
        return a, b

    def __str__(self) -> str:
        place = "in place" if self.in_place else "out of place"
        how = "planned" if self.planned else "plain"
        which = self.algorithm or "chosen by size"
        return f"{max(self.counts)} {self.type} {self.op} {place}, {how}, {which}"


class Shuffle:
    """Makes random calls of one operation and checks every result.

    Args:
        comm: our communicator.
        stream: a stream of :mod:`numba_symm.bench.streams`.
        operation: the operation to call.
        options: the command line.
        allocate: returns a new array of a number of bytes. Collective.
    """

    def __init__(
        self,
        comm: Communicator,
        stream: Any,
        operation: BenchOperation,
        options: argparse.Namespace,
        allocate: Callable[[int], Any],
    ):
        self._comm = comm
        self._stream = stream
        self._operation = operation
        self._options = options
        self._random = np.random.default_rng(options.seed)
        self._algorithms = (None, *(options.algorithms or operation.algorithms))
        self._contents = Contents(self._random, comm)
        largest = max(
            max(operation.shapes(options.last // itemsize + MISALIGNED, comm.size))
            * itemsize
            for itemsize in (TYPES[name].itemsize for name in options.types)
        )
        self._room = max(ROOM, stride(largest))
        self._memory = allocate(self._room), allocate(self._room)

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        """Yield for each batch the number of calls and this rank's wrong results."""
        left = self._options.shuffle
        following = self._draw()
        while left:
            batch: list[Drawn] = []
            while len(batch) < min(BATCH, left) and self._fits([*batch, following]):
                batch.append(following)
                following = self._draw()
            left -= len(batch)
            yield len(batch), self._run(batch)

    def _draw(self) -> Drawn:
        random, options = self._random, self._options
        type_ = str(random.choice(options.types))
        least, most = math.log(options.first), math.log(options.last)
        nbytes = round(math.exp(random.uniform(least, most)))
        count = max(1, nbytes // TYPES[type_].itemsize)
        shifts = random.integers(0, 1 if self._operation.aligned else MISALIGNED, 2)
        counts = self._operation.shapes(count, self._comm.size)
        either = counts[0] == counts[1] and not self._operation.apart
        return Drawn(
            counts=counts,
            type=type_,
            op=str(random.choice(options.reductions)),
            in_place=self._operation.in_place or (either and bool(random.integers(2))),
            planned=bool(random.integers(2)),
            algorithm=self._algorithms[random.integers(len(self._algorithms))],
            shifts=(int(shifts[0]), int(shifts[1])),
            start=int(random.integers(PERIOD)),
        )

    def _fits(self, batch: Sequence[Drawn]) -> bool:
        totals = (
            sum(side) for side in zip(*(each.needs for each in batch), strict=True)
        )
        return all(total <= self._room for total in totals)

    def _run(self, batch: Sequence[Drawn]) -> list[str]:
        """Enqueue a batch, wait, and describe the calls whose results are wrong."""
        calls, checks = [], []
        starts = [0, 0]
        for drawn in batch:
            source, target = (self._view(drawn, side, starts[side]) for side in (0, 1))
            starts = [a + b for a, b in zip(starts, drawn.needs, strict=True)]
            given = drawn.type, drawn.op, drawn.counts[0], drawn.start
            contents, expected = self._contents.of(self._operation, *given)
            if drawn.in_place:
                source = target
            else:
                data.poison(target)
            data.fill(source, contents)
            calls.append(self._call(drawn, source, target))
            checks.append((drawn, target, expected))
        data.arrived()
        for call in calls:
            call(self._stream.handle)
        self._stream.synchronize()
        self._comm.check()
        wrong = ((drawn, data.count_wrong(*check)) for drawn, *check in checks)
        return [f"{count} wrong of {drawn}" for drawn, count in wrong if count]

    def _view(self, drawn: Drawn, side: int, start: int) -> Any:
        first = start + drawn.shifts[side] * drawn.itemsize
        return self._memory[side][first : first + drawn.counts[side] * drawn.itemsize]

    def _call(self, drawn: Drawn, source: Any, target: Any) -> EnqueueOn:
        dtype = TYPES[drawn.type]
        out = target.view(dtype)
        x = out if source is target else source.view(dtype)
        make = self._operation.plan if drawn.planned else self._operation.call
        try:
            # A plan refuses its arguments here; a plain call would refuse them later.
            self._operation.plan(self._comm, x, out, drawn.op, drawn.algorithm)
        except ArgumentError:  # this algorithm does not support the dtype
            return make(self._comm, x, out, drawn.op, None)
        return make(self._comm, x, out, drawn.op, drawn.algorithm)
