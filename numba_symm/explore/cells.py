"""Accesses to a few bytes of memory, which later accesses must be ordered after."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from numba_symm.explore.faults import CodePlace


class Access(NamedTuple):
    """An access that later ones must be ordered after.

    Attributes:
        thread: the number of its thread.
        time: the thread's time.
        site: where.
        does: what, in words.
        scope: the scope of a strong access; "" for a weak one.
    """

    thread: int
    time: int
    site: CodePlace
    does: str
    scope: str = ""


class Cell:
    """The last accesses to a few bytes.

    Attributes:
        writes: by thread, stores of one value that nothing orders.
        reads, strong_reads, strong_writes: by thread, what came after these.
        before: what these stores follow.
    """

    __slots__ = ("before", "reads", "strong_reads", "strong_writes", "writes")

    def __init__(self) -> None:
        self.before: list[Access] = []
        self.writes: dict[int, Access] = {}
        self.reads: dict[int, Access] = {}
        self.strong_writes: dict[int, Access] = {}
        self.strong_reads: dict[int, Access] = {}

    def store(self, me: Access) -> None:
        """Note a store that follows all accesses so far."""
        kinds = self.writes, self.reads, self.strong_writes, self.strong_reads
        self.before = [each for kind in kinds for each in kind.values()]
        self.writes = {me.thread: me}
        self.reads, self.strong_writes, self.strong_reads = {}, {}, {}


def unknown(others: Iterable[Access], known: Any) -> list[Access]:
    """Return those of some accesses that a thread does not know of."""
    return [other for other in others if other.time > known[other.thread]]
