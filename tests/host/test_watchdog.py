"""What the watchdog tells other islands, and what it does if it cannot."""

import signal
import subprocess
import sys
import types

import pytest

import numba_symm as ns
from numba_symm import islands
from numba_symm.collectives.islands.site import Site
from numba_symm.engines.protocol import Parcel
from numba_symm.launch import ranks, waiting, watchdog
from numba_symm.launch.failures import Failure
from numba_symm.launch.watchdog import Watchdog

PARTS = ((0, 1), (2,), (3,))


class Job:
    """What a watchdog needs, in one: it writes down what is done."""

    def __init__(self):
        self.done, self.known = [], None
        self.breaks = self.finalized = self.interrupts = False
        self.arrived, self.lacking = [], 0
        self.alive, self.ended = self, set()
        self.mpi, self.ranks, self.tag = self, [10, 11, 12, 13], 515

    def iprobe(self, source, tag):
        if self.breaks:
            raise RuntimeError("no MPI")
        assert (source, tag) == (-1, 515)
        return bool(self.arrived)

    def improbe(self, source, tag, status):
        assert (source, tag) == (-1, 515)
        status.source, message = self.arrived.pop()
        irecv = lambda: types.SimpleNamespace(test=lambda: self.test(message))  # noqa: E731
        return self.interrupted(types.SimpleNamespace(irecv=irecv))

    def test(self, message):
        self.lacking -= 1
        return self.interrupted((self.lacking < 0, message))

    record = None

    def isend(self, error, rank, tag):
        assert tag == 515
        self.done.append(self.interrupted(f"sent to {rank}"))

    def interrupted(self, result):
        if self.interrupts:
            signal.raise_signal(signal.SIGINT)
        return result

    def fail(self, error):
        self.abandon(error)

    def failure(self):
        return self.known

    def abandon(self, cause, operation=""):
        self.done.append(cause)
        self.known = Failure(ns.RankLeft, str(cause))

    def exchange(self, *given):
        raise self.error

    def status(self):
        return None

    def runs(self, number):
        return number not in self.ended

    def abort(self):
        self.done.append("aborted")


@pytest.fixture
def job(monkeypatch):
    job = Job()
    mpi = types.SimpleNamespace(ANY_SOURCE=-1, Is_finalized=lambda: job.finalized)
    mpi.Status = types.SimpleNamespace
    mpi.Exception = OSError
    monkeypatch.setattr(ranks, "mpi_module", lambda: mpi)
    monkeypatch.setattr(watchdog, "_fall_silent_before_finalize", lambda: None)
    monkeypatch.setattr(waiting, "unfinished", [])
    return job


def test_a_watchdog_that_cannot_go_on_ends_what_the_gpu_waits_in(job):
    watch = Watchdog(job, job, PARTS, 0, 0)
    watch.ask(job)
    job.breaks = True
    watch._thread.join(300)
    assert job.done == ["cannot watch other islands (RuntimeError: no MPI)", "aborted"]


def test_a_failure_is_reported_before_connections_of_islands_end(job):
    watch = Watchdog(job, job, PARTS, 0, 0)
    watch.ask(job)
    job.abandon("left")
    watch.look()
    watch.look()
    watch.stop()
    assert job.done == ["left", "sent to 12", "sent to 13", "aborted"]
    assert waiting.unfinished == [None, None]  # the requests of what was sent


def test_a_report_to_a_rank_that_has_died_prevents_no_other(job, monkeypatch):
    watch, sends = Watchdog(job, job, PARTS, 0, 0), job.isend

    def isend(error, rank, tag):
        if rank == 12:
            raise ranks.mpi_module().Exception("Process Failure")
        sends(error, rank, tag)

    monkeypatch.setattr(job, "isend", isend)
    watch.ask(job)
    job.abandon("left")
    watch.look()
    watch.stop()
    assert job.done == ["left", "sent to 13", "aborted"]


def test_a_record_that_cannot_be_read_prevents_no_report(job):
    watch, job.record = Watchdog(job, job, PARTS, 0, 0), object()
    watch.ask(job)
    with watch._lock:  # before its thread looks
        job.abandon("left")
        with pytest.raises(AttributeError):
            watch.look()
    watch.stop()
    assert job.done == ["left", "sent to 12", "sent to 13", "aborted"]


