"""NCCL through nccl4py, on ordinary device memory."""

import ctypes
from functools import partial
from typing import Any

import numpy as np

from numba_symm.bench.bench_operations import ROOT, messages
from numba_symm.bench.contenders import (
    Contender,
    Missing,
    Way,
    Ways,
    from_first_rank,
    imported,
    need_a_gpu_each,
    need_gpus,
)

CURE = "pip install nccl4py, and nvidia-nccl-cu13 (or nvidia-nccl-cu12) for NCCL itself"


def check() -> None:
    """Raise Missing unless nccl4py and NCCL are installed."""
    need_gpus()
    if imported("nccl.core", CURE).get_version().libnccl is None:
        raise Missing(f"nccl4py finds no NCCL library; {CURE}")


def make(comm: Any, ranks: Any) -> "Nccl":
    """Return the contender. Collective."""
    need_a_gpu_each(comm, ranks)
    return Nccl(ranks)


Message = tuple[Any, int]
"""An array and a peer."""


class OfMessages(Contender):
    """NCCL on memory from cudaMalloc; what it has no call for is a group of messages.

    Args:
        ranks: the mpi4py communicator.
    """

    _comm: Any

    def __init__(self, ranks: Any):
        self._rank, self._size = ranks.rank, ranks.size

    def sendrecv(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of sends to the right and recvs from the left."""
        right, left = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        sends = [(each, right) for each in messages(x)]
        return self._exchange(sends, [(each, left) for each in messages(out)])

    def all_gather_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-gather with counts."""
        sends = [(x, peer) for peer in range(self._size)]
        return self._exchange(sends, self._ranges(out))

    def all_to_all_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-to-all with counts."""
        return self._exchange(self._ranges(x), self._ranges(out))

    def gather_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a gather with counts."""
        recvs = self._ranges(out) if self._rank == ROOT else []
        return self._exchange([(x, ROOT)], recvs)

    def scatter_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a scatter with counts."""
        sends = self._ranges(x) if self._rank == ROOT else []
        return self._exchange(sends, [(out, ROOT)])

    def _ranges(self, whole: Any) -> list[Message]:
        """Return equal ranges of an array, each with its rank."""
        count = whole.size // self._size
        return [
            (whole[rank * count : (rank + 1) * count], rank)
            for rank in range(self._size)
        ]

    def _exchange(self, sends: list[Message], recvs: list[Message]) -> Ways:
        """Return the one way of a group of messages."""
        raise NotImplementedError

    def close(self) -> None:
        """Destroy the communicator."""
        self._comm.destroy()


class Nccl(OfMessages):
    """NCCL through nccl4py."""

    name = "nccl"

    def __init__(self, ranks: Any):
        super().__init__(ranks)
        self._core = core = imported("nccl.core", CURE)
        versions = core.get_version()
        self.version = f"NCCL {versions.libnccl.version}, nccl4py {versions.nccl4py}"
        unique = from_first_rank(ranks, core.get_unique_id)
        self._comm = core.Communicator.init(ranks.size, ranks.rank, unique)

    def all_reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-reduce."""
        return self._way(self._comm.allreduce, x, out, self._op(op))

    def all_gather(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-gather."""
        return self._way(self._comm.allgather, x, out)

    def reduce_scatter(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduce-scatter."""
        return self._way(self._comm.reduce_scatter, x, out, self._op(op))

    def all_to_all(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-to-all."""
        if x is out:
            return {"": "NCCL has no all-to-all in place"}
        return self._way(self._comm.alltoall, x, out)

    def broadcast(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a broadcast."""
        return self._way(self._comm.broadcast, x, out, ROOT)

    def reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduction to the root."""
        return self._way(self._comm.reduce, x, out, self._op(op), ROOT)

    def gather(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a gather."""
        return self._way(self._comm.gather, x, out, ROOT)

    def scatter(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a scatter."""
        return self._way(self._comm.scatter, x, out, ROOT)

    def _op(self, op: str) -> Any:
        return getattr(self._core.NcclRedOp, op.upper())

    def _way(self, function: Any, x: Any, out: Any, *more: Any) -> Ways:
        """Return the way of a call with the arguments that all of them have."""
        enqueue = partial(function, _named(x), _named(out), *more)
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def reduce_scatter_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduce-scatter with counts: reductions."""
        reduction, target = self._op(op), _named(out)
        parts = [(_named(part), rank) for part, rank in self._ranges(x)]

        def enqueue(stream: int) -> None:
            with self._core.group():
                for part, rank in parts:
                    self._comm.reduce(part, target, reduction, rank, stream=stream)

        return {"": Way(enqueue)}

    def _exchange(self, sends: list[Message], recvs: list[Message]) -> Ways:
        sources = [(_named(array), peer) for array, peer in sends]
        targets = [(_named(array), peer) for array, peer in recvs]

        def enqueue(stream: int) -> None:
            with self._core.group():
                for source, peer in sources:
                    self._comm.send(source, peer, stream=stream)
                for target, peer in targets:
                    self._comm.recv(target, peer, stream=stream)

        return {"": Way(enqueue)}


def _named(array: Any) -> Any:
    """Return an array that nccl4py reads by DLPack.

    Through the CUDA array interface, nccl4py has no bfloat16. It also assumes that
    every array is on device 0 (cuda-python#2928), and refuses it on other ranks.
    """
    from cuda.core import Buffer
    from cuda.core.utils import StridedMemoryView

    address = int(array.device_ctypes_pointer.value)
    memory = Buffer.from_handle(address, array.nbytes, owner=array)
    if array.dtype.name != "bfloat16":
        return StridedMemoryView.from_buffer(memory, array.shape, dtype=array.dtype)
    bits = np.dtype(np.uint16)
    return _Bfloat16(StridedMemoryView.from_buffer(memory, array.shape, dtype=bits))


_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_TYPE_CODE, _BFLOAT16 = 20, 4  # DLPack's DLTensor.dtype.code, and kDLBfloat


class _Bfloat16:
    """A view of uint16 that DLPack exports as bfloat16.

    cuda.core reads bfloat16 by DLPack, but does not export it.
    """

    def __init__(self, bits: Any):
        self._bits = bits

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._bits.__dlpack_device__()
        return device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        # max_version is not passed on, because only an unversioned capsule begins with
        # its DLTensor, which is edited here.
        capsule = self._bits.__dlpack__(stream=stream)
        tensor = _pointer_of(capsule, b"dltensor")
        ctypes.c_uint8.from_address(tensor + _TYPE_CODE).value = _BFLOAT16
        return capsule
