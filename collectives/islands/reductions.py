"""Reductions over several islands: within each in rank order, then islands in order.

A message is divided into shards, and each island has an owner of each shard:

    within    the island reduces each shard to its owner
    rails     the owners of a shard exchange what they have, or parts of it, and combine
              it in the order of the islands
    within    each owner distributes the result

So all ranks get the same bits, whatever the message's size. Chunks of a message pass
through the staging memory one after another.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.pipeline import (
    Parcels,
    Stages,
    in_shards,
    joined,
    overlapped,
    several,
)
from numba_symm.collectives.islands.site import (
    ALIGNED,
    Carried,
    Site,
    StagingRanges,
    fitting,
)
from numba_symm.collectives.operations import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.engines.protocol import Parcel


class _IslandShard(NamedTuple):
    """A shard of a chunk.

    Attributes:
        number: its number, by which every island has an owner.
        first: its first element within the chunk.
        length: its number of elements.
    """

    number: int
    first: int
    length: int


def all_reduce(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-reduce."""
    carried = Carried(call)
    if _small(site, carried):
        return _small_all_reduce(site, carried)
    return _in_shards(site, carried, None)


def reduce(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a reduce. The root is a rank."""
    carried = Carried(call)
    make = _small_reduce if _small(site, carried) else _in_shards
    if site.listing:  # the kernels differ with the root's place in this island
        roots = site.mine[0], site.mine[-1]
        return [step for r in roots for step in make(site, carried, r)]
    return make(site, carried, call.root)


def _small(site: Site, carried: Carried) -> bool:
    """Return whether islands exchange whole results, which each rank combines."""
    nbytes, sizes = carried.call.count * carried.width, site.sizes
    if site.many:
        return len(site.parts) * nbytes <= sizes.whole
    return nbytes <= sizes.small


def _small_all_reduce(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the fewest steps: each rank gets what every island has."""
    call, m = carried.call, len(site.parts)
    staging = StagingRanges(site)
    stride = divide_up(call.count * carried.width, VECTOR) * VECTOR
    wide = staging.take(stride)
    slots = staging.take(rails.slots(m) * stride)
    steps, source = site.widened(carried, call.source, wide, call.count)
    own = slots + site.index * stride
    steps.append(site.within(ALL_REDUCE, carried.step(source, own, call.count)))
    steps += rails.gathered(site, "all_reduce", slots, stride)
    steps += site.combined(carried, slots, stride, site.index, m)
    return steps + site.finished(carried, own, call.target, call.count)


def _small_reduce(site: Site, carried: Carried, root: int) -> list[Enqueue]:
    """Return the steps of a reduce to the root, along its rail."""
    call, m = carried.call, len(site.parts)
    island, number = site.place_of(root)
    staging = StagingRanges(site)
    stride = divide_up(call.count * carried.width, VECTOR) * VECTOR
    wide = staging.take(stride)
    slots = staging.take(rails.slots(m) * stride)
    steps, source = site.widened(carried, call.source, wide, call.count)
    owner = number % len(site.mine)
    own = slots + rails.own_slot(site, island) * stride
    partial = own if site.local == owner else 0
    step = carried.step(source, partial, call.count, owner)
    steps.append(site.within(REDUCE, step))
    steps += rails.collected(site, "reduce", slots, stride, island, number)
    if site.rank == root or site.listing:
        steps += site.combined(carried, slots, stride, island, m)
        at = slots + island * stride
        steps += site.finished(carried, at, call.target, call.count)
    return steps


def _in_shards(site: Site, carried: Carried, root: int | None) -> list[Enqueue]:
    """Return the steps of an all-reduce; with a root, of a reduce."""
    call, m = carried.call, len(site.parts)
    # The staging memory has the chunk itself, if its type differs. For each shard that
    # the rank owns, it has the reduced shard and what other islands send. With a root,
    # it also has the result. Beside them it has the ends of all ranges.
    rooted = root is not None
    nbytes = call.count * carried.width
    several_shards = (site.largest, site.smallest)
    for shards in several_shards if nbytes > site.sizes.small else (1,):
        owned = divide_up(shards, site.smallest)
        lost = 4 * ALIGNED * (1 + owned) + 4 * VECTOR * m * owned
        if lost <= site.sizes.half // 4:
            break

    def most(rooms: int) -> int:
        copies = rooms / m or 2 + rooted
        room = lost + VECTOR * rooms * owned
        pieces = (carried.element != call.element) + copies * owned / shards
        return fitting(site, pieces, carried.width, room, VECTOR * shards)

    fits = several(call.count, shards, carried.width, most(0), site.sizes.chunk)
    part = min(call.count, fits) * carried.width // (shards * m)
    binary = site.many and part < site.sizes.summed and most(rails.rooms(m)) > 0
    if binary:
        fits = most(rails.rooms(m))
    bounds = list(in_shards(site, call.count, fits, shards))
    if len(bounds) > 1:
        site = site.beside
    stages = [
        _CrossingChunk(site, carried, root, binary, number, *chunk).stages()
        for number, chunk in enumerate(bounds)
    ]
    # In base 2, all exchanges use the staging memory; otherwise the first one does.
    last = len(stages[0].exchanges) if binary else 1
    return overlapped(site, "reduce" if rooted else "all_reduce", stages, last)


class _CrossingChunk:
    """One chunk of an all-reduce or a reduce.

    Args:
        site: this rank's site.
        carried: the call.
        root: the rank that gets the result; None: all.
        binary: whether parts cross in base 2; see :func:`rails.exchanged`.
        number: the chunk's number.
        first: the chunk's first element.
        count: its number of elements.
        shards: the number of equal shards that it divides into.
    """

    def __init__(
        self,
        site: Site,
        carried: Carried,
        root: int | None,
        binary: bool,
        number: int,
        first: int,
        count: int,
        shards: int,
    ):
        self.site, self.carried, self.root, self.count = site, carried, root, count
        call = carried.call
        self.source = call.source + first * call.element.itemsize
        self.target = call.target + first * call.element.itemsize
        self.staging = StagingRanges(site, number)
        each = count // shards
        self.shards = [_IslandShard(k, k * each, each) for k in range(shards)]
        # In the root's island, addresses of the shards' results for the root.
        self.results: dict[_IslandShard, int] = {}
        self.binary = binary
        # The root owns the first shard of its island.
        self.shift = (-1, 0) if root is None else site.place_of(root)

    def number(self, island: int, shard: _IslandShard) -> int:
        """Return the number of a shard's owner within an island."""
        shift = self.shift[1] if island == self.shift[0] else 0
        return (shard.number + shift) % len(self.site.parts[island])

    def owner(self, island: int, shard: _IslandShard) -> int:
        """Return a shard's owner in an island."""
        return self.site.parts[island][self.number(island, shard)]

    def stages(self) -> Stages:
        """Return the chunk's stages."""
        site, carried = self.site, self.carried
        wide = 0
        if carried.element != carried.call.element:
            wide = self.staging.take(self.count * carried.width)
        steps, source = site.widened(carried, self.source, wide, self.count)
        mine = [
            each for each in self.shards if self.owner(site.index, each) == site.rank
        ]
        count = self.shards[0].length
        m, width = len(site.parts), carried.width
        if self.binary:
            owned = [_InBinary(self, shard) for shard in mine]
            return self._in_many_steps(steps + self._reduced(source, owned), owned)
        # A part is what one island's owner combines: the shard, or an m-th of it.
        apart = m > 2 and m * count * width > site.sizes.one_step
        lanes = carried.element.lanes
        part = divide_up(divide_up(count, m), lanes) * lanes if apart else count
        stride = divide_up(part * width, VECTOR) * VECTOR
        slots = [
            _Rail(self, shard, self.staging.take(m * stride), stride, part)
            for shard in mine
        ]
        steps += self._reduced(source, slots)
        first = joined([rail.first() for rail in slots])
        combined = [step for rail in slots for step in rail.combined()]
        last = self._distributed()
        if not apart:
            return Stages([steps, combined + last], [first])
        second = joined([rail.second() for rail in slots])
        return Stages([steps, combined, last], [first, second])

    def _in_many_steps(self, steps: list[Enqueue], owned: "list[_InBinary]") -> Stages:
        """Return the stages of an exchange in base 2, and of results along the rails.

        Args:
            steps: the reduction of each shard to its owner.
            owned: the shards that this rank owns; all ranks have as many exchanges.
        """
        number = 2 * rails.steps(len(self.site.parts))
        each = [shard.stages() for shard in owned]
        exchanges = [joined([one.exchanges[n] for one in each]) for n in range(number)]
        work = [
            [step for one in each for step in one.work[n]] for n in range(number + 1)
        ]
        work[0][:0] = steps
        work[-1].extend(self._distributed())
        return Stages(work, exchanges)

    def _reduced(
        self, source: int, owned: "Sequence[_Rail | _InBinary]"
    ) -> list[Enqueue]:
        """Return the reduction of each shard, within the island, to its owner."""
        site, carried = self.site, self.carried
        at = {each.shard: each.partial for each in owned}
        if self._in_order:
            (partial,) = at.values()
            count = self.shards[0].length
            step = carried.step(source, partial, count)
            return [site.within(REDUCE_SCATTER, step)]
        steps = []
        for shard in self.shards:
            first, root = shard.first * carried.width, self.number(site.index, shard)
            target, count = at.get(shard, 0), shard.length
            step = carried.step(source + first, target, count, root)
            steps.append(site.within(REDUCE, step))
        return steps

    @property
    def _in_order(self) -> bool:
        """Whether each rank of the island owns the shard of its own number."""
        numbers = [self.number(self.site.index, shard) for shard in self.shards]
        return numbers == list(range(len(self.site.mine)))

    def at(self, shard: _IslandShard) -> int:
        """Return the address of a shard's result, in the output."""
        return self.target + shard.first * self.carried.call.element.itemsize

    def _distributed(self) -> list[Enqueue]:
        """Return the steps from the owners' results to all ranks, or to the root."""
        site, element = self.site, self.carried.call.element
        if self.root is None:
            shards = self.shards
            return site.spread(self.target, len(shards), shards[0].length, element)
        if len(site.mine) == 1:
            return []
        if site.index != self.shift[0]:
            return []
        root = self.shift[1]
        away = [
            (shard, number)
            for shard in self.shards
            if (number := self.number(site.index, shard)) != root
        ]
        nbytes = self.shards[0].length * element.itemsize
        receives = [Message(number, self.at(shard), nbytes) for shard, number in away]
        sends = [
            Message(root, self.results[shard], nbytes)
            for shard, number in away
            if number == site.local
        ]
        return site.messages(sends, receives if site.local == root else [])


class _Rail:
    """A shard on the rail of its owners.

    Args:
        chunk: the chunk.
        shard: the shard, which this rank owns.
        slots: address of a slot for each island's part.
        stride: bytes from one slot to the next.
        part: elements of a part.
    """

    def __init__(
        self,
        chunk: _CrossingChunk,
        shard: _IslandShard,
        slots: int,
        stride: int,
        part: int,
    ):
        self.chunk, self.shard = chunk, shard
        self.slots, self.stride, self.part = slots, stride, part
        self.site, self.carried = chunk.site, chunk.carried
        self.apart = part < shard.length
        m = len(self.site.parts)
        self.partial = slots + self.site.index * stride
        if self.apart:
            self.partial = chunk.staging.take(m * stride)
        self.peers = {j: chunk.owner(j, shard) for j in self.site.others}

    def _bounds(self, island: int) -> tuple[int, int]:
        """Return the first element and the number of elements of an island's part."""
        if not self.apart:
            return 0, self.shard.length
        first = min(island * self.part, self.shard.length)
        return first, min(self.part, self.shard.length - first)

    def first(self) -> Parcels:
        """Return the exchange of what each island has."""
        site, chunk, width = self.site, self.chunk, self.carried.width
        root = chunk.shift[0]
        sends, receives = [], []
        for j, peer in self.peers.items():
            if chunk.root is None or self.apart or j == root:
                start, count = self._bounds(j)
                at = self.partial + start * width
                sends.append(Parcel(peer, at, count * width))
            if chunk.root is None or self.apart or site.index == root:
                _, count = self._bounds(site.index)
                at = self.slots + j * self.stride
                receives.append(Parcel(peer, at, count * width))
        return sends, receives

    def combined(self) -> list[Enqueue]:
        """Return the reduction of this island's part in the order of the islands."""
        site, chunk, carried = self.site, self.chunk, self.carried
        element = carried.call.element
        if chunk.root is not None and not self.apart and not self.at_root:
            return []
        start, count = self._bounds(site.index)
        own = self.slots + site.index * self.stride
        steps: list[Enqueue] = []
        if self.apart:
            nbytes = count * carried.width
            steps += site.copy(own, self.partial + start * carried.width, nbytes)
        if count:
            slots, m = self.slots, len(site.parts)
            steps += site.combined(carried, slots, self.stride, site.index, m)
        target = self.result + start * element.itemsize
        return steps + site.finished(carried, own, target, count)

    @property
    def at_root(self) -> bool:
        """Whether the root is in this rank's island."""
        return self.site.index == self.chunk.shift[0]

    @cached_property
    def result(self) -> int:
        """The address of the shard's result.

        A rank that is not the root passes it on from the staging memory.
        """
        chunk, itemsize = self.chunk, self.carried.call.element.itemsize
        if chunk.root in (None, self.site.rank):
            return chunk.at(self.shard)
        if self.at_root:
            at = chunk.staging.take_last(self.shard.length * itemsize)
            chunk.results[self.shard] = at
            return at
        start, count = self._bounds(self.site.index)
        return chunk.staging.take_last(count * itemsize) - start * itemsize

    def second(self) -> Parcels:
        """Return the exchange of the results of all parts."""
        element = self.carried.call.element
        at = self.result

        def parcel(island: int, peer: int) -> Parcel:
            start, count = self._bounds(island)
            return Parcel(peer, at + start * element.itemsize, count * element.itemsize)

        root = self.chunk.shift[0]
        sends = [
            parcel(self.site.index, peer)
            for j, peer in self.peers.items()
            if self.chunk.root is None or j == root
        ]
        if self.chunk.root is not None and not self.at_root:
            return sends, []
        return sends, [parcel(j, peer) for j, peer in self.peers.items()]


class _InBinary:
    """A shard on the rail of its owners, whose parts cross in base 2.

    The owners exchange parts by :func:`rails.exchanged`. Each combines those for its
    island, and the results are gathered along the rail, or collected for the root.

    Args:
        chunk: the chunk.
        shard: the shard, which this rank owns.

    Attributes:
        partial: the address of the island's own result.
    """

    def __init__(self, chunk: _CrossingChunk, shard: _IslandShard):
        self.chunk, self.shard = chunk, shard
        site, carried = chunk.site, chunk.carried
        m, lanes = len(site.parts), carried.element.lanes
        self.part = divide_up(divide_up(shard.length, m), lanes) * lanes
        self.stride = self.part * carried.width
        number = rails.rooms(m)
        self.partial = chunk.staging.take(number * self.stride)
        # The results are stored in the second room and the third one, which are then
        # free: the parts of all islands are in the first one.
        self.results = self.partial + number // 3 * self.stride

    def stages(self) -> Stages:
        """Return the stages."""
        chunk, (site, carried) = self.chunk, (self.chunk.site, self.chunk.carried)
        m, index, root = len(site.parts), site.index, self.chunk.shift[0]
        peers = [chunk.owner(island, self.shard) for island in range(m)]
        parts = rails.Slots(self.partial, self.stride)
        across = parts, self.stride, self.partial, parts
        work, exchanges = rails.exchanged(site, peers, *across)
        work, exchanges = [*work], [*exchanges]
        itemsize = carried.call.element.itemsize
        stride = self.part * itemsize
        slot = index if chunk.root is None else rails.own_slot(site, root)
        count = max(0, min(self.part, self.shard.length - index * self.part))
        own = parts.of(index)
        steps = site.combined(carried, self.partial, self.stride, index, m)
        steps += site.finished(carried, own, self.results + slot * stride, count)
        work[-1].extend(steps)
        if chunk.root is None:
            exchanges += rails.gathering(index, peers, self.results, stride)
        else:
            exchanges += rails.collecting(index, peers, self.results, stride, root)
        work += [[] for _ in range(rails.steps(m))]
        if chunk.root is None or index == root:
            work[-1].extend(self._placed(stride, slot))
        return Stages(work, exchanges)

    def _placed(self, stride: int, slot: int) -> list[Enqueue]:
        """Return the steps after the results of all parts have arrived."""
        chunk, site = self.chunk, self.chunk.site
        nbytes = self.shard.length * chunk.carried.call.element.itemsize
        steps = rails.in_order(site, self.results, stride, slot)
        if chunk.root in (None, site.rank):
            return steps + site.copy(chunk.at(self.shard), self.results, nbytes)
        chunk.results[self.shard] = self.results  # of which the root gets a message
        return steps
