"""Checks of the device functions' arguments: in the simulator, and in debug mode.

In the simulator, a mistake raises an error, whose traceback has the line of the user's
kernel. A GPU checks only kernels for a context with debug mode. There, a thread that
finds a mistake stores a record on every rank's board and ends. So the communicator
fails on all ranks, with the mistake in its text, and the CUDA context survives.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_symm.device.intrinsics import (
    block_size,
    channels_of,
    device_function,
    exit_thread,
    grid_index,
    is_checked,
    ld_u32,
    mailbox_of,
    nbytes_of,
    size_of,
    word_of,
)
from numba_symm.device.polling import fail, wait_record
from numba_symm.device.teams import Team
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.launch import failures
from numba_symm.launch.failures import (
    BAD_BUFFER,
    BAD_BYTES,
    BAD_COMPARISON,
    BAD_COPY,
    BAD_COUNT,
    BAD_DEPTH,
    BAD_GRID,
    BAD_MAILBOX,
    BAD_RANK,
    BAD_ROOT,
    BAD_SHARDS,
    BAD_SLOT,
    BAD_TEAM,
)


@device_function
def _fail(ctx: Any, operation: int, place: int, other: int) -> None:
    fail(ctx.guard, wait_record(operation, ctx.rank, ctx.rank, place, other))
    exit_thread()


_DETAILS: dict[int, Callable[..., str]] = {
    BAD_SLOT: lambda ctx, owner, source, **_: (
        f", got a signal to rank {owner} from rank {source} of ranks 0 to "
        f"{ctx.size - 1}, of channels 0 to {ctx.channels - 1}"
    ),
    BAD_RANK: lambda ctx, **_: f", 0 to {ctx.size - 1}",
    BAD_BUFFER: lambda ctx, shape, dtype, **_: (
        f", {ctx.buffer_size}, got shape {shape} of {np.dtype(dtype)}"
    ),
    BAD_TEAM: lambda ctx, team, **_: (
        f", {ctx.rank}, or None, got {team!r}; only the team's ranks call its barrier"
    ),
    BAD_COMPARISON: lambda comparison, **_: f", got {comparison!r}",
    BAD_COPY: lambda target, source, **_: (
        f", got {tuple(source.shape)} into {tuple(target.shape)}"
    ),
    BAD_MAILBOX: lambda mailbox, **_: (
        f", got {mailbox.size} elements {mailbox_of(mailbox) % 16} bytes after a "
        "multiple of 16"
    ),
    BAD_GRID: lambda ws, **_: f", {ws.blocks} blocks of {ws.threads} threads",
    BAD_BYTES: lambda ws, **_: f", which has room for {ws.vectors}",
    BAD_DEPTH: lambda ws, **_: f"; its depth is {ws.depth}",
    BAD_ROOT: lambda ws, **_: f", 0 to {ws.team.size - 1}",
    BAD_SHARDS: lambda pieces, ends, **_: (
        f", {ends[0] // pieces} and {ends[1] // pieces} elements"
    ),
    BAD_COUNT: lambda **_: "",
}
"""What the simulator adds to a text, of the variables of the function that refuses.

