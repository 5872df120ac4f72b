"""The four sets of a block's slots that chunks use one after another.

The slots are those of ``chunked_all_reduce.py``: two halves of two sets. Chunks 0 and 1
of a call use one half, 2 and 3 the other one, and so on. A kernel works in stages: in
each one, a block stores a chunk, reads an earlier one and raises its flags.

The following holds between calls of all kernels with these slots, flags and epochs. The
half in which a call begins follows from the epoch before it, and all ranks have read
everything in it by then. A rank stores into the other half after all ranks' flags of
stage 0, which they raised after they had left the previous call. A call ends before a
rank knows that the others have read the last chunk. So it advances the epoch such that
the next call begins in the other half.
"""

import functools
from collections.abc import Callable

from numba_symm.collectives.protocols.workspace import CHUNKED, TILE_BYTES, layout
from numba_symm.device.intrinsics import device_function


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
def after(before: int, chunks: int, lag: int) -> int:
    """Return the epoch that follows a call that began after epoch ``before``.

    Args:
        before: the epoch.
        chunks: how many chunks the call had.
        lag: how many stages after it was first stored a chunk is last read.
    """
    signalled = chunks + lag - 1
    # One more if the next call would begin in the half of the last chunk.
    more = (signalled + 1 + (chunks - 1 >> 1)) & 1  # explore: more
    return (before + signalled + more) & 0xFFFFFFFF
