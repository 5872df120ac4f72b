"""``numba-symm soak``: makes calls and failures for minutes, and checks the promises.

It starts several jobs, because only another job replaces a killed rank. It watches the
ranks' steps. A step that outlasts its deadline is a fault, and ends the job.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from numba_symm import environment
from numba_symm.arguments import at_least
from numba_symm.bench.soak_marks import FAILURES, JobMarks, RankMarks, SoakJob
from numba_symm.command import launcher
from numba_symm.environment import SIMULATED
from numba_symm.errors import SymmError

PROGRAM = ("-m", "numba_symm.bench.soak")
"""The program of each rank."""

DEADLINES = {
    "NUMBA_SYMM_TIMEOUT": {True: "5", False: "20"},
    "NUMBA_SYMM_SETUP_TIMEOUT": {True: "60", False: "60"},
}
"""Seconds of the deadlines, in the simulator and on GPUs, unless the user sets them."""

GRACE = 5.0
"""Seconds beyond a deadline that processes without a processor may need."""

STARTING = 120.0
"""Seconds in which all ranks start."""

ENDING = 20.0
"""Seconds in which a job ends after its last rank is done."""

LEAKED = 8
"""Descriptors that a rank may have more at the end: MPI opens some late."""

COUNTED = ("calls", "replays", "cycles", "rebuilds")
"""What is counted of collective calls, which all ranks make."""

INTERRUPTED = "interrupted"
"""The kind of the fault of a command that was interrupted."""

_LOOK = 0.05  # seconds between looks at the ranks
_SHOWN = 5.0  # seconds between lines of the output
_WRITING = 0.5  # seconds in which a rank writes its stack
_LINES = 20  # of a job's output, with a fault that it may explain


class Goal(NamedTuple):
    """What a soak has to do.

    Attributes:
        ranks: of each job.
        simulate: whether they run in the simulator.
        seed: determines calls and failures.
        calls: to make; 0: none, or as many as there is time for.
        seconds: for how long; 0: until the others are done.
        cycles: communicators to make and close.
        kills: ranks to kill.
    """

    ranks: int
    simulate: bool
    seed: int
    calls: int
    seconds: float
    cycles: int
    kills: int


class SoakReport:
    """What the jobs of a soak have done and found.

    Args:
        goal: what they have to do.

    Attributes:
        jobs: what the ranks of each job have written.
        faults: what is not as promised.
    """

    def __init__(self, goal: Goal):
        self._goal = goal
        self._began = time.monotonic()
        self.jobs: list[Sequence[RankMarks]] = []
        self.faults: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        """The seconds since the beginning."""
        return time.monotonic() - self._began

    def number(self, name: str) -> int:
        """Return how many there were, such as calls. A collective call counts once."""
        return sum(max(getattr(place, name) for place in job) for job in self.jobs)

    @property
    def ranks(self) -> list[RankMarks]:
        """What the ranks of all jobs have written."""
        return [place for job in self.jobs for place in job]

    @property
    def wrong(self) -> int:
        """The wrong results of all ranks."""
        return sum(place.wrong for place in self.ranks)

    @property
    def failures(self) -> dict[str, int]:
        """How often each failure has happened."""
        return {
            kind: sum(place.failures[number] for place in self.ranks)
            for number, kind in enumerate(FAILURES)
        }

    def as_json(self) -> dict[str, Any]:
        """Return all of it, of the types that JSON has."""
        late = max(self.ranks, key=lambda place: place.beyond)
        return {
            "passed": not self.faults,
            "goal": self._goal._asdict(),
            "seconds": round(self.seconds, 1),
            "jobs": len(self.jobs),
            **{name: self.number(name) for name in COUNTED},
            "failures": self.failures,
            "wrong": self.wrong,
            "beyond": late.beyond,
            "beyond_step": late.beyond_step.decode(),
            "memory": _grown(place.memory for place in self.ranks),
            "descriptors": _grown(place.descriptors for place in self.ranks),
            "faults": self.faults,
        }


def _grown(found: Iterable[Sequence[int]]) -> list[int]:
    """Return the pair of numbers, at the beginning and the end, that differ most."""
    measured = [list(each) for each in found if each[1]]
    return max(measured, key=lambda each: each[1] - each[0], default=[0, 0])


def jobs(goal: Goal, report: SoakReport) -> Iterator[SoakJob]:
    """Yield jobs until the goal is reached. Each leaves at least one rank."""
    most = goal.ranks - 1
    while True:
        kills = goal.kills - report.failures["killed"]
        seconds = goal.seconds - report.seconds
        calls = goal.calls - report.number("calls")
        cycles = goal.cycles - report.number("cycles")
        enough = seconds <= 0 if goal.seconds else calls <= 0
        if report.jobs and enough and max(kills, cycles) <= 0:
            return
        left = max(1, -(-kills // most))
        yield SoakJob(
            seed=goal.seed,
            number=len(report.jobs),
            calls=max(0, -(-calls // left)),
            seconds=max(0.0, seconds / left),
            cycles=max(0, -(-cycles // left)),
            kills=max(0, min(kills, most)),
        )


def played(goal: Goal, console: Console | None) -> SoakReport:
    """Play the jobs of a soak, until one has a fault.

    Args:
        goal: what to do.
        console: where to show the progress; None: nowhere.
    """
    report = SoakReport(goal)
    for job in jobs(goal, report):
        with tempfile.TemporaryDirectory(prefix="numba-symm-soak-") as folder:
            marks = JobMarks(Path(folder), goal.ranks)
            report.jobs.append(marks.places)
            try:
                report.faults += _play(goal, job, marks, report, console)
            except KeyboardInterrupt:
                text = "the command was interrupted, so the soak is not complete"
                report.faults.append(_fault(None, INTERRUPTED, text))
        if report.faults:
            break
    return report


def _play(
    goal: Goal,
    job: SoakJob,
    marks: JobMarks,
    report: SoakReport,
    console: Console | None,
) -> list[dict[str, Any]]:
    """Run one job, and return its faults."""
    flags = ["--with-ft", "ulfm"] if job.kills else []
    program = [*PROGRAM, str(marks.folder), json.dumps(job._asdict())]
    mpirun = launcher.find_mpirun()
    command = launcher.mpirun_command(goal.ranks, program, mpirun, flags)
    environ = launcher.job_environment(os.environ, simulate=goal.simulate)
    launcher.check_sessions(environ)
    for name, seconds in DEADLINES.items():
        environ.setdefault(name, seconds[goal.simulate or SIMULATED])
    log = marks.folder / "output"
    with (
        log.open("w") as output,
        launcher.started(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            found = _watched(process, marks, report, console)
        finally:
            _end(process, marks.places)
    found += marks.faults()
    found += _lost(marks.places, found)
    if not found and not job.kills and process.returncode:  # a rank, after its job
        text = f"mpirun has ended with exit code {process.returncode}"
        found.append(_fault(None, "ended", text))
    if found:
        lines = [each for each in log.read_text().splitlines() if each.strip()]
        for line in lines[-_LINES:]:
            found.append(_fault(None, "output", line))
    return found


def _watched(
    process: "subprocess.Popen[bytes]",
    marks: JobMarks,
    report: SoakReport,
    console: Console | None,
) -> list[dict[str, Any]]:
    """Wait until a job has ended, or a step has outlasted its deadline."""
    began, shown, ended = time.monotonic(), 0.0, 0.0
    while process.poll() is None:
        time.sleep(_LOOK)
        now = time.monotonic()
        running = [each for each in marks.places if each.pid and _runs(each.pid)]
        late = {
            rank: place
            for rank, place in enumerate(marks.places)
            if place.pid and not place.done and place.overdue() > GRACE
            if _runs(place.pid)
        }
        if late:
            return _hanging(late, marks)
        if now - began > STARTING and not all(each.pid for each in marks.places):
            text = f"not all ranks have started in {STARTING:g} s"
            return [_fault(None, "start", text)]
        if running and not all(each.done for each in running):
            ended = now
        if ended and now - ended > ENDING:
            text = f"mpirun has not ended {ENDING:g} s after its ranks"
            return [_fault(None, "end", text)]
        if console is not None and now - shown > _SHOWN:
            shown = now
            numbers = ", ".join(f"{report.number(name)} {name}" for name in COUNTED[:3])
            console.print(
                f"{report.seconds:.0f} s: {numbers}, {report.failures['killed']} "
                f"killed, wrong {report.wrong}",
                highlight=False,
            )
    return []


def _hanging(late: dict[int, RankMarks], marks: JobMarks) -> list[dict[str, Any]]:
    """Return what ranks do that have not ended in time, and where they are."""
    found = []
    for rank, place in late.items():
        text = f"{place.step.decode()}: {place.overdue():.1f} s beyond the deadline"
        place.beyond, place.beyond_step = place.overdue(), place.step
        found.append(_fault(rank, "deadline", text))
    for place in marks.places:
        _signal(place, signal.SIGUSR1)  # the rank writes its stack
    time.sleep(_WRITING)
    for rank in range(len(marks.places)):
        lines = marks.stack(rank).read_text().splitlines()
        found += [_fault(rank, "stack", line) for line in lines]
    return found


def _lost(places: Sequence[RankMarks], found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return which ranks ended without a reason, and which have lost descriptors."""
    faults = []
    killed = FAILURES.index("killed")
    for rank, place in enumerate(places):
        if not place.done and not place.failures[killed] and not found:
            what = place.step.decode() or "start"
            faults.append(_fault(rank, "ended", f"the rank has ended in {what}"))
        more = place.descriptors[1] - place.descriptors[0]
        if more > LEAKED:
            text = f"{more} descriptors more at the end than at the beginning"
            faults.append(_fault(rank, "descriptors", text))
    return faults


