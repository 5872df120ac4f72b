"""Signals between GPUs, callable from any kernel: slots, and words that count.

A signal pad has one ``uint32`` slot for each channel and source rank. What belongs to
a channel is together, so no address depends on the number of channels. A slot is a
mailbox with one writer on each side, so no atomic operation is needed. The sender waits
for 0 and stores 1, and the receiver waits for 1 and stores 0. Each signal returns its
slot to 0, so a captured graph can be replayed. The 0 shows that the signal was taken,
not that any data was read. Each channel of a pair of ranks has one user at a time.

Every wait has a deadline: see ``polling.py``.

Signals that count: a 64-bit word for each channel and source rank.

A channel's words precede its slots, and follow two words for barriers of grids. Only
the source rank adds to a word or sets it, and the owner of the pad reads it. So the
next launch continues with the last value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numba_symm.device.checks import (
    check_buffer,
    check_comparison,
    check_peer,
    check_slot,
)
from numba_symm.device.intrinsics import (
    array_at,
    array_function,
    atomic_add,
    block_size,
    device_function,
    later_blocks,
    ld_acquire_sys_u32,
    ld_acquire_sys_u64,
    st_release_sys_u32,
    st_release_sys_u64,
    syncthreads,
    syncthreads_or,
    thread_index,
    word_address,
    word_kind,
)
from numba_symm.device.polling import Guard, make_wait, wait_record
from numba_symm.device.puts import put_block
from numba_symm.device.teams import Team
from numba_symm.launch.failures import PUT_SIGNAL, WAIT_SIGNAL, WAIT_UNTIL, WAIT_WORD

CHANNELS = 128
"""The channels of a pad for which a program does not ask for another number."""


class _ContextFields(NamedTuple):
    rank: int
    size: int
    buffers: tuple[int, ...]
    pads: tuple[int, ...]
    guard: Guard


class Context(_ContextFields):
    """The symmetric memory that a kernel accesses, passed as an ordinary argument.

    Numba passes a context to kernels as a named tuple. The last four attributes are for
    the host only. ``SymmetricMemory.ctx`` keeps the memory alive, as an array does.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        buffers: the address of every rank's buffer in this process.
        pads: the address of every rank's signal pad in this process.
        guard: the timeout, and the address to which a kernel reports a failure.
        owner: the object that keeps the memory alive.
        buffer_size: the bytes of a buffer; None if they are unknown.
        channels: the number of channels of a pad.
        check_mapped: a function that the simulator's device functions call before an
            access. It raises ClosedError if the memory was unmapped, because the access
            would end the process. None: the memory is never unmapped.
    """

    owner: Any = None
    buffer_size: int | None = None
    channels: int = CHANNELS
    check_mapped: Callable[[], None] | None = None
    checked = False  # by device functions on GPUs, see ``checks.py``


class CheckedContext(Context):
    """A context in debug mode: device functions check their arguments on GPUs, too.

    Attributes:
        nbytes: the bytes of a buffer, for kernels.
        pad_channels: the number of channels of a pad, for kernels.
    """

    _fields: Any = (*_ContextFields._fields, "nbytes", "pad_channels")
    checked = True

    def __new__(cls, *values: Any) -> "CheckedContext":
        """Return the context of the fields' values."""
        return tuple.__new__(cls, values)


@device_function
def _slot_holds(slot: int, value: int) -> bool:
    return ld_acquire_sys_u32(slot) == value  # explore: await-slot


_wait_for_slot = make_wait(_slot_holds)


@device_function
def channel_stride(size: int) -> int:
    """Return the bytes of a channel of a pad for so many ranks."""
    return (12 * size + 23) // 8 * 8


@device_function
def word_offset(size: int, channel: int, source: int) -> int:
    """Return the offset in a pad of a channel's word of a source."""
    return channel_stride(size) * channel + 16 + 8 * source


@device_function
def slot_offset(size: int, channel: int, source: int) -> int:
    """Return the offset in a pad of a channel's slot of a source."""
    return word_offset(size, channel, size) + 4 * source


