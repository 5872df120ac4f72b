"""Messages between pairs of ranks: any number at a time, of any sizes, in one kernel.

Sends and receives, their groups, and the collectives whose ranks send different amounts
consist of messages.

Each ordered pair of ranks has channels, with a block at each end. A message is divided
into chunks, which are distributed over the channels cyclically. Both ends number a
channel's chunks from 1 on, through all calls. They number them in the same way, because
a chunk's size and channel follow from the bytes of its message alone. A message has one
chunk in each of some channels, or chunks as large as slots in all. Chunk e uses slot
e % DEPTH at the receiver:

    sender      waits for the credit of chunk e - DEPTH, stores chunk e in the slot,
                raises the slot's flag: e, and how many bytes the message has
    receiver    waits for the flag, copies the slot into its array, gives credit for e

A receiver may permit shorter messages. Then it does not know which channels the message
uses. But every message has a chunk in channel 0. So the block of that channel reads the
number of bytes from the first flag. It passes the number to the receiver's other blocks
of the pair, through a word of the workspace for each block and message. Each block
clears its word before the launch ends. A block waits only for earlier blocks, never for
a later one. At launch, the host knows only the unit of the message's length. So the
kernel accesses the end of an array element by element.

A sender may have the number of elements on its GPU. Every block of the pair reads it
when the launch starts. If it is more than the capacity, which is the most that the
receiver permits, the communicator fails, and no chunk is sent.

Nothing else synchronizes the ranks, so a sender may be DEPTH chunks of each channel
ahead. All pairs of a launch progress side by side, because each end of a channel has a
block of its own.

Memory order. The flag's release follows the whole block's stores of the chunk, and the
receiver's acquire precedes its whole block's loads. The credit's release follows the
whole block's loads, and the sender's acquire precedes its next stores into the slot.
Each end counts chunks in its own workspace. Only the block of that channel accesses the
count, in one launch after the other.

Requests have a workspace of their own, but a rank's failure is marked in the workspace
of all other calls. So a request stores nothing after the failure of another call, and
other calls store nothing after that of a request.

Source: the point-to-point kernels of NCCL.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm import dtypes
from numba_symm.collectives.protocols import binding, credit, workspace
from numba_symm.collectives.protocols.slots import read_slots, write_slots
from numba_symm.collectives.protocols.workspace import (
    DEPTH,
    THREADS,
    TILE_BYTES,
    VECTOR,
)
from numba_symm.device import intrinsics, lanes, order
from numba_symm.gpu.kernels import Kernel, Launch

LOADS = 4
"""Vectors that a thread loads before it stores them.

