"""Messages between pairs of ranks: any number at a time, of any sizes, by one kernel.

All calls that are not an exchange of every rank with every other consist of these:
sends and receives, their groups, and the collectives whose ranks send different
amounts.

Each ordered pair of ranks has channels, with a block at each end. A message is divided
into chunks, which are distributed over the channels cyclically. Both ends number a
channel's chunks from 1 on indefinitely, and in the same way, because a chunk's size and
channel follow from the bytes of its message alone. Chunk e uses slot e % DEPTH at the
receiver:

    sender      waits for the credit of chunk e - DEPTH, stores chunk e in the slot,
                raises the slot's flag: e, and how many bytes the message has
    receiver    waits for the flag, copies the slot into its array, gives credit for e

Nothing else synchronizes the ranks: a sender may be DEPTH chunks of each channel ahead.
All pairs of a launch progress side by side, because each end of a channel has a block
of its own.

Memory order. The flag's release follows the whole block's stores of the chunk, and the
receiver's acquire precedes its whole block's loads. The credit's release follows the
whole block's loads, and the sender's acquire precedes its next stores into the slot.
Each end counts chunks in its own workspace. Only the block of that channel accesses the
count, in one launch after the other.

Source: the point-to-point kernels of NCCL.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm import dtypes
from numba_symm.collectives.protocols import binding
from numba_symm.collectives.protocols.binding import Endpoint
from numba_symm.collectives.protocols.order import make_mirror
from numba_symm.collectives.protocols.workspace import (
    DEPTH,
    ROW,
    THREADS,
    VECTOR,
    channels_of,
    divide_up,
    follow_previous_grid,
    keep,
    layout,
    resume,
    sync_block,
    sync_block_or,
    transfer_rows,
)
from numba_symm.device.intrinsics import (
    device_function,
    fence_acq_rel_sys,
    ld_acquire_sys_u64,
    ld_relaxed_sys_u64,
    ld_v2_u64,
    row_index,
    st_relaxed_sys_u32,
    st_relaxed_sys_u64,
    st_v2_u64,
    thread_index_x,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.polling import fail, make_wait, wait_for_epoch, wait_record
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import TRANSFER, TRANSFER_MISMATCH

ABSENT = -1
"""Replaces the bytes of a message that does not exist."""

_ARGUMENTS = 3584  # bytes of a kernel's arguments that may be messages, of 4096


def most_messages(size: int) -> int:
    """Return how many messages a pair may have in a launch, each way."""
    return 1 << (_ARGUMENTS // (32 * max(1, size - 1))).bit_length() - 1


LOADS = 4  # vectors that a thread loads before it stores them

_LOW_HALF = 0xFFFFFFFF


class Message(NamedTuple):
    """What one rank sends to, or receives from, another.

    Attributes:
        peer: the other rank.
        address: where it is loaded, or stored.
        nbytes: how much, equal at both ends.
    """

    peer: int
    address: int
    nbytes: int


@device_function
def _has_epoch(flag: int, epoch: int) -> bool:
    return ld_acquire_sys_u64(flag) & _LOW_HALF == epoch  # explore: await


_await_chunk = make_wait(_has_epoch)


def make_transfer(
    size: int, width: int, ragged: bool, messages: int, channels: int
) -> Any:
    """Return the kernel for ``size`` ranks.

    Args:
        size: number of ranks.
        width: bytes that all addresses and lengths are multiples of: 1, 2, 4 or 8.
        ragged: see ``lanes.make_lanes``.
        messages: how many of a pair there may be in each direction.
        channels: how many channels a pair has.
    """
    element = dtypes.element(f"int{8 * width}", "transfer")
    _, _, _, load, store = make_lanes(element, "sum", ragged, size)
    at = layout(size).transfer
    others = size - 1
    mirror = make_mirror(size)
    rows = transfer_rows(size)
    slot_bytes = rows * ROW
    epochs, slots, flags = at.epochs, at.slots, at.flags
    stride = channels_of(size)  # in memory, however few are used
    credits_at = flags + 8 * DEPTH * stride * others  # after the flags of all slots
    batch = min(rows, LOADS)
    whole_row = channels * THREADS

    @device_function
    def raise_flag(address: int, word: int) -> None:
        # What the whole block has stored of the chunk precedes its flag.
        sync_block()  # explore: flag-meet
        if thread_index_x() == 0:
            fence_acq_rel_sys()  # explore: flag-fence
            st_relaxed_sys_u64(address, word)

    @device_function
    def give_credit(address: int, epoch: int) -> None:
        # What the whole block has read of the chunk precedes its credit.
        sync_block()  # explore: credit-meet
        if thread_index_x() == 0:
            fence_acq_rel_sys()  # explore: credit-fence
            st_relaxed_sys_u32(address, epoch)

    def transfer(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        sends: Any,
        receives: Any,
    ) -> None:
        thread = cuda.threadIdx.x
        block = row_index()
        if block >= grid:
            return
        follow_previous_grid(early)
        low = cuda.local.array(batch, types.int64)
        high = cuda.local.array(batch, types.int64)
        rank = guard.rank
        # The blocks of a channel are in the order of (source, target) on all ranks, so
        # that they could even run one after another, as the simulator's do, where all
        # ranks' messages are in one launch each. (Where they are not, large messages
        # may wait for each other there, around three ranks, that a GPU delivers.)
        channel = block // (2 * others)
        place = block % (2 * others)
        sending = rank <= place < rank + others
        peer = place if place < rank else place - others + 1
        if sending:
            peer = place - rank if place - rank < rank else place - rank + 1
        k = (peer + size - rank - 1) % size
        there = own
        for j in range(others):
            if j == k:
                there = ring[j]
        lane_here = k * stride + channel
        lane_there = mirror(k) * stride + channel
        lane, receiver = (lane_there, there) if sending else (lane_here, own)
        flag = receiver + flags + 8 * DEPTH * lane
        slot = receiver + slots + DEPTH * slot_bytes * lane
        lane, sender = (lane_here, own) if sending else (lane_there, there)
        credit = sender + credits_at + 4 * lane
        epoch, failed = resume(own, epochs, block)
        stopped = False  # the whole block
        for message in range(messages):
            address = 0
            nbytes = ABSENT
            for j in range(others):
                if j == k:
                    index = 2 * (j * messages + message)
                    address = sends[index] if sending else receives[index]
                    nbytes = sends[index + 1] if sending else receives[index + 1]
            vectors = (nbytes + VECTOR - 1) // VECTOR
            count = nbytes // width
            # A small message is divided into thin chunks, for all channels.
            chunk_rows = max(1, min(rows, (vectors + whole_row - 1) // whole_row))
            first = channel * chunk_rows * THREADS
            # An empty one is a chunk, too: the receiver may expect another size.
            end = 1 if nbytes == 0 else vectors
            size_word = word_of((nbytes & _LOW_HALF) << 32)
            while first < end and not stopped:
                epoch = (epoch + 1) & _LOW_HALF
                record = wait_record(TRANSFER, rank, peer, channel, epoch)
                flag_now = flag + 8 * (epoch % DEPTH)
                slot_now = slot + slot_bytes * (epoch % DEPTH) + VECTOR * thread
                word = word_of(size_word | epoch)
                if thread == 0 and not failed:
                    if sending:
                        due = (epoch - DEPTH) & _LOW_HALF  # explore: due
                        # explore: wait
                        failed = not wait_for_epoch(guard, credit, due, record)
                    else:
                        failed = not _await_chunk(guard, flag_now, epoch, record)
                        if not failed and ld_relaxed_sys_u64(flag_now) != word:
                            failed = True
                            record = wait_record(TRANSFER_MISMATCH, rank, peer, 0, 0)
                            fail(guard, record)
                # What one thread has waited for, the whole block may use.
                stopped = sync_block_or(failed)  # explore: agree
                if stopped:  # explore: give-up
                    break
                for row in range(0, chunk_rows, batch):
                    for i in range(batch):
                        vector = first + (row + i) * THREADS + thread
                        if row + i < chunk_rows and vector < vectors:
                            if sending:
                                words = load(address, vector, count)
                            else:
                                words = ld_v2_u64(slot_now + (row + i) * ROW)
                            low[i], high[i] = words
                    for i in range(batch):
                        vector = first + (row + i) * THREADS + thread
                        if row + i < chunk_rows and vector < vectors:
                            if sending:
                                words = low[i], high[i]
                                st_v2_u64(slot_now + (row + i) * ROW, words)
                            else:
                                store(address, vector, count, low[i], high[i])
                if sending:
                    raise_flag(flag_now, word)
                else:
                    give_credit(credit, epoch)
                first += whole_row * chunk_rows
        sync_block()  # a block without messages has not synchronized yet
        keep(own, epochs, block, epoch, failed)

    return transfer


@functools.cache
def kernel(size: int, width: int, ragged: bool, messages: int, channels: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    listed = types.UniTuple(types.int64, 2 * messages * (size - 1))
    constants = (size, width, ragged, messages, channels)
    return binding.make_kernel(make_transfer, constants, listed, listed)


def bind(
    end: Endpoint, sends: Sequence[Message], receives: Sequence[Message]
) -> Launch:
    """Return the packed launch of at least one message.

    The messages of a pair are matched in the order given, ``most_messages`` at most.
    """
    bits = 0
    for message in (*sends, *receives):
        bits |= message.address | message.nbytes
    width, ragged = min(8, bits & -bits) or 8, bits % VECTOR != 0
    out, into = _by_ring(end, sends), _by_ring(end, receives)
    most = max(len(each) for each in (*out, *into))
    messages = 1 << (most - 1).bit_length()
    # Small GPUs have fewer; all ranks have agreed on the smallest.
    pairs = 2 * (end.size - 1)
    channels = max(1, min(channels_of(end.size), end.max_blocks // pairs))
    chunks = max(1, *(divide_up(each.nbytes, ROW) for each in (*sends, *receives)))
    return binding.launch(
        kernel(end.size, width, ragged, messages, channels),
        *(end, pairs * min(channels, chunks)),
        *(_listed(out, messages), _listed(into, messages)),
    )


def _by_ring(end: Endpoint, messages: Sequence[Message]) -> list[list[Message]]:
    """Return each other rank's messages, along the ring."""
    found: list[list[Message]] = [[] for _ in range(end.size - 1)]
    for message in messages:
        found[(message.peer - end.rank - 1) % end.size].append(message)
    return found


def _listed(by_ring: list[list[Message]], most: int) -> tuple[int, ...]:
    words: list[int] = []
    for messages in by_ring:
        for message in messages:
            words += (message.address, message.nbytes)
        words += [0, ABSENT] * (most - len(messages))
    return tuple(words)
