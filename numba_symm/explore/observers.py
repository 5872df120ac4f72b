"""What makes accesses in an execution, and what it knows: vector clocks.

There are two clocks in one array. The first, ``known``, contains the accesses that
happened before, as the memory model defines it. The second, ``past``, contains the
steps of the execution on which the observer's state depends.
"""

from typing import Any, NamedTuple

import numpy as np


class Full(Exception):
    """The program has more threads than the clocks have places."""


class Name(NamedTuple):
    """A thread's place: the rank, and for a kernel's thread its block and index.

    Attributes:
        rank: the rank.
        block: the block's index; None: a host, or a call of the library.
        thread: the thread's index in its block.
        text: how reports call it.
    """

    rank: int
    block: int | None
    thread: int
    text: str


class Numbers:
    """The numbers of a program's threads, the same in all executions."""

    def __init__(self) -> None:
        self.of: dict[Name, int] = {}
        self.names: list[Name] = []
        self.room = 64

    def number(self, name: Name) -> int:
        """Return a thread's number."""
        found = self.of.get(name)
        if found is None:
            found = self.of[name] = len(self.names)
            self.names.append(name)
        if found >= self.room:
            raise Full
        return found


class Observer:
    """What makes accesses: a thread, or a call that the library executes.

    Attributes:
        number: its number.
        name: its name.
        rank: its rank.
        clock: both vector clocks.
        fenced: what it knew at its last fence; None: it has made none.
        fenced_local: the same, of fences for its own GPU.
        unfenced: what its next fence learns.
    """

    def __init__(self, machine: Any, name: Name, clock: Any):
        self.machine, self.name, self.rank = machine, name, name.rank
        self.number = machine.numbers.number(name)
        self.clock = clock
        self.known, self.past = clock
        machine.observers[self.number] = self
        self.fenced: Any = None
        self.fenced_local: Any = None
        self.unfenced: list[Any] = []

    def tick(self) -> int:
        """Count an access; return the time."""
        self.known[self.number] += 1
        return int(self.known[self.number])

    def learn(self, clock: Any) -> None:
        """Learn what another clock knows."""
        np.maximum(self.clock, clock, out=self.clock)

    def rank_of(self, number: int) -> int:
        """Return the rank of the thread with a number."""
        names: list[Name] = self.machine.numbers.names
        return names[number].rank
