"""Signals between GPUs, callable from any kernel.

A signal pad holds one ``uint32`` slot for each channel and source rank, at
``world_size * channel + source``. A slot is a mailbox of depth one with one writer
on each side, so no atomic operation is needed: the sender waits for 0 and stores 1,
the receiver waits for 1 and stores 0. It is back at 0 by itself, so a captured graph
replays. The 0 says that the signal was taken, not that any data was read; one
(pair, channel) has one user at a time.

Every wait has a deadline. When it passes, the waiting thread writes a record on
every rank's status board and stops waiting; whoever finds a record on the board
stops waiting too, so all kernels end and the CUDA context stays usable.
"""

from typing import Any, NamedTuple

from numba_symm.device.intrinsics import (
    array_at,
    block_size,
    check_buffer,
    check_peer,
    check_slot,
    device_function,
    globaltimer,
    later_blocks,
    ld_acquire_sys_u32,
    ld_relaxed_sys_u64,
    poll_pause,
    st_relaxed_sys_u64,
    st_release_sys_u32,
    syncthreads,
    syncthreads_or,
    thread_index,
)
from numba_symm.environment import SIMULATED
from numba_symm.waits import PUT_SIGNAL, WAIT_SIGNAL

MAX_CHANNELS = 128
"""Channels of a pad: enough for one a block of the largest grids in use."""

POLLS_PER_CHECK = 8 if SIMULATED else 4096  # explore: polls
"""Polls between two looks at the clock and the board: some milliseconds on a GPU.

The board lies across PCIe, and every thread of a grid may be waiting: looking after
128 polls, ranks 80 us apart delayed each other by their looks for good (4 GPUs, 64 KiB
by LL packets: 128 us instead of 4).
"""


class Guard(NamedTuple):
    """What a wait needs to give up: scalars, passed by value to kernels.

    Attributes:
        board: address of the status board, one 8-byte record for each rank.
        rank: this rank.
        world_size: number of ranks.
        timeout: nanoseconds until a wait is given up; 0 waits for ever.
    """

    board: int
    rank: int
    world_size: int
    timeout: int


class _Scalars(NamedTuple):
    rank: int
    world_size: int
    buffers: tuple[int, ...]
    pads: tuple[int, ...]
    guard: Guard


class Context(_Scalars):
    """Symmetric memory as kernels see it; an ordinary kernel argument.

    Numba takes it for the named tuple that it is. What else it holds, only the host
    sees: the one of ``SymmetricMemory.ctx`` keeps the memory, as an array does.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        buffers: address of every rank's buffer, mapped here; own one included.
        pads: address of every rank's signal pad.
        guard: how long to wait, and whom to tell.
        owner: what keeps the memory.
        buffer_size: bytes of a buffer; None: not known.
    """

    owner: Any = None
    buffer_size: int | None = None


@device_function
def wait_record(operation: int, rank: int, peer: int, place: int, epoch: int) -> int:
    """Pack who waited for whom into 8 bytes, which are stored in one piece.

    Bits 56-62 operation (a number of ``waits.TABLE``), 48-55 rank, 40-47 peer, 24-39
    channel or block, 0-23 epoch; signals have no epoch, but how many blocks the
    simulator runs after this one.
    """
    who = operation << 56 | rank << 48 | peer << 40
    return who | (place & 0xFFFF) << 24 | (epoch & 0xFFFFFF)


@device_function
def fail(guard: Any, record: int) -> None:
    """Put ``record`` on every rank's board: what is under way ends without success.

    Peers may be reading their boards: the record is one relaxed store, and nothing else
    is published by it.
    """
    for r in range(guard.world_size):
        st_relaxed_sys_u64(guard.board + 8 * r, record)


@device_function
def must_give_up(guard: Any, started: int, record: int) -> bool:
    """Return whether a wait that began at ``started`` (ns) must end without success.

    It must when a rank has failed already, or when the deadline has passed, in which
    case every rank's board gets ``record``.
    """
    if ld_relaxed_sys_u64(guard.board + 8 * guard.rank) != 0:
        return True
    if guard.timeout == 0 or globaltimer() - started <= guard.timeout:
        return False
    fail(guard, record)
    return True


@device_function
def wait_for_epoch(guard: Any, flag: int, epoch: int, record: int) -> bool:
    """Poll the flag at address ``flag`` until it has reached ``epoch`` (acquire).

    Epochs only grow, modulo 2**32: a peer may be ahead, never 2**31 ahead.
    """
    polls = 0
    started = 0
    # explore: await-epoch
    while (ld_acquire_sys_u32(flag) - epoch) & 0xFFFFFFFF >= 0x80000000:
        poll_pause()
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            if started == 0:
                started = globaltimer()
            if must_give_up(guard, started, record):
                return False
    return True


