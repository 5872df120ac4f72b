"""The stream on which calls are enqueued: a CUDA stream, or the simulator's host."""

import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from numba import cuda

from numba_symm import driver
from numba_symm.bench.calls import EnqueueOn
from numba_symm.bench.contenders import Launched
from numba_symm.environment import SIMULATED


class GpuGraph:
    """A graph, which is destroyed with this object or by ``close``.

    Args:
        handle: of the executable graph.
        launches: its kernels, whoever launched them, each once.
    """

    def __init__(self, handle: Any, launches: Sequence[Launched]) -> None:
        self.handle = handle
        self.launches = launches
        destroy = driver.function("cuGraphExecDestroy")
        self.close = weakref.finalize(self, destroy, handle)
        self.close.atexit = False  # CUDA may have ended


class GpuStream:
    """A CUDA stream for eager calls and graphs.

    Args:
        urgent: whether it has the highest priority instead of the lowest.
    """

    def __init__(self, urgent: bool = False) -> None:
        from cuda.core import Device, EventOptions, StreamOptions

        lowest, highest = driver.call("cuCtxGetStreamPriorityRange")
        options = StreamOptions(priority=highest if urgent else lowest)
        self._stream = Device().create_stream(options=options)
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
                launches = _launches(graph)
                return GpuGraph(driver.call("cuGraphInstantiate", graph, 0), launches)
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


def _launches(graph: Any) -> list[Launched]:
    """Return a captured graph's kernels, each once for each number of blocks."""
    all_of_them = cuda.get_current_device().MULTIPROCESSOR_COUNT
    found: dict[tuple[str, int], Launched] = {}
    for node in _kernels(graph):
        launch = driver.call("cuGraphKernelNodeGetParams", node)
        blocks = launch.gridDimX * launch.gridDimY * launch.gridDimZ
        name = _identifier(_symbol(launch))
        found[name, blocks] = {
            "kernel": name,
            "blocks": blocks,
            "multiprocessors": min(blocks, all_of_them),
            "early": None,
        }
    return list(found.values())


def _kernels(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph, and of the graphs in it, that launch a kernel."""
    kinds = driver.function("CUgraphNodeType")
    _, count = driver.call("cuGraphGetNodes", graph, 0)
    nodes, _ = driver.call("cuGraphGetNodes", graph, count)
    for node in nodes:
        kind = driver.call("cuGraphNodeGetType", node)
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield node
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _kernels(driver.call("cuGraphChildGraphNodeGetGraph", node))


def _symbol(launch: Any) -> str:
    """Return the symbol of a launched kernel, or "?" before CUDA 12.3."""
    try:
        if int(launch.func):
            return str(driver.call("cuFuncGetName", launch.func).decode())
        return str(driver.call("cuKernelGetName", launch.kern).decode())
    except RuntimeError:  # cuda.bindings: the driver has no such function
        return "?"


def _identifier(symbol: str) -> str:
    """Return the name of a C++ function, without its namespaces and arguments."""
    nested = re.match(r"_ZNK?", symbol)
    rest = re.sub(r"^_ZN?K?", "", symbol) if symbol.startswith("_Z") else ""
    name = symbol
    while found := re.match(r"L?(\d+)", rest):
        begin, length = found.end(), int(found[1])
        name, rest = rest[begin : begin + length], rest[begin + length :]
        if not nested:
            break
    return name


class HostGraph:
    """Calls of the simulator's stream, made again by each replay."""

    launches: Sequence[Launched] = ()

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


def new_stream(urgent: bool = False) -> Any:
    """Return a stream for measurements, of the highest or the lowest priority."""
    return HostStream() if SIMULATED else GpuStream(urgent)
