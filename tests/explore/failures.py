"""The rule that nothing is stored after a failure, checked at every access."""

from typing import Any

from explore.memory import Finding


class NoStoreAfterFailure:
    """A thread that has found a failure, or whose block has, stores no data.

    A thread has found a failure when it stores a record on a board, or loads one. Its
    block has found it after the next ``syncthreads``. A later launch has found none.

    Args:
        board: the addresses of all records.
        kept: the addresses of words that only their own rank reads.
    """

    def __init__(self, board: range, kept: set[int]):
        self._board = board
        self._kept = kept

    def loaded(self, thread: Any, address: int, value: int) -> None:
        """Record whether a thread has loaded a record."""
        if value != 0 and address in self._board:
            thread.failed = True

    def stores(self, thread: Any, address: int) -> None:
        """Raise if a thread may not store at an address."""
        if address in self._board:
            thread.failed = True
        elif thread.failed and address not in self._kept:
            text = f"{thread.observer.name} stores to {address:#x} after a failure"
            raise Finding("failure", text)
