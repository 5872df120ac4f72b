"""A barrier of all ranks on a stream.

Memory order. The kernel runs after all earlier work of its stream. Each rank releases
an epoch at every peer and acquires every peer's, so what any rank's stream wrote before
its barrier is visible to all ranks' streams after theirs.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.workspace import THREADS, layout
from numba_symm.device.intrinsics import ld_u32, st_release_sys_u32, st_u32
from numba_symm.device.signals import BARRIER, wait_for_epoch, wait_record
from numba_symm.kernels import GUARD, Kernel, Launch


def make_kernel(size: int) -> Any:
    """Return the kernel for ``size`` ranks."""
    at = layout(size)
    epochs, flags = at.barrier_epochs, at.barrier_flags

    def barrier(guard: Any, peers: Any, own: int) -> None:
        thread = cuda.threadIdx.x
        epoch = (ld_u32(own + epochs) + 1) & 0xFFFFFFFF
        for r in range(size):
            if thread == r % THREADS:
                st_release_sys_u32(peers[r] + flags + 4 * guard.rank, epoch)
        for r in range(size):
            if thread == r % THREADS:
                record = wait_record(BARRIER, guard.rank, r, 0, epoch)
                wait_for_epoch(guard, own + flags + 4 * r, epoch, record)
        # All threads have read the epoch before it changes.
        cuda.syncthreads()
        if thread == 0:
            st_u32(own + epochs, epoch)

    return barrier


@functools.cache
def kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    signature = (GUARD, types.UniTuple(types.int64, size), types.int64)
    return Kernel(make_kernel, (size,), signature, THREADS)


def bind(comm: Any) -> Launch:
    """Return the launch of a barrier of ``comm``'s ranks."""
    addresses = comm.workspace.addresses
    return kernel(comm.size).bind(1, comm.guard, addresses, addresses[comm.rank])