def _fault(rank: int | None, kind: str, text: str) -> dict[str, Any]:
    return {"rank": rank, "kind": kind, "text": text}


def _runs(pid: int) -> bool:
    """Return whether a process runs, so it has not ended, waited for or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _signal(place: RankMarks, number: int) -> None:
    if place.pid and _runs(place.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.pid, number)


def _end(process: "subprocess.Popen[bytes]", places: Sequence[RankMarks]) -> None:
    """End a job that has not ended, with its stopped ranks."""
    if process.poll() is not None:
        return
    for place in places:
        _signal(place, signal.SIGKILL)
    process.terminate()  # mpirun removes its files
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def show(report: SoakReport, goal: Goal, console: Console) -> None:
    """Print a report."""
    table = Table(box=None, show_header=False, pad_edge=False)
    found = report.as_json()
    late, step = found["beyond"], found["beyond_step"]
    rows = [
        ("seed", goal.seed),
        ("jobs", f"{found['jobs']} of {goal.ranks} ranks, {found['seconds']:.0f} s"),
        *((name, found[name]) for name in COUNTED[:3]),
        *found["failures"].items(),
        ("rebuilt", found["rebuilds"]),
        ("wrong results", found["wrong"]),
        ("longest wait beyond its deadline", f"{late:.2f} s {step and f'({step})'}"),
        (
            "memory at the beginning and the end",
            " and ".join(f"{each >> 20} MiB" for each in found["memory"]),
        ),
        (
            "descriptors at the beginning and the end",
            " and ".join(map(str, found["descriptors"])),
        ),
    ]
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    console.print(table)
    for fault in report.faults:
        where = "" if fault["rank"] is None else f"rank {fault['rank']}: "
        text = f"{fault['kind']}: {where}{fault['text']}"
        console.print(text, style="red", markup=False, soft_wrap=True)
    console.print("passed" if not report.faults else "failed")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = argparse.ArgumentParser(
        prog="numba-symm soak",
        description="Make random calls of all operations on four communicators at the "
        "same time, and make and close communicators. Meanwhile, let ranks fail: kill, "
        "stop and interrupt ranks, and let them raise or abort. Check each result, "
        "each deadline, and the state after each failure. The exit code is 0 if all "
        "checks pass, otherwise 1.",
        epilog="NUMBA_SYMM_TIMEOUT sets the deadline of calls, by default 5 s in the "
        "simulator and 20 s on GPUs.",
        allow_abbrev=False,
    )
    number: dict[str, Any] = {"metavar": "N", "type": at_least(0)}
    made.add_argument(
        "-n",
        dest="ranks",
        type=at_least(2),
        metavar="RANKS",
        help="default: the number of GPUs, or 4 in the simulator",
    )
    made.add_argument(
        "--simulate", action="store_true", help="use the simulator instead of GPUs"
    )
    length = made.add_mutually_exclusive_group()
    seconds = "time after which no new round of calls begins (default 60)"
    length.add_argument("--seconds", help=seconds, **number)
    length.add_argument("--calls", help="how many calls, instead of seconds", **number)
    cycles = "how many communicators to make and close meanwhile (default 20)"
    made.add_argument("--cycles", default=20, help=cycles, **number)
    kills = "how many ranks to kill meanwhile (default 1), which needs Open MPI 5"
    made.add_argument("--kills", default=1, help=kills, **number)
    seed = (
        "determines the calls and failures, but not when a failure interrupts a call "
        "(default random)"
    )
    made.add_argument("--seed", help=seed, **number)
    made.add_argument("--json", action="store_true", help="print one object of JSON")
    return made


def goal(given: argparse.Namespace, ranks: int, simulate: bool) -> Goal:
    """Return the goal of the command's options.

    Args:
        given: the options.
        ranks: of each job.
        simulate: whether they run in the simulator.

    Raises:
        SymmError: the environment sets no deadline, or a wrong one.
    """
    if not environment.timeout() or os.environ.get("NUMBA_SYMM_SETUP_TIMEOUT") == "0":
        raise SymmError(
            "soak: expected deadlines, got NUMBA_SYMM_TIMEOUT=0 or "
            "NUMBA_SYMM_SETUP_TIMEOUT=0; unset them"
        )
    seconds = 60 if given.seconds is None else given.seconds
    return Goal(
        ranks,
        simulate,
        seed=secrets.randbits(32) if given.seed is None else given.seed,
        calls=given.calls or 0,
        seconds=0 if given.calls is not None else seconds,
        cycles=given.cycles,
        kills=given.kills,
    )


def run(goal: Goal, as_json: bool, console: Console) -> int:
    """Play a soak, print its report, and return the exit code.

    An interrupt ends its job, and it reports what it has made so far.

    Args:
        goal: what to do.
        as_json: whether to print only one object of JSON.
        console: where to print.
    """
    if not as_json:
        console.print(f"seed {goal.seed}", highlight=False)
    # `timeout` and schedulers send SIGTERM. The ranks have sessions of their own.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = played(goal, None if as_json else console)
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, goal, console)
    if any(each["kind"] == INTERRUPTED for each in report.faults):
        return 128 + signal.SIGINT
    return int(bool(report.faults))
