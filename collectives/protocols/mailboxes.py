"""Mailboxes: how vectors of 16 bytes reach a peer's waiting thread without a barrier.

A thread has a mailbox in every peer's workspace for each half and tile. The data itself
shows that it has arrived, in one of three ways:

``sentinel``: the word of 64 one bits means "empty". As floats of any width, it contains
NaNs only. A sender clears the top bit of such a word, which leaves NaNs: every number
keeps its bits. The sender continues with the changed word, so that all ranks have the
same bits of a NaN, too. After reading, the receiver stores the ones again. This way is
for floats only, because for integers, every bit pattern is a value.

``marked``: the same, but a word of 64 one bits is sent as zeros. A word of 4 bytes
beside each vector marks which of its two words were ones. If all bits of the marks are
ones, the marks have not arrived. Every type arrives with all its bits, at a quarter
more traffic. The address of the marks follows from the calling thread's index, which is
that of its mailbox.

``ll``: packets with a flag, the epoch, beside each 4 bytes of data. This way is for
every type, with twice the traffic, but without a store by the receiver. Epochs are 32
bits wide and overflow. A mailbox that only large messages use could then hold a packet
of the same epoch from 2**32 epochs ago. So the last two epochs each clear their half.

Only accesses of up to 8 bytes are assumed to be atomic, as in PTX's memory model for
each element of a vector. So a vector and its marks may arrive in any order, and each of
their words shows by itself whether it has arrived.

Memory order. A mailbox belongs to (block, half, source, tile, thread); its half is the
epoch's parity. In every epoch of a block, its thread 0 exchanges with every peer, in
both directions. A rank posts epoch k+2 into the half of epoch k only after it has
received epoch k+1 from every peer. A peer posts epoch k+1 only after all threads of its
block have read epoch k and stored the ones again. Either a kernel ends in between, or
``between_epochs`` ensures the same order. So two halves suffice, however few of the
other threads post. (A thread that receives from fewer ranks than thread 0 relies on
what thread 0 has received. In a kernel with such threads and several epochs, thread 0
also executes a fence before ``between_epochs``.)

After a failure. A thread that gives up clears nothing, posts nothing and stores no
result. Its block agrees on that between epochs (``between_epochs``) and at the end of
the call (``workspace.keep``), and posts nothing in any later epoch or call. Until then,
the block's other threads continue with vectors that they have received: what they post
and store is right. An agreement within an epoch would cost a barrier of the block.

Source: the LL protocol of NCCL and of MSCCL++ (``LLPacket``); the Lamport protocol of
TensorRT-LLM.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.collectives.protocols.binding import Endpoint, most_blocks
from numba_symm.collectives.protocols.workspace import (
    HELD,
    MARK,
    THREADS,
    TILE_BYTES,
    VECTOR,
    Protocol,
    Region,
    divide_up,
    sync_block_or,
)
from numba_symm.device.intrinsics import (
    device_function,
    fence_acq_rel_sys,
    ld_relaxed_sys_u32,
    ld_relaxed_sys_v2_u64,
    st_relaxed_sys_u32,
    st_relaxed_sys_v2_u64,
    thread_index_x,
    word_of,
)
from numba_symm.device.order import make_mirror
from numba_symm.device.packets import make_poll, peek_packets, post_packets

EMPTY = -1
"""A word of an empty mailbox."""

UNMARKED = 0xFFFFFFFF
"""The marks of an empty mailbox."""

LAST_EPOCH = 2**32 - 2  # explore: last-epoch
"""The epoch after which 1 follows: even, so that halves continue to alternate."""

_NOT_THE_TOP_BIT = 0x7FFFFFFFFFFFFFFF


class Transport(NamedTuple):
    """One way of filling mailboxes.

    Attributes:
        weight: of its kernels, see ``binding.make_kernel``.
        sent: ``(low, high)`` returns a vector as it arrives.
        post: ``(box, low, high, epoch)`` sends a vector.
        peek: ``(box, epoch)`` returns ``low, high, missing``.
        clear: ``(box)`` makes a mailbox that was read ready for the next vector.
        wipe: ``(box)`` does so when the epochs overflow; None: nothing to do.
        floats: whether it is for floats only, of which it changes some NaNs.
    """

    weight: int
    sent: Callable[[int, int], Any]
    post: Callable[[int, int, int, int], None]
    peek: Callable[[int, int], Any]
    clear: Callable[[int], None]
    wipe: Any
    floats: bool = False


@device_function
def _sent_sentinel(low: int, high: int) -> Any:  # explore: sent
    if low == EMPTY:
        low = low & _NOT_THE_TOP_BIT
    if high == EMPTY:
        high = high & _NOT_THE_TOP_BIT
    return low, high


@device_function
def _post_sentinel(box: int, low: int, high: int, epoch: int) -> None:
    st_relaxed_sys_v2_u64(box, _sent_sentinel(low, high))


@device_function
def _peek_sentinel(box: int, epoch: int) -> Any:
    low, high = ld_relaxed_sys_v2_u64(box)
    return low, high, word_of((low == EMPTY) | (high == EMPTY))  # explore: empty


@device_function
def _clear_sentinel(box: int) -> None:
    st_relaxed_sys_v2_u64(box, (EMPTY, EMPTY))


@device_function
def _sent_as_it_is(low: int, high: int) -> Any:
    return low, high


@device_function
def marks_of(box: int) -> int:
    """Return the address of the marks of this thread's vector."""
    return box + TILE_BYTES - (VECTOR - MARK) * thread_index_x()  # explore: marks


