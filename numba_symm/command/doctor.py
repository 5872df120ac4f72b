"""``numba-symm doctor`` and ``numba-symm status``: a machine's and a job's state.

``numba-symm doctor``: finds problems of this machine, and states remedies.

Alone, it checks the node, and starts a job with a rank for each GPU. Under mpirun, the
ranks check their nodes, compare them, and check each other.

``numba-symm status``: shows what a running job's ranks do, without stopping them.

A process that has a communicator has the status board's memory open. Another process of
the same user opens that memory through ``/proc``, and maps it.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from numba_symm.command import doctor_checks, launcher
from numba_symm.command.doctor_checks import FITS, LOOK, WRONG, Finding
from numba_symm.command.runner import IN_PLACE, SURVIVE
from numba_symm.engines import nccl
from numba_symm.environment import SIMULATED
from numba_symm.errors import Aborted, CollectiveError, SymmError
from numba_symm.launch import call_records, devices, info, locks, ranks, waiting
from numba_symm.launch.board import BOARD, BoardMemory, nbytes_of, size_of
from numba_symm.launch.call_records import MAGIC, Records
from numba_symm.launch.waiting import Wait

PATIENCE = 25.0
"""Seconds that the job may take."""

MEET, MAKE, MEASURE, LIMIT = 10.0, 16.0, 19.0, 22.0
"""Seconds after which the ranks of a job give up: waiting for what all ranks find out
about their nodes; making a communicator; measuring more pairs; everything."""

COMPARED = ("system", "python", "packages", "driver", "gpus", "variables")
"""The facts that should be equal on all nodes."""

_STYLES = {FITS: "green", LOOK: "yellow", WRONG: "bold red"}


def checked(options: Any) -> dict[str, Any] | None:
    """Return the report; under mpirun None on all ranks but rank 0. Collective.

    Args:
        options: of the command line: ``ranks``, ``simulate``.
    """
    if ranks.launched_size() > 1:
        return of_ranks()
    try:
        mpirun = launcher.find_mpirun()
    except SymmError:
        mpirun = None
    facts = info.facts(mpirun)
    findings = doctor_checks.node_findings(facts)
    measured: dict[str, Any] = {}
    if mpirun is not None and not any(
        each.state == WRONG and each.check == "MPI" for each in findings
    ):
        found, measured = _of_a_job(options, mpirun, len(facts["gpus"]))
        findings += found
    return report(findings, measured)


def report(findings: Sequence[Finding], measured: dict[str, Any]) -> dict[str, Any]:
    """Return the report, of the types that JSON has."""
    fits = all(each.state != WRONG for each in findings)
    return {
        "fits": fits,
        "findings": [each._asdict() for each in findings],
        **measured,
    }


def of_ranks() -> dict[str, Any] | None:
    """Check the nodes of a job and its ranks; return the report on rank 0.

    Each wait ends at a time of its own, so that the report says what was not checked.
    Only a rank that hangs in the driver or in a file system reaches ``LIMIT``.
    """
    file = sys.__stderr__ or sys.stderr
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=file)
    try:
        return _of_ranks(time.monotonic())
    finally:
        faulthandler.cancel_dump_traceback_later()


def _of_ranks(began: float) -> dict[str, Any] | None:
    from mpi4py import MPI
    from mpi4py.run import set_abort_status

    world = MPI.COMM_WORLD
    try:
        found = _of_all_nodes(world, began + MEET)
    except CollectiveError as error:
        if world.rank:
            return None
        set_abort_status(1)  # otherwise MPI would wait for the late rank at the end
        text = "nodes were not compared, and the memory of no pair was checked"
        return report([late(error), Finding("skipped", LOOK, text, _AFTER)], {})
    findings, measured = doctor_checks.pair_findings(
        world, began + MAKE, began + MEASURE
    )
    return None if world.rank else report(found + findings, measured)


def _of_all_nodes(world: Any, end: float) -> list[Finding]:
    """Return the findings about all nodes, the same on all ranks. Collective.

    Raises:
        CollectiveError: a rank has not come by ``end``, a moment of ``monotonic``.
    """
    mine = locks.duplicate(world, _wait(world.rank, end))
    locks.claim(mine)
    here = ranks.here()
    place, _ = ranks.place(world.rank, _gathered(mine, here, end))
    moment = time.time()  # of all ranks the same, but for the time of a message
    facts, own = {}, []
    if place.local_rank == 0:
        facts = info.facts(None)
        # The launcher has started this process, whatever is on PATH.
        facts["mpirun"] = {"path": "mpirun", "version": facts["mpi"]["library"]}
        facts["nccl"] = nccl.found().version
        own = doctor_checks.node_findings(facts)
    given = here[1], facts, own, moment, _place()
    everyone = _gathered(mine, given, end)
    ranks.release(mine)
    first = everyone[0][3]
    found = [(*each[:3], each[3] - first) for each in everyone if each[1]]
    return of_nodes(found) + of_places([each[4] for each in everyone])


def _gathered(mine: Any, value: Any, end: float) -> list[Any]:
    return waiting.all_gather(mine, value, _wait(mine.rank, end))


def _wait(rank: int, end: float) -> Wait:
    # Above 0, because 0 is a wait without an end.
    return Wait("doctor", rank, max(0.1, end - time.monotonic()), "the doctor's limit")


def late(error: CollectiveError) -> Finding:
    """Return the finding of a rank that has not come."""
    return Finding(
        "job",
        WRONG,
        str(error),
        "look at the process of that rank (py-spy dump, nvidia-smi, dmesg), and "
        "whether its node can read the files of this Python",
    )


_AFTER = "correct the above, and call numba-symm doctor again"


class Surroundings(NamedTuple):
    """Where a rank runs.

    Attributes:
        machine: the boot id of its Linux kernel, or its first bytes.
        namespaces: by kind, the namespace.
        gpus: the UUIDs of the GPUs that it sees.
    """

    machine: bytes
    namespaces: dict[str, str]
    gpus: tuple[str, ...]


def _place() -> Surroundings:
    seen = () if SIMULATED else tuple(gpu.uuid for gpu in devices.visible_gpus())
    kinds = {}
    for kind in ("ipc", "net", "pid"):
        with suppress(OSError):
            kinds[kind] = str(Path(f"/proc/self/ns/{kind}").readlink())
    return Surroundings(ranks.here()[0], kinds, seen)


def of_places(places: Sequence[Surroundings]) -> list[Finding]:
    """Return what ranks of one machine should have in common, and have not."""
    found = []
    for machine in dict.fromkeys(each.machine for each in places):
        here = [rank for rank, each in enumerate(places) if each.machine == machine]
        first = places[here[0]]
        apart = {
            kind: rank
            for rank in here
            for kind, name in places[rank].namespaces.items()
            if name != first.namespaces.get(kind)
        }
        if apart:
            found.append(
                Finding(
                    "containers",
                    LOOK,
                    f"ranks {here[0]} and {max(apart.values())} are on one machine, in "
                    f"different namespaces ({', '.join(sorted(apart))})",
                    "start all ranks of a machine in one container, or with "
                    "--network=host --ipc=host --pid=host",
                )
            )
        other = next((r for r in here if places[r].gpus != first.gpus), None)
        if other is not None:
            found.append(
                Finding(
                    "GPUs",
                    LOOK,
                    f"ranks {here[0]} and {other} are on one machine, and see "
                    "different GPUs, so peer access cannot be checked beforehand",
                    "let each rank see all GPUs of the job; with Slurm, "
                    "--gpus-per-node instead of --gpus-per-task",
                )
            )
    return found


Node = tuple[str, dict[str, Any], list[Finding], float]
"""Its name, its facts, its findings, and how far its clock is ahead in seconds."""


def of_nodes(nodes: Sequence[Node]) -> list[Finding]:
    """Return the findings of all nodes, and where nodes differ."""
    by_finding: dict[Finding, list[str]] = {}
    for name, _, own, _ in nodes:
        for finding in own:
            by_finding.setdefault(finding, []).append(name)
    found = [
        finding
        if len(names) == len(nodes)
        else finding._replace(text=f"on {', '.join(names)}: {finding.text}")
        for finding, names in by_finding.items()
    ]
    found += _differences(nodes)
    return found


def _differences(nodes: Sequence[Node]) -> list[Finding]:
    found = []
    for fact in COMPARED:
        texts: dict[str, list[str]] = {}
        for name, facts, _, _ in nodes:
            texts.setdefault(json.dumps(_comparable(fact, facts[fact])), []).append(
                name
            )
        if len(texts) > 1:
            words = "; ".join(f"{', '.join(n)}: {text}" for text, n in texts.items())
            found.append(
                Finding(
                    "nodes",
                    LOOK if fact == "system" else WRONG,
                    f"{fact} differ between nodes: {words}",
                    "start all ranks with one environment and on equal nodes",
                )
            )
    ahead = {name: seconds for name, _, _, seconds in nodes if abs(seconds) > 1}
    if ahead:
        text = ", ".join(f"{name} by {each:.1f} s" for name, each in ahead.items())
        advice = "synchronize the nodes' clocks (chrony)"
        found.append(
            Finding("clock", LOOK, f"clocks differ from rank 0's: {text}", advice)
        )
    return found


def _comparable(fact: str, value: Any) -> Any:
    """Return what should be equal on all nodes."""
    if fact == "gpus":
        return sorted(gpu["name"] for gpu in value)
    if fact == "variables":
        shared = ("NUMBA_", "NCCL_", "CUDA_MODULE_", "UCX_", "FI_", "OMPI_MCA_")
        return {k: v for k, v in value.items() if k.startswith(shared)}
    return value


def _of_a_job(
    options: Any, mpirun: str, seen: int
) -> tuple[list[Finding], dict[str, Any]]:
    """Start a job of this node's ranks; return its findings and measurements."""
    simulate = options.simulate or SIMULATED or not seen
    number = options.ranks or (2 if simulate else seen)
    command = launcher.mpirun_command(
        number, ["-m", "numba_symm.command.doctor"], mpirun, ()
    )
    environ = launcher.job_environment(os.environ, simulate=simulate)
    with launcher.started(  # waits for it, and closes its pipes, in any case
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            output, errors = job.communicate(timeout=PATIENCE)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return [_lost(command, f"has not ended after {PATIENCE:g} s")], {}
    try:
        found = json.loads(output.splitlines()[-1])
        findings = [Finding(**each) for each in found.pop("findings")]
    except (IndexError, ValueError, KeyError, TypeError):
        lines = [each for each in (errors + output).splitlines() if each.strip()]
        last = lines[-1] if lines else "nothing was printed"
        return [_lost(command, f"ended with code {job.returncode}: {last}")], {}
    del found["fits"]
    # This process has checked the node.
    new = [each for each in findings if each.check in _OF_JOBS or each.state == WRONG]
    text = f"{number} ranks started{' in the simulator' * simulate}"
    return [Finding("job", FITS, text), *new], found


_OF_JOBS = ("islands", doctor_checks.CHECK, "links")


def _lost(command: Sequence[str], how: str) -> Finding:
    return Finding(
        "job",
        WRONG,
        f"`{' '.join(command[:3])} …` {how}",
        "run `numba-symm run -n 2 --simulate` with a small program of mpi4py, and "
        "correct what it prints",
    )


def show(found: dict[str, Any], console: Console) -> None:
    """Print a report."""
    table = Table("", "Check", "Found", title="numba-symm doctor", title_justify="left")
    for each in map(lambda one: Finding(**one), found["findings"]):
        text = escape(each.text)
        if each.advice:
            text += f"\n[bold]→ {escape(each.advice)}[/]"
        table.add_row(f"[{_STYLES[each.state]}]{each.state}[/]", each.check, text)
    console.print(table)
    rows = found.get("bandwidth", [])
    if len(rows) > 1:
        matrix = Table("from \\ to", *map(str, range(len(rows))), title="GB/s")
        for rank, row in enumerate(rows):
            matrix.add_row(str(rank), *("-" if x is None else f"{x:.1f}" for x in row))
        console.print(matrix)
    states = [each["state"] for each in found["findings"]]
    wrong, look = states.count(WRONG), states.count(LOOK)
    verdict = "fits" if found["fits"] else "does not fit"
    console.print(f"This machine {verdict}: {wrong} wrong, {look} to look at.")


if __name__ == "__main__":  # a rank of the job that the command has started
    result = of_ranks()
    if result is not None:
        print(json.dumps(result), flush=True)
    sys.exit(0)


_PROC = Path("/proc")


class RunningBoard(NamedTuple):
    """A board of a running job.

    Attributes:
        inode: of its memory file, which is the same in all processes.
        path: where it can be opened.
        size: the number of ranks.
    """

    inode: int
    path: Path
    size: int


def found(processes: Sequence[int]) -> list[RunningBoard]:
    """Return the boards that processes have open, each once, the oldest first."""
    boards: dict[int, RunningBoard] = {}
    for pid in processes:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for path in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    name = str(path.readlink())
                    if name.startswith(f"/memfd:numba_symm {BOARD}"):
                        facts = path.stat()
                        size = size_of(facts.st_size)
                        if size and facts.st_ino not in boards:
                            each = RunningBoard(facts.st_ino, path, size)
                            boards[facts.st_ino] = each
    return sorted(boards.values(), key=_age)


def _age(board: RunningBoard) -> tuple[int, int]:
    with contextlib.suppress(OSError), opened(board) as (_, records):
        return records.began, board.inode
    return 0, board.inode  # it has been closed meanwhile


def family(pid: int) -> list[int]:
    """Return a process and all that it has started, also indirectly."""
    parents = {}
    for each in every_process():
        with contextlib.suppress(OSError, ValueError):
            parents[each] = int(_stat(each)[1])
    members = [pid]
    for member in members:
        members += [each for each, parent in parents.items() if parent == member]
    return members


def _stat(pid: int) -> list[str]:
    """Return what Linux tells of a process, from its state on."""
    text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def job_of(pid: int) -> dict[str, Any]:
    """Return the command that has started a rank, its program, and when it began."""
    stat = _stat(pid)
    text = (_PROC / str(pid) / "cmdline").read_text(errors="replace")
    job, words = int(stat[1]), text.split("\0")[1:-1]  # without the interpreter
    if words[:1] == [str(Path(__file__).with_name("runner.py"))]:
        job, words = int(words[1]), words[3:]
        words = words[words[0] == SURVIVE :]
        words = words[words[0] == IN_PLACE :]
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / _TICKS
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age))
    return {"pid": job, "program": shlex.join(words), "began": began}


