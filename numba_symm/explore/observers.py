"""What makes accesses in an execution, and what it knows: vector clocks.

There are two clocks in one array. The first, ``known``, contains the accesses that
happened before, as the memory model defines it. The second, ``past``, contains the
steps of the execution on which the observer's state depends.
"""

import contextlib
from typing import Any, NamedTuple

import numpy as np
from greenlet import greenlet

from numba_symm.explore.faults import NOWHERE, CodePlace, Ended, Fault
from numba_symm.explore.memory import Strong, Word


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


class Fiber(Observer):
    """A thread of a kernel or of a host.

    Attributes:
        op: the strong access that it wants to make.
        state: what it does, for reports: a text and where.
        seen: how long the list of its reads was, by its state at a load.
        loads: its strong reads since it last changed anything.
        polling: the places of a loop in which it waits, with the values it has seen.
        phase: how many barriers it has passed.
        where: its last weak access, which it has repeated ``again`` times.
        peek: the value for a predicate of ``Machine.wait``, whose access is ``probed``.
        local: what stand-ins keep for it.
    """

    def __init__(self, machine: Any, name: Name, clock: Any, body: Any):
        super().__init__(machine, name, clock)
        self._body = body
        self._greenlet = greenlet(self._run, machine.main)
        self.started = self.done = False
        self.op: Strong | None = None
        self.state: tuple[str, CodePlace] = ("has not started", NOWHERE)
        self.seen: dict[Any, int] = {}
        self.loads: list[tuple[Strong, Word, int]] = []
        self.polling: list[tuple[Strong, Word, int]] = []
        self.phase = 0
        self.where: Any = None
        self.again = 0
        self.peek: int | None = None
        self.probed: Any = None
        self.result: Any = None
        self.local: Any = None

    def _run(self) -> None:
        machine = self.machine
        try:
            with np.errstate(all="ignore"):  # integers overflow as on a GPU
                self._body()
            self.done = True
        except Ended:
            pass
        except (Exception, Fault, SystemExit) as error:
            if isinstance(error, SystemExit) and not error.code:
                self.done = True
            else:
                machine.error = machine.error or error

    def switch(self, value: Any = None) -> None:
        """Run the thread until it stops for something."""
        self._greenlet.switch(value) if self.started else self._start()

    def _start(self) -> None:
        self.started = True
        self._greenlet.switch()

    def stop(self) -> None:
        """End the thread."""
        if self.started and not self._greenlet.dead:
            with contextlib.suppress(Exception):
                self._greenlet.throw(Ended)
        self._body = None

    def changed(self) -> None:
        """Note that the thread does not only poll."""
        if self.loads:
            self.seen.clear()
            self.loads.clear()
