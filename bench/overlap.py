"""Times a collective beside a matrix product: each alone, and both together.

The collective's stream has the highest priority, the product's stream the lowest. The
product is launched first, and repeated until it takes about as long as the calls. Each
time is that of the slowest rank, until the last of the graphs is done.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from numba_symm.bench.contenders import Contender
from numba_symm.bench.measure import Lane, Summary, Timer, calls_per_graph
from numba_symm.bench.operations import BenchOperation
from numba_symm.bench.product import Product
from numba_symm.bench.sweep import Measurement, Row, Sweep, fill, record_of
from numba_symm.environment import SIMULATED

CALIBRATION = 5
"""Times of a graph that determine how often the product is repeated."""

PRODUCTS = 8
"""Products in the graph whose time is that of one product, times this number."""


class Overlap(Sweep):
    """Measures the rows of a run with a product beside. Its methods are collective.

    Args:
        operation: the operation to measure.
        options: the command line.
        timer: captures lanes on the collectives' stream.
        ranks: the mpi4py communicator.
        contenders: ours first.
        product: the product.
        streams: the collectives' stream, which is the timer's, and the product's.
        barrier: enqueues a barrier of all ranks on a stream.
    """

    def __init__(
        self,
        operation: BenchOperation,
        options: argparse.Namespace,
        timer: Timer,
        ranks: Any,
        contenders: Sequence[Contender],
        product: Product,
        streams: tuple[Any, Any],
        barrier: Callable[[int], object],
    ):
        super().__init__(operation, options, timer, ranks, contenders)
        self._product = product
        self._stream, self._beside = streams
        self._barrier = barrier
        with product.current(self._beside.handle):
            product.call(self._beside.handle)  # compiles, and allocates its workspace
        self._beside.synchronize()
        self._right = product.result()
        several = self._repeated(PRODUCTS)
        self._microseconds = self._typical([(self._beside, several)]) / PRODUCTS
        several.close()

    def measure(self, row: Row) -> list[Measurement]:
        """Return the records of one row."""
        inputs, results = self._contents(row)
        lanes, records = self._lanes(row)
        captured = []
        for lane in lanes:
            if lane.way == "call":
                continue
            if SIMULATED or not lane.eager:
                captured.append(lane)
            else:
                why = {"skipped": "its calls cannot be captured"}
                records.append(record_of(row, lane) | why)
        for lane in captured:
            fill(lane, inputs)
        eager = max(self._timer.pace(lane) for lane in captured)
        options, buffers = self._options, len(inputs)
        count = calls_per_graph(row.nbytes, options.calls, buffers, eager)
        with ExitStack() as open_graphs:
            pairs, found = [], []
            for lane in captured:
                graph = self._timer.capture(lane, count)
                open_graphs.callback(graph.close)
                alone = self._typical([(self._stream, graph)])
                repeats = max(1, round(alone / self._microseconds))
                repeated = self._repeated(repeats)
                open_graphs.callback(repeated.close)
                pairs.append((graph, repeated))
                found.append({"calls": count, "products": repeats})
            times = self._times(pairs)
            for lane, pair, facts, time in zip(
                captured, pairs, found, times, strict=True
            ):
                wrong = self._wrong_together(lane, pair, inputs, results)
                records.append(record_of(row, lane) | facts | time | {"wrong": wrong})
        return records

    def _repeated(self, count: int) -> Any:
        """Return a graph of ``count`` products, replayed once."""
        product = self._product
        graph = self._beside.capture([product.call] * count, product.current)
        self._beside.replay(graph)
        return graph

    def _times(self, pairs: Sequence[tuple[Any, Any]]) -> list[Measurement]:
        """Return the summaries of each collective and its product, all interleaved."""
        replays = self._options.replays
        samples = np.empty((len(pairs), 3, replays))
        for turn in range(replays):
            for index, (graph, repeated) in enumerate(pairs):
                ours, beside = (self._stream, graph), (self._beside, repeated)
                for way, graphs in enumerate(([ours], [beside], [beside, ours])):
                    samples[index, way, turn] = self._time(graphs)
        slowest = np.max(self._ranks.allgather(samples), axis=0)
        names = ("collective", "product", "both")
        found = []
        for each in slowest:
            times = {
                name: Summary.of(values)
                for name, values in zip(names, each, strict=True)
            }
            longer = max(times["collective"].median, times["product"].median)
            ratio = times["both"].median / longer
            record = {name: asdict(summary) for name, summary in times.items()}
            found.append(record | {"both_by_longer": ratio})
        return found

    def _time(self, graphs: Sequence[tuple[Any, Any]]) -> float:
        self._ranks.Barrier()
        return float(self._stream.time_together(graphs, self._barrier))

    def _typical(self, graphs: Sequence[tuple[Any, Any]]) -> float:
        """Return the median of the slowest rank's times."""
        samples = np.array([self._time(graphs) for _ in range(CALIBRATION)])
        slowest = np.max(self._ranks.allgather(samples), axis=0)
        return float(np.median(slowest))

    def _wrong_together(
        self,
        lane: Lane,
        pair: tuple[Any, Any],
        inputs: Sequence[Any],
        results: Sequence[Any],
    ) -> int | None:
        """Return the wrong elements of both results, after both ran together."""
        if not (self._options.check and lane.checked):
            return None
        graph, repeated = pair
        with ExitStack() as open_graphs:
            if lane.output_only:  # a buffer's calls would reduce each other's results
                graph = self._timer.capture(lane, len(lane.calls))
                open_graphs.callback(graph.close)
            self._product.clear()
            fill(lane, inputs)
            self._time([(self._beside, repeated), (self._stream, graph)])
            self._stream.synchronize()
            self._beside.synchronize()
        wrong = int(np.count_nonzero(self._product.result() != self._right))
        return self._wrong(lane, results) + int(sum(self._ranks.allgather(wrong)))
