"""The handshake, after which kernels work on the ranks' own arrays, without slots.

Each rank sends every other rank the addresses at which that rank sees its arrays, in
packets of mailboxes (``packets.py``) with the call's epoch. A rank whose array is not
symmetric, or not on a 16-byte boundary, sends 0 instead, which refuses the call.

A call by ``direct.py`` has two launches. In the first one, each block *meets* the
blocks of its index on the other ranks, works on the arrays unless a rank refused, and
*parts*: it waits until the others have done so. The second launch makes the call
through the workspace after a refusal; otherwise it ends at once. A call by copies has
three launches. Before them, one block meets the others. After them, the first block of
the last launch parts. After a refusal, what the copies have stored is overwritten.

Memory order. The start of the first launch makes all earlier work of the rank's stream
visible to its threads. A fence orders that work before the packets, and an acquire of a
packet orders it before what the receiving block does. So no rank reads an array before
its stream has written it, or writes one that is in use. The flags (``flags.py``) begin
with a fence, so they follow all loads and stores of the block. Later work of a rank's
stream thus follows what all ranks' blocks have done.

A digest of the call is sent with the addresses, because a call writes other ranks'
arrays. So ranks whose calls differ fail together, before any array is written. After
others have given up, a late block writes nothing either, nor does one that waited for
it. For this purpose, a block that has failed marks all ranks as failed. Each block
loads its rank's mark after it has sent its packets, and reads the board after a long
wait. A failure while the last packets are in transit is found too late, and so is the
end of a process that had sent its packets, which marks nobody. After a failure, the
last launch does nothing, either.

A mailbox is used again in the next call. A block begins that call only after all others
have read the mailbox: they have parted, or are in the last launch's wait for each other
(after a refusal).
"""

import functools
from collections.abc import Callable
from typing import Any

from numba.cuda import types

from numba_symm.collectives.protocols import binding
from numba_symm.collectives.protocols.binding import (
    BindFallback,
    Call,
    Endpoint,
    Enqueue,
    Series,
    along_ring,
)
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.workspace import (
    MAX_BLOCKS,
    THREADS,
    VECTOR,
    follow_previous_grid,
    keep,
    keep_failure,
    layout,
    load_failure,
    resume,
)
from numba_symm.device.intrinsics import (
    bar_red_or,
    device_function,
    fence_acq_rel_sys,
    ld_acquire_sys_u64,
    ld_v2_u64,
    st_v2_u64,
    thread_index_x,
    thread_index_y,
    word_of,
)
from numba_symm.device.lanes import Load
from numba_symm.device.order import make_mirror
from numba_symm.device.packets import peek_packets, post_packets
from numba_symm.device.polling import (
    fail,
    is_time_to_check,
    must_give_up,
    pause,
    since,
    wait_record,
)
from numba_symm.launch.failures import CALL_MISMATCH

MOVED = -1
"""Tells the last launch that the one before has done all but a refused call."""

_BOX = 4 * VECTOR  # two vectors as packets

REFUSED = 0
"""As a rank's first word, it refuses the call, and so do second words that are 0 on
some ranks only. It replaces a neighbour's first word after a refusal or a failure."""


