"""Where calls are enqueued: a CUDA stream, or in the simulator the host itself."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from numba import cuda

from numba_symm.bench.operations import Call
from numba_symm.environment import SIMULATED


class GpuStream:
    """A CUDA stream that calls are enqueued on, eagerly or in graphs."""

    def __init__(self) -> None:
        from cuda.core import Device, EventOptions

        self._stream = Device().create_stream()
        self._timed = EventOptions(timing_enabled=True)
        self.handle = int(self._stream.handle)

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done."""
        self._stream.sync()

    def capture(
        self,
        calls: Sequence[Call],
        current: Callable[[int], AbstractContextManager[Any]],
    ) -> Any:
        """Return a graph of calls, one after another.

        Args:
            calls: what to capture.
            current: from a stream to a context in which the calls go there.
        """
        with cuda.defer_cleanup():  # Numba must free nothing meanwhile
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
        """Return the microseconds of device time that a graph takes.

        Args:
            graph: what to launch.
            before: enqueues what lets all ranks begin together.
        """
        before(self.handle)
        start = self._stream.record(options=self._timed)
        graph.launch(self._stream)
        end = self._stream.record(options=self._timed)
        end.sync()
        return float(end - start) * 1e3


class HostStream:
    """The simulator's: a call has ended when it returns, and there are no graphs."""

    handle = 0

    def synchronize(self) -> None:
        """Return at once."""


def new_stream() -> Any:
    """Return the stream to measure on."""
    return HostStream() if SIMULATED else GpuStream()
