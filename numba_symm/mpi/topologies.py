"""Communicators whose ranks are a grid or a graph, and collectives of neighbours.

Such a collective is one exchange of all ranks, in which a rank sends to its neighbours
only. What a rank sends to one neighbour several times (in a periodic grid of one or
two ranks, or over several edges) is matched as MPI defines.
"""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from numba_symm.mpi import buffers
from numba_symm.mpi.buffers import Items, message, on_device
from numba_symm.mpi.collectives import exchanged
from numba_symm.mpi.comm import add_kinds
from numba_symm.mpi.communicators import Intracomm
from numba_symm.mpi.forms import forms, of_objects
from numba_symm.mpi.jobs import Job


def neighbor_allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send items to all neighbours, and receive as many from each."""
    if not on_device(sendbuf, recvbuf):
        return None
    sources, destinations = comm.host.inoutedges
    incoming = _blocks(recvbuf, len(sources))
    outgoing = [message(sendbuf)] * len(destinations)
    return _between(comm, "Neighbor_allgather", outgoing, incoming)


def neighbor_allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send items to all neighbours, and receive any number from each."""
    if not on_device(sendbuf, recvbuf):
        return None
    sources, destinations = comm.host.inoutedges
    incoming = buffers.vector(recvbuf, len(sources)).parts
    outgoing = [message(sendbuf)] * len(destinations)
    return _between(comm, "Neighbor_allgatherv", outgoing, incoming)


def neighbor_alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send items to each neighbour, and receive items from each."""
    if not on_device(sendbuf, recvbuf):
        return None
    sources, destinations = comm.host.inoutedges
    incoming = _blocks(recvbuf, len(sources))
    outgoing = _blocks(sendbuf, len(destinations))
    return _between(comm, "Neighbor_alltoall", outgoing, incoming)


def neighbor_alltoallv(comm: Any, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send items of any number to each neighbour, and receive such."""
    if not on_device(sendbuf, recvbuf):
        return None
    sources, destinations = comm.host.inoutedges
    incoming = buffers.vector(recvbuf, len(sources)).parts
    outgoing = buffers.vector(sendbuf, len(destinations)).parts
    return _between(comm, "Neighbor_alltoallv", outgoing, incoming)


def neighbor_alltoallw(comm: Any, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send items of any type and number to each neighbour, and receive such."""
    if not on_device(sendbuf, recvbuf):
        return None
    sources, destinations = comm.host.inoutedges
    incoming = buffers.typed(recvbuf, len(sources))
    outgoing = buffers.typed(sendbuf, len(destinations))
    return _between(comm, "Neighbor_alltoallw", outgoing, incoming)


def _blocks(spec: Any, number: int) -> list[Items]:
    found = message(spec, number)
    each = found.number
    return [found.items(block * each, each) for block in range(number)]


def _between(comm: Any, what: str, outgoing: list[Items], incoming: list[Items]) -> Job:
    """Return the job of messages to the destinations and from the sources."""
    sources, destinations = comm.host.inoutedges
    sends: list[list[Items]] = [[] for _ in range(comm.size)]
    receives: list[list[Items]] = [[] for _ in range(comm.size)]
    for rank, part in zip(destinations, outgoing, strict=True):
        if rank != MPI.PROC_NULL:
            sends[rank].append(part)
    order = list(range(len(sources)))
    if comm.host.topology == MPI.CART:
        # What a rank sends downwards, its neighbour there receives from above.
        order = [edge ^ 1 for edge in order]
    for edge in order:
        if sources[edge] != MPI.PROC_NULL:
            receives[sources[edge]].append(incoming[edge])
    return exchanged(comm, what, sends, receives)


class Topocomm(Intracomm, MPI.Topocomm):  # type: ignore[misc]
    """A communicator with neighbours, and the collectives between them."""

    _plain = MPI.Topocomm

    Neighbor_allgather, Ineighbor_allgather, Neighbor_allgather_init = forms(
        "Neighbor_allgather", neighbor_allgather
    )
    Neighbor_allgatherv, Ineighbor_allgatherv, Neighbor_allgatherv_init = forms(
        "Neighbor_allgatherv", neighbor_allgatherv
    )
    Neighbor_alltoall, Ineighbor_alltoall, Neighbor_alltoall_init = forms(
        "Neighbor_alltoall", neighbor_alltoall
    )
    Neighbor_alltoallv, Ineighbor_alltoallv, Neighbor_alltoallv_init = forms(
        "Neighbor_alltoallv", neighbor_alltoallv
    )
    Neighbor_alltoallw, Ineighbor_alltoallw, Neighbor_alltoallw_init = forms(
        "Neighbor_alltoallw", neighbor_alltoallw
    )


for _name in ("neighbor_allgather", "neighbor_alltoall"):
    setattr(Topocomm, _name, of_objects(_name))


class Cartcomm(Topocomm, MPI.Cartcomm):  # type: ignore[misc]
    """A communicator whose ranks are a grid, made by ``Comm.Create_cart``."""

    _plain = MPI.Cartcomm

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return a new communicator of this rank's part of the grid."""
        return self._wrapped(self.host.Sub(remain_dims))


class Graphcomm(Topocomm, MPI.Graphcomm):  # type: ignore[misc]
    """A communicator whose ranks are a graph, made by ``Comm.Create_graph``."""

    _plain = MPI.Graphcomm


class Distgraphcomm(Topocomm, MPI.Distgraphcomm):  # type: ignore[misc]
    """A communicator of a graph, made by ``Comm.Create_dist_graph`` and its like."""

    _plain = MPI.Distgraphcomm


add_kinds(Topocomm, Cartcomm, Graphcomm, Distgraphcomm)
