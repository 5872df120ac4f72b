"""How many functions of the library a repeated call passes."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

import numba_symm
from numba_symm import mpi
from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import SIMULATED
from numba_symm.gpu import kernels

pytestmark = pytest.mark.skipif(not SIMULATED, reason="kernels would run")

PACKAGE = Path(numba_symm.__file__).parent.resolve()
DRIVER = PACKAGE / "gpu/compiled.py"  # stands for the driver in the simulator


def passed(call):
    """Return the functions of the library that a call passes in Python, in order."""
    found, files = [], {}

    def note(frame, event, argument):
        if event == "call":
            file = frame.f_code.co_filename
            if file not in files:
                path = Path(file).resolve()
                own = path.is_relative_to(PACKAGE) or path.parts[-2] == "collectives"
                files[file] = own and path != DRIVER
            if files[file]:
                found.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


@pytest.fixture
def x(comm, monkeypatch):
    """An array; no kernel runs."""
    monkeypatch.setattr(kernels.Launch, "simulate", lambda launch: None)
    return cuda.to_device(np.ones(100, np.float32))


def calls_of(comm, x):
    """Return calls by name, each with the most functions that it may pass."""
    y, z = cuda.device_array_like(x), cuda.device_array(1, np.float32)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    gathered = None  # on the other ranks
    if comm.rank == 0:
        gathered = cuda.to_device(np.zeros((comm.size, 100), np.float32))
    counts = [100 - comm.size + 1] + [1] * (comm.size - 1)
    plan = comm.all_reduce_init(x, out=y)
    other = comm.sendrecv_init(x, dst=right, out=y, src=left)

    def group():
        with comm.group():
            comm.send(x, dst=right)
            comm.recv(y, src=left)

    return {
        "a plan": (plan, 2),
        "a plan of messages": (other, 2),
        "all_reduce": (lambda: comm.all_reduce(x, out=y), 6),
        "a new output": (lambda: comm.all_reduce(x), 10),
        "all_reduce in place": (lambda: comm.all_reduce(y, out=y), 6),
        "broadcast": (lambda: comm.broadcast(x, root=0), 6),
        "sendrecv": (lambda: comm.sendrecv(x, dst=right, out=y, src=left), 6),
        "group": (group, 11),
        "sum": (lambda: comm.sum(x), 10),
        "dot": (lambda: comm.dot(x, y, out=z), 6),
        "norm": (lambda: comm.norm(x, out=z), 5),
        "barrier": (comm.barrier, 5),
        "gather": (lambda: comm.gather(x, root=0, out=gathered), 6),
        "scatter": (lambda: comm.scatter(gathered, root=0, out=y), 6),
        "reduce_scatter_v": (
            lambda: comm.reduce_scatter_v(x, counts=counts, out=y[: counts[comm.rank]]),
            60,  # of any number of ranks: its launches were packed before
        ),
    }


NAMES = [
    *("a plan", "a plan of messages", "all_reduce", "a new output"),
    *("all_reduce in place", "broadcast", "sendrecv", "group", "sum", "dot", "norm"),
    *("barrier", "gather", "scatter", "reduce_scatter_v"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_call_passes_few_functions(comm, x, name):
    call, most = calls_of(comm, x)[name]
    for _ in range(4):
        call()
    found = passed(call)
    assert 1 <= len(found) <= most, found
    comm.synchronize()


def test_a_request_passes_few_functions(world, x):
    with numba_symm.Communicator(world, requests=True) as comm:
        other = (comm.rank + 1) % comm.size

        def message():
            comm.isend(x, dst=other).wait()

        if comm.size > 1:
            for _ in range(3):
                message()
            found = passed(message)
            assert 1 <= len(found) <= 20, found


def test_a_repeated_call_in_mpi4py_s_spelling_passes_few(world, x):
    made, y = mpi.Comm(world), cuda.device_array_like(x)
    for _ in range(3):
        made.Allreduce(x, y)
    found = passed(lambda: made.Allreduce(x, y))
    assert len(found) <= 24, found
    made.Free()


def test_a_message_in_mpi4py_s_spelling_passes_few(world, monkeypatch):
    """It is one to itself: messages to other ranks pass more while they wait."""
    comm = mpi.Comm(world)
    x, y = (cuda.to_device(np.ones(100, np.float32)) for _ in range(2))

    def copied(launch):
        for first in (0, 8):  # what is sent, and what is received
            *_, blocks, _, address, number = launch._values[first : first + 8]
            if blocks:
                ctypes.c_int64.from_address(address).value = number

    def exchange():
        requests = [comm.Irecv(y, comm.rank), comm.Isend(x, comm.rank)]
        mpi.Request.Waitall(requests)

    def both():
        comm.Sendrecv(x, comm.rank, 0, y, comm.rank)

    prepared = [comm.Recv_init(y, comm.rank), comm.Send_init(x, comm.rank)]

    def prepared_before():
        mpi.Prequest.Startall(prepared)
        mpi.Request.Waitall(prepared)

    monkeypatch.setattr(message_copy.Simulated, "simulate", copied)
    for call, most in ((exchange, 20), (both, 15), (prepared_before, 32)):
        for _ in range(3):
            call()
        found = passed(call)
        assert len(found) <= most, found
    comm.Free()


def test_all_ranks_learn_of_an_output_that_could_not_be_allocated(world):
    """Also in a repeated call, whose short path allocates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.Launch, "simulate", lambda launch: None)
        comm = numba_symm.Communicator(world, timeout=60)
        x = cuda.to_device(np.ones(100, np.float32))
        for _ in range(3):
            comm.all_reduce(x)
        world.barrier()  # a late rank would learn of it in these calls

        def fail(*given):
            raise MemoryError("none is left")

        if world.rank == 0:
            patch.setattr(comm._calls, "new", fail)
            with pytest.raises(MemoryError, match="none is left"):
                comm.all_reduce(x)
        world.barrier()
        with pytest.raises(numba_symm.CollectiveError, match="none is left"):
            comm.check()
        comm.close()
