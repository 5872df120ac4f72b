"""Times calls on a stream, also between pretended islands.

Times calls: many in a captured graph, and eager ones from the host.

The lanes of a row are interleaved, so that drift during a run affects all of them.
"""

import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from numba_symm.bench.bench_operations import EnqueueOn
from numba_symm.bench.contenders import Launched
from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.environment import SIMULATED
from numba_symm.gpu import driver

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
        stream: a stream of :mod:`numba_symm.bench.measure`.
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


NCCL_HOST = "NCCL_HOSTID"
"""NCCL's variable for the name of a node. Ranks of different nodes exchange bytes over
NCCL's network transport, even if their GPUs have peer access."""


def pretend(size: int, ranks: Any) -> None:
    """Divide the ranks of each node into islands, for this library and for NCCL.

    Collective, before either is loaded. A variable that the user has set is kept.

    Args:
        size: the most ranks of an island.
        ranks: the mpi4py communicator.
    """
    from mpi4py import MPI

    here = ranks.Split_type(MPI.COMM_TYPE_SHARED)
    name = f"{here.bcast(ranks.rank)}-{here.rank // size}"
    here.Free()
    os.environ["NUMBA_SYMM_ISLAND_SIZE"] = str(size)
    os.environ.setdefault(NCCL_HOST, name)


def transports() -> dict[str, str]:
    """Return NCCL's settings of this process."""
    found = {name: os.environ[name] for name in os.environ if name.startswith("NCCL_")}
    return dict(sorted(found.items()))


def engine(comm: Communicator) -> str | None:
    """Return the name and version of the engine; None within one island."""
    found = inside(comm).ranks.engine
    return None if found is None else f"{found.name} ({found.version})"


def captures(comm: Communicator) -> bool:
    """Return whether a graph can capture the communicator's calls."""
    found = inside(comm).ranks.engine
    return found is None or found.capturable


class GpuGraph:
    """An executable graph, which is destroyed with this object or by ``close``."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        destroy = driver.function("cuGraphExecDestroy")
        self.close = weakref.finalize(self, destroy, handle)
        self.close.atexit = False  # CUDA may have ended


class GpuStream:
    """A CUDA stream for eager calls and graphs."""

    def __init__(self) -> None:
        from cuda.core import Device, EventOptions

        self._stream = Device().create_stream()
        self._timed = EventOptions(timing_enabled=True)
        self.handle = int(self._stream.handle)

    def synchronize(self) -> None:
        """Wait until all enqueued work is done."""
        self._stream.sync()

    def capture(
        self,
        calls: Sequence[EnqueueOn],
        current: Callable[[int], AbstractContextManager[Any]],
    ) -> GpuGraph:
        """Return a graph of consecutive calls.

        If a call raises, the capture ends: CUDA refuses most other work before that.
        cuda.core's builder is not used, because it destroys the graph of an invalid
        capture, which the driver has destroyed.

        Args:
            calls: the calls to capture.
            current: returns a context that makes a stream current.
        """
        relaxed = driver.function("CUstreamCaptureMode").CU_STREAM_CAPTURE_MODE_RELAXED
        with cuda.defer_cleanup():  # Numba must not free memory during a capture
            try:
                driver.call("cuStreamBeginCapture", self.handle, relaxed)
                with current(self.handle):
                    for call in calls:
                        call(self.handle)
                graph = driver.call("cuStreamEndCapture", self.handle)
            except BaseException:
                # Without a check: an interrupt may precede the capture, or follow it.
                _, begun = driver.function("cuStreamEndCapture")(self.handle)
                if begun:
                    driver.function("cuGraphDestroy")(begun)
                raise
            try:
                return GpuGraph(driver.call("cuGraphInstantiate", graph, 0))
            finally:
                driver.call("cuGraphDestroy", graph)

    def follow(self, other: "GpuStream") -> None:
        """Let later work wait for the work that another stream has now."""
        self._stream.wait(other._stream)

    def launch(self, graph: GpuGraph) -> None:
        """Enqueue a graph."""
        driver.call("cuGraphLaunch", graph.handle, self.handle)

    def replay(self, graph: GpuGraph) -> None:
        """Launch a graph and wait for it."""
        self.launch(graph)
        self._stream.sync()

    def time(self, graph: GpuGraph, before: Callable[[int], object]) -> float:
        """Return the device time of a graph in microseconds.

        Args:
            graph: the graph to launch.
            before: enqueues a barrier, so that all ranks begin together.
        """
        before(self.handle)
        start = self._stream.record(options=self._timed)
        self.launch(graph)
        end = self._stream.record(options=self._timed)
        end.sync()
        return float(end - start) * 1e3

    def time_together(
        self,
        graphs: Sequence[tuple["GpuStream", GpuGraph]],
        before: Callable[[int], object],
    ) -> float:
        """Return the device time in microseconds until all graphs are done.

        Args:
            graphs: the graphs, each with its stream, in the order of their launches.
            before: enqueues a barrier, so that all ranks begin together.
        """
        before(self.handle)
        start = self._stream.record(options=self._timed)
        ends = []
        for on, graph in graphs:
            on._stream.wait(start)
            on.launch(graph)
            ends.append(on._stream.record(options=self._timed))
        for end in ends:
            end.sync()
        return max(float(end - start) for end in ends) * 1e3


class HostGraph:
    """Calls of the simulator's stream, made again by each replay."""

    def __init__(self, calls: Sequence[EnqueueOn]):
        self.calls = list(calls)

    def close(self) -> None:
        """Do nothing."""


class HostStream:
    """The simulator's stream: each call returns when its work is complete."""

    handle = 0

    def synchronize(self) -> None:
        """Return immediately."""

    def capture(
        self,
        calls: Sequence[EnqueueOn],
        current: Callable[[int], AbstractContextManager[Any]],
    ) -> HostGraph:
        """Return consecutive calls, in place of a graph."""
        return HostGraph(calls)

    def follow(self, other: "HostStream") -> None:
        """Do nothing: the other stream's work is complete."""

    def launch(self, graph: HostGraph) -> None:
        """Make a graph's calls."""
        for call in graph.calls:
            call(self.handle)

    replay = launch

    def time_together(
        self,
        graphs: Sequence[tuple["HostStream", HostGraph]],
        before: Callable[[int], object],
    ) -> float:
        """Return the host's time in microseconds for one graph after the other."""
        before(self.handle)
        start = time.perf_counter()
        for on, graph in graphs:
            on.replay(graph)
        return (time.perf_counter() - start) * 1e6


def new_stream() -> Any:
    """Return a stream for measurements."""
    return HostStream() if SIMULATED else GpuStream()
