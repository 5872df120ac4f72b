"""The exchange of a block with those of other ranks, and its memory.

One exchange of a block with the blocks of the same index on all other ranks.

It is the one-shot exchange of the library's own kernels, with packets of the LL
protocol (``packets.py``), but may be repeated within a kernel. So it does not rely on
the end of a kernel. It has two parts: a start posts, and a wait receives and uses what
has arrived. A thread may start as many exchanges as the workspace is deep, d, before it
waits for the first of them. It waits for them in the order of their starts.

Memory order. A thread exchanges data only with the threads of its index, one on every
other rank. The number of its exchanges is its epoch. In epoch k:

1. It stores k as its last start, and posts its vectors to every other rank, into the
   set of mailboxes of k modulo 2 d. All packets contain k.
2. In the wait, it stores k as its last wait, and polls the packets of k from every
   other rank, in its own memory.
3. It uses them. Nothing is cleared: packets of k are not taken for those of k + 2 d.

A thread posts k + 2 d into the set of k only after it has received k + d from every
rank, because it starts at most d that it has not received. Each of them has posted
k + d after it had received everything of k. So no packet is overwritten before it was
read, however often a kernel repeats that. With fewer sets, a rank would post k + 2 d
where another one has yet to read a later epoch than k. This requires that in every
epoch, each pair of ranks exchanges at least one vector in both directions. In a
broadcast, the ranks without data send a vector with the root that they expect. If
shards differ, each thread exchanges its first vector with every rank, even if the shard
is shorter. The ranks of a workspace are those of its team. So for several teams, a rank
has epochs and mailboxes of each.

Epochs overflow after 2**32 calls: of a microsecond each, after 72 minutes. Then a
mailbox that few calls use could hold a packet of 2**32 epochs ago. So a thread clears
all its mailboxes in the last epoch of each set. A peer stores there next 2 d epochs
later, after it has received the epoch between, d later, which the thread posts after it
has cleared the set. Two fences order these: the clearing thread's, before it posts the
epoch between, and the peer's, after it has received that epoch. The calls may be of
different kernels.

The block synchronizes where its threads use data that other threads of the block have
stored, and to agree whether a thread has failed. After a failure, every thread of the
block keeps ``FAILED`` as its last start. All blocks of the rank find the failure in
their marks. So no later call posts or stores anything, in this kernel or in the next
one.

In the simulator and in debug mode, the first thread of a block also sends what it calls
to every other rank, with each of its epochs: a vector of one's own, behind the others.
It has the operation, and the bytes that the other rank must expect. So the threads
compare sizes exactly, without a store that orders anything else.

Later kernels continue with the epochs and the mailboxes. For that, a kernel's stores
must be visible to the stream's later kernels: ``starts_see`` in docs/protocols.md.

The memory of collectives within kernels, and the context that kernels take.

A workspace has these parts on each rank, one after another:

- for each block, a word that is 0 until the rank fails;
- for each thread of each block the epochs of its last start and of its last wait, two
  uint32;
- for each set, other rank, vector, block and thread a mailbox: two packets. If calls
  are compared, there is one more vector.

The address of a mailbox follows from these numbers and from the workspace's own sizes,
never from a call's.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from numba_symm.device.checks import (
    check_counts,
    check_exchange,
    check_shards,
    check_started,
    tells,
)
from numba_symm.device.intrinsics import (
    block_size,
    cuda,
    device_function,
    fence_acq_rel_sys,
    grid_index,
    ld_relaxed_sys_u32,
    ld_u32,
    load_bits,
    st_relaxed_sys_u32,
    st_relaxed_sys_v2_u64,
    st_u32,
    store_bits,
    syncthreads,
    syncthreads_or,
    thread_index,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.order import (
    make_mirror,
    make_of_ring,
    of_none,
)
from numba_symm.device.packets import make_poll, peek_packets, post_packets
from numba_symm.device.polling import fail, wait_record
from numba_symm.device.signals import CHANNELS
from numba_symm.device.teams import Team
from numba_symm.dtypes import Element, Op
from numba_symm.launch.failures import (
    BLOCK_ALL_GATHER,
    BLOCK_ALL_REDUCE,
    BLOCK_ALL_TO_ALL,
    BLOCK_BROADCAST,
    BLOCK_EXSCAN,
    BLOCK_REDUCE_SCATTER,
    ROOT_MISMATCH,
    SIZE_MISMATCH,
)

VECTOR = 16
"""Bytes that a thread sends at a time."""

WARP = 32
"""Threads whose packets are adjacent."""

PACKETS = WARP * VECTOR
"""Bytes from a vector's first packet to its second one."""