@pytest.mark.parametrize("islands", [2, 3, 7, 32, 33, 1000])
def test_all_islands_know_soon_even_if_one_gives_no_report(islands):
    """Each passes a report on once. One whose ranks were killed passes nothing on."""
    most = 2 * (islands - 1).bit_length()
    near = [watchdog.neighbors(index, islands) for index in range(islands)]
    assert sum(map(len, near)) <= 4 * islands
    for silent in {None, 0, 1, islands // 2, islands & -2}:
        for first in {0, islands - 1, islands // 3} - {silent}:
            known, latest, rounds = {first}, {first}, 0
            while latest:
                latest = {peer for each in latest for peer in near[each]} - known
                latest.discard(silent)
                known |= latest
                rounds += bool(latest)
            assert known == {*range(islands)} - {silent}
            assert rounds <= most


def test_two_ranks_of_an_island_that_run_report(job, monkeypatch):
    monkeypatch.setattr(watchdog, "_PAUSE", 60)
    parts, job.ranks = ((0, 1, 2, 3), (4, 5)), [*range(10, 16)]
    for ended, sent in ((set(), [14, 15, 0, 0]), ({0}, [0, 14, 15, 0])):
        for local in {0, 1, 2, 3} - ended:
            job.done, job.known, job.ended = [], None, ended
            watch = Watchdog(job, job, parts, 0, local)
            job.abandon("left")
            watch.look()
            watch.stop()
            wanted = [f"sent to {rank}" for rank in [sent[local]] if rank]
            assert job.done == ["left", *wanted]


def test_an_interrupt_loses_no_report(job, monkeypatch):
    monkeypatch.setattr(watchdog, "_PAUSE", 60)  # so that its thread does not look
    watch = Watchdog(job, job, PARTS, 0, 0)
    job.interrupts, job.arrived = True, [(13, "left")]
    for done in (["left"], ["left", "sent to 12", "sent to 13"]):
        with pytest.raises(KeyboardInterrupt):
            watch.look()
        assert job.done == done
    watch.look()
    watch.stop()
    assert job.done == done


def test_a_report_that_has_not_all_arrived_delays_nobody(job, monkeypatch):
    """Its sender may have died amid it, and this rank's calls look, too."""
    monkeypatch.setattr(watchdog, "_PAUSE", 60)
    watch = Watchdog(job, job, PARTS, 0, 0)
    job.arrived, job.lacking = [(13, "left")], 2
    for done in ([], [], ["left", "sent to 12", "sent to 13"]):
        watch.look()
        assert job.done == done
    watch.stop()


def test_many_watchdogs_look_less_often(job, monkeypatch):
    monkeypatch.setattr(watchdog, "_AT_FULL_RATE", 2)
    looks = [Watchdog(job, job, PARTS, 0, 0) for _ in range(6)]
    assert watchdog._pause() == 3 * watchdog._PAUSE
    for each in looks[1:]:
        each.stop()
    assert watchdog._pause() == watchdog._PAUSE
    looks[0].stop()


def test_a_report_of_an_earlier_communicator_is_not_a_failure_of_this_one(job):
    """Its sender may have been in a construction that has failed for it alone."""
    watch = Watchdog(job, job, PARTS, 0, 0)
    job.arrived = [(14, "left")]
    watch.look()
    watch.stop()
    assert not job.arrived
    assert not job.done


def exchange_of(job):
    joined = islands.Islands.__new__(islands.Islands)
    joined.engine, joined.abandon = job, job.abandon
    site = Site(joined, types.SimpleNamespace(order=None), 0)
    (found,) = site.between("all_reduce", [Parcel(1, 10, 8)], [])
    return found


def test_no_exchange_begins_after_mpi_was_finalized(job):
    """No failure would reach the other islands any more."""
    job.finalized = True
    with pytest.raises(ns.ExchangeError, match="MPI has been finalized"):
        exchange_of(job)(77)
    assert not job.done


@pytest.mark.parametrize("error", [KeyboardInterrupt, ns.BackendError])
def test_an_engine_that_raises_is_reported(job, error):
    """Even in a capture, which by itself fails only on one rank."""
    job.error = error
    with pytest.raises(error):
        exchange_of(job)(77)
    assert [type(cause) for cause in job.done] == [error]


def test_an_engine_that_refuses_has_not_begun(job):
    job.error = ns.ArgumentError
    with pytest.raises(ns.ArgumentError):
        exchange_of(job)(77)
    assert not job.done


PROGRAM = """
import types
import numba_symm
from numba_symm.launch import watchdog
from numba_symm.collectives import lifetime

class Anything:
    def __getattr__(self, name):
        return self
    def __call__(self, *given, **words):
        return None

class Self(Anything):
    def Delete_attr(self, key):
        print("falls silent")

def abandon(cause):
    print(cause)

anything = Anything()
watchdog.ranks.mpi_module = lambda: types.SimpleNamespace(
    COMM_SELF=Self(), Comm=anything, Is_finalized=lambda: False
)
watchdog._fall_silent_before_finalize()
island = types.SimpleNamespace(abandon=abandon)
lifetime._open = [types.SimpleNamespace(members=island, when_dropped=anything)]
"""


def test_a_rank_reports_open_communicators_before_it_falls_silent():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    said = subprocess.check_output(command, text=True, timeout=60)
    assert said.splitlines() == [
        "ended without closing the communicator",
        "falls silent",
    ]
