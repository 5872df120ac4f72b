"""Packets of the LL protocol: the wait for them, and copies with them.

A vector of 16 bytes is two packets. Each has 8 bytes of data and, beside each 4 of
them, the epoch. So no flag or fence is needed: a packet shows by itself that it has
arrived, with its data. Only accesses of up to 8 bytes are assumed to be atomic.

Source: the LL protocol of NCCL and of MSCCL++ (``LLPacket``).

Copies with packets, for a short latency: ``put_packets`` and ``get_packets``.

A packet contains 4 bytes of data and a number that follows from the epoch, and arrives
as a whole (``packets.py``). So the receiver waits for the data itself, and there is
neither a flag nor a fence. A mailbox is a row of packets in the receiver's memory, and
each epoch of it is one copy.

Memory order. The sender stores epoch *e* into a mailbox after the receiver has read the
previous packets. The receiver reports that with ``signal_set`` (release), after all its
threads have read, and the sender waits for it with ``wait_until`` (acquire). This
signal is the credit. If epochs use several mailboxes alternately, the sender may be as
many epochs ahead, so no copy waits for a credit in transit. A packet of another epoch
has not arrived, so mailboxes need not be emptied.

Numbers repeat after 2**31 epochs. Meanwhile, short copies leave the mailbox's later
packets as they are. So in the last ``_WIPING`` epochs before the numbers repeat, the
receiver clears all packets of the mailbox beyond its copy, with relaxed stores. Its
report orders these stores before the sender's next ones, like the loads of the copy: no
further fence is needed. The functions see one epoch at a time, and not which ones use a
mailbox. So a program must use a mailbox again within ``_WIPING // 2`` epochs. Then
between two epochs with the same number, at least one clears the mailbox: if both are
among the last ``_WIPING``, one after the first of them, or one before the second.

A receiver that finds a later epoch than it waits for reports that the sender did not
wait for the credit.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_symm.device.checks import check_mailbox, check_peer
from numba_symm.device.intrinsics import (
    block_size,
    device_function,
    grid_index,
    ld_any_u8,
    ld_any_u16,
    ld_any_u32,
    ld_any_u64,
    ld_relaxed_sys_v2_u64,
    mailbox_of,
    st_any_u8,
    st_any_u16,
    st_any_u32,
    st_any_u64,
    st_relaxed_sys_v2_u64,
    syncthreads_or,
    thread_index,
    views_of,
    warp_or,
    word_of,
)
from numba_symm.device.polling import (
    fail,
    is_time_to_check,
    must_give_up,
    pause,
    since,
    wait_record,
)
from numba_symm.device.puts import lane_index, place_of, warp_size
from numba_symm.launch.failures import GET_PACKETS, OVERWRITTEN

_LOW = 0xFFFFFFFF


@device_function
def post_packets(box: int, stride: int, low: int, high: int, epoch: int) -> None:
    """Send a vector as two packets, ``stride`` bytes apart."""
    flag = word_of(epoch << 32)
    first, second = (low & _LOW) | flag, (low >> 32 & _LOW) | flag
    st_relaxed_sys_v2_u64(box, (first, second))
    third, fourth = (high & _LOW) | flag, (high >> 32 & _LOW) | flag
    st_relaxed_sys_v2_u64(box + stride, (third, fourth))


@device_function
def peek_packets(box: int, stride: int, epoch: int) -> Any:
    """Return a vector's two words, then 0 if both packets are of that epoch."""
    flag = word_of(epoch << 32)
    first, second = ld_relaxed_sys_v2_u64(box)
    third, fourth = ld_relaxed_sys_v2_u64(box + stride)
    # explore: wrong
    wrong = (first ^ flag) | (second ^ flag) | (third ^ flag) | (fourth ^ flag)
    low = word_of((first & _LOW) | second << 32)
    high = word_of((third & _LOW) | fourth << 32)
    return low, high, wrong >> 32


