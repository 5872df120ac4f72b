"""All-gather, all-to-all and partial reductions in one flight, for small messages.

All are one exchange: every thread posts a vector to its twin in every other rank and
takes what those post. They differ in what is sent (the same to all, or each rank its
own part) and in what becomes of it (stored, or reduced in rank order):

    all_gather       the same to all      stored, by rank
    all_to_all       each its part        stored, by rank
    reduce_scatter   each its part        reduced
    scan             the same to all      reduced, of the ranks up to this one
    exscan           the same to all      reduced, of the ranks before this one
    reduce           all to the root      reduced, on the root alone
    broadcast        the root's to all    stored

``mailboxes.py`` says how that needs no barrier, and orders the memory accesses. The
mailboxes are those of ``one_shot.py``. In every round thread 0 of each block exchanges
with all ranks, both ways: only so may the mailboxes be used again. Where a rank needs
nothing of another, thread 0 gets a digest of that one's call, and fails if it differs,
or came instead of data: a wrong root, say, would fill mailboxes that nobody empties.

In place is safe: a thread has loaded whatever it overwrites.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import workspace
from numba_symm.collectives.protocols.binding import digest_of
from numba_symm.collectives.protocols.mailboxes import (
    EVERYONE,
    TRANSPORTS,
    make_mailboxes,
    most_blocks,
)
from numba_symm.collectives.protocols.order import make_in_rank_order
from numba_symm.collectives.protocols.workspace import (
    ADDRESS,
    ONE_SHOT,
    THREADS,
    Region,
    divide_up,
    follow_previous_grid,
    is_ragged,
    keep,
    layout,
    resume,
)
from numba_symm.device.intrinsics import (
    device_function,
    fence_acq_rel_sys,
    word_of,
)
from numba_symm.device.lanes import Lanes, make_lanes
from numba_symm.device.signals import fail, wait_record
from numba_symm.dtypes import Element, Op, UserOperator, identity
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    CALL_MISMATCH,
    EXSCAN,
    REDUCE,
    REDUCE_SCATTER,
    SCAN,
)

DIGEST, _DIGEST = 0x2E0D7C5AB16F9483, 0x5CE1A08F
"""What tells a digest, the vector's lowest 32 bits, from data: the other 96 bits, which
data has by a chance of 2**-96."""


class Output(enum.Enum):
    """What becomes of the ranks' vectors."""

    PARTS = enum.auto()  # stored, by rank
    REDUCED = enum.auto()  # all are reduced
    UP_TO_THIS = enum.auto()  # those of this rank and the ranks before it are
    BEFORE_THIS = enum.auto()  # those of the ranks before it are
    AT_ROOT = enum.auto()  # all are, on the root; the other ranks have no output
    OF_ROOT = enum.auto()  # the root's is stored, on the other ranks

    @property
    def rooted(self) -> bool:
        """Whether all is sent to one rank, or by one."""
        return self in (Output.AT_ROOT, Output.OF_ROOT)

    @property
    def reduces(self) -> bool:
        """Whether there is an operator."""
        return self not in (Output.PARTS, Output.OF_ROOT)

    def taken(self, rank: int, size: int, root: int) -> int:
        """Return what ``rank`` needs to know for it, 0 if it stores nothing.

        Of how many ranks, from rank 0 on, it gets the reduction; where it gets the
        root's vector, how many places along the ring the root is.
        """
        return {
            Output.PARTS: 0,
            Output.REDUCED: size,
            Output.UP_TO_THIS: rank + 1,
            Output.BEFORE_THIS: rank,
            Output.AT_ROOT: size if rank == root else 0,
            Output.OF_ROOT: (root - rank) % size,
        }[self]

    def exchanged(self, rank: int, size: int, root: int) -> tuple[int, int]:
        """Return to whom ``rank`` sends and from whom it gets: bits along the ring."""
        to_root = 1 << (root - rank) % size >> 1
        of_all = EVERYONE if rank == root else 0
        if self is Output.OF_ROOT:
            return of_all, to_root
        return (to_root, of_all) if self is Output.AT_ROOT else (EVERYONE, EVERYONE)


class Exchange(NamedTuple):
    """What is sent, and what becomes of it.

    Attributes:
        parts_in: whether the input has a part for each rank, else one for all.
        output: what is done with what came.
        operation: what a record of a wait given up names.
    """

    parts_in: bool
    output: Output
    operation: int


