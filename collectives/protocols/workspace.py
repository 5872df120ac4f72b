"""The symmetric memory that a communicator's kernels work in.

Each rank has one allocation of at most 72 MiB, with separate state for each protocol.
So calls of any size and algorithm may follow one another, eager or replayed. A slot's
address follows from (protocol, block, parity, source, tile, thread) and never from a
message's size or alignment.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba_symm.device.intrinsics import (
    bar_red_or,
    bar_sync,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_relaxed_sys_u32,
    ld_u32,
    st_relaxed_sys_u32,
    st_u32,
    thread_index_x,
    thread_index_y,
    word_of,
)
from numba_symm.environment import SIMULATED

THREADS = 8 if SIMULATED else 128
"""Threads of a block in every protocol, a constant: slots' addresses depend on it.
Few, so that a small message is spread over many multiprocessors. The simulator's
threads are operating-system threads; a few show every race.

These blocks are logical: a thread block of a launch holds 1 to ``HELD`` of them, one
after another along its y dimension."""

WIDE = 16 if SIMULATED else 512
"""Threads of a block between the ranks' own arrays. A multiprocessor executes fences
one after another, so the fewer blocks are on it, the sooner they have met."""

HELD = 2 if SIMULATED else 8
"""Most blocks in one thread block. 1024 threads may use 64 registers each."""

MAX_BLOCKS = 4 if SIMULATED else 256
"""Most blocks of one call; an agreed grid may be smaller on small GPUs."""

MOST_BLOCKS = max(MAX_BLOCKS, 64)
"""Most blocks of one launch: messages take two for each other rank at least."""

REGISTERS = 64
"""Most registers of a thread, in most kernels."""

VECTOR = 16
"""Bytes that a thread moves at a time."""

TILE_BYTES = THREADS * VECTOR
"""Bytes of a tile: of one vector for each thread of a block."""

MARK = 4
"""Bytes of the marks of a vector. Those of a tile follow its vectors."""

_LINE = 128  # regions begin on cache lines of their own

_MARKS = 8
"""Words that show whether the rank has failed. Loads of a single one by all blocks
would be served one after another."""


@dataclass(frozen=True)
class Region:
    """Byte offsets of one protocol's state.

    Attributes:
        epochs: one uint32 a block, written by its own rank only: the block's last
            epoch.
        flags: those that peers raise for this rank's blocks, two uint32 for each block
            and rank.
        slots: what peers store here, or the rank for its peers or for itself.
        end: where the slots end.
    """

    epochs: int
    flags: int
    slots: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Where each protocol's state is in a workspace of ``size`` ranks.

    Before all of them are ``_MARKS`` lines, each of which begins with a uint32: not 0
    once the rank has failed.
    """

    size: int
    barrier: Region
    direct: Region
    one_shot_sentinel: Region
    one_shot_marked: Region
    one_shot_ll: Region
    two_shot_sentinel: Region
    two_shot_marked: Region
    chunked: Region
    lengths: Region
    partials: Region
    transfer: Region
    nbytes: int

    @property
    def sentinels(self) -> tuple[Region, ...]:
        """The regions whose slots are all ones while they are empty."""
        return (
            *(self.one_shot_sentinel, self.one_shot_marked),
            *(self.two_shot_sentinel, self.two_shot_marked),
        )


