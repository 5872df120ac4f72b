"""Several islands, which NUMBA_SYMM_ISLAND_SIZE pretends: every operation, bit by bit.

The expected reductions are within each island by its tree, then over the islands.
"""

import functools

import numpy as np
import pytest
from mpi4py import MPI

import numba_symm as ns
from numba_symm.bench import tune
from numba_symm.collectives import kernel_set, tuned
from numba_symm.collectives.islands import construction
from numba_symm.engines import mpi
from numba_symm.environment import SIMULATED
from numba_symm.gpu import kernels
from numba_symm.launch.devices import divide
from numba_symm.memory import backends
from tests import operators
from tests.descriptors import open_fds
from tests.ranks.helpers import (
    array_of,
    check_works,
    get,
    needs_peers,
    refused,
)
from tests.spawned import open_files

SIZE = "NUMBA_SYMM_ISLAND_SIZE"

pytestmark = needs_peers


def made(world, size, timeout=60):
    """Return a communicator of pretended islands of that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIZE, str(size))
        return ns.Communicator(world, timeout=timeout)


def in_pairs(world):
    return made(world, 2 if world.size > 2 else 1)


def of_one(world):
    """Three islands or more: owners exchange parts of shards."""
    return made(world, 1)


def interleaved(world):
    """Islands whose ranks are not consecutive, in another order of the ranks."""
    with in_pairs(world) as comm:
        return comm.split(0, key=comm.rank % 2)


def even_and_odd(world):
    """Parts that have a rank of each island."""
    with in_pairs(world) as comm:
        return comm.split(comm.rank % 2)


@pytest.fixture(scope="module", params=[in_pairs, of_one, interleaved, even_and_odd])
def islands(world, request):
    if world.size == 2 and request.param in (in_pairs, interleaved):
        pytest.skip("on two ranks, the same as of_one")
    with request.param(world) as comm:
        yield comm


def test_a_function_is_applied_within_islands_and_then_between_them(islands):
    comm, count = islands, 19
    inputs = [np.arange(count, dtype=np.int8) * (r + 1) for r in range(comm.size)]
    x = array_of(comm, inputs[comm.rank], False)
    if any(part[-1] - part[0] >= len(part) for part in comm.islands):
        for make in (comm.all_reduce, comm.all_reduce_init, comm.scan):
            with pytest.raises(
                ns.ArgumentError, match="expected islands of consecutive ranks"
            ):
                make(x, op=difference)
        check_works(comm)
        return
    out = comm.all_reduce(x, op=difference)
    comm.synchronize()
    wide = {rank: each.astype(np.int32) for rank, each in enumerate(inputs)}
    total = operators.over_islands(difference, comm.islands, wide)
    assert get(out).tolist() == total.astype(np.int8).tolist()


def difference(a, b):
    return a - b


def test_what_works_within_an_island_only_is_refused(world):
    size = "2" if world.size > 2 else "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIZE, size)
        refused(
            world,
            ns.ArgumentError,
            lambda: ns.Communicator(world, requests=True),
            "expected one island for requests=True",
        )
    with in_pairs(world) as comm:
        x, count = comm.zeros(4, np.int32), comm.zeros(1, np.int64)
        if comm.rank == 0:
            with pytest.raises(ns.ArgumentError, match="of another island"):
                comm.recv(x, src=comm.size - 1, count=count)
        check_works(comm)


def test_a_rendezvous_fails_on_all_islands_or_on_none(world):
    with in_pairs(world) as comm:
        last = comm.rank == comm.size - 1
        pointer = comm.allocator.alloc(100 if last else 200)
        refused(
            world,
            ns.ArgumentError,
            lambda: comm.allocator.rendezvous(pointer, comm),
            "allocation new of 100 bytes",
        )
        assert not comm.allocator.is_rendezvous_completed(pointer)
        comm.allocator.free(pointer)
        check_works(comm)


def test_a_construction_that_fails_on_one_island_leaves_nothing(world, monkeypatch):
    def fail(*args):
        raise ns.BackendError("broken")

    with in_pairs(world):
        pass  # what MPI opens once in a process is there
    before = open_files()
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(backends, "create", fail)
        refused(world, ns.SymmError, lambda: in_pairs(world), "broken")
    assert not open_files() - before
    with in_pairs(world) as comm:
        check_works(comm)


def test_prepare(world, monkeypatch):
    listed, bound, listing = set(), set(), kernel_set.kernels

    def noting(*given):
        found = listing(*given)
        listed.update(found)
        return found

    monkeypatch.setattr(kernel_set, "kernels", noting)
    bind = kernels.Kernel.bind
    monkeypatch.setattr(
        kernels.Kernel, "bind", lambda k, *a, **o: (bound.add(k), bind(k, *a, **o))[1]
    )
    # As NCCL's: kernels beside an exchange differ from those alone.
    monkeypatch.setattr(mpi.MpiEngine, "multiprocessors", 2)
    with in_pairs(world) as comm:
        loaded = {*bound}  # by the engine's trial
        comm.prepare("sendrecv", "barrier", "signals")
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for count in (40, 333):
            x = comm.zeros(count * comm.size, np.float32)
            comm.sendrecv(x, dst=right, out=comm.zeros(x.size), src=left)
        assert bound <= listed | loaded  # by other calls it would be listed, too
        names = "all_to_all", "reduce", "broadcast", "reduce_scatter"
        comm.prepare(*names, dtypes=[np.float32], ops=["sum"])
        for count in (40, 333):
            x = comm.zeros(count * comm.size, np.float32)
            for root in (0, comm.size - 1):
                comm.reduce(x, root=root)
                comm.broadcast(x, root=root)
            comm.reduce_scatter(x)
        comm.synchronize()
    assert bound <= listed | loaded


def test_islands_are_shown_and_split(world):
    with in_pairs(world) as comm:
        size = 2 if world.size > 2 else 1
        access = [[True] * world.size] * world.size
        assert comm.islands == divide(range(world.size), access, size)
        index = next(i for i, part in enumerate(comm.islands) if comm.rank in part)
        before = open_fds()
        with comm.split(index) as part:
            # Its workspace, and the first rank's board; the sockets are shared.
            assert open_fds() <= before + 1 + (part.rank == 0)
            assert part.islands == (tuple(range(part.size)),)
            check_works(part)
        with comm.dup() as same:
            assert same.islands == comm.islands
            check_works(same)
        with comm.split(0, key=-comm.rank) as turned:
            assert open_fds() <= before + 2
            last = world.size - 1
            there = [sorted(last - rank for rank in part) for part in comm.islands]
            assert turned.islands == tuple(map(tuple, reversed(there)))
            check_works(turned)


def test_tune_refuses_several_islands(world, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv(SIZE, "1")
    text = f"tune: expected ranks of one island, got {world.size} islands"
    with pytest.raises(ns.ArgumentError, match=text):
        tune.main(["--largest", "1K"])
    assert not tuned.file().exists()


@pytest.mark.skipif(not SIMULATED, reason="tests/gpu uses NCCL")
def test_an_engine_that_is_asked_for_and_missing_is_refused(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ENGINE", "nccl")
    said = "expected NCCL on all ranks", "NCCL needs GPUs, and this is Numba's CUDA"
    refused(world, ns.BackendError, lambda: made(world, 1), *said)


def test_rank_0_shows_several_islands_once(world, monkeypatch, capfd):
    monkeypatch.setattr(
        construction, "_show", functools.cache(construction._show.__wrapped__)
    )
    monkeypatch.setenv("NUMBA_SYMM_SHOW_ISLANDS", "1")
    for size in (world.size, 1, 1):
        with made(world, size):
            pass
    said = capfd.readouterr().err
    assert said.count("numba-symm: islands: rank 0 on ") == (world.rank == 0)


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "65"])
def test_wrong_sizes_are_refused(world, monkeypatch, wrong):
    monkeypatch.setenv(SIZE, wrong)
    text = f"{SIZE}={wrong!r}: expected an integer of 1 to {world.size}"
    refused(world, ns.ArgumentError, lambda: ns.Communicator(world), text)


def test_an_mpi_of_one_thread_is_refused(world, monkeypatch):
    if world.rank == 0:
        level = MPI.THREAD_SERIALIZED
        monkeypatch.setattr(MPI, "Query_thread", lambda: level)
    text = "permits calls of several threads"
    refused(world, ns.ArgumentError, lambda: made(world, 1), text)


def test_ranks_that_disagree_are_refused(world, monkeypatch):
    last = world.rank == world.size - 1
    with monkeypatch.context() as patch:
        patch.setenv(SIZE, "1" if last else str(world.size))
        refused(world, ns.ArgumentError, lambda: ns.Communicator(world), f"{SIZE}=1")
    with monkeypatch.context() as patch:
        patch.setenv(SIZE, "1")
        patch.delenv("NUMBA_SYMM_ENGINE", raising=False)
        if last:
            patch.setenv("NUMBA_SYMM_ENGINE", "mpi")
        text = "NUMBA_SYMM_ENGINE=mpi"
        refused(world, ns.ArgumentError, lambda: ns.Communicator(world), text)
