"""Memory as weak as PTX lets it be, as far as the protocols could notice.

What it allows

- A store waits in its thread's buffer. Waiting stores reach memory in any order, late
  or soon, except that those of one thread to one address stay in order. A 16-byte
  access is two of 8 bytes, which are apart in everything.
- A load returns any value that reached memory, old ones too, unless the thread must
  know better: it knows every store that happened before the load, and what any load
  that did has read (of one thread's loads, the last). Stores that it knows it sees
  even while they wait.
- Two stores to one address, neither of which happened before the other, take effect in
  any order, whichever reached memory first. But a kernel's end is a point in time: what
  its threads did or heard of has taken effect then, before what anyone does later.
- Happened before: in program order; by ``syncthreads``, for the threads of a block; by
  a kernel's start, for all earlier kernels of its rank; by an acquire that read what a
  release wrote, with fences in either place as well (relaxed store after a fence,
  fence after a relaxed load). Only this carries knowledge from rank to rank.
- A release store, or a fence, first sends to memory every waiting store that happened
  before it, whichever thread made it.

What it reports

- a race: two accesses to one address, at least one of them a store and one of them
  weak (neither relaxed, acquire nor release), none of which happened before the other;
- access outside the memory that was mapped, misaligned, in different widths to one
  address, or to what nobody has written.

What it leaves out

- A load is never delayed past a later store of its own thread. For weak accesses the
  race report stands in for that; relaxed packets rely on the branch that depends on
  their flag, as on real GPUs.
- Of one address, only the last few values are remembered.
- Atomic operations, scopes other than the system's, and fences' total order: nothing
  here uses them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

WEAK, RELAXED, ACQUIRE, RELEASE = "weak", "relaxed", "acquire", "release"

_REMEMBERED = 8  # values of one address
REGION = 1 << 20  # address space a region has to itself; the rest of it is a trap


Fill = int | Callable[[int], tuple[int, int | None]] | None


class Finding(Exception):
    """What a run found wrong.

    Attributes:
        kind: ``race``, ``access``, ``deadlock``, ``divergence``, ``failure`` or
            ``result``.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Observer:
    """What one thread knows: for every thread, up to which of its accesses."""

    def __init__(self, number: int, name: str, threads: int):
        self.number = number
        self.name = name
        self.known = [0] * threads
        self.fenced: list[int] | None = None  # known at the last fence
        self.heard: list[list[int]] = []  # by relaxed loads: known at the next fence
        self.outdated = False  # whether its loads may return old values just now

    def tick(self) -> int:
        self.known[self.number] += 1
        return self.known[self.number]

    def knows(self, store: "Store") -> bool:
        return store.time <= self.known[store.writer]

    def learn(self, known: list[int]) -> None:
        pairs = zip(self.known, known, strict=True)
        self.known = [mine if mine > other else other for mine, other in pairs]


@dataclass(slots=True, eq=False)
class Store:
    """One store to one address.

    Attributes:
        writer: the thread's number, and ``time`` its count of accesses.
        release: what an acquire of this value learns; None: nothing.
        known: up to which of every thread's accesses came before.
        over: up to which of them had taken effect before.
        order: its place among the stores to this address, once in memory; before,
            that of the last one which it comes after.
        priority: the scheduler's; some wait until nothing else can happen.
    """

    place: "Place"
    value: int | None
    writer: int = 0
    time: int = 0
    weak: bool = False
    release: list[int] | None = None
    known: Sequence[int] = ()
    over: Sequence[int] = ()
    order: float = 0.0
    priority: float = 0.0

    def comes_after(self, other: "Store") -> bool:
        """Return whether another store to the same address happened before."""
        writer, time = other.writer, other.time
        return (
            other.order <= self.order
            or time <= self.known[writer]
            or time <= self.over[writer]
        )


class Place:
    """One address: the values in memory, oldest first, and the stores that wait."""

    def __init__(self, address: int, nbytes: int, initial: int | None):
        self.address = address
        self.nbytes = nbytes
        self.first = initial
        self.values = [Store(self, initial)]  # known to everyone
        self.waiting: list[Store] = []
        # The last load of each (thread, weak): its time, and the order of the value.
        self.loads: dict[tuple[int, bool], tuple[int, float]] = {}

    def put(self, new: Store, late: bool) -> None:
        """Add a store after all that it has to come after; ``late``: after all."""
        at = len(self.values)
        while not late and at > 1 and not new.comes_after(self.values[at - 1]):
            at -= 1
        before = self.values[at - 1].order
        after = self.values[at].order if at < len(self.values) else before + 2
        new.order = (before + after) / 2
        self.values.insert(at, new)


