"""How kernels work on the ranks' own arrays, without the workspace between.

A call is three launches. In the first, of one block, each rank tells every other at
which addresses that one sees its arrays, in packets of mailboxes (``mailboxes.py``)
with the call's epoch. The second, of a kernel ``direct_*.py`` or of copies, works on
the arrays. A rank whose array is not symmetric, or not on a 16-byte boundary, sends 0
instead. Then the second launch does nothing, or copies in vain, and the third does the
call through the workspace. Otherwise the third launch only makes the ranks wait for
each other.

Memory order. A fence before the packets puts what the rank's stream did before, which
the start of this kernel has made visible to the thread, before them; a fence after they
have come puts the second launch, which begins when the first is over, after them. So
nobody reads an array before it is written, or writes one that is in use. The flags of
the third (``flags.py``), which begin with a fence, come after all that the second has
stored and loaded; so what follows on the stream comes after everybody's.

A digest of the call comes with the addresses, as others' arrays are written: ranks that
differ fail together, before any is. A rank that comes when others have given up writes
nothing either, nor does one that waited for it: each reads the board after it has sent
its packets, and again after a long wait. A failure while the last rank's packets are in
flight is found too late.
After a failure the third launch does nothing, either.

A mailbox is used again in the next call, in which a rank is only after all others have
read it: the third launch ends by waiting for them, by its flags or the workspace's.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba.cuda import types

from numba_symm.collectives.protocols import binding
from numba_symm.collectives.protocols.binding import (
    ADDRESS,
    Endpoint,
    Enqueue,
    InTurn,
    along_ring,
    digest_of,
)
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.mailboxes import peek_packets, post_packets
from numba_symm.collectives.protocols.order import make_mirror
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
)
from numba_symm.device.polling import (
    fail,
    is_time_to_check,
    must_give_up,
    pause,
    since,
    wait_record,
)
from numba_symm.kernels import Kernel
from numba_symm.waits import CALL_MISMATCH

BLOCKS = 120
"""Most blocks of the second launch: more simultaneous loads only congest the links, and
a grid of 15 multiprocessors may be early (``binding.launch``)."""

_BOX = 4 * VECTOR  # two vectors as packets

REFUSED = 0
"""What is kept in the place of a neighbour's first word after a refusal or failure."""

Offer = tuple[tuple[int, ...], tuple[int, ...]]
"""For each of the ring's ranks two words, such as where it sees this rank's arrays; a
first word of ``REFUSED`` refuses the call."""


