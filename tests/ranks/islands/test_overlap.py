"""Chunks of a message overlap, and the rails share what crosses."""

import contextlib
import dataclasses

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.islands import site
from numba_symm.collectives.islands.site import Site
from numba_symm.environment import SIMULATED
from numba_symm.gpu import streams
from numba_symm.launch import ranks
from tests import operators
from tests.ranks.helpers import array_of, get, needs_peers, wait_for_all

pytestmark = needs_peers


@pytest.fixture
def by_mpi(monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ENGINE", "mpi")


@pytest.fixture
def comm(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "2" if world.size > 2 else "1")
    with ns.Communicator(world, timeout=60) as comm:
        yield comm


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "broadcast"])
def test_work_is_done_while_the_bytes_of_another_chunk_cross(
    by_mpi, comm, name, monkeypatch
):
    engine = comm._calls.members.engine
    running, beside = engine._running, []

    @contextlib.contextmanager
    def first(work, stream, side):
        with running(work, stream, side):
            if SIMULATED:  # the bytes do not move before the work is done
                engine._simulated.result(60)
            else:
                streams.synchronize(side.stream)
            beside.append(work)
            yield

    monkeypatch.setattr(engine, "_running", first)
    count = site.DEFAULT_SIZES.chunk * (
        comm.size if name == "reduce_scatter" else 1
    )  # eight chunks
    x = array_of(comm, np.full(count, comm.rank + 1), symmetric=False)
    out = getattr(comm, name)(x)
    comm.synchronize()
    total = 1 if name == "broadcast" else sum(range(1, comm.size + 1))
    assert (get(out) == total).all()
    alone = (comm.rank,) in comm.islands
    if name != "broadcast" or not alone:  # who is alone in its island runs no kernel
        least = len(comm.islands) - 1 if name == "reduce_scatter" else 3
        assert len(beside) >= least


def test_every_rail_has_a_shard_of_a_broadcast(world, comm, monkeypatch):
    count = site.DEFAULT_SIZES.one_rail  # of eight bytes each
    x = array_of(comm, np.full(count, comm.rank), symmetric=False)
    engine, mine = comm._calls.members.engine, []
    exchange = engine.exchange

    def counted(sends, *given):
        mine.extend(each.nbytes for each in sends)
        return exchange(sends, *given)

    monkeypatch.setattr(engine, "exchange", counted)
    comm.broadcast(x, root=1)
    comm.synchronize()
    assert (get(x) == 1).all()
    sent = world.allgather(sum(mine))
    assert sum(sent) == 8 * count * (len(comm.islands) - 1)  # once for each island
    for part in comm.islands:  # an even share of each rank
        assert len({sent[rank] for rank in part}) == 1


LARGE = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def test_islands_exchange_one_after_another(world, monkeypatch):
    """Of three or more islands, each exchanges with one at a time."""
    if world.size < 4:
        pytest.skip("needs an island of two ranks, and two others")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "2")
    if world.rank == world.size - 1:
        monkeypatch.setattr(ranks, "_boot_id", lambda: b"elsewhere")
    count = 1751 * world.size
    one = np.arange(count) % 1009
    with ns.Communicator(world, timeout=60) as comm:
        assert len(comm.islands) == 3
        for name in LARGE:
            x = array_of(comm, one * (comm.rank + 1), symmetric=False)
            found = get(getattr(comm, name)(x)).ravel()
            total = one * sum(range(1, comm.size + 1))
            everyone = np.concatenate([one * (rank + 1) for rank in range(comm.size)])
            mine = slice(1751 * comm.rank, 1751 * (comm.rank + 1))
            wanted = [total, total[mine], everyone, one][LARGE.index(name)]
            assert (found == wanted).all(), name
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    one = one[: 251 * world.size] % 8
    mine = slice(251 * world.rank, 251 * (world.rank + 1))
    with ns.Communicator(world, timeout=60) as comm:  # even islands
        for kind, op in ((np.int64, "max"), (np.float16, "avg")):  # of 2 and 1 KiB
            x = array_of(comm, one.astype(kind), symmetric=False)
            assert (get(comm.reduce_scatter(x, op=op)) == one[mine]).all()


@pytest.mark.parametrize(("kind", "op"), [("float32", "sum"), ("float16", "avg")])
def test_shards_that_do_not_fit_are_reduced_together(world, monkeypatch, kind, op):
    if world.size % 2:
        pytest.skip("needs islands of equally many ranks")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", str(world.size // 2))
    within, names, count = Site.within, set(), 6_251
    small = dataclasses.replace(site.DEFAULT_SIZES, staging=1 << 15)
    monkeypatch.setattr(site, "DEFAULT_SIZES", small)

    def recorded(here, operation, call):
        names.add(operation.name)
        return within(here, operation, call)

    monkeypatch.setattr(Site, "within", recorded)
    many = count * world.size
    inputs = [operators.random(kind, many, [7, rank]) for rank in range(world.size)]
    mine = slice(count * world.rank, count * (world.rank + 1))
    with ns.Communicator(world, timeout=60) as comm:
        x = array_of(comm, inputs[comm.rank], symmetric=False)
        found = get(comm.reduce_scatter(x, op=op))
        assert operators.same(found, operators.wanted(inputs, op)[mine]).all()
        alone = world.size == 2 and kind == "float32"  # the input is what is sent
        assert names == (set() if alone else {"reduce_scatter"})
        wait_for_all(comm, world)
