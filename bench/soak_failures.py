"""The failures of a soak: what happens to a rank, when, and what it may cause.

At most one failure is pending. All ranks know which one, because their random numbers
are equal. A rank that is killed or stopped is hit at a moment that only time decides.
"""

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numba_symm as ns
from numba_symm import driver
from numba_symm.bench.soak_marks import FAILURES, JobMarks, SoakJob
from numba_symm.environment import SIMULATED
from numba_symm.errors import CollectiveError, ExchangeError, SymmError

EVERY = 3 if SIMULATED else 8
"""Rounds from one failure to the next, if none is pending."""

LATEST = 0.5
"""Seconds after the beginning of a round in which a failure hits a rank."""

_ARRAY = 256 << 20
"""Bytes of an array that does not fit into the limited memory of a rank."""

_SPARE = 64 << 20
"""Bytes that remain for everything else."""

_REFUSED = ("out of memory", "out of descriptors", "out of shared memory")


class Planned(ValueError):
    """The exception by which a rank leaves."""


class PlannedFailure(NamedTuple):
    """What happens to a rank.

    Attributes:
        kind: one of ``FAILURES``.
        rank: the rank of the communicator.
        at: where it happens, from 0 to 1 of what is possible.
        seconds: for how long the rank is stopped.
    """

    kind: str
    rank: int
    at: float
    seconds: float = 0


