"""The rule that nothing is stored after a failure, checked at every access."""

from typing import Any

from explore.memory import Finding


class NoStoreAfterFailure:
    """A thread that found a failure, or whose block did, stores no data.

    A thread has found one when it puts a record on a board, or loads one from it. Its
    block has when the threads have met since; the next launch begins anew.

    Args:
        board: the addresses of all records.
        kept: the addresses of what a rank keeps for itself alone.
    """

    def __init__(self, board: range, kept: set[int]):
        self._board = board
        self._kept = kept

    def loaded(self, thread: Any, address: int, value: int) -> None:
        """Note what a thread has loaded."""
        if value != 0 and address in self._board:
            thread.failed = True

    def stores(self, thread: Any, address: int) -> None:
        """Check where a thread is about to store."""
        if address in self._board:
            thread.failed = True
        elif thread.failed and address not in self._kept:
            text = f"{thread.observer.name} stores to {address:#x} after a failure"
            raise Finding("failure", text)
