"""Reductions over several islands: each by its tree, then the islands.

A message is divided into shards, and each island has an owner of each shard:

    within    the island reduces each shard to its owner
    rails     the owners of a shard exchange what they have, or parts of it, and combine
              it by the tree of the islands
    within    each owner distributes the result

So all ranks get the same bits, whatever the message's size. Chunks of a message pass
through the staging memory one after another.
"""

from collections.abc import Sequence
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
    Site,
    StagingRanges,
    fitting,
)
from numba_symm.collectives.operations import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from numba_symm.collectives.protocols.binding import Call, Carried, Enqueue
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
        m, width = len(site.parts), carried.width
        apart = m > 2 and m * self.shards[0].length * width > site.sizes.one_step
        kind = _InParts if apart or self.binary else _Whole
        owned = [
            kind(self, shard)
            for shard in self.shards
            if self.owner(site.index, shard) == site.rank
        ]
        steps += self._reduced(source, owned)
        each = [shard.stages() for shard in owned]
        # As many on ranks that own no shard.
        number = 2 * rails.steps(m) if self.binary else 1 + apart
        exchanges = [joined([one.exchanges[n] for one in each]) for n in range(number)]
        work = [
            [step for one in each for step in one.work[n]] for n in range(number + 1)
        ]
        work[0][:0] = steps
        work[-1].extend(self._distributed())
        return Stages(work, exchanges)

    def _reduced(
        self, source: int, owned: "Sequence[_Whole | _InParts]"
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

    def gets(self, island: int) -> bool:
        """Return whether an island gets the results."""
        return self.root is None or island == self.shift[0]

    def result(self, shard: _IslandShard) -> int:
        """Return where an owner whose island gets it stores a shard's result.

        A rank that is not the root passes it on from the staging memory.
        """
        if self.root in (None, self.site.rank):
            return self.at(shard)
        nbytes = shard.length * self.carried.call.element.itemsize
        self.results[shard] = self.staging.take_last(nbytes)
        return self.results[shard]

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


class _Whole:
    """A shard that crosses as a whole, on the rail of its owners, in one exchange.

    Args:
        chunk: the chunk.
        shard: the shard, which this rank owns.

    Attributes:
        partial: the address of the island's own result.
    """

    def __init__(self, chunk: _CrossingChunk, shard: _IslandShard):
        self.chunk, self.shard = chunk, shard
        self._nbytes = shard.length * chunk.carried.width
        self._stride = divide_up(self._nbytes, VECTOR) * VECTOR
        self._slots = chunk.staging.take(len(chunk.site.parts) * self._stride)
        self.partial = self._slots + chunk.site.index * self._stride

    def stages(self) -> Stages:
        """Return the stages."""
        chunk, shard = self.chunk, self.shard
        site, nbytes, stride = chunk.site, self._nbytes, self._stride
        peers = [(j, chunk.owner(j, shard)) for j in site.others]
        sends = [
            Parcel(peer, self.partial, nbytes) for j, peer in peers if chunk.gets(j)
        ]
        if not chunk.gets(site.index):
            return Stages([[], []], [(sends, [])])
        receives = [Parcel(peer, self._slots + j * stride, nbytes) for j, peer in peers]
        slots = self._slots, stride, site.index, len(site.parts)
        steps = site.combined(chunk.carried, *slots)
        result = chunk.result(shard)
        steps += site.finished(chunk.carried, self.partial, result, shard.length)
        return Stages([[], steps], [(sends, receives)])


class _InParts:
    """A shard of which each owner on the rail combines a part, before results cross.

    Args:
        chunk: the chunk.
        shard: the shard, which this rank owns.

    Attributes:
        partial: the address of the island's own result.
    """

    def __init__(self, chunk: _CrossingChunk, shard: _IslandShard):
        self.chunk, self.shard = chunk, shard
        m, lanes = len(chunk.site.parts), chunk.carried.element.lanes
        self._part = divide_up(divide_up(shard.length, m), lanes) * lanes
        self._stride = self._part * chunk.carried.width
        self._peers = [chunk.owner(island, shard) for island in range(m)]
        self._rooms = rails.rooms(m) if chunk.binary else 2 * m
        self.partial = chunk.staging.take(self._rooms * self._stride)

    def stages(self) -> Stages:
        """Return the stages."""
        chunk, peers, stride = self.chunk, self._peers, self._stride
        site, carried = chunk.site, chunk.carried
        m, index = len(peers), site.index
        parts = into = rails.Slots(self.partial, stride)
        if chunk.binary:
            found = rails.exchanged(site, peers, parts, stride, self.partial, into)
            result, exchanges, last = self._in_binary()
        else:
            into = rails.Slots(self.partial + m * stride, stride)
            found = rails.directly(site, peers, parts, stride, into)
            result, exchanges, last = self._directly()
        work = [*found.work, *([] for _ in exchanges)]
        _, count = self._bounds(index)
        if count:
            steps = site.combined(carried, into.at, stride, index, m)
            steps += site.finished(carried, into.of(index), result, count)
            work[len(found.exchanges)].extend(steps)
        work[-1].extend(last)
        return Stages(work, [*found.exchanges, *exchanges])

    def _bounds(self, island: int) -> tuple[int, int]:
        """Return the first element and the number of elements of an island's part."""
        first = min(island * self._part, self.shard.length)
        return first, min(self._part, self.shard.length - first)

    def _directly(self) -> tuple[int, list[Parcels], list[Enqueue]]:
        """Return the result's address, how all results cross, and the steps then."""
        chunk, site = self.chunk, self.chunk.site
        itemsize, gets = chunk.carried.call.element.itemsize, chunk.gets(site.index)
        start, count = self._bounds(site.index)
        if gets:
            at = chunk.result(self.shard)
        else:
            at = chunk.staging.take_last(count * itemsize) - start * itemsize

        def parcel(island: int, peer: int) -> Parcel:
            first, number = self._bounds(island)
            return Parcel(peer, at + first * itemsize, number * itemsize)

        others = [(j, self._peers[j]) for j in site.others]
        sends = [parcel(site.index, peer) for j, peer in others if chunk.gets(j)]
        receives = [parcel(j, peer) for j, peer in others] if gets else []
        return at + start * itemsize, [(sends, receives)], []

    def _in_binary(self) -> tuple[int, list[Parcels], list[Enqueue]]:
        """Return the same for many islands.

        The results are stored in the second room and the third one, which are then
        free: the parts of all islands are in the first one.
        """
        chunk, site, peers = self.chunk, self.chunk.site, self._peers
        itemsize, root = chunk.carried.call.element.itemsize, chunk.shift[0]
        stride, slot = self._part * itemsize, site.index
        at = self.partial + self._rooms // 3 * self._stride
        if chunk.root is None:
            exchanges = rails.gathering(slot, peers, at, stride)
        else:
            slot = rails.own_slot(site, root)
            exchanges = rails.collecting(site.index, peers, at, stride, root)
        if not chunk.gets(site.index):
            return at + slot * stride, exchanges, []
        steps = rails.in_order(site, at, stride, slot)
        if chunk.root in (None, site.rank):
            nbytes = self.shard.length * itemsize
            steps += site.copy(chunk.at(self.shard), at, nbytes)
        else:
            chunk.results[self.shard] = at  # of which the root gets a message
        return at + slot * stride, exchanges, steps
