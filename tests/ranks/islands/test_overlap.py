"""Chunks of a message overlap, and the rails share what crosses."""

import numpy as np
import pytest

import numba_symm as ns
from tests.ranks.helpers import array_of, get, needs_peers

pytestmark = needs_peers


@pytest.fixture
def comm(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "2" if world.size > 2 else "1")
    with ns.Communicator(world, timeout=60) as comm:
        yield comm


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "broadcast"])
def test_work_is_done_while_the_bytes_of_another_chunk_cross(comm, name, monkeypatch):
    engine = comm._calls.island.engine
    move, beside = engine._move, []

    def late(sends, receives):
        beside.append(engine._simulated)
        engine._simulated.result(60)  # the bytes do not move before the work is done
        move(sends, receives)

    monkeypatch.setattr(engine, "_move", late)
    count = 4000 * (comm.size if name == "reduce_scatter" else 1)
    x = array_of(comm, np.full(count, comm.rank + 1), symmetric=False)
    out = getattr(comm, name)(x)
    comm.synchronize()
    total = 1 if name == "broadcast" else sum(range(1, comm.size + 1))
    assert (get(out) == total).all()
    alone = (comm.rank,) in comm.islands
    if name != "broadcast" or not alone:  # who is alone in its island runs no kernel
        assert len(set(beside)) >= 3


def test_every_rail_carries_a_shard_of_a_broadcast(world, comm):
    count = 6000
    x = array_of(comm, np.full(count, comm.rank), symmetric=False)
    before = comm._calls.island.sent
    comm.broadcast(x, root=1)
    comm.synchronize()
    assert (get(x) == 1).all()
    sent = world.allgather(comm._calls.island.sent - before)
    island = next(part for part in comm.islands if 1 in part)
    per_island = 8 * count * (len(comm.islands) - 1)  # each byte once for each island
    shares = [per_island // len(island) if r in island else 0 for r in range(comm.size)]
    assert sent == shares
