"""The ranks that spawned.py starts: jobs in a row, and ranks that fail between them."""

import os
import signal
import sys

import pytest

from tests.spawned import Ranks, outcomes

WELL = [(0, 2), (1, 2)]


def present(comm):
    return comm.rank, len(comm.allgather(None))


def process(comm):
    return os.getpid()


def talks(comm, text):
    print(text)


def raises(comm):
    if comm.rank == 1:
        raise ValueError("bad luck")
    comm.barrier()


def is_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def leaves(comm):
    sys.exit(0)


def hangs(comm):
    if comm.rank == 1:
        signal.pause()


def ends_badly(comm):
    import atexit

    atexit.register(os._exit, 3)


def test_the_same_processes_run_one_job_after_another():
    with Ranks(2) as ranks:
        first = ranks.run(process)
        assert ranks.run(present) == WELL
        assert ranks.run(process) == first


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (raises, "ValueError: bad luck"),
        (is_killed, "rank 1, exit code -9"),
        (hangs, "ended: none of its processes ran for 2 s"),
    ],
)
def test_the_job_after_a_failed_one_has_new_processes(bad, text):
    with Ranks(2) as ranks:
        first = ranks.run(process)
        with pytest.raises(pytest.fail.Exception, match=text):
            ranks.run(bad, idle=2)
        assert ranks.run(present) == WELL
        assert not set(ranks.run(process)) & set(first)


def test_processes_that_have_left_are_not_waited_for():
    with Ranks(2) as ranks:
        assert ranks.run(leaves) == [None, None]
        assert ranks.run(present) == WELL


def test_only_the_failed_jobs_output_is_shown():
    with Ranks(1) as ranks:
        ranks.run(talks, "of the first job")
        (one,) = ranks.outcomes(talks, "of the second job")
        assert one.output == "of the second job\n"


def test_processes_that_end_badly_after_their_jobs_fail_the_test():
    ranks = Ranks(2)
    ranks.run(ends_badly)
    assert ranks.run(present) == WELL
    with pytest.raises(pytest.fail.Exception, match="exit code 3"):
        ranks.__exit__()


def test_how_new_processes_end_is_noted():
    ended = outcomes(2, is_killed)
    assert [one.code for one in ended] == [0, -signal.SIGKILL]
    assert [one.left for one in ended] == [True, False]