MARK = 128
"""Bytes of a block's mark: a cache line, because blocks load theirs in each call."""

EPOCHS = 8
"""Bytes of a thread's epochs: of its last start and, 4 bytes later, its last wait."""


class TeamGuard(NamedTuple):
    """A :class:`Guard`, and the ranks of a team: the others along the ring, then this.

    Attributes:
        board: as of the guard.
        rank: as of the guard.
        size: as of the guard.
        timeout: as of the guard.
        ranks: the ranks.
    """

    board: int
    rank: int
    size: int
    timeout: int
    ranks: tuple[int, ...]


class _WorkspaceFields(NamedTuple):
    rank: int
    size: int
    buffers: tuple[int, ...]
    pads: tuple[int, ...]
    guard: TeamGuard
    team: Team
    ring: tuple[int, ...]
    blocks: int
    threads: int
    vectors: int
    depth: int = 1


class WorkspaceContext(_WorkspaceFields):
    """The device workspace of a kernel, passed as an ordinary argument.

    It is also a :class:`Context`: of the memory that ``comm.device_workspace`` was
    passed, or else of signal pads only. The last five attributes are for the host only.
    Like an array, the object keeps the memory alive.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        buffers: the address of every rank's buffer in this process.
        pads: the address of every rank's signal pad in this process.
        guard: the timeout, and the address to which a kernel reports a failure.
        team: the ranks of the collectives, of which this one's index is ``team.place``.
        ring: the addresses of the team's workspaces, beginning with the next rank's and
            ending with this rank's.
        blocks: the maximum number of blocks of a kernel.
        threads: the maximum number of threads of a block, a multiple of 32.
        vectors: the maximum number of 16-byte vectors that a thread sends to a rank in
            a call.
        depth: the maximum number of collectives that are started and not awaited, a
            power of two.
        starts: in the simulator, by block and thread, the last start.
        owner: the object that keeps the memory alive.
        buffer_size: the bytes of a buffer.
        channels: the number of channels of a pad.
        check_mapped: as in :class:`Context`.
    """

    starts: Any = None
    owner: Any = None
    buffer_size: int | None = None
    channels: int = CHANNELS
    check_mapped: Callable[[], None] | None = None
    checked = False  # by device functions on GPUs, see ``checks.py``


class CheckedWorkspaceContext(WorkspaceContext):
    """A workspace in debug mode: device functions check arguments on GPUs, too.

    Attributes:
        nbytes: the bytes of a buffer, for kernels.
        pad_channels: the number of channels of a pad, for kernels.
    """

    _fields: Any = (*_WorkspaceFields._fields, "nbytes", "pad_channels")
    checked = True

    def __new__(cls, *values: Any) -> "CheckedWorkspaceContext":
        """Return the context of the fields' values."""
        return tuple.__new__(cls, values)


def nbytes(size: int, blocks: int, threads: int, vectors: int, depth: int) -> int:
    """Return the bytes of a workspace; ``threads`` is a multiple of 32."""
    boxes = 2 * depth * (size - 1) * vectors * blocks * 2 * threads * VECTOR
    return MARK * blocks + EPOCHS * blocks * threads + boxes


class Start(NamedTuple):
    """Where a thread has started a collective: for errors, in the simulator."""

    file: str
    line: int
    function: str


def not_awaited(ws: Any, words: Any) -> tuple[str, Start] | None:
    """Return the text of an error if a thread has not awaited what it started.

    Args:
        ws: the workspace's context.
        words: the epochs of all threads, an array of uint32.
    """
    started, awaited = words.reshape(-1, 2).T
    late = np.flatnonzero((started != awaited) & (started != FAILED))
    if not late.size:
        return None
    block, thread = divmod(int(late[0]), ws.threads)
    start = ws.starts[block, thread]
    return (
        f"{start.function}: expected a wait before the kernel ends, got none by thread "
        f"{thread} of block {block}; call {start.function[:-5]}wait"
    ), start


