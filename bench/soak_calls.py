"""The calls of a soak: random ones on a communicator, each with its check.

On the GPU, a kernel fills the arrays before a call, and another one compares the result
after it. So the host waits only at the end of a round.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

import numba_symm as ns
from numba_symm.bench.calls import EnqueueOn
from numba_symm.bench.data import PERIOD, POISON, Tiled
from numba_symm.bench.operations import NO_REDUCTION, OPERATIONS, TYPES
from numba_symm.bench.shuffle import MISALIGNED
from numba_symm.bench.streams import new_stream
from numba_symm.environment import SIMULATED

CALLS, REPEATS = (4, 1) if SIMULATED else (40, 25)
"""The calls that a lane draws for a round, and how often it makes each."""

MOST = 1 << (10 if SIMULATED else 24)
"""Bytes of the longest message."""

ROOM = 4 * MOST
"""Bytes of each array that contains inputs or outputs."""

KINDS = (
    ("float", "sum"),
    ("float", "max"),
    ("bfloat16", "sum"),
    ("int32", "min"),
    ("int64", "sum"),
)
"""Types with reductions. With more, compiling would take most of the time."""

GRID, BLOCK = (1, 1) if SIMULATED else (512, 256)

_WORDS: dict[int, np.dtype[Any]] = {
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


NOT_DRAWN = "barrier", "experts", "experts_stored", "all_reduce_fp8", "rms_norm"
"""Operations without a message of any length, that some GPUs lack, or whose functions
each process compiles."""


class SoakCall(NamedTuple):
    """A call with its check.

    Attributes:
        words: describe it, for a report of wrong elements.
        operation: its name.
        stream: the number of its stream in the lane.
        enqueue: fills the arrays, makes the call and compares them, on the stream
            with the given handle.
    """

    words: str
    operation: str
    stream: int
    enqueue: EnqueueOn


class Client:
    """A communicator with two streams, and arrays for its calls. Collective.

    Args:
        comm: the communicator.
        seed: determines the calls; equal on all ranks of the communicator.
        note: called before each call or wait, with what it is.
    """

    def __init__(
        self,
        comm: ns.Communicator,
        seed: Sequence[int],
        note: Callable[[str], object] = lambda words: None,
    ):
        self.comm, self._note = comm, note
        self._random = np.random.default_rng(seed)  # the same on all ranks
        self._own = np.random.default_rng((*seed, comm.rank))
        self._streams = [new_stream() for _ in range(2)]
        # For each stream, inputs and outputs: symmetric arrays and ordinary ones.
        self._rooms = [
            [
                (comm.zeros(ROOM, np.uint8), cuda.device_array(ROOM, np.uint8))
                for _ in range(2)
            ]
            for _ in self._streams
        ]
        self._patterns: dict[Any, Any] = {}
        self._wrong = cuda.to_device(np.zeros(CALLS, np.uint32))
        self._drawn: list[SoakCall] = []
        self._graph: Any = None

    def draw(self) -> None:
        """Draw the calls of a round, make each once, and wait.

        Those of the first stream are also captured in a graph.
        """
        self._graph = None
        self._drawn = [self._call(number) for number in range(CALLS)]
        for each in self._drawn:
            self._make(each)
        self.wait()
        calls = [each.enqueue for each in self._drawn if not each.stream]
        if calls:
            self._note("a graph")
            self._graph = self._streams[0].capture(calls, lambda _: nullcontext())
            self._streams[0].launch(self._graph)  # its first launch may allocate
            self.wait()

    def _make(self, call: SoakCall) -> None:
        self._note(call.operation)
        call.enqueue(self._streams[call.stream].handle)

    @property
    def drawn(self) -> int:
        """The number of calls that :meth:`draw` makes, with those of the graph."""
        return len(self._drawn) + self._captured

    @property
    def _captured(self) -> int:
        return sum(not each.stream for each in self._drawn)

    def steps(self) -> Iterator[int]:
        """Make the calls of a round, one or a graph's a step.

        Lanes have equally many steps, because the simulator's ranks have one order.

        Yields:
            The number of calls in the step; minus that of a graph's.
        """
        indices = [*range(CALLS), -1] * REPEATS
        for index in self._random.permutation(indices):
            if index < 0 and self._graph is None:
                yield 0
            elif index < 0:
                # The communicator does not notice replays.
                first, second = self._streams
                self._note("a replay")
                first.follow(second)
                first.launch(self._graph)
                second.follow(first)
                yield -self._captured
            else:
                self._make(self._drawn[index])
                yield 1

    def clear(self) -> None:
        """Drop all arrays. The calls refer to this object, and it to them."""
        self._graph = None
        self._drawn.clear()
        self._rooms.clear()
        self._patterns.clear()

    @property
    def handle(self) -> int:
        """The handle of the first stream."""
        return int(self._streams[0].handle)

    def wait(self) -> None:
        """Wait for all calls, and raise if the communicator has failed."""
        self._note("a wait")
        for stream in self._streams:
            stream.synchronize()
        self.comm.check()

    def wrong(self) -> list[str]:
        """Describe this rank's wrong results of the round, after :meth:`wait`."""
        counts = self._wrong.copy_to_host()
        self._wrong.copy_to_device(np.zeros(CALLS, np.uint32))
        pairs = zip(counts, self._drawn, strict=True)
        return [f"{count} wrong of {each.words}" for count, each in pairs if count]

    def _call(self, number: int) -> SoakCall:
        draw, comm = self._random, self.comm
        name = str(draw.choice([each for each in OPERATIONS if each not in NOT_DRAWN]))
        operation = OPERATIONS[name]
        kinds = [
            (type_, op)
            for type_, op in KINDS
            if not operation.types or type_ in operation.types
            if not operation.reductions or op in operation.reductions
        ]
        type_, op = kinds[draw.integers(len(kinds))]
        if not operation.reductions:
            op = NO_REDUCTION
        dtype = TYPES[type_]
        nbytes = math.exp(draw.uniform(0, math.log(MOST)))
        counts = operation.shapes(max(1, int(nbytes) // dtype.itemsize), comm.size)
        stream, planned, same = (int(each) for each in draw.integers(2, size=3))
        equal = counts[0] == counts[1] and not operation.apart
        in_place = operation.in_place or (equal and bool(same))
        x, out = (
            self._view(self._rooms[stream][side], counts[side], dtype)
            for side in (0, 1)
        )
        if in_place:
            x = out
        start = int(draw.integers(PERIOD))
        key = name, type_, op
        if key not in self._patterns:
            self._patterns[key] = operation.inputs(draw, comm.size, op, dtype)
        everyone = [Tiled(each, start, counts[0]) for each in self._patterns[key]]
        expected = operation.expected(everyone, op, comm.rank)
        make = operation.plan if planned else operation.call
        call = make(comm, x, out, op, None)
        words = (
            f"{name} of {counts[0]} {type_} ({op}), {'in' if in_place else 'out of'} "
            f"place, {'planned' if planned else 'plain'}, {comm!r}"
        )
        source = x.view(_WORDS[dtype.itemsize])
        target = out.view(_WORDS[dtype.itemsize])
        given = self._on_device((*key, "input"), everyone[comm.rank])
        ones = np.full(PERIOD, POISON, np.uint8).repeat(dtype.itemsize)
        poison = self._on_device(
            ("poison", dtype.itemsize), Tiled(ones.view(target.dtype), 0, PERIOD)
        )
        # An input must stay as it is.
        wanted = [] if in_place else [(source, *given)]
        first = 0
        for index, part in enumerate(expected):
            array = target[first : first + part.count]
            wanted.append((array, *self._on_device((*key, index), part)))
            first += part.count

        def enqueue(handle: int) -> None:
            on = 0 if SIMULATED else cuda.external_stream(handle)
            if not in_place:
                _fill[GRID, BLOCK, on](target, *poison)
            _fill[GRID, BLOCK, on](source, *given)
            call(handle)
            for each in wanted:
                _compare[GRID, BLOCK, on](*each, self._wrong, number)

        return SoakCall(words, name, stream, enqueue)

    def _view(self, rooms: Any, count: int, dtype: np.dtype[Any]) -> Any:
        """Return elements anywhere in a symmetric or an ordinary array.

        Each rank draws for itself, because no peer needs to know where its arrays are.
        """
        own, nbytes = self._own, count * dtype.itemsize
        shift = int(own.integers(MISALIGNED)) * dtype.itemsize
        first = int(own.integers((ROOM - nbytes - shift) // 16)) * 16 + shift
        return rooms[own.integers(2)][first : first + nbytes].view(dtype)

    def _on_device(self, key: Any, part: Tiled) -> tuple[Any, int]:
        """Return a pattern on the GPU, and the index in it of the first element."""
        if key not in self._patterns:
            words = np.ascontiguousarray(part.pattern).view(_WORDS[part.itemsize])
            self._patterns[key] = cuda.to_device(words)
        return self._patterns[key], part.start % PERIOD


@cuda.jit  # type: ignore[untyped-decorator]
def _fill(array: Any, pattern: Any, start: Any) -> None:
    for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
        array[i] = pattern[(start + i) % PERIOD]


@cuda.jit  # type: ignore[untyped-decorator]
def _compare(array: Any, pattern: Any, start: Any, wrong: Any, number: Any) -> None:
    for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
        if array[i] != pattern[(start + i) % PERIOD]:
            cuda.atomic.add(wrong, number, 1)
