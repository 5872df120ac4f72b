"""Set-up calls that are interrupted, by an exception at any line of the library's.

Nobody is left waiting: not by the call, nor by the same call again, nor by close.
"""

import dis
import gc
import linecache
import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import numba_symm as ns
from numba_symm import environment
from numba_symm.collectives import lifetime
from numba_symm.launch import locks, waiting
from numba_symm.launch.members import Members

PATIENT = 600  # a timeout that never passes
SOON = PATIENT / 2  # a rank that is left waiting would take PATIENT or all time
POINTS = 12  # lines at which a call is interrupted
HERE = Path(ns.__file__).parent
PLACES = (
    "launch/board.py",
    "launch/members.py",
    "memory/*.py",
    "launch/store.py",
    "launch/fds.py",
)
PLACES += ("collectives/calls.py", "collectives/communicator.py")
PLACES += ("collectives/lifetime.py", "islands.py")
FILES = {str(path) for place in PLACES for path in HERE.glob(place)}
assert len(FILES) == 13


# Communicators that an interrupted call made and did not return.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


class Late(Exception):
    """What a program's own signal handler may raise."""


class Lines:
    """Counts the library's lines that a call executes, and may interrupt one."""

    def __init__(self, interrupted=None):
        self.count = 0
        self.interrupted = interrupted

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename not in FILES:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.interrupted:
                if is_undisturbed(frame) or releases_a_lock(frame):
                    self.interrupted += 1
                else:
                    sys.settrace(None)
                    raise Late
        return self

    def of(self, call):
        """Return the call's error as "Class: text", and its result."""
        sys.settrace(self)
        try:
            return "", call()
        except Exception as error:
            return f"{type(error).__name__}: {error}", None
        finally:
            sys.settrace(None)


class At(Lines):
    """Interrupts one event of a function: the n-th of its kind."""

    def __init__(self, function, event, number):
        super().__init__()
        self.code, self.event, self.number = function.__code__, event, number

    def __call__(self, frame, event, arg):
        if frame.f_code is not self.code:
            return None
        if event == self.event:
            self.count += 1
            if self.count == self.number:
                sys.settrace(None)
                raise Late
        return self


def is_undisturbed(frame):
    """Return whether no signal handler would run there."""
    while frame is not None and frame.f_code is not waiting.undisturbed.__code__:
        frame = frame.f_back
    return frame is not None


def releases_a_lock(frame):
    """Return whether a ``with`` block of a lock ends there.

    A trace function is called before the lock is released, but a signal handler runs
    after that call. A lock that stayed locked would stop other threads of later tests.
    """
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno)
    instruction = dis.opname[code.co_code[frame.f_lasti]]
    ends = instruction in ("LOAD_CONST", "PUSH_EXC_INFO")  # not where it begins
    return ends and re.match(r"\s*with \S*(lock|_reporting|_users):", line)


