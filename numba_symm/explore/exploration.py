"""Explorations: a program, its executions, and which ones are made.

Which executions of a program are explored: all that differ, or random ones.

Two executions are equivalent if every strong load returns the value of the same store,
and the stores to each place have the same order. Of equivalent executions, one is
explored. The search is dynamic partial-order reduction with source sets and sleep sets
(Abdulla, Aronis, Jonsson and Sagonas, 2014), with three additions:

- A load is a choice between values, also old ones. So a load need not be moved before a
  store to return the value from before. It must be moved behind a store that comes
  later to return that store's value. Sleep sets contain loads with their values.
- Updates of a word whose results the program drops have no order, as long as all of
  them commute and nothing else accesses the word. If something does, the search begins
  anew, and these updates have an order.
- A wait is enabled if a value ends it. A wait whose value is overwritten by one that
  does not end it may also look too late.

``tests/host/test_explore_orders.py`` compares the outcomes with those of all orders.
"""

import contextlib
import functools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

import numba_symm
from numba_symm import environment, errors
from numba_symm.collectives.plans import Plan
from numba_symm.collectives.requests import Request
from numba_symm.errors import ArgumentError
from numba_symm.explore import diagnosis, standins
from numba_symm.explore.findings import Coverage, ExploreReport, FaultPlace, FoundFault
from numba_symm.explore.host import AllRanks, Host, make_mpi
from numba_symm.explore.machine import (
    Fiber,
    Full,
    Machine,
    Name,
    Numbers,
    OutOfTime,
)
from numba_symm.explore.memory import (
    AWAIT,
    CHANGES,
    LATE,
    CodePlace,
    Fault,
    Pruned,
    Strong,
    Unsupported,
    Value,
    Word,
    teaches_less,
)
from numba_symm.explore.standins import (
    Modules,
    StandIn,
    make_cuda,
    make_numba,
    module_path,
)
from numba_symm.explore.threads import unsupported
from numba_symm.explore.works import ExploredCommunicator

_REFUSED = (
    *("torch", "cupy", "jax", "multiprocessing", "threading", "concurrent"),
    *("numba", "numba_symm", "mpi4py"),  # what of them has no stand-in
)


