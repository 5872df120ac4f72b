"""Our calls in mpi4py's spelling, and the same calls of mpi4py through the host.

Each call returns when its result may be used. So the time of one call at a time, with
``--eager``, is compared with that of our plain calls. The ways ``through the host``
copy to pinned host memory, and back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import cuda

from numba_symm import mpi
from numba_symm.bench.bench_operations import messages
from numba_symm.bench.contenders import Contender, Way, Ways

STAGED = "through the host"


def check() -> None:
    """Do nothing: without MPI, the benchmark does not start."""


def make(comm: Any, ranks: Any) -> "AsMpi4py":
    """Return the contender. Collective."""
    return AsMpi4py(ranks)


class AsMpi4py(Contender):
    """``numba_symm.mpi``, also with requests, and mpi4py on copies of the arrays."""

    name = "as-mpi4py"
    version = "numba_symm.mpi, and mpi4py with copies to pinned host memory"
    captures = False

    def __init__(self, ranks: Any):
        self._comm = mpi.Comm(ranks)

    def all_reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the ways of an all-reduce."""
        if x is out or op == "avg":
            return {"": "is measured out of place, with MPI's operators"}
        reduction = getattr(mpi, op.upper())
        calls = [
            partial(each.Allreduce, op=reduction)
            for each in (self._comm, self._comm.host)
        ]
        return {
            "": Way(lambda stream: calls[0](x, out)),
            STAGED: _staged(x, out, calls[1]),
        }

    def sendrecv(self, x: Any, out: Any, op: str) -> Ways:
        """Return the ways of sends to the right and recvs from the left."""
        comm, waitall = self._comm, mpi.Request.Waitall
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent, received = messages(x), messages(out)

        def called(stream: int) -> None:
            for each, into in zip(sent, received, strict=True):
                comm.Sendrecv(each, right, 0, into, left)

        def requested(stream: int) -> None:
            requests = [comm.Irecv(each, left, 1) for each in received]
            waitall(requests + [comm.Isend(each, right, 1) for each in sent])

        prepared = [comm.Recv_init(each, left, 2) for each in received]
        prepared += [comm.Send_init(each, right, 2) for each in sent]

        def started(stream: int) -> None:
            mpi.Prequest.Startall(prepared)
            waitall(prepared)

        def on_host(given: Any, into: Any) -> None:
            comm.host.Sendrecv(given, right, 0, into, left)

        return {
            "": Way(called),
            "requests": Way(requested),
            "persistent": Way(started),
            STAGED: _staged(x, out, on_host),
        }

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()


def _staged(x: Any, out: Any, call: Callable[[Any, Any], object]) -> Way:
    """Return the way of a call on host arrays, with the copies."""
    given, into = (cuda.pinned_array(each.shape, each.dtype) for each in (x, out))

    def staged(stream: int) -> None:
        x.copy_to_host(given)
        call(given, into)
        out.copy_to_device(into)

    return Way(staged)