CALLS = {
    "zeros": lambda comm: comm.zeros(10),
    "rendezvous": lambda comm: comm.rendezvous(comm.symmetric),
    "split": lambda comm: comm.split(comm.rank // 2),
    "dup": lambda comm: comm.dup(),
    "all_reduce_init": lambda comm: comm.all_reduce_init(comm.symmetric),
    "close": lambda comm: comm.close(),
}


def made(world):
    """Return a communicator that compares all calls, and has a symmetric array."""
    comm = ns.Communicator(world, timeout=PATIENT, debug=True)
    comm.symmetric = comm.empty(3)
    return comm


def points_in(world, name, call):
    """Return at which lines each rank in turn is to be interrupted."""
    counted = Lines()
    counted.of(call)
    count = world.bcast(counted.count)
    return random.Random(f"{name} {world.size}").sample(range(1, count), POINTS)


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_nobody_waiting(world, name):
    """The others raise an error that names it, or the call was complete before."""
    call, told = CALLS[name], 0
    with made(world) as comm:
        points = points_in(world, name, lambda: call(comm))
    for point in points:
        comm, away = made(world), point % world.size
        world.barrier()  # what is interrupted is not what made it
        began = time.monotonic()
        lines = Lines(point if world.rank == away else None)
        first, child = lines.of(lambda comm=comm: call(comm))
        again, _ = Lines().of(lambda comm=comm: call(comm))
        for each in (child, comm):
            if isinstance(each, ns.Communicator):
                Lines().of(each.close)
        assert comm._calls.members.board.alive is None  # closed
        del child
        everyone = world.allgather((first, again, time.monotonic() - began))
        shown = f"{name}, rank {away} at line {point} of {lines.count}: {everyone}"
        assert max(seconds for *_, seconds in everyone) < SOON, shown
        firsts = [first for first, *_ in everyone]
        del firsts[away]
        for first in filter(None, firsts):
            named = "Late" in first or " with an interrupt; " in first
            assert named or not first.startswith("RankLeft"), shown
            told += named
    assert told or world.size == 1


@pytest.mark.parametrize("failed", [False, True])
def test_an_interrupted_close_closes_the_board(world, monkeypatch, failed):
    """If it stayed registered, its page could not be registered for another board."""
    if world.rank:
        return  # each communicator has one rank, so one rank of the job shows it
    monkeypatch.delenv("NUMBA_SYMM_ISLAND_SIZE", raising=False)

    def opened():
        comm = made(MPI.COMM_SELF)
        if failed:  # so that the close is local
            comm._calls.members.abandon("left")
        return comm

    lines, comm = Lines(), opened()
    lines.of(comm.close)
    for point in range(1, lines.count):
        comm = opened()
        error, _ = Lines(point).of(comm.close)
        Lines().of(comm.close)
        assert comm._calls.members.board.alive is None, f"line {point}: {error}"


def test_mpi_progresses_while_a_rank_waits(comm, world):
    """Rank 0 waits in a set-up call for one that waits for it to receive."""
    message, request = np.arange(1 << 20), None
    if world.rank == 0 and world.size > 1:
        request = world.Irecv(np.empty_like(message), 1)
    elif world.rank == 1:
        time.sleep(0.2)
        world.Send(message, 0)
    comm.zeros(10)
    if request is not None:
        request.Wait()


def test_an_interrupted_constructor_leaves_nobody_waiting(world):
    """The interrupted rank calls it again, as do the ranks that it interrupted."""

    def construct():
        with made(world) as comm:
            comm.zeros(3)

    for point in points_in(world, "Communicator", construct):
        away, errors = point % world.size, []
        began = time.monotonic()
        error, _ = Lines(point if world.rank == away else None).of(construct)
        errors.append(error)
        while world.allreduce(bool(error)) and len(errors) < 5:
            error, _ = Lines().of(construct)
            errors.append(error)
        everyone = world.allgather((errors, time.monotonic() - began))
        shown = f"rank {away} at line {point}: {everyone}"
        assert max(seconds for _, seconds in everyone) < SOON, shown
        assert [errors[-1] for errors, _ in everyone] == [""] * world.size, shown


def test_a_second_interrupt_leaves_nobody_waiting(world, monkeypatch):
    """It ends the report of the first one."""
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", f"{SOON}")
    monkeypatch.delenv("NUMBA_SYMM_ISLAND_SIZE", raising=False)
    give_up, seen = Members.give_up, []

    def interrupted(members, error):
        seen.append(error)
        if len(seen) == 1:
            raise Late("again")
        give_up(members, error)

    def fail(*given):
        raise Late

    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(lifetime, "agreed_settings", fail)
            patch.setattr(Members, "give_up", interrupted)
        error, _ = Lines().of(lambda: made(world))
    assert "Late" in error
    with made(world) as comm:
        comm.zeros(3)


def test_an_interrupted_constructor_ends_no_later_one(world, monkeypatch):
    """All ranks are interrupted twice."""
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", f"{SOON}")
    duplicate = locks.duplicate

    def fail(*given):
        raise Late

    def fail_with_it(*given):
        duplicate(*given)
        raise Late

    def construct(module=None, name="", part=None):
        with monkeypatch.context() as patch:
            if part is not None:
                patch.setattr(module, name, part)
            with made(world) as comm:
                comm.zeros(3)

    errors = []
    for given in (
        (locks, "duplicate", fail_with_it),
        (lifetime, "begin", fail),
        (),
    ):
        errors.append(Lines().of(lambda given=given: construct(*given))[0])
        world.barrier()
    assert errors == ["Late: ", "Late: ", ""]


HANDOVERS = [
    (
        locks.claim,
        "line",
        4,
        False,
    ),  # a later call would return the duplicate again
    (Members.__init__, "return", 1, False),
    (Members.__init__, "return", 1, True),  # of ranks that are not one island
    (Members.__init__, "return", 3, True),  # after that of this rank's island
]


@pytest.mark.parametrize(("function", "event", "number", "several"), HANDOVERS)
def test_an_interrupt_between_steps_of_the_constructor_is_reported(
    world, monkeypatch, function, event, number, several
):
    """There, a function has returned what its caller does not have yet."""
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", f"{SOON}")
    monkeypatch.delenv("NUMBA_SYMM_ISLAND_SIZE", raising=False)
    if several:
        monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    away = world.size - 1

    def construct():
        with made(world) as comm:
            comm.zeros(3)

    lines = At(function, event, number) if world.rank == away else Lines()
    warn, warned = environment.warn, []
    record = lambda text: warned.append(text) or warn(text)  # noqa: E731
    monkeypatch.setattr(environment, "warn", record)
    errors = world.allgather(lines.of(construct)[0])
    again = world.allgather(Lines().of(construct)[0])
    # A rank that is left waiting warns, and raises that, because warnings are errors.
    assert not any(world.allgather(warned)), errors
    assert again == [""] * world.size, (errors, again)
    assert all("Late" in each for each in errors) or world.size == 1, errors
