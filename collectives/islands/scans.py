"""Scans over several islands: each island reduces the ranks that a rank uses."""

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.gaps import copied
from numba_symm.collectives.islands.pipeline import Stages, overlapped, several
from numba_symm.collectives.islands.site import (
    ALIGNED,
    Site,
    StagingRanges,
    fitting,
)
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REVERSE_SCAN,
    SCAN,
    Operation,
)
from numba_symm.collectives.protocols.binding import Call, Carried, Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.dtypes import UserOperator
from numba_symm.engines.protocol import Parcel


def scanned(operation: Operation, site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a scan."""
    carried, m = Carried(call), len(site.parts)
    consecutive = site.islands.places.consecutive
    on_rails = site.many and consecutive
    if site.many and not consecutive and _all_cross(site, carried):
        scan = _Scan(operation, site, carried, m)
        return scan.of_all_ranks()
    # Besides the slots, the staging memory has three ranges of a chunk.
    slots = rails.slots(m) if on_rails else m + 1
    lost = 4 * ALIGNED + VECTOR * (slots + 3)
    fits = fitting(site, slots + 3, carried.width, lost)
    if not on_rails:
        fits = several(call.count, 1, carried.width, fits, site.sizes.chunk)
    if fits < call.count:
        site = site.beside
    scan = _Scan(operation, site, carried, slots)
    each = enumerate(site.chunks(call.count, fits))
    if on_rails:
        steps = [
            step for number, chunk in each for step in scan.on_rails(number, *chunk)
        ]
        return steps + scan.larger(fits) if site.listing else steps
    chunks = [scan.chunk(number, *chunk) for number, chunk in each]
    return overlapped(site, operation.name, chunks)


def _all_cross(site: Site, carried: Carried) -> bool:
    """Return whether every rank gets the inclusive scans of all ranks in their islands.

    If an island's ranks are not consecutive, others use several of its scans.
    """
    m, sizes, nbytes = len(site.parts), site.sizes, carried.call.count * carried.width
    stride = divide_up(nbytes, VECTOR) * VECTOR
    slot = site.largest * stride
    memory = rails.slots(m) * slot + (m + 3) * stride + 5 * ALIGNED
    return m * slot <= sizes.whole and memory <= sizes.half


class _Scan:
    """A scan.

    Args:
        operation: the operation.
        site: this rank's site.
        carried: the call.
        slots: how many slots it needs.
    """

    def __init__(self, operation: Operation, site: Site, carried: Carried, slots: int):
        self.operation, self.site, self.carried = operation, site, carried
        self.slots = slots
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

    def chunk(self, number: int, first: int, count: int) -> Stages:
        """Return the stages of a chunk."""
        site, carried, order = self.site, self.carried, sorted(self.used)
        call = carried.call
        staging, nbytes = StagingRanges(site, number), count * carried.width
        stride = divide_up(nbytes, VECTOR) * VECTOR
        inclusive, slots = staging.take(stride), staging.take(self.slots * stride)
        at = {j: slots + k * stride for k, j in enumerate(order)}
        own = at.get(site.index, slots + len(order) * stride)
        source = call.source + first * call.element.itemsize
        target = call.target + first * call.element.itemsize
        steps, wide = self._widened(staging, source, count)
        step = carried.step(wide, inclusive, count)
        steps.append(site.within(self.inclusive_scan, step))
        if self.exclusive:
            step = carried.step(wide, own, count)
            steps.append(site.within(self.operation, step))
        else:
            steps += site.copy(own, inclusive, nbytes)
        sends = [Parcel(rank, inclusive, nbytes) for rank in self._users()]
        receives = [
            Parcel(self.used[j], at[j], nbytes) for j in order if j != site.index
        ]
        place = order.index(site.index) if site.index in self.used else 0
        identity = self._identity(staging, source, count, steps)
        if order:
            last = self._combined(slots, stride, place, len(order), target, count)
        else:
            last = self._of_none(identity, target, count)
        return Stages([steps, last], [(sends, receives)])

    def on_rails(self, number: int, first: int, count: int) -> list[Enqueue]:
        """Return the steps in which all ranks get what each island has in total.

        They are those of a chunk; the chunks follow one another.
        """
        site, carried, call = self.site, self.carried, self.carried.call
        staging, nbytes = StagingRanges(site, number), count * carried.width
        source = call.source + first * call.element.itemsize
        target = call.target + first * call.element.itemsize
        stride = divide_up(nbytes, VECTOR) * VECTOR
        slots = staging.take(self.slots * stride)
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
        """Return the steps of :meth:`on_rails` within the island, of larger messages.

        They are for listing kernels: the listed scans are as large as the limits of
        scans need, and those of all-reduces are larger.

        Args:
            most: the most elements of a chunk.
        """
        call, lanes = self.carried.call, self.carried.element.lanes
        widened = self.carried.element != call.element
        source = self.site.staging if widened else call.source
        scan = self.operation if self.exclusive else self.inclusive_scan
        vectors, rest = divmod(call.count, lanes)
        steps = list[Enqueue]()
        while (vectors := 2 * vectors) and vectors * lanes + rest <= most:
            count = vectors * lanes + rest
            step = self.carried.step(source, self.site.staging, count)
            for site in (self.site, self.site.beside):
                steps += [site.within(ALL_REDUCE, step), site.within(scan, step)]
        return steps

    def of_all_ranks(self) -> list[Enqueue]:
        """Return the steps in which all ranks get the scans of all ranks.

        Each island gathers the inclusive scans of its ranks, and they cross along every
        rail. A rank then combines those that it uses.
        """
        site, carried, call = self.site, self.carried, self.carried.call
        m, count, order = len(site.parts), call.count, sorted(self.used)
        staging, width = StagingRanges(site), carried.width
        stride = divide_up(count * width, VECTOR) * VECTOR
        slot = site.largest * stride
        inclusive, slots = staging.take(stride), staging.take(rails.slots(m) * slot)
        steps, wide = self._widened(staging, call.source, count)
        step = carried.step(wide, inclusive, count)
        steps.append(site.within(self.inclusive_scan, step))
        own = slots + site.index * slot
        step = carried.step(inclusive, own, stride // width)
        steps.append(site.within(ALL_GATHER, step))
        steps += rails.gathered(site, self.operation.name, slots, slot)
        identity = self._identity(staging, call.source, count, steps)
        if not order:
            return steps + self._of_none(identity, call.target, count)
        used = [
            slots + j * slot + site.place_of(self.used[j])[1] * stride for j in order
        ]
        first = staging.take(len(order) * stride)
        steps += copied(site, first, used, stride)
        return steps + self._combined(first, stride, 0, len(order), call.target, count)

    def _widened(
        self, staging: StagingRanges, source: int, count: int
    ) -> tuple[list[Enqueue], int]:
        """Return the step to carried elements, and their address."""
        wide = staging.take(count * self.carried.width)
        return self.site.widened(self.carried, source, wide, count)

    def _users(self) -> list[int]:
        """Return the ranks of other islands that use this rank's inclusive scan."""
        site = self.site
        if self.upwards:
            later = site.mine[site.local + 1 :]
            users = range(site.rank, later[0] if later else site.size)
        else:
            before = site.mine[: site.local]
            users = range(before[-1] + 1 if before else 0, site.rank)
        return [rank for rank in users if site.place_of(rank)[0] != site.index]

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
