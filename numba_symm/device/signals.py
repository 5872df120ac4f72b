"""Signals between GPUs, callable from any kernel.

A signal pad has one ``uint32`` slot for each channel and source rank, at
``size * channel + source``. A slot is a mailbox with one writer on each side, so
no atomic operation is needed. The sender waits for 0 and stores 1, and the receiver
waits for 1 and stores 0. Each signal returns its slot to 0, so a captured graph can be
replayed. The 0 shows that the signal was taken, not that any data was read. Each
channel of a pair of ranks has one user at a time.

Every wait has a deadline: see ``polling.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.device.checks import check_buffer, check_peer, check_slot
from numba_symm.device.intrinsics import (
    array_at,
    array_function,
    device_function,
    later_blocks,
    ld_acquire_sys_u32,
    st_release_sys_u32,
)
from numba_symm.device.polling import Guard, make_wait, wait_record
from numba_symm.waits import PUT_SIGNAL, WAIT_SIGNAL

MAX_CHANNELS = 128
"""The channels of a pad."""


class _ContextFields(NamedTuple):
    rank: int
    size: int
    buffers: tuple[int, ...]
    pads: tuple[int, ...]
    guard: Guard


class Context(_ContextFields):
    """The symmetric memory that a kernel accesses, passed as an ordinary argument.

    Numba passes a context to kernels as a named tuple. The last three attributes are
    for the host only. ``SymmetricMemory.ctx`` keeps the memory alive, as an array does.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        buffers: the address of every rank's buffer in this process.
        pads: the address of every rank's signal pad in this process.
        guard: the timeout, and the address to which a kernel reports a failure.
        owner: the object that keeps the memory alive.
        buffer_size: the bytes of a buffer; None if they are unknown.
        check_mapped: a function that the simulator's device functions call before an
            access. It raises ClosedError if the memory was unmapped, because the access
            would end the process. None: the memory is never unmapped.
    """

    owner: Any = None
    buffer_size: int | None = None
    check_mapped: Callable[[], None] | None = None
    checked = False  # by device functions on GPUs, see ``checks.py``


class CheckedContext(Context):
    """A context in debug mode: device functions check their arguments on GPUs, too.

    Attributes:
        nbytes: the bytes of a buffer, for kernels.
    """

    _fields: Any = (*_ContextFields._fields, "nbytes")
    checked = True

    def __new__(cls, *values: Any) -> "CheckedContext":
        """Return the context of the fields' values."""
        return tuple.__new__(cls, values)


@device_function
def _holds(slot: int, value: int) -> bool:
    return ld_acquire_sys_u32(slot) == value  # explore: await-slot


_wait_for_slot = make_wait(_holds)


@device_function
def _slot(ctx: Any, owner: int, channel: int, source: int) -> int:
    """Return the address of a slot of rank ``owner``'s pad."""
    check_slot(ctx, owner, channel, source, MAX_CHANNELS)
    return ctx.pads[owner] + 4 * (ctx.size * channel + source)  # type: ignore[no-any-return]


@device_function
def put(ctx: Any, dst: int, channel: int, operation: int) -> bool:
    """Signal as :func:`put_signal`, with the number of the operation that it is for."""
    slot = _slot(ctx, dst, channel, ctx.rank)
    record = wait_record(operation, ctx.rank, dst, channel, later_blocks())
    taken = _wait_for_slot(ctx.guard, slot, 0, record)  # explore: put-wait
    if taken:  # explore: put
        st_release_sys_u32(slot, 1)
    return taken


@device_function
def take(ctx: Any, src: int, channel: int, operation: int) -> bool:
    """Wait as :func:`wait_signal`, with the number of the operation that it is for."""
    slot = _slot(ctx, ctx.rank, channel, src)
    record = wait_record(operation, ctx.rank, src, channel, later_blocks())
    arrived = _wait_for_slot(ctx.guard, slot, 1, record)  # explore: take-wait
    if arrived:  # explore: take
        st_release_sys_u32(slot, 0)
    return arrived


@device_function
def put_signal(ctx: Any, dst: int, channel: int) -> bool:
    """Wait until the slot of ``channel`` at ``dst`` is empty; then signal ``dst``.

    One thread calls it. Earlier writes of this thread, and of threads with which it has
    synchronized (``syncthreads``), are visible to the thread that waits for the signal
    (release). ``channel`` is 0 to 127. GPUs check ``channel`` and ``dst`` only in debug
    mode.

    Returns:
        False if the deadline has passed, or another rank has failed.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     symm.put_signal(ctx, 0, 2)
        ...     old[0] = symm.wait_signal(ctx, 0, 2)
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        1
    """
    return put(ctx, dst, channel, PUT_SIGNAL)


@device_function
def wait_signal(ctx: Any, src: int, channel: int) -> bool:
    """Wait for rank ``src``'s signal on ``channel``, and then reset the slot.

    One thread calls it, and then sees what ``src`` wrote before the signal (acquire).
    After a ``syncthreads``, all threads of its block see this, too. ``channel`` is 0 to
    127. GPUs check ``channel`` and ``src`` only in debug mode.

    Returns:
        False if the deadline has passed, or another rank has failed.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     if cuda.blockIdx.x == 0:
        ...         old[0] = symm.wait_signal(ctx, 0, 2)
        ...     else:
        ...         symm.put_signal(ctx, 0, 2)
        >>> kernel[2, 1](ctx, old)
        >>> int(old[0])
        1
    """
    return take(ctx, src, channel, WAIT_SIGNAL)


@device_function
def peer_address(ctx: Any, rank: int) -> int:
    """Return the address of rank ``rank``'s buffer in this process.

    Any thread may call it. GPUs check the rank only in debug mode.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     symm.st_u64(symm.peer_address(ctx, 0) + 8, 5)
        ...     old[0] = symm.ld_u64(symm.peer_address(ctx, 0) + 8)
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        5
    """
    check_peer(ctx, rank)
    return ctx.buffers[rank]  # type: ignore[no-any-return]


@array_function
def peer_array(ctx: Any, rank: int, shape: Any, dtype: Any) -> Any:
    """Return rank ``rank``'s buffer as a C-contiguous array.

    Numba's ``cuda.atomic`` is atomic only among the threads of one GPU. On a peer's
    array, or on an array that a peer changes at the same time, ``cuda.atomic`` loses
    updates. Call :func:`atomic_add` and the other atomic operations of this module
    instead.

    Args:
        ctx: the memory's context.
        rank: the rank of the buffer.
        shape: an int or a tuple of ints. GPUs check only in debug mode that the array
            fits into the buffer.
        dtype: a NumPy scalar type, such as ``np.float32``, or of ``ml_dtypes``:
            ``bfloat16``, and the 8-bit floats ``float8_e4m3fn`` and ``float8_e5m2``. A
            loaded 8-bit float is a float32, and needs compute capability 8.9 on a GPU.
            Convert a loaded bfloat16 with ``np.float32`` before computing.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, (2, 3), np.float32)
        ...     there[1, 2] = 7
        ...     old[0] = there[1, 2]
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        7
    """
    check_peer(ctx, rank)
    check_buffer(ctx, shape, dtype)
    return array_at(ctx.buffers[rank], shape, dtype)
