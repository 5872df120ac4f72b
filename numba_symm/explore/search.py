"""Which executions of a program are explored: all that differ, or random ones.

Two executions are equivalent if every strong load returns the value of the same store,
and the stores to each place have the same order. Of equivalent executions, one is
explored. The search is dynamic partial-order reduction with source sets and sleep sets
(Abdulla, Aronis, Jonsson and Sagonas, 2014), with two additions:

- A load is a choice between values, also old ones. So a load need not be moved before a
  store to return the value from before. It must be moved behind a store that comes
  later to return that store's value. Sleep sets contain loads with their values.
- A wait is enabled if a value ends it. A wait whose value is overwritten by one that
  does not end it may also look too late.

``tests/host/test_explore_orders.py`` compares the outcomes with those of all orders.
"""

import random
from typing import Any

import numpy as np

from numba_symm.explore.faults import Fault, Pruned
from numba_symm.explore.machine import Machine
from numba_symm.explore.memory import (
    AWAIT,
    CHANGES,
    LATE,
    Strong,
    Value,
    Word,
    teaches_less,
)
from numba_symm.explore.observers import Fiber

_UNDECIDED = -2


class _Executed:
    """An executed access, as later ones may race with it."""

    __slots__ = ("by", "index", "op", "past", "place", "thread")

    def __init__(self, by: Fiber, op: Strong, index: int, place: Word):
        self.by, self.thread, self.op, self.index = by, by.number, op, index
        self.place, self.past = place, by.past


class _State:
    """A state that the search comes back to.

    Attributes:
        thread: the thread that goes on from here.
        index: the value of its access.
        left: other values that are still to be explored.
        todo: threads that must go on from here in some execution.
        done: those that have.
        sleep: accesses, by thread and value, from which all was explored.
        op: the kind and place of the thread's access.
    """

    __slots__ = ("done", "index", "left", "op", "sleep", "thread", "todo")

    def __init__(self, thread: int, sleep: dict[tuple[int, int], tuple[str, int]]):
        self.thread, self.sleep = thread, sleep
        self.index = _UNDECIDED
        self.left: list[int] = []
        self.todo, self.done = {thread}, set[int]()
        self.op: tuple[str, int] | None = None


