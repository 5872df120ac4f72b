"""The deadline of exchanges that the GPU waits in, and the host does not.

Kernels of another library wait without a deadline, also in the replay of a graph, which
the host does not see. So the stream stores an exchange's number into a word of host
memory before the exchange, and 0 after it. Each of these stores clears the word's other
half, which the watchdog sets. If that half is still set after the timeout, the exchange
has lasted as long.
"""

import ctypes
import time
from typing import NamedTuple

from numba_symm import driver

_FOR_KERNELS = 0x03  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_OTHERS = 0xFFFF  # the number that all exchanges share which find no other one


class Exchange(NamedTuple):
    """What a rank waits in.

    Attributes:
        operation: the call.
        peers: the ranks that it is with.
    """

    operation: str
    peers: tuple[int, ...]


class Deadline:
    """The deadline of one communicator's exchanges, which run one after another.

    Args:
        seconds: how long an exchange may last after it has begun; 0: indefinitely.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._since = 0.0
        self._numbers: dict[Exchange, int] = {}
        self._exchanges: list[Exchange | None] = [None]  # by number
        self._memory = int(driver.call("cuMemHostAlloc", 4, _FOR_KERNELS))
        self._place = int(driver.call("cuMemHostGetDevicePointer", self._memory, 0))
        self._word = (ctypes.c_uint16 * 2).from_address(self._memory)
        self._word[:] = [0, 0]

    def begin(self, exchange: Exchange, stream: int) -> None:
        """Enqueue the begin of an exchange."""
        number = self._numbers.get(exchange)
        if number is None:
            number = min(len(self._exchanges), _OTHERS)
            self._numbers[exchange] = number
            self._exchanges[number:] = [exchange]
        self._store(number, stream)

    def end(self, stream: int) -> None:
        """Enqueue the end of the exchange."""
        self._store(0, stream)

    def _store(self, number: int, stream: int) -> None:
        driver.call("cuStreamWriteValue32", stream, self._place, number, 0)

    @property
    def running(self) -> Exchange | None:
        """The exchange that the GPU is in, or None."""
        return self._exchanges[self._word[0]]

    def late(self) -> Exchange | None:
        """Return the exchange that the GPU is in if it has lasted too long.

        The host calls this regularly, one thread at a time.
        """
        running = self.running
        if running is None or not self._seconds:
            return None
        if not self._word[1]:
            self._since = time.monotonic()
            self._word[1] = 1
            return None
        return running if time.monotonic() - self._since >= self._seconds else None

    def close(self) -> None:
        """Free the word. The GPU must have done its work."""
        driver.call("cuMemFreeHost", self._memory)
