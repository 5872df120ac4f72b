"""One execution of a program: its threads, their accesses, what they know.

One execution of a program: all threads of all ranks, as greenlets.

A thread runs until its next strong access, barrier or wait of its host. Threads that
need no choice run at once, in any order. When all others wait, a *chooser* picks the
thread whose strong access is next, and the value that it loads.

What makes accesses in an execution, and what it knows: vector clocks.

There are two clocks in one array. The first, ``known``, contains the accesses that
happened before, as the memory model defines it. The second, ``past``, contains the
steps of the execution on which the observer's state depends.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet

from numba_symm.explore import memory
from numba_symm.explore.memory import (
    AWAIT,
    CHANGES,
    LATE,
    LOAD,
    NOWHERE,
    RELEASE,
    STORE,
    UPDATE,
    Area,
    CodePlace,
    Ended,
    Fault,
    Files,
    MemoryModel,
    Strong,
    Word,
)


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


class Fiber(Observer):
    """A thread of a kernel or of a host.

    Attributes:
        switch: runs the thread until it stops for something.
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

    def __init__(self, machine: Any, name: Name, clock: Any, body: Any, local: Any):
        super().__init__(machine, name, clock)
        self._body, self.local = body, local
        self._greenlet = greenlet(self._run, machine.main)
        self.switch = self._greenlet.switch
        self.done = False
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

    def _run(self, _: Any) -> None:
        machine = self.machine
        try:
            with np.errstate(all="ignore"):  # integers overflow as on a GPU
                self._body()
        except Ended:
            pass
        except (Exception, Fault, SystemExit) as error:
            if not isinstance(error, SystemExit) or error.code:
                machine.error = machine.error or (error, self.name.text)
        self.done = True

    def stop(self) -> None:
        """End the thread."""
        if self._greenlet:  # it has started and not ended
            with contextlib.suppress(Exception):
                self._greenlet.throw(Ended)
        self._body = None

    def changed(self) -> None:
        """Note that the thread does not only poll."""
        self.seen.clear()
        self.loads.clear()


MOST_STEPS = 200_000
"""The strong accesses of one execution; a program that makes more never ends."""


MOST_REPEATS = 10_000
"""How often a thread loads the same bytes at the same line before it polls for ever."""


class OutOfTime(Exception):
    """The exploration's time is over."""


MIXED = "mixed"
"""Of a word with silent updates and other accesses: then all updates have an order."""

_running: list["Machine"] = []


def running() -> "Machine":
    """Return the execution that runs."""
    return _running[-1]