class Failures:
    """The failures of a job, and this rank's part in them.

    Args:
        job: the job.
        marks: the files of all ranks.
        world: this rank's number in the job.
        timeout: the deadline of calls in seconds.

    Attributes:
        pending: the failure that ranks are expected to notice; None: there is none.
        kills: the ranks that were killed, or will be.
    """

    def __init__(self, job: SoakJob, marks: JobMarks, world: int, timeout: float):
        self._random = random.Random(f"{job.seed} {job.number}")
        self._marks, self._world, self._timeout = marks, world, timeout
        self._place = marks.places[world]
        self._left: list[str] = []  # kinds that are drawn before any is drawn again
        self._thread: threading.Thread | None = None
        self._armed = self._owed = False
        self._comm: ns.Communicator | None = None
        self.pending: PlannedFailure | None = None
        self.kills = 0
        signal.signal(signal.SIGINT, self._on_interrupt)

    def draw(self, size: int, number: int, kill: bool) -> PlannedFailure | None:
        """Draw the failure of a round; equal on all ranks.

        Args:
            size: the number of ranks.
            number: of the round.
            kill: whether a rank is to be killed.
        """
        if not kill and (number % EVERY or size < 2):
            return None
        if not self._left:
            self._left = list(FAILURES[1:])
            self._random.shuffle(self._left)
        kind = FAILURES[0] if kill else self._left.pop()
        rank, at = self._random.randrange(size), self._random.random()
        # A short stop ends in time, and a long one passes the deadline.
        stops = (self._timeout / 5, self._timeout + 1)
        seconds = self._random.choice(stops) if kind == "stopped" else 0
        self.kills += kill
        return PlannedFailure(kind, rank, at, seconds)

    def begin(
        self, failure: PlannedFailure, comm: ns.Communicator, world: list[int]
    ) -> None:
        """Let a failure happen during the next calls.

        Args:
            failure: the failure.
            comm: the communicator.
            world: by its ranks, their numbers in the job.
        """
        self.pending, self._comm, self._owed = failure, comm, False
        mine = comm.rank == failure.rank
        target: Callable[..., None] | None = None
        arguments: tuple[Any, ...] = (failure.at * LATEST,)
        if failure.kind == "stopped":
            if comm.rank == (failure.rank + 1) % comm.size:
                target = self._stop
                arguments += world[failure.rank], failure.seconds
        elif mine:
            target = {
                "killed": self._kill,
                "aborted": self._abort,
                "interrupted": self._interrupt,
            }.get(failure.kind)
        self._thread = None
        if target is not None:
            self._thread = threading.Thread(target=target, args=arguments, daemon=True)
            self._thread.start()

    def raise_at(self, comm: ns.Communicator, step: int, steps: int) -> None:
        """Raise in this rank's step, if it is the one that raises there."""
        failure = self.pending
        if failure is None or failure.kind != "raised" or failure.rank != comm.rank:
            return
        if step >= int(failure.at * steps):
            self._count("raised")
            raise Planned("a rank of the soak raises")

    def is_over(self) -> bool:
        """Return whether this rank has done its part of a failure that may pass.

        Only a stop passes without a failure of the communicator.
        """
        if self.pending is None:
            return True
        thread = self._thread
        return self.pending.kind == "stopped" and not (thread and thread.is_alive())

    def explains(self, error: BaseException) -> bool:
        """Return whether the pending failure may have caused an error here."""
        if self.pending is None:
            return False
        if type(error) is SymmError:  # of a set-up call that another rank has left
            return "KeyboardInterrupt" in str(error)
        kinds = CollectiveError, ExchangeError, Planned, KeyboardInterrupt
        return isinstance(error, kinds)

    def end(self) -> None:
        """Forget the failure: all ranks have noticed it, or it has passed."""
        self.pending = None
        if self._thread is not None:
            self._thread.join()
        self._thread = self._comm = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let this rank be interrupted within the block, and nowhere else."""
        try:
            self._armed = True
            if self._owed:
                self._on_interrupt(signal.SIGINT, None)
            yield
        finally:
            self._armed = False

    def _count(self, kind: str) -> None:
        self._place.failures[FAILURES.index(kind)] += 1

    def _kill(self, delay: float) -> None:
        time.sleep(delay)
        self._count("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def _abort(self, delay: float) -> None:
        time.sleep(delay)
        self._count("aborted")
        if self._comm is not None:
            self._comm.abort("the soak aborts")

    def _interrupt(self, delay: float) -> None:
        # Again and again, because an exception in a finalizer is lost.
        while self.pending is not None:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)
            delay = LATEST

    def _on_interrupt(self, number: int, frame: object) -> None:
        if self.pending is None or self.pending.kind != "interrupted":
            return
        if not self._armed:
            self._owed = True
            return
        self._armed = self._owed = False
        self._count("interrupted")
        raise KeyboardInterrupt

    def _stop(self, delay: float, rank: int, seconds: float) -> None:
        time.sleep(delay)
        place = self._marks.places[rank]
        os.kill(place.pid, signal.SIGSTOP)
        place.failures[FAILURES.index("stopped")] += 1
        place.stopped += seconds  # of its step; it writes neither while it is stopped
        time.sleep(seconds)
        os.kill(place.pid, signal.SIGCONT)


def refuse(comm: ns.Communicator, failure: PlannedFailure) -> str:
    """Let one rank run out of something. Return what is wrong, or "". Collective.

    All ranks must raise the same error, and the communicator must work afterwards.
    """
    kind, rank = failure.kind, failure.rank
    if kind == "out of shared memory" and not SIMULATED:
        rank = 0  # it alone makes the board's file; other memory is the GPU's
    make = (lambda: _allocate(comm)) if kind == "out of memory" else comm.dup
    try:
        with _limited(kind) if comm.rank == rank else nullcontext():
            made = make()
    except CollectiveError:
        raise
    except SymmError:
        made = None
    if made is not None:
        _give_back(made)
        return f"{kind}: expected an error on every rank, got none"
    _give_back(comm.zeros(1024, "f4"))
    _give_back(comm.dup())
    return ""


def refuses(failure: PlannedFailure) -> bool:
    """Return whether a failure is a refused resource."""
    return failure.kind in _REFUSED


def _give_back(made: Any) -> None:
    if isinstance(made, ns.Communicator):
        made.close()


def _allocate(comm: ns.Communicator) -> Any:
    if SIMULATED:
        return comm.zeros(_ARRAY, "u1")
    from cuda.core import Device

    Device().set_current()
    _, total = driver.call("cuMemGetInfo")
    return comm.zeros(2 * int(total), "u1")


@contextmanager
def _limited(kind: str) -> Iterator[None]:
    """Limit this process, so that the kernel refuses what it needs next."""
    if kind == "out of memory" and not SIMULATED:
        yield  # the GPU refuses; a limit of addresses would break CUDA
        return
    if kind == "out of memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit, most = resource.RLIMIT_AS, pages * resource.getpagesize() + _SPARE
    elif kind == "out of descriptors":
        most = os.dup(0)  # every descriptor below it is in use
        os.close(most)
        limit = resource.RLIMIT_NOFILE
    else:
        limit, most = resource.RLIMIT_FSIZE, 4096  # of files in shared memory, too
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)
