"""A rank's site: its place among the islands, steps of calls, and their sizes.

The sizes according to which calls over several islands choose their steps.

Each operation has one way for a few islands, in which every one exchanges with every
other at a time, and one for more, in base 2 along the rails (``rails.py``). Which one a
call takes follows from the number of islands and its size alone, so all ranks agree.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numba_symm.collectives.kernels import barrier as barriers
from numba_symm.collectives.kernels import pack, transfer
from numba_symm.collectives.operations import ALL_GATHER, BROADCAST, Operation
from numba_symm.collectives.protocols.binding import (
    Call,
    Carried,
    Endpoint,
    Enqueue,
    Series,
)
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import HELD, VECTOR, divide_up
from numba_symm.dtypes import Element
from numba_symm.engines.protocol import Collective, Parcel
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, CollectiveError
from numba_symm.gpu import streams
from numba_symm.islands import Islands
from numba_symm.launch.devices import consecutive


@dataclass(frozen=True)
class Sizes:
    """Limits, equal on all ranks. All but ``few`` are bytes.

    Attributes:
        staging: the size of the memory through which reductions pass, on each rank. It
            has two halves, for two chunks that overlap.
        few: up to this number of islands, each exchanges with every other one at a
            time. More are many.
        small: the size of the largest message, as carried, of which no shards cross;
            many islands broadcast it along the root's rail.
        one_step: the most that a rank has of whole results if few islands exchange
            them. Of larger ones, each exchanges parts first, and then the results.
        chunk: the smallest size of a chunk's shard.
        one_rail: the most of a broadcast that the root sends to a few other islands.
        whole: the same for many islands.
        kept: the same in their reduce-scatter, where it keeps only a shard.
        part: the least part for each island that many islands send once. Smaller ones
            cross in base 2: in fewer messages, most of them several times.
        summed: the same in an all-reduce, where the parts' results cross as well.
        apart: the least shard of an all-to-all that ranks of many islands send to each
            other themselves.
    """

    staging: int
    few: int
    small: int
    one_step: int
    chunk: int
    one_rail: int
    whole: int
    kept: int
    part: int
    summed: int
    apart: int

    @property
    def half(self) -> int:
        """The bytes of half of the staging memory."""
        return self.staging // 2

    @property
    def islands(self) -> int:
        """The most islands whose slots of the smallest chunks fit into a half."""
        return self.half >> 10


ON_GPUS = Sizes(
    staging=64 << 20,
    few=8,
    small=32 << 10,
    one_step=512 << 10,
    # An estimate: they take 40 µs at 400 Gb/s, and an exchange by NCCL at least 20.
    chunk=2 << 20,
    # An estimate: at 400 Gb/s they take 5 µs, and another step within an island 2 to 3.
    one_rail=256 << 10,
    # Estimates: no network of many islands has been measured. The starts of five
    # exchanges take about as long as 4 MiB at 400 Gb/s.
    whole=4 << 20,
    kept=1 << 20,
    part=32 << 10,
    summed=64 << 10,
    apart=256 << 10,
)

IN_THE_SIMULATOR = Sizes(
    staging=1 << 17,
    few=3,
    small=256,
    one_step=512,
    chunk=1 << 10,
    one_rail=256,
    whole=1 << 10,
    kept=1 << 9,
    part=128,
    summed=256,
    apart=512,
)

DEFAULT_SIZES = IN_THE_SIMULATOR if SIMULATED else ON_GPUS


ALIGNED = 256  # bytes


@dataclass(frozen=True, eq=False)
class Site:
    """One rank's place in a communicator of several islands.

    Attributes:
        islands: the ranks.
        end: this rank's end of its island, for kernels.
        staging: the address of ``sizes.staging`` bytes, which every call may use.
        listing: True when binding only to list kernels. Then a chunk is left out if an
            equal one needs the same kernels.
        shares: whether kernels leave the engine's multiprocessors to the engine.
        sizes: the limits by which calls choose their steps.
    """

    islands: Islands
    end: Endpoint
    staging: int
    listing: bool = False
    shares: bool = False
    sizes: Sizes = DEFAULT_SIZES

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The ranks of each island."""
        return self.islands.parts

    @property
    def rank(self) -> int:
        """This rank."""
        return self.islands.world.rank

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.islands.world.size

    @property
    def index(self) -> int:
        """The number of this rank's island."""
        return self.islands.index

    @property
    def local(self) -> int:
        """This rank's number in its island."""
        return self.islands.local

    @property
    def mine(self) -> Sequence[int]:
        """The ranks of this rank's island."""
        return self.parts[self.index]

    @property
    def largest(self) -> int:
        """The number of ranks of the largest island."""
        return self.islands.places.largest

    @property
    def smallest(self) -> int:
        """The number of ranks of the smallest island."""
        return self.islands.places.smallest

    @property
    def even(self) -> bool:
        """Whether all islands have equally many ranks, which are consecutive."""
        return self.islands.places.even

    @property
    def many(self) -> bool:
        """Whether there are more islands than exchange with each other at a time."""
        return len(self.parts) > self.sizes.few

    @property
    def others(self) -> list[int]:
        """The numbers of the other islands."""
        return [j for j in range(len(self.parts)) if j != self.index]

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's island, and the rank's number there."""
        return self.islands.places.of[rank]

    def on_rail(self, island: int, number: int) -> int:
        """Return the rank of an island that is on the rail of this number."""
        part = self.parts[island]
        return part[number % len(part)]

    def chunks(self, count: int, most: int) -> list[tuple[int, int]]:
        """Return the first element and the number of elements of each chunk.

        Args:
            count: the number of elements of the message.
            most: those of a chunk, at most; a multiple of the elements of a vector, so
                that all chunks are aligned as the first one is.
        """
        found = [
            (first, min(most, count - first)) for first in range(0, count, most or 1)
        ]
        return found[-2:] if self.listing else found

    @property
    def beside(self) -> "Site":
        """The same for steps beside an exchange: without the engine's multiprocessors.

        It is used for a step on all ranks or on none, because its grid is smaller.
        """
        if self.shares:
            return self
        left = max(1, self.end.multiprocessors - self.islands.engine.multiprocessors)
        most = min(self.end.max_blocks, HELD * left)
        end = dataclasses.replace(self.end, multiprocessors=left, max_blocks=most)
        return dataclasses.replace(self, end=end, shares=True)

    # Steps.

    def within(self, operation: Operation, call: Call) -> Enqueue:
        """Return an operation within the island. Its root is a number there."""
        end = self.end
        name = operation.chosen(None, call.nbytes, end.size, call.element, end.choices)
        return operation.bind(name, end, call)

    def between(
        self,
        what: str,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        beside: Sequence[Enqueue] = (),
    ) -> list[Enqueue]:
        """Return the exchange of parcels with other islands, if there are any.

        The steps of ``beside`` progress side by side with it; see :class:`Engine`.
        """
        if not sends and not receives:
            return [*beside]
        engine, order = self.islands.engine, self.end.order
        sent, received = tuple(sends), tuple(receives)
        work = Series(*beside) if beside else None

        enqueue = partial(engine.exchange, sent, received, beside=work, order=order)
        nbytes = sum(each.nbytes for each in sends)
        return [_ByEngine(self, what, nbytes, enqueue)]

    def collective(self, work: Collective, nbytes: int) -> Enqueue:
        """Return a collective of the engine's, in which this rank sends some bytes."""
        made = self.islands.engine.collectives[work.name]
        enqueue = partial(made, work, self.end.order)
        return _ByEngine(self, work.name, nbytes, enqueue)

    def messages(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> list[Enqueue]:
        """Return messages within the island, by numbers within it, if there are any.

        Their kernel leaves the engine's multiprocessors to the engine.
        """
        if not sends and not receives:
            return []
        return [transfer.bind(self.beside.end, sends, receives)]

    def spread_all(
        self, target: int, part: Sequence[int], count: int, element: Element
    ) -> list[Enqueue]:
        """Return the steps by which all ranks of the island get those of another one.

        Args:
            target: address of what rank 0 of all ranks has.
            part: the ranks of that island.
            count: elements of each.
            element: their type.
        """
        nbytes = count * element.itemsize
        if consecutive(part):
            return self.spread(target + part[0] * nbytes, len(part), count, element)
        return [
            step
            for number, rank in enumerate(part)
            for step in self.spread(target + rank * nbytes, 1, count, element, number)
        ]

    def spread(
        self, target: int, shards: int, count: int, element: Element, owner: int = 0
    ) -> list[Enqueue]:
        """Return the steps by which all ranks of the island get all shards.

        The shards follow each other at ``target``, on one rank after another: number
        ``owner`` has the first one, and number 0 follows the last number.

        Args:
            target: address of the first shard.
            shards: how many there are.
            count: elements of each.
            element: their type.
            owner: the number of the rank that has the first one.
        """
        mine, nbytes = len(self.mine), count * element.itemsize
        if mine == 1:
            return []
        if mine == shards and owner == 0:
            own = target + self.local * nbytes
            return [self.within(ALL_GATHER, Call(own, target, count, element, "sum"))]
        steps = []
        for number in range(shards):
            at, root = target + number * nbytes, (owner + number) % mine
            call = Call(at, at, count, element, "sum", root)
            steps.append(self.within(BROADCAST, call))
        return steps

    def copy(self, target: int, source: int, nbytes: int) -> list[Enqueue]:
        """Return a copy within this rank's memory, if it is needed."""
        if target == source or nbytes == 0:
            return []
        return [streams.Copy(target, source, nbytes)]

    def packed(
        self,
        whole: int,
        spread: int,
        shape: Sequence[int],
        apart: Sequence[int],
        packing: bool = True,
    ) -> list[Enqueue]:
        """Return the copy of strided elements to contiguous memory.

        Args:
            whole: the address of that memory.
            spread: the address of the first element.
            shape: the lengths of the axes; the last one is of bytes, without gaps.
            apart: bytes from one index to the next, of the other axes.
            packing: whether to copy to that memory; else from there.
        """
        if self.listing:  # which axes are joined depends on the rank and the size
            return [
                pack.bind(
                    whole, spread, (2,) * axes, (1 << 40, 1 << 20, 1)[-axes:], 1, True
                )
                for axes in range(1, len(shape) + 1)
            ]
        return [pack.bind(whole, spread, shape, (*apart, 1), 1, packing)]

    def met(self) -> list[Enqueue]:
        """Return a barrier of the island."""
        return [barriers.bind(self.end)]

    def combined(
        self, carried: Carried, first: int, stride: int, own: int, number: int
    ) -> list[Enqueue]:
        """Return the reduction of several shards by their tree, into one of them.

        Args:
            carried: the reduction, which is not finished.
            first: address of the first shard.
            stride: bytes from one shard to the next, a multiple of ``VECTOR``.
            own: the number of the shard that gets the result.
            number: how many there are.
        """
        if number == 1:
            return []
        vectors, element, op = stride // VECTOR, carried.element, carried.op
        bind = pack.bind_reduce_shards
        return [bind(self.end, first, vectors, own, number, element, op)]

    def finished(
        self,
        carried: Carried,
        source: int,
        target: int,
        count: int,
    ) -> list[Enqueue]:
        """Return the step from carried results to elements of the call's type."""
        if count == 0:
            return []
        kinds = carried.element, carried.call.element
        if kinds[0] == kinds[1] and carried.call.op != "avg":
            return self.copy(target, source, count * kinds[0].itemsize)
        op = carried.call.op if carried.call.op == "avg" else "sum"
        return [
            pack.bind_convert(self.end, kinds, source, target, count, op, self.size)
        ]

    def widened(
        self, carried: Carried, source: int, target: int, count: int
    ) -> tuple[list[Enqueue], int]:
        """Return the step from elements to carried ones, and their address.

        ``target`` is where they are stored if their types differ.
        """
        kinds = carried.call.element, carried.element
        if kinds[0] == kinds[1]:
            return [], source
        return [pack.bind_convert(self.end, kinds, source, target, count)], target


class StagingRanges:
    """Addresses in the staging memory, one range after another.

    Args:
        site: this rank's site.
        number: of the chunk; chunks use the halves of the memory in turn.
    """

    def __init__(self, site: Site, number: int = 0):
        half = site.sizes.half
        self._next = site.staging + number % 2 * half
        self._end = self._next + half

    def take(self, nbytes: int) -> int:
        """Return the address of a range that is aligned for every kernel."""
        found = self._next
        self._next += divide_up(nbytes, ALIGNED) * ALIGNED
        assert self._next <= self._end, "islands: the staging memory is too small"
        return found

    def take_last(self, nbytes: int) -> int:
        """Return the address of a range at the end.

        A chunk still uses it while the chunk after next uses what :meth:`take` returns.
        """
        self._end -= padded(nbytes)
        assert self._next <= self._end, "islands: the staging memory is too small"
        return self._end


def padded(nbytes: int) -> int:
    """Return the bytes of a range in the staging memory."""
    return divide_up(nbytes, ALIGNED) * ALIGNED


def fitting(
    site: Site, pieces: float, width: int, lost: int, unit: int = VECTOR
) -> int:
    """Return how many elements a chunk has at most; 0 if not even a few fit.

    Args:
        site: this rank's site.
        pieces: how many copies of a chunk a half of the staging memory holds.
        width: bytes of an element.
        lost: bytes of that half between them.
        unit: what the number of elements is a multiple of.
    """
    most = int(max(0, site.sizes.half - lost) / (pieces * width))
    return most // unit * unit


class _ByEngine:
    """Work of the engine."""

    def __init__(
        self, site: Site, what: str, nbytes: int, enqueue: Callable[[int], None]
    ):
        self._islands, self._what = site.islands, what
        self._nbytes, self._enqueue = nbytes, enqueue

    def __call__(self, stream: int) -> None:
        """Enqueue it."""
        self._islands.refuse_finalized()  # an engine may not need MPI to begin
        self._islands.operation = self._what
        self._islands.sent += self._nbytes
        try:
            self._enqueue(stream)
        except CollectiveError as error:
            raise self._islands.failed_by(error) from None
        except ArgumentError:
            raise  # the engine has not begun
        except BaseException as error:
            # Also in a capture, because the engine of another rank may wait to connect.
            self._islands.abandon(error, self._what)
            raise


def parcels(messages: Sequence[Message]) -> list[Parcel]:
    """Return messages as an engine takes them; refuse those of unknown length."""
    for message in messages:
        if message.count_at:
            raise ArgumentError(
                f"a message from rank {message.peer}: expected no count=, because that "
                "rank is of another island, whose messages have the size of out; send "
                "the count first, or pass out of the message's size"
            )
    return [Parcel(each.peer, each.address, each.nbytes) for each in messages]


def of_island(site: Site, messages: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """Return the messages within the island, by numbers in it, and the others."""
    numbers = {rank: number for number, rank in enumerate(site.mine)}
    inner = [
        message._replace(peer=numbers[message.peer])
        for message in messages
        if message.peer in numbers
    ]
    return inner, [message for message in messages if message.peer not in numbers]