_TICKS = os.sysconf("SC_CLK_TCK")


def every_process() -> list[int]:
    """Return all processes."""
    return sorted(int(path.name) for path in _PROC.glob("[0-9]*"))


def of(pid: int | None, some: bool = True) -> list[RunningBoard]:
    """Return the boards of a job; of None, all of this user's jobs.

    Args:
        pid: one of its processes: a rank, mpirun, or ``numba-symm run``.
        some: False: there may be no job.

    Raises:
        SymmError: there is none.
    """
    if pid is None:
        boards = found(every_process())
        if some and not boards:
            raise SymmError(
                "status: expected a job of this user that has a communicator on this "
                "node, got none"
            )
        return boards
    if not (_PROC / str(pid)).exists():
        raise SymmError(f"status: expected a process, got {pid}, which does not run")
    boards = found(family(pid))
    # A communicator that split has made is open on its rank 0 only.
    others: set[int] = set()
    for each in boards:
        with contextlib.suppress(OSError), opened(each) as (_, records):
            others.update(head.pid for head in records.heads if head.pid)
    if others:
        boards = found(sorted({*family(pid), *others}))
    if not boards:
        raise SymmError(
            f"status: expected a process with a communicator, got {pid}, which has "
            "none, or is another user's; pass a rank's, mpirun's, or no number"
        )
    return boards


