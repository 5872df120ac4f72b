"""Reductions over several islands: within each in rank order, then islands in order.

A message is divided into shards, and each island has an owner of each shard:

    within    the island reduces each shard to its owner
    rails     the owners of a shard exchange what they have, or parts of it, and combine
              it in the order of the islands
    within    each owner distributes the result

So all ranks get the same bits, whatever the message's size. Chunks of a message pass
through the staging memory one after another.
"""

from typing import NamedTuple

from numba_symm.collectives.islands.pipeline import (
    Parcels,
    Stages,
    in_shards,
    joined,
    overlapped,
    several,
)
from numba_symm.collectives.islands.site import (
    Carried,
    Site,
    StagingRanges,
    fitting,
    padded,
)
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.operations import (
    ALL_REDUCE,
    REDUCE,
    REDUCE_SCATTER,
    REVERSE_SCAN,
    SCAN,
    Operation,
)
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.exchanges import Output
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.dtypes import UserOperator
from numba_symm.engines.protocol import Parcel
from numba_symm.environment import SIMULATED

SMALL = 256 if SIMULATED else 32 << 10
"""Bytes of the largest carried message that every rank exchanges as a whole."""

ONE_STEP = 512 if SIMULATED else 256 << 10
"""Bytes that the owner of a carried shard receives at most in one step.

Longer shards are exchanged in two: parts of them, and the results of these.
"""


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
    if call.count * carried.width <= SMALL:
        return _small_all_reduce(site, carried)
    return _in_shards(site, carried, None)


