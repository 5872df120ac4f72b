"""The rule that nothing is stored after a failure, checked at every access."""

from typing import Any

from explore.memory import Finding


class NoStoreAfterFailure:
    """A thread that has found a failure, or whose block has, stores no data.

    A thread has found a failure when it stores a record on a board, or loads one. Its
    block has found it after the next ``syncthreads``. A later launch of a stream has
    found it if one before it marked that the rank has failed. Copies find nothing.

    Args:
        board: the addresses of all records.
        kept: the addresses of words that only their own rank reads.
        marks: those of the words that mark that a rank has failed.
    """

    def __init__(self, board: range, kept: set[int], marks: set[int]):
        self._board = board
        self._kept = kept
        self._marks = marks
        self._failed: set[int] = set()  # lanes

    def starts(self, thread: Any) -> None:
        """Record whether a launch before a thread's has marked a failure."""
        thread.failed = thread.lane in self._failed and not thread.copies

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
