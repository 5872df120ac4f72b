"""Plans of messages, of the collectives made of them, and of whole groups."""

import contextlib

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.kernels import transfer
from tests.ranks.helpers import needs_peers, of_one_island, ordinary, put, refused
from tests.ranks.messages.contents import right_and_left


@pytest.fixture
def launched(monkeypatch):
    """The messages of each launch that was packed."""
    found, bind = [], transfer.bind
    spy = lambda *args: found.append(args[1:]) or bind(*args)  # noqa: E731
    monkeypatch.setattr(transfer, "bind", spy)
    return found


@of_one_island
@needs_peers
def test_a_halo_exchange_is_one_launch_that_is_repeated(comm, world, launched):
    right, left = right_and_left(comm)
    field = ordinary((4, 6), np.float32)  # the first and the last row are halos
    with comm.group_init() as halo:
        comm.send(field[1], dst=left)
        comm.send(field[2], dst=right)
        comm.recv(field[0], src=left)
        comm.recv(field[3], src=right)
    assert len(launched) == 1
    assert sum(map(len, launched[0])) == 4
    for step in range(3):
        mine = np.zeros((4, 6), np.float32)
        mine[1], mine[2] = 100 * step + comm.rank, 200 * step + comm.rank
        put(field, mine)
        if step:  # nothing was sent by the block itself
            assert halo() is None
            comm.synchronize()
            found = field.copy_to_host()
            # With two ranks, both neighbours are the same one, and its first message
            # is the one to its left.
            swapped = comm.size == 2
            assert (found[0] == (100 if swapped else 200) * step + left).all()
            assert (found[3] == (200 if swapped else 100) * step + right).all()
    assert len(launched) == 1
    world.barrier()


def test_plans_join_a_group(comm, world, launched):
    right, left = right_and_left(comm)
    x, out, y, sums = (comm.zeros(3) for _ in range(4))
    put(x, np.full(3, comm.rank, np.float32))
    sends, receives = comm.send_init(x, dst=right), comm.recv_init(out, src=left)
    with comm.group_init() as both:
        sends()
        receives()
        comm.all_reduce(x, out=sums)
    before = len(launched)
    with comm.group():
        both()
        comm.send(x, dst=right)
        comm.recv(y, src=left)
    (mine,) = (part for part in comm.islands if comm.rank in part)
    assert len(launched) == before + bool({right, left} & set(mine) - {comm.rank})
    comm.synchronize()
    assert (out.copy_to_host() == left).all()
    assert (y.copy_to_host() == left).all()
    assert (sums.copy_to_host() == sum(range(comm.size))).all()
    world.barrier()


def test_a_group_without_an_end_is_not_a_plan(comm, world):
    x = comm.zeros(3)
    made = []

    def unfinished():
        with comm.group_init() as plan:
            made.append(plan)
            plan()

    refused(world, ns.ArgumentError, unfinished, "group: expected a plan whose with")
    refused(world, ns.ArgumentError, made[0], "or after an exception")
    with contextlib.ExitStack() as inner:
        inner.enter_context(comm.group_init())
        again = comm.group_init()
        refused(world, ns.ArgumentError, again.__enter__, "group_init: a group is open")
    with comm.group_init() as nothing:
        pass
    assert nothing() is None
    comm.all_reduce(x)
    comm.synchronize()


@needs_peers
def test_debug_mode_compares_plans_of_collectives(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        x, last = comm.zeros(comm.size), comm.rank == comm.size - 1
        wrong = lambda: comm.gather_init(x, root=int(last))  # noqa: E731
        refused(world, ns.ArgumentError, wrong, "root 0")
        one, other = (
            comm.gather_init(x),
            comm.all_gather_v_init(x, counts=[x.size] * comm.size),
        )
        refused(world, ns.ArgumentError, lambda: (one if last else other)(), "gather")
        counts = [1] * comm.size
        uneven = {"send_counts": counts, "recv_counts": [1 + last, *counts[1:]]}
        wrong = lambda: comm.all_to_all_v_init(x, **uneven)  # noqa: E731
        refused(world, ns.ArgumentError, wrong, "pass counts that agree")
        assert one() is not None or comm.rank
