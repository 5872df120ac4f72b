"""Ranks as processes without MPI: one may die while the others continue.

mpirun ends a job when one of its ranks fails, so the errors of the other ranks can only
be tested here. The parent passes the messages of their communicator, and ends the
processes that hang (patience.py).
"""

import contextlib
import ctypes
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
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STEP, Watch, abort

# No module of numba_symm: numba must not be imported before _play sets the environment.

PRELOADED = [
    "numba_symm.collectives.communicator",
    "numba_symm.sharing",
    "numba_symm.simulator",
    "tests.sharing.work",
    "tests.frozen",
]
"""What the server has imported that simulated ranks are forked from."""

GOODBYE = 15  # seconds for which a process may wait once its rank has left


class RankLeft(Exception):
    """A rank waits in a collective that another rank does not call."""


class HubComm:
    """A communicator between spawned processes, as the library requires it."""

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
        trace: the traceback of the error.
        output: what it printed, to stdout and stderr.
        code: the process' exit code; minus a signal's number if that ended it.
        left: whether its function returned or raised an exception.
    """

    value: Any = None
    error: str = ""
    trace: str = ""
    output: str = ""
    code: int | None = None
    left: bool = False


class Ranks:
    """Processes that play ``n`` ranks in one job after another.

    They start with the first job, and again after a job in which a rank failed. They
    end with the ``with`` statement. If one of them fails then, so does the test.

    Args:
        n: the number of ranks; the test is skipped if they cannot have a GPU each.
        environ: environment variables of each rank, set before numba is imported.
        once: whether a process ends as soon as its first job has, while the other
            ranks continue.
    """

    def __init__(
        self, n: int, environ: Sequence[dict[str, str]] = (), once: bool = False
    ):
        self._n, self._environ, self._once = n, environ or [{}] * n, once
        self._processes: list[Any] = []
        self._results: list[Outcome] = []  # of the latest job that did not fail
        self._messages = 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        check(self._results)

    def run(
        self, function: Callable[..., Any], *args: Any, **limits: float
    ) -> list[Any]:
        """Run ``function(comm, *args)`` on all ranks; return the values or fail."""
        results = self.outcomes(function, *args, **limits)
        if any(one.error or not one.left for one in results):
            self.end()
            self._results = []
        return check(results)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        busy: float = 120,
        idle: float = 60,
    ) -> list[Outcome]:
        """Run ``function(comm, *args)`` on all ranks; return the outcome of each."""
        self._results = [Outcome() for _ in range(self._n)]
        self._rule, self._stuck = "", list(range(self._n))
        if not self._processes:
            self._begin()
        self._written = [log.stat().st_size for log in self._logs]
        name = (function.__module__, function.__qualname__)
        for hub in self._hubs:
            with contextlib.suppress(OSError):  # it has died since its last job
                hub.send((name, args))
        pids = [process.pid for process in self._processes]
        watch = Watch(pids, busy, idle, self._progress)
        self._rule, self._stuck = self._serve(watch)
        abort(self._processes[rank].pid for rank in self._stuck)
        self._read()
        return self._results

    def end(self) -> None:
        """End the processes; complete the latest outcomes."""
        for hub in self._hubs if self._processes else ():
            hub.close()
        for rank, process in enumerate(self._processes):
            watch = Watch([process.pid], busy=60, idle=GOODBYE)
            while process.is_alive() and rank not in self._stuck:
                process.join(STEP)
                if process.is_alive() and (rule := watch.broken()):
                    abort([process.pid])
                    self._rule, self._stuck = rule, [*self._stuck, rank]
            if rank in self._stuck:
                process.kill()
                process.join()
                self._results[rank].error = f"ended: {self._rule}"
            self._results[rank].code = process.exitcode
            process.close()
        if self._processes:
            self._processes = []
            self._read()
            self._folder.cleanup()

    def _begin(self) -> None:
        common, process_of = dict(os.environ), _spawned
        if simulated(self._n):
            common, process_of = common | SIMULATED, _forked
        self._folder = tempfile.TemporaryDirectory()
        self._logs = [Path(self._folder.name, f"{r}.txt") for r in range(self._n)]
        self._hubs = []
        for rank, log in enumerate(self._logs):
            log.touch()
            here, there = multiprocessing.Pipe()
            job = (there, rank, self._n, common | self._environ[rank], log)
            process = process_of(target=_play, args=job, name=f"rank {rank}")
            process.start()
            there.close()
            self._hubs.append(here)
            self._processes.append(process)

    def _progress(self) -> object:
        return self._messages, [log.stat().st_size for log in self._logs]

    def _serve(self, watch: Watch) -> tuple[str, list[int]]:
        """Pass messages until all ranks have left or some hang: return rule and ranks.

        With ``once``, the process of a rank that has left ends.
        """
        present = dict(enumerate(self._hubs))
        waiting: dict[int, list[Any]] = {}  # by rank: with whom, what
        while present:
            ready = wait(list(present.values()), STEP)
            if not ready and (rule := watch.broken()):
                return rule, list(present)
            for rank, hub in [*present.items()]:
                if hub not in ready:
                    continue
                self._messages += 1
                try:
                    kind, *message = hub.recv()
                except (EOFError, ConnectionResetError):  # it died, or called sys.exit
                    kind = "died"
                if kind == "gather":
                    waiting[rank] = message
                    continue
                if kind == "left":
                    one = self._results[rank]
                    one.value, one.error, one.trace = message
                    one.left = True
                del present[rank]
                if self._once:
                    hub.close()
            _answer(present, waiting)
        return "", []

    def _read(self) -> None:
        for one, log, written in zip(
            self._results, self._logs, self._written, strict=True
        ):
            one.output = log.read_bytes()[written:].decode(errors="replace")


def outcomes(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    environ: Sequence[dict[str, str]] = (),
    **limits: float,
) -> list[Outcome]:
    """Run ``function(comm, *args)`` on ``n`` new ranks; return the outcomes.

    Skips the test where ``n`` ranks cannot have a GPU.

    Args:
        n: the number of ranks.
        function: of a module; the ranks import it.
        args: its arguments, which are pickled.
        environ: environment variables of each rank, set before numba is imported.
        limits: ``busy`` and ``idle``, as :class:`~tests.patience.Watch` takes them;
            otherwise 120 and 60. Messages and output are progress.
    """
    ranks = Ranks(n, environ, once=True)
    try:
        return ranks.outcomes(function, *args, **limits)
    finally:
        ranks.end()


def run_ranks(n: int, function: Callable[..., Any], *args: Any, **options: Any) -> list:
    """Run ``function(comm, *args)`` on ``n`` new ranks; return the values or fail."""
    return check(outcomes(n, function, *args, **options))


def check(ended: Sequence[Outcome]) -> list[Any]:
    """Return what each rank's function returned, or fail."""
    failed = {rank: one for rank, one in enumerate(ended) if one.error or one.code}
    if failed:
        parts = [f"{len(failed)} of {len(ended)} ranks failed"]
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
    from numba_symm.command import cli
    from numba_symm.errors import DeviceError

    try:
        return cli.simulation_needed(n)
    except DeviceError as error:
        pytest.skip(str(error))


