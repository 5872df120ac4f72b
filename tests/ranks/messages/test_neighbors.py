"""Collectives between neighbours."""

import numpy as np
import pytest
from mpi4py import MPI

import numba_symm as ns
from numba_symm.collectives.protocols.workspace import most_messages
from tests.ranks.helpers import needs_peers, ordinary, put, refused
from tests.ranks.messages.contents import right_and_left


def test_a_ring_of_neighbours(comm, world):
    """With one rank or two, both neighbours of a rank are the same rank."""
    right, left = right_and_left(comm)
    sides = {"sources": [left, right], "destinations": [right, left]}
    x, pair = comm.zeros((2, 3)), comm.zeros((4, 3))
    put(x, np.full((2, 3), comm.rank, np.float32))
    both = np.repeat([2 * comm.rank, 2 * comm.rank + 1], 6).reshape(4, 3)
    put(pair, both.astype(np.float32))
    gathered = comm.neighbor_all_gather(x, **sides)
    exchanged = comm.neighbor_all_to_all(pair, **sides)
    plan = comm.neighbor_all_to_all_init(pair, **sides, out=ordinary((4, 3), "f4"))
    again = [plan() for _ in range(2)][-1]
    comm.synchronize()
    assert gathered.shape == (2, 2, 3)
    found = gathered.copy_to_host()
    assert (found[0] == left).all()
    assert (found[1] == right).all()
    for each in (exchanged, again):
        # What a rank sends to the right is its first part.
        assert each.shape == (4, 3)
        assert (each.copy_to_host()[:2] == 2 * left).all()
        assert (each.copy_to_host()[2:] == 2 * right + 1).all()
    world.barrier()


@pytest.mark.parametrize("nobody", [None, MPI.PROC_NULL])
def test_a_line_of_neighbours_has_ends(comm, world, nobody):
    right = comm.rank + 1 if comm.rank + 1 < comm.size else nobody
    left = comm.rank - 1 if comm.rank > 0 else nobody
    x, out = comm.zeros(1), ordinary((2, 1), np.float32)
    put(x, np.full(1, comm.rank, np.float32))
    put(out, np.full((2, 1), -9, np.float32))
    assert comm.neighbor_all_gather(x, sources=[left, right], out=out) is out
    comm.synchronize()
    wanted = [comm.rank - 1 if comm.rank else -9]
    wanted.append(comm.rank + 1 if comm.rank + 1 < comm.size else -9)
    assert out.copy_to_host().ravel().tolist() == wanted
    world.barrier()


def test_a_graph_of_neighbours(comm, world):
    """Every rank sends to rank 0 twice, and rank 0 sends only to itself."""
    size, first = comm.size, comm.rank == 0
    sources = [r for r in range(size) for _ in range(2)] if first else []
    x = comm.zeros(4)
    put(x, 10 * comm.rank + np.arange(4, dtype=np.float32))
    given = {"sources": sources, "destinations": [0, 0]}
    gathered = comm.neighbor_all_gather(x, **given)
    exchanged = comm.neighbor_all_to_all(x, **given)
    nothing = {"sources": [0] * first, "destinations": list(range(size)) * 0}
    if first:
        nothing["destinations"] = [0]
    alone = comm.neighbor_all_to_all(x[: 4 * first], **nothing)
    comm.synchronize()
    assert gathered.shape == (len(sources), 4)
    assert exchanged.shape == (2 * len(sources),)
    if first:
        rows = gathered.copy_to_host()
        assert (rows == 10 * np.repeat(range(size), 2)[:, None] + np.arange(4)).all()
        parts = exchanged.copy_to_host().reshape(size, 4)
        assert (parts == 10 * np.arange(size)[:, None] + np.arange(4)).all()
        assert alone.copy_to_host().tolist() == [0, 1, 2, 3]
    world.barrier()


@needs_peers
def test_wrong_neighbours_are_refused(comm, world):
    right, left = right_and_left(comm)
    x = comm.zeros(3)
    many = [right] * (most_messages(comm.size) + 1)
    for given, texts in [
        ({"sources": 3}, ("sources: expected a sequence of ranks", "got 3")),
        ({"sources": [comm.size]}, ("sources: expected a rank",)),
        ({"sources": [left], "destinations": ["x"]}, ("destinations: expected a ra",)),
        ({"sources": many}, ("sources: expected each rank at most",)),
        (
            {"sources": [comm.rank], "destinations": [right]},
            ("as often in sources as in destinations", "got 1 and 0 times"),
        ),
        ({"sources": [left] * 2}, ("expected x with a multiple of 2",)),
        ({"sources": [left], "out": x}, ("arrays that overlap",)),
        ({"sources": [left], "out": comm.zeros(4)}, ("expected out of 3 elements",)),
    ]:
        wrong = lambda g=given: comm.neighbor_all_to_all(x, **g)  # noqa: E731
        refused(world, ns.ArgumentError, wrong, "neighbor_all_to_all: ", *texts)
    comm.barrier()
    comm.synchronize()


@needs_peers
def test_debug_mode_compares_the_lists_of_neighbours(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        right, left = right_and_left(comm)
        x, last = comm.zeros(4), comm.rank == comm.size - 1
        sides = {"sources": [left], "destinations": [right]}
        fewer = {"sources": [left], "destinations": [None if last else right]}
        longer = ordinary(5 if last else 4, "f4")
        for wrong, sent in (
            (lambda: comm.neighbor_all_gather(x, **fewer), "nothing"),
            (lambda: comm.neighbor_all_to_all(longer, **sides), "5 elements"),
        ):
            words = f"rank {comm.size - 1} sends {sent} (destinations) to rank 0, which"
            text = f"{words} expects 4 (sources)"
            refused(world, ns.ArgumentError, wrong, text, "; pass counts that agree")
        comm.neighbor_all_gather(x, **sides)
        comm.synchronize()