@contextlib.contextmanager
def opened(board: RunningBoard) -> Iterator[tuple[BoardMemory, Records]]:
    """Map a board within the block."""
    fd = os.open(board.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, nbytes_of(board.size))
    finally:
        os.close(fd)
    made = BoardMemory(memoryview(memory), board.size)
    records = Records(made.calls, board.size if made.calls[:8] == MAGIC else 0)
    try:
        yield made, records
    finally:
        records.close()
        made.close()
        with contextlib.suppress(BufferError):
            memory.close()


def looks(boards: Sequence[RunningBoard]) -> list[dict[str, Any]]:
    """Return what boards show; without those that have been closed meanwhile."""
    shown = []
    for board in boards:
        with contextlib.suppress(OSError):
            shown.append(facts(board))
    return shown


def facts(board: RunningBoard) -> dict[str, Any]:
    """Return what a board shows, as ``--json`` prints it."""
    now = time.monotonic_ns()
    with opened(board) as (memory, records):
        names = [int(head.name) for head in records.heads] or list(range(board.size))
        nodes = [head.node.decode(errors="ignore") for head in records.heads]
        failures = (
            memory.failure_of(rank, names, nodes if any(nodes) else ())
            for rank in range(board.size)
        )
        failure = next((each for each in failures if each is not None), None)
        calls = [records.calls(rank) for rank in range(records.size)]
        numbers = [each[-1].number if each else 0 for each in calls]
        most = max(numbers, default=0)
        ranks = [
            _rank(records, rank, calls[rank], most, now) for rank in range(records.size)
        ]
        by_number = [{entry.number: entry for entry in each} for each in calls]
        return {
            "communicator": board.inode,
            "job": job_of(int(board.path.parts[2])),
            "size": board.size,
            "others": records.others_text,
            "failure": failure and f"{failure.error.__name__}: {failure.text}",
            "differs": call_records.difference(records, by_number) or None,
            "loading": memory.loading(names) or None,
            "waits": _waits(records, numbers, ranks),
            "ranks": ranks,
        }


