"""Calls after ``prepare`` bind only kernels that it has listed."""

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives import kernel_set
from numba_symm.engines import deadline
from numba_symm.environment import SIMULATED
from numba_symm.gpu import kernels
from tests.kernels import named
from tests.ranks.helpers import on_few_numbers, ordinary, wait_for_all

COUNTS = (1, 3, 4, 16, 100, 128, 333, 1024, 4096, 5001)


@pytest.fixture
def comm(world):
    with ns.Communicator(world, timeout=60) as comm:
        yield comm


@pytest.fixture
def prepared(monkeypatch):
    """Return the kernels that ``prepare`` lists."""
    found = []
    listing = kernel_set.kernels

    def noting(*args):
        found.extend(listing(*args))
        return found

    monkeypatch.setattr(kernel_set, "kernels", noting)
    return found


def every_size(comm, new):
    for count in COUNTS if SIMULATED else (*COUNTS, 1 << 20, (8 << 20) + 1):
        x = new(count, np.float32)
        comm.all_reduce(x)
        comm.all_reduce(x, out=x)
        comm.all_reduce(x[1:])
        comm.broadcast(x, root=comm.size - 1)
        comm.all_gather(x)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.sendrecv(x, dst=right, out=new(count, np.float32), src=left)


@on_few_numbers
def test_calls_of_all_sizes_bind_prepared_kernels(comm, world, prepared, monkeypatch):
    names = ("all_reduce", "broadcast", "all_gather", "sendrecv")
    comm.prepare(*names, dtypes=("float32", np.int16), ops=["sum", "max"])
    bind = kernels.Kernel.bind
    bound = set()

    def checked(kernel, *args, **options):
        bound.add(kernel)
        return bind(kernel, *args, **options)

    monkeypatch.setattr(kernels.Kernel, "bind", checked)
    with monkeypatch.context() as patch:
        if SIMULATED:  # what is bound is launched, but does nothing, on all ranks
            patch.setattr(kernels, "simulate", lambda *given: None)
        for new in (comm.empty, ordinary):
            every_size(comm, new)
    wait_for_all(comm, world)
    assert (len(bound) > 3) == (comm.size > 1)  # one rank copies
    # The construction loads the kernel of deadline marks, because it tries the engine.
    missing = bound - {*prepared, deadline.kernel()}
    assert not [(named(each.factory), each.constants) for each in missing]


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
