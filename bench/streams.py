"""The stream on which calls are enqueued: a CUDA stream, or the simulator's host."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from numba import cuda

from numba_symm.bench.operations import Call
from numba_symm.environment import SIMULATED


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
        calls: Sequence[Call],
        current: Callable[[int], AbstractContextManager[Any]],
    ) -> Any:
        """Return a graph of consecutive calls.

        Args:
            calls: the calls to capture.
            current: returns a context that makes a stream current.
        """
        with cuda.defer_cleanup():  # Numba must not free memory during a capture
            builder = self._stream.create_graph_builder().begin_building("relaxed")
            handle = int(builder.stream.handle)
            with current(handle):
                for call in calls:
                    call(handle)
            return builder.end_building().complete()

    def replay(self, graph: Any) -> None:
        """Launch a graph and wait for it."""
        graph.launch(self._stream)
        self._stream.sync()

    def time(self, graph: Any, before: Callable[[int], object]) -> float:
        """Return the device time of a graph in microseconds.

        Args:
            graph: the graph to launch.
            before: enqueues a barrier, so that all ranks begin together.
        """
        before(self.handle)
        start = self._stream.record(options=self._timed)
        graph.launch(self._stream)
        end = self._stream.record(options=self._timed)
        end.sync()
        return float(end - start) * 1e3


class HostStream:
    """The simulator's stream: each call returns when its work is complete."""

    handle = 0

    def synchronize(self) -> None:
        """Return immediately."""


def new_stream() -> Any:
    """Return the stream for measurements."""
    return HostStream() if SIMULATED else GpuStream()
