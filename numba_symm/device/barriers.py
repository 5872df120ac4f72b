"""Barriers in kernels: of a block of every rank, or of the whole grids of all ranks.

Both consist of the signals in ``signals.py``: one to and one from each rank. In a
barrier of grids, each block of a rank first adds 1 to a count in the rank's own pad.
The last block signals for all of them, so each rank sends one signal to each other
rank, whatever the number of blocks. The first block waits for the other ranks' signals,
and then stores the next generation, for which the other blocks wait. Only the rank
itself accesses count and generation, the first words of a channel of its pad.
"""

from typing import Any

from numba_symm.device.checks import check_slot, check_team
from numba_symm.device.intrinsics import (
    atom_add_release_sys_u64,
    block_size,
    check_grid,
    device_function,
    fence_acq_rel_sys,
    grid_index,
    grid_size,
    later_blocks,
    ld_acquire_sys_u64,
    ld_relaxed_sys_u64,
    st_relaxed_sys_u64,
    st_release_sys_u64,
    syncthreads,
    syncthreads_or,
    thread_index,
)
from numba_symm.device.polling import make_wait, wait_record
from numba_symm.device.signals import (
    channel_stride,
    put,
    put_signal,
    take,
    wait_signal,
)
from numba_symm.launch.failures import GRID_BARRIER


@device_function
def _size(ctx: Any, team: Any) -> int:
    if team is None:
        return len(ctx.pads)
    return len(team.ranks)


@device_function
def _rank(team: Any, place: int) -> int:
    if team is None:
        return place
    return team.ranks[place]  # type: ignore[no-any-return]


@device_function
def barrier(ctx: Any, channel: int, team: Any = None) -> bool:
    """Wait until the same block of every rank has called this on ``channel``.

    Every thread of one block of every rank calls it. What any thread of these blocks
    wrote before the barrier is visible to all these threads after the barrier. A
    barrier costs about two stores to each rank, and the time until these stores arrive.

    Args:
        ctx: the memory's context.
        channel: a channel of the pad; between two ranks, only one block may use it at
            a time. GPUs check it only in debug mode.
        team: a :class:`Team`; only its ranks call the barrier. None: all ranks.

    Returns:
        False, in all threads of the block, if the deadline has passed or a rank has
        failed. After that, store nothing that a peer may read. A barrier consists of
        signals, so a timeout's text names a signal.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     old[0] = symm.barrier(ctx, 3)
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    return barrier_wait(ctx, channel, barrier_arrive(ctx, channel, team), team)


@device_function
def barrier_arrive(ctx: Any, channel: int, team: Any = None) -> bool:
    """Signal that this block has arrived at a :func:`barrier`, and do not wait.

    Every thread of the block calls it, and later :func:`barrier_wait` on the same
    channel. What the block wrote before its arrival is visible to the blocks that have
    waited. The call waits only for ranks that have not yet left the channel's previous
    barrier.

    Returns:
        What to pass to :func:`barrier_wait`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     arrived = symm.barrier_arrive(ctx, 3)
        ...     old[0] = symm.barrier_wait(ctx, 3, arrived)
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    check_team(ctx, team)
    place = thread_index()
    threads = block_size()
    arrived = True
    # All writes of this block come before its release of the signals below.
    syncthreads()  # explore: synchronize
    while place < _size(ctx, team) and arrived:
        if _rank(team, place) != ctx.rank:
            arrived = put_signal(ctx, _rank(team, place), channel)
        place += threads
    return arrived


@device_function
def barrier_wait(ctx: Any, channel: int, arrived: bool, team: Any = None) -> bool:
    """Wait until the other blocks have arrived at a :func:`barrier`.

    Every thread of the block calls it, after :func:`barrier_arrive`. What the other
    blocks wrote before their arrival is visible to all threads after this call.

    Args:
        ctx: the memory's context.
        channel: the channel of the arrival.
        arrived: what the arrival returned in this thread.
        team: the team of the arrival.

    Returns:
        As :func:`barrier`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     arrived = symm.barrier_arrive(ctx, 3)
        ...     old[0] = symm.barrier_wait(ctx, 3, arrived)
        >>> kernel[1, 2](ctx, old)
        >>> int(old[0])
        1
    """
    # Not by wait_signal_block, which Numba compiles for the current GPU only.
    place = thread_index()
    threads = block_size()
    while place < _size(ctx, team) and arrived:
        if _rank(team, place) != ctx.rank:
            arrived = wait_signal(ctx, _rank(team, place), channel)  # explore: wait
        place += threads
    # The peers' writes, acquired by one thread each, become visible to all.
    return not syncthreads_or(not arrived)  # explore: agree


@device_function
def _is_past(generation: int, before: int) -> bool:
    return ld_acquire_sys_u64(generation) != before  # explore: await-generation


_wait_for_generation = make_wait(_is_past)


