"""The handshake, after which kernels work on the ranks' own arrays, without slots.

A call has three launches:

1. The handshake, which one block executes. Each rank sends every other rank the
   addresses at which that rank sees its arrays, in packets of mailboxes
   (``mailboxes.py``) with the call's epoch. A rank whose array is not symmetric, or not
   on a 16-byte boundary, sends 0 instead, which refuses the call.
2. The kernel ``direct.py``, or copies, which work on the arrays. After a refusal, the
   kernel does nothing, and the copies' results are discarded.
3. After a refusal, the call through the workspace. Otherwise, the ranks only wait for
   each other.

Memory order. The start of the first launch makes all earlier work of the rank's stream
visible to its threads. A fence orders that work before the packets. A fence after the
packets have been received orders them before the second launch, which begins when the
first one has ended. So no rank reads an array before its stream has written it, or
writes one that is in use. The flags of the third launch (``flags.py``) begin with a
fence, so they follow all loads and stores of the second one. Later work of a rank's
stream thus follows the second launches of all ranks.

A digest of the call is sent with the addresses, because a call writes other ranks'
arrays. So ranks whose calls differ fail together, before any array is written. After
others have given up, a late rank writes nothing either, nor does a rank that waited for
it: each rank reads the board after it has sent its packets, and again after a long
wait. A failure while the last rank's packets are in transit is found too late. After a
failure, the third launch does nothing, either.

A mailbox is used again in the next call. A rank begins that call only after all others
have read the mailbox. The third launch ends with a wait for all of them, with its own
flags or those of the kernel that executes the call.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.cuda import types

from numba_symm.collectives.protocols import binding
from numba_symm.collectives.protocols.binding import (
    ADDRESS,
    BindFallback,
    Call,
    Endpoint,
    Enqueue,
    Series,
    along_ring,
    digest_of,
)
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.workspace import (
    THREADS,
    VECTOR,
    follow_previous_grid,
    keep,
    keep_failure,
    layout,
    resume,
)
from numba_symm.device.intrinsics import (
    device_function,
    fence_acq_rel_sys,
    ld_relaxed_sys_u64,
    ld_v2_u64,
    st_v2_u64,
    thread_index_x,
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
from numba_symm.gpu.kernels import Kernel
from numba_symm.launch.failures import CALL_MISMATCH

BLOCKS = 120
"""The most blocks of the second launch.

More simultaneous loads only congest the links.
"""

MULTIPROCESSORS = 1
"""Those of the first launch. The second one may take all others and be early. The third
one may be early, too; it waits for the second one, which waits for no rank.
"""

_BOX = 4 * VECTOR  # two vectors as packets

REFUSED = 0
"""Replaces a neighbour's first word after a refusal or a failure."""


class Offer(NamedTuple):
    """What a rank sends in the handshake.

    ``read`` and ``written`` have a word for each rank of the ring, such as the address
    at which it sees this rank's array. A first word of ``REFUSED`` refuses the call.

    Attributes:
        operation: the number in ``failures.py`` for a wait that is given up.
        words: the call in words, equal on all ranks.
        read: what ``offered`` returned for the array that is read.
        written: the same for the one that is written.
        known: for each rank of the ring, the address at which this rank assumes what it
            reads; it refuses any other offer. Empty: it accepts every offered address.
    """

    operation: int
    words: str
    read: tuple[int, ...]
    written: tuple[int, ...]
    known: tuple[int, ...] = ()


def make_handshake(size: int) -> Any:
    """Return the kernel of the handshake of ``size`` ranks, at least two."""
    region = layout(size).direct
    epochs, slots = region.epochs, region.slots
    others = size - 1
    mirror = make_mirror(size)
    where = make_where(size)

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
        return first, second, digest, True

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
        thread = thread_index_x()
        before, failed = resume(own, epochs, 0)
        epoch = (before + 1) & 0xFFFFFFFF
        if thread < others:
            fence_acq_rel_sys()  # explore: fence-before
        for k in range(others):
            if thread == k % THREADS and not failed:
                mail = ring[k] + slots + mirror(k) * _BOX
                post_packets(mail, VECTOR, first[k], second[k], epoch)
                post_packets(mail + 2 * VECTOR, VECTOR, digest, 0, epoch)
        # A read of the board crosses PCIe, so it is made while the packets are in
        # transit. If others sent theirs long ago and gave up since, it shows that.
        if thread < others and not failed:
            # explore: board
            failed = ld_relaxed_sys_u64(guard.board + 8 * guard.rank) != 0
        k = thread
        while k < others:
            peer = (guard.rank + 1 + k) % size
            record = wait_record(operation, guard.rank, peer, 0, epoch)
            mail = own + slots + k * _BOX
            theirs, output = REFUSED, REFUSED
            if not failed:
                theirs, output, call, arrived = received(guard, mail, epoch, record)
                failed = not arrived or call != digest  # explore: digest
                if arrived and failed:
                    record = wait_record(CALL_MISMATCH, guard.rank, peer, 0, epoch)
                    fail(guard, record)
            if failed or first[0] == REFUSED:  # explore: refuses
                # A rank that refuses treats all ranks as refusing.
                theirs = REFUSED
            st_v2_u64(own + where(k), (theirs, output))
            k += THREADS
        for k in range(others):
            # The same thread stored them.
            if thread == k % THREADS and known[k] != 0:
                theirs, output = ld_v2_u64(own + where(k))
                if theirs != known[k]:  # explore: elsewhere
                    st_v2_u64(own + where(k), (REFUSED, output))
        if thread < others:
            fence_acq_rel_sys()  # explore: fence-after
        keep_failure(own, failed)  # the third launch counts the epoch

    return handshake