EXCHANGES = {
    "all_gather": Exchange(False, Output.PARTS, ALL_GATHER),
    "all_to_all": Exchange(True, Output.PARTS, ALL_TO_ALL),
    "reduce_scatter": Exchange(True, Output.REDUCED, REDUCE_SCATTER),
    "scan": Exchange(False, Output.UP_TO_THIS, SCAN),
    "exscan": Exchange(False, Output.BEFORE_THIS, EXSCAN),
    "reduce": Exchange(False, Output.AT_ROOT, REDUCE),
    "broadcast": Exchange(False, Output.OF_ROOT, BROADCAST),
}
"""The operations, by name."""


def make_total(
    size: int, lanes: Lanes, output: Output
) -> Callable[[int, Any, Any, int], Any]:
    """Return a device function that reduces one vector of each rank, in rank order.

    ``(taken, low, high, first)`` returns the two words of the result; the words of rank
    r are in the local arrays at ``first + r``; ``taken`` is ``Output.taken``, at least
    1.
    """
    unpack, pack, combine, _, _ = lanes

    @device_function
    def of_all(taken: int, low: Any, high: Any, first: int) -> Any:
        total = unpack(low[first], high[first])
        for r in range(1, size):
            total = combine(total, unpack(low[first + r], high[first + r]))
        return pack(total)

    @device_function
    def of_some(taken: int, low: Any, high: Any, first: int) -> Any:
        total = unpack(low[first], high[first])
        # All ranks are looked at: every index is a constant, as in ``order.py``.
        for r in range(1, size):
            if r < taken:
                total = combine(total, unpack(low[first + r], high[first + r]))
        return pack(total)

    return of_some if output in (Output.UP_TO_THIS, Output.BEFORE_THIS) else of_all


def make_reduced(
    size: int, lanes: Lanes, output: Output
) -> Callable[[int, int, Any, Any, Any], Any]:
    """Return a device function that makes one vector of the ranks' vectors.

    ``(rank, taken, low, high, spare)`` returns its two words: the reduction in rank
    order, or the root's vector; ``taken`` is ``Output.taken``, at least 1. The arrays
    are ``in_rank_order``'s.
    """
    in_rank_order = make_in_rank_order(size)
    total = make_total(size, lanes, output)

    @device_function
    def reduced(rank: int, taken: int, low: Any, high: Any, spare: Any) -> Any:
        in_rank_order(rank, low, high, spare)
        return total(taken, low, high, 0)

    @device_function
    def of_root(rank: int, taken: int, low: Any, high: Any, spare: Any) -> Any:
        # By masks: of branches the compiler makes an index, and the arrays memory.
        first, second = 0, 0
        for k in range(1, size):
            mask = -word_of(k == taken)
            first |= low[k] & mask
            second |= high[k] & mask
        return first, second

    return of_root if output is Output.OF_ROOT else reduced


def of_none(element: Element, op: Op, output: Output) -> tuple[bool, int, int]:
    """Return whether anything is stored where no rank is reduced, and its two words.

    That is the operator's identity for the first rank of an exscan; nothing where it is
    not known, or where there is no output.
    """
    if output is not Output.BEFORE_THIS or isinstance(op, UserOperator):
        return False, 0, 0
    vector = np.full(element.lanes, identity(op, element.dtype), element.dtype)
    low, high = vector.view(np.int64).tolist()
    return True, low, high