@device_function
def _words(ctx: Any, channel: int) -> int:
    """Return the address of a channel's count of blocks; the generation follows it."""
    check_slot(ctx, ctx.rank, channel, ctx.rank)
    return ctx.pads[ctx.rank] + channel_stride(ctx.size) * channel  # type: ignore[no-any-return]


@device_function
def grid_barrier(ctx: Any, channel: int, team: Any = None) -> bool:
    """Wait until all blocks of all ranks have called this on ``channel``.

    Every thread of every rank's grid calls it. Grids of different ranks may have
    different sizes. What any thread of these grids wrote before the barrier is visible
    to all these threads after the barrier. The barrier costs an atomic operation of
    each block, in the memory of the block's GPU, and one signal to each rank. The first
    block also stores a word that the other blocks of its rank poll.

    All blocks must fit on the GPU at the same time, together with the blocks of other
    ranks that share the GPU. Otherwise the first blocks wait until the deadline for
    blocks that cannot start. ``comm.launch_limit`` returns how many blocks may wait.

    Args:
        ctx: the memory's context.
        channel: a channel of the pad; no other block or kernel may use it at the same
            time. GPUs check it only in debug mode.
        team: a :class:`Team`; only its ranks call the barrier. None: all ranks.

    Returns:
        False, in all threads of a block, if the deadline has passed or a rank has
        failed. After that, store nothing that a peer may read.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     total = symm.peer_array(ctx, 0, 1, np.int64)
        ...     symm.atomic_add(total, 0, 1)
        ...     symm.grid_barrier(ctx, 3)
        ...     old[0] = total[0]
        >>> kernel[4, 2](ctx, old)
        >>> int(old[0])
        8
    """
    return grid_barrier_wait(
        ctx, channel, grid_barrier_arrive(ctx, channel, team), team
    )


@device_function
def grid_barrier_arrive(ctx: Any, channel: int, team: Any = None) -> int:
    """Report that this block has arrived at a :func:`grid_barrier`; do not wait.

    Every thread of the grid calls it, and later :func:`grid_barrier_wait` on the same
    channel. What the block wrote before its arrival is visible to the blocks that have
    waited.

    Returns:
        What to pass to :func:`grid_barrier_wait`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     token = symm.grid_barrier_arrive(ctx, 3)
        ...     old[0] = symm.grid_barrier_wait(ctx, 3, token)
        >>> kernel[2, 2](ctx, old)
        >>> int(old[0])
        1
    """
    check_team(ctx, team)
    check_grid()
    words = _words(ctx, channel)
    thread = thread_index()
    before = 0
    last = False
    sent = True
    # All writes of this block come before its release of the count below.
    syncthreads()  # explore: grid-synchronize
    if thread == 0:
        # It changes only after this block has arrived, so it is that of this barrier.
        before = ld_relaxed_sys_u64(words + 8)
        last = atom_add_release_sys_u64(words, 1) == grid_size() - 1  # explore: count
        if last:
            # It acquires what the other blocks have released by their counts.
            fence_acq_rel_sys()  # explore: acquire-counts
            # The blocks count again only after the next generation.
            st_relaxed_sys_u64(words, 0)  # explore: reset
    # What one thread has acquired comes before the signals of all.
    if syncthreads_or(last):
        place = thread
        while place < _size(ctx, team) and sent:
            sent = put(ctx, _rank(team, place), channel, GRID_BARRIER)
            place += block_size()
    # A thread that has found a failure takes no signal.
    return before if sent else -1  # explore: token


@device_function
def grid_barrier_wait(ctx: Any, channel: int, token: int, team: Any = None) -> bool:
    """Wait until all blocks have arrived at a :func:`grid_barrier`.

    Every thread of the grid calls it, after :func:`grid_barrier_arrive`.

    Args:
        ctx: the memory's context.
        channel: the channel of the arrival.
        token: what the arrival returned in this thread.
        team: the team of the arrival.

    Returns:
        As :func:`grid_barrier`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     token = symm.grid_barrier_arrive(ctx, 3)
        ...     old[0] = symm.grid_barrier_wait(ctx, 3, token)
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        1
    """
    generation = _words(ctx, channel) + 8
    thread = thread_index()
    arrived = token >= 0
    if grid_index() == 0:
        place = thread
        while place < _size(ctx, team) and arrived:
            # From this rank, too: its last block has signalled for the others.
            arrived = take(ctx, _rank(team, place), channel, GRID_BARRIER)
            place += block_size()
        # What the threads have acquired comes before the next generation.
        arrived = not syncthreads_or(not arrived)  # explore: share-signals
        if arrived and thread == 0:  # explore: generation
            st_release_sys_u64(generation, token + 1)
    elif thread == 0 and arrived:
        record = wait_record(GRID_BARRIER, ctx.rank, ctx.rank, channel, later_blocks())
        arrived = _wait_for_generation(ctx.guard, generation, token, record)
    # What thread 0 has acquired becomes visible to all.
    return not syncthreads_or(not arrived)  # explore: grid-agree
