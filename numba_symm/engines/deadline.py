"""The deadline of exchanges in which the GPU waits, and the host does not.

Kernels of another library wait without a deadline, also in the replay of a graph, which
the host does not see. So a kernel stores an exchange's number into a word of host
memory before the exchange, and another one stores 0 after it. Each of these stores
clears the word's other half, which the watchdog sets. If that half is still set after
the timeout, the exchange has lasted longer than that.

A graph in which an exchange directly follows another one has one kernel between them.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm.device.intrinsics import st_relaxed_sys_u64
from numba_symm.gpu import driver, streams
from numba_symm.gpu.kernels import Kernel, Launch
from numba_symm.launch.waiting import Wait

_FOR_KERNELS = 0x03  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP


class TimedExchange(NamedTuple):
    """An exchange in which the GPU waits for other ranks.

    Attributes:
        operation: the call to which it belongs.
        peers: the other ranks of the exchange.
    """

    operation: str
    peers: tuple[int, ...]


def make_mark() -> Callable[..., None]:
    """Return the kernel that stores a number for the host.

    In a graph, it takes a quarter of the time of a memory operation of the stream.
    """

    def mark(address: int, number: int) -> None:
        if cuda.threadIdx.x == 0:
            st_relaxed_sys_u64(address, number)

    return mark


@functools.cache
def kernel() -> Kernel:
    """Return the kernel, compiled when first bound."""
    return Kernel(make_mark, (), (types.int64, types.int64), 32)


class Deadline:
    """The deadline of one communicator's exchanges, which run one after another.

    Args:
        wait: starts a wait in a call, with the time that an exchange may last.
    """

    def __init__(self, wait: Callable[[str], Wait]):
        self._start = wait
        self._wait: Wait | None = None  # for the exchange that the GPU was in
        self._numbers: dict[TimedExchange, int] = {}
        self._exchanges: list[TimedExchange | None] = [None]  # by number
        self._memory = int(driver.call("cuMemHostAlloc", 8, _FOR_KERNELS))
        self._place = int(driver.call("cuMemHostGetDevicePointer", self._memory, 0))
        self._state = (ctypes.c_uint32 * 2).from_address(self._memory)
        self._state[:] = [0, 0]
        self._marks: dict[int, Launch] = {}
        # In a capture, the place right after the latest mark at an exchange's end.
        self._end: tuple[int, frozenset[int]] | None = None
        self._mark(0)

    def begin(self, exchange: TimedExchange, stream: int, captured: bool) -> None:
        """Enqueue the mark before an exchange.

        In a capture, if this exchange directly follows another one, no mark is added.
        The mark after the other exchange then stores this exchange's number instead.

        Args:
            exchange: the exchange.
            stream: the handle of the stream.
            captured: whether the stream is being captured.
        """
        number = self._numbers.get(exchange)
        if number is None:
            number = self._numbers[exchange] = len(self._exchanges)
            self._exchanges.append(exchange)
        mark = self._mark(number)
        if captured and streams.in_capture(stream) == self._end:
            (node,) = self._end[1]
            mark.replace(node)
        else:
            mark(stream)

    def end(self, stream: int, captured: bool) -> None:
        """Enqueue the mark after the exchange."""
        self._mark(0)(stream)
        self._end = streams.in_capture(stream) if captured else None

    def _mark(self, number: int) -> Launch:
        """Return the launch that stores a number."""
        if number not in self._marks:
            self._marks[number] = kernel().bind(1, self._place, number)
        return self._marks[number]

    @property
    def running(self) -> TimedExchange | None:
        """The exchange that the GPU is in, or None."""
        return self._exchanges[self._state[0]]

    def look(self) -> tuple[TimedExchange, Wait] | None:
        """Return the exchange that the GPU is in, or None, and the wait for its end.

        The wait begins when the host first sees the exchange. The host calls this
        regularly, one thread at a time.
        """
        running = self.running
        if running is not None and not self._state[1]:
            self._state[1] = 1
            running = self.running  # another one may have begun before
            self._wait = running and self._start(running.operation)
        return (running, self._wait) if running and self._wait else None

    def close(self) -> None:
        """Free the word. The GPU must have done its work."""
        driver.call("cuMemFreeHost", self._memory)