@functools.cache
def make_meet(size: int, threads: int) -> Callable[..., bool]:
    """Return a device function for ``size`` ranks, which ``threads`` of a block call.

    ``(guard, operation, ring, own, block, epoch, digest, first, second, failed)`` sends
    the words ``first[k]`` and ``second[k]`` to the block of the k-th neighbour, and
    stores what that one has sent in the block's places. Returns whether a thread of the
    block has found a failure, or passes ``failed``.
    """
    slots = layout(size).direct.slots
    others = size - 1
    mirror = make_mirror(size)
    place_of = make_place(size)

    @device_function
    def received(guard: Any, mail: int, epoch: int, record: int) -> Any:
        polls = 0
        started = 0
        digest, _, late = peek_packets(mail + 2 * VECTOR, VECTOR, epoch)
        first, second, missing = peek_packets(mail, VECTOR, epoch)
        while missing | late != 0:  # explore: poll
            polls = pause(polls)
            if is_time_to_check(polls):
                started = since(started)
                if must_give_up(guard, started, record):
                    return 0, 0, 0, False
            digest, _, late = peek_packets(mail + 2 * VECTOR, VECTOR, epoch)
            first, second, missing = peek_packets(mail, VECTOR, epoch)
        # Others may have given up their wait for a rank that was as late as this.
        # explore: late
        if started != 0 and must_give_up(guard, started, record):
            return 0, 0, 0, False
        # Acquires what the sender's fence orders before this packet.
        ld_acquire_sys_u64(mail)  # explore: acquire
        return first, second, digest, True

    @device_function
    def meet(
        guard: Any,
        operation: int,
        ring: Any,
        own: int,
        block: int,
        epoch: int,
        digest: int,
        first: Any,
        second: Any,
        failed: bool,
    ) -> bool:
        thread = thread_index_x()
        boxes = slots + block * others * _BOX
        if thread < others:
            fence_acq_rel_sys()  # explore: fence
        for k in range(others):
            if thread == k % threads and not failed:
                mail = ring[k] + boxes + mirror(k) * _BOX
                post_packets(mail, VECTOR, first[k], second[k], epoch)
                post_packets(mail + 2 * VECTOR, VECTOR, digest, 0, epoch)
        # If others sent theirs long ago and gave up since, it shows that. So would the
        # board, but blocks would read that one after another, across PCIe.
        failed |= load_failure(own, block) != 0  # explore: given-up
        k = thread
        while k < others:
            peer = (guard.rank + 1 + k) % size
            record = wait_record(operation, guard.rank, peer, block, epoch)
            theirs, output = REFUSED, REFUSED
            if not failed:
                mail = own + boxes + k * _BOX
                theirs, output, call, arrived = received(guard, mail, epoch, record)
                failed = not arrived or call != digest  # explore: digest
                if arrived and failed:
                    record = wait_record(CALL_MISMATCH, guard.rank, peer, block, epoch)
                    fail(guard, record)
            differs = (output == 0) != (second[0] == 0)  # explore: differs
            if failed or differs or first[0] == REFUSED:  # explore: refuses
                # A rank that refuses treats all ranks as refusing, and one that would
                # load those that would store.
                theirs = REFUSED
            st_v2_u64(place_of(own, block) + k * VECTOR, (theirs, output))
            k += threads
        return bar_red_or(thread_index_y(), threads, failed)  # explore: agree

    return meet


@functools.cache
def make_part(size: int, threads: int) -> Callable[..., None]:
    """Return a device function for ``size`` ranks, which ``threads`` of a block call.

    ``(guard, operation, ring, own, block, found, failed)`` waits until all
    ranks' blocks of that index have called it, unless a rank refused the call, which is
    ``found``. Then it keeps the epoch.
    """
    region = layout(size).direct
    epochs, flags = region.epochs, region.flags
    raise_flags, await_flags = make_flags(size, threads)

    @device_function
    def part(
        guard: Any,
        operation: int,
        ring: Any,
        own: int,
        block: int,
        found: bool,
        failed: bool,
    ) -> None:
        # Loaded again, because the registers are needed for what is moved.
        before, marked = resume(own, epochs, block)
        epoch, flag = (before + 1) & 0xFFFFFFFF, flags + 4 * size * block
        # Also after a refusal, because flags must not be 2**31 calls old.
        # explore: signal
        failed = raise_flags(ring, flag, guard.rank, epoch, failed or marked != 0)
        if not found:
            # explore: wait
            failed = await_flags(guard, operation, own + flag, block, epoch, failed)
        for k in range(size - 1):
            keep_failure(ring[k], failed)  # explore: tell
        # All threads have resumed before they raised flags.
        keep(own, epochs, block, epoch, failed)

    return part


def make_handshake(size: int) -> Any:
    """Return the kernel of the handshake before copies, of ``size`` ranks."""
    epochs, others = layout(size).direct.epochs, size - 1
    meet, place_of = make_meet(size, THREADS), make_place(size)

    def handshake(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        operation: int,
        digest: int,
        first: Any,
        second: Any,
        known: Any,
    ) -> None:
        follow_previous_grid(early)
        before, failed = resume(own, epochs, 0)
        epoch = (before + 1) & 0xFFFFFFFF
        failed = meet(
            guard, operation, ring, own, 0, epoch, digest, first, second, failed != 0
        )
        for k in range(others):
            # The same thread stored them.
            if thread_index_x() == k % THREADS:
                place = place_of(own, 0) + k * VECTOR
                theirs, output = ld_v2_u64(place)
                if theirs != known[k]:  # explore: elsewhere
                    st_v2_u64(place, (REFUSED, output))
        for k in range(others):
            keep_failure(ring[k], failed)
        keep_failure(own, failed)  # the last launch counts the epoch

    return handshake


@functools.cache
def make_place(size: int) -> Callable[[int, int], int]:
    """Return a device function for ``size`` ranks.

    ``(own, block)`` returns the address of the block's places: for each neighbour, the
    two addresses that it has sent; the first is ``REFUSED`` if there is none.
    """
    others = size - 1
    places = layout(size).direct.slots + MAX_BLOCKS * others * _BOX

    @device_function
    def place_of(own: int, block: int) -> int:
        return own + places + block * others * VECTOR

    return place_of


@device_function
def words_of(place: int, k: int) -> Any:
    """Return what the k-th neighbour has sent, from the address of a block's places."""
    return ld_v2_u64(place + k * VECTOR)