class Machine:
    """An execution.

    Attributes:
        chooser: decides how it goes on: ``choose`` returns the thread whose access is
            next, and the index of its value; ``executed`` notes that; ``repeats`` notes
            that a thread polls again, although it could have seen more.
        files: the program's files.
        memory: all memory.
        threads: the threads that have not ended.
        current: the thread that runs.
        error: what a thread has raised, and which thread.
        steps: the strong accesses so far.
        deadline: when the exploration's time is over, of ``time.monotonic``.
        futile: by a thread's state at a load, values with which it comes back to this
            state without a change, as earlier executions have shown.
        learned: more of these.
    """

    def __init__(
        self,
        chooser: Any,
        files: Files,
        numbers: Numbers,
        futile: dict[Any, set[int]],
    ):
        self.chooser, self.files, self.numbers = chooser, files, numbers
        self.futile, self.learned = futile, list[tuple[Any, int]]()
        self.memory = MemoryModel()
        self.main = getcurrent()
        self.threads: dict[int, Fiber] = {}
        self.current: Fiber | None = None
        self.error: tuple[BaseException, str] | None = None
        self.steps = 0
        self.deadline = math.inf
        self.closed = False
        self.traced: Callable[[Fiber, Strong, int, Any], None] | None = None
        self.unmet: Callable[[], list[tuple[Name, str, CodePlace]]] = list
        self.ready: dict[int, Fiber] = {}
        self.last: Fiber | None = None
        self._runnable: deque[tuple[Fiber, Any]] = deque()
        self._awaiting: dict[int, list[tuple[Fiber, Strong]]] = {}
        self._hosts: list[tuple[Fiber, Callable[[], bool]]] = []
        self._groups: dict[Any, list[tuple[Fiber, Any]]] = {}

    def clock(self) -> Any:
        """Return new clocks, which know nothing."""
        return np.zeros((2, self.numbers.room), np.int64)

    def start(
        self, name: Name, clock: Any, body: Callable[[], None], local: Any = None
    ) -> None:
        """Start a thread that knows what ``clock`` does."""
        thread = Fiber(self, name, clock, body, local)
        self.threads[thread.number] = thread
        self._runnable.append((thread, None))

    def run(self) -> None:
        """Run all threads to their ends, or raise a Fault or Pruned."""
        _running.append(self)
        try:
            while True:
                self._settle()
                if self.ready:
                    self._step()
                elif self.threads:
                    self._stuck()
                else:
                    return
        finally:
            self._close()
            _running.remove(self)

    def _close(self) -> None:
        self.closed = True
        for thread in list(self.threads.values()):
            self.current = thread
            thread.stop()
        self.current = None

    def _settle(self) -> None:
        """Run everything that needs no choice."""
        while True:
            while self._runnable:
                self._resume(*self._runnable.popleft())
            for waiting in self._hosts:
                if waiting[1]():
                    self._hosts.remove(waiting)
                    self._runnable.append((waiting[0], None))
                    break
            else:
                return

    def _resume(self, thread: Fiber, value: Any) -> None:
        self.current = thread
        try:
            thread.switch(value)
        finally:
            self.current = None
        if self.error is not None:
            raise self.error[0]
        if thread.done:
            del self.threads[thread.number]
            if thread.local is not None:
                thread.local.ended(thread)

    def _step(self) -> None:
        self.steps += 1
        if self.steps % 64 == 0 and time.monotonic() > self.deadline:
            raise OutOfTime
        if self.steps > MOST_STEPS:
            raise Fault(
                "livelock",
                f"{MOST_STEPS} atomic accesses in one execution, which has not ended",
            )
        thread, index = self.chooser.choose(self)
        self.last = thread
        op = thread.op
        assert op is not None
        value = self.memory.execute(thread, op, index, self.steps - 1)
        kinds = op.region.places[op.offset].kinds
        kinds.add(op.silent)
        if len(kinds) > 1:
            self.learned.append(((MIXED, op.key), 0))
        if self.traced is not None:
            self.traced(thread, op, index, value)
        self.chooser.executed(self, thread, op, index)
        del self.ready[thread.number]
        if index == LATE:
            self._post(thread)
        else:
            thread.op = None
            self._runnable.append((thread, value))
        if op.kind in CHANGES:
            self._changed(op.key)

    def _changed(self, key: int) -> None:
        """Let threads go on or wait because of a new value of a place."""
        for thread in list(self.ready.values()):
            op = thread.op
            assert op is not None
            if op.key == key and op.kind is UPDATE and op.holds is not None:
                del self.ready[thread.number]
                self._post(thread)
        for thread, op in self._awaiting.pop(key, ()):
            if thread.op is not op:
                continue
            if thread.polling:
                self.chooser.repeats()
                thread.polling, thread.op = [], None
                self._runnable.append((thread, None))
            else:
                self._post(thread)

    def _post(self, thread: Fiber) -> None:
        """Note that a thread wants to access memory."""
        assert thread.op is not None
        if self.options(thread):
            self.ready[thread.number] = thread
        else:
            self._awaiting.setdefault(thread.op.key, []).append((thread, thread.op))

    def options(self, thread: Fiber) -> list[int]:
        """Return the values with which a thread's access can be executed now."""
        assert thread.op is not None
        return self.memory.options(thread, thread.op)

    # What threads call.

    def me(self) -> Fiber:
        """Return the thread that runs."""
        if self.closed:
            raise Ended
        assert self.current is not None
        return self.current

    def site(self) -> CodePlace:
        """Return where the program is."""
        return memory.site(self.files)

    def weak(
        self,
        region: Area,
        offset: int,
        nbytes: int,
        stored: Callable[[], bytes] | None,
    ) -> None:
        """Check a weak access of the thread that runs: see ``MemoryModel.weak``."""
        thread, site = self.me(), self.site()
        if stored is not None:
            thread.changed()
        where = site, region, offset
        thread.again = thread.again + 1 if where == thread.where else 0
        thread.where = where
        if thread.again > MOST_REPEATS:
            raise Fault(
                "livelock",
                f"{thread.name.text} polls with a plain load, which another thread's "
                "store need never end; load with acquire",
                sites=[(thread.name.text, site)],
            )
        self.memory.weak(thread, region, offset, nbytes, stored, site)

    def access(self, op: Strong, state: Any) -> Any:
        """Make a strong access; return the old value.

        Args:
            op: the access.
            state: what the thread's next steps depend on, besides the value; None: the
                access is no part of a loop that polls.
        """
        thread = self.me()
        if (MIXED, op.key) in self.futile:
            op.silent = ""
        polls = op.kind in (LOAD, UPDATE) and state is not None and not op.silent
        if polls:
            state = (thread.number, op.key, state)
            if state in thread.seen:
                self._repeat(thread, state)
            futile = self.futile.get(state)
            if futile:
                op.holds = lambda value: value not in futile
                op.kind = AWAIT if op.kind is LOAD else op.kind
        value = self._perform(thread, op)
        place = op.region.places.get(op.offset)
        stays = op.kind is not UPDATE or (
            op.change is not None and op.order != RELEASE and op.change(value) == value
        )
        if op.kind is STORE or not stays or not polls or place is None:
            thread.changed()
        else:
            thread.seen[state] = len(thread.loads)
            thread.loads.append((op, place, place.reads[thread.number][-1][1]))
        return value

    def _perform(self, thread: Fiber, op: Strong) -> Any:
        thread.op = op
        thread.state = ("waits" if op.kind is AWAIT else "accesses", op.site)
        self._post(thread)
        return self.main.switch()

    def _repeat(self, thread: Fiber, state: Any) -> None:
        """Let a thread that polls wait until it can see something else."""
        loop = thread.loads[thread.seen[state] :]
        if len(loop) == 1:
            op, place, index = loop[0]
            self.learned.append((state, place.values[index].bits))
        thread.changed()
        if any(len(place.values) - 1 > index for _, place, index in loop):
            self.chooser.repeats()
            return
        thread.polling = loop
        thread.state = ("polls", loop[-1][0].site)
        thread.op = op = Strong(
            AWAIT, loop[0][0].region, loop[0][0].offset, loop[0][0].nbytes,
            "relaxed", loop[-1][0].site,
        )  # fmt: skip
        op.holds, op.used = lambda value: False, False
        for each, _, _ in loop:
            self._awaiting.setdefault(each.key, []).append((thread, op))
        self.main.switch()

    def wait(self, predicate: Callable[[], bool], wanted: Any = None) -> None:
        """Wait until a predicate of one strong load holds.

        The predicate is called by the waiting thread, for each value that it might see.
        ``wanted`` is ``Strong.wanted``.
        """
        thread = self.me()

        def holds(value: int) -> bool:
            before, self.current, thread.peek = self.current, thread, value
            try:
                return bool(predicate())
            finally:
                self.current, thread.peek = before, None

        holds(0)  # tells which word it loads
        region, offset, nbytes, order = thread.probed
        op = Strong(AWAIT, region, offset, nbytes, order, self.site())
        op.wanted = wanted
        self.await_word(op, holds, used=False)

    def await_word(
        self, op: Strong, holds: Callable[[int], bool], used: bool = True
    ) -> int:
        """Wait until a word's value satisfies a predicate; return the value."""
        thread = self.me()
        op.holds, op.used = holds, used
        value = self._perform(thread, op)
        thread.changed()
        return int(value)

    def block(self, until: Callable[[], bool], what: str) -> None:
        """Let a host wait."""
        thread = self.me()
        thread.state = (what, self.site())
        if not until():
            self._hosts.append((thread, until))
            self.main.switch()

    def meet(
        self, key: Any, expected: int, value: Any, what: str, *, orders: bool = True
    ) -> list[Any]:
        """Wait for other threads; return the values of all, by their numbers.

        Args:
            key: names the barrier.
            expected: how many threads meet.
            value: this thread's.
            what: the barrier, in words.
            orders: whether the threads learn what the others know.
        """
        thread = self.me()
        thread.changed()
        thread.state = (what, self.site())
        group = self._groups.setdefault(key, [])
        if (
            thread.name.block is not None
            and group
            and group[0][0].state != thread.state
        ):
            raise Fault(
                "divergence",
                f"{thread.name.text} is at {what}, and {group[0][0].name.text} at "
                f"{group[0][0].state[0]}; all threads must reach the same one",
                sites=[(t.name.text, t.state[1]) for t in (group[0][0], thread)],
            )
        group.append((thread, value))
        if len(group) < expected:
            return self.main.switch()  # type: ignore[no-any-return]
        del self._groups[key]
        group.sort(key=lambda each: each[0].number)
        parts = slice(None) if orders else slice(1, None)
        clock = np.maximum.reduce([each.clock[parts] for each, _ in group])
        found = [value for _, value in group]
        for other, _ in group:
            other.phase += 1
            np.maximum(other.clock[parts], clock, out=other.clock[parts])
            if other is not thread:
                self._runnable.append((other, found))
        return found

    def fence(self, local: bool = False) -> None:
        """Order the thread's accesses, for all ranks or for its own GPU."""
        thread = self.me()
        for clock in thread.unfenced:
            np.maximum(thread.known, clock, out=thread.known)
        if local:
            thread.fenced_local = thread.known.copy()
        else:
            thread.unfenced.clear()
            thread.fenced = thread.known.copy()

    def _stuck(self) -> None:
        """Raise a Fault: no thread can go on."""
        waiting = [
            (thread.name, *thread.state, thread.op, list(thread.polling))
            for thread in self.threads.values()
        ]
        waiting += [(*each, None, []) for each in self.unmet()]
        kernels = [
            each for each in self.threads.values() if each.name.block is not None
        ]
        if kernels and sum(map(len, self._groups.values())) == len(kernels):
            text = (
                "threads wait at a barrier which other threads of the block never "
                "reach, as they have ended or wait elsewhere"
            )
            raise Fault("divergence", text, waiting=waiting)
        raise Fault("deadlock", "no thread can go on", waiting=waiting)
