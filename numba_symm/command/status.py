"""``numba-symm status``: shows what a running job's ranks do, without stopping them.

A process that has a communicator has the status board's memory open. Another process of
the same user opens that memory through ``/proc``, and maps it.
"""

import contextlib
import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from numba_symm import board_memory, call_table
from numba_symm.board_memory import BoardMemory
from numba_symm.errors import Aborted, SymmError
from numba_symm.record import MAGIC, Records

PERIOD = 1.0
"""Seconds between two looks of ``--watch``."""

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
                    if name.startswith(f"/memfd:{board_memory.FILE}"):
                        facts = path.stat()
                        size = board_memory.size_of(facts.st_size)
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
            text = (_PROC / str(each) / "stat").read_text(errors="replace")
            parents[each] = int(text.rpartition(")")[2].split()[1])
    members = [pid]
    for member in members:
        members += [each for each, parent in parents.items() if parent == member]
    return members


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
        memory = mmap.mmap(fd, board_memory.nbytes_of(board.size))
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
            "size": board.size,
            "others": records.others_text,
            "failure": failure and f"{failure.error.__name__}: {failure.text}",
            "differs": call_table.difference(records, by_number) or None,
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
        f"{call_table.named(records, others)}: call {least + 1}{what}, waits for "
        f"{call_table.named(records, late)}, without a call for {seconds:.1f} s"
    )


def shown(boards: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Yield what to print: for each communicator a table, and lines below it."""
    for number, board in enumerate(boards):
        title = f"communicator {number}: {board['size']} ranks of this node"
        if board["others"]:
            title += f"; others: {board['others']}"
        yield Text(title, style="bold")
        if not board["ranks"]:
            yield Text("its calls are not recorded (NUMBA_SYMM_RECORD=0)")
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


def run(
    pid: int | None, as_json: bool, watch: bool, reason: str | None, console: Console
) -> None:
    """Print what jobs do, once or until an interrupt.

    Args:
        pid: a process of the job; None: all jobs.
        as_json: whether to print JSON, one line for each look.
        watch: whether to look again and again.
        reason: why to abort the job; None: it is not aborted.
        console: where to print.

    Raises:
        SymmError: the process belongs to no job that this user may read.
    """
    boards = of(pid, some=not as_json)
    if reason is not None:
        abort(boards, reason)
    if not watch:
        _print(looks(boards), as_json, console)
        return
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            while True:
                _print(looks(of(pid, some=False)), as_json, console)
                time.sleep(PERIOD)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                grid = Table.grid()
                for part in shown(looks(of(pid))):
                    grid.add_row(part)
                live.update(grid, refresh=True)
                time.sleep(PERIOD)


def _print(boards: list[dict[str, Any]], as_json: bool, console: Console) -> None:
    if as_json:
        print(json.dumps(boards), flush=True)
        return
    for part in shown(boards):
        console.print(part, soft_wrap=not isinstance(part, Table), highlight=False)
