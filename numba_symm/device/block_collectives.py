"""Collectives that kernels call: block *b* of every rank exchanges data.

The simulator runs ``collective``. On GPUs, ``gpu_collectives.py`` makes Numba's
compiler call another function instead.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_symm.device.block_exchange import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    BlockCollective,
    WorkspaceContext,
    make_exchange,
)
from numba_symm.device.intrinsics import array_function
from numba_symm.dtypes import check, reduction
from numba_symm.dtypes import element as element_of
from numba_symm.errors import ArgumentError


@array_function
def all_reduce(ws: Any, x: Any, op: Any = "sum", items: bool = False) -> bool:
    """Reduce an array over the blocks of the same index on all ranks, in place.

    Every thread of the block calls it, on every rank, with arrays of the same size. The
    ranks' elements are reduced by their tree, so all ranks get the same bits, which are
    those of :meth:`Communicator.all_reduce`. The call takes the time until one store to
    each rank arrives, and one or two ``syncthreads``. Each rank sends all its elements,
    and equally many bytes of epochs, to every other rank. The call does not order other
    accesses between ranks; :func:`barrier` does.

    Args:
        ws: the context of a workspace, ``comm.device_workspace(…).ctx``. Only one
            kernel at a time may use it.
        x: the input and the output, a contiguous array of any number of dimensions, of
            a dtype that :meth:`Communicator.all_reduce` accepts.
        op: the name of an operator of the library, or a function of
            ``cuda.jit(device=True)`` of two elements in the accumulation type. On GPUs,
            it must be a constant in the kernel's source.
        items: False: the threads of the block pass one common array in shared or global
            memory. The call reduces what they stored in it before, and all of them see
            the result. True: each thread passes an array of its own in registers
            (``cuda.local.array``), all of the same size, and the call reduces the
            arrays of each thread index. On GPUs, it must be a constant.

    Returns:
        False, in all threads of the block, if the deadline has passed or a rank has
        failed. Then ``x`` is undefined. After that, store nothing that a peer may read.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     sums = cuda.shared.array(3, np.int64)
        ...     for i in range(cuda.threadIdx.x, 3, 2):
        ...         sums[i] = i
        ...     if symm.all_reduce(ws, sums) and cuda.threadIdx.x == 0:
        ...         old[0] = sums[2]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        2
    """
    return collective("all_reduce", ws, x, x, op, 0, items)


@array_function
def reduce_scatter(
    ws: Any, x: Any, out: Any, op: Any = "sum", items: bool = False
) -> bool:
    """Reduce an array over the blocks of the same index; each gets its rank's shard.

    The bits are those of :meth:`Communicator.reduce_scatter`. Everything else but the
    arrays is as for :func:`all_reduce`.

    Args:
        ws: the context of a workspace.
        x: the input, with a shard for each rank, in rank order.
        out: the output, of the size of a shard; must not overlap ``x``.
        op: the operator.
        items: whether the arrays are each thread's own.

    Returns:
        As :func:`all_reduce`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.local.array(1, np.float32)
        ...     found = cuda.local.array(1, np.float32)
        ...     given[0] = cuda.threadIdx.x + 5
        ...     symm.reduce_scatter(ws, given, found, "max", items=True)
        ...     if cuda.threadIdx.x == 1:
        ...         old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        6
    """
    return collective("reduce_scatter", ws, x, out, op, 0, items)


@array_function
def all_gather(ws: Any, x: Any, out: Any, items: bool = False) -> bool:
    """Collect the arrays of the blocks of the same index, in rank order.

    Everything but the arrays is as for :func:`all_reduce`.

    Args:
        ws: the context of a workspace.
        x: the input, of any known dtype.
        out: the output, with a shard of ``x``'s size for each rank; must not overlap
            ``x``.
        items: whether the arrays are each thread's own.

    Returns:
        As :func:`all_reduce`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.shared.array(1, np.int16)
        ...     found = cuda.shared.array(1, np.int16)
        ...     if cuda.threadIdx.x == 0:
        ...         given[0] = 7
        ...     symm.all_gather(ws, given, found)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    return collective("all_gather", ws, x, out, "sum", 0, items)


