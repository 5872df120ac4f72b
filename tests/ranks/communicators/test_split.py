"""Communicators of some ranks: who is in them, how they live side by side and end."""

import gc

import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm.collectives import lifetime
from numba_symm.launch import fds, locks
from numba_symm.launch.failures import Failure
from numba_symm.launch.ranks import TaggedComm
from tests.descriptors import open_fds
from tests.drivers.sides import rng
from tests.ranks.helpers import (
    check_works,
    get,
    needs_peers,
    of_one_island,
    refused,
    wait_for,
)


class ByHand:
    """A communicator that is not mpi4py's, as a user may make one."""

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.allgather, self.barrier = comm.allgather, comm.barrier

    def split(self, color, key):
        split = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        return ByHand(split) if split else None


class Undivided(ByHand):
    split = property()  # a property without a getter, so hasattr is false


@pytest.fixture(params=["mpi4py", pytest.param("by hand", marks=of_one_island)])
def either(world, request):
    """A communicator made of mpi4py's, and one made of an object made by hand."""
    origin = ByHand(world) if request.param == "by hand" else world
    comm = ns.Communicator(origin, timeout=60)
    yield comm
    agreement = request.config.pluginmanager.get_plugin("agreement")
    agreement.agree(request.session, request.node.nodeid)
    comm.close()


@pytest.fixture
def last(world):
    """Whether this is the last rank, the one that errs."""
    return world.rank == world.size - 1


def members(child, world):
    """Return the child's ranks by their ranks in ``world``, as a kernel sees them."""
    mine = cuda.to_device(np.array([world.rank]))
    return get(child.all_gather(mine)).ravel().tolist()


def total(comm, world):
    """Return the sum of what each rank of ``comm`` has: its rank in ``world``."""
    return int(get(comm.all_reduce(cuda.to_device(np.array([world.rank]))))[0])


class Family:
    """Communicators of one generation, and of whom each rank's one consists.

    Args:
        comm: this rank's communicator, or None.
        fellows: by rank, the ranks of its communicator in their order.
    """

    def __init__(self, comm, fellows):
        self.comm, self.fellows, self.closed = comm, fellows, False

    def child(self, draw, rank):
        """Split or duplicate the communicators. Some ranks may stay out."""
        if draw.random() < 0.25:
            made = self.comm and self.comm.dup()
            return Family(made, self.fellows)
        none = draw.choice([None, MPI.UNDEFINED])
        colors = {r: draw.choice([0, 0, 1, 7, none]) for r in sorted(self.fellows)}
        keys = {r: draw.choice([-(2**31), -r, 0, r, 2**31 - 1]) for r in colors}
        made = self.comm and self.comm.split(colors[rank], keys[rank])
        found = {}
        for one, fellows in self.fellows.items():
            if colors[one] is not none:
                own = [r for r in fellows if colors[r] == colors[one]]
                found[one] = sorted(own, key=keys.get)
        assert (made is None) == (rank not in found)
        return Family(made, found)

    def check(self, world):
        if self.comm is None:
            return
        fellows = self.fellows[world.rank]
        if self.closed:
            with pytest.raises(ns.ClosedError, match="was closed"):
                self.comm.split(0)
            return
        assert members(self.comm, world) == fellows
        assert fellows[self.comm.rank] == world.rank
        assert total(self.comm, world) == sum(fellows)
        check_works(self.comm)

    def close(self):
        self.closed = True
        if self.comm is not None:
            self.comm.close()


def test_splits_that_are_drawn(either, world):
    """Children and parents work side by side, and outlive each other."""
    draw, everyone = rng("splits", world.size), [*range(world.size)]
    families = [Family(either, dict.fromkeys(everyone, everyone))]
    for _ in range(14):
        alive = [each for each in families if not each.closed]
        families.append(draw.choice(alive).child(draw, world.rank))
        if draw.random() < 0.3 and len(alive) > 1:
            draw.choice(alive[1:]).close()
        for family in draw.sample(families, min(4, len(families))):
            family.check(world)
    families[0].close()
    draw.shuffle(families)
    for family in families:
        family.check(world)
        if not family.closed:
            family.close()


def test_a_child_has_what_its_parent_has(world):
    stream = cuda.stream()
    with ns.Communicator(world, timeout=59, stream=stream) as comm:
        for child in (comm.split(0), comm.dup()):
            with child:
                assert child.device == comm.device
                assert child.backend == comm.backend
                assert child.timeout == 59
                assert child.stream is stream
                assert child.allocator is comm.allocator
                assert child._calls.end.workspaces != comm._calls.end.workspaces
                assert (
                    child._calls.members.guard.board != comm._calls.members.guard.board
                )


