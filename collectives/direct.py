"""How kernels work on the ranks' own arrays, without the workspace between.

A call is three launches. In the first, of one block, each rank tells every other at
which addresses that one sees its arrays, in packets of mailboxes (``mailboxes.py``)
with the call's epoch. The second, of ``broadcast_direct.py`` or ``reduce_direct.py``,
works on the arrays. A rank whose array is not symmetric, or not on a 16-byte boundary,
tells 0 instead: then the second does nothing, and the third goes through the workspace.
If nobody did, all that the third does is to make the ranks wait for each other.

Memory order. A fence before the packets puts what the rank's stream did before, which
the start of this kernel has made visible to the thread, before them; a fence after they
have come puts the second launch, which begins when the first is over, after them. So
nobody reads an array before it is written, or writes one that is in use. The flags of
the third (``flags.py``), which begin with a fence, come after all that the second has
stored and loaded; so what follows on the stream comes after everybody's.

A digest of the call comes with the addresses, as others' arrays are written: ranks that
differ fail together, before any is. A rank that comes when others have given up writes
nothing either, nor does one that waited for it: each looks at the board after it has
told, and again after a long wait. Only a failure while the last comes is too late.

A mailbox is used again in the next call, in which a rank is only after all others have
read it: the third launch ends by waiting for them, by its flags or the workspace's.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba.cuda import types

from numba_symm.collectives import workspace
from numba_symm.collectives.flags import make_flags
from numba_symm.collectives.launches import Enqueue, InTurn, digest_of
from numba_symm.collectives.mailboxes import peek_packets, post_packets
from numba_symm.collectives.workspace import (
    ADDRESS,
    THREADS,
    VECTOR,
    follow_previous_grid,
    layout,
)
from numba_symm.device.intrinsics import (
    device_function,
    fence_acq_rel_sys,
    globaltimer,
    ld_relaxed_sys_u64,
    ld_u32,
    ld_v2_u64,
    poll_pause,
    st_u32,
    st_v2_u64,
    thread_index,
    word_of,
)
from numba_symm.device.signals import (
    CALL_MISMATCH,
    POLLS_PER_CHECK,
    fail,
    must_give_up,
    wait_record,
)
from numba_symm.kernels import Kernel

BLOCKS = 128
"""Most blocks of the second launch: more loads at once only congest the links, and
grids of this size may be launched early (``workspace.py``)."""

_BOX = 4 * VECTOR  # two vectors as packets


def make_meet(size: int) -> Any:
    """Return the kernel in which ``size`` ranks, two at least, meet."""
    region = layout(size).direct
    epochs, slots = region.epochs, region.slots
    others = size - 1
    where = make_where(size)

    @device_function
    def told(guard: Any, mail: int, epoch: int, record: int) -> Any:
        polls = 0
        started = 0
        digest, _, late = peek_packets(mail + 2 * VECTOR, VECTOR, epoch)
        first, second, missing = peek_packets(mail, VECTOR, epoch)
        while missing | late != 0:
            poll_pause()
            polls += 1
            if polls % POLLS_PER_CHECK == 0:
                if started == 0:
                    started = globaltimer()
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
        operation: int,
        digest: int,
        first: Any,
        second: Any,
    ) -> None:
        follow_previous_grid(early)
        thread = thread_index()
        epoch = word_of((ld_u32(own + epochs) + 1) & 0xFFFFFFFF)
        if thread < others:
            fence_acq_rel_sys()
        for k in range(others):
            if thread == k % THREADS:
                # The sender is its k-th neighbour's (n - 2 - k)-th.
                mail = ring[k] + slots + (others - 1 - k) * _BOX
                post_packets(mail, VECTOR, first[k], second[k], epoch)
                post_packets(mail + 2 * VECTOR, VECTOR, digest, 0, epoch)
        # The board is far away: it is looked at while the packets are on their way. For
        # whom theirs have come long ago, it has changed if they gave up.
        failure = 0
        if thread < others:
            failure = ld_relaxed_sys_u64(guard.board + 8 * guard.rank)
        k = thread
        while k < others:
            peer = (guard.rank + 1 + k) % size
            record = wait_record(operation, guard.rank, peer, 0, epoch)
            mail = own + slots + k * _BOX
            theirs, output, call, came = told(guard, mail, epoch, record)
            if came and call != digest:
                record = wait_record(CALL_MISMATCH, guard.rank, peer, 0, epoch)
                fail(guard, record)
                theirs = 0
            # Who refuses finds refusals, too.
            if first[0] == 0 or failure != 0:
                theirs = 0
            st_v2_u64(own + where(k), (theirs, output))
            k += THREADS
        if thread < others:
            fence_acq_rel_sys()

    return meet


def make_where(size: int) -> Callable[[int], int]:
    """Return a device function for ``size`` ranks.

    ``(k)`` returns the offset in the workspace of the two addresses that the k-th
    neighbour has told.
    """
    places = layout(size).direct.slots + (size - 1) * _BOX

    @device_function
    def where(k: int) -> int:
        return places + k * VECTOR

    return where


def make_refused(size: int) -> Callable[[int], bool]:
    """Return a device function for ``size`` ranks.

    ``(own)`` returns whether a rank refused when the ranks met last, or one did not
    come: the same on all ranks, unless a wait was given up.
    """
    others = size - 1
    where = make_where(size)

    @device_function
    def refused(own: int) -> bool:
        found = False
        for k in range(others):
            first, _ = ld_v2_u64(own + where(k))
            found = found or first == 0
        return found

    return refused


def make_left(size: int, operation: int) -> Callable[[Any, Any, int, int], bool]:
    """Return a device function for ``size`` ranks, for the third launch.

    ``(guard, ring, own, block)`` returns whether the message is left to be moved; if
    not, the ranks' first blocks have waited for each other. The whole block calls it.
    """
    region = layout(size).direct
    epochs, flags = region.epochs, region.flags
    refused = make_refused(size)
    tell, told, _ = make_flags(size, operation)

    @device_function
    def left(guard: Any, ring: Any, own: int, block: int) -> bool:
        to_do = refused(own)
        if block == 0:
            epoch = (ld_u32(own + epochs) + 1) & 0xFFFFFFFF
            # After a refusal, too: flags must not be 2**31 calls old.
            tell(ring, flags, guard.rank, epoch)
            if not to_do:
                told(guard, own + flags, 0, epoch, False)
            # All threads have read the epoch before they told.
            if thread_index() == 0:
                st_u32(own + epochs, epoch)
        return to_do

    return left


@functools.cache
def meet_kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    seen = types.UniTuple(ADDRESS, size - 1)
    return workspace.make_kernel(
        make_meet, (size,), types.int64, types.int64, seen, seen
    )


def bind(
    comm: Any,
    operation: int,
    call: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    move: Enqueue,
    rest: Enqueue,
) -> Enqueue:
    """Return the three launches, of which the second and third are given.

    Args:
        comm: the communicator.
        operation: what a record of a wait given up names.
        call: the call in words, equal on all ranks.
        inputs: what ``offered`` returned for the array that is read.
        outputs: the same for the one that is written.
        move: works on the arrays, unless they were refused.
        rest: works if they were, and calls ``left`` first.
    """
    args = (operation, digest_of(call), inputs, outputs)
    return InTurn(workspace.launch(meet_kernel(comm.size), comm, 1, *args), move, rest)


def offered(comm: Any, address: int, nbytes: int) -> tuple[int, ...]:
    """Return at which addresses the ring's ranks see an array, or zeros to refuse."""
    seen = comm.heap.seen(address, nbytes) if address % VECTOR == 0 else None
    if seen is None:
        seen = (0,) * comm.size
    return (*seen[comm.rank + 1 :], *seen[: comm.rank])