def _rank(
    records: Records, rank: int, calls: Sequence[Any], most: int, now: int
) -> dict[str, Any]:
    head = records.heads[rank]
    last, others = calls[-1:], records.others(rank)[-1:]
    latest = max([*last, *others], key=lambda each: each.time, default=None)
    return {
        "rank": int(head.name),
        "pid": int(head.pid),
        "node": head.node.decode(errors="ignore"),
        "runs": (_PROC / str(int(head.pid))).exists(),
        "call": last[0].number if last else 0,
        "behind": most - (last[0].number if last else 0),
        "last": records.words(rank, latest) if latest else None,
        "seconds": (now - latest.time) / 1e9 if latest else None,
        "stream": latest.stream if latest else None,
        "captures": int(head.captures),
        "tag": head.tag.decode(errors="ignore"),
    }


def _waits(
    records: Records, numbers: Sequence[int], ranks: Sequence[dict[str, Any]]
) -> str | None:
    """Return which kernels wait for which ranks; None if no rank is behind."""
    most, least = max(numbers, default=0), min(numbers, default=0)
    if most == least:
        return None
    late = [rank for rank, number in enumerate(numbers) if number == least]
    others = [rank for rank, number in enumerate(numbers) if number > least]
    first = next(
        (found for rank in others if (found := records.call(rank, least + 1))), None
    )
    what = ""
    if first is not None:
        rank = next(r for r in others if records.call(r, least + 1) is not None)
        what = f", {records.words(rank, first)}"
    seconds = max(ranks[rank]["seconds"] or 0 for rank in late)
    return (
        f"{call_records.named(records, others)}: call {least + 1}{what}, waits for "
        f"{call_records.named(records, late)}, without a call for {seconds:.1f} s"
    )


