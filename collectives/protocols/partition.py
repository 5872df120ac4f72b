"""How a message is divided among ranks, blocks and tiles."""

from typing import NamedTuple

from numba_symm import dtypes
from numba_symm.collectives.protocols.binding import Call, Endpoint, most_blocks
from numba_symm.collectives.protocols.workspace import (
    CHUNKED,
    HELD,
    THREADS,
    VECTOR,
    divide_up,
)
from numba_symm.dtypes import Element

_WORDS = dtypes.element("int64", "moves")

LINE = 8
"""Vectors in a line of 128 bytes. Shards begin on lines if the array does."""


def shard(vectors: int, size: int) -> int:
    """Return how many vectors each rank reduces; the last ranks may get fewer."""
    return divide_up(divide_up(vectors, size), LINE) * LINE


def is_ragged(call: Call, share: int = 0, shares: int = 0) -> bool:
    """Return whether kernels access anything but whole vectors on 16-byte boundaries.

    Args:
        call: the call.
        share: vectors of a shard; 0: the call has no shards.
        shares: how many shards there are.
    """
    partial = call.count % call.element.lanes != 0
    uneven = share != 0 and share * shares != call.vectors
    return (call.source | call.target) % VECTOR != 0 or partial or uneven


def moved_as(call: Call, ragged: bool) -> Element:
    """Return the element type for a kernel that moves data and reduces nothing.

    Whole vectors of all types are moved by the same instructions, so by one kernel.
    """
    return call.element if ragged else _WORDS


class Chunks(NamedTuple):
    """How a kernel that works in chunks divides a message.

    Attributes:
        grid: number of blocks.
        tiles: vectors of a thread in a chunk.
        number: how many chunks each block has, one after another.
    """

    grid: int
    tiles: int
    number: int


def chunks_of(vectors: int, end: Endpoint) -> Chunks:
    """Return the chunks: equally long, and of few tiles in many blocks.

    A last chunk of few vectors would take as long as any other.
    """
    all_tiles = divide_up(vectors, THREADS)
    most = min(end.max_blocks, CHUNKED.most(end.size))
    most = most_blocks(end, most, HELD, all_tiles)
    number = divide_up(all_tiles, most * CHUNKED.tiles(end.size))
    tiles = divide_up(all_tiles, most * number)
    grid = divide_up(all_tiles, tiles * number)
    return Chunks(grid, tiles, number)
