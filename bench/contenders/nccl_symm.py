"""NCCL's symmetric kernels, on NCCL's memory registered as symmetric windows."""

from typing import Any

from numba import cuda

from numba_symm.bench.contenders import Ways, need_a_gpu_each
from numba_symm.bench.contenders.nccl import Nccl, check
from numba_symm.gpu.arrays import Memory

__all__ = ["NcclSymm", "check", "make"]


def make(comm: Any, ranks: Any) -> "NcclSymm":
    """Return the contender. Collective."""
    need_a_gpu_each(comm, ranks)
    return NcclSymm(ranks)


class NcclSymm(Nccl):
    """NCCL on symmetric windows."""

    name = "nccl-symm"

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes, registered on all ranks. Collective."""
        buffer = self._core.mem_alloc(nbytes)
        flag = self._core.WindowFlag.COLL_SYMMETRIC
        window = self._comm.register_window(buffer, flag)
        if not window.is_valid:
            raise RuntimeError("NCCL registers no symmetric windows here")
        return cuda.as_cuda_array(Memory(int(buffer.handle), nbytes, buffer))

    def broadcast(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a broadcast, unless this NCCL may never end it."""
        version = str(self._core.get_version().libnccl.version)
        if tuple(map(int, version.split(".")[:2])) < (2, 32):
            text = "may never end a broadcast on windows (2.28.9 did not, 2.32.3 did)"
            return {"": f"NCCL {version} {text}"}
        return super().broadcast(x, out, op)
