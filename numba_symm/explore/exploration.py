"""Explorations of programs: all orders while there is time, then random ones."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numba_symm.errors import ArgumentError
from numba_symm.explore import diagnosis
from numba_symm.explore.faults import CodePlace, Fault, Pruned
from numba_symm.explore.machine import Machine, OutOfTime
from numba_symm.explore.observers import Full, Name
from numba_symm.explore.program import Program
from numba_symm.explore.report import Coverage, ExploreReport, FaultPlace, FoundFault
from numba_symm.explore.search import Random, Replay, Search, learn

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
    numbers = _checked_ranks([ranks] if isinstance(ranks, int) else list(ranks))
    if not seconds > 0:
        raise ArgumentError(f"explore: expected seconds above 0, got {seconds!r}")
    ends, coverage = time.monotonic() + seconds, list[Coverage]()
    for k, number in enumerate(numbers):
        explored = _Exploration(Program(Path(program), number, arguments))
        share = (ends - time.monotonic()) / (len(numbers) - k)
        explored.run(max(share, 0.1))
        coverage.append(explored.coverage)
        if explored.found is not None:
            break
    return ExploreReport(str(program), list(arguments), coverage, explored.found)


def _checked_ranks(numbers: list[Any]) -> list[int]:
    if not numbers or not all(
        type(each) is int and 0 < each <= MOST_RANKS for each in numbers
    ):
        raise ArgumentError(
            f"explore: expected numbers of ranks from 1 to {MOST_RANKS}, got {numbers}"
        )
    return numbers


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
        seed = 0
        while self.found is None and time.monotonic() < began + seconds:
            seed += 1
            chooser = Random(seed, self.coverage.steps)
            if self._one(chooser, began + seconds) is not None:
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
                count = self.coverage.executions + self.coverage.random + 1
                self.found = _described(
                    self._program, chooser, fault, count, self._search
                )
            if not isinstance(chooser, Search):
                learn(self._search.futile, machine)
            self.coverage.steps = max(self.coverage.steps, machine.steps)
            return machine


def _described(
    program: Program, chooser: Any, fault: Fault, execution: int, search: Search
) -> FoundFault:
    """Repeat the execution of a fault, and describe it."""
    replay = Replay(list(chooser.choices))
    machine = program.execute(replay, search.futile)
    observed = diagnosis.Observed(machine, fault)
    with contextlib.suppress(Fault, Pruned):
        program.run(machine)
    files, details = program.files, fault.details
    places = [
        _access(observed, details[k]) for k in ("first", "second") if k in details
    ]
    for text, site in details.get("sites", ()):
        places.append(_place(text or "the program", site, files))
    for text, site in diagnosis.waiting(fault, machine):
        places.append(_place(text, site, files))
    hints = []
    if "first" in details:
        hints = [diagnosis.nearest_order(observed, details["first"], details["second"])]
    found = FoundFault(fault.kind, fault.text, program.ranks, execution, places, hints)
    found.trace = diagnosis.trace(observed)
    found.choices = list(chooser.choices)
    found.threads = [(*name,) for name in program.numbers.names]
    return found


def _access(observed: diagnosis.Observed, access: Any) -> FaultPlace:
    machine = observed.machine
    name = machine.numbers.names[access.thread].text
    place = _place(f"{access.does} by {name}", access.site, machine.files)
    place.element = observed.names.get((access.thread, access.time), "")
    return place


def _place(text: str, site: CodePlace, files: Any) -> FaultPlace:
    called = f", in {site.called}" if site.called else ""
    return FaultPlace(
        text + called, site.file, site.line, diagnosis.code_at(site, files)
    )


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
    chooser = Replay([(number, value) for number, value in fault.choices])
    machine = program.execute(chooser, {})
    observed = diagnosis.Observed(machine, Fault("replay", fault.text))
    try:
        program.run(machine)
    except Fault as again:
        if again.kind != fault.kind:
            raise ArgumentError(f"explore: {again}") from None
    return diagnosis.trace(observed)
