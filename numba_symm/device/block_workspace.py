"""The memory of collectives within kernels, and the context that kernels take.

A workspace has these parts on each rank, one after another:

- for each block, a word that is 0 until the rank fails;
- for each thread of each block its last epoch, a uint32;
- for each half, other rank, vector, block and thread a mailbox: two packets.

The address of a mailbox follows from these numbers and from the workspace's own sizes,
never from a call's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.device.intrinsics import device_function
from numba_symm.device.polling import Guard

VECTOR = 16
"""Bytes that a thread sends at a time."""

WARP = 32
"""Threads whose packets are adjacent."""

PACKETS = WARP * VECTOR
"""Bytes from a vector's first packet to its second one."""

MARK = 128
"""Bytes of a block's mark: a cache line, because blocks load theirs in each call."""


class _WorkspaceFields(NamedTuple):
    rank: int
    size: int
    ring: tuple[int, ...]
    guard: Guard
    blocks: int
    threads: int
    vectors: int


class WorkspaceContext(_WorkspaceFields):
    """The device workspace of a kernel, passed as an ordinary argument.

    The last two attributes are for the host only. Like an array, the object keeps the
    memory alive.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        ring: the addresses of all ranks' workspaces, beginning with the next rank's and
            ending with this rank's.
        guard: the timeout, and the address to which a kernel reports a failure.
        blocks: the maximum number of blocks of a kernel.
        threads: the maximum number of threads of a block, a multiple of 32.
        vectors: the maximum number of 16-byte vectors that a thread sends to a rank in
            a call.
        owner: the object that keeps the memory alive.
        check_mapped: as in :class:`Context`.
    """

    owner: Any = None
    check_mapped: Callable[[], None] | None = None
    checked = False  # by device functions on GPUs, see ``checks.py``


class CheckedWorkspaceContext(WorkspaceContext):
    """A workspace in debug mode: device functions check arguments on GPUs, too."""

    checked = True


def nbytes(size: int, blocks: int, threads: int, vectors: int) -> int:
    """Return the bytes of a workspace; ``threads`` is a multiple of 32."""
    boxes = 2 * (size - 1) * vectors * blocks * 2 * threads * VECTOR
    return MARK * blocks + 4 * blocks * threads + boxes


@device_function
def epoch_of(ws: Any, block: int, thread: int) -> int:
    """Return the offset of a thread's epoch."""
    # explore: epoch
    return MARK * ws.blocks + 4 * (ws.threads * block + thread)  # type: ignore[no-any-return]


@device_function
def rank_stride(ws: Any) -> int:
    """Return the bytes from a mailbox to that of the next rank along the ring."""
    # explore: ranks
    return ws.vectors * tile_stride(ws)  # type: ignore[no-any-return]


@device_function
def tile_stride(ws: Any) -> int:
    """Return the bytes from a mailbox to that of the thread's next vector."""
    # explore: vectors
    return ws.blocks * ws.threads * 2 * VECTOR  # type: ignore[no-any-return]


@device_function
def box_of(ws: Any, block: int, thread: int, epoch: int) -> int:
    """Return the offset of a thread's first mailbox, for its first vector."""
    boxes = MARK * ws.blocks + 4 * ws.threads * ws.blocks
    half = (epoch & 1) * (ws.size - 1) * rank_stride(ws)  # explore: half
    line = block * ws.threads * 2 * VECTOR  # explore: line
    warp, lane = thread // WARP, thread % WARP
    return boxes + half + line + warp * 2 * PACKETS + lane * VECTOR  # type: ignore[no-any-return]
