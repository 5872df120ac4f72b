"""A barrier of all ranks on a stream.

Memory order. The kernel runs after all earlier work of its stream. Each rank releases
an epoch at every peer, and acquires every peer's. So all stores of any rank's stream
before its barrier are visible to all ranks' streams after their barriers.
"""

from typing import Any

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.gpu.kernels import Launch
from numba_symm.launch import failures


def make_barrier(size: int, operation: int) -> Any:
    """Return the kernel for ``size`` ranks.

    Args:
        size: number of ranks.
        operation: the number in ``launch/failures.py`` for a wait that is given up.
    """
    epochs, flags = (
        workspace.layout(size).barrier.epochs,
        workspace.layout(size).barrier.flags,
    )
    raise_flags, await_flags = make_flags(size)

    def barrier(guard: Any, early: bool, ring: Any, own: int, grid: int) -> None:
        workspace.follow_previous_grid(early)
        epoch, failed = workspace.resume(own, epochs, 0)
        epoch = (epoch + 1) & 0xFFFFFFFF
        failed = raise_flags(ring, flags, guard.rank, epoch, failed)
        failed = await_flags(guard, operation, own + flags, 0, epoch, failed)
        workspace.keep(own, epochs, 0, epoch, failed)

    return barrier


kernel = binding.kernels_of(make_barrier)
"""Returns a kernel, compiled when first bound."""


def bind(end: binding.Endpoint, operation: int | None = None) -> Launch:
    """Return the launch of a barrier, of its own or within another operation."""
    of_it = kernel(end.size, failures.BARRIER if operation is None else operation)
    return binding.launch(of_it, end, 1)
