"""The overlap of chunks: some cross between islands while kernels work on others.

While the engine moves the bytes of a chunk, the kernels of the chunk before it and of
the chunk after it run on another stream, one after another. So they need one workspace,
and chunks need two halves of the staging memory, which they use in turn:

    exchange           0        1        2
    beside it      1       0, 2     1        2      (work of these chunks)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.engines.protocol import Parcel

CHUNKS = 8
"""The number of chunks of a large message, if they fit into the staging memory."""

ChunkStep = tuple[int, int]
"""A chunk, and the number of one of its exchanges or of a part of its work."""

Parcels = tuple[list[Parcel], list[Parcel]]
"""What an exchange sends, and what it receives."""


class Stages(NamedTuple):
    """The stages of a chunk.

    Attributes:
        work: the steps before the first exchange, between two, and after the last one.
        exchanges: one fewer.
    """

    work: Sequence[list[Enqueue]]
    exchanges: Sequence[Parcels]


def overlapped(
    site: Site, what: str, chunks: Sequence[Stages], last: int = 1
) -> list[Enqueue]:
    """Return the steps of chunks, in which exchanges and work overlap.

    Args:
        site: this rank's site.
        what: the operation.
        chunks: the stages of each; all ranks have as many.
        last: the number of the last work of a chunk that uses the staging memory. The
            exchanges before it do, too.
    """
    steps: list[Enqueue] = []
    for exchanges, work in ticks([len(chunk.exchanges) for chunk in chunks], last):
        sends, receives = joined([chunks[c].exchanges[n] for c, n in exchanges])
        beside = [step for c, n in work for step in chunks[c].work[n]]
        steps += site.between(what, sends, receives, beside)
    return steps


def ticks(
    exchanges: Sequence[int], last: int = 1
) -> list[tuple[list[ChunkStep], list[ChunkStep]]]:
    """Return the stages at each tick: what is one exchange, and the work beside it.

    A chunk has an exchange at every second tick. The work between two is at the tick
    between them, beside the exchange of another chunk. The first exchange of chunk c
    is at tick c, if only the first exchange and the work after it use the staging
    memory. Otherwise, a pair of chunks begins when both of the pair before have ended
    their use, in the order of the chunks.

    Args:
        exchanges: of each chunk, how many it has.
        last: the number of the last work that uses the staging memory.
    """
    found = []
    period = 2 * last  # ticks from a pair to the next
    starts = [c // 2 * period + c % 2 for c in range(len(exchanges))]
    longest = 2 * max(exchanges)
    ended = max(at + 2 * n for at, n in zip(starts, exchanges, strict=True))
    for tick in range(-1, ended):
        exchanged: list[ChunkStep] = []
        work: list[ChunkStep] = []
        # There may be many chunks. The first may free what the last uses.
        first = max(0, 2 * ((tick - longest) // period) - 1)
        for c in range(first, min(len(exchanges), 2 * ((tick + 1) // period) + 2)):
            most = exchanges[c]
            number, odd = divmod(tick + 1 - starts[c], 2)
            if not odd and 0 <= number <= most:
                work.append((c, number))
            elif odd and 0 <= number < most:
                exchanged.append((c, number))
        found.append((exchanged, work))
    return found


def joined(pairs: Sequence[Parcels]) -> Parcels:
    """Return one exchange in place of several."""
    sends = [parcel for sent, _ in pairs for parcel in sent]
    return sends, [parcel for _, received in pairs for parcel in received]


def several(
    count: int, shards: int, width: int, most: int, least: int, number: int = CHUNKS
) -> int:
    """Return how many elements a chunk has, so that several chunks overlap.

    Args:
        count: the elements of the message.
        shards: the number of shards of a chunk.
        width: bytes of an element.
        most: the elements of a chunk that fits, a multiple of vectors.
        least: the bytes of a chunk's shard.
        number: of chunks of a large message, at least ``CHUNKS``.
    """
    number = max(CHUNKS, number)
    each = max(least, divide_up(count * width, shards * number)) // width
    return min(most, divide_up(each, VECTOR) * VECTOR * shards)


def in_shards(
    site: Site, count: int, most: int, shards: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the first element, the number of elements and the shards of each chunk.

    A last chunk has the few elements that do not divide into shards.
    """
    even = count // shards * shards
    for first, number in site.chunks(even, most):
        yield first, number, shards
    if even < count:
        yield even, count - even, 1