def reduce(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a reduce. The root is a rank."""
    if site.listing:  # the kernels differ with the root's place in this island
        roots = site.mine[0], site.mine[-1]
        return [step for r in roots for step in _in_shards(site, Carried(call), r)]
    return _in_shards(site, Carried(call), call.root)


def _small_all_reduce(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the fewest steps: each rank gets what every island has."""
    call, m = carried.call, len(site.parts)
    staging = StagingRanges(site)
    stride = padded(call.count * carried.width)
    wide = staging.take(stride)
    slots = staging.take(m * stride)
    steps, source = site.widened(carried, call.source, wide, call.count)
    own = slots + site.index * stride
    steps.append(site.within(ALL_REDUCE, carried.step(source, own, call.count)))
    nbytes = call.count * carried.width
    mine = len(site.mine)
    sends = [
        Parcel(rank, own, nbytes)
        for j in site.others
        for number, rank in enumerate(site.parts[j])
        if number % mine == site.local
    ]
    receives = [
        Parcel(site.on_rail(j, site.local), slots + j * stride, nbytes)
        for j in site.others
    ]
    steps += site.between("all_reduce", sends, receives)
    steps += site.combined(carried, slots, stride, site.index, m)
    return steps + site.finished(carried, own, call.target, call.count)


def _in_shards(site: Site, carried: Carried, root: int | None) -> list[Enqueue]:
    """Return the steps of an all-reduce; with a root, of a reduce."""
    call, m, shards = carried.call, len(site.parts), site.largest
    # The staging memory has the chunk itself, if its type differs. For each shard that
    # the rank owns, it has the reduced shard and what other islands send. With a root,
    # it also has the result.
    owned = divide_up(shards, site.smallest)
    rooted = root is not None
    each = (m if rooted or m == 2 else 2) + rooted
    pieces = (carried.element != call.element) + each * owned / shards
    most = fitting(site, pieces, carried.width)
    most = several(call.count, shards, carried.width, most)
    if call.count * carried.width <= SMALL:
        shards = 1
    chunks = list(in_shards(site, call.count, most, shards))
    if len(chunks) > 1:
        site = site.beside
    stages = [
        _CrossingChunk(site, carried, root, number, *chunk).stages()
        for number, chunk in enumerate(chunks)
    ]
    return overlapped(site, "reduce" if rooted else "all_reduce", stages)


class _CrossingChunk:
    """One chunk of an all-reduce or a reduce.

    Args:
        site: this rank's site.
        carried: the call.
        root: the rank that gets the result; None: all.
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
        self.results: dict[_IslandShard, int] = {}  # addresses of those for the root
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
            shard
            for shard in self.shards
            if self.number(site.index, shard) == site.local
        ]
        count = self.shards[0].length
        m, width = len(site.parts), carried.width
        # A part is what one island's owner combines: the shard, or an m-th of it.
        apart = self.root is None and m > 2 and m * count * width > ONE_STEP
        lanes = carried.element.lanes
        part = divide_up(divide_up(count, m), lanes) * lanes if apart else count
        stride = divide_up(part * width, VECTOR) * VECTOR
        rails = [
            _Rail(self, shard, self.staging.take(m * stride), stride, part)
            for shard in mine
        ]
        steps += self._reduced(source, rails)
        first = joined([rail.first() for rail in rails])
        combined = [step for rail in rails for step in rail.combined()]
        last = self._distributed()
        if not apart:
            return Stages([steps, combined + last], [first])
        second = joined([rail.second() for rail in rails])
        return Stages([steps, combined, last], [first, second])

    def _reduced(self, source: int, rails: "list[_Rail]") -> list[Enqueue]:
        """Return the reduction of each shard, within the island, to its owner."""
        site, carried = self.site, self.carried
        at = {rail.shard: rail.partial for rail in rails}
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
            if chunk.root is None or j == root:
                start, count = self._bounds(j)
                at = self.partial + start * width
                sends.append(Parcel(peer, at, count * width))
            if chunk.root is None or site.index == root:
                _, count = self._bounds(site.index)
                at = self.slots + j * self.stride
                receives.append(Parcel(peer, at, count * width))
        return sends, receives

    def combined(self) -> list[Enqueue]:
        """Return the reduction of this island's part in the order of the islands."""
        site, chunk, carried = self.site, self.chunk, self.carried
        element = carried.call.element
        if chunk.root is not None and site.index != chunk.shift[0]:
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
        target = chunk.at(self.shard) + start * element.itemsize
        if chunk.root is not None and site.rank != chunk.root:
            target = chunk.staging.take(count * element.itemsize)
            chunk.results[self.shard] = target
        return steps + site.finished(carried, own, target, count)

    def second(self) -> Parcels:
        """Return the exchange of the results of all parts."""
        element = self.carried.call.element
        at = self.chunk.at(self.shard)

        def parcel(island: int, peer: int) -> Parcel:
            start, count = self._bounds(island)
            return Parcel(peer, at + start * element.itemsize, count * element.itemsize)

        sends = [parcel(self.site.index, peer) for peer in self.peers.values()]
        return sends, [parcel(j, peer) for j, peer in self.peers.items()]


def scanned(operation: Operation, site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a scan: each island reduces the ranks that this one uses."""
    carried = Carried(call)
    width, itemsize = carried.width, call.element.itemsize
    fits = several(call.count, 1, width, fitting(site, len(site.parts) + 4, width))
    if fits < call.count:
        site = site.beside
    output = operation.exchange.output
    inclusive_scan, used = _used(output, site, site.rank)
    alone = site.index not in used
    order = sorted(used)
    exclusive = site.rank not in output.used(site.rank, site.size, 0)
    some_use_none = any(not output.used(rank, site.size, 0) for rank in site.mine)
    chunks: list[Stages] = []
    for first, count in site.chunks(call.count, fits):
        staging, steps = StagingRanges(site, len(chunks)), list[Enqueue]()
        stride = padded(count * width)
        wide, inclusive = staging.take(stride), staging.take(stride)
        slots = staging.take((len(site.parts) + 1) * stride)
        at = {j: slots + k * stride for k, j in enumerate(order)}
        own = at.get(site.index, slots + len(order) * stride)
        at_source = call.source + first * itemsize
        target = call.target + first * itemsize
        widened, source = site.widened(carried, at_source, wide, count)
        steps += widened
        steps.append(
            site.within(inclusive_scan, carried.step(source, inclusive, count))
        )
        if exclusive:
            steps.append(site.within(operation, carried.step(source, own, count)))
        else:
            steps += site.copy(own, inclusive, count * width)
        sends = [
            Parcel(rank, inclusive, count * width)
            for j in site.others
            for rank in site.parts[j]
            if _used(output, site, rank)[1].get(site.index) == site.rank
        ]
        receives = [
            Parcel(used[j], at[j], count * width) for j in order if j != site.index
        ]
        identity = staging.take(count * itemsize)
        if some_use_none:
            # The identity is that of the call's own type, which may have no infinity.
            own_type = Call(at_source, identity, count, call.element, carried.op)
            steps.append(site.within(operation, own_type))
        last: list[Enqueue] = []
        if order:
            place = 0 if alone else order.index(site.index)
            last += site.combined(carried, slots, stride, place, len(order))
            last += site.finished(carried, slots + place * stride, target, count)
        elif not isinstance(call.op, UserOperator):
            last += site.copy(target, identity, count * itemsize)
        chunks.append(Stages([steps, last], [(sends, receives)]))
    return overlapped(site, operation.name, chunks)


def _used(output: Output, site: Site, rank: int) -> tuple[Operation, dict[int, int]]:
    """Return a scan and, by island, the rank whose result another rank uses.

    Its result of that scan within the island reduces exactly those of the island's
    ranks that the result of ``rank`` reduces.
    """
    first_ranks = 0 in output.used(site.size - 1, site.size, 0)
    scan, last = (SCAN, max) if first_ranks else (REVERSE_SCAN, min)
    all_used = output.used(rank, site.size, 0)
    found = {
        j: [each for each in part if each in all_used]
        for j, part in enumerate(site.parts)
    }
    return scan, {j: last(part) for j, part in found.items() if part}