class Memory:
    """The memory of all ranks, and the buffers of all threads.

    Attributes:
        changes: how many stores have reached memory.
        buffers: for every thread's number, the stores that wait.
        waiting: how many that are.
        log: called with a line for every access, if there is anyone to read it.
        races: whether to report them; if not, what they lead to may still be found.
        last: of all stores, how many wait as long as anything else can happen.

    The others are what is assumed of the platform (``docs/architecture.md``), to be
    dropped one by one:
        starts_see: whether what a rank's kernels did happened before its later kernels.
        starts_inherit: whether what these knew of other ranks happened before as well.
        copies_end: whether a copy has ended when its rank goes on. If not, its loads
            happened before nothing, and its stores may still wait.
        ends_count: whether a kernel's end is a point in time, see above.
        fences_carry: whether a fence, or a relaxed load, of one kernel makes a pattern
            with a store, or a fence, of a later one of the same rank.
    """

    def __init__(self, threads: int, random: Random):
        self.changes = 0
        self.buffers: list[list[Store]] = [[] for _ in range(threads)]
        self.waiting = 0
        self.log: Callable[[str], None] | None = None
        self.races = True
        self.last = 0.05
        self.starts_see = True
        self.starts_inherit = True
        self.copies_end = True
        self.ends_count = True
        self.fences_carry = True
        self._at_start: dict[int, list[int]] = {}  # what threads knew then
        self._over = [0] * threads  # up to which of their accesses have taken effect
        self._random = random
        self._regions: list[tuple[str, int, Fill]] = [("null", 0, None)]
        self._places: dict[int, Place] = {}

    def map(self, name: str, nbytes: int, fill: Fill = None) -> int:
        """Return the address of new memory, in which nothing is written by default.

        ``fill`` is what every address holds, or tells of an offset how many bytes are
        accessed there, and what they hold.
        """
        assert nbytes <= REGION
        self._regions.append((name, nbytes, fill))
        return (len(self._regions) - 1) * REGION

    def plant(self, address: int, nbytes: int, value: int) -> None:
        """Put a value into memory before anything runs."""
        place = self._place(address, nbytes)
        place.values[0].value = place.first = value

    def first(self, address: int, nbytes: int) -> int | None:
        """Return the value before anything has run."""
        return self._place(address, nbytes).first

    def final(self, address: int, nbytes: int) -> int | None:
        """Return the value at the end of all stores."""
        return self._place(address, nbytes).values[-1].value

    def accessed(self, first: int, nbytes: int) -> Iterator[tuple[int, int | None]]:
        """Return offset from ``first`` and value, at the end, of all accessed there."""
        for address, place in self._places.items():
            if first <= address < first + nbytes:
                yield address - first, place.values[-1].value

    def load(self, reader: Observer, address: int, nbytes: int, order: str) -> int:
        place = self._place(address, nbytes)
        weak = order is WEAK
        time = reader.tick()
        found = None
        for store in place.waiting:
            if reader.knows(store):
                found = store
            elif weak or store.weak:
                self._race(reader, "loads", place, store.writer)
        if found is None:
            oldest = self._oldest(reader, place, weak)
            found = place.values[-1]
            if reader.outdated and self._random.random() < 0.5:
                allowed = place.values[oldest:]
                found = allowed[int(self._random.random() * len(allowed))]
            place.loads[reader.number, weak] = time, found.order
        if found.value is None:
            raise Finding("access", f"{reader.name} loads {self._name(place)}, unset")
        if found.release is not None:
            if order is ACQUIRE:
                reader.learn(found.release)
            elif order is RELAXED:
                reader.heard.append(found.release)
        if self.log:
            self._log(reader.name, f"loads ({order})", place, found.value)
        return found.value

    def store(
        self, writer: Observer, address: int, nbytes: int, value: int, order: str
    ) -> None:
        place = self._place(address, nbytes)
        value &= (1 << 8 * nbytes) - 1
        weak = order is WEAK
        time = writer.tick()
        if order is RELEASE:
            self._send_known(writer)
        for store in list(place.waiting):
            if not writer.knows(store):
                if weak or store.weak:
                    self._race(writer, "stores to", place, store.writer)
            elif store.writer != writer.number:
                self.send(store)
        known, over = list(writer.known), self._over
        for store in place.values:
            if store.time > known[store.writer] and (weak or store.weak):
                self._race(writer, "stores to", place, store.writer)
        release = known if order is RELEASE else writer.fenced
        new = Store(place, value, writer.number, time, weak, release, known, over)
        for (other, weakly), (when, found) in place.loads.items():
            if when > known[other]:
                if weak or weakly:
                    self._race(writer, "stores to", place, other)
                if when > over[other]:
                    continue
            if found > new.order:
                new.order = found
        new.priority = self._random.random()
        if new.priority < self.last:
            new.priority = -math.inf
        place.waiting.append(new)
        self.buffers[writer.number].append(new)
        self.waiting += 1
        if self.log:
            self._log(writer.name, f"stores ({order})", place, value)

    def fence(self, thread: Observer) -> None:
        self._send_known(thread)
        for known in thread.heard:
            thread.learn(known)
        thread.heard.clear()
        thread.fenced = list(thread.known)

    def next_kernel(self, threads: list[Observer], after_copy: bool) -> None:
        """Let all threads of a rank go on to its next kernel."""
        if after_copy and not self.copies_end:
            for thread in threads:
                before = self._at_start[thread.number]
                before[thread.number] = thread.known[thread.number]
                thread.known = before
        else:
            self._end(threads)
            meet(threads)
            if not (self.starts_see and self.starts_inherit):
                self._forget(threads)
        if not self.copies_end:
            self._at_start |= {each.number: list(each.known) for each in threads}

    def _forget(self, threads: list[Observer]) -> None:
        """Let no thread know what a kernel does not know when it starts."""
        mine = {thread.number for thread in threads}

        def kept(known: list[int], number: int) -> list[int]:
            return [
                time
                if other == number
                or (self.starts_see if other in mine else self.starts_inherit)
                else 0
                for other, time in enumerate(known)
            ]

        for thread in threads:
            thread.known = kept(thread.known, thread.number)
            if thread.fenced is not None:
                thread.fenced = kept(thread.fenced, thread.number)
            if not self.starts_inherit:
                thread.heard.clear()

    def _end(self, threads: list[Observer]) -> None:
        """Let all that these threads did take effect: their kernel is over."""
        for thread in threads if not self.fences_carry else ():
            thread.fenced = None
        for thread in threads if self.ends_count else ():
            for store in list(self.buffers[thread.number]):
                if store in self.buffers[thread.number]:
                    self.send(store)
            self._over = latest(self._over, thread.known, *thread.heard)
        for thread in threads if not self.fences_carry else ():
            thread.heard.clear()

    def send(self, store: Store) -> None:
        """Send a waiting store to memory; its thread's earlier ones there go first."""
        place = store.place
        for earlier in list(place.waiting):
            if earlier.writer == store.writer:
                place.waiting.remove(earlier)
                self.buffers[earlier.writer].remove(earlier)
                self.waiting -= 1
                place.put(earlier, late=self._random.random() < 0.5)
                self.changes += 1
                if self.log:
                    self._log("memory", "gets", place, earlier.value)
            if earlier is store:
                break
        del place.values[:-_REMEMBERED]

    def _send_known(self, thread: Observer) -> None:
        for buffer in filter(None, self.buffers):
            for store in list(buffer):
                if thread.knows(store) and store in buffer:
                    self.send(store)

    def _oldest(self, reader: Observer, place: Place, weak: bool) -> int:
        """Return the index of the oldest value that the reader may see."""
        values, known = place.values, reader.known
        newest = oldest = len(values) - 1
        while oldest > 0 and values[oldest].time > known[values[oldest].writer]:
            if weak or values[oldest].weak:
                self._race(reader, "loads", place, values[oldest].writer)
            oldest -= 1
        if oldest == newest:
            return oldest
        for (other, _), (when, order) in place.loads.items():
            while when <= known[other] and values[oldest].order < order:
                oldest += 1
        return oldest

    def _place(self, address: int, nbytes: int) -> Place:
        place = self._places.get(address)
        if place is None:
            number, offset = divmod(int(address), REGION)
            inside = 0 < number < len(self._regions)
            if not inside or offset + nbytes > self._regions[number][1]:
                raise Finding("access", f"{address:#x} is outside all memory")
            if offset % nbytes:
                raise Finding("access", f"{address:#x} is not aligned to {nbytes}")
            fill, width = self._regions[number][2], nbytes
            if callable(fill):
                width, fill = fill(offset)
            place = self._places[address] = Place(address, width or nbytes, fill)
        if place.nbytes != nbytes:
            raise Finding("access", f"{self._name(place)} in {nbytes} bytes as well")
        return place

    def _name(self, place: Place) -> str:
        number, offset = divmod(place.address, REGION)
        return f"{self._regions[number][0]}+{offset}"

    def _race(self, thread: Observer, does: str, place: Place, other: int) -> None:
        if self.races:
            text = f"{thread.name} {does} {self._name(place)}; so does thread {other}"
            raise Finding("race", f"{text}, neither before the other")

    def _log(self, who: str, does: str, place: Place, value: int | None) -> None:
        assert self.log is not None
        shown = "nothing" if value is None else f"{value:#x}"
        self.log(f"{who:>16} {does} {self._name(place)}: {shown}")


def latest(*known: list[int]) -> list[int]:
    """Return up to which of every thread's accesses any of these goes."""
    return list(map(max, *known)) if len(known) > 1 else list(*known)


def meet(observers: list[Observer]) -> None:
    """Let each know what any of them knew."""
    known = latest(*(observer.known for observer in observers))
    for observer in observers:
        observer.known = list(known)