@device_function
def _slot(ctx: Any, owner: int, channel: int, source: int) -> int:
    """Return the address of a slot of rank ``owner``'s pad."""
    check_slot(ctx, owner, channel, source)
    return ctx.pads[owner] + slot_offset(ctx.size, channel, source)  # type: ignore[no-any-return]


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
    (release). GPUs check ``channel`` and ``dst`` only in debug
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
    After a ``syncthreads``, all threads of its block see this, too. GPUs check
    ``channel`` and ``src`` only in debug mode.

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


EQ, NE, GT, GE, LT, LE = range(6)
"""Comparisons of a word with a value: equal, not equal, greater, and so on."""

INT64, INT32, UINT32 = range(3)
"""Kinds of words; a word of uint64 is compared as int64."""


@device_function
def _compares(word: int, comparison: int, value: int) -> bool:
    if comparison == EQ:
        return word == value
    if comparison == NE:
        return word != value
    if comparison == GT:
        return word > value
    if comparison == GE:
        return word >= value
    if comparison == LT:
        return word < value
    return word <= value


@device_function
def _count_holds(address: int, wanted: Any) -> bool:
    word = ld_acquire_sys_u64(address)  # explore: load-count
    return _compares(word, wanted[0], wanted[1])


@device_function
def _word_holds(address: int, wanted: Any) -> bool:
    word: Any
    if wanted[2] == INT64:
        word = ld_acquire_sys_u64(address)
    else:
        word = np.int64(ld_acquire_sys_u32(address))
        if wanted[2] == INT32:
            word -= (word >> 31) << 32
    return _compares(word, wanted[0], wanted[1])


_wait_for_count = make_wait(_count_holds)
_wait_for_word = make_wait(_word_holds)


@device_function
def _count(ctx: Any, owner: int, channel: int, source: int) -> int:
    """Return the address of a word of rank ``owner``'s pad."""
    check_slot(ctx, owner, channel, source)
    return ctx.pads[owner] + word_offset(ctx.size, channel, source)  # type: ignore[no-any-return]


@device_function
def signal_add(ctx: Any, dst: int, channel: int, value: int) -> None:
    """Add ``value`` to this rank's word of ``channel`` at rank ``dst``.

    Any thread may call it, also several threads simultaneously. Earlier writes of this
    thread, and of threads with which it has synchronized, are visible to a thread that
    waits for the value (release). The call waits for no peer. The call takes as long as
    a :func:`put_signal` that finds its slot empty, and needs atomic operations over the
    link between the GPUs.

    Args:
        ctx: the memory's context.
        dst: the rank to signal; may be this rank.
        channel: a channel of the pad; GPUs check it only in debug mode.
        value: what to add to the word, an int64.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx):
        ...     symm.signal_add(ctx, 0, 5, 2)
        ...     symm.signal_add(ctx, 0, 5, 3)
        ...     symm.wait_until(ctx, 0, 5, symm.EQ, 5)
        >>> kernel[1, 1](ctx)
    """
    word = array_at(_count(ctx, dst, channel, ctx.rank), 1, np.int64)
    atomic_add(word, 0, value, order="release")  # explore: signal-add


@device_function
def signal_set(ctx: Any, dst: int, channel: int, value: int) -> None:
    """Set this rank's word of ``channel`` at rank ``dst``.

    One thread calls it. Memory order, errors and arguments are those of
    :func:`signal_add`. The call is a store, so it needs no atomic operations over the
    link.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     symm.signal_set(ctx, 0, 5, -7)
        ...     old[0] = symm.signal_read(ctx, 0, 5)
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        -7
    """
    st_release_sys_u64(_count(ctx, dst, channel, ctx.rank), value)  # explore: set


@device_function
def signal_read(ctx: Any, src: int, channel: int) -> int:
    """Return rank ``src``'s word of ``channel`` at this rank.

    Any thread may call it, and then sees what ``src`` wrote before the value (acquire).
    The call is a load of this rank's own memory.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     old[0] = symm.signal_read(ctx, 0, 127)
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        0
    """
    return ld_acquire_sys_u64(_count(ctx, ctx.rank, channel, src))