A GPU's record has no room for it, and its code no need.
"""


def _raise(ctx: Any, operation: int, place: int, other: int) -> None:
    found = {"rank": ctx.rank, "place": place, "epoch": other}
    text = failures.TABLE[operation].words.format(**found)
    text += _DETAILS[operation](**sys._getframe(1).f_locals)
    raise ArgumentError(f"{text}; a GPU checks this in debug mode only")


_refuse = _raise if SIMULATED else _fail

# Two checks are stricter in the simulator. On a GPU, Numba's types refuse other objects
# than a team, and more comparisons would cost instructions.


@device_function
def _is_rank(ctx: Any, rank: int) -> bool:
    return 0 <= rank < ctx.size  # type: ignore[no-any-return]


@device_function
def check_slot(ctx: Any, owner: int, channel: int, source: int) -> None:
    """Refuse a slot of a signal pad that does not exist."""
    if is_checked(ctx):
        other = source if owner == ctx.rank else owner
        if not (_is_rank(ctx, other) and 0 <= channel < channels_of(ctx)):
            _refuse(ctx, BAD_SLOT, channel, other)


@device_function
def check_peer(ctx: Any, rank: int) -> None:
    """Refuse a rank that does not exist."""
    if is_checked(ctx) and not _is_rank(ctx, rank):
        _refuse(ctx, BAD_RANK, rank, rank)


@device_function
def check_buffer(ctx: Any, shape: Any, dtype: Any) -> None:
    """Refuse an array that is larger than its buffer."""
    if is_checked(ctx) and nbytes_of(shape, dtype) > size_of(ctx):
        _refuse(ctx, BAD_BUFFER, 0, nbytes_of(shape, dtype))


@device_function
def _has_place(ctx: Any, team: Any) -> bool:
    return team.place >= 0  # type: ignore[no-any-return]


def _is_of_context(ctx: Any, team: Any) -> bool:
    return (
        isinstance(team, Team)
        and _has_place(ctx, team)
        and team.ranks[team.place] == ctx.rank
        and max(team.ranks) < ctx.size
    )


_includes = _is_of_context if SIMULATED else _has_place


@device_function
def check_team(ctx: Any, team: Any) -> None:
    """Refuse a team to which this rank does not belong."""
    if is_checked(ctx) and team is not None and not _includes(ctx, team):
        _refuse(ctx, BAD_TEAM, 0, 0)


@device_function
def _is_in_range(comparison: Any) -> bool:
    return 0 <= comparison <= 5  # type: ignore[no-any-return]


def _is_integer_in_range(comparison: Any) -> bool:
    return isinstance(comparison, int | np.integer) and _is_in_range(comparison)


_is_comparison = _is_integer_in_range if SIMULATED else _is_in_range


@device_function
def check_comparison(ctx: Any, comparison: int) -> None:
    """Refuse what is not one of the comparisons."""
    if is_checked(ctx) and not _is_comparison(comparison):
        _refuse(ctx, BAD_COMPARISON, comparison, 0)


@device_function
def check_copy(ctx: Any, target: Any, source: Any) -> None:
    """Refuse a copy between arrays of different shapes."""
    if is_checked(ctx) and target.shape != source.shape:
        _refuse(ctx, BAD_COPY, 0, source.size)


@device_function
def check_mailbox(ctx: Any, mailbox: Any, nbytes: int) -> None:
    """Refuse a mailbox that is too small for data, or not aligned."""
    if is_checked(ctx):
        needed = (nbytes + 15) // 16 * 4
        if mailbox.size < needed or mailbox_of(mailbox) & 15 != 0:
            _refuse(ctx, BAD_MAILBOX, 0, needed)


@device_function
def check_exchange(ws: Any, units: int, stride: int, root: int) -> None:
    """Refuse a collective for which a workspace is too small, and a wrong root."""
    if is_checked(ws):
        if grid_index() >= ws.blocks or block_size() > ws.threads:
            _refuse(ws, BAD_GRID, grid_index(), block_size())
        vectors = (units + stride - 1) // stride
        if vectors > ws.vectors:
            _refuse(ws, BAD_BYTES, 0, vectors)
        if not 0 <= root < ws.team.size:
            _refuse(ws, BAD_ROOT, 0, root)


@device_function
def check_shards(ws: Any, pieces: int, given: int, out: int, ends: Any) -> None:
    """Refuse arrays whose numbers of elements are not those of their shards.

    Args:
        ws: the workspace.
        pieces: the units of an element.
        given: the elements of the input.
        out: those of the output.
        ends: the units of the shards in both.
    """
    if is_checked(ws) and (given * pieces != ends[0] or out * pieces != ends[1]):
        _refuse(ws, BAD_SHARDS, out, given)


@device_function
def check_counts(ws: Any, counts: Any, size: int) -> None:
    """Refuse a negative count, or another number of counts than that of the ranks."""
    if is_checked(ws):
        if len(counts) != size:
            _refuse(ws, BAD_COUNT, 0, len(counts))
        for r in range(size):
            if counts[r] < 0:
                _refuse(ws, BAD_COUNT, 0, counts[r])


@device_function
def tells(ws: Any, thread: int) -> bool:
    """Return whether a thread tells the other ranks what its block calls."""
    return is_checked(ws) and thread == 0


@device_function
def check_started(ws: Any, kept: int, period: int, least: int, most: int) -> None:
    """Refuse one more collective than a workspace is deep, or a wait for none.

    Args:
        ws: the workspace.
        kept: the address of the epochs of the thread's last start and last wait.
        period: after how many epochs these repeat.
        least: the fewest that must be started and not awaited.
        most: the most.
    """
    if is_checked(ws):
        ahead = (word_of(ld_u32(kept)) - word_of(ld_u32(kept + 4))) % period
        if not least <= ahead <= most:
            _refuse(ws, BAD_DEPTH, grid_index(), ahead)
