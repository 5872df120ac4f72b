"""Collectives that kernels call: block *b* of every rank exchanges data.

Each consists of a start, which sends, and a wait, which receives and reduces. A kernel
may call both, or one function that does both.

The simulator runs ``collective``. On GPUs, ``gpu_collectives.py`` makes Numba's
compiler call another function instead.
"""

import functools
import sys
from typing import Any

import numpy as np

from numba_symm.device.block_exchange import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXSCAN,
    REDUCE_SCATTER,
    BlockCollective,
    ExchangeParts,
    Start,
    WorkspaceContext,
    make_exchange,
)
from numba_symm.device.intrinsics import array_function, grid_index, thread_index
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
    return collective("all_reduce", BOTH, ws, x, x, op, 0, items)


@array_function
def reduce_scatter(
    ws: Any,
    x: Any,
    out: Any,
    op: Any = "sum",
    items: bool = False,
    counts: Any = None,
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
        counts: the number of elements of each rank's shard, as in
            :meth:`Communicator.reduce_scatter_v`; as for :func:`all_gather`.

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
    return collective("reduce_scatter", BOTH, ws, x, out, op, 0, items, counts, counts)


@array_function
def exscan(ws: Any, x: Any, op: Any = "sum", items: bool = False) -> bool:
    """Reduce an array over the blocks of the ranks before this one, in place.

    The bits are those of :meth:`Communicator.exscan`. Rank 0 gets the operator's
    identity; if the operator is a function, its array keeps its contents. Everything
    else is as for :func:`all_reduce`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     held = cuda.local.array(1, np.int64)
        ...     held[0] = 3
        ...     symm.exscan(ws, held, "prod", items=True)
        ...     old[0] = held[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        1
    """
    return collective("exscan", BOTH, ws, x, x, op, 0, items)


@array_function
def all_gather(
    ws: Any, x: Any, out: Any, items: bool = False, counts: Any = None
) -> bool:
    """Collect the arrays of the blocks of the same index, in rank order.

    Everything but the arrays is as for :func:`all_reduce`.

    Args:
        ws: the context of a workspace.
        x: the input, of any known dtype.
        out: the output, with a shard of ``x``'s size for each rank; must not overlap
            ``x``.
        items: whether the arrays are each thread's own.
        counts: the number of elements of each rank's ``x``, and so of its shard, as in
            :meth:`Communicator.all_gather_v`: a tuple of ints or an array of integers,
            the same on all ranks. None: all have as many. With counts, every thread
            sends each rank at least 16 bytes.

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
    return collective("all_gather", BOTH, ws, x, out, "sum", 0, items, counts, counts)


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
    return collective("broadcast", BOTH, ws, x, x, "sum", root, items)


@array_function
def all_to_all(
    ws: Any,
    x: Any,
    out: Any,
    items: bool = False,
    send_counts: Any = None,
    recv_counts: Any = None,
) -> bool:
    """Send a shard to each rank's block of the same index; receive one from each.

    Everything but the arrays is as for :func:`all_reduce`.

    Args:
        ws: the context of a workspace.
        x: the input, with a shard for each rank, in rank order, of any known dtype.
        out: the output, of the same size, with a shard of each rank; must not overlap
            ``x``.
        items: whether the arrays are each thread's own.
        send_counts: the number of elements for each rank, as in
            :meth:`Communicator.all_to_all_v`; as ``counts`` of :func:`all_gather`, but
            each rank has its own.
        recv_counts: the number of elements from each rank: rank r's ``send_counts[s]``
            is rank s's ``recv_counts[r]``.

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
    return collective(
        "all_to_all", BOTH, ws, x, out, "sum", 0, items, send_counts, recv_counts
    )


@array_function
def all_reduce_start(ws: Any, x: Any, items: bool = False) -> None:
    """Send what an :func:`all_reduce` reduces, and do not wait.

    Every thread of the block calls it, on every rank, and later
    :func:`all_reduce_wait`. Meanwhile, no thread may change ``x`` or access the wait's
    output. At most ``ws.depth`` collectives may be started and not yet awaited; the
    block waits for them in the order in which it has started them, and for all of them
    before the kernel ends. The simulator and debug mode check that.

    A start contains one ``syncthreads`` if the array is the block's. It waits for no
    peer.

    Args:
        ws: the context of a workspace.
        x: the input, as for :func:`all_reduce`.
        items: as for :func:`all_reduce`; the same in the wait.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64, depth=2).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     sums = cuda.shared.array((3, 1), np.int64)
        ...     for step in range(4):
        ...         if step < 3:
        ...             if cuda.threadIdx.x == 0:
        ...                 sums[step, 0] = step + 5
        ...             symm.all_reduce_start(ws, sums[step])
        ...         if step > 0:
        ...             symm.all_reduce_wait(ws, sums[step - 1])
        ...     old[0] = sums[2, 0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    collective("all_reduce", START, ws, x, x, "sum", 0, items)


@array_function
def all_reduce_wait(ws: Any, x: Any, op: Any = "sum", items: bool = False) -> bool:
    """Wait for the data of the oldest :func:`all_reduce_start`, and reduce it.

    Every thread of the block calls it. The wait contains one ``syncthreads``.

    Args:
        ws: the context of a workspace.
        x: the array of the start; the output.
        op: the operator, as for :func:`all_reduce`. Only the wait needs it.
        items: as in the start.

    Returns:
        As :func:`all_reduce`. After a failure, later starts send nothing, and later
        waits return False at once.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     held = cuda.local.array(1, np.int64)
        ...     held[0] = 7
        ...     symm.all_reduce_start(ws, held, items=True)
        ...     symm.all_reduce_wait(ws, held, "max", items=True)
        ...     old[0] = held[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    return collective("all_reduce", WAIT, ws, x, x, op, 0, items)


@array_function
def exscan_start(ws: Any, x: Any, items: bool = False) -> None:
    """Send what an :func:`exscan` reduces; see :func:`all_reduce_start`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     sums = cuda.shared.array(1, np.int64)
        ...     symm.exscan_start(ws, sums)
        ...     symm.exscan_wait(ws, sums)
        ...     old[0] = sums[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        0
    """
    collective("exscan", START, ws, x, x, "sum", 0, items)


@array_function
def exscan_wait(ws: Any, x: Any, op: Any = "sum", items: bool = False) -> bool:
    """Wait for the data of the oldest :func:`exscan_start`, and reduce it in ``x``.

    As :func:`all_reduce_wait`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     held = cuda.local.array(1, np.int64)
        ...     symm.exscan_start(ws, held, items=True)
        ...     symm.exscan_wait(ws, held, "prod", items=True)
        ...     old[0] = held[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        1
    """
    return collective("exscan", WAIT, ws, x, x, op, 0, items)


@array_function
def reduce_scatter_start(
    ws: Any, x: Any, items: bool = False, counts: Any = None
) -> None:
    """Send what a :func:`reduce_scatter` reduces; see :func:`all_reduce_start`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.local.array(1, np.int64)
        ...     found = cuda.local.array(1, np.int64)
        ...     given[0] = 7
        ...     symm.reduce_scatter_start(ws, given, items=True)
        ...     symm.reduce_scatter_wait(ws, given, found, items=True)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    collective("reduce_scatter", START, ws, x, x, "sum", 0, items, counts, counts)


@array_function
def reduce_scatter_wait(
    ws: Any,
    x: Any,
    out: Any,
    op: Any = "sum",
    items: bool = False,
    counts: Any = None,
) -> bool:
    """Wait for the data of the oldest :func:`reduce_scatter_start`, and reduce it.

    As :func:`all_reduce_wait`, but with the output ``out``, as in
    :func:`reduce_scatter`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.shared.array(2, np.int64)
        ...     found = cuda.shared.array(2, np.int64)
        ...     given[cuda.threadIdx.x] = 7
        ...     symm.reduce_scatter_start(ws, given)
        ...     symm.reduce_scatter_wait(ws, given, found, "prod")
        ...     old[0] = found[1]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    return collective("reduce_scatter", WAIT, ws, x, out, op, 0, items, counts, counts)


@array_function
def all_gather_start(ws: Any, x: Any, items: bool = False, counts: Any = None) -> None:
    """Send what an :func:`all_gather` collects; see :func:`all_reduce_start`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.shared.array(1, np.int64)
        ...     found = cuda.shared.array(1, np.int64)
        ...     given[0] = 7
        ...     symm.all_gather_start(ws, given)
        ...     symm.all_gather_wait(ws, given, found)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    collective("all_gather", START, ws, x, x, "sum", 0, items, counts, counts)


@array_function
def all_gather_wait(
    ws: Any, x: Any, out: Any, items: bool = False, counts: Any = None
) -> bool:
    """Wait for the data of the oldest :func:`all_gather_start`, and store it.

    As :func:`all_reduce_wait`, but with the output ``out``, as in :func:`all_gather`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.local.array(1, np.int64)
        ...     found = cuda.local.array(1, np.int64)
        ...     given[0] = 7
        ...     symm.all_gather_start(ws, given, items=True)
        ...     symm.all_gather_wait(ws, given, found, items=True)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    return collective("all_gather", WAIT, ws, x, out, "sum", 0, items, counts, counts)


@array_function
def broadcast_start(ws: Any, x: Any, root: int, items: bool = False) -> None:
    """Send what a :func:`broadcast` copies; see :func:`all_reduce_start`.

    Every rank calls it, because the other ranks send packets, too.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     found = cuda.shared.array(1, np.int64)
        ...     found[0] = 7
        ...     symm.broadcast_start(ws, found, 0)
        ...     symm.broadcast_wait(ws, found, 0)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    collective("broadcast", START, ws, x, x, "sum", root, items)


@array_function
def broadcast_wait(ws: Any, x: Any, root: int, items: bool = False) -> bool:
    """Wait for the data of the oldest :func:`broadcast_start`, and store it in ``x``.

    As :func:`all_reduce_wait`; ``x`` and ``root`` are those of the start.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     held = cuda.local.array(1, np.int64)
        ...     held[0] = 7
        ...     symm.broadcast_start(ws, held, 0, items=True)
        ...     symm.broadcast_wait(ws, held, 0, items=True)
        ...     old[0] = held[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    return collective("broadcast", WAIT, ws, x, x, "sum", root, items)


@array_function
def all_to_all_start(
    ws: Any, x: Any, items: bool = False, send_counts: Any = None
) -> None:
    """Send what an :func:`all_to_all` exchanges; see :func:`all_reduce_start`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.shared.array(1, np.int64)
        ...     found = cuda.shared.array(1, np.int64)
        ...     given[0] = 7
        ...     symm.all_to_all_start(ws, given)
        ...     symm.all_to_all_wait(ws, given, found)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    collective("all_to_all", START, ws, x, x, "sum", 0, items, send_counts, send_counts)


@array_function
def all_to_all_wait(
    ws: Any,
    x: Any,
    out: Any,
    items: bool = False,
    send_counts: Any = None,
    recv_counts: Any = None,
) -> bool:
    """Wait for the data of the oldest :func:`all_to_all_start`, and store it.

    As :func:`all_reduce_wait`, but with the output ``out``, as in :func:`all_to_all`.

    Example:
        >>> ws = comm.device_workspace(blocks=1, threads=2, bytes=64).ctx
        >>> @cuda.jit
        ... def kernel(ws, old):
        ...     given = cuda.local.array(1, np.int64)
        ...     found = cuda.local.array(1, np.int64)
        ...     given[0] = 7
        ...     symm.all_to_all_start(ws, given, items=True)
        ...     symm.all_to_all_wait(ws, given, found, items=True)
        ...     old[0] = found[0]
        >>> kernel[1, 2](ws, old)
        >>> int(old[0])
        7
    """
    return collective(
        "all_to_all", WAIT, ws, x, out, "sum", 0, items, send_counts, recv_counts
    )


def exchange_for(
    size: int,
    dtype: np.dtype[Any],
    other: np.dtype[Any],
    op: Any,
    kind: BlockCollective,
    items: bool,
    varied: bool,
) -> ExchangeParts:
    """Return the device functions of a collective, or raise ArgumentError.

    Args:
        size: the number of ranks.
        dtype: that of the input.
        other: that of the output.
        op: an operator's name or a plain function.
        kind: the collective.
        items: whether arrays are each thread's own.
        varied: whether there are counts.
    """
    if dtype != other:
        raise ArgumentError(
            f"{kind.name}: expected an output of {dtype}, got one of {other}"
        )
    element = element_of(dtype, kind.name)
    reducing = reduction(op, kind.name)
    if kind.reduces:
        check(reducing, element, kind.name)
    if kind.scans and reducing == "avg":
        raise ArgumentError(
            f"{kind.name}: op='avg' is not defined, because each rank's result reduces "
            "another number of inputs; use 'sum' and divide"
        )
    return make_exchange(size, element, reducing, kind, items, varied)


KINDS = {
    kind.name: kind
    for kind in (
        *(ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, EXSCAN),
    )
}
"""By name."""

BOTH_COUNTS = "expected both send_counts and recv_counts, or neither"

START, WAIT, BOTH = "start", "wait", "both"
"""What a function does: all are constants of kernels."""

_exchange_for = functools.cache(exchange_for)


def _type_of(counts: Any) -> Any:
    """Return the type of all counts, or None if they have several.

    NumPy would find a common one for a tuple, which a kernel on a GPU does not.
    """
    if hasattr(counts, "dtype"):
        return counts.dtype
    found = {np.asarray(each).dtype for each in counts}
    return found.pop() if len(found) == 1 else None


def collective(
    name: str,
    part: str,
    ws: Any,
    x: Any,
    out: Any,
    op: Any,
    root: int,
    items: bool,
    sent: Any = None,
    received: Any = None,
) -> bool:
    """Run a part of a collective in the simulator; see the module's docstring."""
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
    varied = sent is not None
    if varied != (received is not None):
        raise ArgumentError(f"{kind.name}: {BOTH_COUNTS}")
    for counts in (sent, received) if varied else ():
        few = np.ndim(counts) != 1 or len(counts) != ws.team.size
        of = None if few else _type_of(counts)
        if of is None or of.kind not in "iu":
            raise ArgumentError(
                f"{kind.name}: expected a count for each of {ws.team.size} ranks, all "
                f"of one type of integers, got {counts!r}"
            )
    types = x.dtype, out.dtype
    exchange = _exchange_for(ws.team.size, *types, op, kind, bool(items), varied)
    counts = sent, received
    if part == START:
        caller = sys._getframe(2)
        start = Start(caller.f_code.co_filename, caller.f_lineno, f"{name}_start")
        ws.starts[grid_index(), thread_index()] = start
    with np.errstate(all="ignore"):  # overflow wraps or is infinite, as on a GPU
        if part != WAIT:
            exchange.start(ws, x, int(root), counts)
        return part == START or bool(exchange.wait(ws, x, out, int(root), counts))
