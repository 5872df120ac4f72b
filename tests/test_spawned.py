"""The ranks that spawned.py starts: jobs in a row, and ranks that fail between them."""

import os
import signal

import pytest

from tests.spawned import Ranks

WELL = [(0, 2), (1, 2)]


def present(comm):
    return comm.rank, len(comm.allgather(None))


def process(comm):
    return os.getpid()


def raises(comm):
    if comm.rank == 1:
        raise ValueError("bad luck")
    comm.barrier()


def is_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(comm):
    if comm.rank == 1:
        signal.pause()


def ends_badly(comm):
    import atexit

    atexit.register(os._exit, 3)


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


def test_processes_that_end_badly_after_their_jobs_fail_the_test():
    ranks = Ranks(2)
    ranks.run(ends_badly)
    assert ranks.run(present) == WELL
    with pytest.raises(pytest.fail.Exception, match="exit code 3"):
        ranks.__exit__()