A chunk has at least so many, because a block executes a fence for each chunk, and a
multiprocessor executes one fence after another.
"""


def few_of(used: int, alone: bool) -> int:
    """Return how many channels a message uses that has one chunk in each of them.

    Half of those of the launch, if it may be early then (``binding.launch``).
    """
    return used if alone else max(1, used // 2)


def make_copy(batch: int, load: lanes.Load, store: lanes.Store) -> Callable[..., None]:
    """Return a device function that copies a thread's vectors of a chunk.

    ``(source, target, chunk, low, high)``; see ``make_move``.
    """

    @intrinsics.device_function
    def copy(source: int, target: int, chunk: Any, low: Any, high: Any) -> None:
        vector, tiles, vectors, count = chunk
        end = min(vectors, vector + tiles * THREADS)
        while vector < end:
            for i in range(batch):
                if vector + i * THREADS < end:
                    low[i], high[i] = load(source, vector + i * THREADS, count)
            for i in range(batch):
                if vector + i * THREADS < end:
                    store(target, vector + i * THREADS, count, low[i], high[i])
            vector += batch * THREADS

    return copy


def make_move(room: int, moves: lanes.Lanes, ragged: bool) -> Callable[..., None]:
    """Return a device function that copies a chunk into its slot, or from it.

    ``(sending, address, slot, chunk, low, high)``; ``chunk`` is ``(first, tiles,
    vectors, count)``: the index of the thread's first vector, how many it has at most,
    and the vectors and units of the message. A vector has the same index at ``slot`` as
    in the array. A slot has ``room`` of a thread's.
    """
    batch, (read, write) = min(room, LOADS), moves.slices
    # In one loop that loads from either, each load would wait for the one before. But
    # arrays that are not ragged are accessed as slots are.
    out = make_copy(batch, moves.load, lanes.store_whole)
    into = make_copy(batch, lanes.load_whole, moves.store)

    def move_slices(
        sending: bool, address: int, slot: int, chunk: Any, low: Any, high: Any
    ) -> None:
        first, tiles, vectors, count = chunk
        at = range(first, vectors, THREADS)[:tiles]
        if sending:
            write_slots(slot + VECTOR * first, read(address, at, count))
        else:
            write(address, at, count, read_slots(slot + VECTOR * first, len(at)))

    @intrinsics.sliced(move_slices)
    def move(
        sending: bool, address: int, slot: int, chunk: Any, low: Any, high: Any
    ) -> None:
        source, target = (address, slot) if sending else (slot, address)
        if sending or not ragged:
            out(source, target, chunk, low, high)
        else:
            into(source, target, chunk, low, high)

    return move


def make_find(
    size: int, messages: int, counted: bool, asked: bool
) -> Callable[..., Any]:
    """Return a device function that finds a message among a launch's arguments.

    ``(k, sending, message, sends, receives)``, with the k-th rank of the ring, returns
    its address and its bytes, ABSENT if there is none; of a count, its address; of a
    receiver's, what ``_divisor`` returned; of a sender's, its ``Span`` and the bytes of
    an element.
    """
    received = 5 if counted else 2  # words of a message
    sent = 7 if asked else 2

    @intrinsics.device_function
    def find(k: int, sending: bool, message: int, sends: Any, receives: Any) -> Any:
        address = 0
        nbytes = credit.ABSENT
        count_at = 0
        shift = 0
        inverse = 1
        span = (0, 0, 0)
        itemsize = 1
        for j in range(size - 1):
            if j == k:
                index = j * messages + message
                if sending:
                    address = sends[sent * index]
                    nbytes = sends[sent * index + 1]
                    if asked:
                        count_at = sends[sent * index + 2]
                        span = (
                            sends[sent * index + 3],
                            sends[sent * index + 4],
                            sends[sent * index + 5],
                        )
                        itemsize = sends[sent * index + 6]
                else:
                    address = receives[received * index]
                    nbytes = receives[received * index + 1]
                    if counted:
                        count_at = receives[received * index + 2]
                        shift = receives[received * index + 3]
                        inverse = receives[received * index + 4]
        return address, nbytes, count_at, (shift, inverse), span, itemsize

    return find


def make_places(size: int, at: workspace.Channels) -> Callable[..., Any]:
    """Return a device function for the addresses of a channel.

    ``(ring, own, k, channel, sending)``, with the k-th rank of the ring, returns where
    the flags and the slots of its receiver are, and the credit of its sender.
    """
    others = size - 1
    mirror = order.make_mirror(size)
    slot_bytes = at.tiles * TILE_BYTES
    flags, slots, credits_at = at.flags, at.slots, at.credits
    stride = at.number  # in memory, however few are used

    @intrinsics.device_function
    def places(ring: Any, own: int, k: int, channel: int, sending: bool) -> Any:
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
        return flag, slot, sender + credits_at + 4 * lane

    return places


def make_transfer(
    size: int,
    width: int,
    ragged: bool,
    messages: int,
    used: int,
    counted: bool,
    asked: bool,
    alone: bool,
) -> Any:
    """Return the kernel for ``size`` ranks.

    Args:
        size: their number.
        width: bytes that all addresses and lengths are multiples of: 1, 2, 4 or 8.
        ragged: see ``lanes.make_lanes``.
        messages: how many of a pair there may be in each direction.
        used: how many channels of a pair the messages use.
        counted: whether a message that is received may be shorter than expected.
        asked: whether the number of elements to send may be on the GPU.
        alone: whether the launch is a request: one message, in the requests' workspace,
            whose blocks are those of one direction.
    """
    element = dtypes.element(f"int{8 * width}", "transfer")
    moves = lanes.make_lanes(element, "sum", ragged, size)
    at, task = workspace.channels(size, alone), credit.make_task(size, alone)
    room, epochs, lengths = at.tiles, at.epochs, at.lengths
    slot_bytes, across, batch = room * TILE_BYTES, used * THREADS, min(room, LOADS)
    across_few = few_of(used, alone) * THREADS
    pair_lengths = 8 * at.messages * at.number  # in memory, however few are used
    find, places = make_find(size, messages, counted, asked), make_places(size, at)
    learn, move = credit.make_learn(at.messages), make_move(room, moves, ragged)

    def transfer(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        direction: int,
        main: int,
        sends: Any,
        receives: Any,
    ) -> None:
        thread, block, rank = cuda.threadIdx.x, intrinsics.block_index(), guard.rank
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(batch, types.int64)
        high = cuda.local.array(batch, types.int64)
        block, channel, launched, sending, peer = task(block, grid, direction, rank)
        k = (peer + size - rank - 1) % size
        flag, slot, credit_at = places(ring, own, k, channel, sending)
        marks = main if alone else own
        kept = own - marks + epochs  # an offset from the marks
        epoch, failed = workspace.resume(marks, kept, block)  # explore: resume
        stopped = False  # the whole block
        own_lengths = own + lengths + pair_lengths * k
        for message in range(messages):
            found = find(k, sending, message, sends, receives)
            address, nbytes, count_at, divisor, _, _ = found
            if asked and sending and count_at != 0 and not stopped:
                address, nbytes = credit.find_span(guard, peer, found, failed)
                failed = stopped = nbytes == credit.ABSENT
            # explore: unknown
            if counted and not sending and count_at != 0 and not stopped:
                length = own_lengths + 8 * message
                end, expected = (peer, channel, launched), (nbytes, count_at, divisor)
                nbytes = learn(guard, end, epoch, flag, length, expected, failed)
                if nbytes == credit.ABSENT:
                    failed = True  # explore: unlearned
                    stopped = True
            vectors, count = (nbytes + VECTOR - 1) // VECTOR, nbytes // width
            # Of a small message, the chunks are as thin as many channels permit.
            tiles = min(room, max(batch, (vectors + across_few - 1) // across_few))
            first = channel * tiles * THREADS
            # An empty one is a chunk, because the receiver may expect another size.
            last = 1 if nbytes == 0 else vectors
            size_word = intrinsics.word_of(nbytes << credit.NUMBER_BITS)
            while first < last and not stopped:
                epoch = (epoch + 1) & credit.LOW_HALF
                flag_now = flag + 8 * (epoch % DEPTH)
                slot_now = slot + slot_bytes * (epoch % DEPTH) - VECTOR * first
                word = intrinsics.word_of(size_word | epoch & credit.NUMBER)
                if thread == 0 and not failed:
                    failed = credit.await_turn(
                        guard, peer, channel, sending, credit_at, flag_now, epoch, word
                    )
                # What one thread has waited for, the whole block may use.
                stopped = workspace.sync_block_or(failed)  # explore: agree
                if stopped:  # explore: give-up
                    break
                chunk = first + thread, tiles, vectors, count
                move(sending, address, slot_now, chunk, low, high)
                credit.hand_over(sending, flag_now, word, credit_at, epoch)
                first += across * tiles
        workspace.sync_block()  # a block without messages has not synchronized yet
        workspace.keep(marks, kept, block, epoch, failed)  # explore: keep

    return transfer


@functools.cache
def kernel(
    size: int,
    width: int,
    ragged: bool,
    messages: int,
    used: int,
    counted: bool,
    asked: bool = False,
    alone: bool = False,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    number = messages * (size - 1)
    sent = types.UniTuple(types.int64, (7 if asked else 2) * number)
    received = types.UniTuple(types.int64, (5 if counted else 2) * number)
    constants = (size, width, ragged, messages, used, counted, asked, alone)
    arguments = types.int64, types.int64, sent, received
    return binding.make_kernel(make_transfer, constants, arguments)


def bind(
    end: binding.Endpoint,
    sends: Sequence[credit.Message],
    receives: Sequence[credit.Message],
) -> Launch:
    """Return the packed launch of at least one message.

    The messages of a pair are matched in the order given, ``most_messages`` at most.
    """
    # Small GPUs have fewer; all ranks have agreed on the smallest.
    pairs = 2 * (end.size - 1)
    channels = workspace.channels(end.size, False)
    used = max(1, min(channels.number, end.max_blocks // pairs))
    grid = pairs * _most_channels(channels.tiles, used, False, *sends, *receives)
    return _bind(end, used, False, grid, (0, 0), sends, receives)


def bind_request(
    end: binding.Endpoint, main: int, message: credit.Message, receiving: bool
) -> Launch:
    """Return the packed launch of a request, which runs beside all other calls.

    Args:
        end: this rank's end of the requests' workspace.
        main: the address of the rank's workspace of all other calls, which shows
            whether the rank has failed.
        message: it is matched in the order of the launches of its direction.
        receiving: whether it is received.
    """
    channels = workspace.channels(end.size, True)
    used = channels.number
    grid = _most_channels(channels.tiles, used, True, message)
    # The blocks of a channel: to the other ranks, then from them, as in the kernel.
    rank, peer = end.rank, message.peer
    place = peer if peer < rank else peer + end.size - 2
    if not receiving:
        place = rank + (peer if peer < rank else peer - 1)
    sends, receives = ([], [message]) if receiving else ([message], [])
    return _bind(end, used, True, grid, (place, main), sends, receives)


def _most_channels(room: int, used: int, alone: bool, *messages: credit.Message) -> int:
    """Return how many channels messages of these sizes, or smaller ones, use."""
    most, few = max(each.nbytes for each in messages), few_of(used, alone)
    if most <= few * room * TILE_BYTES:
        chunks = workspace.divide_up(most, min(room, LOADS) * TILE_BYTES)
        return max(1, min(few, chunks))
    return min(used, workspace.divide_up(most, room * TILE_BYTES))


def _bind(
    end: binding.Endpoint,
    used: int,
    alone: bool,
    grid: int,
    of_request: tuple[int, int],
    sends: Sequence[credit.Message],
    receives: Sequence[credit.Message],
) -> Launch:
    counted = any(message.count_at for message in receives)
    asked = any(message.count_at for message in sends)
    bits = VECTOR // 2 if counted or asked else 0  # the end may be off a vector
    for message in (*sends, *receives):
        length = message.itemsize if message.count_at else message.nbytes
        bits |= message.address | length
    width, ragged = min(8, bits & -bits) or 8, bits % VECTOR != 0
    out, into = _by_ring(end, sends), _by_ring(end, receives)
    most = max(len(each) for each in (*out, *into))
    messages = 1 << (most - 1).bit_length()
    lists = (
        _listed(out, messages, _asked if asked else _plain, 7 if asked else 2),
        _listed(into, messages, _counted if counted else _plain, 5 if counted else 2),
    )
    of_call = kernel(end.size, width, ragged, messages, used, counted, asked, alone)
    return binding.launch(of_call, end, grid, (*of_request, *lists))


def _by_ring(
    end: binding.Endpoint, messages: Sequence[credit.Message]
) -> list[list[credit.Message]]:
    """Return each other rank's messages, along the ring."""
    found: list[list[credit.Message]] = [[] for _ in range(end.size - 1)]
    for message in messages:
        found[(message.peer - end.rank - 1) % end.size].append(message)
    return found


