"""torch's symmetric-memory kernels: one-shot and two-shot.

Two-shot works in place and overwrites its input. A copy of the input is not timed,
which favours torch. One-shot reads symmetric memory and writes any memory.
"""

from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

from numba import cuda

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

CURE = "pip install torch"

LOCAL = "127.0.0.1"

ONE_SHOT_LIMIT = 16 << 20
"""Largest message for one-shot, in bytes. It moves all inputs to all ranks, and is
slower than two-shot at much smaller messages already."""


def check() -> None:
    """Raise Missing unless this torch has the kernels."""
    need_gpus()
    torch = imported("torch", CURE)
    if not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} finds no GPU")
    imported("torch.distributed._symmetric_memory", "a newer torch has it")
    for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_"):
        if not hasattr(torch.ops.symm_mem, name):
            raise Missing(f"torch {torch.__version__} has no symm_mem::{name}")


def make(comm: Any, ranks: Any) -> "Torch":
    """Return the contender. Collective."""
    need_a_gpu_each(comm, ranks)
    return Torch(comm.device.ordinal, ranks)


class Torch(Contender):
    """torch.ops.symm_mem."""

    name = "torch"

    def __init__(self, ordinal: int, ranks: Any):
        self._torch = torch = imported("torch", CURE)
        self._memory = imported("torch.distributed._symmetric_memory", CURE)
        self.version = f"torch {torch.__version__}"
        self._device = torch.device("cuda", ordinal)
        self._tensors: list[Any] = []
        self._handle: Any = None
        torch.cuda.set_device(self._device)
        store = _store(torch, ranks)
        # The group is only for exchanging handles; its NCCL communicator is never made.
        torch.distributed.init_process_group(
            "nccl", store=store, rank=ranks.rank, world_size=ranks.size
        )
        self._group = torch.distributed.group.WORLD.group_name

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes that all ranks have mapped. Collective."""
        uint8 = self._torch.uint8
        tensor = self._memory.empty(nbytes, dtype=uint8, device=self._device)
        self._handle = self._memory.rendezvous(tensor, self._group)
        self._tensors.append(tensor)
        return cuda.as_cuda_array(tensor)

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context that makes a stream torch's current one."""
        cuda = self._torch.cuda
        context: AbstractContextManager[Any] = cuda.stream(
            cuda.ExternalStream(stream, device=self._device)
        )
        return context

    def all_reduce(self, x: Any, out: Any, op: str) -> Ways:
        """Return the two ways of an all-reduce."""
        if op != "sum" or x.dtype.name not in ("float32", "bfloat16"):
            return {"": "torch's kernels sum float32 and bfloat16 only"}
        ops, group = self._torch.ops.symm_mem, self._group
        source, target = self._tensor(x), self._tensor(out)
        two_shot = partial(ops.two_shot_all_reduce_, target, op, group)
        ways: Ways = {"two_shot": Way(lambda stream: two_shot(), in_place=True)}
        if x.nbytes <= ONE_SHOT_LIMIT and x is not out:  # peers read x meanwhile
            one_shot = partial(ops.one_shot_all_reduce_out, source, op, group, target)
            ways["one_shot"] = Way(lambda stream: one_shot())
        return ways

    def barrier(self, x: Any, out: Any, op: str) -> Ways:
        """Return the one way of a barrier."""
        return {"": Way(lambda stream: self._handle.barrier(channel=0))}

    def _tensor(self, array: Any) -> Any:
        """Return a view of the allocated tensor for an array within it.

        It must view the tensor itself, because torch finds peers by the storage.
        """
        address = int(array.device_ctypes_pointer.value)
        dtype = getattr(self._torch, array.dtype.name)
        for tensor in self._tensors:
            first = address - tensor.data_ptr()
            if 0 <= first < tensor.numel():
                return tensor[first : first + array.nbytes].view(dtype)
        raise ValueError(f"expected an array of allocate(), got address {address:#x}")

    def close(self) -> None:
        """Free the memory and leave the process group."""
        self._tensors.clear()
        self._handle = None
        self._torch.distributed.destroy_process_group()


def _store(torch: Any, ranks: Any) -> Any:
    """Return a store that all ranks of this node can connect to. Collective."""
    options = {
        "world_size": ranks.size,
        "timeout": timedelta(seconds=60),
        "wait_for_workers": False,
    }
    own: list[Any] = []

    def serve() -> int:
        store = torch.distributed.TCPStore(LOCAL, 0, is_master=True, **options)
        own.append(store)
        return int(store.port)

    port = from_first_rank(ranks, serve)
    return own[0] if own else torch.distributed.TCPStore(LOCAL, port, **options)
