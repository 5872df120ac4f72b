"""Communicators and memory that cannot be made: every rank raises."""

import dataclasses
import functools
import gc
import itertools
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import numba_symm as ns
from numba_symm import environment
from numba_symm.collectives import lifetime
from numba_symm.environment import SIMULATED
from numba_symm.gpu import loads, streams
from numba_symm.launch import devices, ranks
from numba_symm.memory import allocator as allocators
from tests.ranks.helpers import check_works, get, needs_peers, of_one_island, refused

BACKEND = "NUMBA_SYMM_BACKEND"
SHARING = "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES"
TIMEOUT = "NUMBA_SYMM_TIMEOUT"


@of_one_island
def test_too_many_ranks(world, everywhere, monkeypatch, fresh):
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "MOST_RANKS", world.size - 1)
        everywhere(
            ns.ArgumentError,
            lambda: ns.Communicator(world),
            f"expected at most {world.size - 1} ranks, got {world.size}",
        )


# Making a communicator


def wrong_constructions(world, last, own):
    """Yield variables, arguments, and words of the error that every rank raises."""
    here = world.size - 1
    for seconds in (-1, float("nan"), float("inf"), 1e9):
        text = f"timeout={seconds!r}: expected seconds from 0"
        yield {}, {"timeout": seconds}, text
    for seconds in ("-1", "soon", "nan", ""):
        yield {TIMEOUT: seconds}, {}, f"{TIMEOUT}={seconds!r}: expected seconds"
    yield {"NUMBA_SYMM_ENGINE": "x"}, {}, "ENGINE='x': expected nccl or mpi"
    yield {"NUMBA_SYMM_SHOW_ISLANDS": "2"}, {}, "SHOW_ISLANDS='2': expected 0 or 1"
    for comm, text in (
        (None, "expected a communicator"),
        (MPI.COMM_NULL, "expected a communicator"),
        ("world", "which has no rank"),
        (object(), "which has no rank, size, allgather, barrier"),
    ):
        yield {}, {"comm": comm}, text
    # On the last rank only.
    for device in (-1, 1000, "cuda:0", 0.5):
        text = f"rank {here}: device={device!r}"
        yield {}, {"device": device if last else own}, text
    for name in ("nvlink", "", "vmm" if SIMULATED else "host"):
        expected = " or ".join(environment.BACKENDS)
        text = f"rank {here}: {BACKEND}={name!r}: expected {expected}"
        yield ({BACKEND: name} if last else {}), {}, text
    text = f"rank {here}: {SHARING}='yes': expected 0 or 1"
    yield ({SHARING: "yes"} if last else {}), {}, text
    if world.size > 1:
        text = f"rank {here} has timeout=5"
        yield {}, {"timeout": 5 if last else 60}, text


def test_wrong_arguments_and_variables_are_refused_on_every_rank(
    world, fresh, last, monkeypatch
):
    with ns.Communicator(world, timeout=60) as comm:
        own = comm.device.ordinal
    for variables, arguments, text in wrong_constructions(world, last, own):
        given = {"comm": world} | arguments
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            call = functools.partial(ns.Communicator, **given)
            refused(world, ns.ArgumentError, call, text)


