"""Make random calls for minutes, on communicators side by side, and check each.

    numba-symm run -n 4 -m numba_symm.bench.soak --seconds 600

A *lane* is a communicator with two streams. In each round, every lane draws calls, the
same on all its ranks, and makes each once. So all kernels are loaded before the lanes
run side by side, because loading may wait for calls that wait for this rank. Then each
rank makes the calls of all lanes many times, in an order of its own. Products, pauses
and replays of a graph are between them. The host waits only at the end of a round. On
the GPU, a kernel fills the arrays before a call, and another one compares the result
after it.
"""

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm.bench import options
from numba_symm.bench.calls import EnqueueOn
from numba_symm.bench.data import PERIOD, POISON, Tiled
from numba_symm.bench.operations import NO_REDUCTION, OPERATIONS, TYPES
from numba_symm.bench.product import Product, new_product
from numba_symm.bench.shuffle import MISALIGNED
from numba_symm.bench.streams import new_stream
from numba_symm.environment import SIMULATED

CALLS, REPEATS = (4, 1) if SIMULATED else (40, 25)
"""The calls that a lane draws for a round, and how often it makes each."""

MOST = 1 << (10 if SIMULATED else 24)
"""Bytes of the longest message."""

ROOM = 4 * MOST
"""Bytes of each array that contains inputs or outputs."""

PRODUCTS, PAUSES = 0.1, 0.02
"""The probabilities of a product, and of a pause of the host, before a call."""

LONGEST_PAUSE = 1e-3  # seconds

_SHOWN = 5  # seconds between two lines of the output

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


NOT_DRAWN = "barrier", "experts", "experts_stored"
"""Operations without a message of any length and dtype."""


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
    """

    def __init__(self, comm: ns.Communicator, seed: Sequence[int]):
        self.comm = comm
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
            each.enqueue(self._streams[each.stream].handle)
        self.wait()
        calls = [each.enqueue for each in self._drawn if not each.stream]
        if calls:
            self._graph = self._streams[0].capture(calls, lambda _: nullcontext())
            self._streams[0].launch(self._graph)  # its first launch may allocate
            self.wait()

    def steps(self) -> Iterator[list[str]]:
        """Make the calls of a round, one or the graph's a step; yield their names.

        Lanes have equally many steps, because the simulator's ranks have one order.
        """
        indices = [*range(CALLS), -1] * REPEATS
        for index in self._random.permutation(indices):
            if index < 0 and self._graph is None:
                yield []
            elif index < 0:
                # The communicator does not notice replays.
                first, second = self._streams
                first.follow(second)
                first.launch(self._graph)
                second.follow(first)
                yield [each.operation for each in self._drawn if not each.stream]
            else:
                each = self._drawn[index]
                each.enqueue(self._streams[each.stream].handle)
                yield [each.operation]

    @property
    def handle(self) -> int:
        """The handle of the first stream."""
        return int(self._streams[0].handle)

    def wait(self) -> None:
        """Wait for all calls, and raise if the communicator has failed."""
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
        type_, op = KINDS[draw.integers(len(KINDS))]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Make calls until the time is over. Collective. Return the exit code."""
    world = MPI.COMM_WORLD
    asked = options.same_on_all(world, lambda: _parser().parse_args(argv))
    with ExitStack() as stack:
        lanes = list(_lanes(world, asked.seed, stack))
        product = new_product(lanes[0].comm.device.ordinal, 0)
        for lane in lanes:  # the first product on a stream allocates
            with product.current(lane.handle):
                product.call(lane.handle)
            lane.wait()
        # The simulator's calls return when they are done, so all ranks have one order.
        order = random.Random(
            asked.seed if SIMULATED else (asked.seed << 16) + world.rank
        )
        made: Counter[str] = Counter()
        wrong, rounds, shown, begun = 0, 0, 0.0, time.monotonic()
        more = True
        while more:
            rounds += 1
            for lane in lanes:
                lane.draw()
            with cuda.defer_cleanup():  # freeing waits for calls that wait for others
                made.update(_made(lanes, product, order))
                for lane in lanes:
                    lane.wait()
            found = world.allgather([words for lane in lanes for words in lane.wrong()])
            for rank, each in enumerate(found):
                wrong += len(each)
                for what in each if world.rank == 0 else []:
                    print(f"rank {rank}, round {rounds}: {what}", flush=True)
            seconds = time.monotonic() - begun
            more = world.bcast(seconds < asked.seconds)
            if world.rank == 0 and (not more or seconds - shown > _SHOWN):
                shown = seconds
                words = f"{made.total()} calls of rank 0, wrong {wrong}"
                print(f"{seconds:.0f} s: {rounds} rounds, {words}", flush=True)
    if world.rank == 0:
        print(", ".join(f"{name} {number}" for name, number in sorted(made.items())))
    return int(wrong > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m numba_symm.bench.soak",
        description="Make random calls on four communicators, and check every result.",
        allow_abbrev=False,
    )
    number: dict[str, Any] = {"metavar": "N", "type": options.at_least(0)}
    seconds = "for how long it begins rounds (default 600)"
    parser.add_argument("--seconds", default=600, help=seconds, **number)
    seed = "determines the calls (default 0)"
    parser.add_argument("--seed", default=0, help=seed, **number)
    return parser


def _lanes(world: Any, seed: int, stack: ExitStack) -> Iterator[Client]:
    """Make the lanes: twice all ranks, then parts of them, if these are two or more."""
    comm = stack.enter_context(ns.Communicator(world))
    rank, size = comm.rank, comm.size
    colors = [0, 0, 0, 0]
    if size > 3:
        colors[2:] = rank % 2, min(rank // 2, size // 2 - 1)
    for number, color in enumerate(colors):
        part = comm.split(color) if number else comm
        assert part is not None  # no rank is left out
        yield Client(
            stack.enter_context(part) if number else part, (seed, number, color)
        )


def _made(
    lanes: Sequence[Client], product: Product, order: random.Random
) -> Iterator[str]:
    """Make the lanes' calls of a round in a random order, and yield their names."""
    left = {lane: lane.steps() for lane in lanes}
    while left:
        lane = order.choice([*left])
        if order.random() < PRODUCTS:
            with product.current(lane.handle):
                product.call(lane.handle)
        if order.random() < PAUSES:
            time.sleep(order.uniform(0, LONGEST_PAUSE))
        names = next(left[lane], None)
        if names is None:
            del left[lane]
        else:
            yield from names


if __name__ == "__main__":
    sys.exit(main())
