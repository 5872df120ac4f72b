"""A barrier of all ranks on a stream.

Memory order. The kernel runs after all earlier work of its stream. Each rank releases
an epoch at every peer and acquires every peer's, so what any rank's stream wrote before
its barrier is visible to all ranks' streams after theirs.
"""

import functools
from typing import Any

from numba import cuda

from numba_symm.collectives import workspace
from numba_symm.collectives.flags import make_flags
from numba_symm.collectives.workspace import follow_previous_grid, layout
from numba_symm.device.intrinsics import ld_u32, st_u32
from numba_symm.device.signals import BARRIER
from numba_symm.kernels import Kernel, Launch


def make_barrier(size: int) -> Any:
    """Return the kernel for ``size`` ranks."""
    epochs, flags = layout(size).barrier.epochs, layout(size).barrier.flags
    tell, told, _ = make_flags(size, BARRIER)

    def barrier(guard: Any, early: bool, ring: Any, own: int) -> None:
        follow_previous_grid(early)
        epoch = (ld_u32(own + epochs) + 1) & 0xFFFFFFFF
        tell(ring, flags, guard.rank, epoch)
        told(guard, own + flags, 0, epoch, False)
        # All threads have read the epoch, and met in told, before it changes.
        if cuda.threadIdx.x == 0:
            st_u32(own + epochs, epoch)

    return barrier


@functools.cache
def kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    return workspace.make_kernel(make_barrier, (size,))


def bind(comm: Any) -> Launch:
    """Return the launch of a barrier of ``comm``'s ranks."""
    return workspace.launch(kernel(comm.size), comm, 1)