@functools.cache
def make_find_inputs(size: int) -> Callable[[int, int, int, int, Any], None]:
    """Return a device function for ``size`` ranks, for the second launch.

    ``(place, rank, source, offset, inputs)`` fills the local array ``inputs`` with the
    addresses that are read, by rank, because reductions are in this order: ``source``
    of this rank, and ``offset`` bytes from what each other rank has sent. ``place`` is
    the address of the block's places.
    """
    others = size - 1

    @device_function
    def find_inputs(
        place: int, rank: int, source: int, offset: int, inputs: Any
    ) -> None:
        for r in range(size):
            k = (r + others - rank) % size
            inputs[r] = source
            if k < others:
                there, _ = words_of(place, k)
                inputs[r] = there + offset

    return find_inputs


@functools.cache
def make_load_batch(size: int, batch: int, load: Load) -> Callable[..., None]:
    """Return a device function for ``size`` ranks, for the second launch.

    ``(inputs, start, stride, end, count, low, high)`` loads ``batch`` vectors of every
    array in the local array ``inputs``: those at ``start``, ``start + stride`` …,
    before ``end``. It fills the local arrays ``low`` and ``high`` with the words of the
    first vector of each array, then of the second. ``load`` is ``Lanes.load``.
    """

    @device_function
    def load_batch(
        inputs: Any, start: int, stride: int, end: int, count: int, low: Any, high: Any
    ) -> None:
        for i in range(batch * size):
            vector = start + i // size * stride
            if vector < end:
                low[i], high[i] = load(word_of(inputs[i % size]), vector, count)

    return load_batch


@functools.cache
def make_refused(size: int) -> Callable[[int], bool]:
    """Return a device function for ``size`` ranks.

    ``(place)`` returns whether a rank refused, or this one has found a failure: then
    nothing may be moved. Unless one has failed, all ranks find the same.
    """
    others = size - 1

    @device_function
    def refused(place: int) -> bool:
        found = False
        for k in range(others):
            first, _ = words_of(place, k)
            found |= first == REFUSED  # explore: found
        return found

    return refused


@functools.cache
def make_is_done(size: int) -> Callable[[Any, Any, int, int, int], bool]:
    """Return a device function for ``size`` ranks, for the last launch.

    ``(guard, ring, own, block, fallback_for)`` returns whether an earlier launch has
    done the call, because no rank refused. If ``fallback_for`` is the number in
    ``failures.py`` of a wait, the ranks' first blocks then have waited for each other.
    ``MOVED``: the earlier launch has waited. 0: this launch is the only one, and has to
    do the call. After a failure, the launch stores nothing (``workspace.resume``). The
    whole block calls it.
    """
    refused, place_of = make_refused(size), make_place(size)
    part = make_part(size, THREADS)

    @device_function
    def is_done(guard: Any, ring: Any, own: int, block: int, fallback_for: int) -> bool:
        if fallback_for == 0:
            return False
        found = refused(place_of(own, 0))
        if fallback_for != MOVED and block == 0:
            part(guard, fallback_for, ring, own, block, found, False)
        return not found

    return is_done


handshake_kernel = binding.kernels_of(
    make_handshake, types.int64, types.int64, *3 * (binding.RING,)
)
"""Returns the kernel, compiled when first bound."""


def bind(
    bind_fallback: BindFallback,
    end: Endpoint,
    call: Call,
    operation: int,
    sent: tuple[int, tuple[int, ...], tuple[int, ...]],
    known: tuple[int, ...],
    copies: Enqueue,
) -> Enqueue:
    """Return the three launches of a call by copies.

    Args:
        bind_fallback: binds the third one, which does the call if a rank refused. It
            first asks for that (``make_is_done``).
        end: this rank's end.
        call: the call.
        operation: the number in ``failures.py`` for a wait that is given up.
        sent: what the ranks exchange first: the call's digest, and two words for each
            rank of the ring.
        known: for each rank of the ring, the address at which this rank assumes what it
            reads; it refuses any other offer.
        copies: those of the call.
    """
    kernel = handshake_kernel(end.size)
    offering = binding.launch(kernel, end, 1, (operation, *sent, known))
    return Series(offering, copies, bind_fallback(end, call, operation))


def offered(end: Endpoint, address: int, nbytes: int) -> tuple[int, ...]:
    """Return the addresses at which the ring sees an array, or zeros to refuse."""
    place = end.place(address, nbytes) if address % VECTOR == 0 else None
    return refusal(end.size) if place is None else along_ring(end.rank, place.seen)


def refusal(size: int) -> tuple[int, ...]:
    """Return what a rank of ``size`` offers to refuse the call."""
    return (0,) * (size - 1)
