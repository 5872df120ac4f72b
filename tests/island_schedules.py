"""Schedules of calls over several islands as data.

A schedule is what one rank enqueues for a call: a list of the steps below. It needs no
other rank, so there may be as many islands as a test wants.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from numba_symm import dtypes
from numba_symm.collectives.islands import moves
from numba_symm.collectives.islands.construction import STEPS
from numba_symm.collectives.islands.site import ON_GPUS, Site, Sizes
from numba_symm.collectives.operations import OPERATIONS, Operation
from numba_symm.collectives.protocols.binding import Call, Carried
from numba_symm.collectives.protocols.credit import Message
from numba_symm.dtypes import Element, Op
from numba_symm.engines.protocol import Parcel
from numba_symm.launch.devices import Parts, Places

SOURCE, TARGET, STAGING = 1 << 44, 1 << 45, 1 << 46  # addresses, equal on all ranks


class Within(NamedTuple):
    """An operation within the island."""

    operation: Operation
    call: Call


class ExchangeStep(NamedTuple):
    """An exchange by the engine, or by a kernel within the island."""

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    beside: tuple[Any, ...]
    island: bool = False


class CopyStep(NamedTuple):
    """A copy within this rank's memory."""

    target: int
    source: int
    nbytes: int


class Pack(NamedTuple):
    """A copy to contiguous memory, or from there."""

    whole: int
    spread: int
    shape: tuple[int, ...]
    apart: tuple[int, ...]
    packing: bool


class Combine(NamedTuple):
    """A reduction of consecutive slots into one of them."""

    element: Element
    op: Op
    first: int
    stride: int
    own: int
    number: int


class Convert(NamedTuple):
    """A conversion of elements to another type."""

    kinds: tuple[Element, Element]
    source: int
    target: int
    count: int  # type: ignore[assignment]  # it hides the tuple's method
    divide: bool


class Met(NamedTuple):
    """A barrier of the island."""


Steps = list[Any]


class Recording(Site):
    """A site whose steps are data."""

    def chunks(self, count: int, most: int) -> list[tuple[int, int]]:
        """Return the first chunks and the last two: the others are like them."""
        firsts: Sequence[int] = range(0, count, most or 1)
        if len(firsts) > self.islands.most_chunks:  # type: ignore[attr-defined]
            firsts = [*firsts[:2], *firsts[-2:]]
        return [(first, min(most, count - first)) for first in firsts]

    @property
    def beside(self) -> "Recording":
        """The same: no grid is needed."""
        return self

    def within(self, operation: Operation, call: Call) -> Any:
        """Return an operation within the island."""
        return Within(operation, call)

    def between(
        self,
        what: str,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        beside: Sequence[Any] = (),
    ) -> Steps:
        """Return the exchange of parcels."""
        if not sends and not receives:
            return [*beside]
        return [ExchangeStep(tuple(sends), tuple(receives), tuple(beside))]

    def messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Steps:
        """Return messages within the island."""
        if not sends and not receives:
            return []
        peers = self.mine

        def whole(each: Message) -> Any:
            return each._replace(peer=peers[each.peer])

        return [
            ExchangeStep(
                tuple(map(whole, sends)), tuple(map(whole, receives)), (), True
            )
        ]

    def copy(self, target: int, source: int, nbytes: int) -> Steps:
        """Return a copy, if it is needed."""
        return (
            []
            if target == source or nbytes == 0
            else [CopyStep(target, source, nbytes)]
        )

    def packed(
        self,
        whole: int,
        spread: int,
        shape: Sequence[int],
        apart: Sequence[int],
        packing: bool = True,
    ) -> Steps:
        """Return a copy of elements with gaps."""
        return [Pack(whole, spread, tuple(shape), tuple(apart), packing)]

    def met(self) -> Steps:
        """Return a barrier of the island."""
        return [Met()]

    def combined(
        self, carried: Carried, first: int, stride: int, own: int, number: int
    ) -> Steps:
        """Return the reduction of several slots."""
        assert stride % 16 == first % 16 == 0
        if number == 1:
            return []
        return [Combine(carried.element, carried.op, first, stride, own, number)]

    def finished(self, carried: Carried, source: int, target: int, count: int) -> Steps:
        """Return the step from carried results to the call's elements."""
        kinds = carried.element, carried.call.element
        if count == 0:
            return []
        if kinds[0] == kinds[1] and carried.call.op != "avg":
            return self.copy(target, source, count * kinds[0].itemsize)
        return [Convert(kinds, source, target, count, carried.call.op == "avg")]

    def widened(
        self, carried: Carried, source: int, target: int, count: int
    ) -> tuple[Steps, int]:
        """Return the step to carried elements, and their address."""
        kinds = carried.call.element, carried.element
        if kinds[0] == kinds[1]:
            return [], source
        return [Convert(kinds, source, target, count, False)], target


def even(islands: int, ranks: int) -> Parts:
    """Return the ranks of islands of equally many ranks."""
    return tuple(tuple(range(i * ranks, (i + 1) * ranks)) for i in range(islands))


def of_sizes(*sizes: int) -> Parts:
    """Return the ranks of islands of those sizes."""
    ends = accumulate(sizes, initial=0)
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))


class ScheduledJob:
    """A job whose ranks exist as schedules only.

    Args:
        parts: the ranks of each island.
        sizes: the limits of its calls.
        most_chunks: with more chunks, some are left out.
    """

    def __init__(
        self, parts: Parts, sizes: Sizes = ON_GPUS, most_chunks: int = 1 << 30
    ):
        self.parts, self.sizes, self.most_chunks = parts, sizes, most_chunks
        self.places = Places(parts)
        self.size = sum(map(len, parts))

    def site(self, rank: int) -> Recording:
        """Return a rank's site."""
        index, local = self.places.of[rank]
        islands: Any = SimpleNamespace(
            parts=self.parts,
            places=self.places,
            world=SimpleNamespace(rank=rank, size=self.size),
            index=index,
            local=local,
            most_chunks=self.most_chunks,
        )
        end: Any = SimpleNamespace(size=len(self.parts[index]))
        return Recording(islands, end, STAGING, sizes=self.sizes)

    def schedule(
        self,
        rank: int,
        name: str,
        count: int,
        kind: str = "int64",
        op: Op = "sum",
        root: int = 0,
        place: bool = False,
    ) -> Steps:
        """Return a rank's steps of a call.

        Args:
            rank: the rank.
            name: the operation.
            count: the elements of the call, as in :class:`Call`.
            kind: their dtype.
            op: the operator.
            root: the root, if there is one.
            place: whether the output is in the place of the input.
        """
        if name == "barrier":
            return moves.barrier(self.site(rank))
        operation = OPERATIONS[name]
        in_place = place or operation.in_place
        target = TARGET if not operation.at_root or rank == root else 0
        source = TARGET if in_place else SOURCE
        element = dtypes.element(np.dtype(kind), "test")
        call = Call(source, target, count, element, op, root)
        return STEPS[name](self.site(rank), call)


def flat(steps: Sequence[Any]) -> Iterator[Any]:
    """Yield all steps, also those beside exchanges."""
    for step in steps:
        yield step
        yield from flat(getattr(step, "beside", ()))


def exchanges(steps: Sequence[Any]) -> list[ExchangeStep]:
    """Return the exchanges between islands."""
    return [s for s in flat(steps) if isinstance(s, ExchangeStep) and not s.island]


def launches(steps: Sequence[Any]) -> int:
    """Return how many kernels and copies a rank enqueues, without the engine's."""
    return sum(not isinstance(s, ExchangeStep) or s.island for s in flat(steps))
