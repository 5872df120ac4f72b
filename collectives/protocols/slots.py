"""The four sets of a block's slots that chunks use one after another.

They are two halves of two sets. Chunks 0 and 1 of a call use one half, 2 and 3 the
other one, and so on. ``chunked.py`` works in stages: in each one, a block stores a
chunk, reads an earlier one and raises its flags.

The following holds between calls of all kinds with these slots, flags and epochs. The
half in which a call begins follows from the epoch before it, and all ranks have read
everything in it by then. A rank stores into the other half after all ranks' flags of
stage 0, which they raised after they had left the previous call. A call ends before a
rank knows that the others have read the last chunk. So it advances the epoch such that
the next call begins in the other half.
"""

import functools
from collections.abc import Callable

from numba_symm.collectives.protocols.workspace import (
    CHUNKED,
    THREADS,
    TILE_BYTES,
    layout,
)
from numba_symm.device.intrinsics import device_function
from numba_symm.device.lanes import WHOLE, Vectors


def read_slots(slot: int, number: int) -> Vectors:
    """Return a thread's vectors of so many tiles: the simulator's form of a loop."""
    return WHOLE.read(slot, range(0, number * THREADS, THREADS), 0)


def write_slots(slot: int, words: Vectors) -> None:
    """Store a thread's vectors of several tiles: the simulator's form of a loop."""
    WHOLE.write(slot, range(0, len(words) * THREADS, THREADS), 0, words)


@functools.cache
def make_place(size: int) -> Callable[[int, int, int], int]:
    """Return a device function for ``size`` ranks.

    ``(block, before, chunk)`` returns the offset, in a workspace, of the slots of a
    chunk in a call that began after epoch ``before``: for each neighbour, along the
    ring, ``CHUNKED.tiles(size)`` tiles.
    """
    slots = layout(size).chunked.slots
    set_stride = (size - 1) * CHUNKED.tiles(size) * TILE_BYTES

    @device_function
    def place(block: int, before: int, chunk: int) -> int:
        half = (before + 1 + (chunk >> 1)) & 1  # explore: half
        return slots + (4 * block + 2 * half + (chunk & 1)) * set_stride  # explore: set

    return place


@device_function
def after(before: int, signalled: int, last: int) -> int:
    """Return the epoch that follows a call that began after epoch ``before``.

    Args:
        before: the epoch.
        signalled: in how many stages the call has raised flags.
        last: the chunk whose set was read last.
    """
    # One more if the next call would begin in the half of that set.
    more = (signalled + 1 + (last >> 1)) & 1  # explore: more
    return (before + signalled + more) & 0xFFFFFFFF