class Search:
    """Explores all executions that differ.

    Attributes:
        futile: as in ``Machine``. If an execution has learned more, the search begins
            anew: the accesses of threads that poll are now waits.
    """

    def __init__(self) -> None:
        self._stack: list[_State] = []
        self.futile: dict[Any, set[int]] = {}

    def begin(self) -> None:
        """Begin an execution."""
        self._depth = -1
        self._steps: list[_Executed] = []
        self._sleep: dict[tuple[int, int], tuple[str, int]] = {}

    @property
    def choices(self) -> list[tuple[int, int]]:
        """Return the threads and values of the current execution."""
        return [(node.thread, node.index) for node in self._stack[: self._depth + 1]]

    def choose(self, machine: Machine) -> tuple[Fiber, int]:
        """Go on as in an execution before, or from a new state."""
        self._depth += 1
        if self._depth < len(self._stack):
            node = self._stack[self._depth]
            thread = machine.ready.get(node.thread)
            if thread is None or node.op not in (None, _seen(thread)):
                raise Fault(
                    "error",
                    "two executions with the same choices differ; explore programs "
                    "whose steps depend on nothing but their inputs",
                )
            if node.index == _UNDECIDED:
                self._decide(node, self._awake(machine, thread, node.sleep), thread)
        else:
            node, thread = self._extend(machine)
        self._sleep = node.sleep
        return thread, node.index

    def _extend(self, machine: Machine) -> tuple[_State, Fiber]:
        """Return a new node, for a thread that does not sleep."""
        last, ready = machine.last, machine.ready
        order = sorted(ready)
        if last is not None and last.number in ready:
            order = [last.number, *order]
        for number in order:
            thread = ready[number]
            values = self._awake(machine, thread, self._sleep)
            if values:
                node = _State(number, dict(self._sleep))
                self._stack.append(node)
                self._decide(node, values, thread)
                return node, thread
        raise Pruned

    def _awake(
        self, machine: Machine, thread: Fiber, sleep: dict[tuple[int, int], Any]
    ) -> list[int]:
        values = machine.options(thread)
        if not sleep:
            return values
        if thread.op is not None and thread.op.kind in CHANGES:
            asleep = any(number == thread.number for number, _ in sleep)
            return [] if asleep else values
        return [value for value in values if (thread.number, value) not in sleep]

    def _decide(self, node: _State, values: list[int], thread: Fiber) -> None:
        if not values:
            raise Pruned
        node.op = _seen(thread)
        node.index, *node.left = values

    def executed(self, machine: Machine, thread: Fiber, op: Strong, index: int) -> None:
        """Find what else must be explored because of an access that was executed."""
        depth, place = self._depth, op.region.places[op.offset]
        node = self._stack[depth]
        past = thread.past
        step = _Executed(thread, op, index, place)
        if op.kind in CHANGES:
            self._race_with_changes(machine, step, thread)
            for _, _, clock in place.chain:
                np.maximum(past, clock, out=past)
            self._race_with_loads(machine, step, thread)
        else:
            seen = place.values[index if index != LATE else -1].step
            if seen >= 0:
                np.maximum(past, self._steps[seen].past, out=past)
        past[thread.number] = depth + 1
        step.past = past.copy()
        self._steps.append(step)
        if op.kind not in CHANGES:
            place.loads.append(depth)
        else:
            if place.values[-1].step == depth:  # it comes after all that it joined
                place.chain.clear()
            place.chain.append((depth, thread.number, step.past))
        self._sleep = {
            key: other
            for key, other in node.sleep.items()
            if key[0] != thread.number and not _depends(other, key[1], op)
        }

    def _race_with_changes(
        self, machine: Machine, step: _Executed, thread: Fiber
    ) -> None:
        """Explore the other order of two changes of a place."""
        for depth, number, _ in reversed(step.place.chain):
            if thread.past[number] > depth:
                continue
            earlier: int | None = depth
            if step.op.holds is not None:
                earlier = self._enabling(machine, step, thread, depth)
            if earlier is not None:
                self._reverse(earlier, step, thread)

    def _enabling(
        self, machine: Machine, step: _Executed, thread: Fiber, depth: int
    ) -> int | None:
        """Return the last change before which an update could have been executed."""
        values, holds = step.place.values, step.op.holds
        assert holds is not None
        for k in range(len(values) - 1, 0, -1):
            value = values[k]
            if value.step < 0 or value.step > depth:
                continue
            if thread.past[value.thread] > value.step:
                return None
            if holds(values[k - 1].bits):
                return value.step
        return None

    def _race_with_loads(
        self, machine: Machine, step: _Executed, thread: Fiber
    ) -> None:
        """Explore executions in which earlier loads return the value of a store."""
        place = step.place
        if place.values[-1].step != self._depth:
            return  # an update that changed nothing
        for depth in reversed(place.loads):
            load = self._steps[depth]
            if thread.past[load.thread] > depth or load.thread == thread.number:
                continue
            if load.op.kind is AWAIT and not self._matters(machine, load, place):
                continue
            self._reverse(depth, step, thread)

    def _matters(self, machine: Machine, load: _Executed, place: Word) -> bool:
        """Return whether an ended wait might go on otherwise with a new value."""
        if load.index == LATE:
            return True
        old: Value = place.values[load.index]
        new: Value = place.values[-1]
        holds = load.op.holds
        assert holds is not None
        before, machine.current = machine.current, load.by
        try:
            ends = holds(new.bits)
        finally:
            machine.current = before
        return not ends or load.op.used or not teaches_less(old, new)

    def _reverse(self, depth: int, step: _Executed, thread: Fiber) -> None:
        """Explore executions in which a step comes before the access of a node."""
        node, first = self._stack[depth], self._steps[depth]
        after = [
            k
            for k in range(depth + 1, len(self._steps))
            if self._steps[k].past[first.thread] <= depth
        ]
        begins: dict[int, int] = {}  # by thread, the first step
        for k in after:
            begins.setdefault(self._steps[k].thread, k)

        def leads(k: int) -> bool:
            past = self._steps[k].past
            return not any(past[self._steps[j].thread] > j for j in after if j < k)

        def step_leads() -> bool:
            return not any(thread.past[self._steps[j].thread] > j for j in after)

        for number in node.todo:
            if number in begins:
                if leads(begins[number]):
                    return
            elif number == thread.number and step_leads():
                return
        for (number, index), (kind, _) in node.sleep.items():
            if number in begins:
                k = begins[number]
                same = kind in CHANGES or self._steps[k].index == index
                if same and leads(k):
                    return
            elif number == thread.number and kind in CHANGES and step_leads():
                return
        for k in after:
            if thread.past[self._steps[k].thread] > k:
                node.todo.add(self._steps[k].thread)
                return
        node.todo.add(thread.number)

    def repeats(self) -> None:
        """End an execution in which a thread polls more often than it must."""
        raise Pruned

    def next(self, machine: Machine) -> bool:
        """Prepare the next execution; return whether there is one."""
        if learn(self.futile, machine):
            self._stack.clear()
            return True
        del self._stack[self._depth + 1 :]
        while self._stack:
            node = self._stack[-1]
            if node.index != _UNDECIDED and node.op is not None:
                node.sleep[node.thread, node.index] = node.op
            if node.left:
                node.index = node.left.pop(0)
                return True
            node.done.add(node.thread)
            rest = node.todo - node.done
            if rest:
                node.thread, node.index, node.op = min(rest), _UNDECIDED, None
                return True
            self._stack.pop()
        return False