@device_function
def epoch_of(ws: Any, block: int, thread: int) -> int:
    """Return the offset of a thread's epochs."""
    # explore: epoch
    return MARK * ws.blocks + EPOCHS * (ws.threads * block + thread)  # type: ignore[no-any-return]


@device_function
def rank_stride(ws: Any) -> int:
    """Return the bytes from a mailbox to that of the next rank along the ring."""
    # explore: ranks
    return (ws.vectors + tells(ws, 0)) * tile_stride(ws)  # type: ignore[no-any-return]


@device_function
def tile_stride(ws: Any) -> int:
    """Return the bytes from a mailbox to that of the thread's next vector."""
    # explore: vectors
    return ws.blocks * ws.threads * 2 * VECTOR  # type: ignore[no-any-return]


@device_function
def box_of(ws: Any, block: int, thread: int, epoch: int) -> int:
    """Return the offset of a thread's first mailbox, for its first vector."""
    boxes = MARK * ws.blocks + EPOCHS * ws.threads * ws.blocks
    # explore: set
    set_of_epoch = (epoch & (2 * ws.depth - 1)) * (ws.team.size - 1) * rank_stride(ws)
    line = block * ws.threads * 2 * VECTOR  # explore: line
    warp, lane = thread // WARP, thread % WARP
    return boxes + set_of_epoch + line + warp * 2 * PACKETS + lane * VECTOR  # type: ignore[no-any-return]


MOST_DEPTH = 64
"""The most collectives that are started and not awaited."""

LAST_EPOCH = 2**32 - 2 * MOST_DEPTH  # explore: last-epoch
"""The epoch after which 1 follows: a multiple of the number of sets, so that these
continue to alternate."""

FAILED = 2**32 - 1
"""Kept instead of an epoch after a failure."""

NO_DATA, _NO_DATA = 0x3F1B52C8D7E6490A, 0x6C0F9A35
"""The upper 96 bits of a vector without data, whose lowest 32 bits are the expected
root. Data has them with a probability of 2**-96."""

EVERYONE = -1


class BlockCollective(NamedTuple):
    """A collective within a kernel.

    Attributes:
        name: its name.
        operation: the number in ``launch/failures.py`` for a wait that is given up.
        sends_shards: whether a rank sends a shard to each rank, else the same to all.
        reduces: whether the vectors of all ranks are reduced.
        gathers: whether they are stored by rank.
        rooted: whether one rank's are stored.
        scans: whether only the vectors of the ranks before this one are reduced.
    """

    name: str
    operation: int
    sends_shards: bool = False
    reduces: bool = False
    gathers: bool = False
    rooted: bool = False
    scans: bool = False


ALL_REDUCE = BlockCollective("all_reduce", BLOCK_ALL_REDUCE, reduces=True)
REDUCE_SCATTER = BlockCollective(
    "reduce_scatter", BLOCK_REDUCE_SCATTER, sends_shards=True, reduces=True
)
EXSCAN = BlockCollective("exscan", BLOCK_EXSCAN, reduces=True, scans=True)
ALL_GATHER = BlockCollective("all_gather", BLOCK_ALL_GATHER, gathers=True)
BROADCAST = BlockCollective("broadcast", BLOCK_BROADCAST, rooted=True)
ALL_TO_ALL = BlockCollective(
    "all_to_all", BLOCK_ALL_TO_ALL, sends_shards=True, gathers=True
)


@device_function
def _peek(box: int, epoch: int) -> Any:
    return peek_packets(box, PACKETS, epoch)


@device_function
def _late(guard: Any, k: int) -> int:
    return guard.ranks[k]  # type: ignore[no-any-return]


@device_function
def _next_epoch(epoch: int) -> int:
    return 1 if epoch >= LAST_EPOCH else epoch + 1  # explore: next


@device_function
def _without_data(root: int) -> int:
    """Return the first word of a vector without data."""
    return word_of(root) | _NO_DATA << 32


