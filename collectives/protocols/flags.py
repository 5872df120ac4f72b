"""Flags between the blocks of the same index on all ranks.

Memory order. ``raise_flags`` begins with a barrier of the block and a fence, so the
whole block's earlier loads and stores happen before its flags. ``await_flags`` ends
with an acquire by one thread for each rank and a barrier. So the earlier stores of
every rank's block are visible to the whole block.

A block raises no flag after a failure of one of its threads, so no peer reads its data
as complete. All its threads return the failure, and store nothing after it.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device.intrinsics import (
    bar_red_or,
    device_function,
    fence_acq_rel_sys,
    st_relaxed_sys_u32,
    thread_index_x,
    thread_index_y,
)
from numba_symm.device.polling import wait_for_epoch, wait_record


@functools.cache
def make_flags(
    size: int, threads: int = THREADS
) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """Return device functions for ``size`` ranks, which ``threads`` of a block call.

    ``raise_flags(ring, flags, rank, epoch, failed)`` raises this rank's flag at all
    others, unless a thread of the block passes ``failed``; returns whether one does.
    ``flags`` is the offset of the block's flags in a workspace.

    ``await_flags(guard, operation, flags, block, epoch, failed)`` waits for all others'
    flags, which begin at the address ``flags``. Returns whether a thread of the block
    gave up its wait, or passes ``failed``. ``operation`` is the number in
    ``launch/failures.py`` for a wait that is given up.
    """

    @device_function
    def raise_flags(ring: Any, flags: int, rank: int, epoch: int, failed: bool) -> bool:
        thread = thread_index_x()
        # explore: synchronize
        failed = bar_red_or(thread_index_y(), threads, failed)
        if thread < size - 1:
            # One fence suffices for all flags: a warp's threads execute it together.
            fence_acq_rel_sys()  # explore: fence
        for k in range(size - 1):
            if thread == k % threads and not failed:
                st_relaxed_sys_u32(ring[k] + flags + 4 * rank, epoch)  # explore: raise
        return failed

    @device_function
    def await_flags(
        guard: Any, operation: int, flags: int, block: int, epoch: int, failed: bool
    ) -> bool:
        peer = thread_index_x()
        while peer < size and not failed:
            if peer != guard.rank:
                record = wait_record(operation, guard.rank, peer, block, epoch)
                # explore: wait
                failed = not wait_for_epoch(guard, flags + 4 * peer, epoch, record)
            peer += threads
        return bar_red_or(thread_index_y(), threads, failed)  # explore: agree

    return raise_flags, await_flags
