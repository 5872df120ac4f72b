"""How kernels work on the ranks' own arrays, without the workspace between.

Block by block, each rank tells every other at which addresses that one sees its arrays,
in packets of mailboxes (``mailboxes.py``) with the call's epoch. A rank whose array is
not symmetric, or not on a 16-byte boundary, tells 0 instead: then all ranks leave the
call to the kernel that follows on the stream, which goes through the workspace.

Memory order. A fence before the packets puts what the rank's stream did before, which
the start of this kernel has made visible to the thread, before them; a fence after they
have come, and ``syncthreads``, puts what the block does with the others' arrays after
them. So nobody reads an array before it is written, or writes one that is in use.

A digest of the call comes with the addresses, as others' arrays are written: ranks that
differ fail together, before any is. A rank that comes when others have given up writes
nothing either; only a failure while it is past its look at the board comes too late.

A mailbox is used again in the next call, in which a rank is only after all others have
read it: this kernel, or the one that follows it, ends by waiting for them.
"""

from collections.abc import Callable
from typing import Any

from numba_symm.collectives.mailboxes import peek_packets, post_packets
from numba_symm.collectives.workspace import MAX_BLOCKS, THREADS, VECTOR, layout
from numba_symm.device.intrinsics import (
    device_function,
    fence_acq_rel_sys,
    globaltimer,
    ld_relaxed_sys_u64,
    ld_v2_u64,
    poll_pause,
    st_v2_u64,
    syncthreads,
    thread_index,
)
from numba_symm.device.signals import (
    MISMATCH,
    POLLS_PER_CHECK,
    fail,
    must_give_up,
    wait_record,
)

_BOX = 4 * VECTOR  # two vectors as packets


def make_meet(
    size: int, operation: int
) -> Callable[[Any, Any, int, int, int, int, Any, Any], None]:
    """Return the device function in which a block of all ranks meets.

    ``(guard, ring, own, block, epoch, digest, first, second)`` tells the others the
    call's digest and the addresses at which they see this rank's two arrays, tuples
    along the ring, and waits for theirs; 0 in ``first`` refuses. The whole block calls
    it, and all of it waits for it.

    Args:
        size: number of ranks, two at least.
        operation: what a record of a wait given up names.
    """
    slots = layout(size).direct.slots
    others = size - 1
    where = make_where(size)

    @device_function
    def box(block: int, k: int) -> int:
        return slots + (block * others + k) * _BOX

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
        return first, second, digest, True

    @device_function
    def meet(
        guard: Any,
        ring: Any,
        own: int,
        block: int,
        epoch: int,
        digest: int,
        first: Any,
        second: Any,
    ) -> None:
        thread = thread_index()
        # Looked at now, as the board is far away: what came long ago finds it changed.
        failure = 0
        if thread < others:
            failure = ld_relaxed_sys_u64(guard.board + 8 * guard.rank)
        if thread < others:
            fence_acq_rel_sys()
        for k in range(others):
            if thread == k % THREADS:
                # The sender is its k-th neighbour's (n - 2 - k)-th.
                mail = ring[k] + box(block, others - 1 - k)
                post_packets(mail, VECTOR, first[k], second[k], epoch)
                post_packets(mail + 2 * VECTOR, VECTOR, digest, 0, epoch)
        for k in range(others):
            if thread == k % THREADS:
                peer = (guard.rank + 1 + k) % size
                record = wait_record(operation, guard.rank, peer, block, epoch)
                mail = own + box(block, k)
                theirs, output, call, came = told(guard, mail, epoch, record)
                if came and call != digest:
                    record = wait_record(MISMATCH, guard.rank, peer, 0, epoch)
                    fail(guard, record)
                    theirs = 0
                # Who refuses finds refusals, too.
                if first[k] == 0 or failure != 0:
                    theirs = 0
                st_v2_u64(own + where(block, k), (theirs, output))
        if thread < others:
            fence_acq_rel_sys()
        syncthreads()

    return meet


def make_where(size: int) -> Callable[[int, int], int]:
    """Return a device function for ``size`` ranks.

    ``(block, k)`` returns the offset in the workspace of the two addresses that the
    k-th neighbour has told a block.
    """
    slots = layout(size).direct.slots
    others = size - 1
    places = slots + MAX_BLOCKS * others * _BOX

    @device_function
    def where(block: int, k: int) -> int:
        return places + (block * others + k) * VECTOR

    return where


def make_refused(size: int) -> Callable[[int, int], bool]:
    """Return a device function for ``size`` ranks.

    ``(own, block)`` returns whether a rank refused when the block met last, or one did
    not come: the same on all ranks, and in all blocks, unless a wait was given up.
    """
    others = size - 1
    where = make_where(size)

    @device_function
    def refused(own: int, block: int) -> bool:
        found = False
        for k in range(others):
            first, _ = ld_v2_u64(own + where(block, k))
            found = found or first == 0
        return found

    return refused


def offered(comm: Any, address: int, nbytes: int) -> tuple[int, ...]:
    """Return at which addresses the ring's ranks see an array, or zeros to refuse."""
    seen = comm.heap.seen(address, nbytes) if address % VECTOR == 0 else None
    if seen is None:
        seen = (0,) * comm.size
    return (*seen[comm.rank + 1 :], *seen[: comm.rank])