@device_function
# explore: post-marked
def _post_marked(box: int, first: int, second: int, epoch: int) -> None:
    marks = 0
    if first == EMPTY:
        first = 0
        marks = 1
    if second == EMPTY:
        second = 0
        marks += 2
    st_relaxed_sys_v2_u64(box, (first, second))
    st_relaxed_sys_u32(marks_of(box), marks)


@device_function
def _peek_marked(box: int, epoch: int) -> Any:
    first, second = ld_relaxed_sys_v2_u64(box)
    marks = ld_relaxed_sys_u32(marks_of(box)) & UNMARKED
    unmarked = marks == UNMARKED
    # explore: missing
    missing = word_of((first == EMPTY) | (second == EMPTY) | unmarked)
    if marks & 1 != 0:
        first = EMPTY
    if marks & 2 != 0:
        second = EMPTY
    return first, second, missing


@device_function
def _clear_marked(box: int) -> None:
    st_relaxed_sys_v2_u64(box, (EMPTY, EMPTY))
    st_relaxed_sys_u32(marks_of(box), UNMARKED)  # explore: unmark


@device_function
def _post_ll(box: int, low: int, high: int, epoch: int) -> None:
    post_packets(box, TILE_BYTES, low, high, epoch)


@device_function
def _peek_ll(box: int, epoch: int) -> Any:
    return peek_packets(box, TILE_BYTES, epoch)


@device_function
def _clear_ll(box: int) -> None:
    pass


@device_function
def _wipe_ll(box: int) -> None:
    st_relaxed_sys_v2_u64(box, (0, 0))
    st_relaxed_sys_v2_u64(box + TILE_BYTES, (0, 0))  # explore: wipe-second


TRANSPORTS = {
    "sentinel": Transport(
        1,
        _sent_sentinel,
        _post_sentinel,
        _peek_sentinel,
        _clear_sentinel,
        None,
        floats=True,
    ),
    "marked": Transport(
        1, _sent_as_it_is, _post_marked, _peek_marked, _clear_marked, None
    ),
    "ll": Transport(2, _sent_as_it_is, _post_ll, _peek_ll, _clear_ll, _wipe_ll),
}
"""The ways of filling mailboxes, by name."""