@functools.cache
def make_where(size: int) -> Callable[[int], int]:
    """Return a device function for ``size`` ranks.

    ``(k)`` returns the offset in the workspace of the two addresses that the k-th
    neighbour has sent; the first is ``REFUSED`` if there is none.
    """
    places = layout(size).direct.slots + (size - 1) * _BOX

    @device_function
    def where(k: int) -> int:
        return places + k * VECTOR

    return where


@functools.cache
def make_find_inputs(size: int) -> Callable[[int, int, int, int, Any], None]:
    """Return a device function for ``size`` ranks, for the second launch.

    ``(own, rank, source, offset, inputs)`` fills the local array ``inputs`` with the
    addresses that are read, by rank, because reductions are in this order: ``source``
    of this rank, and ``offset`` bytes from what each other rank has sent.
    """
    others = size - 1
    where = make_where(size)

    @device_function
    def find_inputs(own: int, rank: int, source: int, offset: int, inputs: Any) -> None:
        for r in range(size):
            k = (r + others - rank) % size
            inputs[r] = source
            if k < others:
                there, _ = ld_v2_u64(own + where(k))
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

    ``(own)`` returns whether a rank refused, or this one has found a failure: then the
    second launch must do nothing. Unless one has failed, all ranks find the same.
    """
    others = size - 1
    where = make_where(size)

    @device_function
    def refused(own: int) -> bool:
        found = False
        for k in range(others):
            first, _ = ld_v2_u64(own + where(k))
            found |= first == REFUSED  # explore: found
        return found

    return refused


@functools.cache
def make_is_done(size: int) -> Callable[[Any, Any, int, int, int], bool]:
    """Return a device function for ``size`` ranks, for the third launch.

    ``(guard, ring, own, block, fallback_for)`` returns whether the second launch has
    done the call, because no rank refused. Then the ranks' first blocks have waited for
    each other; ``fallback_for`` is the number in ``failures.py`` for a wait that is
    given up. If it is 0, this launch is the only one, and has to do the call. After a
    failure, no block waits here, and the launch stores nothing (``workspace.resume``).
    The whole block calls it.
    """
    region = layout(size).direct
    epochs, flags = region.epochs, region.flags
    refused = make_refused(size)
    raise_flags, await_flags = make_flags(size)

    @device_function
    def is_done(guard: Any, ring: Any, own: int, block: int, fallback_for: int) -> bool:
        if fallback_for == 0:
            return False
        found = refused(own)
        if block == 0:
            epoch, failed = resume(own, epochs, block)
            epoch = (epoch + 1) & 0xFFFFFFFF
            # Also after a refusal, because flags must not be 2**31 calls old.
            # explore: signal
            failed = raise_flags(ring, flags, guard.rank, epoch, failed)
            if not found:
                # explore: wait
                failed = await_flags(
                    guard, fallback_for, own + flags, block, epoch, failed
                )
            # All threads have resumed before they raise flags.
            keep(own, epochs, block, epoch, failed)
        return not found

    return is_done


@functools.cache
def handshake_kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    seen = types.UniTuple(ADDRESS, size - 1)
    return binding.make_kernel(
        make_handshake, (size,), (types.int64, types.int64, *3 * (seen,))
    )


def bind(
    bind_fallback: BindFallback,
    end: Endpoint,
    call: Call,
    offer: Offer,
    move: Enqueue,
) -> Enqueue:
    """Return the three launches, of which the second one is given.

    Args:
        bind_fallback: binds the third one, which does the call if a rank refused. It
            first asks for that (``make_is_done``).
        end: this rank's end.
        call: the call.
        offer: what the ranks exchange first.
        move: works on the arrays, unless a rank refused.
    """
    known = offer.known or refusal(end.size)  # zeros: nothing is known
    digest = digest_of(offer.words)
    args = (offer.operation, digest, offer.read, offer.written, known)
    offering = binding.launch(handshake_kernel(end.size), end, 1, args)
    return Series(offering, move, bind_fallback(end, call, offer.operation))


def offered(end: Endpoint, address: int, nbytes: int) -> tuple[int, ...]:
    """Return the addresses at which the ring sees an array, or zeros to refuse."""
    place = end.place(address, nbytes) if address % VECTOR == 0 else None
    return refusal(end.size) if place is None else along_ring(end.rank, place.seen)


def refusal(size: int) -> tuple[int, ...]:
    """Return what a rank of ``size`` offers to refuse the call."""
    return (0,) * (size - 1)