@device_function
def test(ctx: Any, src: int, channel: int, comparison: int, value: int) -> bool:
    """Return whether ``src``'s word of ``channel`` satisfies a comparison.

    The call does not wait. Its arguments and memory order are those of
    :func:`wait_until`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     old[0] = symm.test(ctx, 0, 5, symm.GE, 1)
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        0
    """
    check_comparison(ctx, comparison)
    wanted = (np.int64(comparison), np.int64(value))
    return _count_holds(_count(ctx, ctx.rank, channel, src), wanted)


@device_function
def wait_until(ctx: Any, src: int, channel: int, comparison: int, value: int) -> bool:
    """Wait until ``src``'s word of ``channel`` satisfies a comparison with ``value``.

    One thread calls it, and then sees what ``src`` wrote before the word's value
    (acquire). After a ``syncthreads``, all threads of its block see this, too. The call
    polls this rank's own memory.

    Args:
        ctx: the memory's context.
        src: the rank that signals; may be this rank.
        channel: a channel of the pad; GPUs check it only in debug mode.
        comparison: ``EQ``, ``NE``, ``GT``, ``GE``, ``LT`` or ``LE``. A count may
            already exceed ``value``, so use ``GE`` for counts that grow.
        value: the value to compare with, an int64.

    Returns:
        False if the deadline has passed, or another rank has failed.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     if cuda.blockIdx.x == 0:
        ...         old[0] = symm.wait_until(ctx, 0, 5, symm.GE, 2)
        ...     else:
        ...         symm.signal_add(ctx, 0, 5, 2)
        >>> kernel[2, 1](ctx, old)
        >>> int(old[0])
        1
    """
    check_comparison(ctx, comparison)
    address = _count(ctx, ctx.rank, channel, src)
    record = wait_record(WAIT_UNTIL, ctx.rank, src, channel, later_blocks())
    wanted = (np.int64(comparison), np.int64(value))
    return _wait_for_count(ctx.guard, address, wanted, record)


@device_function
def wait_until_at(
    ctx: Any, array: Any, index: Any, comparison: int, value: int
) -> bool:
    """Wait until an array's element satisfies a comparison with ``value``.

    One thread calls it. The call acquires, so the other rank should store the element
    with a release (``st_release_sys_…``, or an atomic operation). Wait for elements in
    this rank's memory: polls of a peer's memory occupy the link.

    Args:
        ctx: a context of the communicator, for the deadline.
        array: an array of int32, uint32, int64 or uint64; uint64 is compared as int64.
        index: an int, or a tuple of ints. GPUs do not check it.
        comparison: ``EQ``, ``NE``, ``GT``, ``GE``, ``LT`` or ``LE``.
        value: the value to compare with.

    Returns:
        False if the deadline has passed, or another rank has failed.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     words = symm.peer_array(ctx, 0, 4, np.int32)
        ...     if cuda.blockIdx.x == 0:
        ...         old[0] = symm.wait_until_at(ctx, words, 3, symm.LT, 0)
        ...     else:
        ...         symm.atomic_add(words, 3, -1, order="release")
        >>> kernel[2, 1](ctx, old)
        >>> int(old[0])
        1
    """
    check_comparison(ctx, comparison)
    address = word_address(array, index)
    record = wait_record(WAIT_WORD, ctx.rank, ctx.rank, 0, later_blocks())
    wanted = (np.int64(comparison), np.int64(value), np.int64(word_kind(array)))
    return _wait_for_word(ctx.guard, address, wanted, record)


def length_of(ctx: Any, values: Any) -> int:
    """Return how many values there are, in the simulator; see :func:`item_of`."""
    if values is None:
        return len(ctx.pads) - 1
    values = values.ranks if isinstance(values, Team) else values
    return len(values) if isinstance(values, tuple) else 1


def item_of(ctx: Any, values: Any, place: int) -> int:
    """Return one of several values, in the simulator; ``gpu_collectives.py`` has more.

    Args:
        ctx: a context.
        values: a tuple; an int, which is all values; None, for the other ranks; or a
            :class:`Team`, for its ranks, with -1 in this rank's place.
        place: which one.
    """
    if values is None:
        return (ctx.rank + 1 + place) % len(ctx.pads)  # type: ignore[no-any-return]
    if isinstance(values, Team):
        rank = values.ranks[place]
        return -1 if rank == ctx.rank else rank
    return values[place] if isinstance(values, tuple) else values  # type: ignore[no-any-return]


