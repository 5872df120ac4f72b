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

A receiver may permit shorter messages. It does not know then which channels the message
uses. But every message has a chunk in channel 0. So the block of that channel learns
the bytes from the first flag, and passes them on to the receiver's other blocks of the
pair, through a word of the workspace for each block and message. Each block clears its
word before the launch ends. Blocks wait for a block before them only, never for a later
one. Such a launch knows the units of the message's length, not the length, so it
accesses the end of an array element by element.

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
    channels,
    divide_up,
    follow_previous_grid,
    keep,
    resume,
    sync_block,
    sync_block_or,
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
    st_u64,
    st_v2_u64,
    thread_index_x,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.polling import fail, make_wait, wait_for_epoch, wait_record
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import TRANSFER, TRANSFER_MISMATCH, TRANSFER_TOO_LONG

ABSENT = -1
"""Replaces the bytes of a message that does not exist."""

LOADS = 4  # vectors that a thread loads before it stores them

_LOW_HALF = 0xFFFFFFFF

# A flag has the lowest bits of the chunk's number, which is at most DEPTH ahead of the
# receiver's. The other 48 bits have the bytes of any message.
_NUMBER_BITS = 16
_NUMBER = (1 << _NUMBER_BITS) - 1


class Message(NamedTuple):
    """What one rank sends to, or receives from, another.

    Attributes:
        peer: the other rank.
        address: where it is loaded, or stored.
        nbytes: how much, equal at both ends; with ``count_at``, the most that may
            arrive.
        count_at: on the receiver, the address of an int64 that gets the number of
            elements that arrived; 0: ``nbytes`` arrive.
        itemsize: the bytes of an element, if there is a count.
    """

    peer: int
    address: int
    nbytes: int
    count_at: int = 0
    itemsize: int = 1


@device_function
def _has_number(flag: int, epoch: int) -> bool:
    # explore: await
    return (ld_acquire_sys_u64(flag) ^ epoch) & _NUMBER == 0


_await_chunk = make_wait(_has_number)


@device_function
def _has_length(address: int, _: int) -> bool:
    return ld_relaxed_sys_u64(address) != 0  # publishes nothing else


_await_length = make_wait(_has_length)