@array_function
def broadcast(ws: Any, x: Any, root: int, items: bool = False) -> bool:
    """Copy the array of rank ``root``'s block into the arrays of all other ranks.

    Everything but the arrays is as for :func:`all_reduce`. The other ranks send as many
    packets as the root, so consecutive calls may have different roots.

    Args:
        ws: the context of a workspace.
        x: the input on the root, the output elsewhere, of any known dtype.
        root: the rank, the same in all threads and on all ranks. On a GPU, only debug
            mode checks that it is a rank.
        items: whether the arrays are each thread's own.

    Returns:
        As :func:`all_reduce`. If the ranks have different roots, the communicator fails
        with :class:`CallMismatch`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     found = cuda.shared.array(1, np.int64)
        ...     if cuda.threadIdx.x == 1:
        ...         found[0] = 7
        ...     symm.broadcast(ws, found, 0)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    return collective("broadcast", ws, x, x, "sum", root, items)


@array_function
def all_to_all(ws: Any, x: Any, out: Any, items: bool = False) -> bool:
    """Send a shard to each rank's block of the same index; receive one from each.

    Everything but the arrays is as for :func:`all_reduce`.

    Args:
        ws: the context of a workspace.
        x: the input, with a shard for each rank, in rank order, of any known dtype.
        out: the output, of the same size, with a shard of each rank; must not overlap
            ``x``.
        items: whether the arrays are each thread's own.

    Returns:
        As :func:`all_reduce`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.local.array(2, np.int32)
        ...     found = cuda.local.array(2, np.int32)
        ...     given[1] = cuda.threadIdx.x
        ...     symm.all_to_all(ws, given, found, items=True)
        ...     if cuda.threadIdx.x == 1:
        ...         old[0] = found[1]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        1
    """
    return collective("all_to_all", ws, x, out, "sum", 0, items)


def exchange_for(
    size: int,
    dtype: np.dtype[Any],
    other: np.dtype[Any],
    op: Any,
    kind: BlockCollective,
    items: bool,
) -> Callable[..., bool]:
    """Return the device function of a collective, or raise ArgumentError.

    Args:
        size: the number of ranks.
        dtype: that of the input.
        other: that of the output.
        op: an operator's name or a plain function.
        kind: the collective.
        items: whether arrays are each thread's own.
    """
    if dtype != other:
        raise ArgumentError(
            f"{kind.name}: expected an output of {dtype}, got one of {other}"
        )
    element = element_of(dtype, kind.name)
    reducing = reduction(op, kind.name)
    if kind.reduces:
        check(reducing, element, kind.name)
    return make_exchange(size, element, reducing, kind, items)


KINDS = {
    kind.name: kind
    for kind in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL)
}
"""By name."""

_exchange_for = functools.cache(exchange_for)


def collective(
    name: str, ws: Any, x: Any, out: Any, op: Any, root: int, items: bool
) -> bool:
    """Run a collective in the simulator; see the module's docstring."""
    kind = KINDS[name]
    if not isinstance(ws, WorkspaceContext):
        raise ArgumentError(
            f"{kind.name}: expected the context of a workspace, got "
            f"{type(ws).__name__}; pass comm.device_workspace(…).ctx"
        )
    for array in (x, out):
        flags = getattr(array, "flags", None)
        if flags is None or not getattr(array, "shape", ()) or not flags.c_contiguous:
            shape = getattr(array, "strides", None) and "a strided one"
            raise ArgumentError(
                f"{kind.name}: expected contiguous arrays of at least one dimension, "
                f"got {shape or type(array).__name__}"
            )
    op = getattr(op, "fn", op)  # of a function that the simulator has decorated
    exchange = _exchange_for(ws.size, x.dtype, out.dtype, op, kind, bool(items))
    with np.errstate(all="ignore"):  # overflow wraps or is infinite, as on a GPU
        return bool(exchange(ws, x, out, int(root)))
