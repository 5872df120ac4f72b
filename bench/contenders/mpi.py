"""MPI on host arrays, through mpi4py; runs without a GPU too."""

from functools import partial
from typing import Any

import numpy as np

from numba_symm.bench.bench_operations import BenchOperation, messages
from numba_symm.bench.contenders import Missing, OfEveryOperation, Way, Ways

REDUCING = {
    "all_reduce": "Allreduce",
    "reduce": "Reduce",
    "reduce_scatter": "Reduce_scatter_block",
    "reduce_scatter_v": "Reduce_scatter",
    "scan": "Scan",
}

MOVING = {
    "all_gather": ("Allgather", False, False),
    "all_gather_v": ("Allgatherv", False, True),
    "all_to_all": ("Alltoall", False, False),
    "all_to_all_v": ("Alltoallv", True, True),
    "gather": ("Gather", False, False),
    "gather_v": ("Gatherv", False, True),
    "scatter": ("Scatter", False, False),
    "scatter_v": ("Scatterv", True, False),
}
"""mpi4py's methods, and whether they take counts of the input and of the output. The
root is 0 by default, as in the benchmark."""


def check() -> None:
    """Do nothing: without MPI, the benchmark does not start."""


def make(comm: Any, ranks: Any) -> "Mpi":
    """Return the contender. Collective."""
    return Mpi(ranks)


class Mpi(OfEveryOperation):
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

    def ways(self, operation: BenchOperation, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an operation, or why MPI has none."""
        name = operation.name
        if name in REDUCING:
            return self._reducing(REDUCING[name], x, out, op)
        if name not in MOVING:
            raise Missing(f"{self.name} has no {name}")
        method, of_x, of_out = MOVING[name]
        source = self._mpi.IN_PLACE if x is out else self._bytes(x, of_x)
        call = partial(getattr(self._ranks, method), source, self._bytes(out, of_out))
        return {"": Way(lambda stream: call())}

    def _bytes(self, array: Any, counted: bool) -> Any:
        view, size = array.view(np.uint8), self._ranks.size
        return (view, [view.size // size] * size) if counted else view

    def _reducing(self, name: str, x: Any, out: Any, op: str) -> Ways:
        if x.dtype.itemsize == 2:
            return {"": f"MPI has no {x.dtype.name}"}
        if op == "avg":
            return {"": "MPI has no avg"}
        source, more = x, {}
        if x is out and (name != "Reduce" or self._ranks.rank == 0):
            source = self._mpi.IN_PLACE  # in a rooted operation, only on the root
        if name == "Reduce_scatter":
            more = {"recvcounts": [out.size] * self._ranks.size}
        reduction = getattr(self._mpi, op.upper())
        call = partial(getattr(self._ranks, name), source, out, op=reduction, **more)
        return {"": Way(lambda stream: call())}

    def broadcast(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a broadcast."""
        call = partial(self._ranks.Bcast, out.view(np.uint8))
        return {"": Way(lambda stream: call(), in_place=True)}

    def sendrecv(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an exchange: to the right, and from the left."""
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

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._ranks.Free()