@needs_peers
@of_one_island
def test_backends_must_agree(world, fresh, everywhere, last, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv(BACKEND, raising=False)
        if last:
            patch.setenv(BACKEND, environment.BACKENDS[0])
        named = f"{BACKEND}={environment.BACKENDS[0]}"
        texts = f"rank {world.size - 1} has {named}", f"{BACKEND}=None"
        everywhere(ns.ArgumentError, lambda: ns.Communicator(world, timeout=60), *texts)


def test_the_environments_timeout_is_taken(world, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "12.5")
    with ns.Communicator(world) as comm:
        assert comm.timeout == 12.5
    with ns.Communicator(world, timeout=7) as comm:
        assert comm.timeout == 7


@pytest.mark.parametrize("name", environment.BACKENDS)
def test_a_backend_that_is_asked_for_is_taken(world, monkeypatch, name):
    monkeypatch.setenv(BACKEND, name)
    with ns.Communicator(world, timeout=60) as comm:
        assert comm.backend == ns.backend() == name
        assert comm.refused_backends == {}
        check_works(comm)


# Machines that do not fit


@needs_peers
def test_ranks_on_two_nodes_are_two_islands(world, last, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("NUMBA_SYMM_ISLAND_SIZE", raising=False)
        # NCCL would be chosen, and refuses ranks that share a GPU.
        patch.setenv("NUMBA_SYMM_ENGINE", "mpi")
        if last:
            patch.setattr(ranks, "_boot_id", lambda: b"elsewhere")
            patch.setattr(ranks.socket, "gethostname", lambda: "node7")
        with ns.Communicator(world, timeout=60) as comm:
            assert comm.islands == (tuple(range(world.size - 1)), (world.size - 1,))
            check_works(comm)


@pytest.fixture
def one_gpu(world, monkeypatch):
    """Let all ranks believe that they see one and the same GPU."""
    with ns.Communicator(world, timeout=60) as comm:
        own = comm.device
    seen = [dataclasses.replace(own, uuid=world.bcast(own.uuid))] * (own.ordinal + 1)
    monkeypatch.setattr(devices, "visible_gpus", lambda: seen)
    return own.ordinal


@needs_peers
def test_ranks_that_share_a_gpu(world, one_gpu, monkeypatch):
    monkeypatch.setenv(SHARING, "1")
    monkeypatch.delenv("NUMBA_SYMM_MULTIPROCESSORS", raising=False)
    seen = [dataclasses.replace(gpu, mps=False) for gpu in devices.visible_gpus()]
    monkeypatch.setattr(devices, "visible_gpus", lambda: seen)
    environment.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with ns.Communicator(world, one_gpu, timeout=60) as comm:
            limit = lifetime._multiprocessors(None)
            if not SIMULATED:  # simulated ranks never share a GPU
                limit = max(1, limit // world.size)
            assert comm.multiprocessors == limit
            check_works(comm)
            with comm.split(comm.rank) as alone:  # beside those of the other ranks
                assert alone.multiprocessors == limit
        ns.Communicator(world, one_gpu, timeout=60).close()
    warned = [each for each in found if "share a GPU without MPS" in str(each.message)]
    assert [each.filename for each in warned] == [__file__] * (world.rank == 0)


def test_ranks_share_a_gpu_where_allowed(world, one_gpu, monkeypatch):
    monkeypatch.setenv(SHARING, "1")
    with ns.Communicator(world, one_gpu, timeout=60) as comm:
        assert len(set(world.allgather(comm.device.uuid))) == 1
        check_works(comm)


@of_one_island
def test_gpus_without_peer_access_are_islands(world, fresh, last, monkeypatch):
    if os.environ.get(SHARING) == "1" and not SIMULATED:
        pytest.skip("a GPU that ranks share reaches itself")
    if last:  # its GPU reaches no other, as one island and then several look at it
        none = 2 * (world.size - 1) * [False]
        found = itertools.chain(none, itertools.repeat(True))
        monkeypatch.setattr(devices, "_access", lambda *_: next(found))
    with ns.Communicator(world, timeout=60) as comm:
        others = tuple(range(world.size - 1))
        alone = (world.size - 1,)
        assert comm.islands == ((others, alone) if others else (alone,))
        check_works(comm)


# Failures of one rank's memory


class Broken:
    """Makes a method of a backend fail on one rank, at its n-th call."""

    def __init__(self, patch, backend, method, at=1):
        original, self.calls = getattr(backend, method), 0

        def fail(*args):
            self.calls += 1
            if self.calls == at:
                raise ns.BackendError(f"{method} is broken")
            return original(*args)

        patch.setattr(backend, method, fail)


@pytest.fixture
def once(monkeypatch):
    """Try no allocation again, as is done once this process has shared."""
    monkeypatch.setattr(allocators, "_on_failure", [])
    monkeypatch.setattr(loads, "release", lambda: False)  # nor after outputs


@of_one_island
@pytest.mark.parametrize("erring", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("method", ["allocate", "export", "open"])
def test_a_failure_of_one_rank_is_every_ranks(
    comm, world, everywhere, monkeypatch, once, method, erring
):
    if method == "open" and comm.size == 1:
        pytest.skip("one rank alone opens nobody's memory")
    erring %= comm.size
    keep = comm.empty(4, np.float32)
    comm.rendezvous(keep).barrier()
    for attempt in range(3):
        gc.collect()  # objects that earlier tests dropped are released now
        streams.give_back()
        known = (
            len(comm._calls.heap._entries),
            len(comm.allocator._blocks.values()),
            open_files(),
        )
        with monkeypatch.context() as patch:
            if comm.rank == erring:
                # Opening the first peer's memory fails, or the last one's.
                at = comm.size - 1 if method == "open" and attempt == 1 else 1
                Broken(patch, comm.allocator._backend, method, at)
            said = everywhere(
                ns.BackendError,
                lambda: comm.empty(100, np.float32),
                f"failed on 1 of {comm.size} ranks",
                f"rank {erring}: {method} is broken",
            )
        assert said.startswith("empty")
        now = (
            len(comm._calls.heap._entries),
            len(comm.allocator._blocks.values()),
            open_files(),
        )
        assert now == known, "it left something behind"
    comm.rendezvous(keep).barrier()
    check_works(comm)


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("method", ["allocate", "export", "fill"])
def test_a_rendezvous_that_failed_can_be_tried_again(
    comm, world, everywhere, last, monkeypatch, once, method
):
    pointer = comm.allocator.alloc(80)
    with monkeypatch.context() as patch:
        if last:
            backend = comm.allocator._backend if method != "fill" else None
            Broken(patch, backend or comm._calls.members.backend, method)
        everywhere(
            ns.BackendError,
            lambda: comm.allocator.rendezvous(pointer, comm),
            f"rank {comm.size - 1}: {method} is broken",
        )
    memory = comm.allocator.rendezvous(pointer, comm)
    memory.barrier()
    comm.synchronize()
    world.barrier()
    for address in memory.buffer_ptrs:  # of the ranks of this island
        assert not any(comm._calls.members.backend.read(address, 80))
    comm.allocator.free(pointer)
    # An island that did not fail may have mapped more than another one.
    comm.rendezvous(comm.empty(4, np.float32)).barrier()
    check_works(comm)


def test_memory_is_asked_for_again_once_caches_were_emptied(
    comm, everywhere, last, monkeypatch
):
    emptied = []
    monkeypatch.setattr(allocators, "_on_failure", [lambda: emptied.append(True)])
    with monkeypatch.context() as patch:
        if last:
            Broken(patch, comm.allocator._backend, "allocate")
        x = comm.zeros(5, np.int32)
    assert emptied == [True] * last
    assert not get(comm.all_reduce(x)).any()


@of_one_island
@pytest.mark.parametrize("method", ["allocate", "export", "open", "write", "read"])
def test_a_backend_that_does_not_work_is_given_up(world, fresh, monkeypatch, method):
    if method == "open" and world.size == 1:
        pytest.skip("one rank alone opens nobody's memory")
    from numba_symm.memory import backends

    create = backends.create

    def broken(name, ordinal):
        backend = create(name, ordinal)
        if world.rank == 0:
            Broken(monkeypatch, backend, method)
        return backend

    with monkeypatch.context() as patch:
        patch.setattr(backends, "create", broken)
        (said,) = set(
            refused(
                world,
                ns.BackendError,
                lambda: ns.Communicator(world, timeout=60),
                "no kind of memory can be shared by these ranks",
                f"rank 0: {method} is broken",
            )
        )
    asked = environment.requested_backend()
    for name in [asked] if asked else environment.BACKENDS:
        assert f"\n  {name}: trying memory of kind {name!r}" in said


@of_one_island
def test_a_peers_memory_that_reads_wrong_is_noticed(world, fresh, monkeypatch):
    from numba_symm.memory import backends

    create = backends.create

    def broken(name, ordinal):
        backend = create(name, ordinal)
        if world.rank == world.size - 1:
            monkeypatch.setattr(backend, "write", lambda address, data: None)
        return backend

    with monkeypatch.context() as patch:
        patch.setattr(backends, "create", broken)
        refused(
            world,
            ns.BackendError,
            lambda: ns.Communicator(world, timeout=60),
            f"rank {world.size - 1} wrote",
            "memory, got 0000000000000000",
        )


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_child_leaves_mpi_to_its_parent(world):
    child = os.fork()
    if child == 0:
        try:
            ns.Communicator(world)
        except ns.ArgumentError as error:
            os._exit(
                7 if "was forked from one that uses MPI; start" in str(error) else 8
            )
        os._exit(9)
    _, status = os.waitpid(child, 0)
    assert world.allgather(os.waitstatus_to_exitcode(status)) == [7] * world.size