@functools.cache
def make_poll(size: int, peek: Any, late_rank: Any = None) -> Callable[..., bool]:
    """Return a device function that waits for one vector of each other rank.

    ``(guard, operation, first, rank_stride, epoch, block, low, high, wanted)``. The
    strides are arguments, so that Numba types it once for all protocols. A failure
    names the rank ``late_rank(guard, k)`` for the k-th along the ring; None: of all.
    """
    others = size - 1

    @device_function
    def of_ring(guard: Any, k: int) -> int:
        return (guard.rank + 1 + k) % size  # type: ignore[no-any-return]

    late_rank = late_rank or of_ring

    @device_function
    def poll(
        guard: Any,
        operation: int,
        first: int,
        rank_stride: int,
        epoch: int,
        block: int,
        low: Any,
        high: Any,
        wanted: int,
    ) -> bool:
        polls = 0
        started = 0
        arrived = False
        given_up = False
        while not arrived and not given_up:
            # All mailboxes are loaded before any is compared, because a branch on one
            # would make the next load wait for it.
            missing = 0
            for k in range(others):
                low[k + 1], high[k + 1], gap = peek(first + k * rank_stride, epoch)
                missing |= gap if wanted >> k & 1 != 0 else 0
            arrived = missing == 0
            if not arrived:
                polls = pause(polls)
                if is_time_to_check(polls):
                    started = since(started)
                    late = 0
                    for k in range(others):
                        _, _, gap = peek(first + k * rank_stride, epoch)
                        if gap != 0 and wanted >> k & 1 != 0:
                            late = late_rank(guard, k)
                    record = wait_record(operation, guard.rank, late, block, epoch)
                    given_up = must_give_up(guard, started, record)
        return arrived

    return poll


_VECTOR = 16
_PACKETS = 32
"""The bytes of a vector's packets."""

_WIPING = 2**24
"""The epochs in which receivers clear mailboxes: half a minute of an hour, if each
takes 2 us. A power of two."""
_LAST = 2**31 - _WIPING
"""The bits that all these epochs have, and no others."""