class Protocol(NamedTuple):
    """How much of the workspace a protocol's slots take.

    Attributes:
        blocks: most blocks of a call of few ranks.
        vectors: how many a thread has slots for in a half, all other ranks taken
            together; more only if there are more ranks.
        tile_bytes: bytes of the slots of a tile, with their marks or flags.
        few: how many ranks are few, as a power of 2.
    """

    blocks: int
    vectors: int
    tile_bytes: int = TILE_BYTES
    few: int = 3

    def most(self, size: int) -> int:
        """Return the most blocks of a call: fewer for many ranks, to limit memory."""
        return max(1, self.blocks >> max(0, (size - 1).bit_length() - self.few))

    def tiles(self, size: int) -> int:
        """Return for how many vectors of each other rank a thread has slots.

        A power of 2, so that groups of them are whole.
        """
        return 1 << (max(1, self.vectors // max(1, size - 1)).bit_length() - 1)

    def needed(self, vectors: int, grid: int, size: int) -> int:
        """Return how many of these tiles a message takes, rounded to a power of 2."""
        tiles = divide_up(vectors, grid * THREADS)
        return min(self.tiles(size), 1 << (tiles - 1).bit_length())


MARKED_BYTES, PACKETS_BYTES = TILE_BYTES + max(VECTOR, MARK * THREADS), 2 * TILE_BYTES


def _blocks(blocks: int) -> int:
    return min(blocks, MAX_BLOCKS)


# The more blocks and vectors, the larger the messages that take one epoch. Larger
# messages take several and are slower. All together take less than 64 MiB on 8 ranks.
ONE_SHOT = {
    "sentinel": Protocol(_blocks(256), 4),
    "marked": Protocol(_blocks(256), 4, MARKED_BYTES, few=2),
    "ll": Protocol(_blocks(32), 2, PACKETS_BYTES),
}
TWO_SHOT = {
    "sentinel": Protocol(_blocks(256), 8),
    "marked": Protocol(_blocks(64), 6, MARKED_BYTES),
}
CHUNKED = Protocol(_blocks(256), 128 if SIMULATED else 16)

LOADS = 4
"""Vectors that a thread of a chunked kernel loads before it stores them."""


LIMIT = 72 << 20
"""Most bytes of a workspace."""

DEPTH = 2
"""Slots of a channel of ``transfer.py``."""

_CHANNELS = _blocks(128)
_MOST_TILES = 128 if SIMULATED else 16
_REQUEST_TILES, _REQUEST_WIDTH = (4, 1) if SIMULATED else (16, 4)


def request_width(size: int) -> int:
    """Return on how many multiprocessors a request runs: on more among few ranks."""
    return max(1, _REQUEST_WIDTH // max(1, size - 1))


def channels_of(size: int) -> int:
    """Return how many channels each of a rank's peers has, each way."""
    return max(1, min(_CHANNELS, MAX_BLOCKS // (2 * max(1, size - 1))))


_ARGUMENTS = 3584  # bytes of a kernel's arguments that may be messages, of 4096


def most_messages(size: int, counted: bool = False) -> int:
    """Return how many messages a pair may have in a launch, each way.

    A group with more is refused, not divided. A second launch would wait for the first
    one, whose messages may wait, through other ranks, for those of the second.

    Args:
        size: the number of ranks.
        counted: whether a message that is received may be shorter than expected.
    """
    words = 7 if counted else 4
    return 1 << (_ARGUMENTS // (8 * words * max(1, size - 1))).bit_length() - 1


def transfer_tiles(size: int) -> int:
    """Return how many vectors of a thread a slot of ``transfer.py`` holds."""
    region = layout(size).transfer
    slots = DEPTH * max(1, size - 1) * channels_of(size)
    return (region.end - region.slots) // (slots * TILE_BYTES)


class Channels(NamedTuple):
    """The state of messages in a workspace: byte offsets, and what there is of each.

    Attributes:
        number: channels of each direction of a pair.
        tiles: tiles of a slot.
        messages: messages of a direction in a launch, at most.
        epochs: a uint32 for each of this rank's blocks: its last chunk.
        flags: a word for each slot, which the sender raises.
        credits: a uint32 for each channel, which the receiver raises.
        slots: what peers store here.
        lengths: a word for each channel and message, from block to block of the rank.
        end: where all that ends.
    """

    number: int
    tiles: int
    messages: int
    epochs: int
    flags: int
    credits: int
    slots: int
    lengths: int
    end: int


@functools.cache
def channels(size: int, requests: bool) -> Channels:
    """Return the state of messages.

    Args:
        size: the number of ranks.
        requests: whether of those that are requests. These have a workspace of their
            own, because they run beside all other calls.
    """
    others = size - 1
    if not requests:
        number, at = channels_of(size), layout(size).transfer
        credits_at = at.flags + 8 * DEPTH * number * others
        lengths = layout(size).lengths.slots
        return Channels(
            number,
            transfer_tiles(size),
            most_messages(size, True),
            at.epochs,
            at.flags,
            credits_at,
            at.slots,
            lengths,
            at.end,
        )
    number, tiles = HELD * request_width(size), _REQUEST_TILES
    lanes = number * others
    epochs, flags = 0, _lines(4 * 2 * lanes)  # no marks: those are in the main one
    credits_at = flags + _lines(8 * DEPTH * lanes)
    lengths = credits_at + _lines(4 * lanes)
    slots = lengths + _lines(8 * lanes)
    end = slots + DEPTH * lanes * tiles * TILE_BYTES
    return Channels(number, tiles, 1, epochs, flags, credits_at, slots, lengths, end)


def partial_bytes() -> int:
    """Return the bytes of the partial sums of a block's threads (``finishing.py``)."""
    return 8 * THREADS


@functools.cache
def layout(size: int) -> Layout:
    """Return the layout for ``size`` ranks."""

    def taken(protocol: Protocol, sets: int) -> int:
        tiles = (size - 1) * protocol.tiles(size) * sets
        return protocol.most(size) * 2 * tiles * protocol.tile_bytes

    slots = {
        "barrier": 0,
        "direct": MAX_BLOCKS * 5 * VECTOR * (size - 1),
        **{f"one_shot_{name}": taken(each, 1) for name, each in ONE_SHOT.items()},
        **{f"two_shot_{name}": taken(each, 2) for name, each in TWO_SHOT.items()},
        "chunked": taken(CHUNKED, 2),
        "lengths": 8 * (size - 1) * channels_of(size) * most_messages(size, True),
        "partials": MOST_BLOCKS * 2 * partial_bytes(),
    }
    regions: dict[str, Any] = {}
    end = _LINE * _MARKS
    for name, nbytes in slots.items():
        regions[name] = _region(end, size, nbytes)
        end = regions[name].end
    # Transfers have what remains, because their slots may have any size.
    left = LIMIT - _region(end, size, 0).end
    tile_bytes = DEPTH * (size - 1) * channels_of(size) * TILE_BYTES
    fitting = max(1, left // max(1, tile_bytes))
    tiles = min(_MOST_TILES, 1 << fitting.bit_length() - 1)
    regions["transfer"] = _region(end, size, tiles * tile_bytes)
    return Layout(size=size, nbytes=regions["transfer"].end, **regions)


def _region(start: int, size: int, nbytes: int) -> Region:
    epochs = start
    flags = epochs + _lines(4 * MOST_BLOCKS)
    slots = flags + _lines(2 * 4 * MAX_BLOCKS * size)
    return Region(epochs, flags, slots, slots + _lines(nbytes))


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


@device_function
def sync_block() -> None:
    """Wait until all threads of the block have called it; orders their accesses."""
    bar_sync(thread_index_y(), THREADS)  # explore: synchronize


@device_function
def sync_block_or(condition: bool) -> bool:
    """Wait as ``sync_block`` does; return whether any thread's condition holds."""
    return bar_red_or(thread_index_y(), THREADS, condition)  # explore: agree


@device_function
def follow_previous_grid(early: bool) -> None:
    """Wait until all earlier work of the stream is done and visible.

    Every thread calls it before it accesses memory. Then the next grid may be launched,
    which waits here for this one.
    """
    griddepcontrol_wait()  # explore: previous
    if early:
        griddepcontrol_launch_dependents()


@device_function
def resume(own: int, epochs: int, block: int) -> Any:
    """Return a block's last epoch, and a word that is not 0 if the rank has failed.

    Once a block of any call has failed, the rank's later launches store nothing that a
    peer may read, and no result. A late thread may find a failure that another block of
    its own launch has found, but not the other threads of its own block. So the block
    has to agree before a branch that all its threads must take together.
    """
    # The caller compares the word. A comparison here would make the kernel's first
    # loads wait for it.
    failed = load_failure(own, block)  # explore: failed
    return word_of(ld_u32(own + epochs + 4 * block)), failed


@device_function
def load_failure(own: int, block: int) -> int:
    """Return a word that is not 0 if the rank has failed; see ``resume``."""
    return ld_relaxed_sys_u32(own + _LINE * (block & _MARKS - 1))  # explore: mark


@device_function
def keep(own: int, epochs: int, block: int, epoch: int, failed: bool) -> None:
    """Keep a block's epoch for its next call, and that the rank failed if it has.

    All threads call it at the end of a call. The block has synchronized since they
    resumed, so all of them have read the epoch before it changes.
    """
    keep_failure(own, failed)  # explore: keep
    if thread_index_x() == 0:
        st_u32(own + epochs + 4 * block, epoch)


@device_function
def keep_failure(own: int, failed: bool) -> None:
    """Keep that the rank failed if it has; see ``resume``."""
    if failed:
        for i in range(_MARKS):
            st_relaxed_sys_u32(own + _LINE * i, 1)


def divide_up(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)
