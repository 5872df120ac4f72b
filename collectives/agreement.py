"""A barrier at which the ranks also compare what they are about to do.

For algorithms that write into a peer's own array: a digest of the call travels in the
upper half of the 8-byte flag, its lower half being the epoch. Ranks that differ fail
together, with an error that says so, instead of waiting for each other.

Memory order: as ``barrier.py``.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives import workspace
from numba_symm.collectives.launches import digest_of
from numba_symm.collectives.workspace import THREADS, follow_previous_grid, layout
from numba_symm.device.intrinsics import (
    fence_acq_rel_sys,
    globaltimer,
    ld_acquire_sys_u64,
    ld_u32,
    poll_pause,
    st_relaxed_sys_u64,
    st_u32,
    word_of,
)
from numba_symm.device.signals import (
    MISMATCH,
    POLLS_PER_CHECK,
    fail,
    must_give_up,
    wait_record,
)
from numba_symm.kernels import Kernel, Launch


def make_agreement(size: int) -> Any:
    """Return the kernel for ``size`` ranks."""
    epochs, flags = layout(size).agreement.epochs, layout(size).agreement.slots

    def agreement(
        guard: Any, early: bool, ring: Any, own: int, digest: int, operation: int
    ) -> None:
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        epoch = (word_of(ld_u32(own + epochs)) + 1) & 0xFFFFFFFF
        mine = word_of(digest << 32 | epoch)
        if thread < size - 1:
            fence_acq_rel_sys()
        for k in range(size - 1):
            if thread == k % THREADS:
                st_relaxed_sys_u64(ring[k] + flags + 8 * guard.rank, mine)
        for r in range(size):
            if thread == r % THREADS and r != guard.rank:
                polls = 0
                started = 0
                given_up = False
                # No rank is a call ahead: it would need this one's part in this call.
                found = ld_acquire_sys_u64(own + flags + 8 * r)
                while (found ^ epoch) & 0xFFFFFFFF != 0 and not given_up:
                    poll_pause()
                    polls += 1
                    if polls % POLLS_PER_CHECK == 0:
                        if started == 0:
                            started = globaltimer()
                        record = wait_record(operation, guard.rank, r, 0, epoch)
                        given_up = must_give_up(guard, started, record)
                    found = ld_acquire_sys_u64(own + flags + 8 * r)
                if found != mine and not given_up:
                    record = wait_record(MISMATCH, guard.rank, r, 0, epoch)
                    fail(guard, record)
        # All threads have read the epoch before it changes.
        cuda.syncthreads()
        if thread == 0:
            st_u32(own + epochs, epoch)

    return agreement


@functools.cache
def kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    return workspace.make_kernel(make_agreement, (size,), types.int64, types.int64)


def bind(comm: Any, operation: int, call: str) -> Launch:
    """Return the launch that makes sure that all ranks are in the same call.

    Args:
        comm: the communicator.
        operation: what a record of a wait given up names.
        call: what must be equal, in words.
    """
    return workspace.launch(kernel(comm.size), comm, 1, digest_of(call), operation)