@needs_peers
def test_a_child_is_as_strict_as_its_parent(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm, comm.split(0) as child:
        x = cuda.to_device(np.ones(3 + world.rank, np.float32))
        refused(world, ns.ArgumentError, lambda: child.all_reduce(x), "has 3 float32")


@of_one_island
def test_memory_belongs_to_the_communicator_it_was_made_with(comm, world):
    with comm.split(world.rank % 2) as child:
        x = child.zeros(4, np.int64)
        memory = child.rendezvous(x)
        assert memory.world_size == child.size
        right = (child.rank + 1) % child.size
        memory.get_buffer(right, 1, np.int64).copy_to_device(np.array([world.rank]))
        child.barrier()
        left = (child.rank - 1) % child.size
        assert get(x)[0] == 2 * left + world.rank % 2


def test_duplicates_use_the_sockets_and_locks_of_the_original(comm, world):
    """The simulator keeps a descriptor of each allocation, rank 0 one of the board."""
    gc.collect()
    before = open_fds()
    many = [comm.dup() for _ in range(5)]
    assert open_fds() - before <= len(many) * (2 if comm.rank == 0 else 1)
    for each in many:
        each.rendezvous(each.empty(3, np.float32)).barrier()
        each.close()
    assert open_fds() <= before


@needs_peers
@of_one_island
def test_a_failed_duplicate_leaves_no_descriptor_to_the_next(comm, world, monkeypatch):
    """They have one number, and use the same sockets."""

    def failing(*_):
        raise OSError("not received")

    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(fds.IpcChannel, "recv_fd", failing)
        refused(world, ns.SymmError, comm.dup, "not received")
    with comm.dup() as other:
        check_works(other)


@needs_peers
def test_a_part_may_be_smaller_than_the_islands_that_are_pretended(world, monkeypatch):
    """The last row of a grid may have fewer ranks than the others."""
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", str(max(2, world.size - 1)))
    row = world.Split(world.rank // (world.size - 1))
    with ns.Communicator(row) as comm:
        assert comm.islands == (tuple(range(comm.size)),)
        check_works(comm)
    row.Free()


@of_one_island
def test_a_duplicate_needs_no_method_split(world):
    with ns.Communicator(Undivided(world), timeout=60) as comm, comm.dup() as other:
        check_works(other)
        check_works(comm)


# How they end


@needs_peers
def test_a_failure_is_its_communicators_alone(comm, world):
    child, other = comm.split(world.rank % 2), comm.dup()
    if world.rank == 0:
        child._calls.members.abandon(Mistake("child"))
    world.barrier()
    if world.rank % 2 == 0:
        wait_for(lambda: child._calls.members.failed)  # later on other islands
        with pytest.raises(ns.RankLeft, match="rank 0 left with Mistake: child;"):
            child.check()
        with pytest.raises(ns.RankLeft, match="rank 0 left with Mistake: child;"):
            child.split(0)
        child.close()  # every rank has raised the failure
    else:
        check_works(child)
        child.close()
    check_works(other)
    check_works(comm)
    world.barrier()  # no rank uses it any more
    comm._calls.members.abandon(Mistake("parent"))
    world.barrier()
    refused(world, ns.RankLeft, lambda: comm.split(0), "left with Mistake: parent;")
    refused(world, ns.RankLeft, comm.dup, "left with Mistake: parent;")
    check_works(other)
    other.close()
    comm.close()  # every rank has raised the failure


def test_closing_raises_no_other_failure_after_one_was_raised(comm, world):
    """As if this rank had found something when rank 0 did, and raised that."""
    child = comm.dup()
    if world.rank == 1:
        child._calls.members.known_failure = Failure(ns.CallMismatch, "rank 1 found it")
    world.barrier()
    if world.rank == 0:
        child._calls.members.abandon(Mistake("child"))
    world.barrier()
    if world.rank < 2:
        child.close()
    else:
        with pytest.raises(ns.RankLeft, match="rank 0 left with Mistake: child;"):
            child.close()


def test_closing_raises_what_an_abort_has_not(comm, world):
    child = comm.dup()
    if world.rank == 0:
        child._calls.members.board.fail(ns.CallMismatch("not raised yet"))
    world.barrier()
    child.abort("another reason")
    world.barrier()
    refused(world, ns.CallMismatch, child.close, "not raised yet;")


class Mistake(Exception):
    pass


def test_leaving_a_child_by_an_exception_leaves_the_parent(comm, world):
    def err():
        with comm.split(world.rank % 2):
            raise Mistake

    refused(world, Mistake, err)
    check_works(comm)


@pytest.fixture
def made(monkeypatch):
    """Every communicator that the library made of another one of MPI."""
    found = []

    def recorded(make):
        def made(*args):
            new = make(*args)
            found.extend(new)
            return new

        return made

    monkeypatch.setattr(locks, "duplicates", recorded(locks.duplicates))
    return found


def test_one_communicator_of_mpis_serves_all_and_is_freed(world, made):
    with ns.Communicator(world, timeout=60) as comm:
        child = comm.dup()
        with comm.split(0), comm.dup(), comm.split(world.rank):
            assert [bool(each) for each in made] == [True]
    assert [bool(each) for each in made] == [True]
    with child.split(0):
        child.close()
        assert [bool(each) for each in made] == [True]
    assert [bool(each) for each in made] == [False]


# Mistakes


@of_one_island
def test_a_split_that_returns_no_communicator_is_refused(world, last):
    class Broken(ByHand):
        def split(self, color, key):
            found = super().split(color, key)
            return 3 if last else found

    with ns.Communicator(Broken(world), timeout=60) as comm:
        refused(world, ns.ArgumentError, lambda: comm.split(world.rank), "has no rank")
        check_works(comm)


def test_a_child_that_cannot_be_made_fails_on_all_ranks(
    either, world, last, monkeypatch
):
    def refuse(*_):
        raise ns.BackendError("no such grid")

    before, messages = len(lifetime._open), either._calls.members.comm
    if not isinstance(messages, TaggedComm):
        messages = None
    for call, step in (
        (lambda: either.split(world.rank % 2), "_multiprocessors"),
        (either.dup, "_multiprocessors"),
        (either.dup, "_fill_sentinels"),  # after an engine has started
    ):
        with monkeypatch.context() as patch:
            if last:
                patch.setattr(lifetime, step, refuse)
            refused(world, ns.BackendError, call, "no such grid")
        gc.collect()
        assert len(lifetime._open) == before
        if messages is not None:
            assert [*messages._shared._uses] == [0]  # the child's are released
        check_works(either)
    with either.split(world.rank % 2) as child:
        check_works(child)
