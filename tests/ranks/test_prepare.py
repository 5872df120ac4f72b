"""What ``prepare`` refuses. The kernels that it lists: ``host/test_kernel_set.py``."""

import pytest

import numba_symm as ns
from tests.ranks.helpers import wait_for_all


@pytest.fixture
def comm(world):
    with ns.Communicator(world, timeout=60) as comm:
        yield comm


def test_wrong_arguments_are_refused_and_the_communicator_stays_usable(comm, world):
    for names, options, text in [
        ((), {}, "expected names of calls, got none"),
        (("all_redcue",), {}, r"got 'all_redcue' \(did you mean 'all_reduce'"),
        (("all_reduce",), {"dtypes": "float32"}, "expected a list or tuple"),
        (("all_reduce",), {"ops": ["add"]}, "pass one of 'sum'"),
        (("scan",), {"ops": ["avg"]}, "op='avg'"),
    ]:
        with pytest.raises(ns.ArgumentError, match=text):
            comm.prepare(*names, **options)
    comm.prepare("barrier", "signals")
    comm.barrier()
    wait_for_all(comm, world)


def test_a_closed_communicator_prepares_nothing(comm):
    comm.close()
    with pytest.raises(ns.ClosedError):
        comm.prepare("all_reduce")
