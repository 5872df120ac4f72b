"""What the ranks of a soak write for the command that watches them: files of a folder.

A rank may be killed or hang at any moment, so it writes to a mapped file, whose bytes
remain. It writes its own part only. The command reads, and never waits for a rank.
"""

import ctypes
import json
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FAILURES = (
    "killed",
    "stopped",
    "raised",
    "interrupted",
    "aborted",
)
"""What happens to ranks."""

_TEXT = 128


class SoakJob(NamedTuple):
    """One job of a soak.

    Attributes:
        seed: of the soak.
        number: of the job; with the seed, it determines calls and failures.
        calls: the calls to make; 0: none.
        seconds: how long the job begins new rounds, if it counts no calls.
        cycles: the communicators to make and close.
        kills: the ranks to kill.
    """

    seed: int
    number: int
    calls: int
    seconds: float
    cycles: int
    kills: int


class RankMarks(ctypes.Structure):
    """What one rank writes.

    Attributes:
        pid: its process; 0: it has not started.
        began: nanoseconds of the node's clock at the beginning of its current step.
        allowed: the seconds that the step may take.
        stopped: for how many seconds other ranks have stopped it so far. They write it.
        stopped_before: the same at the beginning of the step.
        step: what it does.
        beyond: by how many seconds a step took longer than allowed, at most.
        beyond_step: that step.
        calls: the calls that it has made, those of replays too.
        replays: the graphs that it has launched.
        cycles: the communicators that it has made and closed.
        rebuilds: those that it has rebuilt.
        wrong: its wrong results.
        failures: how often each of ``FAILURES`` happened to it.
        memory: its resident bytes after the first rounds, and at the end.
        descriptors: its open files at these moments.
        done: whether it has reached the end of the job.
    """

    _fields_ = (
        ("pid", ctypes.c_uint64),
        ("began", ctypes.c_uint64),
        ("allowed", ctypes.c_double),
        ("stopped", ctypes.c_double),
        ("stopped_before", ctypes.c_double),
        ("step", ctypes.c_char * _TEXT),
        ("beyond", ctypes.c_double),
        ("beyond_step", ctypes.c_char * _TEXT),
        ("calls", ctypes.c_uint64),
        ("replays", ctypes.c_uint64),
        ("cycles", ctypes.c_uint64),
        ("rebuilds", ctypes.c_uint64),
        ("wrong", ctypes.c_uint64),
        ("failures", ctypes.c_uint64 * len(FAILURES)),
        ("memory", ctypes.c_uint64 * 2),
        ("descriptors", ctypes.c_uint64 * 2),
        ("done", ctypes.c_uint64),
    )

    def overdue(self) -> float:
        """Return for how many seconds the current step has been too long, or less."""
        if not self.began:
            return 0.0
        seconds = (time.monotonic_ns() - self.began) / 1e9
        return float(seconds - self.allowed - self.stopped + self.stopped_before)


class JobMarks:
    """The files of a job.

    Args:
        folder: where they are.
        size: the number of ranks.

    Attributes:
        places: by rank, what it writes.
    """

    def __init__(self, folder: Path, size: int):
        self.folder = folder
        nbytes = size * ctypes.sizeof(RankMarks)
        with (folder / "marks").open("a+b") as file:
            file.truncate(nbytes)  # zeros, which every rank and the command agree on
            self._memory = mmap.mmap(file.fileno(), nbytes)
        self.places: list[RankMarks] = [*(RankMarks * size).from_buffer(self._memory)]

    def found(self, rank: int, kind: str, text: str) -> None:
        """Note a fault that a rank has found."""
        line = json.dumps({"rank": rank, "kind": kind, "text": text})
        with (self.folder / f"found-{rank}").open("a") as file:
            file.write(f"{line}\n")

    def faults(self) -> Iterator[dict[str, Any]]:
        """Yield the faults that the ranks have found."""
        for file in sorted(self.folder.glob("found-*")):
            for line in file.read_text().splitlines():
                yield json.loads(line)

    def stack(self, rank: int) -> Path:
        """Return the file for a rank's stack."""
        return self.folder / f"stack-{rank}"


class Watch:
    """A rank's steps, of which each has a deadline. They cover the rank's whole time.

    Args:
        place: where the rank writes.
    """

    def __init__(self, place: RankMarks):
        self._place = place

    def step(self, what: str, allowed: float) -> None:
        """End the current step, and begin another one.

        Args:
            what: what this rank does.
            allowed: the seconds that it may take.
        """
        place = self._place
        beyond = place.overdue()
        if beyond > place.beyond:
            place.beyond, place.beyond_step = beyond, place.step
        place.allowed = 1e9  # the command may look between these stores
        place.step = what.encode()[: _TEXT - 1]
        place.stopped_before = place.stopped
        place.began = time.monotonic_ns()
        place.allowed = allowed
