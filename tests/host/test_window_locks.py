"""The locks of accumulates, within one process."""

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from numba_symm.errors import ClosedError, CollectiveTimeout, RankLeft, SymmError
from numba_symm.launch import locks
from numba_symm.launch.store import StoreExchange
from numba_symm.mpi import win
from numba_symm.mpi.win import Win, WindowLocks
from tests.interrupts import Interrupt, interrupted


@pytest.fixture
def made():
    comm = SimpleNamespace(rank=0, size=1, allgather=lambda x: [x], barrier=None)
    made = WindowLocks(StoreExchange(comm, "Comm"), "Win.Allocate_device", 600)
    yield made
    made.close()


@pytest.fixture
def other(made):
    """Another process' description of the file."""
    fd = locks.reopened(made._fd)
    yield fd
    os.close(fd)


def test_a_holder_has_the_lock_to_itself(made, other):
    with made.held(0, "Accumulate"):
        assert not locks.try_lock(other, win._LOCKS)
        assert made._holders[0] == 1
    assert locks.try_lock(other, win._LOCKS)
    made._holders[0] = 6  # of the rank that has it
    made._seconds = 0.2
    begin = time.monotonic()
    with (
        pytest.raises(CollectiveTimeout) as found,
        made.held(0, "Accumulate"),
    ):
        pass
    assert time.monotonic() - begin >= 0.2
    assert str(found.value).startswith(
        "Accumulate: rank 0 waited for rank 5 in Accumulate, which changes the memory "
        "of rank 0 in this window (timeout: 0.2 s); "
    )
    assert found.value.ranks == (0, 5)


def test_a_holder_that_has_ended_is_named(made, other):
    locks.lock(other, win._LOCKS)
    made._holders[0] = 6
    locks.unlock(other, win._LOCKS)  # as Linux does for a process that ends
    for _ in range(2):
        with (
            pytest.raises(RankLeft, match="rank 5 ended while it changed the memory"),
            made.held(0, "Accumulate"),
        ):
            pass
    assert locks.try_lock(other, win._LOCKS)


def test_a_wait_ends_by_a_signal(made, other):
    locks.lock(other, win._LOCKS)

    def handler(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupt), made.held(0, "Accumulate"):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_leaves_no_lock(made, other):
    def call():
        with made.held(0, "Accumulate"):
            pass

    def check():
        assert not made._holders.any()
        assert locks.try_lock(other, win._LOCKS)
        locks.unlock(other, win._LOCKS)

    assert interrupted(call, check, turns=400)


def test_a_signal_handler_is_refused_within_a_change(made, other):
    def handler(number, frame):
        with made.held(0, "Put"):
            pass

    def is_locked():
        free = locks.try_lock(other, win._LOCKS)
        if free:
            locks.unlock(other, win._LOCKS)
        return not free

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with made.held(0, "Accumulate"):
            with pytest.raises(SymmError, match="Put: expected no signal handler"):
                signal.raise_signal(signal.SIGUSR1)
            assert made._holders[0] == 1
            assert is_locked()
        signal.raise_signal(signal.SIGUSR1)  # here, it may
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_locked()


def test_threads_exclude_each_other(made):
    order = []

    def work():
        with made.held(0, "Accumulate"):
            order.append("second")

    thread = threading.Thread(target=work)
    with made.held(0, "Accumulate"):
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_ranks_meet_again_and_again(made, other):
    """A rank that gave up comes again; one that has ended is not waited for."""
    made._met = np.zeros(2, np.int64)
    locks.lock(other, win._ALIVE + 1)
    with pytest.raises(CollectiveTimeout, match="rank 0 waited for rank 1 in Fence"):
        made.meet("Fence", 0.05)
    made.check("Put", [0, 1])
    made._met[1] = 1
    assert made.meet("Fence") == []
    with pytest.raises(CollectiveTimeout):
        made.meet("Fence", 0.05)
    locks.unlock(other, win._ALIVE + 1)  # as Linux does
    assert made.meet("Fence") == [1]
    with pytest.raises(RankLeft, match="Put: rank 1 has ended without freeing the"):
        made.check("Put", [0, 1])


def test_a_closed_window_refuses(made):
    made.meet("Win.Free", 1)  # it is alone
    made.close()
    with pytest.raises(ClosedError, match="Free was called"), made.held(0, "Put"):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_lock_of_accumulates_is_held_until_their_copies_have_ended(fails):
    """Else another rank's accumulate would load what is not yet stored."""
    steps = []

    @contextmanager
    def held(rank, what):
        steps.append(("lock", rank))
        try:
            yield
        finally:
            steps.append("unlock")

    window = SimpleNamespace(
        _check_target=lambda rank, what: None,
        _locks=SimpleNamespace(held=held),
        _settle=lambda: steps.append("settle"),
    )
    with suppress(ZeroDivisionError), Win._atomic(window, 3, "Accumulate"):
        steps.append("enqueue")
        if fails:
            raise ZeroDivisionError
    assert steps == [("lock", 3), "enqueue", "settle", "unlock"]