def mailbox_size(count: int, dtype: Any) -> int:
    """Return the number of uint64 in a mailbox for ``count`` elements.

    The host calls it. In a mailbox, each 4 bytes of data take 8 bytes, and the data is
    padded to a multiple of 16 bytes.

    Example:
        >>> symm.mailbox_size(6, np.float32)
        8
    """
    vectors = -(-count * int(np.dtype(dtype).itemsize) // _VECTOR)
    return vectors * _PACKETS // 8


@device_function
def _unit(layout: Any, size: int, k: int) -> int:
    """Return the address of an array's unit ``k``: an element, or half of one of 16."""
    _, planes, rows, columns, _, _, _ = layout
    halves = 2 if size == 16 else 1
    element = k // halves
    row = element // columns if planes * rows > 1 else 0
    place = place_of(layout, row, element - row * columns)
    return place + 8 * (k - element * halves)


@device_function
def _load(address: int, unit: int) -> int:
    if unit == 1:
        return word_of(ld_any_u8(address))
    if unit == 2:
        return word_of(ld_any_u16(address))
    if unit == 4:
        return word_of(ld_any_u32(address))
    return ld_any_u64(address)


@device_function
def _store(address: int, unit: int, word: int) -> None:
    if unit == 1:
        st_any_u8(address, word & 0xFF)
    elif unit == 2:
        st_any_u16(address, word & 0xFFFF)
    elif unit == 4:
        st_any_u32(address, word & 0xFFFFFFFF)
    else:
        st_any_u64(address, word)


@device_function
def _load_word(layout: Any, size: int, word: int, units: int) -> int:
    """Return 8 bytes of an array, with zeros after its end."""
    unit = min(size, 8)
    value = 0
    for k in range(8 // unit):
        place = word * (8 // unit) + k
        if place < units:
            value |= word_of(_load(_unit(layout, size, place), unit) << (8 * unit * k))
    return value


@device_function
def _store_word(layout: Any, size: int, word: int, units: int, value: int) -> None:
    """Store 8 bytes of an array, and nothing after its end."""
    unit = min(size, 8)
    for k in range(8 // unit):
        place = word * (8 // unit) + k
        if place < units:
            _store(_unit(layout, size, place), unit, value >> (8 * unit * k))


@device_function
def _number(epoch: int) -> int:
    """Return what packets of an epoch contain: never 0, as a cleared one."""
    return word_of(epoch) << 1 | 1  # explore: number


@device_function
def _wipe(mailbox: Any, k: int, epoch: int, lanes: int) -> None:
    """Clear a thread's vectors from its ``k``-th on before numbers repeat."""
    if word_of(epoch) & _LAST == _LAST:  # explore: wipe
        while k < mailbox.size // (_PACKETS // 8):
            box = mailbox_of(mailbox) + _PACKETS * k
            st_relaxed_sys_v2_u64(box, (0, 0))
            st_relaxed_sys_v2_u64(box + _VECTOR, (0, 0))  # explore: wipe-second
            k += lanes


@device_function
def _put(
    ctx: Any, mailbox: Any, source: Any, epoch: int, lane: int, lanes: int
) -> None:
    found = views_of(source, source)
    size, layout = found[0], found[1:8]
    nbytes = size * layout[1] * layout[2] * layout[3]
    check_mailbox(ctx, mailbox, nbytes)
    units, k, number = nbytes // min(size, 8), lane, _number(epoch)
    while k * _VECTOR < nbytes:
        low = _load_word(layout, size, 2 * k, units)
        high = _load_word(layout, size, 2 * k + 1, units)
        post_packets(mailbox_of(mailbox) + _PACKETS * k, _VECTOR, low, high, number)
        k += lanes


@device_function
def _is_overwritten(box: int, number: int) -> bool:
    """Return whether a packet is of a later epoch, and not empty."""
    found: int = ld_relaxed_sys_v2_u64(box)[0] >> 32 & 0xFFFFFFFF
    return found != 0 and 0 < ((found - number) & 0xFFFFFFFF) < 0x80000000


@device_function
def _receive(guard: Any, box: int, number: int, record: int, lost: int) -> Any:
    """Wait for a vector; return its words, and whether it has arrived."""
    polls = 0
    started = 0
    low, high, missing = peek_packets(box, _VECTOR, number)
    while missing != 0:
        polls = pause(polls)
        if is_time_to_check(polls):
            started = since(started)
            if _is_overwritten(box, number):
                fail(guard, lost)
                return low, high, False
            if must_give_up(guard, started, record):
                return low, high, False
        low, high, missing = peek_packets(box, _VECTOR, number)
    return low, high, True


@device_function
def _get(
    ctx: Any, src: int, target: Any, mailbox: Any, epoch: int, lane: int, lanes: int
) -> bool:
    found = views_of(target, target)
    size, layout = found[0], found[1:8]
    nbytes = size * layout[1] * layout[2] * layout[3]
    check_peer(ctx, src)
    check_mailbox(ctx, mailbox, nbytes)
    record = wait_record(GET_PACKETS, ctx.rank, src, grid_index(), epoch)
    lost = wait_record(OVERWRITTEN, ctx.rank, src, grid_index(), epoch)
    units, k, number = nbytes // min(size, 8), lane, _number(epoch)
    arrived = True
    while k * _VECTOR < nbytes and arrived:
        box = mailbox_of(mailbox) + _PACKETS * k
        low, high, arrived = _receive(ctx.guard, box, number, record, lost)
        if arrived:  # explore: received
            _store_word(layout, size, 2 * k, units, low)
            _store_word(layout, size, 2 * k + 1, units, high)
        k += lanes
    if arrived:
        _wipe(mailbox, k, epoch, lanes)
    return arrived


@device_function
def put_packets(ctx: Any, mailbox: Any, source: Any, epoch: int) -> None:
    """Send an array to a peer's mailbox as packets with the calling thread alone.

    One thread calls it. The call orders nothing and waits for nothing. A packet is
    twice as large as its data, and needs no signal. Before the call, wait until the
    peer has read this mailbox's previous epoch: see :func:`put_packets_block`.

    Args:
        ctx: the memory's context.
        mailbox: an array of one dimension of uint64 in the peer's memory, contiguous
            and aligned to 16 bytes, of at least ``mailbox_size(source.size, dtype)``
            elements. GPUs check this only in debug mode. The mailbox is zero at first,
            and only these functions store into it. Each call takes the whole mailbox.
        source: an array of one to three dimensions, in memory of any kind.
        epoch: the number of the copy, from 1 on, counted for this mailbox or for all
            mailboxes that are used in turn. Receivers compare epochs modulo 2**31, and
            clear old packets of a mailbox that is used again within 2**23 epochs.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     box = symm.peer_array(ctx, 0, 4, np.uint64)
        ...     mine = cuda.local.array(1, np.int64)
        ...     mine[0] = 9
        ...     symm.put_packets(ctx, box, mine, 1)
        ...     symm.get_packets(ctx, 0, old, box, 1)
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        9
    """
    _put(ctx, mailbox, source, epoch, 0, 1)


@device_function
def put_packets_warp(ctx: Any, mailbox: Any, source: Any, epoch: int) -> None:
    """Send an array to a peer's mailbox as packets with all threads of a warp.

    Every thread of the warp calls it with the same arguments, those of
    :func:`put_packets`. Before the call, call ``cuda.syncwarp()`` if other threads
    wrote the source.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     box = symm.peer_array(ctx, 0, 4, np.uint64)
        ...     mine = cuda.shared.array(2, np.int64)
        ...     mine[cuda.threadIdx.x] = cuda.threadIdx.x
        ...     cuda.syncthreads()
        ...     symm.put_packets_warp(ctx, box, mine, 1)
        ...     symm.get_packets_warp(ctx, 0, mine, box, 1)
        ...     old[0] = mine[1]
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    _put(ctx, mailbox, source, epoch, lane_index(), warp_size())


@device_function
def put_packets_block(ctx: Any, mailbox: Any, source: Any, epoch: int) -> None:
    """Send an array to a peer's mailbox as packets with all threads of a block.

    Every thread of the block calls it with the same arguments, those of
    :func:`put_packets`. Before the call, call ``syncthreads`` if other threads wrote
    the source. The call is fastest if each thread sends at most 16 bytes.

    The example uses two mailboxes in turn. So before the sender sends epoch *e*, the
    receiver must have read epoch *e* - 2. The receiver reports what it has read with a
    signal that counts.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     boxes = symm.peer_array(ctx, 0, (2, 4), np.uint64)
        ...     mine = cuda.shared.array(2, np.int64)
        ...     for epoch in range(1, 6):
        ...         if cuda.threadIdx.x == 0:  # the credit
        ...             symm.wait_until(ctx, 0, 5, symm.GE, epoch - 2)
        ...         mine[cuda.threadIdx.x] = epoch
        ...         cuda.syncthreads()
        ...         symm.put_packets_block(ctx, boxes[epoch % 2], mine, epoch)
        ...         symm.get_packets_block(ctx, 0, mine, boxes[epoch % 2], epoch)
        ...         if cuda.threadIdx.x == 0:  # all threads have read
        ...             symm.signal_set(ctx, 0, 5, epoch)
        ...     old[0] = mine[1]
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        5
    """
    _put(ctx, mailbox, source, epoch, thread_index(), block_size())


@device_function
def get_packets(ctx: Any, src: int, target: Any, mailbox: Any, epoch: int) -> bool:
    """Wait for packets in this rank's mailbox, and store their data in an array.

    One thread calls it. The call acquires nothing but this data, and polls this rank's
    memory.

    Args:
        ctx: the memory's context.
        src: the rank that sends; only used for the text of a failure.
        target: an array of one to three dimensions, in memory of any kind. The number
            and size of its elements are those of the sender's array.
        mailbox: the mailbox in this rank's memory, as for :func:`put_packets`. The call
            may clear the packets after those of the target.
        epoch: the epoch that the sender passed.

    Returns:
        False if the deadline has passed, a rank has failed, or the sender has
        overwritten the packets. A part of the target may have been stored nonetheless.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     box = symm.peer_array(ctx, 0, 4, np.uint64)
        ...     if cuda.blockIdx.x == 0:
        ...         symm.get_packets(ctx, 0, old, box, 7)
        ...     else:
        ...         mine = cuda.local.array(1, np.int64)
        ...         mine[0] = 9
        ...         symm.put_packets(ctx, box, mine, 7)
        >>> kernel[2, 1](ctx, old)
        >>> int(old[0])
        9
    """
    return _get(ctx, src, target, mailbox, epoch, 0, 1)


@device_function
def get_packets_warp(ctx: Any, src: int, target: Any, mailbox: Any, epoch: int) -> bool:
    """Wait for packets, as :func:`get_packets`, with all threads of a whole warp.

    Every thread of the warp calls it with the same arguments. After the call, all these
    threads see the target, and any of them may report that the mailbox was read.

    Returns:
        As :func:`get_packets`; the same in all threads of the warp.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     box = symm.peer_array(ctx, 0, 4, np.uint64)
        ...     mine = cuda.shared.array(2, np.int64)
        ...     mine[cuda.threadIdx.x] = 1 + cuda.threadIdx.x
        ...     cuda.syncthreads()
        ...     symm.put_packets_warp(ctx, box, mine, 1)
        ...     old[0] = symm.get_packets_warp(ctx, 0, mine, box, 1)
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    lane = lane_index()
    arrived = _get(ctx, src, target, mailbox, epoch, lane, warp_size())
    # All threads have read their packets and stored their data.
    return not warp_or(not arrived)


@device_function
def get_packets_block(
    ctx: Any, src: int, target: Any, mailbox: Any, epoch: int
) -> bool:
    """Wait for packets, as :func:`get_packets`, with all threads of a block.

    Every thread of the block calls it with the same arguments. After the call, all
    these threads see the target, and any of them may report that the mailbox was read:
    see :func:`put_packets_block`.

    Returns:
        As :func:`get_packets`; the same in all threads of the block.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     box = symm.peer_array(ctx, 0, 4, np.uint64)
        ...     mine = cuda.shared.array(2, np.int64)
        ...     mine[cuda.threadIdx.x] = 1 + cuda.threadIdx.x
        ...     cuda.syncthreads()
        ...     symm.put_packets_block(ctx, box, mine, 1)
        ...     old[0] = symm.get_packets_block(ctx, 0, mine, box, 1)
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    thread = thread_index()
    arrived = _get(ctx, src, target, mailbox, epoch, thread, block_size())
    # All threads have read their packets and stored their data.
    return not syncthreads_or(not arrived)  # explore: all-received
