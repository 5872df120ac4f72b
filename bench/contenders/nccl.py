"""NCCL through nccl4py, on ordinary device memory."""

import ctypes
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from numba_symm.bench.calls import ROOT, messages
from numba_symm.bench.contenders import (
    Missing,
    Way,
    Ways,
    from_first_rank,
    imported,
    need_a_gpu_each,
    need_gpus,
    no_context,
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


class Nccl:
    """NCCL on memory from cudaMalloc."""

    name = "nccl"
    captures = True

    def __init__(self, ranks: Any):
        self._core = core = imported("nccl.core", CURE)
        versions = core.get_version()
        self.version = f"NCCL {versions.libnccl.version}, nccl4py {versions.nccl4py}"
        self._rank, self._size = ranks.rank, ranks.size
        unique = from_first_rank(ranks, core.get_unique_id)
        self._comm = core.Communicator.init(ranks.size, ranks.rank, unique)

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes."""
        return cuda.device_array(nbytes, np.uint8)

    current = staticmethod(no_context)

    def all_reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-reduce."""
        reduction = getattr(self._core.NcclRedOp, op.upper())
        enqueue = partial(self._comm.allreduce, _named(x), _named(out), reduction)
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def all_gather(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-gather."""
        enqueue = partial(self._comm.allgather, _named(x), _named(out))
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def reduce_scatter(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduce-scatter."""
        reduction = getattr(self._core.NcclRedOp, op.upper())
        enqueue = partial(self._comm.reduce_scatter, _named(x), _named(out), reduction)
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def all_to_all(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-to-all."""
        if x is out:
            return {"": "NCCL has no all-to-all in place"}
        enqueue = partial(self._comm.alltoall, _named(x), _named(out))
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def broadcast(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a broadcast."""
        enqueue = partial(self._comm.broadcast, _named(x), _named(out), ROOT)
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduction to the root."""
        reduction = getattr(self._core.NcclRedOp, op.upper())
        enqueue = partial(self._comm.reduce, _named(x), _named(out), reduction, ROOT)
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def gather(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a gather."""
        enqueue = partial(self._comm.gather, _named(x), _named(out), ROOT)
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def scatter(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a scatter."""
        enqueue = partial(self._comm.scatter, _named(x), _named(out), ROOT)
        return {"": Way(lambda stream: enqueue(stream=stream))}

    def sendrecv(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of sends to the right and recvs from the left."""
        right, left = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        sends = [(each, right) for each in messages(x)]
        return self._exchange(sends, [(each, left) for each in messages(out)])

    def all_gather_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-gather with counts: sends and recvs."""
        sends = [(x, peer) for peer in range(self._size)]
        return self._exchange(sends, self._ranges(out))

    def all_to_all_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of an all-to-all with counts: sends and recvs."""
        return self._exchange(self._ranges(x), self._ranges(out))

    def gather_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a gather with counts: sends and recvs."""
        recvs = self._ranges(out) if self._rank == ROOT else []
        return self._exchange([(x, ROOT)], recvs)

    def scatter_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a scatter with counts: sends and recvs."""
        sends = self._ranges(x) if self._rank == ROOT else []
        return self._exchange(sends, [(out, ROOT)])

    def reduce_scatter_v(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a reduce-scatter with counts: reductions."""
        reduction = getattr(self._core.NcclRedOp, op.upper())
        target = _named(out)
        parts = [(_named(part), rank) for part, rank in self._ranges(x)]

        def enqueue(stream: int) -> None:
            with self._core.group():
                for part, rank in parts:
                    self._comm.reduce(part, target, reduction, rank, stream=stream)

        return {"": Way(enqueue)}

    def _ranges(self, whole: Any) -> list[tuple[Any, int]]:
        """Return equal ranges of an array, each with its rank."""
        count = whole.size // self._size
        return [
            (whole[rank * count : (rank + 1) * count], rank)
            for rank in range(self._size)
        ]

    def _exchange(
        self, sends: list[tuple[Any, int]], recvs: list[tuple[Any, int]]
    ) -> Ways:
        """Return the one way of a group of messages, each with its peer."""
        sources = [(_named(array), peer) for array, peer in sends]
        targets = [(_named(array), peer) for array, peer in recvs]

        def enqueue(stream: int) -> None:
            with self._core.group():
                for source, peer in sources:
                    self._comm.send(source, peer, stream=stream)
                for target, peer in targets:
                    self._comm.recv(target, peer, stream=stream)

        return {"": Way(enqueue)}

    def close(self) -> None:
        """Destroy the communicator."""
        self._comm.destroy()


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
