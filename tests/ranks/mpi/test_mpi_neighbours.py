"""Collectives between the neighbours of grids and graphs, against mpi4py's own."""

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from tests.ranks.helpers import of_one_island


def topologies(comm):
    """Yield communicators of grids and graphs."""
    size, rank = comm.size, comm.rank
    for periodic in (True, False):
        yield comm.Create_cart([size], [periodic])
    yield comm.Create_cart(MPI.Compute_dims(size, 2), [True, False])
    edges = [edge for r in range(size) for edge in ((r - 1) % size, (r + 1) % size)]
    yield comm.Create_graph([2 * (r + 1) for r in range(size)], edges)
    ahead = [(rank + 1) % size, (rank + 2) % size]
    behind = [(rank - 1) % size, (rank - 2) % size]
    yield comm.Create_dist_graph_adjacent(behind, ahead)
    yield comm.Create_dist_graph([rank], [1], [(rank + 1) % size])


@pytest.mark.parametrize("form", range(3), ids=["blocking", "request", "persistent"])
def test_neighbours(comm, form):
    for grid in topologies(comm):
        assert isinstance(grid, (MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm))
        sources, destinations = grid.inoutedges
        into, out_of = len(sources), len(destinations)

        def check(name, make, x, number, grid=grid):
            """Make a call with host and with device arrays."""
            y = np.full(number, -1, "i4")
            there = cuda.to_device(x), cuda.to_device(y)
            for comm, arrays in ((grid.host, (x, y)), (grid, there)):
                if form == 0 or comm is grid.host:
                    getattr(comm, name)(*make(*arrays))
                elif form == 1:
                    getattr(comm, f"I{name.lower()}")(*make(*arrays)).Wait()
                else:
                    request = getattr(comm, f"{name}_init")(*make(*arrays))
                    for _ in range(2):
                        request.Start()
                        request.Wait()
            assert there[1].copy_to_host().tolist() == y.tolist(), name

        x = np.arange(3 * max(out_of, 1), dtype="i4") + 100 * comm.rank
        check("Neighbor_allgather", lambda x, y: (x, y), x[:3].copy(), 3 * into)
        counts, displs = [3] * into, [4 * k for k in range(into)]
        check(
            "Neighbor_allgatherv",
            lambda x, y, v=(counts, displs): (x, [y, v]),
            x[:3].copy(),
            4 * into,
        )
        check("Neighbor_alltoall", lambda x, y: (x, [y, MPI.INT]), x, 3 * into)
        check(
            "Neighbor_alltoallv",
            lambda x, y, v=(counts, displs), n=out_of: ([x, [3] * n], [y, v]),
            x,
            4 * into,
        )
        sent = [12 * k for k in range(out_of)]
        check(
            "Neighbor_alltoallw",
            lambda x, y, s=sent, n=out_of, m=into: (
                [x, ([3] * n, s), [MPI.INT] * n],
                [y, ([3] * m, [16 * k for k in range(m)]), [MPI.INT] * m],
            ),
            x,
            4 * into,
        )
        grid.Free()


@of_one_island
def test_a_grids_methods(comm):
    grid = comm.Create_cart([comm.size], [True])
    below, above = grid.Shift(0, 1)
    assert (below, above) == ((comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size)
    x = cuda.to_device(np.full(2, comm.rank, "i4"))
    grid.Sendrecv_replace(x, above, source=below)
    assert x.copy_to_host()[0] == below
    grid.Allreduce(MPI.IN_PLACE, x)
    assert x.copy_to_host()[0] == sum(range(comm.size))
    same = grid.Dup()
    assert type(same) is MPI.Cartcomm
    assert same.coords == [comm.rank]
    alone = grid.Sub([False])
    assert (type(alone), alone.size) == (MPI.Cartcomm, 1)
    for made in (alone, same, grid):
        made.Free()
