"""Times calls: many in a captured graph, and eager ones from the host.

The lanes of a row are interleaved, so that drift during a run affects all of them.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_symm.bench.calls import EnqueueOn
from numba_symm.bench.contenders import Launched
from numba_symm.environment import SIMULATED

ROUNDS = 5
"""Samples of each lane's eager calls."""

REPEATED = 4
"""How often each eager call is made before it is timed: as in programs that repeat it.

This library makes a graph of a call that is made for the third time.
"""

SHORT, LONG = 2000.0, 4000.0
"""The least and the most microseconds of one sample. The number of its calls is chosen
accordingly, where possible."""

PATIENCE = 100_000.0
"""The most microseconds of a graph, estimated from the fastest eager calls. Where ranks
share a GPU, a call takes milliseconds instead of microseconds."""

CACHE = 128 << 20
"""Bytes of buffers that successive calls rotate through: more than the 50 MB of L2
cache of an H100 or H200."""

MOST_BUFFERS = 2 if SIMULATED else 16


@dataclass(frozen=True)
class Summary:
    """Microseconds a call, of the slowest rank in each sample."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Summary":
        """Return the summary of samples."""
        return cls(float(np.median(samples)), float(min(samples)), float(max(samples)))


@dataclass(frozen=True)
class Lane:
    """One way of one contender, for one message.

    Attributes:
        column: the column of its times.
        way: its name.
        in_place: whether the benchmark requested in place.
        output_only: whether it works on its outputs alone, requested or not.
        eager: whether it is left out of graphs.
        calls: one for each buffer.
        inputs: the buffers, as bytes.
        outputs: the buffers, as bytes.
        current: returns a context that makes a stream current.
        sent: bytes of a call between islands, of all ranks; None if not counted.
        launches: how kernels are launched, if that is known.
        checked: whether it has results, which the benchmark checks.
    """

    column: str
    way: str
    in_place: bool
    output_only: bool
    eager: bool
    calls: Sequence[EnqueueOn]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    current: Callable[[int], AbstractContextManager[Any]]
    sent: int | None = None
    launches: Sequence[Launched] = ()
    checked: bool = True

    def rotated(self, count: int) -> list[EnqueueOn]:
        """Return ``count`` calls that rotate through the buffers."""
        return list(itertools.islice(itertools.cycle(self.calls), count))


def buffers(nbytes: int) -> int:
    """Return the number of buffers that messages of ``nbytes`` rotate through."""
    return max(1, min(MOST_BUFFERS, -(-CACHE // max(1, nbytes))))


def calls_per_graph(nbytes: int, wanted: int, of: int, eager: float) -> int:
    """Return the number of calls in a graph, the same for all contenders.

    Args:
        nbytes: of a message.
        wanted: the least number, unless these take too long.
        of: the number of buffers; the result is a multiple of it.
        eager: microseconds of the fastest contender's eager call.
    """
    guess = 4 + nbytes / 170e3  # microseconds a call, as on 4 H200s
    count = min(max(wanted, SHORT / guess), LONG / guess, PATIENCE / eager)
    count = max(2, count)
    return of * -(-int(count) // of)


def eager_calls(microseconds: float, wanted: int) -> int:
    """Return the number of eager calls in a sample, at most ``wanted``."""
    return max(1, min(wanted, int(LONG / microseconds)))


class Timer:
    """Times lanes on one stream of each rank. Its methods are collective.

    Args:
        ranks: the mpi4py communicator.
        stream: a stream of :mod:`numba_symm.bench.streams`.
        barrier: enqueues a barrier of all ranks on a stream.
    """

    def __init__(self, ranks: Any, stream: Any, barrier: Callable[[int], object]):
        self._ranks = ranks
        self._stream = stream
        self._barrier = barrier

    def once(self, lane: Lane) -> None:
        """Make one eager call for each buffer."""
        self._enqueue(lane, lane.calls)
        self._stream.synchronize()

    def pace(self, lane: Lane) -> float:
        """Return the slowest rank's microseconds for an eager call.

        The first call, which compiles or connects, is not timed.
        """
        self._enqueue(lane, lane.calls[:1])
        self._stream.synchronize()
        self._ranks.Barrier()
        _, done = self._timed(lane, lane.calls[:1])
        return float(max(self._ranks.allgather(done)))

    def eager(
        self,
        lanes: Sequence[Lane],
        calls: int,
        warmups: int,
        rounds: int = ROUNDS,
        alone: bool = False,
    ) -> list[dict[str, Summary]]:
        """Time eager calls.

        Args:
            lanes: the lanes, which are interleaved.
            calls: the most calls in a sample.
            warmups: untimed calls of each lane before.
            rounds: the samples of each lane.
            alone: whether calls are also timed one at a time.

        Returns:
            For each lane the microseconds a call: ``issue`` until it is enqueued and
            ``done`` until it is done, where several calls are enqueued back to back,
            and ``alone``, where the host waits for each call.
        """
        orders = []
        for lane in lanes:
            count = eager_calls(self.pace(lane), calls)
            self._enqueue(lane, lane.rotated(min(warmups, count)))
            self._enqueue(lane, REPEATED * list(lane.calls))
            orders.append(lane.rotated(count))
        self._stream.synchronize()
        kinds = ("issue", "done", "alone")[: 3 if alone else 2]
        samples = np.empty((len(lanes), len(kinds), rounds))
        for turn in range(rounds):
            for index, lane in enumerate(lanes):
                self._ranks.Barrier()
                samples[index, :2, turn] = self._timed(lane, orders[index])
                if alone:
                    self._ranks.Barrier()
                    samples[index, 2, turn] = self._one_by_one(lane, orders[index])
        return [
            {kind: Summary.of(each) for kind, each in zip(kinds, times, strict=True)}
            for times in self._slowest(samples)
        ]

    def capture(self, lane: Lane, count: int) -> Any:
        """Return a graph of ``count`` calls, replayed once."""
        self._ranks.Barrier()  # some libraries communicate during a capture
        graph = self._stream.capture(lane.rotated(count), lane.current)
        self._stream.replay(graph)
        return graph

    def graphs(self, graphs: Sequence[Any], count: int, replays: int) -> list[Summary]:
        """Time graphs of ``count`` calls each, interleaved; return their summaries."""
        samples = np.empty((len(graphs), replays))
        for turn in range(replays):
            for index, graph in enumerate(graphs):
                self._ranks.Barrier()
                samples[index, turn] = self._stream.time(graph, self._barrier) / count
        return [Summary.of(each) for each in self._slowest(samples)]

    def replay(self, graph: Any) -> None:
        """Launch a graph once and wait for it."""
        self._stream.replay(graph)

    def _enqueue(self, lane: Lane, calls: Sequence[EnqueueOn]) -> None:
        handle = self._stream.handle
        with lane.current(handle):
            for call in calls:
                call(handle)

    def _timed(self, lane: Lane, calls: Sequence[EnqueueOn]) -> tuple[float, float]:
        """Return this rank's microseconds a call, until enqueued and until done."""
        handle = self._stream.handle
        with lane.current(handle):
            start = time.perf_counter()
            for call in calls:
                call(handle)
            issued = time.perf_counter()
            self._stream.synchronize()
            done = time.perf_counter()
        scale = 1e6 / len(calls)
        return (issued - start) * scale, (done - start) * scale

    def _one_by_one(self, lane: Lane, calls: Sequence[EnqueueOn]) -> float:
        """Return this rank's microseconds a call, with a wait after each."""
        handle, wait = self._stream.handle, self._stream.synchronize
        with lane.current(handle):
            start = time.perf_counter()
            for call in calls:
                call(handle)
                wait()
            return (time.perf_counter() - start) * 1e6 / len(calls)

    def _slowest(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        slowest: np.ndarray[Any, Any] = np.max(self._ranks.allgather(samples), axis=0)
        return slowest