@functools.cache
def make_access(unit: int) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return device functions that load and store a vector of an array.

    ``load(array, first, end)`` returns two words; ``store(array, first, end, low,
    high)``. A vector begins at unit ``first``; from unit ``end`` on, there is nothing:
    zeros. A unit is 1, 2, 4 or 8 bytes.
    """
    half, width = 8 // unit, 8 * unit

    @device_function
    def load_word(array: Any, first: int, end: int) -> int:
        word = 0
        for lane in range(half):
            if first + lane < end:
                word |= word_of(load_bits(array, first + lane)) << lane * width
        return word_of(word)

    @device_function
    def store_word(array: Any, first: int, end: int, word: int) -> None:
        for lane in range(half):
            if first + lane < end:
                store_bits(array, first + lane, word >> lane * width)

    @device_function
    def load(array: Any, first: int, end: int) -> Any:
        low = load_word(array, first, end)
        return low, load_word(array, first + half, end)

    @device_function
    def store(array: Any, first: int, end: int, low: int, high: int) -> None:
        store_word(array, first, end, low)
        store_word(array, first + half, end, high)

    return load, store


class ShardUnits(NamedTuple):
    """The device functions for the shards of an array, in units.

    Attributes:
        of: ``(ws, counts, count, place)`` returns the first unit of a rank's shard, and
            its number of units. ``counts`` are the ranks' numbers of elements, or None:
            all shards have ``count`` units.
        most: ``(ws, counts, count)`` returns the units of the largest shard.
        wanted: ``(ws, counts, count, first, begin)`` returns which other ranks' shards
            have a vector at unit ``first``, as bits along the ring. Those of a thread's
            first vector, at ``begin``, are all exchanged, so that each pair of ranks
            exchanges one in both directions.
    """

    of: Callable[..., tuple[int, int]]
    most: Callable[..., int]
    wanted: Callable[..., int]


@functools.cache
def make_shards(size: int, pieces: int, divided: bool, varied: bool) -> ShardUnits:
    """Return the functions for an array that is divided, or is this rank's one shard.

    Args:
        size: the number of ranks.
        pieces: the units of an element.
        divided: whether the array has a shard of each rank.
        varied: whether the shards differ.
    """

    @device_function
    def of(ws: Any, counts: Any, count: int, place: int) -> Any:
        return (place * count if divided else 0), count

    @device_function
    def most(ws: Any, counts: Any, count: int) -> int:
        return count

    @device_function
    def wanted(ws: Any, counts: Any, count: int, first: int, begin: int) -> int:
        return EVERYONE

    @device_function
    def of_counts(ws: Any, counts: Any, count: int, place: int) -> Any:
        start, mine = 0, place if divided else ws.team.place
        units = 0
        for r in range(size):
            here = word_of(counts[r]) * pieces  # of any width
            start += here if divided and r < mine else 0
            units = here if r == mine else units
        return start, units

    @device_function
    def most_of_counts(ws: Any, counts: Any, count: int) -> int:
        found = 0
        check_counts(ws, counts, size)
        for r in range(size):
            found = max(found, of_counts(ws, counts, count, r)[1])
        return found

    @device_function
    def wanted_of_counts(
        ws: Any, counts: Any, count: int, first: int, begin: int
    ) -> int:
        found = EVERYONE if first == begin else 0  # explore: first-of-all
        for k in range(size - 1):
            place = (ws.team.place + 1 + k) % size
            if first < of_counts(ws, counts, count, place)[1]:
                found |= 1 << k
        return found

    if varied:
        return ShardUnits(of_counts, most_of_counts, wanted_of_counts)
    return ShardUnits(of, most, wanted)


@functools.cache
def make_post(
    size: int, unit: int, kind: BlockCollective, shards: ShardUnits
) -> Callable[..., None]:
    """Return a device function that posts a vector to each other rank.

    ``(ws, x, counts, place, box, epoch, root)``; ``place`` is ``(first, begin,
    count)``: the vector's first unit in a shard, that of the thread's first vector, and
    the shard's units. ``box`` is the offset of its mailbox.
    """
    load, _ = make_access(unit)
    mirror = make_mirror(size)
    others, rooted = size - 1, kind.rooted

    @device_function
    def post(
        ws: Any, x: Any, counts: Any, place: Any, box: int, epoch: int, root: int
    ) -> None:
        first, begin, count = place
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        wanted = shards.wanted(ws, counts, count, first, begin)
        for k in range(others):
            if rooted and ws.team.place != root:
                low[k], high[k] = _without_data(root), NO_DATA
            else:
                peer = (ws.team.place + 1 + k) % size
                start, units = shards.of(ws, counts, count, peer)
                low[k], high[k] = load(x, start + first, start + units)
        for k in range(others):
            if wanted >> k & 1 != 0:
                there = ws.ring[k] + box + mirror(k) * rank_stride(ws)
                post_packets(there, PACKETS, low[k], high[k], epoch)

    return post


@functools.cache
def make_use(
    size: int,
    element: Element,
    op: Op,
    unit: int,
    kind: BlockCollective,
    shards: ShardUnits,
) -> Callable[..., None]:
    """Return a device function that reduces or stores the vectors of all ranks.

    ``(ws, out, counts, place, root, low, high)``: the own vector, and then the ring's.
    """
    _, store = make_access(unit)
    of_ring = make_of_ring(size, make_lanes(element, op, False, size), False)
    reduces, rooted, scans = kind.reduces, kind.rooted, kind.scans
    none_stored, none_low, none_high = of_none(element, op) if scans else (False, 0, 0)

    @device_function
    def use(
        ws: Any, out: Any, counts: Any, place: Any, root: int, low: Any, high: Any
    ) -> None:
        first, _, count = place
        rank = ws.team.place
        if reduces:
            spare = cuda.local.array(size, types.int64)
            _, units = shards.of(ws, counts, count, rank)
            number = max(rank, 1) if scans else size
            result = of_ring(rank, low, high, spare, number)
            if scans and rank == 0:
                result = none_low, none_high
            if not scans or none_stored or rank > 0:
                store(out, first, units, result[0], result[1])
        elif rooted:
            for k in range(1, size):
                if k == (root - rank + size) % size:
                    store(out, first, count, low[k], high[k])
        else:
            for k in range(size):
                start, units = shards.of(ws, counts, count, (rank + k) % size)
                store(out, start + first, start + units, low[k], high[k])

    return use


@functools.cache
def make_roots_match(size: int) -> Callable[..., bool]:
    """Return a device function that checks what the others send in a broadcast.

    ``(ws, root, block, low, high)`` returns whether the root has sent data, and all
    others that they expect the same root.
    """

    @device_function
    def roots_match(ws: Any, root: int, block: int, low: Any, high: Any) -> bool:
        other = -1
        for k in range(1, size):
            is_root = (ws.team.place + k) % size == root
            wrong = low[k] ^ _without_data(root)
            is_none = high[k] == NO_DATA and wrong >> 32 == 0  # explore: is-none
            if is_none == is_root or (is_none and wrong != 0):
                other = ws.guard.ranks[k - 1]
        if other >= 0:
            fail(ws.guard, wait_record(ROOT_MISMATCH, ws.rank, other, block, root))
        return other < 0

    return roots_match


@device_function
def _follows_wipe(ws: Any, epoch: int) -> bool:
    """Return whether peers may store d epochs later what has been cleared d before."""
    # explore: follows
    return epoch > LAST_EPOCH - ws.depth or epoch <= ws.depth  # type: ignore[no-any-return]


@functools.cache
def make_comparison(
    size: int, unit: int, kind: BlockCollective, sent: ShardUnits, received: ShardUnits
) -> tuple[Callable[..., None], Callable[..., bool]]:
    """Return device functions that tell the other ranks a call, and compare theirs.

    Only the threads do so that :func:`tells` names; for others, calls are equal.
    ``(ws, counts, count, box, epoch)``; ``box`` is the offset of the thread's first
    mailbox.
    """
    poll, mirror = make_poll(size, _peek, _late), make_mirror(size)
    operation = kind.operation

    @device_function
    def tell(ws: Any, counts: Any, count: int, box: int, epoch: int) -> None:
        box += ws.vectors * tile_stride(ws)
        for k in range(size - 1 if tells(ws, thread_index()) else 0):
            _, units = sent.of(ws, counts, count, (ws.team.place + 1 + k) % size)
            there = ws.ring[k] + box + mirror(k) * rank_stride(ws)
            post_packets(there, PACKETS, units * unit, operation, epoch)

    @device_function
    def compare(ws: Any, counts: Any, count: int, box: int, epoch: int) -> bool:
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        here = ws.ring[size - 1] + box + ws.vectors * tile_stride(ws)
        block, stride = grid_index(), rank_stride(ws)
        if not tells(ws, thread_index()):
            return True
        arrived = poll(
            ws.guard, operation, here, stride, epoch, block, low, high, EVERYONE
        )
        other, wanted = -1, 0
        for k in range(1, size):
            _, units = received.of(ws, counts, count, (ws.team.place + k) % size)
            if low[k] != units * unit or high[k] != operation:
                other, wanted = ws.guard.ranks[k - 1], units * unit
        if arrived and other >= 0:
            fail(ws.guard, wait_record(SIZE_MISMATCH, ws.rank, other, block, wanted))
        return arrived and other < 0

    return tell, compare


@functools.cache
def make_wipe(size: int) -> Callable[[Any, int, int], None]:
    """Return a device function that clears a thread's mailboxes as epochs overflow.

    ``(ws, box, epoch)``: those of the set that begins at the offset ``box``.
    """

    @device_function
    def wipe(ws: Any, box: int, epoch: int) -> None:
        if epoch > LAST_EPOCH - 2 * ws.depth:  # explore: wipe
            for i in range((size - 1) * (ws.vectors + tells(ws, 0))):
                at = ws.ring[size - 1] + box + i * tile_stride(ws)
                st_relaxed_sys_v2_u64(at, (0, 0))
                st_relaxed_sys_v2_u64(at + PACKETS, (0, 0))  # explore: wipe-second

    return wipe


@device_function
def _give_up(ws: Any, own: int, block: int, thread: int) -> None:
    """Keep that the rank has failed; all threads of the block call it."""
    st_u32(own + epoch_of(ws, block, thread), FAILED)  # explore: keep-failure
    while thread < ws.blocks:
        st_relaxed_sys_u32(own + MARK * thread, 1)
        thread += block_size()


@functools.cache
def make_receive(
    size: int,
    element: Element,
    op: Op,
    unit: int,
    kind: BlockCollective,
    sent: ShardUnits,
    received: ShardUnits,
) -> Callable[..., bool]:
    """Return a device function that waits for a vector of each rank, and uses it.

    ``(ws, x, out, counts, place, box, epoch, root)``, as for :func:`make_post`, but
    with the counts of what the rank sends and of what it receives.
    """
    load, _ = make_access(unit)
    poll, roots_match = make_poll(size, _peek, _late), make_roots_match(size)
    use = make_use(size, element, op, unit, kind, received)
    operation, rooted = kind.operation, kind.rooted

    @device_function
    def receive(
        ws: Any,
        x: Any,
        out: Any,
        counts: Any,
        place: Any,
        box: int,
        epoch: int,
        root: int,
    ) -> bool:
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        first, begin, count = place
        block = grid_index()
        here = ws.ring[size - 1] + box
        stride = rank_stride(ws)
        wanted = received.wanted(ws, counts[1], count, first, begin)
        arrived = poll(  # explore: wait
            ws.guard, operation, here, stride, epoch, block, low, high, wanted
        )
        if arrived and rooted:  # explore: roots
            arrived = roots_match(ws, root, block, low, high)
        if arrived:  # explore: arrived
            start, units = sent.of(ws, counts[0], count, ws.team.place)
            low[0], high[0] = load(x, start + first, start + units)
            use(ws, out, counts[1], place, root, low, high)
        return arrived

    return receive


class ExchangeParts(NamedTuple):
    """The device functions of a collective.

    Attributes:
        start: ``(ws, x, root, counts)`` posts. ``counts`` are the numbers of elements
            of the shards to send, and of those to receive; each is None if they are
            equal.
        wait: ``(ws, x, out, root, counts)`` returns, in all threads of the block,
            whether the oldest exchange that was not awaited succeeded.
    """

    start: Callable[..., None]
    wait: Callable[..., bool]


@functools.cache
def make_exchange(
    size: int,
    element: Element,
    op: Op,
    kind: BlockCollective,
    items: bool,
    varied: bool = False,
) -> ExchangeParts:
    """Return the device functions of a collective.

    Args:
        size: the number of ranks.
        element: the elements' type.
        op: the operator; any, if the collective has none.
        kind: the collective.
        items: whether arrays are each thread's own, or the block's.
        varied: whether shards may differ.
    """
    unit = min(8, element.itemsize)  # an element of 16 bytes is two units
    units, pieces = VECTOR // unit, element.itemsize // unit
    sent = make_shards(size, pieces, kind.sends_shards, varied)
    received = make_shards(size, pieces, kind.gathers, varied)
    post, wipe = make_post(size, unit, kind, sent), make_wipe(size)
    receive = make_receive(size, element, op, unit, kind, sent, received)
    tell, compare = make_comparison(size, unit, kind, sent, received)
    shards = size if kind.sends_shards else 1

    @device_function
    def start(ws: Any, x: Any, root: int, counts: Any) -> None:
        thread, block = thread_index(), grid_index()
        count = x.size * pieces // shards
        most = sent.most(ws, counts[0], count)
        first, stride = (0, units) if items else (thread * units, block_size() * units)
        check_exchange(ws, most - first, stride, root)
        if not items:
            # Other threads of the block have stored what this one loads.
            syncthreads()  # explore: stored
        own = ws.ring[size - 1]
        kept = own + epoch_of(ws, block, thread)
        epoch = word_of(ld_u32(kept))
        # explore: find
        if ld_relaxed_sys_u32(own + MARK * block) != 0 or epoch == FAILED:
            # The wait finds it, whether another start posts meanwhile or not.
            st_u32(kept, FAILED)  # explore: refuse
        elif varied or first < count or tells(ws, thread):
            # A thread without data is without data on all ranks: its epoch stays.
            # If the shards differ, only the peer may have data for it.
            check_started(ws, kept, LAST_EPOCH, 0, ws.depth - 1)
            epoch = _next_epoch(epoch)
            st_u32(kept, epoch)  # explore: keep
            if _follows_wipe(ws, epoch):
                # The mailboxes are clear before this epoch is posted.
                fence_acq_rel_sys()  # explore: wiped
            box, at = box_of(ws, block, thread, epoch), first
            tell(ws, counts[0], count, box, epoch)
            while at < most or (varied and at == first):
                post(ws, x, counts[0], (at, first, count), box, epoch, root)
                at += stride
                box += tile_stride(ws)

    @device_function
    def wait(ws: Any, x: Any, out: Any, root: int, counts: Any) -> bool:
        thread, block = thread_index(), grid_index()
        count = x.size * pieces // shards
        most = received.most(ws, counts[1], count)
        first, stride = (0, units) if items else (thread * units, block_size() * units)
        if varied:
            check_exchange(ws, most - first, stride, root)
        given = sent.of(ws, counts[0], count, size - 1)
        taken = received.of(ws, counts[1], count, size - 1)
        ends = given[0] + given[1], taken[0] + taken[1]
        check_shards(ws, pieces, x.size, out.size, ends)
        own = ws.ring[size - 1]
        kept = own + epoch_of(ws, block, thread)
        failed = word_of(ld_u32(kept)) == FAILED
        if (varied or first < count or tells(ws, thread)) and not failed:
            check_started(ws, kept, LAST_EPOCH, 1, ws.depth)
            epoch = _next_epoch(word_of(ld_u32(kept + 4)))
            st_u32(kept + 4, epoch)  # explore: keep-wait
            begin = box_of(ws, block, thread, epoch)
            box, at = begin, first
            failed = not compare(ws, counts[1], count, begin, epoch)
            while (at < most or (varied and at == first)) and not failed:
                place = at, first, count
                failed = not receive(ws, x, out, counts, place, box, epoch, root)
                at += stride
                box += tile_stride(ws)
            if not failed:
                wipe(ws, begin, epoch)
                if _follows_wipe(ws, epoch):
                    # The peers had cleared their mailboxes before they posted this
                    # epoch, and so before this thread stores there again.
                    fence_acq_rel_sys()  # explore: follows-wipe
        # Their results, too, become visible to the whole block.
        failed = syncthreads_or(failed)  # explore: agree
        if failed:
            _give_up(ws, own, block, thread)
        return not failed

    return ExchangeParts(start, wait)
