"""The start of communicators, and the multiprocessors that they occupy."""

import os
import warnings

import numpy as np
import pytest

import numba_symm as ns
from numba_symm import environment
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols import binding
from numba_symm.collectives.protocols.workspace import HELD
from numba_symm.environment import SIMULATED
from numba_symm.gpu import arrays
from numba_symm.gpu.kernels import Kernel
from tests.expected import expected
from tests.ranks.helpers import (
    array_of,
    check_works,
    get,
    of_one_island,
    on_few_numbers,
    refused,
)

MULTIPROCESSORS = "NUMBA_SYMM_MULTIPROCESSORS"


def test_the_size_is_the_one_asked_for(world):
    asked = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"]
    assert world.allgather(int(asked)) == [world.size] * world.size


@pytest.mark.filterwarnings("default")
def test_what_is_wrong_with_the_environment_is_warned_of_once(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_TIMEOT", "5")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "9")
    environment.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        for _ in "12":
            ns.Communicator(world, timeout=60).close()
    texts = [str(each.message) for each in found]
    # Ranks that share a GPU, as these may, are slow but not wrong.
    texts = [text for text in texts if "share a GPU without MPS" not in text]
    wanted = []
    if world.rank == 0:
        wanted += ["NUMBA_SYMM_TIMEOT is not known (did you mean 'NUMBA_SYMM"]
    if world.size == 1:
        wanted += ["OMPI_COMM_WORLD_SIZE=9"]
    for text, part in zip(texts, wanted, strict=True):
        assert part in text
    assert {each.filename for each in found} <= {__file__}


# Multiprocessors


@pytest.fixture
def bound(monkeypatch):
    """Names of kernels and their thread blocks, with those of an early neighbour.

    The last launch of a call between the ranks' own arrays is early, too, beside one
    whose blocks wait for no rank any more.
    """
    found, after, waiting = [], [False], [True]
    bind, launch = Kernel.bind, binding.launch

    def noted(self, grid, *args, held=1, early=False):
        blocks = -(-grid // held)
        beside = blocks if early and not after[-1] else 0
        if waiting[-1] or early:  # the others may take all
            found.append((self.factory.__name__, blocks + beside))
        return bind(self, grid, *args, held=held, early=early)

    def launched(
        kernel, end, grid, arguments=(), follows=False, waits=True, long=False
    ):
        after.append(follows)
        waiting.append(waits)
        try:
            return launch(kernel, end, grid, arguments, follows, waits, long)
        finally:
            after.pop()
            waiting.pop()

    monkeypatch.setattr(Kernel, "bind", noted)
    monkeypatch.setattr(binding, "launch", launched)
    return found


def check_operation(comm, operation, algorithm, count, run):
    """Check one call, between symmetric arrays, of ``count`` float32 a part.

    Without ``run``, bind its kernels only.
    """
    count *= operation.shards(comm.size)
    root = comm.size - 1
    inputs = [np.arange(count, dtype=np.float32) % 91 + r for r in range(comm.size)]
    x = array_of(comm, inputs[comm.rank], True)
    rooted = {"root": root} if operation.rooted else {}
    made_by = lambda each: sum(each.values()), np.zeros, np.concatenate
    wanted = expected(operation, inputs, comm.rank, root, *made_by)
    out = comm.zeros(operation.shape(arrays.view(x, "test"), comm.size), np.float32)
    if operation.at_root and comm.rank != root:
        out = None
    given = {} if operation.in_place else {"out": out}
    given |= rooted | {"algorithm": algorithm}
    if not run:
        getattr(comm, f"{operation.name}_init")(x, **given)
        return
    out = getattr(comm, operation.name)(x, **given)
    comm.synchronize()
    if out is not None:
        assert np.array_equal(get(out).ravel(), wanted), (operation.name, algorithm)


def check_messages(comm, count):
    """Check a ring, a gather to rank 0 and a gather of different counts."""
    n, rank = comm.size, comm.rank
    mine = array_of(comm, np.full(count, rank, np.int16), False)
    out = comm.zeros(count, np.int16)
    comm.sendrecv(mine, dst=(rank + 1) % n, out=out, src=(rank - 1) % n)
    gathered = comm.gather(mine, root=0)
    counts = [r + 1 for r in range(n)]
    uneven = comm.all_gather_v(mine[: rank + 1], counts=counts)
    comm.synchronize()
    assert (get(out) == (rank - 1) % n).all()
    if rank == 0:
        assert np.array_equal(get(gathered).ravel(), np.repeat(range(n), count))
    assert np.array_equal(get(uneven).ravel(), np.repeat(range(n), counts))


@of_one_island
@on_few_numbers
@pytest.mark.parametrize("most", [1, 3])
def test_every_call_keeps_to_the_multiprocessors(world, bound, most):
    # Of several rounds. More blocks run in other tests, too.
    run = most == 1 or not SIMULATED
    count = most * (3 << (8 if SIMULATED else 18))
    with ns.Communicator(world, timeout=60, multiprocessors=most) as comm:
        assert comm.multiprocessors == most
        for operation in OPERATIONS.values():
            for algorithm in operation.algorithms:
                check_operation(comm, operation, algorithm, count, run)
        comm.barrier()
        check_messages(comm, 3 << (9 if SIMULATED else 18))
        with comm.dup() as child:
            check_works(child)
            assert child.multiprocessors == most
        messages = -(-2 * (comm.size - 1) // HELD)
        for name, blocks in bound:
            limit = max(most, messages) if name == "make_transfer" else most
            assert blocks <= limit, name
        names = {name for name, _ in bound}
        assert "make_direct" in names or comm.size == 1
        assert max(blocks for _, blocks in bound) >= most - 1


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "8", True, 10**6])
def test_multiprocessors_that_are_none_are_refused(world, wrong, monkeypatch):
    if SIMULATED and wrong == 10**6:
        pytest.skip("the simulator has as many as anyone asks for")
    asked = f"multiprocessors={wrong!r}: "
    refused(
        world,
        ns.ArgumentError,
        lambda: ns.Communicator(world, multiprocessors=wrong),
        asked,
    )
    with monkeypatch.context() as patch:
        patch.setenv(MULTIPROCESSORS, "none" if wrong is True else str(wrong))
        if wrong != "8":
            refused(world, ns.ArgumentError, lambda: ns.Communicator(world), "=")
            return
        with ns.Communicator(world, timeout=60) as comm:
            assert comm.multiprocessors == 8
            check_works(comm)


def test_multiprocessors_must_agree(world, monkeypatch):
    if world.size == 1:
        return
    monkeypatch.delenv(MULTIPROCESSORS, raising=False)
    last = world.size - 1
    mine = 2 if world.rank == last else None
    text = f"rank {last} has multiprocessors=2"
    refused(
        world,
        ns.ArgumentError,
        lambda: ns.Communicator(world, multiprocessors=mine),
        text,
        "multiprocessors=None",
        "every rank must pass the same",
    )
