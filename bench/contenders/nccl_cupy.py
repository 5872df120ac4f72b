"""NCCL through CuPy's NcclCommunicator, on ordinary device memory.

It takes addresses, so a call costs the host less than one of nccl4py.
"""

from functools import partial
from typing import Any

from numba_symm.bench.bench_operations import ROOT
from numba_symm.bench.contenders import (
    Missing,
    Way,
    Ways,
    from_first_rank,
    imported,
    need_a_gpu_each,
    need_gpus,
)
from numba_symm.bench.contenders.nccl import Message, OfMessages

CURE = "pip install cupy-cuda13x, and nvidia-nccl-cu13 for NCCL itself"


def _nccl() -> Any:
    imported("cupy", CURE)
    from cupy.cuda import nccl  # CuPy imports it when it is asked for in this way

    return nccl


def check() -> None:
    """Raise Missing unless CuPy and its NCCL are installed."""
    need_gpus()
    if not getattr(_nccl(), "available", True):
        raise Missing(f"CuPy finds no NCCL; {CURE}")


def make(comm: Any, ranks: Any) -> "NcclCupy":
    """Return the contender. Collective."""
    need_a_gpu_each(comm, ranks)
    imported("cupy", CURE).cuda.Device(comm.device.ordinal).use()
    return NcclCupy(ranks)


class NcclCupy(OfMessages):
    """NCCL through CuPy."""

    name = "nccl-cupy"

    def __init__(self, ranks: Any):
        super().__init__(ranks)
        cupy = imported("cupy", CURE)
        self._nccl = nccl = _nccl()
        number = nccl.get_version()
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        self.version = f"NCCL {version}, CuPy {cupy.__version__}"
        unique = from_first_rank(ranks, nccl.get_unique_id)
        self._comm = nccl.NcclCommunicator(ranks.size, unique, ranks.rank)

    def all_reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-reduce."""
        return self._way(self._comm.allReduce, x, out, x.size, self._op(op))

    def all_gather(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-gather."""
        return self._way(self._comm.allGather, x, out, x.size)

    def reduce_scatter(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduce-scatter."""
        return self._way(self._comm.reduceScatter, x, out, out.size, self._op(op))

    def broadcast(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a broadcast."""
        return self._way(self._comm.broadcast, x, out, x.size, ROOT)

    def reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduction to the root."""
        return self._way(self._comm.reduce, x, out, x.size, self._op(op), ROOT)

    def all_to_all(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-to-all: a group of messages."""
        if x is out:
            return {"": "NCCL has no all-to-all in place"}
        return self._exchange(self._ranges(x), self._ranges(out))

    def _op(self, op: str) -> Any:
        found = getattr(self._nccl, f"NCCL_{op.upper()}", None)
        if found is None:
            raise Missing(f"CuPy's NCCL has no {op}")
        return found

    def _type(self, array: Any) -> Any:
        name = array.dtype.name
        found = getattr(self._nccl, f"NCCL_{name.upper()}", None)
        if found is None:
            raise Missing(f"CuPy's NCCL has no {name}")
        return found

    def _way(self, function: Any, x: Any, out: Any, count: int, *more: Any) -> Ways:
        """Return the way of a call with the arguments that all of them have."""
        first, second = _address(x), _address(out)
        call = partial(function, first, second, count, self._type(x), *more)
        return {"": Way(call)}

    def _exchange(self, sends: list[Message], recvs: list[Message]) -> Ways:
        nccl, comm = self._nccl, self._comm
        calls = [
            partial(function, _address(array), array.size, self._type(array), peer)
            for function, several in ((comm.send, sends), (comm.recv, recvs))
            for array, peer in several
        ]

        def enqueue(stream: int) -> None:
            nccl.groupStart()
            for call in calls:
                call(stream)
            nccl.groupEnd()

        return {"": Way(enqueue)}


def _address(array: Any) -> int:
    return int(array.device_ctypes_pointer.value)
