"""The rule that nothing is stored after a failure, checked at every access."""

from collections.abc import Callable
from typing import Any

from explore.memory import REGION, Finding


class NoStoreAfterFailure:
    """A thread that has found a failure, or whose block has, stores no data.

    A thread has found a failure when it stores a record on a board, or loads one. Its
    block has found it after the next ``syncthreads``. A later launch of a stream has
    found it if one before it marked that the rank has failed. Copies find nothing.

    The ranks' own arrays have a second rule, because after a failure their ranks may
    use them again. A block with a handshake, and later kernels of a stream after a
    kernel that is one, store nothing in them

    - once a thread there has sent a packet when its rank was already marked; or
    - once a thread there that had looked at the clock polled when its rank already had
      a record.

    Args:
        board: the addresses of all records.
        kept: the addresses of words that only their own rank reads.
        marks: those of the words that mark that a rank has failed.
        arrays: the numbers of the regions of the ranks' own arrays.
        recorded: ``(lane)`` returns whether a record has reached the board of the rank
            of that stream.
        marked: ``(lane, block)`` returns the same of the mark that the block loads.
    """

    def __init__(
        self,
        board: range,
        kept: set[int],
        marks: set[int],
        arrays: set[int],
        recorded: Callable[[int], bool],
        marked: Callable[[int, int], bool],
    ):
        self._board = board
        self._kept = kept
        self._marks = marks
        self._arrays = arrays
        self._recorded, self._marked = recorded, marked
        self._failed: set[int] = set()  # lanes
        self._late: set[Any] = set()  # lanes, and blocks of a grid

    def starts(self, grid: Any) -> None:
        """Record whether a launch before this one has marked a failure.

        If it has started early, that is when the one before has ended.
        """
        if grid.lane in self._failed and not grid.launch.is_copy:
            for thread in grid.threads:
                thread.failed = True

    def polls(self, thread: Any) -> None:
        """Record whether a thread that waits has to find a failure."""
        if thread.has_looked_at_the_clock:
            self._has_to_find(thread, self._recorded(thread.lane))

    def _has_to_find(self, thread: Any, failure: bool) -> None:
        kernel = thread.grid.launch.kernel.__qualname__
        if kernel.startswith("make_handshake") and failure:
            self._late.add(thread.lane)
        if kernel.startswith("make_direct") and failure:
            self._late.add((thread.grid, thread.block))

    def loaded(self, thread: Any, address: int, value: int) -> None:
        """Record whether a thread has loaded a record."""
        if value != 0 and address in self._board:
            thread.failed = True

    def stores(self, thread: Any, address: int) -> None:
        """Raise if a thread may not store at an address."""
        if address in self._marks:
            self._failed.add(thread.lane)
        if address in self._board:
            thread.failed = True
        elif thread.failed and address not in self._kept:
            text = f"{thread.observer.name} stores to {address:#x} after a failure"
            raise Finding("failure", text)
        elif address // REGION not in self._arrays:
            if address not in self._kept:
                self._has_to_find(thread, self._marked(thread.lane, thread.block))
        elif self._late & {thread.lane, (thread.grid, thread.block)}:
            text = f"{thread.observer.name} stores too late at {address:#x}"
            raise Finding("failure", text)
