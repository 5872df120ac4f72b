"""The four parts of a block's slots that chunks have in turn.

The slots are those of ``chunked_all_reduce.py``: two halves of two sets. Chunks 0 and 1
of a call go into one half, 2 and 3 into the other, and so on.

Between calls, of any kernel with these slots, flags and epochs: the half in which a
call begins follows from the epoch before it, and all ranks have read everything in it
by then. A rank stores into the other half after all ranks' flags of turn 0, which they
raised after they had left the call before. A call ends before a rank knows that the
others have read the last chunk; so many epochs are counted that the next call begins in
the other half.
"""

import functools
from collections.abc import Callable

from numba_symm.collectives.protocols.workspace import CHUNKED, ROW, layout
from numba_symm.device.intrinsics import device_function


@functools.cache
def make_place(size: int) -> Callable[[int, int, int], int]:
    """Return a device function for ``size`` ranks.

    ``(block, before, chunk)`` returns the offset, in a workspace, of the slots of a
    chunk in a call that began after epoch ``before``: for each neighbour, along the
    ring, ``CHUNKED.steps(size)`` rows.
    """
    slots = layout(size).chunked.slots
    set_stride = (size - 1) * CHUNKED.steps(size) * ROW

    @device_function
    def place(block: int, before: int, chunk: int) -> int:
        half = (before + 1 + (chunk >> 1)) & 1  # explore: half
        return slots + (4 * block + 2 * half + (chunk & 1)) * set_stride  # explore: set

    return place


@device_function
def after(before: int, chunks: int, hops: int) -> int:
    """Return the epoch that follows a call that began after epoch ``before``.

    Args:
        before: the epoch.
        chunks: how many the call had.
        hops: in how many a chunk went, each with a turn of its own.
    """
    signalled = chunks + hops - 1
    # Another one if the next call would begin in the half of the last chunk.
    more = (signalled + 1 + (chunks - 1 >> 1)) & 1  # explore: more
    return (before + signalled + more) & 0xFFFFFFFF