class Program:
    """A program on some ranks.

    Attributes:
        path: its file.
        ranks: the number of ranks.
        files: the lines of all its files so far.
        numbers: the numbers of its threads.
    """

    def __init__(self, path: Path, ranks: int, arguments: Sequence[str] = ()):
        self.path, self.ranks, self.arguments = path, ranks, list(arguments)
        self.files: dict[str, list[str]] = {}
        self.numbers = Numbers()
        self._compiled = functools.cache(self._code)
        try:
            self._compiled(path)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise ArgumentError(
                f"explore: expected a Python program, got {path}: {error}"
            ) from None

    def _code(self, path: Path) -> CodeType:
        text = path.read_text()
        code = compile(text, str(path), "exec")
        self.files[str(path)] = text.splitlines()
        return code

    def _find(self, name: str) -> Path | None:
        """Return the file of a module beside the program."""
        path = module_path(self.path.parent, name)
        if path is None and name.partition(".")[0] in _REFUSED:
            raise unsupported(f"the module {name}")
        return path if path != self.path else None

    def _modules(self, machine: Machine) -> Modules:
        device, symm = standins.device().known, standins.device_module()
        names = {
            name: getattr(errors, name)
            for name in numba_symm.__all__
            if hasattr(errors, name)
        }
        simulated = StandIn("numba_symm.environment", SIMULATED=True)
        package = StandIn(
            "numba_symm", Communicator=ExploredCommunicator, device=symm, errors=errors,
            Context=symm.Context, Plan=Plan, Request=Request, environment=simulated,
            allow_overlapping_devices=environment.allow_overlapping_devices, **names,
        )  # fmt: skip
        known: dict[str, Any] = {
            "numba_symm": package,
            "numba_symm.environment": simulated,
            "numba_symm.errors": errors,
        }
        known |= {
            name: module
            for name, module in device.items()
            if name.startswith(standins.DEVICE)
        }
        known |= make_numba(make_cuda()) | make_mpi()
        return Modules(
            known, self._find, self._compiled, {"print": lambda *_, **__: None}
        )

    def execute(self, chooser: Any, futile: dict[Any, set[int]]) -> Machine:
        """Return a new execution, which has not begun.

        Raises:
            Full: the program has more threads than the numbers have room for.
        """
        machine = Machine(chooser, self.files, self.numbers, futile)
        world = AllRanks(machine, self.ranks)
        for rank in range(self.ranks):
            name = Name(rank, None, 0, f"the host of rank {rank}")
            machine.start(
                name,
                machine.clock(),
                functools.partial(self._run, machine),
                Host(world, rank),
            )
        return machine

    def _run(self, machine: Machine) -> None:
        self._modules(machine).execute("__main__", self.path)
        machine.me().local.drain()

    def run(self, machine: Machine) -> None:
        """Run an execution to its end.

        Raises:
            Fault: the program has a fault.
            Unsupported: it uses something that has no stand-in.
        """
        before, sys.argv = sys.argv, [str(self.path), *self.arguments]
        try:
            machine.run()
        except Fault as fault:
            fault.details = fault.details or {"sites": self._sites(fault, machine)}
            raise
        except (Unsupported, Full):
            raise
        except Exception as error:
            raise self._fault(error, machine) from error
        except SystemExit as error:
            raise Fault("error", f"the program exits with {error.code!r}") from error
        finally:
            sys.argv = before

    def _sites(
        self, error: BaseException, machine: Machine
    ) -> list[tuple[str, CodePlace]]:
        """Return which thread of the program has raised an exception, and where."""
        return [
            (machine.error[1] if machine.error else "", CodePlace(file, line or 0))
            for file, line, *_ in traceback.extract_tb(error.__traceback__)
            if file in self.files
        ][-1:]

    def _fault(self, error: Exception, machine: Machine) -> Fault:
        """Return the fault of an exception that the program has raised."""
        sites = self._sites(error, machine)
        if not sites:  # of the explorer itself
            raise error
        kind = "result" if isinstance(error, AssertionError) else "error"
        text = str(error).strip() or "without a text"
        return Fault(kind, f"{type(error).__name__}: {text}", sites=sites)


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
        if op.kind not in CHANGES:
            seen = place.values[index if index != LATE else -1].step
            if seen >= 0:
                np.maximum(past, self._steps[seen].past, out=past)
        elif not op.silent:  # nothing depends on the order of silent updates
            self._race_with_changes(machine, step, thread)
            for _, _, clock in place.chain:
                np.maximum(past, clock, out=past)
            self._race_with_loads(machine, step, thread)
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
            earlier = self._enabling(step, thread, depth)
            if earlier is not None:
                self._reverse(earlier, step, thread)

    def _enabling(self, step: _Executed, thread: Fiber, depth: int) -> int | None:
        """Return the last change before which a change could have been executed."""
        values, holds = step.place.values, step.op.holds
        if holds is None:
            return depth
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
        return not holds(new.bits) or load.op.used or not teaches_less(old, new)

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

        def leads(past: Any, end: int) -> bool:
            return not any(past[self._steps[j].thread] > j for j in after if j < end)

        paths = {number: (self._steps[k].past, k) for number, k in begins.items()}
        paths.setdefault(thread.number, (thread.past, len(self._steps)))
        known = set(node.todo)
        for (number, index), (kind, _) in node.sleep.items():
            same = number in begins and self._steps[begins[number]].index == index
            if kind in CHANGES or same:
                known.add(number)
        if any(leads(*paths[number]) for number in known & paths.keys()):
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

    Priorities are random. They change at each step; or a few times, which delays one
    thread for very long (probabilistic concurrency testing).
    """

    def __init__(self, seed: int, steps: int):
        self._random = random.Random(seed)
        self._keeps = self._random.random() < 0.5
        self._priorities: dict[int, float] = {}
        self._falls = {self._random.randrange(max(1, steps)) for _ in range(3)}
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
        if not self._keeps:
            self._priorities.clear()
        for number in ready:
            self._priorities.setdefault(number, self._random.random())
        best = max(ready, key=self._priorities.__getitem__)
        if len(self.choices) in self._falls:
            self._priorities[best] = -len(self.choices)
            best = max(ready, key=self._priorities.__getitem__)
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


_SHARE = 0.7
"""The part of the time for all orders; the rest is for random ones."""

MOST_RANKS = 64


def run(
    program: str | os.PathLike[str],
    ranks: int | Sequence[int] = (2,),
    seconds: float = 60.0,
    arguments: Sequence[str] = (),
) -> ExploreReport:
    """Explore a program; no MPI and no GPU is used.

    The program runs in this process, in threads of its own kind, and imports stand-ins
    for mpi4py, numba and numba_symm. What it prints is dropped.

    Args:
        program: the program's file, as ``numba-symm run`` would start it.
        ranks: one or more numbers of ranks.
        seconds: the time for all of them together. While there is time, the program's
            executions in all orders are explored, and after 70 % of it random ones.
        arguments: the program's arguments.

    Returns:
        What was covered, and the first fault.

    Raises:
        ArgumentError: an argument is wrong.
        Unsupported: the program uses something that has no stand-in; the text names it
            and the line.
    """
    numbers: list[Any] = [ranks] if isinstance(ranks, int) else list(ranks)
    if not numbers or not all(
        type(each) is int and 0 < each <= MOST_RANKS for each in numbers
    ):
        raise ArgumentError(
            f"explore: expected numbers of ranks from 1 to {MOST_RANKS}, got {numbers}"
        )
    if not seconds > 0:
        raise ArgumentError(f"explore: expected seconds above 0, got {seconds!r}")
    path = Path(program).resolve()  # the report's is replayed in any folder
    ends, coverage = time.monotonic() + seconds, list[Coverage]()
    for k, number in enumerate(numbers):
        explored = _Exploration(Program(path, number, arguments))
        explored.run(max((ends - time.monotonic()) / (len(numbers) - k), 0.1))
        coverage.append(explored.coverage)
        if explored.found is not None:
            break
    return ExploreReport(str(path), list(arguments), coverage, explored.found)


class _Exploration:
    """The exploration of a program with one number of ranks."""

    def __init__(self, program: Program):
        self._program = program
        self.coverage = Coverage(program.ranks)
        self.found: FoundFault | None = None
        self._search = Search()

    def run(self, seconds: float) -> None:
        """Explore until all is explored, a fault is found, or the time is over."""
        began = time.monotonic()
        done = self._all(began + _SHARE * seconds)
        self.coverage.seconds = time.monotonic() - began
        if done:
            self.coverage.complete = self.found is None
            return
        # Counted from here: a machine that paused does not take their whole share.
        deadline, seed = time.monotonic() + (1 - _SHARE) * seconds, 0
        while self.found is None and time.monotonic() < deadline:
            seed += 1
            chooser = Random(seed, self.coverage.steps)
            if self._one(chooser, deadline) is not None:
                self.coverage.random += 1

    def _all(self, deadline: float) -> bool:
        """Explore all orders; return whether the search is over."""
        search = self._search
        while True:
            search.begin()
            machine = self._one(search, deadline)
            if machine is None:
                return False
            self.coverage.executions += 1
            if machine.learned:  # the search begins anew
                self.coverage.orders = 0
            if self.found is not None or not search.next(machine):
                return True
            if time.monotonic() > deadline:
                return False

    def _one(self, chooser: Any, deadline: float) -> Machine | None:
        """Make one execution; return None if the time is over before its end."""
        while True:
            machine = self._program.execute(chooser, self._search.futile)
            machine.deadline = deadline
            try:
                self._program.run(machine)
                self.coverage.orders += 1
            except Pruned:
                pass
            except OutOfTime:
                return None
            except Full:
                self._program.numbers.room *= 2
                if isinstance(chooser, Search):
                    chooser.begin()
                continue
            except Fault as fault:
                self.found = _described(
                    self._program,
                    chooser,
                    fault,
                    1 + self.coverage.executions + self.coverage.random,
                    self._search,
                )
            if not isinstance(chooser, Search):
                learn(self._search.futile, machine)
            self.coverage.steps = max(self.coverage.steps, machine.steps)
            return machine


def _described(
    program: Program, chooser: Any, fault: Fault, execution: int, search: Search
) -> FoundFault:
    """Repeat the execution of a fault, and describe it."""
    machine = program.execute(Replay(list(chooser.choices)), search.futile)
    observed = diagnosis.Observed(machine, fault)
    with contextlib.suppress(Fault, Pruned):
        program.run(machine)
    files, details = program.files, fault.details
    accesses = [details[k] for k in ("first", "second") if k in details]
    places = [_access(observed, each) for each in accesses]
    places += [
        _place(text or "the program", site, files)
        for text, site in (
            *details.get("sites", ()),
            *diagnosis.waiting(fault, machine),
        )
    ]
    return FoundFault(
        fault.kind, fault.text, program.ranks, execution, places,
        [diagnosis.nearest_order(observed, *accesses)] if len(accesses) == 2 else [],
        diagnosis.trace(observed), list(chooser.choices),
        [(*name,) for name in program.numbers.names],
    )  # fmt: skip


def _access(observed: diagnosis.Observed, access: Any) -> FaultPlace:
    name = observed.machine.numbers.names[access.thread].text
    place = _place(f"{access.does} by {name}", access.site, observed.machine.files)
    place.element = observed.of(access)[0]
    return place


def _place(text: str, site: CodePlace, files: Any) -> FaultPlace:
    if site.called:
        text += f", in {site.called}"
    return FaultPlace(text, site.file, site.line, diagnosis.code_at(site, files))


def replay(file: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Repeat the execution of a report's fault; return its steps.

    Args:
        file: the JSON of a report.

    Raises:
        ArgumentError: the file is no such report, or has no fault.
        Fault: the program has changed, so the execution cannot be repeated.
    """
    try:
        given = json.loads(Path(file).read_text())
        fault = FoundFault(**given["fault"])
        program = Program(Path(given["program"]), fault.ranks, given["arguments"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"explore: expected the JSON of a report with a fault, got {file}: {error}"
        ) from None
    for each in fault.threads:
        program.numbers.room = max(program.numbers.room, 2 * len(fault.threads))
        program.numbers.number(Name(*each))
    machine = program.execute(Replay([(*choice,) for choice in fault.choices]), {})
    observed = diagnosis.Observed(machine, Fault("replay", fault.text))
    try:
        program.run(machine)
    except Fault as again:
        if again.kind != fault.kind:
            raise ArgumentError(f"explore: {again}") from None
    return diagnosis.trace(observed)
