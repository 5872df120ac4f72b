"""Reductions, reduce-scatters and scans over several islands.

Reductions over several islands: each by its tree, then the islands.

A message is divided into shards, and each island has an owner of each shard:

    within    the island reduces each shard to its owner
    rails     the owners of a shard exchange what they have, or parts of it, and combine
              it by the tree of the islands
    within    each owner distributes the result

So all ranks get the same bits, whatever the message's size. Chunks of a message pass
through the staging memory one after another.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.rails import (
    Parcels,
    Stages,
    copied,
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
    padded,
)
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE,
    REDUCE_SCATTER,
    REVERSE_SCAN,
    SCAN,
    Operation,
)
from numba_symm.collectives.protocols.binding import Call, Carried, Enqueue
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.dtypes import UserOperator
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
    most = sizes.whole if site.many else sizes.one_step
    return len(site.parts) * nbytes <= most


def _small_all_reduce(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the fewest steps: each rank gets what every island has."""
    call = carried.call
    steps, source, slots, stride = _begun(site, carried)
    own = slots + site.index * stride
    steps.append(site.within(ALL_REDUCE, carried.step(source, own, call.count)))
    steps += rails.gathered(site, "all_reduce", slots, stride)
    steps += site.combined(carried, slots, stride, site.index, len(site.parts))
    return steps + site.finished(carried, own, call.target, call.count)


def _begun(site: Site, carried: Carried) -> tuple[list[Enqueue], int, int, int]:
    """Return the step to carried elements, their address, the slots', and a stride."""
    staging, count = StagingRanges(site), carried.call.count
    stride = divide_up(count * carried.width, VECTOR) * VECTOR
    wide = staging.take(stride)
    slots = staging.take(rails.slots(len(site.parts)) * stride)
    return *site.widened(carried, carried.call.source, wide, count), slots, stride


def _small_reduce(site: Site, carried: Carried, root: int) -> list[Enqueue]:
    """Return the steps of a reduce to the root, along its rail."""
    call = carried.call
    island, number = site.place_of(root)
    steps, source, slots, stride = _begun(site, carried)
    owner = number % len(site.mine)
    own = slots + rails.own_slot(site, island) * stride
    partial = own if site.local == owner else 0
    step = carried.step(source, partial, call.count, owner)
    steps.append(site.within(REDUCE, step))
    steps += rails.collected(site, "reduce", slots, stride, island, number)
    if site.rank == root or site.listing:
        steps += site.combined(carried, slots, stride, island, len(site.parts))
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
        owned = [
            _InParts(self, shard)
            for shard in self.shards
            if self.owner(site.index, shard) == site.rank
        ]
        steps += self._reduced(source, owned)
        each = [shard.stages() for shard in owned]
        # As many on ranks that own no shard.
        number = 2 * (rails.steps(len(site.parts)) if self.binary else 1)
        exchanges = [joined([one.exchanges[n] for one in each]) for n in range(number)]
        work = [
            [step for one in each for step in one.work[n]] for n in range(number + 1)
        ]
        work[0][:0] = steps
        work[-1].extend(self._distributed())
        return Stages(work, exchanges)

    def _reduced(self, source: int, owned: "Sequence[_InParts]") -> list[Enqueue]:
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
        receives = [parcel(j, peer) for j, peer in others if self._bounds(j)[1]]
        exchange = sends if count else [], receives if gets else []
        return at + start * itemsize, [exchange], []

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