def shown(boards: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Yield what to print: for each communicator a table, and lines below it."""
    for number, board in enumerate(boards):
        title = f"communicator {number}: {board['size']} ranks of this node"
        job = "; job {pid}: {program:.72}, since {began}".format(**board["job"])
        if board["others"]:
            title += f"; others: {board['others']}"
        yield Text(title + job, style="bold")
        if not board["ranks"]:
            yield Text("no record of calls: NUMBA_SYMM_RECORD=0, or not made yet")
        else:
            yield _table(board["ranks"])
        for name in ("failure", "differs", "loading", "waits"):
            if board[name]:
                head = "calls differ from number" if name == "differs" else name
                yield Text(f"{head}: {board[name]}")
        yield Text("")


def _table(ranks: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "pid", "call", "behind", "last call", "for", "tag"):
        words = name in ("last call", "tag")
        table.add_column(name, justify="left" if words else "right")
    for each in ranks:
        seconds = each["seconds"]
        table.add_row(
            str(each["rank"]),
            str(each["pid"]) + ("" if each["runs"] else " (ended)"),
            str(each["call"]),
            str(each["behind"] or ""),
            Text(each["last"] or ""),
            "" if seconds is None else f"{seconds:.1f} s",
            Text(each["tag"]),
        )
    return table


def abort(boards: Sequence[RunningBoard], reason: str) -> None:
    """Make all communicators of a job fail, on all ranks of this node and others."""
    by = f"numba-symm status --abort (process {os.getpid()})"
    for board in boards:
        with contextlib.suppress(OSError), opened(board) as (memory, _):
            error = Aborted(f"{by} aborted the communicator: {reason}")
            memory.fail(board.size, error)


def run(pid: int | None, as_json: bool, reason: str | None, console: Console) -> None:
    """Print what jobs do.

    Args:
        pid: a process of the job; None: all jobs.
        as_json: whether to print one line of JSON.
        reason: why to abort the job; None: it is not aborted.
        console: where to print.

    Raises:
        SymmError: the process belongs to no job that this user may read.
    """
    boards = of(pid, some=not as_json)
    if reason is not None:
        abort(boards, reason)
    seen = looks(boards)
    if as_json:
        print(json.dumps(seen), flush=True)
        return
    for part in shown(seen):
        soft = not isinstance(part, Table)
        console.print(part, soft_wrap=soft, highlight=False)
