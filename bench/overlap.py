"""Times a collective beside a matrix product: each alone, and both together.

The product is torch's, or a kernel of our own. CuPy's products are not used: CuPy
refuses calls of cuBLAS in a capture (cupy#6290). The elements are -1, 0 and 1, so the
result is exact in any order of additions.

The collective's stream has the highest priority, the product's stream the lowest. The
product is launched first, and repeated until it takes about as long as the calls. Each
time is that of the slowest rank, until the last of the graphs is done.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numba import cuda

from numba_symm.bench.bench_operations import BenchOperation
from numba_symm.bench.contenders import Contender
from numba_symm.bench.measure import Lane, Summary, Timer, calls_per_graph
from numba_symm.bench.options import torch_multiplies
from numba_symm.bench.sweep import Measurement, Row, Sweep, fill, record_of
from numba_symm.environment import SIMULATED

ROWS, INNER = (4, 4) if SIMULATED else (1024, 256)
"""Rows of the left matrix, and its columns, for our kernel."""

BLOCK = 2 if SIMULATED else 16
"""Threads of our kernel's blocks, in each direction."""


class Product(Protocol):
    """A matrix product.

    Attributes:
        name: for the header.
    """

    name: str

    def call(self, stream: int) -> None:
        """Enqueue it on the stream with the given handle."""

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context that makes a stream current, for libraries that need it."""

    def clear(self) -> None:
        """Fill the result with zeros, and wait."""

    def result(self) -> np.ndarray[Any, Any]:
        """Return the bits of the result."""


def new_product(ordinal: int, side: int = 4096) -> Product:
    """Return torch's product if torch is installed, otherwise our kernel's.

    Args:
        ordinal: the number of the current GPU.
        side: rows and columns of torch's matrices.
    """
    return TorchProduct(ordinal, side) if torch_multiplies() else OwnProduct()


def _ternary(rows: int, columns: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(rows)
    return random.integers(-1, 1, (rows, columns), endpoint=True).astype(np.float32)


class TorchProduct:
    """torch's product of square matrices of bfloat16, on tensor cores."""

    def __init__(self, ordinal: int, side: int):
        import torch

        self._torch = torch
        self._device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._device)
        matrix = torch.from_numpy(_ternary(side, side))
        self._a = matrix.to(self._device, torch.bfloat16)
        self._b = self._a.clone()
        self._c = torch.zeros_like(self._a)
        torch.cuda.synchronize()
        self.name = f"{side} x {side} bfloat16, torch {torch.__version__}"

    def call(self, stream: int) -> None:
        """Enqueue it on the current stream."""
        self._torch.mm(self._a, self._b, out=self._c)

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context that makes a stream torch's current one."""
        cuda = self._torch.cuda
        context: AbstractContextManager[Any] = cuda.stream(
            cuda.ExternalStream(stream, device=self._device)
        )
        return context

    def clear(self) -> None:
        """Fill the result with zeros, and wait."""
        self._c.zero_()
        self._torch.cuda.synchronize()

    def result(self) -> np.ndarray[Any, Any]:
        """Return the bits of the result."""
        bits: np.ndarray[Any, Any] = self._c.view(self._torch.int16).cpu().numpy()
        return bits


class OwnProduct:
    """A product of matrices of float32, by a kernel with a thread for each element."""

    def __init__(self) -> None:
        matrix = _ternary(ROWS, INNER)
        self._a = cuda.to_device(matrix)
        self._b = cuda.to_device(np.ascontiguousarray(matrix.T))
        self._c = cuda.to_device(np.zeros((ROWS, ROWS), np.float32))
        self.name = f"{ROWS} x {INNER} x {ROWS} float32, a kernel of the benchmark"

    def call(self, stream: int) -> None:
        """Enqueue it on the stream with the given handle."""
        blocks = (ROWS // BLOCK,) * 2
        on = 0 if SIMULATED else cuda.external_stream(stream)
        _multiply[blocks, (BLOCK, BLOCK), on](self._a, self._b, self._c)

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return nullcontext()

    def clear(self) -> None:
        """Fill the result with zeros, and wait."""
        self._c.copy_to_device(np.zeros((ROWS, ROWS), np.float32))
        cuda.synchronize()

    def result(self) -> np.ndarray[Any, Any]:
        """Return the bits of the result."""
        bits: np.ndarray[Any, Any] = self._c.copy_to_host().view(np.uint32)
        return bits


@cuda.jit  # type: ignore[untyped-decorator]
def _multiply(a: Any, b: Any, c: Any) -> None:
    column, row = cuda.grid(2)
    total = np.float32(0)
    for k in range(a.shape[1]):
        total += a[row, k] * b[k, column]
    c[row, column] = total


CALIBRATION = 5
"""Times of a graph that determine how often the product is repeated."""

PRODUCTS = 8
"""Products in the graph whose time is that of one product, times this number."""


LONGER = 3
"""How much longer than the calls the products take: programs compute most of the time.
"""


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
            graphs = [self._timer.capture(lane, count) for lane in captured]
            for graph in graphs:
                open_graphs.callback(graph.close)
            ours = self._typical([(self._stream, graphs[0])])
            repeats = max(1, round(LONGER * ours / self._microseconds))
            repeated = self._repeated(repeats)
            open_graphs.callback(repeated.close)
            facts = {"calls": count, "products": repeats}
            times = self._times(graphs, repeated)
            for lane, graph, time in zip(captured, graphs, times, strict=True):
                pair = graph, repeated
                wrong = self._wrong_together(lane, pair, inputs, results)
                records.append(record_of(row, lane) | facts | time | {"wrong": wrong})
        return records

    def _repeated(self, count: int) -> Any:
        """Return a graph of ``count`` products, replayed once."""
        product = self._product
        graph = self._beside.capture([product.call] * count, product.current)
        self._beside.replay(graph)
        return graph

    def _times(self, graphs: Sequence[Any], repeated: Any) -> list[Measurement]:
        """Return the summaries of each collective and the products, all interleaved."""
        replays = self._options.replays
        samples = np.empty((len(graphs), 4, replays))
        for turn in range(replays):
            for index, graph in enumerate(graphs):
                ours, beside = (self._stream, graph), (self._beside, repeated)
                ways = [ours], [beside], [ours, beside], [beside, ours]
                for way, together in enumerate(ways):
                    samples[index, way, turn] = self._time(together)
        slowest = np.max(self._ranks.allgather(samples), axis=0)
        names = ("collective", "product", "calls_first", "products_first")
        alone, found = Summary.of(slowest[:, 1].ravel()), []
        for each in slowest:
            times = {
                name: Summary.of(values)
                for name, values in zip(names, each, strict=True)
            }
            times["product"] = alone
            slower = max(times[name].median for name in names[2:])
            ratio = slower / alone.median
            record = {name: asdict(summary) for name, summary in times.items()}
            found.append(record | {"by_products": ratio})
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
