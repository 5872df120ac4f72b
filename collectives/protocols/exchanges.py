"""One exchange between all ranks: what a rank sends, and how it uses received vectors.

Each operation of ``operations.py`` has an :class:`Exchange`, in which a rank sends the
same vectors to all ranks, or a shard to each. An :class:`Output` describes how it uses
the vectors of all ranks.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.collectives.protocols.binding import digest_of
from numba_symm.device import order
from numba_symm.device.intrinsics import device_function, word_of
from numba_symm.device.lanes import Lanes
from numba_symm.device.polling import fail, wait_record
from numba_symm.dtypes import Element, Op
from numba_symm.launch.failures import CALL_MISMATCH

EVERYONE = -1
"""All other ranks, as bits along the ring."""

DIGEST, _DIGEST = 0x2E0D7C5AB16F9483, 0x5CE1A08F
"""The upper 96 bits of a vector whose lowest 32 bits are a digest. Data has them with a
probability of 2**-96."""


class Output(enum.Enum):
    """What a rank does with the vectors of all ranks."""

    SHARDS = enum.auto()  # stores them, by rank
    REDUCED = enum.auto()  # reduces all
    UP_TO_THIS = enum.auto()  # reduces those of this rank and the ranks before it
    BEFORE_THIS = enum.auto()  # reduces those of the ranks before it
    FROM_THIS = enum.auto()  # reduces those of this rank and the ranks after it
    AT_ROOT = enum.auto()  # reduces all, on the root; the others have no output
    OF_ROOT = enum.auto()  # stores the root's, on the other ranks

    @property
    def rooted(self) -> bool:
        """Whether data is sent to one rank only, or by one rank only."""
        return self in (Output.AT_ROOT, Output.OF_ROOT)

    @property
    def reduces(self) -> bool:
        """Whether there is an operator."""
        return self not in (Output.SHARDS, Output.OF_ROOT)

    @property
    def scans(self) -> bool:
        """Whether each rank reduces the first ranks' vectors, or the last ranks'."""
        return self.reduces and not self.rooted and self is not Output.REDUCED

    def used(self, rank: int, size: int, root: int) -> range:
        """Return the ranks whose vectors ``rank`` reduces, or stores one by one."""
        return {
            Output.SHARDS: range(size),
            Output.REDUCED: range(size),
            Output.UP_TO_THIS: range(rank + 1),
            Output.BEFORE_THIS: range(rank),
            Output.FROM_THIS: range(rank, size),
            Output.AT_ROOT: range(size if rank == root else 0),
            Output.OF_ROOT: range(root, root + 1),
        }[self]

    def taken(self, rank: int, size: int, root: int) -> int:
        """Return the kernel's argument of that name: what ``rank`` reduces or copies.

        If it reduces: of how many ranks. If it stores the root's vector: how many
        places along the ring the root is. Otherwise 0.
        """
        if self is Output.OF_ROOT:
            return (root - rank) % size
        return len(self.used(rank, size, root)) if self.reduces else 0

    def exchanged(self, rank: int, size: int, root: int) -> tuple[int, int]:
        """Return the ranks that ``rank`` sends to, and those that it receives from.

        Both are bits along the ring.
        """
        to_root = 1 << (root - rank) % size >> 1
        of_all = EVERYONE if rank == root else 0
        if self is Output.OF_ROOT:
            return of_all, to_root
        return (to_root, of_all) if self is Output.AT_ROOT else (EVERYONE, EVERYONE)


class Exchange(NamedTuple):
    """What a rank sends, and what it does with the vectors of all ranks.

    Attributes:
        sends_shards: whether a rank sends a shard to each rank, else the same to all.
        output: what it does with the vectors.
        operation: the number in ``launch/failures.py`` for a wait that is given up.
    """

    sends_shards: bool
    output: Output
    operation: int

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports (``mailboxes.py``) that the operation has.

        A sentinel changes a NaN's bits, which an operation that only moves data must
        not do. In a broadcast, packets would be at most 3 % faster than marks.
        """
        if self.output is Output.OF_ROOT:
            return ("marked",)
        return ("sentinel", "marked", "ll") if self.output.reduces else ("marked", "ll")


@functools.cache
def make_reduced(
    size: int, lanes: Lanes, output: Output
) -> Callable[[int, int, Any, Any, Any], Any]:
    """Return a device function that makes one vector from the ranks' vectors.

    ``(rank, taken, low, high, spare)`` returns its two words: the reduction, or the
    root's vector; ``taken`` is ``Output.taken``, at least 1. The arrays are
    ``in_rank_order``'s.
    """
    last, some = output is Output.FROM_THIS, output.scans
    of_ring = order.make_of_ring(size, lanes, last)

    @device_function
    def reduced(rank: int, taken: int, low: Any, high: Any, spare: Any) -> Any:
        number = taken if some else size
        return of_ring(rank, low, high, spare, size - number if last else number)

    @device_function
    def of_root(rank: int, taken: int, low: Any, high: Any, spare: Any) -> Any:
        # By masks, because the compiler would make an index from branches, and put the
        # arrays into memory.
        first, second = 0, 0
        for k in range(1, size):
            mask = -word_of(k == taken)
            first |= low[k] & mask
            second |= high[k] & mask
        return first, second

    return of_root if output is Output.OF_ROOT else reduced


def of_none(element: Element, op: Op, output: Output) -> tuple[bool, int, int]:
    """Return ``order.of_none`` for the first rank of an exscan, and False otherwise."""
    if output is not Output.BEFORE_THIS:
        return False, 0, 0
    return order.of_none(element, op)


def digest_word(call: str) -> int:
    """Return the first word of the vector that is the digest of a call in words."""
    return digest_of(call) | _DIGEST << 32


@functools.cache
def make_digests_match(size: int) -> Callable[..., bool]:
    """Return a device function that checks the digests of the others' calls.

    ``(guard, digest, due_from, low, high)`` returns whether this digest arrived
    from each rank from which no data is due, and no digest from the others.
    """

    @device_function
    def digests_match(
        guard: Any, digest: int, due_from: int, low: Any, high: Any
    ) -> bool:
        other = 0
        for k in range(size - 1):
            due = due_from >> k & 1 == 0
            is_one = high[k + 1] == DIGEST and (low[k + 1] ^ digest) >> 32 == 0
            # explore: digest
            if due != is_one or (due and low[k + 1] != digest):
                other = k + 1
        if other != 0:
            peer = (guard.rank + other) % size
            fail(guard, wait_record(CALL_MISMATCH, guard.rank, peer, 0, 0))
        return other == 0

    return digests_match
