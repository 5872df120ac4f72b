"""Measures a run row by row."""

import argparse
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from numba_symm.bench import bench_operations
from numba_symm.bench.bench_operations import NO_REDUCTION, TYPES, BenchOperation, Tiled
from numba_symm.bench.contenders import Contender, Missing, attempt
from numba_symm.bench.contenders.ours import Ours
from numba_symm.bench.measure import Lane, Timer, buffers, calls_per_graph
from numba_symm.bench.options import sizes

Measurement = dict[str, Any]
"""The measurement of one way of a contender for one message, as in the JSON file."""

ALIGNMENT = 512
"""The alignment of buffers within an allocation, in bytes."""

STEP = 7_919
"""Elements of the pattern by which each buffer begins later than the one before, so
that all buffers have different contents."""


@dataclass(frozen=True)
class Row:
    """A message.

    Attributes:
        counts: elements of a rank's input and output.
        nbytes: the larger of the two in bytes, which nccl-tests calls size.
        type: the element type, by its name in nccl-tests.
        op: the reduction.
        messages: the messages of a call; counts and bytes are those of all together.
    """

    counts: tuple[int, int]
    nbytes: int
    type: str
    op: str
    messages: int = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of the elements."""
        return TYPES[self.type]

    @property
    def sides(self) -> tuple[int, int]:
        """Bytes of a rank's input and output."""
        a, b = self.counts
        return a * self.dtype.itemsize, b * self.dtype.itemsize