def make_transfer(
    size: int,
    width: int,
    ragged: bool,
    messages: int,
    used: int,
    counted: bool,
    alone: bool,
) -> Any:
    """Return the kernel for ``size`` ranks.

    Args:
        size: number of ranks.
        width: bytes that all addresses and lengths are multiples of: 1, 2, 4 or 8.
        ragged: see ``lanes.make_lanes``.
        messages: how many of a pair there may be in each direction.
        used: how many channels of a pair the messages use.
        counted: whether a message that is received may be shorter than expected.
        alone: whether the launch is a request: one message, in the requests' workspace,
            whose blocks are those of one direction.
    """
    element = dtypes.element(f"int{8 * width}", "transfer")
    _, _, _, load, store = make_lanes(element, "sum", ragged, size)
    at = channels(size, alone)
    others = size - 1
    mirror = make_mirror(size)
    rows = at.rows
    slot_bytes = rows * ROW
    epochs, slots, flags, credits_at = at.epochs, at.slots, at.flags, at.credits
    stride = at.number  # in memory, however few are used
    batch = min(rows, LOADS)
    whole_row = used * THREADS
    lengths, most = at.lengths, at.messages
    received = 5 if counted else 2  # words of a message

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

    @device_function
    def learn_bytes(
        guard: Any,
        channel: int,
        flag: int,
        epoch: int,
        length: int,
        record: int,
        failed: bool,
    ) -> int:
        # Every thread waits for itself, because all of them need the word. Returns
        # ABSENT in all threads of the block if one of them has failed.
        nbytes = 0
        if channel == 0:
            if not failed:
                failed = not _await_chunk(guard, flag, epoch, record)
            nbytes = word_of(ld_relaxed_sys_u64(flag)) >> _NUMBER_BITS
        else:
            if not failed:
                failed = not _await_length(guard, length, 0, record)
            nbytes = word_of(ld_relaxed_sys_u64(length)) - 1
        # All threads have read the word before it is cleared for the next launch.
        if sync_block_or(failed):  # explore: agree-length
            return ABSENT
        if channel > 0 and thread_index_x() == 0:
            st_relaxed_sys_u64(length, 0)  # explore: clear
        return nbytes

    @device_function
    def fits_not(nbytes: int, room: int, shift: int, elements: int) -> bool:
        # If it is not a multiple of an element, it has lower bits, or the number of
        # elements is negative or beyond any room (see _divisor).
        whole = nbytes >> shift << shift == nbytes and 0 <= elements <= nbytes
        return nbytes > room or not whole  # explore: room

    @device_function
    def pass_on(own_lengths: int, launched: int, nbytes: int) -> None:
        # To the blocks of the pair's other channels, each of which has a word.
        channel = 1 + thread_index_x()
        while channel < launched:
            st_relaxed_sys_u64(own_lengths + 8 * most * channel, nbytes + 1)
            channel += THREADS

    def transfer(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        direction: int,
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
        launched = grid // (2 * others)
        if alone:
            channel, place, launched = block, direction, grid
            block = 2 * others * channel + place
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
        own_lengths = own + lengths + 8 * most * stride * k
        for message in range(messages):
            address = 0
            nbytes = ABSENT
            count_at = 0
            shift = 0
            inverse = 1
            for j in range(others):
                if j == k:
                    index = j * messages + message
                    if sending:
                        address = sends[2 * index]
                        nbytes = sends[2 * index + 1]
                    else:
                        address = receives[received * index]
                        nbytes = receives[received * index + 1]
                        if counted:
                            count_at = receives[received * index + 2]
                            shift = receives[received * index + 3]
                            inverse = receives[received * index + 4]
            # explore: unknown
            if counted and count_at != 0 and not stopped:
                room = nbytes
                due = (epoch + 1) & _LOW_HALF
                record = wait_record(TRANSFER, rank, peer, channel, due)
                flag_now = flag + 8 * (due % DEPTH)
                length = own_lengths + 8 * (most * channel + message)
                nbytes = learn_bytes(
                    guard, channel, flag_now, due, length, record, failed
                )
                elements = word_of((nbytes >> shift) * inverse)
                if nbytes == ABSENT:
                    failed = True  # explore: unlearned
                    stopped = True
                elif fits_not(nbytes, room, shift, elements):
                    failed = True
                    stopped = True
                    if thread == 0:
                        fail(guard, wait_record(TRANSFER_TOO_LONG, rank, peer, 0, 0))
                elif channel == 0:
                    here = own_lengths + 8 * message
                    pass_on(here, launched, nbytes)  # explore: pass-on
                    if thread == 0:
                        st_u64(count_at, elements)
            vectors = (nbytes + VECTOR - 1) // VECTOR
            count = nbytes // width
            # A small message is divided into thin chunks, for all channels.
            chunk_rows = max(1, min(rows, (vectors + whole_row - 1) // whole_row))
            first = channel * chunk_rows * THREADS
            # An empty one is a chunk, too: the receiver may expect another size.
            end = 1 if nbytes == 0 else vectors
            size_word = word_of(nbytes << _NUMBER_BITS)
            while first < end and not stopped:
                epoch = (epoch + 1) & _LOW_HALF
                record = wait_record(TRANSFER, rank, peer, channel, epoch)
                flag_now = flag + 8 * (epoch % DEPTH)
                slot_now = slot + slot_bytes * (epoch % DEPTH) + VECTOR * thread
                word = word_of(size_word | epoch & _NUMBER)
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
def kernel(
    size: int,
    width: int,
    ragged: bool,
    messages: int,
    used: int,
    counted: bool,
    alone: bool = False,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    number = messages * (size - 1)
    sent = types.UniTuple(types.int64, 2 * number)
    received = types.UniTuple(types.int64, (5 if counted else 2) * number)
    constants = (size, width, ragged, messages, used, counted, alone)
    arguments = types.int64, sent, received
    return binding.make_kernel(make_transfer, constants, *arguments)


def bind(
    end: Endpoint, sends: Sequence[Message], receives: Sequence[Message]
) -> Launch:
    """Return the packed launch of at least one message.

    The messages of a pair are matched in the order given, ``most_messages`` at most.
    """
    # Small GPUs have fewer; all ranks have agreed on the smallest.
    pairs = 2 * (end.size - 1)
    used = max(1, min(channels(end.size, False).number, end.max_blocks // pairs))
    grid = pairs * min(used, _most_chunks(*sends, *receives))
    return _bind(end, used, False, grid, 0, sends, receives)


def bind_request(end: Endpoint, message: Message, receiving: bool) -> Launch:
    """Return the packed launch of a request, which runs beside all other calls.

    Args:
        end: this rank's end of the requests' workspace.
        message: it is matched in the order of the launches of its direction.
        receiving: whether it is received.
    """
    used = channels(end.size, True).number
    grid = min(used, _most_chunks(message))
    # The blocks of a channel: to the other ranks, then from them, as in the kernel.
    rank, peer = end.rank, message.peer
    place = peer if peer < rank else peer + end.size - 2
    if not receiving:
        place = rank + (peer if peer < rank else peer - 1)
    sends, receives = ([], [message]) if receiving else ([message], [])
    return _bind(end, used, True, grid, place, sends, receives)


def _most_chunks(*messages: Message) -> int:
    return max(1, *(divide_up(each.nbytes, ROW) for each in messages))


def _bind(
    end: Endpoint,
    used: int,
    alone: bool,
    grid: int,
    direction: int,
    sends: Sequence[Message],
    receives: Sequence[Message],
) -> Launch:
    counted = any(message.count_at for message in receives)
    bits = VECTOR // 2 if counted else 0  # the end may be off a vector
    for message in (*sends, *receives):
        length = message.itemsize if message.count_at else message.nbytes
        bits |= message.address | length
    width, ragged = min(8, bits & -bits) or 8, bits % VECTOR != 0
    out, into = _by_ring(end, sends), _by_ring(end, receives)
    most = max(len(each) for each in (*out, *into))
    messages = 1 << (most - 1).bit_length()
    return binding.launch(
        kernel(end.size, width, ragged, messages, used, counted, alone),
        *(end, grid, direction),
        *(_listed(out, messages, False), _listed(into, messages, counted)),
    )


def _by_ring(end: Endpoint, messages: Sequence[Message]) -> list[list[Message]]:
    """Return each other rank's messages, along the ring."""
    found: list[list[Message]] = [[] for _ in range(end.size - 1)]
    for message in messages:
        found[(message.peer - end.rank - 1) % end.size].append(message)
    return found


def _listed(by_ring: list[list[Message]], most: int, counted: bool) -> tuple[int, ...]:
    words: list[int] = []
    for messages in by_ring:
        for message in messages:
            words += (message.address, message.nbytes)
            if counted:
                words += (message.count_at, *_divisor(message.itemsize))
        absent = [0, ABSENT, 0, 0, 1] if counted else [0, ABSENT]
        words += absent * (most - len(messages))
    return tuple(words)


def _divisor(number: int) -> tuple[int, int]:
    """Return a shift, and a factor modulo 2**64 (signed), that divide by a number.

    A GPU has no instruction that divides. The odd part of the number has an inverse
    modulo 2**64. A multiple of it times the inverse is the quotient; another number
    times the inverse is greater than 2**64 divided by the odd part.
    """
    shift = (number & -number).bit_length() - 1
    inverse = pow(number >> shift, -1, 1 << 64)
    return shift, inverse - (inverse >> 63 << 64)
