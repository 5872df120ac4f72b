"""Stand-in for mpi4py: calls in which the hosts of all ranks meet."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_symm.explore.arrays import Array, unsupported
from numba_symm.explore.host import host
from numba_symm.explore.standins import StandIn

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "min": np.minimum,
    "max": np.maximum,
    "land": lambda a, b: np.logical_and(a, b),
    "lor": lambda a, b: np.logical_or(a, b),
}


class Rank:
    """What MPI's communicators and those of the library have in common."""

    @property
    def rank(self) -> int:
        """The rank."""
        return host().rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return host().world.size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = type(self).__name__.removeprefix("Explored")
        raise unsupported(f"{kind}.{name}")


class MPIComm(Rank):
    """Stand-in for ``MPI.COMM_WORLD``."""

    def Get_rank(self) -> int:
        """Return the rank."""
        return self.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def barrier(self) -> None:
        """Wait for all ranks."""
        host().meet("MPI's barrier")

    Barrier = barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Return the root's object."""
        return host().meet("bcast", obj)[root]

    def gather(self, sendobj: Any, root: int = 0) -> Any:
        """Return all objects on the root."""
        found = host().meet("gather", sendobj)
        return found if self.rank == root else None

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Return this rank's object of the root's."""
        return host().meet("scatter", sendobj)[root][self.rank]

    def allgather(self, sendobj: Any) -> Any:
        """Return all objects."""
        return host().meet("allgather", sendobj)

    def alltoall(self, sendobj: Any) -> Any:
        """Return the object of each rank for this one."""
        return [each[self.rank] for each in host().meet("alltoall", sendobj)]

    def allreduce(self, sendobj: Any, op: Any = "sum") -> Any:
        """Return the reduced object."""
        return functools.reduce(OPERATORS[op], host().meet("allreduce", sendobj))

    def reduce(self, sendobj: Any, op: Any = "sum", root: int = 0) -> Any:
        """Return the reduced object on the root."""
        found = functools.reduce(OPERATORS[op], host().meet("reduce", sendobj))
        return found if self.rank == root else None

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's array."""
        buf[...] = host().meet("Bcast", np.array(_of_host(buf)))[root]

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
        """Reduce arrays."""
        given = recvbuf if sendbuf is IN_PLACE else sendbuf
        found = host().meet("Allreduce", np.array(_of_host(given)))
        recvbuf[...] = functools.reduce(OPERATORS[op], found)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect arrays."""
        found = host().meet("Allgather", np.array(_of_host(sendbuf)))
        recvbuf[...] = np.reshape(found, recvbuf.shape)


def _of_host(array: Any) -> Any:
    if not isinstance(array, np.ndarray) or isinstance(array, Array):
        raise unsupported(
            f"{type(array).__name__} in a call of MPI", "pass host arrays"
        )
    return array


IN_PLACE = object()


def make_mpi(device_modules: Any) -> dict[str, Any]:
    """Return the stand-ins for ``mpi4py``, by name."""
    operators = {name.upper(): name for name in OPERATORS}
    mpi = StandIn(
        "mpi4py.MPI", COMM_WORLD=MPIComm(), IN_PLACE=IN_PLACE, PROC_NULL=-1,
        Comm=MPIComm, Intracomm=MPIComm, **operators,
    )  # fmt: skip
    return {"mpi4py": StandIn("mpi4py", MPI=mpi), "mpi4py.MPI": mpi}