def rows(
    operation: BenchOperation, options: argparse.Namespace, ranks: int
) -> list[Row]:
    """Return all rows of a run: every size for every type and reduction.

    Sizes that are the same number of elements have one row.
    """
    if not operation.sized:
        return [Row(operation.shapes(1, ranks), 0, options.types[0], NO_REDUCTION)]
    found = []
    for name in options.types:
        itemsize = TYPES[name].itemsize
        for op in options.reductions:
            for size in sizes(options):
                window = options.window
                a, b = operation.shapes(max(1, size // itemsize), ranks)
                nbytes = window * max(a, b) * itemsize
                found.append(Row((window * a, window * b), nbytes, name, op, window))
    return list(dict.fromkeys(found))


def stride(nbytes: int) -> int:
    """Return the distance between the starts of buffers of ``nbytes``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Sweep:
    """Measures the rows of a run. Its methods are collective.

    Args:
        operation: the operation to measure.
        options: the command line.
        timer: times lanes.
        ranks: the mpi4py communicator.
        contenders: ours first.
    """

    def __init__(
        self,
        operation: BenchOperation,
        options: argparse.Namespace,
        timer: Timer,
        ranks: Any,
        contenders: Sequence[Contender],
    ):
        self._operation = operation
        self._options = options
        self._timer = timer
        self._ranks = ranks
        self._contenders = contenders
        self._random = np.random.default_rng(options.seed)
        self.rows = rows(operation, options, ranks.size)
        # Large enough for every row; each row uses views of it.
        room = [
            max(buffers(row.nbytes) * stride(row.sides[side]) for row in self.rows)
            for side in (0, 1)
        ]
        self._memory = {
            each.name: (each.allocate(room[0]), each.allocate(room[1]))
            for each in contenders
        }

    def measure(self, row: Row) -> list[Measurement]:
        """Return the records of one row."""
        inputs, results = self._contents(row)
        lanes, records = self._lanes(row)
        for lane in lanes:
            fill(lane, inputs)
        asked = self._options
        rounds = (asked.replays, True) if asked.eager else ()
        timings = self._timer.eager(lanes, asked.calls, asked.warmups, *rounds)
        for lane, times in zip(lanes, timings, strict=True):
            record = record_of(row, lane)
            record |= {kind: asdict(summary) for kind, summary in times.items()}
            record["wrong"] = self._wrong_eager(lane, inputs, results)
            records.append(record)
        if asked.replays and not asked.eager:
            captured = [
                (lane, record)
                for lane, record in zip(lanes, records[-len(lanes) :], strict=True)
                if not lane.eager
            ]
            self._measure_graphs(row, captured, inputs, results)
        return records

    def _measure_graphs(
        self,
        row: Row,
        captured: Sequence[tuple[Lane, Measurement]],
        inputs: Sequence[Tiled],
        results: Sequence[list[Tiled]],
    ) -> None:
        if not captured:
            return
        eager = min(record["done"]["median"] for _, record in captured)
        count = calls_per_graph(row.nbytes, self._options.calls, len(inputs), eager)
        with ExitStack() as open_graphs:
            graphs = []
            for lane, _ in captured:
                graph = self._timer.capture(lane, count)
                open_graphs.callback(graph.close)
                graphs.append(graph)
            summaries = self._timer.graphs(graphs, count, self._options.replays)
            for (lane, record), graph, summary in zip(
                captured, graphs, summaries, strict=True
            ):
                record |= {"graph": asdict(summary), "calls": count}

                wrong = self._wrong_graph(lane, graph, inputs, results)
                record["wrong"] = _sum(record["wrong"], wrong)

    def _contents(self, row: Row) -> tuple[list[Tiled], list[list[Tiled]]]:
        """Return new inputs and the expected outputs of this rank, by buffer."""
        size, operation = self._ranks.size, self._operation
        patterns = operation.inputs(self._random, size, row.op, row.dtype)
        inputs, results = [], []
        for index in range(buffers(row.nbytes)):
            everyone = [Tiled(each, index * STEP, row.counts[0]) for each in patterns]
            inputs.append(everyone[self._ranks.rank])
            results.append(operation.expected(everyone, row.op, self._ranks.rank))
        return inputs, results

    def _lanes(self, row: Row) -> tuple[list[Lane], list[Measurement]]:
        """Return the lanes of all contenders, and records of skipped ones."""
        lanes: list[Lane] = []
        skipped: list[Measurement] = []
        for contender in self._contenders:
            both = self._operation.in_place_too and not self._options.eager
            for in_place in (False, True) if both else (False,):
                found = self._ways(row, contender, in_place)
                lanes += found[0]
                skipped += found[1]
        return lanes, skipped

    def _ways(
        self, row: Row, contender: Contender, in_place: bool
    ) -> tuple[list[Lane], list[Measurement]]:
        """Return a contender's lanes, and records of skipped ones."""
        step = functools.partial(self._tried, row, contender, in_place)
        if isinstance(contender, Ours):  # its errors end the run
            return step()
        found, failure = attempt(self._ranks, step)
        if failure is not None:
            head = {"column": contender.name, "way": "", "in_place": in_place}
            return [], [head | head_of(row) | {"skipped": failure}]
        lanes, refused = found
        return lanes, refused

    def _tried(
        self, row: Row, contender: Contender, in_place: bool
    ) -> tuple[list[Lane], list[Measurement]]:
        """Return the same, after making every call once."""
        prepare = getattr(contender, self._operation.name, None)
        if prepare is None:
            raise Missing(f"{contender.name} has no {self._operation.name}")
        sources, targets = self._buffers(row, contender)
        made = []
        for source, target in zip(sources, targets, strict=True):
            out = _shaped(target, row)
            x = out if in_place else _shaped(source, row)
            made.append(prepare(x, out, row.op))
        lanes: list[Lane] = []
        refused: list[Measurement] = []
        for name, way in made[0].items():
            column = name if name in self._operation.algorithms else contender.name
            head = {"column": column, "way": name, "in_place": in_place}
            if isinstance(way, str):
                refused.append(head | head_of(row) | {"skipped": way})
                continue
            lane = Lane(
                column=column,
                way=name,
                in_place=in_place,
                output_only=in_place or way.in_place,
                eager=way.eager or not contender.captures,
                calls=[each[name].call for each in made],
                inputs=sources,
                outputs=targets,
                current=contender.current,
                launches=way.launches,
                checked=way.checked,
            )
            self._timer.once(lane)
            lanes.append(lane)
        return lanes, refused

    def _buffers(self, row: Row, contender: Contender) -> list[list[Any]]:
        """Return a row's input and output buffers, as arrays of bytes."""
        found = []
        for side, memory in enumerate(self._memory[contender.name]):
            nbytes = row.sides[side]
            starts = range(0, buffers(row.nbytes) * stride(nbytes), stride(nbytes))
            found.append([memory[first : first + nbytes] for first in starts])
        return found

    def _wrong_eager(
        self, lane: Lane, inputs: Sequence[Tiled], results: Sequence[list[Tiled]]
    ) -> int | None:
        if not (self._options.check and lane.checked):
            return None
        fill(lane, inputs)
        self._timer.once(lane)
        return self._wrong(lane, results)

    def _wrong_graph(
        self,
        lane: Lane,
        graph: Any,
        inputs: Sequence[Tiled],
        results: Sequence[list[Tiled]],
    ) -> int | None:
        """Return the number of wrong elements after a replay of the timed graph."""
        if not (self._options.check and lane.checked):
            return None
        if not lane.output_only:
            fill(lane, inputs)
            self._timer.replay(graph)
            return self._wrong(lane, results)
        # One call a buffer, because in place a buffer's calls reduce earlier results.
        single = self._timer.capture(lane, len(lane.calls))
        fill(lane, inputs)
        self._timer.replay(single)
        single.close()
        return self._wrong(lane, results)

    def _wrong(self, lane: Lane, results: Sequence[list[Tiled]]) -> int:
        """Return the number of wrong elements on all ranks."""
        pairs = zip(lane.outputs, results, strict=True)
        mine = sum(
            bench_operations.count_wrong(array, expected) for array, expected in pairs
        )
        return int(sum(self._ranks.allgather(mine)))


def fill(lane: Lane, inputs: Sequence[Tiled]) -> None:
    """Fill a lane's inputs, and poison its outputs."""
    for source, target, contents in zip(lane.inputs, lane.outputs, inputs, strict=True):
        if lane.output_only:
            bench_operations.fill(target, contents)
        else:
            bench_operations.fill(source, contents)
            bench_operations.poison(target)
    bench_operations.arrived()


def _shaped(array: Any, row: Row) -> Any:
    """Return a view of bytes as elements, with a row for each of several messages."""
    elements = array.view(row.dtype)
    if row.messages == 1:
        return elements
    return elements.reshape(row.messages, elements.size // row.messages)


def head_of(row: Row) -> Measurement:
    return {
        "bytes": row.nbytes,
        "count": row.nbytes // row.dtype.itemsize,
        "type": row.type,
        "op": row.op,
        "messages": row.messages,
    }


def record_of(row: Row, lane: Lane) -> Measurement:
    """Return a lane's record, without times."""
    head = {"column": lane.column, "way": lane.way, "in_place": lane.in_place}
    known = {"launches": list(lane.launches)} if lane.launches else {}
    return head | head_of(row) | {"buffers": len(lane.calls)} | known


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