def _listed(
    by_ring: list[list[credit.Message]],
    most: int,
    words_of: Callable[[credit.Message], tuple[int, ...]],
    number: int,
) -> tuple[int, ...]:
    """Return the words of all messages, so many of each, and of those that are absent.

    The itemsize or the inverse, by which a block calculates, is the last one.
    """
    absent = (0, credit.ABSENT, *(0,) * (number - 3), 1)[:number]
    words: list[int] = []
    for messages in by_ring:
        for message in messages:
            words += words_of(message)
        words += absent * (most - len(messages))
    return tuple(words)


def _plain(message: credit.Message) -> tuple[int, ...]:
    return message.address, message.nbytes


def _counted(message: credit.Message) -> tuple[int, ...]:
    return *_plain(message), message.count_at, *_divisor(message.itemsize)


def _asked(message: credit.Message) -> tuple[int, ...]:
    # Blocks compare elements, because a GPU has no instruction that divides.
    most = message.nbytes // message.itemsize if message.count_at else message.nbytes
    return message.address, most, message.count_at, *message.span, message.itemsize


def _divisor(number: int) -> tuple[int, int]:
    """Return a shift, and a factor modulo 2**64 (signed), that divide by a number.

    A GPU has no instruction that divides. The odd part of the number has an inverse
    modulo 2**64. A multiple of it times the inverse is the quotient; another number
    times the inverse is greater than 2**64 divided by the odd part.
    """
    shift = (number & -number).bit_length() - 1
    inverse = pow(number >> shift, -1, 1 << 64)
    return shift, inverse - (inverse >> 63 << 64)