def make_meet(size: int) -> Any:
    """Return the kernel in which ``size`` ranks, two at least, meet."""
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
        while missing | late != 0:  # explore: come
            polls = pause(polls)
            if is_time_to_check(polls):
                started = since(started)
                if must_give_up(guard, started, record):
                    return 0, 0, 0, False
            digest, _, late = peek_packets(mail + 2 * VECTOR, VECTOR, epoch)
            first, second, missing = peek_packets(mail, VECTOR, epoch)
        # Others may have given up on a rank that came as late as this.
        if started != 0 and must_give_up(guard, started, record):
            return 0, 0, 0, False
        return first, second, digest, True

    def meet(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        operation: int,
        digest: int,
        first: Any,
        second: Any,
        known_first: Any,
        known_second: Any,
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
        # The board is far away: it is looked at while the packets are on their way. For
        # whom theirs have come long ago, it has changed if they gave up.
        if thread < others and not failed:
            failed = ld_relaxed_sys_u64(guard.board + 8 * guard.rank) != 0
        k = thread
        while k < others:
            peer = (guard.rank + 1 + k) % size
            record = wait_record(operation, guard.rank, peer, 0, epoch)
            mail = own + slots + k * _BOX
            theirs, output = REFUSED, REFUSED
            if not failed:
                theirs, output, call, came = received(guard, mail, epoch, record)
                failed = not came or call != digest
                if came and failed:
                    record = wait_record(CALL_MISMATCH, guard.rank, peer, 0, epoch)
                    fail(guard, record)
            if failed or first[0] == REFUSED:  # explore: refuses
                # A rank that refuses treats all ranks as refusing.
                theirs = REFUSED
            st_v2_u64(own + where(k), (theirs, output))
            k += THREADS
        for k in range(others):
            # The same thread stored them.
            if thread == k % THREADS and known_first[k] != 0:
                theirs, output = ld_v2_u64(own + where(k))
                # explore: elsewhere
                elsewhere = theirs != known_first[k] or output != known_second[k]
                if elsewhere:
                    st_v2_u64(own + where(k), (REFUSED, output))
        if thread < others:
            fence_acq_rel_sys()  # explore: fence-after
        keep_failure(own, failed)  # the epoch counts on when the call is over

    return meet


@functools.cache
def make_where(size: int) -> Callable[[int], int]:
    """Return a device function for ``size`` ranks.

    ``(k)`` returns the offset in the workspace of the two addresses that the k-th
    neighbour has sent; ``REFUSED`` in the place of the first if there is none.
    """
    places = layout(size).direct.slots + (size - 1) * _BOX

    @device_function
    def where(k: int) -> int:
        return places + k * VECTOR

    return where


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
def make_left(size: int, operation: int) -> Callable[[Any, Any, int, int], bool]:
    """Return a device function for ``size`` ranks, for the third launch.

    ``(guard, ring, own, block)`` returns whether the message is left to be moved, as a
    rank refused; if not, the ranks' first blocks have waited for each other. After a
    failure nobody waits here, and the launch stores nothing (``workspace.resume``). The
    whole block calls it.
    """
    region = layout(size).direct
    epochs, flags = region.epochs, region.flags
    refused = make_refused(size)
    raise_flags, await_flags = make_flags(size, operation)

    @device_function
    def left(guard: Any, ring: Any, own: int, block: int) -> bool:
        found = refused(own)
        if block == 0:
            epoch, failed = resume(own, epochs, 0)
            epoch = (epoch + 1) & 0xFFFFFFFF
            # After a refusal, too: flags must not be 2**31 calls old.
            # explore: tell
            failed = raise_flags(ring, flags, guard.rank, epoch, failed)
            if not found:
                # explore: wait
                failed = await_flags(guard, own + flags, 0, epoch, failed)
            # All threads have resumed before they raise flags.
            keep(own, epochs, 0, epoch, failed)
        return found

    return left


@functools.cache
def meet_kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    seen = types.UniTuple(ADDRESS, size - 1)
    return binding.make_kernel(
        make_meet, (size,), types.int64, types.int64, *4 * (seen,)
    )


def bind(
    end: Endpoint,
    operation: int,
    call: str,
    offer: Offer,
    move: Enqueue,
    rest: Enqueue,
    known: Offer | None = None,
) -> Enqueue:
    """Return the three launches, of which the second and third are given.

    Args:
        end: this rank's end.
        operation: what a record of a wait given up names.
        call: the call in words, equal on all ranks.
        offer: what ``offered`` returned for the array that is read, and for the one
            that is written.
        move: works on the arrays, unless they were refused.
        rest: works if they were, and calls ``left`` first.
        known: what ``move`` assumes that the ring's ranks offer, each this one; any
            other offer is refused. None: it reads what they offer.
    """
    if known is None:
        known = refusal(end.size), refusal(end.size)  # all zeros: nothing is known
    args = (operation, digest_of(call), *offer, *known)
    return InTurn(binding.launch(meet_kernel(end.size), end, 1, *args), move, rest)


def offered(end: Endpoint, address: int, nbytes: int) -> tuple[int, ...]:
    """Return at which addresses the ring's ranks see an array, or zeros to refuse."""
    place = end.place(address, nbytes) if address % VECTOR == 0 else None
    return refusal(end.size) if place is None else along_ring(end.rank, place.seen)


def refusal(size: int) -> tuple[int, ...]:
    """Return what a rank of ``size`` offers to refuse the call."""
    return (0,) * (size - 1)