def mailed_grid(
    end: Endpoint, transport: str, protocol: Protocol, vectors: int, heavier: int = 1
) -> tuple[int, int]:
    """Return the grid of a call of so many vectors, and the tiles of its kernel.

    All threads have the same number of vectors, as far as possible. The kernel's weight
    (``binding.make_kernel``) is ``heavier`` times the transport's.
    """
    weight = heavier * TRANSPORTS[transport].weight
    tiles = divide_up(vectors, THREADS)
    most = max(1, min(end.max_blocks // weight, protocol.most(end.size)))
    most = most_blocks(end, most, HELD // weight, tiles)
    grid = divide_up(tiles, divide_up(tiles, most))
    return grid, protocol.needed(vectors, grid, end.size)


class Mailboxes(NamedTuple):
    """Device functions for the mailboxes of one protocol.

    ``k`` counts along the ring (``order.py``).

    Attributes:
        next_epoch: ``(epoch)`` returns the epoch that follows.
        box: ``(block, epoch, set, k, tile, thread)`` returns the offset, in a
            workspace, of the mailbox for the k-th of the ring.
        sent: ``(low, high)`` returns a vector as it arrives. Its sender continues with
            that where all ranks must have the same bits.
        post_one: ``(ring, k, box, low, high, epoch)`` sends a vector to the k-th;
            ``box`` is its mailbox 0.
        receive: ``(guard, box, epoch, block, low, high, wanted)`` waits for a vector
            of the others, from the address of mailbox 0. It fills two local arrays from
            index 1 on, and makes the mailboxes ready for the next vector. It returns
            False if it gave up. Bit k of ``wanted``: whether the k-th of the ring sends
            one.
        wipe: ``(workspace, block, epoch, thread)`` clears a thread's mailboxes of an
            epoch that has ended, when the epochs overflow.
        between_epochs: ``(failed)`` returns whether any thread of the block has failed;
            the whole block calls it between two epochs of a kernel.
    """

    next_epoch: Callable[[int], int]
    box: Callable[..., int]
    sent: Callable[[int, int], Any]
    post_one: Callable[..., None]
    receive: Callable[..., bool]
    wipe: Callable[..., None]
    between_epochs: Callable[[bool], bool]


@functools.cache
def make_mailboxes(
    size: int,
    transport: str,
    region: Region,
    protocol: Protocol,
    sets: int,
    operation: int,
) -> Mailboxes:
    """Return the device functions for a protocol.

    Args:
        size: number of ranks.
        transport: a name of ``TRANSPORTS``.
        region: where the protocol's state lies.
        protocol: how many slots a thread has.
        sets: how many vectors a rank sends to each rank in a tile, one after another.
        operation: the number in ``launch/failures.py`` for a wait that is given up.
    """
    made = _make_of_all(size, transport, region, protocol, sets)
    receive_of = made.receive

    @device_function
    def receive(
        guard: Any,
        first: int,
        epoch: int,
        block: int,
        low: Any,
        high: Any,
        wanted: int,
    ) -> bool:
        return receive_of(guard, operation, first, epoch, block, low, high, wanted)

    return made._replace(receive=receive)


@functools.cache
def _make_of_all(
    size: int, transport: str, region: Region, protocol: Protocol, sets: int
) -> Mailboxes:
    """Return what all operations share; ``receive`` takes theirs after the guard."""
    _, sent, post_to, peek, clear, wipe_box, _ = TRANSPORTS[transport]
    others = size - 1
    mirror = make_mirror(size)
    count = protocol.tiles(size)
    tile_bytes = protocol.tile_bytes
    line = protocol.most(size) * tile_bytes
    rank_stride = count * line  # explore: rank-stride
    set_stride = others * rank_stride
    half_stride = sets * set_stride
    slots = region.slots
    last_epoch = LAST_EPOCH
    poll = make_poll(size, peek)

    @device_function
    def next_epoch(epoch: int) -> int:
        return 1 if epoch >= last_epoch else epoch + 1

    @device_function
    def box(block: int, epoch: int, which: int, k: int, tile: int, thread: int) -> int:
        # In each tile, the blocks' slots are adjacent, as in the message, so that their
        # stores are spread over all of the memory's channels.
        half = slots + (epoch & 1) * half_stride + which * set_stride  # explore: half
        # explore: tile
        at = k * rank_stride + tile * line + block * tile_bytes + thread * VECTOR
        return half + at

    @device_function
    def post_one(
        ring: Any, k: int, first: int, low: int, high: int, epoch: int
    ) -> None:
        post_to(ring[k] + first + mirror(k) * rank_stride, low, high, epoch)

    @device_function
    def receive_of(
        guard: Any,
        operation: int,
        first: int,
        epoch: int,
        block: int,
        low: Any,
        high: Any,
        wanted: int,
    ) -> bool:
        arrived = poll(
            guard, operation, first, rank_stride, epoch, block, low, high, wanted
        )
        if arrived:  # explore: arrived
            for k in range(others):
                if wanted >> k & 1 != 0:
                    clear(first + k * rank_stride)  # explore: clear
        return arrived

    @device_function
    def keep(own: int, block: int, epoch: int, thread: int) -> None:
        pass

    @device_function
    def wipe(own: int, block: int, epoch: int, thread: int) -> None:
        if epoch >= last_epoch - 1:  # explore: wipe
            for index in range(sets * others * count):
                wipe_box(own + box(block, epoch, 0, 0, index, thread))

    @device_function
    def between_epochs(failed: bool) -> bool:
        # What any thread of the block posts next permits peers to overwrite what the
        # block has read and cleared. So the fence follows the synchronization.
        failed = sync_block_or(failed)  # explore: synchronize
        fence_acq_rel_sys()  # explore: fence
        return failed

    wiping = keep if wipe_box is None else wipe
    return Mailboxes(
        next_epoch, box, sent, post_one, receive_of, wiping, between_epochs
    )
