"""Ranks played by processes of their own, without MPI: one may die, the others go on.

mpirun ends a job when one of its ranks ends badly, so what the survivors see can only
be tested here. The processes are spawned, never forked; the parent is the hub of
their communicator, keeps the deadline and kills whoever has not ended by then.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

# No module of numba_symm: numba must not be imported before _play sets the environment.

LAST_WORDS = 3  # seconds before the deadline, for telling where a stuck rank is
GOODBYE = 15  # seconds that a process may take to end once its rank has left


class RankLeft(Exception):
    """A rank waits in a collective that another one will never enter."""


class HubComm:
    """What the library asks of a communicator, between spawned processes."""

    def __init__(self, hub: Connection, me: int, members: Sequence[int]):
        self._hub, self._me, self._members = hub, me, tuple(members)
        self.rank = self._members.index(me)
        self.size = len(self._members)

    def allgather(self, obj: object) -> list[Any]:
        self._hub.send(("gather", self._members, pickle.dumps(obj)))
        gathered = self._hub.recv()
        if isinstance(gathered, RankLeft):
            raise gathered
        return [pickle.loads(packed) for packed in gathered]

    def barrier(self) -> None:
        self.allgather(None)

    def split(self, color: int | None, key: int) -> "HubComm | None":
        """Return a communicator of the ranks of this color, ordered by (key, rank)."""
        chosen = self.allgather((color, key))
        if color is None:
            return None
        keys = {rank: key for rank, (other, key) in enumerate(chosen) if other == color}
        return self.among(sorted(keys, key=keys.__getitem__))

    def among(self, ranks: Sequence[int]) -> "HubComm":
        """Return a communicator of some of this one's ranks; no message is sent."""
        return HubComm(self._hub, self._me, [self._members[rank] for rank in ranks])


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        value: what its function returned.
        error: ``"Class: text"`` of what it raised, "" if it returned.
        trace: the traceback of that.
        output: all that it printed, to stdout and stderr.
        code: the process' exit code; minus a signal's number if that ended it.
    """

    value: Any = None
    error: str = ""
    trace: str = ""
    output: str = ""
    code: int | None = None


def outcomes(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 60,
    environ: Sequence[dict[str, str]] = (),
) -> list[Outcome]:
    """Run ``function(comm, *args)`` on ``n`` ranks; return how each one ended.

    Skips the test where ``n`` ranks cannot have a GPU.

    Args:
        n: the number of ranks.
        function: of a module; the ranks import it.
        args: what can be pickled.
        deadline: seconds after which ranks that have not ended are killed.
        environ: environment variables of each rank, set before numba is imported.
    """
    common = {"NUMBA_ENABLE_CUDASIM": "1"} if simulated(n) else {}
    environ = [common | own for own in environ or [{}] * n]
    context = multiprocessing.get_context("spawn")
    results = [Outcome() for _ in range(n)]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.txt") for rank in range(n)]
        hubs, processes = {}, []
        for rank in range(n):
            here, there = context.Pipe()
            name = (function.__module__, function.__qualname__)
            job = (there, rank, n, name, args, environ[rank], logs[rank], deadline)
            process = context.Process(target=_play, args=job, name=f"rank {rank}")
            process.start()
            there.close()
            processes.append(process)
            hubs[here] = rank
        stuck = list(range(n))
        try:
            stuck = _serve(hubs, results, time.monotonic() + deadline)
        finally:
            for rank, process in enumerate(processes):
                if rank not in stuck:
                    process.join(GOODBYE)
                if process.is_alive():
                    process.kill()
                    process.join()
                    results[rank].error = f"killed: not done in {deadline:g} s"
                results[rank].code = process.exitcode
                process.close()
        for rank, log in enumerate(logs):
            results[rank].output = log.read_text() if log.exists() else ""
    return results


def run_ranks(n: int, function: Callable[..., Any], *args: Any, **options: Any) -> list:
    """Run ``function(comm, *args)`` on ``n`` ranks; return the values or fail."""
    ended = outcomes(n, function, *args, **options)
    failed = {rank: one for rank, one in enumerate(ended) if one.error or one.code}
    if failed:
        parts = [f"{len(failed)} of {n} ranks failed"]
        for rank, one in failed.items():
            parts.append(f" rank {rank}, exit code {one.code} ".center(80, "-"))
            parts += [one.trace or one.error, one.output]
        pytest.fail("\n".join(filter(None, parts)), pytrace=False)
    return [one.value for one in ended]


def attempt(call: Callable[..., Any], *args: Any) -> tuple[str, float]:
    """Return the error that a call raises, as "Class: text", and its seconds."""
    begin, error = time.monotonic(), ""
    try:
        call(*args)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    return error, time.monotonic() - begin


def open_files() -> Counter[str]:
    """Count this process' open files by name, the driver's own left out."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            names.append(re.sub(r"\d+", "#", str(link.readlink())))
    # CUDA opens its devices anew as memory grows, and keeps them.
    return Counter(name for name in names if not name.startswith("/dev/nvidia"))


def simulated(n: int) -> bool:
    """Return whether ``n`` ranks run in the simulator, or skip: too few GPUs."""
    from numba_symm.errors import DeviceError
    from numba_symm.launch import cli

    try:
        return cli.simulation_needed(n)
    except DeviceError as error:
        pytest.skip(str(error))


def _serve(
    hubs: dict[Connection, int], results: list[Outcome], end: float
) -> list[int]:
    """Pass messages until all ranks have left or time is up; return who is left."""
    present = {rank: hub for hub, rank in hubs.items()}
    waiting: dict[int, list[Any]] = {}  # by rank: with whom, what
    while present:
        ready = wait(list(present.values()), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for hub in ready:
            rank = hubs[hub]
            try:
                kind, *message = hub.recv()
            except (EOFError, ConnectionResetError):  # it died, or called sys.exit
                kind = "died"
            if kind == "gather":
                waiting[rank] = message
                continue
            if kind == "left":
                one = results[rank]
                one.value, one.error, one.trace = message
            present.pop(rank).close()
        for rank, (members, _) in list(waiting.items()):
            met = [m for m in members if waiting.get(m, [None])[0] == members]
            gone = [m for m in members if m not in met and m not in present]
            if rank in met and len(met) == len(members):
                answer: Any = [waiting[member][1] for member in members]
            elif rank in met and gone:
                met, answer = [rank], RankLeft(f"rank {rank} waits for ranks {gone}")
            else:
                continue
            for member in met:
                del waiting[member]
                with contextlib.suppress(OSError, KeyError):  # it has died since
                    present[member].send(answer)
    for hub in present.values():
        hub.close()
    return list(present)


def _play(hub, rank, n, name, args, environ, log, deadline):
    """Be one rank: what a spawned process does."""
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, deadline - LAST_WORDS), file=2)
    os.environ.update(environ)
    # Here and not by unpickling: numba reads the environment when it is imported.
    function = importlib.import_module(name[0])
    for part in name[1].split("."):
        function = getattr(function, part)
    try:
        result = (function(HubComm(hub, rank, range(n)), *args), "", "")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        result = (None, text, traceback.format_exc())
    hub.send(("left", *result))
    sys.stdout.flush()