SIMULATED = {"NUMBA_ENABLE_CUDASIM": "1"}

_spawned = multiprocessing.get_context("spawn").Process


def _forked(**options: Any) -> "_Forked":
    """Return a process that has imported the library: importing takes a second.

    It is forked from a server, which has used nothing of what it has imported.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIMULATED.items():
            patch.setenv(name, value)  # of the server, if it starts now
        forkserver.ensure_running()
    return _Forked(**options)


class _Forked(ForkServerProcess):
    """A process that ends as a spawned one does."""

    def _bootstrap(self, *args: Any, **options: Any) -> None:
        code = super()._bootstrap(*args, **options)
        # The server would end it without the interpreter's end: no atexit functions.
        ctypes.pythonapi.Py_Exit(code)


def _answer(present: dict[int, Connection], waiting: dict[int, list[Any]]) -> None:
    """Answer the ranks whose collective all members have called, or cannot call."""
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


def _play(hub, rank, n, environ, log):
    """Run jobs as one rank, in a process of its own."""
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()  # for abort
    os.environ.clear()  # a forked process has the environment of its server
    os.environ.update(environ)
    while True:
        try:
            name, args = hub.recv()
        except EOFError:  # no more jobs
            return
        try:
            # Not by unpickling: numba reads the environment when it is imported.
            function = importlib.import_module(name[0])
            for part in name[1].split("."):
                function = getattr(function, part)
            result = (function(HubComm(hub, rank, range(n)), *args), "", "")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            result = (None, text, traceback.format_exc())
        sys.stdout.flush()
        hub.send(("left", *result))
