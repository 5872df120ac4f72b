"""The ranks' part of ``numba-symm doctor``."""

import time

import pytest
from mpi4py import run

import numba_symm as ns
from numba_symm import environment
from numba_symm.command import doctor, doctor_checks
from numba_symm.command.doctor_checks import WRONG
from numba_symm.launch import info
from tests.ranks.helpers import needs_peers


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The machine may be slow."""
    for name in ("MEET", "MAKE", "MEASURE", "LIMIT"):
        monkeypatch.setattr(doctor, name, 100.0)
    monkeypatch.setattr(doctor_checks, "DEADLINE", 30.0)


@needs_peers
def test_without_time_the_report_says_what_was_skipped(monkeypatch, world):
    facts = info.facts(None) if world.rank == 0 else {}
    monkeypatch.setattr(info, "facts", lambda mpirun: dict(facts))
    monkeypatch.setattr(run, "set_abort_status", lambda code: None)
    world.barrier()
    for limit, seconds, skipped in (("MEASURE", 0.0, "pairs"), ("MEET", 1.0, "nodes")):
        with monkeypatch.context() as patch:
            patch.setattr(doctor, limit, seconds)
            if limit == "MEET" and world.rank == 1:  # it comes too late
                patch.setattr(doctor, "_place", lambda: time.sleep(2.5))
            report = doctor.of_ranks()
        world.barrier()
        assert environment.chosen_setup_timeout() == 0  # as before
        if world.rank:
            assert report is None
            continue
        texts = {each["check"]: each["text"] for each in report["findings"]}
        assert skipped in texts["skipped"]
        assert report["fits"] == (limit == "MEASURE")
        if limit == "MEET":
            assert "waited for rank 1 in doctor (the doctor's limit)" in texts["job"]
        else:  # one pair was measured
            assert sum(bool(each) for row in report["bandwidth"] for each in row) == 1


@needs_peers
@pytest.mark.parametrize("size", ["", "2"])
def test_stores_that_arrive_wrongly_are_found(monkeypatch, world, size):
    if size:
        if world.size < 4:
            pytest.skip("needs two islands that have several ranks")
        monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", size)
    findings, measured = doctor_checks.pair_findings(world)
    assert WRONG not in [each.state for each in findings]
    for rank, row in enumerate(measured["bandwidth"]):
        there = {r for i in measured_islands(world) if rank in i for r in i}
        assert {r for r, each in enumerate(row) if each} == there - {rank}
    if world.rank == 1:  # it stores, and expects, something else
        monkeypatch.setattr(doctor_checks, "_STEP", doctor_checks._STEP + 1)
    findings, _ = doctor_checks.pair_findings(world)
    wrong = [each for each in findings if each.state == WRONG]
    with ns.Communicator(world) as comm:
        alone = len(next(each for each in comm.islands if 1 in each)) == 1
    assert [each.check for each in wrong] == ([] if alone else ["peer access"])
    report = doctor.of_ranks()
    assert (report is None) == (world.rank > 0)
    assert report is None or report["fits"] == alone


def measured_islands(world):
    with ns.Communicator(world) as comm:
        return comm.islands


def test_a_launcher_of_another_mpi(monkeypatch, world):
    monkeypatch.setattr(doctor_checks.ranks, "launched_size", lambda: world.size + 1)
    (found,), measured = doctor_checks.pair_findings(world)
    assert (found.check, found.state, measured) == ("MPI", WRONG, {})
