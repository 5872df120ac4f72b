"""Workspaces for collectives within kernels: see ``device/block_workspace.py``."""

from typing import Any

import numpy as np

from numba_symm import arguments, arrays
from numba_symm.device import block_workspace
from numba_symm.device.block_workspace import (
    VECTOR,
    WARP,
    CheckedWorkspaceContext,
    WorkspaceContext,
)
from numba_symm.errors import ArgumentError
from numba_symm.members import Members
from numba_symm.memory.heap import Heap
from numba_symm.memory.symmetric import SymmetricMemory

MOST_BLOCKS, MOST_THREADS, MOST_BYTES = 1 << 16, 1024, 1 << 30


class DeviceWorkspace:
    """The memory for collectives within kernels.

    ``comm.device_workspace(…)`` returns it. It is valid until the communicator is
    closed.

    Attributes:
        blocks: the maximum number of blocks of a kernel.
        threads: the maximum number of threads of a block.
        bytes: the maximum number of bytes that a block sends to each rank in a call.
    """

    def __init__(
        self, memory: SymmetricMemory, blocks: int, threads: int, bytes: int
    ) -> None:
        self.blocks, self.threads, self.bytes = blocks, threads, bytes
        self._memory = memory
        ctx, size = memory.ctx, memory.world_size
        made = CheckedWorkspaceContext if ctx.checked else WorkspaceContext
        ring = (ctx.buffers[(ctx.rank + 1 + k) % size] for k in range(size))
        self._ctx = made(
            rank=ctx.rank,
            size=size,
            ring=tuple(ring),
            guard=ctx.guard,
            blocks=blocks,
            threads=warps(threads),
            vectors=vectors(threads, bytes),
        )
        self._ctx.owner, self._ctx.check_mapped = ctx.owner, ctx.check_mapped

    def __repr__(self) -> str:
        return (
            f"<DeviceWorkspace of {self.blocks} blocks of {self.threads} threads, "
            f"{self.bytes} bytes each, rank {self._memory.rank} of "
            f"{self._memory.world_size}>"
        )

    @property
    def ctx(self) -> WorkspaceContext:
        """The context to pass to ``@cuda.jit`` kernels, as an ordinary argument.

        Like this object, the context keeps the memory alive until the communicator is
        closed.

        Raises:
            ClosedError: the communicator was closed.
        """
        _ = self._memory.ctx  # raises if it was closed
        return self._ctx

    @property
    def _numba_type_(self) -> Any:
        """Refuse to be an argument of a kernel, whose type Numba asks for here."""
        raise ArgumentError(
            "a kernel's argument: expected a context, got DeviceWorkspace; pass its "
            "attribute ctx"
        )


def new(
    heap: Heap, members: Members, blocks: int, threads: int, bytes: int
) -> DeviceWorkspace:
    """Return a new workspace; see ``Communicator.device_workspace``. Collective."""
    what = "device_workspace"
    with members.set_up(what):
        with members.exchange.agreed(what):
            blocks, threads, bytes = checked(blocks, threads, bytes)
        fact = f"{blocks} blocks of {threads} threads, {bytes} bytes"
        members.exchange.agree_equal(fact, what)
        # Of the largest island, because all ranks allocate the same.
        nbytes = block_workspace.nbytes(
            max(map(len, members.parts)),
            blocks,
            warps(threads),
            vectors(threads, bytes),
        )
        array = heap.array(nbytes, np.uint8, what)  # zeros: no packet, no epoch
        memory = heap.rendezvous(arrays.view(array, what).address, array)
    return DeviceWorkspace(memory, blocks, threads, bytes)


def checked(blocks: Any, threads: Any, bytes: Any) -> tuple[int, int, int]:
    """Return the sizes of a workspace as Python's ints, or refuse one of them."""
    return (
        _checked(blocks, "blocks", MOST_BLOCKS),
        _checked(threads, "threads", MOST_THREADS),
        _checked(bytes, "bytes", MOST_BYTES),
    )


def _checked(value: Any, name: str, most: int) -> int:
    return arguments.integer(
        value,
        "device_workspace",
        f"{name} to be an integer from 1 to {most}",
        least=1,
        most=most,
        do="pass the most that a kernel needs",
    )


def warps(threads: int) -> int:
    """Return a number of threads, rounded up to whole warps."""
    return -(-threads // WARP) * WARP


def vectors(threads: int, bytes: int) -> int:
    """Return how many vectors a thread of a block sends, of so many bytes in all."""
    return -(-bytes // (VECTOR * threads))
