"""MPI on host arrays, through mpi4py; runs without a GPU too."""

from functools import partial
from typing import Any

import numpy as np

from numba_symm.bench.contenders import Way, Ways, no_context
from numba_symm.bench.operations import ROOT, messages


def check() -> None:
    """Do nothing: without MPI, the benchmark does not start."""


def make(comm: Any, ranks: Any) -> "Mpi":
    """Return the contender. Collective."""
    return Mpi(ranks)


class Mpi:
    """MPI's blocking collectives, such as MPI_Allreduce."""

    name = "mpi"
    captures = False

    def __init__(self, ranks: Any):
        from mpi4py import MPI

        self._mpi = MPI
        self._ranks = ranks.Dup()
        library = MPI.Get_library_version().split(",")[0].strip("\0 \n")
        self.version = f"{library}, on host arrays"

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes."""
        return np.empty(nbytes, np.uint8)

    current = staticmethod(no_context)

    def all_reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-reduce."""
        return self._reducing("Allreduce", x, out, op)

    def all_gather(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-gather."""
        x, out = x.view(np.uint8), out.view(np.uint8)
        return {"": Way(lambda stream: self._ranks.Allgather(x, out))}

    def reduce_scatter(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduce-scatter."""
        return self._reducing("Reduce_scatter_block", x, out, op)

    def all_to_all(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-to-all."""
        source = self._mpi.IN_PLACE if x is out else x.view(np.uint8)
        out = out.view(np.uint8)
        return {"": Way(lambda stream: self._ranks.Alltoall(source, out))}

    def broadcast(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a broadcast, which works in place."""
        call = partial(self._ranks.Bcast, out.view(np.uint8), ROOT)
        return {"": Way(lambda stream: call(), in_place=True)}

    def reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduction to the root."""
        return self._reducing("Reduce", x, out, op, root=ROOT)

    def scan(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a scan."""
        return self._reducing("Scan", x, out, op)

    def _reducing(self, name: str, x: Any, out: Any, op: str, **more: Any) -> Ways:
        """Return the one way of a reduction, or the reason why MPI has none."""
        if x.dtype.itemsize == 2:
            return {"": f"MPI has no {x.dtype.name}"}
        if op == "avg":
            return {"": "MPI has no avg"}
        reduction = getattr(self._mpi, op.upper())
        source = x
        if x is out and more.get("root", self._ranks.rank) == self._ranks.rank:
            source = self._mpi.IN_PLACE  # in a rooted operation, only on the root
        call = partial(getattr(self._ranks, name), source, out, op=reduction, **more)
        return {"": Way(lambda stream: call())}

    def gather(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a gather."""
        x, out = x.view(np.uint8), out.view(np.uint8)
        return {"": Way(lambda stream: self._ranks.Gather(x, out, ROOT))}

    def scatter(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a scatter."""
        x, out = x.view(np.uint8), out.view(np.uint8)
        return {"": Way(lambda stream: self._ranks.Scatter(x, out, ROOT))}

    def sendrecv(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of sends to the right and recvs from the left."""
        right = (self._ranks.rank + 1) % self._ranks.size
        left = (self._ranks.rank - 1) % self._ranks.size
        sent = [each.view(np.uint8) for each in messages(x)]
        received = [each.view(np.uint8) for each in messages(out)]

        def call(stream: int) -> None:
            requests = [self._ranks.Irecv(each, left) for each in received]
            requests += [self._ranks.Isend(each, right) for each in sent]
            self._mpi.Request.Waitall(requests)

        return {"": Way(call)}

    def barrier(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a barrier."""
        return {"": Way(lambda stream: self._ranks.Barrier())}

    def all_gather_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-gather with counts."""
        x, whole = x.view(np.uint8), self._ranges(out)
        return {"": Way(lambda stream: self._ranks.Allgatherv(x, whole))}

    def reduce_scatter_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduce-scatter with counts."""
        counts = [out.size] * self._ranks.size
        return self._reducing("Reduce_scatter", x, out, op, recvcounts=counts)

    def all_to_all_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-to-all with counts."""
        sent, received = self._ranges(x), self._ranges(out)
        return {"": Way(lambda stream: self._ranks.Alltoallv(sent, received))}

    def gather_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a gather with counts."""
        x, whole = x.view(np.uint8), self._ranges(out)
        return {"": Way(lambda stream: self._ranks.Gatherv(x, whole, ROOT))}

    def scatter_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a scatter with counts."""
        whole, out = self._ranges(x), out.view(np.uint8)
        return {"": Way(lambda stream: self._ranks.Scatterv(whole, out, ROOT))}

    def _ranges(self, array: Any) -> tuple[Any, list[int]]:
        """Return bytes, and the counts of equal ranges of them."""
        size = self._ranks.size
        return array.view(np.uint8), [array.nbytes // size] * size

    def close(self) -> None:
        """Free the communicator."""
        self._ranks.Free()
