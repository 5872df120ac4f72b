"""Checks of the device functions' arguments in the simulator, which raise errors.

The error's traceback has the line of the user's kernel. ``gpu_checks.py`` has the same
names.
"""

import threading
from typing import Any

import numpy as np

from numba_symm.device.sim import block_size, grid_index
from numba_symm.device.sim_views import mailbox_of
from numba_symm.errors import ArgumentError
from numba_symm.waits import TABLE


def _check_mapped(ctx: Any) -> None:
    if ctx.check_mapped is not None:
        ctx.check_mapped()


def check_slot(ctx: Any, owner: int, channel: int, source: int, channels: int) -> None:
    """Refuse a slot of a signal pad that does not exist or was unmapped."""
    _check_mapped(ctx)
    ranks = max(owner, source) < ctx.size and min(owner, source) >= 0
    if not ranks or not 0 <= channel < channels:
        raise ArgumentError(
            f"a signal to rank {owner} from rank {source} on channel {channel}: "
            f"expected ranks 0 to {ctx.size - 1} and channels 0 to "
            f"{channels - 1}; a GPU checks this in debug mode only"
        )


def check_peer(ctx: Any, rank: int) -> None:
    """Refuse a rank that does not exist, and a buffer that was unmapped."""
    _check_mapped(ctx)
    if not 0 <= rank < ctx.size:
        raise ArgumentError(
            f"rank {rank}'s buffer: expected ranks 0 to {ctx.size - 1}; a GPU "
            "checks this in debug mode only"
        )


def check_buffer(ctx: Any, shape: Any, dtype: Any) -> None:
    """Refuse an array that is larger than its buffer."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if ctx.buffer_size is not None and nbytes > ctx.buffer_size:
        raise ArgumentError(
            f"peer_array: expected at most {ctx.buffer_size} bytes, the buffer's size, "
            f"got {nbytes} for shape {shape} of {np.dtype(dtype)}; a GPU checks "
            "this in debug mode only"
        )


def check_team(ctx: Any, team: Any) -> None:
    """Refuse a team to which this rank does not belong."""
    if team is None:
        return
    ranks = getattr(team, "ranks", ())
    if ctx.rank not in ranks or max(ranks) >= ctx.size:
        raise ArgumentError(
            f"expected a team of rank {ctx.rank} or None, got {team!r}; only the "
            "team's ranks call its barrier"
        )


def check_grid() -> None:
    """Refuse a barrier of a grid whose blocks cannot run together."""
    thread: Any = threading.current_thread()
    thread._manager.launch.check_size("grid_barrier")


def check_comparison(ctx: Any, comparison: int) -> None:
    """Refuse what is not one of the comparisons."""
    if comparison not in range(6):
        raise ArgumentError(
            f"expected symm.EQ, NE, GT, GE, LT or LE as the comparison, got "
            f"{comparison!r}"
        )


def check_copy(ctx: Any, target: Any, source: Any) -> None:
    """Refuse a copy between arrays of different shapes, and an unmapped buffer."""
    _check_mapped(ctx)
    if tuple(target.shape) != tuple(source.shape):
        raise ArgumentError(
            f"a copy: expected arrays of the same shape, got {tuple(source.shape)} "
            f"into {tuple(target.shape)}; a GPU checks this in debug mode only"
        )


def check_mailbox(ctx: Any, mailbox: Any, nbytes: int) -> None:
    """Refuse a mailbox that is too small for data, or not aligned, or unmapped."""
    _check_mapped(ctx)
    needed, place = (nbytes + 15) // 16 * 4, mailbox_of(mailbox) % 16
    if mailbox.size < needed or place:
        raise ArgumentError(
            f"a copy with packets: expected a mailbox of at least {needed} elements, "
            f"aligned to 16 bytes, got {mailbox.size} elements {place} bytes after a "
            "multiple of 16; see mailbox_size; a GPU checks this in debug mode only"
        )


def _in_kernel(operation: int) -> str:
    return TABLE[operation].words.partition(" ")[0]


def check_exchange(ws: Any, operation: int, units: int, stride: int, root: int) -> None:
    """Refuse a collective for which a workspace is too small, and a wrong root."""
    _check_mapped(ws)
    what = _in_kernel(operation)
    if grid_index() >= ws.blocks or block_size() > ws.threads:
        raise ArgumentError(
            f"{what}: expected at most {ws.blocks} blocks of {ws.threads} threads, the "
            f"workspace's, got block {grid_index()} of {block_size()} threads; a GPU "
            "checks this in debug mode only"
        )
    vectors = (units + stride - 1) // stride
    if vectors > ws.vectors:
        raise ArgumentError(
            f"{what}: expected at most {16 * ws.vectors} bytes of a thread for a rank, "
            f"the workspace's, got {16 * vectors}; pass more bytes to "
            "comm.device_workspace; a GPU checks this in debug mode only"
        )
    if not 0 <= root < ws.size:
        raise ArgumentError(
            f"{what}: expected a root from 0 to {ws.size - 1}, got {root}; a GPU "
            "checks this in debug mode only"
        )


def check_shards(
    ws: Any, operation: int, given: int, shards: int, out: int, gathered: int
) -> None:
    """Refuse arrays whose numbers of elements do not match."""
    shard = given // shards
    if given != shard * shards or out != shard * gathered:
        raise ArgumentError(
            f"{_in_kernel(operation)}: expected arrays of {shards} and {gathered} "
            f"shards of equal size, got {given} and {out} elements; a GPU checks this "
            "in debug mode only"
        )
