"""What a board shows while other ranks arrive, fail and leave."""

import time

import pytest

from numba_symm.launch import board, failures
from numba_symm.launch.waiting import Wait
from tests.boards import on_ranks, record, store


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    monkeypatch.setattr(board, "SIMULATED", True)


def test_a_piece_stays_until_all_have_read_it():
    """Rank 0 reads each piece, but those of the last value, late: after the next."""
    nbytes = board.PIECE + 100

    def play(made, comm):
        place, found = made._place, []

        def late(rank):
            if comm.rank == 0 and rank == 1 and number < 2:
                while made._steps[1] <= made._step:
                    time.sleep(0.001)
            return place(rank)

        made._place = late
        for number in range(3):
            value = bytes([10 * number + comm.rank]) * nbytes
            found.append(made.all_gather(value, Wait("zeros", comm.rank, 600)))
        return [[(len(each), *{*each}) for each in values] for values in found]

    wanted = [[(nbytes, 10 * number + r) for r in range(2)] for number in range(3)]
    assert on_ranks(2, play) == [wanted] * 2


@pytest.mark.parametrize("seeing", [{0}, {1, 2}, {0, 1, 2}])
def test_nobody_continues_if_a_rank_sees_a_record_before_it_votes(seeing):
    """All have arrived then, and none of them knew of a failure before."""

    def play(made, comm):
        reached = made._reached

        def and_a_record(step, wait, **options):
            found = reached(step, wait, **options)
            if not options and comm.rank in seeing:
                store(made.address, comm.rank, record(failures.BARRIER))
            return found

        made._reached = and_a_record
        failure = made.gate(Wait("zeros", comm.rank, 10))
        comm.barrier()
        return failure and failure.text

    for text in on_ranks(3, play):
        assert text.startswith("rank 1 waited for rank 2 in barrier")


def test_a_rank_that_has_closed_its_board_has_not_ended():
    """It gives up its lock then, as the end of a process does."""

    def play(made, comm):
        comm.barrier()
        if comm.rank == 1:
            made.close()
        comm.barrier()
        if comm.rank == 1:
            return None
        made.report_ended("all_reduce")
        return made.alive.runs(1), made.ended(), made.failure()

    assert on_ranks(2, play) == [(False, [], None), None]


def test_a_rank_that_arrives_and_closes_at_once_has_not_ended():
    """It does so after this rank has read its step, and before it reads its lock."""

    def play(made, comm):
        if comm.rank == 0:
            runs, step = made.alive.runs, made._step + 1

            def arriving(rank):
                made._steps[rank] = step
                return False

            made.alive.runs = arriving
            assert not made._reports_ended([1], step, Wait("zeros", 0, 10))
            made.alive.runs = runs
        comm.barrier()
        return made.failure()

    assert on_ranks(2, play) == [None] * 2


def test_the_load_during_which_a_rank_failed_stays_noted():
    def play(made, comm):
        note = made._memory.notes[0]
        made.note_load("the first")
        made.end_load()
        assert not note.began
        made.note_load("the second")
        made.abandon("is away")
        made.end_load()
        noted = note.what, note.began, note.ended
        assert noted[0] == b"the second"
        assert all(noted[1:])
        made.note_load("the third")
        made.end_load()
        return noted == (note.what, note.began, note.ended)

    assert on_ranks(1, play) == [True]
