"""What an exploration has covered and found, as text, on a terminal, and as JSON."""

import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

_TRACED = 12  # the steps that a report shows


@dataclass
class Coverage:
    """What was explored with a number of ranks.

    Attributes:
        ranks: the number of ranks.
        complete: whether all orders were explored.
        executions: the executions of the search.
        orders: how many of these differ, if all were explored.
        random: the random executions after it.
        steps: the most atomic accesses of an execution.
        seconds: how long it took.
    """

    ranks: int
    complete: bool = False
    executions: int = 0
    orders: int = 0
    random: int = 0
    steps: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.complete:
            orders = (
                "the only order" if self.orders == 1 else (f"all {self.orders} orders")
            )
            return (
                f"complete: {orders} of {self.steps} steps, {self.ranks} ranks, these "
                "inputs"
            )
        return (
            f"incomplete: {self.executions} executions in {self.seconds:.0f} s, then "
            f"{self.random} random, {self.ranks} ranks, these inputs"
        )


@dataclass
class FaultPlace:
    """Something that a thread did, or waits for.

    Attributes:
        text: what, and which thread.
        file: the file; "" if there is none.
        line: the line.
        code: the line's text.
        element: the program's name of the element; "" if there is none.
    """

    text: str
    file: str = ""
    line: int = 0
    code: str = ""
    element: str = ""


@dataclass
class FoundFault:
    """A fault.

    Attributes:
        kind: ``race``, ``access``, ``deadlock``, ``divergence``, ``livelock``,
            ``result`` or ``error``.
        text: what it is.
        ranks: the number of ranks.
        execution: in which execution it was found, counted from 1.
        places: the accesses, or who waits for whom.
        hints: which orders there are, and what may be missing.
        trace: all atomic accesses of the execution, one after another.
        choices: by thread and value, what repeats the execution.
        threads: the threads' names.
    """

    kind: str
    text: str
    ranks: int
    execution: int
    places: list[FaultPlace] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    choices: list[tuple[int, int]] = field(default_factory=list)
    threads: list[tuple[int, int | None, int, str]] = field(default_factory=list)


@dataclass
class ExploreReport:
    """The result of an exploration.

    Attributes:
        program: the program's file.
        arguments: the program's arguments.
        coverage: what was covered, for each number of ranks.
        fault: the fault that ended it; None: none was found.
    """

    program: str
    arguments: list[str]
    coverage: list[Coverage]
    fault: FoundFault | None = None

    @property
    def complete(self) -> bool:
        """Whether all orders were explored, and no fault was found."""
        return self.fault is None and all(each.complete for each in self.coverage)

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=100, color_system=None))
        return text.getvalue()

    def json(self) -> str:
        """Return the report as one object of JSON, which ``--replay`` reads."""
        return json.dumps({**asdict(self), "complete": self.complete}, indent=1)

    def show(self, console: Console) -> None:
        """Print the report."""
        if self.fault is not None:
            _show_fault(self.fault, console)
        for each in self.coverage:
            color = "green" if each.complete and self.fault is None else "yellow"
            if self.fault is None or each.ranks != self.fault.ranks:
                console.print(f"[{color}]{escape(str(each))}[/]", highlight=False)


def _show_fault(fault: FoundFault, console: Console) -> None:
    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line(
        f"[bold red]{fault.kind}:[/] {escape(fault.text)} ({fault.ranks} ranks, "
        f"execution {fault.execution})"
    )
    for place in fault.places:
        line(
            f"  {escape(place.text)}"
            + f" [cyan]{escape(place.element)}[/]" * bool(place.element)
        )
        if place.file:
            line(
                f"    [dim]{escape(Path(place.file).name)}:{place.line}[/]  "
                f"{escape(place.code)}"
            )
    for hint in fault.hints:
        line(f"  [yellow]{escape(hint)}[/]")
    if fault.trace:
        line(f"  the last of {len(fault.trace)} atomic accesses before it:")
        show_trace(fault.trace[-_TRACED:], console)


def show_trace(trace: list[dict[str, Any]], console: Console) -> None:
    """Print steps of an execution, one a line."""
    for step in trace:
        text = (
            f"    {step['step']:>4} {step['thread']}, {Path(step['file']).name}:"
            f"{step['line']}" + f" in {step['called']}" * bool(step["called"]) + ", "
            f"{step['does']} {step['element']}"
            + f" = {step['value']}"
            * (step["value"] is not None)
        )
        console.print(escape(text), highlight=False, soft_wrap=True)