def make_exchange(
    size: int,
    element: Element,
    op: Op,
    ragged: bool,
    transport: str,
    steps: int,
    kind: Exchange,
) -> Any:
    """Return the kernel; see ``one_shot.make_one_shot``."""
    region: Region = getattr(layout(size), f"one_shot_{transport}")
    lanes = make_lanes(element, op, ragged, size)
    load, store = lanes.load, lanes.store
    mail = make_mailboxes(
        size, transport, region, ONE_SHOT[transport], 1, kind.operation
    )
    next_epoch, box, _, _, post_one, receive, wipe, next_round = mail
    epochs = region.epochs
    others = size - 1
    parts_in, parts_out = kind.parts_in, kind.output is Output.PARTS
    rooted = kind.output.rooted
    reduced = make_reduced(size, lanes, kind.output)
    none_stored, none_low, none_high = of_none(element, op, kind.output)

    @device_function
    def alike(guard: Any, digest: int, got_of: int, low: Any, high: Any) -> bool:
        # Whether a digest, the same one, came where it was due, and only there.
        other = 0
        for k in range(others):
            due = got_of >> k & 1 == 0
            is_one = high[k + 1] == DIGEST and (low[k + 1] ^ digest) >> 32 == 0
            if due != is_one or (due and low[k + 1] != digest):
                other = k + 1
        if other != 0:
            peer = (guard.rank + other) % size
            fail(guard, wait_record(CALL_MISMATCH, guard.rank, peer, 0, 0))
        return other == 0

    def exchange(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        part: int,
        count: int,
        vectors: int,
        taken: int,
        sent_to: int,
        got_of: int,
        digest: int,
    ) -> None:
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        posted = sent_to if rooted and thread != 0 else EVERYONE  # explore: posted
        wanted = got_of if rooted and thread != 0 else EVERYONE  # explore: wanted
        own_low = cuda.local.array(steps, types.int64)
        own_high = cuda.local.array(steps, types.int64)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        stride = cuda.gridDim.x * THREADS
        epoch, failed = resume(own, epochs, block)
        start = block * THREADS + thread
        mine = source + guard.rank * part if parts_in else source
        # As long as the block's first thread has a vector: the block meets in between.
        while start - thread < vectors:
            epoch = next_epoch(epoch)
            for step in range(steps):
                vector = start + step * stride
                if vector < vectors:
                    own_low[step], own_high[step] = load(mine, vector, count)
                    for k in range(others):
                        r = (guard.rank + 1 + k) % size
                        if parts_in:
                            words = load(source + r * part, vector, count)
                        else:
                            words = own_low[step], own_high[step]
                        low[k], high[k] = words
                    boxes = box(block, epoch, 0, 0, step, thread)
                    for k in range(others):
                        if posted >> k & 1 != 0 and not failed:
                            words = low[k], high[k]
                            if rooted and sent_to >> k & 1 == 0:
                                words = digest, DIGEST
                            post_one(ring, k, boxes, words[0], words[1], epoch)
            for step in range(steps):
                vector = start + step * stride
                if vector < vectors and not failed:
                    boxes = own + box(block, epoch, 0, 0, step, thread)
                    failed = not receive(guard, boxes, epoch, block, low, high, wanted)
                    if rooted and thread == 0 and not failed:
                        failed = not alike(guard, digest, got_of, low, high)
                    if failed:  # explore: give-up
                        break
                    low[0] = own_low[step]
                    high[0] = own_high[step]
                    if parts_out:
                        for j in range(size):
                            there = target + (guard.rank + j) % size * part
                            store(there, vector, count, low[j], high[j])
                    elif taken > 0:
                        result = reduced(guard.rank, taken, low, high, spare)
                        store(target, vector, count, result[0], result[1])
                    elif none_stored:
                        store(target, vector, count, none_low, none_high)
            if not failed:
                wipe(own, block, epoch, thread)
            start += steps * stride
            if start - thread < vectors:
                if rooted and thread == 0:  # explore: fence
                    # What thread 0 has heard comes before the threads meet: of the
                    # ranks to which they post, they have heard nothing themselves.
                    fence_acq_rel_sys()
                failed = next_round(failed)
        keep(own, epochs, block, epoch, failed)

    return exchange


@functools.cache
def kernel(
    size: int,
    element: Element,
    op: Op,
    ragged: bool,
    transport: str,
    steps: int,
    kind: Exchange,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged, transport, steps, kind)
    arguments = (ADDRESS, ADDRESS, *7 * (types.int64,))
    weight = TRANSPORTS[transport].weight
    return workspace.make_kernel(make_exchange, constants, *arguments, weight=weight)


def bind(
    transport: str,
    kind: Exchange,
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int = 0,
) -> Launch:
    """Return the packed launch; see ``Bind`` in ``select.py``, ``operations.py``."""
    protocol = ONE_SHOT[transport]
    vectors = divide_up(count, element.lanes)
    most = most_blocks(comm, transport, protocol)
    grid = min(divide_up(vectors, THREADS), most)
    steps = protocol.needed(vectors, grid, comm.size)
    ragged = is_ragged(source, target, count, element.lanes)
    part = count * element.itemsize
    call = f"{kind.output.name} of {count} {element.name} by {op!r}, root {root}"
    return workspace.launch(
        kernel(comm.size, element, op, ragged, transport, steps, kind),
        *(comm, grid, source, target, part, count, vectors),
        kind.output.taken(comm.rank, comm.size, root),
        *kind.output.exchanged(comm.rank, comm.size, root),
        digest_of(call) | _DIGEST << 32,
    )