def reduce_scatter(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a reduce-scatter.

    Islands of equally many consecutive ranks reduce the shard of every rank to the rank
    on that one's rail. In others, large shards are reduced one after another.
    """
    carried = Carried(call)
    if _small_scatter(site, carried):
        return _scatter_along_rails(site, carried)
    if site.even:
        return _scatter_packed(site, carried)
    shards = [call.source + rank * call.nbytes for rank in range(site.size)]
    reductions = [
        dataclasses.replace(call, source=at, root=rank)
        for rank, at in enumerate(shards)
    ]
    return [step for each in reductions for step in reduce(site, each)]


def _by_rail(site: Site) -> bool:
    """Return whether a rank's island reduces for the ranks of its rail only."""
    return site.even and len(site.mine) > 1


def _small_scatter(site: Site, carried: Carried) -> bool:
    """Return whether islands exchange all their results along the rails."""
    m, nbytes = len(site.parts), carried.call.count * carried.width
    slot = padded(nbytes * (m if _by_rail(site) else site.size))
    memory = (rails.slots(m) + 2 * site.largest + 1) * slot
    few_bytes = m * slot <= site.sizes.kept
    return (site.many or not site.even) and few_bytes and memory <= site.sizes.half


def _scatter_along_rails(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the steps of a small reduce-scatter.

    The ranks of a rail exchange all that their islands have for ranks of the rail, or
    for all ranks, if islands differ. Each combines that, and keeps its own shard.
    """
    call, m = carried.call, len(site.parts)
    nbytes, staging = call.count * carried.width, StagingRanges(site)
    number, place = (m, site.index) if _by_rail(site) else (site.size, site.rank)
    stride = padded(number * nbytes)
    slots = staging.take(rails.slots(m) * stride)
    own, room = slots + site.index * stride, site.size * nbytes
    if _by_rail(site):
        rooms = [staging.take(room) for _ in range(2)]
        steps = _reduced(site, carried, 0, call.count, range(m), rooms, own)
    else:
        wide = staging.take(room)
        count = site.size * call.count
        steps, source = site.widened(carried, call.source, wide, count)
        steps.append(site.within(ALL_REDUCE, carried.step(source, own, count)))
    steps += rails.gathered(site, "reduce_scatter", slots, stride)
    steps += site.combined(carried, slots, stride, site.index, m)
    shard = own + place * nbytes
    if carried.op != call.op and shard % VECTOR:  # an average is divided by vectors
        shard = staging.take(nbytes)
        steps += site.copy(shard, own + place * nbytes, nbytes)
    return steps + site.finished(carried, shard, call.target, call.count)


def _scatter_packed(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the steps of a reduce-scatter in chunks, which are parts of all shards.

    The parts of the shards of several islands are copied next to each other, so that
    one reduce-scatter within the island reduces them. The number of launches grows
    with the bytes, not with the islands.
    """
    call, m, mine = carried.call, len(site.parts), len(site.mine)
    width, itemsize = carried.width, call.element.itemsize
    converted = carried.element != call.element
    # An eighth of a half has the parts that are reduced together, twice if their type
    # differs; the rest has a chunk's partial results, and those of all islands.
    together = site.sizes.half // 8 // (1 + converted)

    def most(pieces: int) -> int:
        lost = site.sizes.half // 8 + VECTOR * m + 8 * ALIGNED
        fits = fitting(site, pieces, width, lost)
        return min(fits, together // (mine * width) // VECTOR * VECTOR)

    rooms, fits = m, several(call.count, 1, width, most(2 * m), site.sizes.chunk)
    binary = site.many and min(call.count, fits) * width < site.sizes.part
    if binary:
        rooms, fits = rails.rooms(m), most(rails.rooms(m))
    site = site.beside
    peers = [site.on_rail(island, site.local) for island in range(m)]
    found: list[Stages] = []
    for first, count in site.chunks(call.count, fits):
        staging, steps = StagingRanges(site, len(found)), list[Enqueue]()
        nbytes, stride = count * width, divide_up(count * width, VECTOR) * VECTOR
        room = staging.take(rooms * nbytes)
        # The results of all islands, in two rooms that are free then, or beside them.
        beside = not binary or nbytes < VECTOR
        slots = staging.take(m * stride) if beside else room
        parts = rails.Slots(room, nbytes)
        if mine > 1 or converted:
            number = max(1, together // (mine * nbytes))  # of islands together
            taken = [staging.take(number * mine * nbytes) for _ in range(1 + converted)]
            for island in range(0, m, number):
                islands = range(island, min(m, island + number))
                at = parts.of(island)
                steps += _reduced(site, carried, first, count, islands, taken, at)
        else:  # the input is this island's result
            parts = rails.Slots(call.source + first * itemsize, call.nbytes)
        into = rails.Slots(slots, stride)
        if binary:
            stages = rails.exchanged(site, peers, parts, nbytes, room, into)
        else:
            stages = rails.directly(site, peers, parts, nbytes, into)
        stages.work[0][:0] = steps
        last = site.combined(carried, slots, stride, site.index, m)
        own, result = into.of(site.index), call.target + first * itemsize
        stages.work[-1].extend(last + site.finished(carried, own, result, count))
        found.append(stages)
    return overlapped(site, "reduce_scatter", found, len(found[0].exchanges))


def _reduced(
    site: Site,
    carried: Carried,
    first: int,
    count: int,
    islands: range,
    room: list[int],
    target: int,
) -> list[Enqueue]:
    """Return the steps that reduce, within the island, parts of some islands' shards.

    Args:
        site: this rank's site.
        carried: the call.
        first: the first element of each part.
        count: the number of elements of each.
        islands: the islands.
        room: addresses for all these parts; a second one if their type differs.
        target: the address of the results for the rank on this one's rail, one after
            another.
    """
    call, mine, number = carried.call, len(site.mine), len(islands)
    itemsize, shard = call.element.itemsize, call.nbytes
    source = call.source + islands.start * mine * shard + first * itemsize
    # By the ranks of an island, and then by islands.
    steps = site.packed(
        room[0], source, (mine, number, count * itemsize), (shard, mine * shard)
    )
    widened, at = site.widened(carried, room[0], room[-1], mine * number * count)
    step = carried.step(at, target, number * count)
    return [*steps, *widened, site.within(REDUCE_SCATTER, step)]


def scanned(operation: Operation, site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a scan."""
    carried, m = Carried(call), len(site.parts)
    consecutive = site.islands.places.consecutive
    # Besides the slots, the staging memory has three ranges of a chunk.
    pieces = rails.slots(m) + 3
    if not consecutive:  # each island has a result for each of its ranks
        pieces = rails.slots(m) * site.largest + m + 3
    lost = 5 * ALIGNED + VECTOR * pieces
    fits = fitting(site, pieces, carried.width, lost, carried.element.lanes)
    if fits < call.count:
        site = site.beside
    scan = _Scan(operation, site, carried)
    make = scan.on_rails if consecutive else scan.of_all_ranks
    each = enumerate(site.chunks(call.count, fits))
    steps = [step for number, chunk in each for step in make(number, *chunk)]
    return steps + scan.larger(fits) if site.listing else steps


class _Scan:
    """A scan."""

    def __init__(self, operation: Operation, site: Site, carried: Carried):
        self.operation, self.site, self.carried = operation, site, carried
        output, size = operation.exchange.output, site.size
        self.upwards = 0 in output.used(size - 1, size, 0)
        self.inclusive_scan = SCAN if self.upwards else REVERSE_SCAN
        all_used = output.used(site.rank, size, 0)
        found = {
            j: [each for each in part if each in all_used]
            for j, part in enumerate(site.parts)
        }
        # By island, the rank whose inclusive scan within the island is of exactly the
        # island's ranks that this rank uses.
        last = max if self.upwards else min
        self.used = {j: last(part) for j, part in found.items() if part}
        self.exclusive = site.rank not in all_used
        self.some_use_none = any(not output.used(each, size, 0) for each in site.mine)

    def on_rails(self, number: int, first: int, count: int) -> list[Enqueue]:
        """Return the steps in which all ranks get what each island has in total.

        They are those of a chunk; the chunks follow one another.
        """
        site, carried, call = self.site, self.carried, self.carried.call
        staging, nbytes = StagingRanges(site, number), count * carried.width
        source = call.source + first * call.element.itemsize
        target = call.target + first * call.element.itemsize
        stride = divide_up(nbytes, VECTOR) * VECTOR
        slots = staging.take(rails.slots(len(site.parts)) * stride)
        own = slots + site.index * stride
        steps, wide = self._widened(staging, source, count)
        step = carried.step(wide, own, count)
        steps.append(site.within(ALL_REDUCE, step))
        steps += rails.gathered(site, self.operation.name, slots, stride)
        scan = self.operation if self.exclusive else self.inclusive_scan
        steps.append(site.within(scan, step))
        identity = self._identity(staging, source, count, steps)
        if not self.used:
            return steps + self._of_none(identity, target, count)
        low, high = min(self.used), max(self.used)
        place = 0
        if site.index in self.used:
            place = site.index - low
        islands = high + 1 - low
        used = slots + low * stride
        return steps + self._combined(used, stride, place, islands, target, count)

    def larger(self, most: int) -> list[Enqueue]:
        """Return the steps within the island, of larger messages.

        They are for listing kernels: the listed scans are as large as the limits of
        scans need, and those of all-reduces and all-gathers are larger.

        Args:
            most: the most elements of a chunk.
        """
        call, lanes = self.carried.call, self.carried.element.lanes
        widened = self.carried.element != call.element
        source = self.site.staging if widened else call.source
        scan = self.operation if self.exclusive else self.inclusive_scan
        consecutive = self.site.islands.places.consecutive
        other = ALL_REDUCE if consecutive else ALL_GATHER
        vectors, rest = divmod(call.count, lanes)
        steps = list[Enqueue]()
        while (vectors := 2 * vectors) and vectors * lanes + rest <= most:
            count = vectors * lanes + rest
            step = self.carried.step(source, self.site.staging, count)
            for site in (self.site, self.site.beside):
                steps += [site.within(other, step), site.within(scan, step)]
        return steps

    def of_all_ranks(self, number: int, first: int, count: int) -> list[Enqueue]:
        """Return the steps of a chunk, in which all ranks get the scans of all ranks.

        Each island gathers the inclusive scans of its ranks, and they cross along every
        rail. A rank then combines those that it uses: if an island's ranks are not
        consecutive, others use several of its scans.
        """
        site, carried, call = self.site, self.carried, self.carried.call
        m, order = len(site.parts), sorted(self.used)
        staging, width = StagingRanges(site, number), carried.width
        source = call.source + first * call.element.itemsize
        target = call.target + first * call.element.itemsize
        stride = divide_up(count * width, VECTOR) * VECTOR
        slot = site.largest * stride
        inclusive, slots = staging.take(stride), staging.take(rails.slots(m) * slot)
        steps, wide = self._widened(staging, source, count)
        step = carried.step(wide, inclusive, count)
        steps.append(site.within(self.inclusive_scan, step))
        own = slots + site.index * slot
        step = carried.step(inclusive, own, stride // width)
        steps.append(site.within(ALL_GATHER, step))
        steps += rails.gathered(site, self.operation.name, slots, slot)
        identity = self._identity(staging, source, count, steps)
        if not order:
            return steps + self._of_none(identity, target, count)
        used = [
            slots + j * slot + site.place_of(self.used[j])[1] * stride for j in order
        ]
        room = staging.take(len(order) * stride)
        steps += copied(site, room, used, stride)
        return steps + self._combined(room, stride, 0, len(order), target, count)

    def _widened(
        self, staging: StagingRanges, source: int, count: int
    ) -> tuple[list[Enqueue], int]:
        """Return the step to carried elements, and their address."""
        wide = staging.take(count * self.carried.width)
        return self.site.widened(self.carried, source, wide, count)

    def _identity(
        self, staging: StagingRanges, source: int, count: int, steps: list[Enqueue]
    ) -> int:
        """Return the address of what ranks get that use none; append its step.

        It is the identity of the call's own type, which may have no infinity.
        """
        call = self.carried.call
        at = staging.take(call.element.itemsize * count)
        if self.some_use_none:
            own_type = Call(source, at, count, call.element, self.carried.op)
            steps.append(self.site.within(self.operation, own_type))
        return at

    def _combined(
        self, first: int, stride: int, place: int, number: int, target: int, count: int
    ) -> list[Enqueue]:
        """Return the reduction of slots, into one of them and the output."""
        site, carried = self.site, self.carried
        steps = site.combined(carried, first, stride, place, number)
        return steps + site.finished(carried, first + place * stride, target, count)

    def _of_none(self, identity: int, target: int, count: int) -> list[Enqueue]:
        """Return the step of a rank that uses none; a user's operator has no result."""
        call = self.carried.call
        if isinstance(call.op, UserOperator):
            return []
        return self.site.copy(target, identity, count * call.element.itemsize)
