"""The ranks' part of ``numba-symm doctor``."""

import pytest

import numba_symm as ns
from numba_symm.command import doctor, pair_checks
from numba_symm.command.node_checks import WRONG
from tests.ranks.helpers import needs_peers


@needs_peers
@pytest.mark.parametrize("size", ["", "2"])
def test_stores_that_arrive_wrongly_are_found(monkeypatch, world, size):
    if size:
        if world.size < 4:
            pytest.skip("needs two islands that have several ranks")
        monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", size)
    findings, measured = pair_checks.all_of(world)
    assert WRONG not in [each.state for each in findings]
    for name in ("latency", "bandwidth"):
        for rank, row in enumerate(measured[name]):
            there = {r for i in measured_islands(world) if rank in i for r in i}
            assert {r for r, each in enumerate(row) if each} == there - {rank}
    if world.rank == 1:  # it stores, and expects, something else
        monkeypatch.setattr(pair_checks, "_STEP", pair_checks._STEP + 1)
    findings, _ = pair_checks.all_of(world)
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
    monkeypatch.setattr(pair_checks.ranks, "launched_size", lambda: world.size + 1)
    (found,), measured = pair_checks.all_of(world)
    assert (found.check, found.state, measured) == ("MPI", WRONG, {})