def learn(futile: dict[Any, set[int]], machine: Machine) -> bool:
    """Add what an execution has learned; return whether that was anything."""
    for state, value in machine.learned:
        futile.setdefault(state, set()).add(value)
    return bool(machine.learned)


def _seen(thread: Fiber) -> tuple[str, int]:
    assert thread.op is not None
    return thread.op.kind, thread.op.key


def _depends(asleep: tuple[str, int], index: int, op: Strong) -> bool:
    """Return whether an access that sleeps must wake after another one."""
    kind, key = asleep
    if key != op.key or op.kind not in CHANGES:
        return False
    return kind in CHANGES or index == LATE


class Random:
    """Explores random executions: any thread, or the one of the highest priority.

    Priorities are random and change a few times: this is probabilistic concurrency
    testing, which delays one thread for very long.
    """

    def __init__(self, seed: int, steps: int):
        self._random = random.Random(seed)
        self._priorities: dict[int, float] | None = None
        if self._random.random() < 0.5:
            self._priorities = {}
        self._falls = {self._random.randrange(max(1, steps)) for _ in range(3)}
        self._lowest = 0.0
        self.choices: list[tuple[int, int]] = []

    def choose(self, machine: Machine) -> tuple[Fiber, int]:
        """Choose a thread; a value is the newest with a probability of one half."""
        number = self._thread(sorted(machine.ready))
        thread = machine.ready[number]
        values = machine.options(thread)
        value = values[0]
        if len(values) > 1 and self._random.random() < 0.5:
            value = self._random.choice(values)
        self.choices.append((number, value))
        return thread, value

    def _thread(self, ready: list[int]) -> int:
        if self._priorities is None:
            return self._random.choice(ready)
        priorities = self._priorities
        for number in ready:
            priorities.setdefault(number, self._random.random())
        best = max(ready, key=priorities.__getitem__)
        if len(self.choices) in self._falls:
            self._lowest -= 1
            priorities[best] = self._lowest
            best = max(ready, key=priorities.__getitem__)
        return best

    def executed(self, machine: Machine, thread: Fiber, op: Strong, index: int) -> None:
        """Do nothing."""

    def repeats(self) -> None:
        """Do nothing: the thread polls again."""


class Replay(Random):
    """Repeats an execution from its choices."""

    def __init__(self, choices: list[tuple[int, int]]):
        super().__init__(0, 0)
        self._given = choices

    def choose(self, machine: Machine) -> tuple[Fiber, int]:
        """Choose as before; after all choices, as long as the program goes on."""
        at = len(self.choices)
        if at >= len(self._given):
            return super().choose(machine)
        number, value = self._given[at]
        thread = machine.ready.get(number)
        values = [] if thread is None else machine.options(thread)
        if value == LATE and LATE not in values:
            value = values[0] if values else value  # a loop that polls looks so
        if thread is None or value not in values:
            raise Fault(
                "error",
                f"step {at} of the recorded execution cannot be repeated; the program, "
                "or what its steps depend on, has changed",
            )
        self.choices.append((number, value))
        return thread, value