@device_function
def wait_signal_block(ctx: Any, src: Any, channel: Any, mask: int = -1) -> bool:
    """Wait for signals from one rank or from several, and reset their slots.

    All threads of a block call it. All of them then see what the ranks wrote before
    their signals, or all return False. Each thread waits for other ranks than the other
    threads, so the call takes as long as the latest signal.

    Args:
        ctx: the memory's context.
        src: a rank; a tuple of ranks, of which negative ones stand for no rank; a
            :class:`Team`, for its ranks other than this one; or None, for all other
            ranks.
        channel: the channel of all signals, or a tuple with one for each place of
            ``src``.
        mask: the ranks of ``src`` to wait for: rank r is one of them if bit r is set.

    Returns:
        False, in all threads of the block, if the deadline has passed or a rank has
        failed. After that, store nothing that a peer may read.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     if cuda.threadIdx.x == 0:
        ...         symm.put_signal(ctx, 0, 2)
        ...     old[0] = symm.wait_signal_block(ctx, (0, -1), 2)
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    place = thread_index()
    threads = block_size()
    arrived = True
    while place < length_of(ctx, src) and arrived:
        rank = item_of(ctx, src, place)
        if rank >= 0 and mask >> rank & 1 != 0:
            # explore: wait-each
            arrived = wait_signal(ctx, rank, item_of(ctx, channel, place))
        place += threads
    # The peers' writes, acquired by one thread each, become visible to all.
    return not syncthreads_or(not arrived)  # explore: agree


@device_function
def wait_until_block(
    ctx: Any, src: Any, channel: Any, comparison: int, value: Any, mask: int = -1
) -> bool:
    """Wait until the words of one rank or of several satisfy a comparison.

    All threads of a block call it. All of them then see what the ranks wrote before
    their words' values, or all return False. Each thread waits for other ranks than the
    other threads.

    Args:
        ctx: the memory's context.
        src: as for :func:`wait_signal_block`.
        channel: the channel of all words, or a tuple with one for each place of
            ``src``.
        comparison: as for :func:`wait_until`.
        value: the value to compare all words with, or a tuple in the same way.
        mask: as for :func:`wait_signal_block`.

    Returns:
        As :func:`wait_signal_block`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     if cuda.threadIdx.x == 0:
        ...         symm.signal_set(ctx, 0, 5, 2)
        ...         symm.signal_set(ctx, 0, 6, 3)
        ...     old[0] = symm.wait_until_block(ctx, (0, 0), (5, 6), symm.GE, (2, 3))
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    place = thread_index()
    threads = block_size()
    arrived = True
    while place < length_of(ctx, src) and arrived:
        rank = item_of(ctx, src, place)
        if rank >= 0 and mask >> rank & 1 != 0:
            at, wanted = item_of(ctx, channel, place), item_of(ctx, value, place)
            # explore: until-each
            arrived = wait_until(ctx, rank, at, comparison, wanted)
        place += threads
    # As in wait_signal_block.
    return not syncthreads_or(not arrived)  # explore: until-agree


@device_function
def put_with_signal(
    ctx: Any, dst: int, channel: int, target: Any, source: Any, value: int
) -> None:
    """Copy an array into a peer's array, then add ``value`` to this rank's word there.

    All threads of a block call it. The copy, and what these threads wrote before, are
    visible to the thread of ``dst`` that waits for the value. The call waits for no
    peer: before it overwrites data, wait until ``dst`` has read that data.

    Args:
        ctx: the memory's context.
        dst: the rank of ``target``.
        channel: a channel of the pad, as in :func:`signal_add`.
        target: an array in ``dst``'s memory.
        source: an array of the same shape and dtype; both as for :func:`put_block`.
        value: what to add to the word, an int64.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, 4, np.int64)
        ...     there[0] = 9
        ...     symm.put_with_signal(ctx, 0, 5, there[2:], there[:2], 1)
        ...     symm.wait_until(ctx, 0, 5, symm.GE, 1)
        ...     old[0] = there[2]
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        9
    """
    put_block(ctx, target, source)
    # The copies of all threads come before the release of the signal.
    syncthreads()  # explore: copied
    if thread_index() == 0:
        signal_add(ctx, dst, channel, value)