@device_function
def _wait_for_slot(guard: Any, slot: int, value: int, record: int) -> bool:
    """Poll a pad's slot until it holds ``value`` (acquire)."""
    polls = 0
    started = 0
    while ld_acquire_sys_u32(slot) != value:  # explore: await-slot
        poll_pause()
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            if started == 0:
                started = globaltimer()
            if must_give_up(guard, started, record):
                return False
    return True


@device_function
def _slot(ctx: Any, owner: int, channel: int, source: int) -> int:
    """Return the address of a slot of rank ``owner``'s pad."""
    check_slot(owner, channel, source, ctx.world_size, MAX_CHANNELS)
    return ctx.pads[owner] + 4 * (ctx.world_size * channel + source)  # type: ignore[no-any-return]


@device_function
def put_signal(ctx: Any, dst: int, channel: int) -> bool:
    """Signal rank ``dst`` on ``channel``, once it has taken the signal before.

    One thread calls it. Its own earlier writes, and those it has synchronised with
    (``syncthreads``), are visible to the thread that takes the signal (release).
    ``channel`` is 0 to 127; on a GPU nothing checks it, or ``dst``.

    Returns:
        False if the deadline passed first, or another rank had failed.
    """
    slot = _slot(ctx, dst, channel, ctx.rank)
    record = wait_record(PUT_SIGNAL, ctx.rank, dst, channel, later_blocks())
    taken = _wait_for_slot(ctx.guard, slot, 0, record)  # explore: put-wait
    if taken:  # explore: put
        st_release_sys_u32(slot, 1)
    return taken


@device_function
def wait_signal(ctx: Any, src: int, channel: int) -> bool:
    """Wait for rank ``src``'s signal on ``channel``, and take it.

    One thread calls it; with ``syncthreads`` after it, its whole block sees what
    ``src`` wrote before it signalled (acquire). ``channel`` is 0 to 127; on a GPU
    nothing checks it, or ``src``.

    Returns:
        False if the deadline passed first, or another rank had failed.
    """
    slot = _slot(ctx, ctx.rank, channel, src)
    record = wait_record(WAIT_SIGNAL, ctx.rank, src, channel, later_blocks())
    arrived = _wait_for_slot(ctx.guard, slot, 1, record)  # explore: take-wait
    if arrived:  # explore: take
        st_release_sys_u32(slot, 0)
    return arrived


@device_function
def barrier(ctx: Any, channel: int) -> bool:
    """Meet the same block of every rank on ``channel``.

    Every thread of one block calls it, on every rank. What any thread of any of
    these blocks wrote before is visible to all of them after. ``channel`` is 0 to 127;
    on a GPU nothing checks it. It is made of signals, which a timeout's text names.

    Returns:
        False, in all threads of the block, if the deadline passed or a rank failed.
        After that, store nothing that a peer may read.
    """
    thread = thread_index()
    threads = block_size()
    met = True
    # All writes of this block come before its release of the signals below.
    syncthreads()  # explore: meet
    peer = thread
    while peer < len(ctx.pads) and met:
        if peer != ctx.rank:
            met = put_signal(ctx, peer, channel)
        peer += threads
    peer = thread
    while peer < len(ctx.pads) and met:
        if peer != ctx.rank:
            met = wait_signal(ctx, peer, channel)  # explore: wait
        peer += threads
    # The peers' writes, acquired by one thread each, become visible to all.
    return not syncthreads_or(not met)  # explore: agree


@device_function
def peer_address(ctx: Any, rank: int) -> int:
    """Return the address of rank ``rank``'s buffer in this process."""
    check_peer(rank, ctx.world_size)
    return ctx.buffers[rank]  # type: ignore[no-any-return]


@device_function
def peer_array(ctx: Any, rank: int, shape: Any, dtype: Any) -> Any:
    """Return rank ``rank``'s buffer as a C-contiguous array.

    Numba's ``cuda.atomic`` is atomic for the threads of one GPU only. On a peer's
    array, or on one that a peer changes at the same time, it loses updates.

    Args:
        ctx: the memory's context.
        rank: whose buffer.
        shape: an int or a tuple of ints; on a GPU nothing checks that it fits the
            buffer.
        dtype: a NumPy scalar type, such as ``np.float32``.
    """
    check_peer(rank, ctx.world_size)
    check_buffer(ctx, shape, dtype)
    return array_at(ctx.buffers[rank], shape, dtype)
