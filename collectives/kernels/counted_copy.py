"""A rank's message to itself, whose number of elements is on the rank's GPU.

No other rank takes part. If the count is above the capacity, the kernel stores nothing,
and the communicator fails, as in ``transfer.py``.
"""

from typing import Any

from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.credit import ABSENT, Message, read_span
from numba_symm.collectives.protocols.workspace import THREADS, sync_block_or
from numba_symm.device import intrinsics, lanes
from numba_symm.kernels import Launch


def make_counted_copy(size: int, width: int) -> Any:
    """Return the kernel for words of ``width`` bytes."""
    load, store = lanes.make_access(width)

    def counted_copy(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        capacity: int,
        words: int,
        count_at: int,
        span: Any,
        stored_at: int,
    ) -> None:
        block, thread = intrinsics.block_index(), intrinsics.thread_index_x()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        count, first = read_span(guard, guard.rank, capacity, count_at, span, False)
        failed = workspace.load_failure(own, block) != 0 or count == ABSENT
        if sync_block_or(failed):
            workspace.keep_failure(own, True)
            return
        if stored_at != 0 and block == 0 and thread == 0:
            intrinsics.st_u64(stored_at, count)
        start = source + width * words * first
        i = block * THREADS + thread
        while i < count * words:
            store(target + width * i, load(start + width * i))
            i += grid * THREADS

    return counted_copy


kernel = binding.kernels_of(
    make_counted_copy, *5 * (types.int64,), types.UniTuple(types.int64, 3), types.int64
)
"""Returns a kernel, compiled when first bound."""


def bind(end: binding.Endpoint, sent: Message, received: Message) -> Launch:
    """Return the launch for both ends of a message with a count.

    Args:
        end: this rank's end.
        sent: what it sends itself.
        received: where it is stored; its ``count_at`` may be 0.
    """
    bits = sent.address | received.address | sent.itemsize
    width = min(8, bits & -bits)
    words, capacity = sent.itemsize // width, sent.nbytes // sent.itemsize
    grid = min(
        max(1, workspace.divide_up(capacity * words, 4 * THREADS)), end.max_blocks
    )
    places = sent.address, received.address, capacity, words
    arguments = *places, sent.count_at, sent.span, received.count_at
    return binding.launch(kernel(end.size, width), end, grid, arguments)
