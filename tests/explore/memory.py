"""A model of weak memory: what PTX permits, as far as the protocols could notice.

Permitted

- Each thread buffers its stores. They reach memory in any order and after any delay,
  but stores of one thread to one address keep their order. A 16-byte access is two
  independent accesses of 8 bytes.
- A load returns any value that has reached memory, old ones included, but none older
  than a store that happened before the load, or than a value that was returned by a
  load that happened before it (of each thread, the latest such load counts). If a store
  that happened before the load is still buffered, the load returns its value.
- Two stores to one address take effect in any order, if neither happened before the
  other, whichever reached memory first. But a kernel's end is a point in time: the
  accesses of its threads, and those that happened before a release whose value they
  have loaded, have taken effect by then. All later accesses follow them.
- An access happened before another one: in program order; by a barrier, for the threads
  that wait there; by a kernel's start, for all earlier kernels of its rank; or by an
  acquire that loads the value of a release. A relaxed store after a fence is a release,
  and a relaxed load before a fence is an acquire. Nothing else orders accesses of
  different ranks. If a kernel starts while the one before it runs, its start orders
  nothing: each of its threads is ordered by its own ``griddepcontrol.wait``.
- A release store, or a fence, first sends to memory every buffered store that happened
  before it, of any thread.

Reported

- a race: two accesses to one address, at least one of them a store and at least one
  weak (neither relaxed, acquire nor release), where neither happened before the other;
- an access outside mapped memory, a misaligned one, one of another width than an
  earlier access to its address, or a load of memory that was never written.

Not modelled

- A load is never delayed past a later store of its own thread. If a weak access
  depended on that order, the access would be reported as a race. Relaxed packets rely
  on the branch that depends on their flag, as on GPUs.
- Only the latest few values of an address are kept.
- Atomic updates (``explore/threads.py``) reach memory immediately.
- No kernel here uses scopes other than the system's, or the total order of fences.
- At most two kernels of a stream run at a time, and none starts early directly behind a
  copy, an event, or on a side stream.
- Time is left out. Where a failure must be found in time, loads of a board return what
  has reached it last (``Memory.fresh``). A record that is in transit while a rank looks
  at its board is found too late there, as on GPUs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

WEAK, RELAXED, ACQUIRE, RELEASE = "weak", "relaxed", "acquire", "release"

_REMEMBERED = 8  # values of one address
REGION = 1 << 20  # address space of a region; accesses beyond its bytes are reported


Fill = int | Callable[[int], tuple[int, int | None]] | None


class Finding(Exception):
    """A fault that a run has found.

    Attributes:
        kind: ``race``, ``access``, ``deadlock``, ``divergence``, ``failure`` or
            ``result``.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Observer:
    """A thread's vector clock: for every thread, which accesses happened before."""

    def __init__(self, number: int, name: str, threads: int):
        self.number = number
        self.name = name
        self.known = [0] * threads
        self.fenced: list[int] | None = None  # the clock at the last fence
        self.unfenced: list[list[int]] = []  # clocks that the next fence acquires
        self.outdated = False  # whether its next loads may return old values

    def tick(self) -> int:
        self.known[self.number] += 1
        return self.known[self.number]

    def knows(self, store: "Store") -> bool:
        return store.time <= self.known[store.writer]

    def learn(self, known: list[int]) -> None:
        pairs = zip(self.known, known, strict=True)
        self.known = [mine if mine > other else other for mine, other in pairs]

    def forget(self) -> None:
        """Know nothing, as a thread that nothing has ordered after any other."""
        own = self.known[self.number]
        self.known = [0] * len(self.known)
        self.known[self.number] = own
        self.fenced = None
        self.unfenced.clear()


@dataclass(slots=True, eq=False)
class Store:
    """One store to one address.

    Attributes:
        writer: the number of the thread that stores.
        time: that thread's number of accesses.
        release: the clock that an acquire of this value gets; None: not a release.
        known: by thread, the accesses that happened before.
        over: by thread, the accesses that had taken effect before, as their kernel had
            ended.
        order: its place among the stores to this address, once in memory. Before that,
            the place of the last store that it must follow.
        priority: for the scheduler; the lowest waits until no other task can run.
        updates: whether no store may come between the one before it and this one.
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
    updates: bool = False

    def comes_after(self, other: "Store") -> bool:
        """Return whether this store must follow another one to the same address."""
        writer, time = other.writer, other.time
        return (
            other.order <= self.order
            or time <= self.known[writer]
            or time <= self.over[writer]
        )


class Place:
    """One address: its values in memory, oldest first, and its buffered stores."""

    def __init__(self, address: int, nbytes: int, initial: int | None):
        self.address = address
        self.nbytes = nbytes
        self.first = initial
        self.values = [Store(self, initial)]  # the first happened before every access
        self.waiting: list[Store] = []
        # The last load of each (thread, weak): its time, and the order of the value.
        self.loads: dict[tuple[int, bool], tuple[int, float]] = {}

    def put(self, new: Store, late: bool) -> None:
        """Insert a store after those that it must follow; if ``late``, after all."""
        at = len(self.values)
        while not late and at > 1 and not new.comes_after(self.values[at - 1]):
            at -= 1
        while at < len(self.values) and self.values[at].updates:
            at += 1
        before = self.values[at - 1].order
        after = self.values[at].order if at < len(self.values) else before + 2
        new.order = (before + after) / 2
        self.values.insert(at, new)


class Memory:
    """The memory of all ranks, and the buffers of all threads.

    Attributes:
        changes: the number of stores that have reached memory.
        buffers: by thread, the buffered stores.
        waiting: the number of buffered stores.
        log: a function that is called with a line for each access; None: none is.
        races: whether to report races. If not, their consequences may still be found.
        last: the share of the stores that stay buffered while another task can run.
        fresh: addresses of which every load returns what has reached memory last, as a
            record does that has been there for the time of a poll.

    The others are the assumptions about the platform (``docs/protocols.md``). Each
    one can be dropped:
        starts_see: whether the accesses of a rank's kernels happened before its later
            kernels.
        starts_inherit: whether accesses of other ranks that happened before these
            kernels also happened before the later ones.
        copies_end: whether a copy has ended when the next kernel of its rank starts. If
            not, its loads happened before no access, and its stores may be buffered.
        ends_count: whether a kernel's end is a point in time, see above.
        fences_carry: whether a fence of one kernel and a relaxed store of a later one
            of the same rank are a release, and a relaxed load and a fence an acquire.
    """

    def __init__(self, threads: int, random: Random):
        self.changes = 0
        self.buffers: list[list[Store]] = [[] for _ in range(threads)]
        self.waiting = 0
        self.log: Callable[[str], None] | None = None
        self.races = True
        self.last = 0.05
        self.fresh = range(0)
        self.starts_see = True
        self.starts_inherit = True
        self.copies_end = True
        self.ends_count = True
        self.fences_carry = True
        self._at_start: dict[int, list[int]] = {}  # the clocks at the start of kernels
        self._over = [0] * threads  # by thread, accesses that have taken effect
        self._random = random
        self._regions: list[tuple[str, int, Fill]] = [("null", 0, None)]
        self._places: dict[int, Place] = {}

    def map(self, name: str, nbytes: int, fill: Fill = None) -> int:
        """Return the address of new memory.

        ``fill`` is the initial value of every address; None: no address was written. A
        function returns, for an offset, the width of its accesses and its value.
        """
        assert nbytes <= REGION
        self._regions.append((name, nbytes, fill))
        return (len(self._regions) - 1) * REGION

    def plant(self, address: int, nbytes: int, value: int) -> None:
        """Set an initial value in memory, before the run."""
        place = self._place(address, nbytes)
        place.values[0].value = place.first = value

    def first(self, address: int, nbytes: int) -> int | None:
        """Return the initial value."""
        return self._place(address, nbytes).first

    def final(self, address: int, nbytes: int) -> int | None:
        """Return the value after the run."""
        return self._place(address, nbytes).values[-1].value

    def accessed(self, first: int, nbytes: int) -> Iterator[tuple[int, int | None]]:
        """Yield the offset from ``first`` and the final value of accessed addresses."""
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
            outdated = reader.outdated and self._random.random() < 0.5
            if outdated and address not in self.fresh:
                allowed = place.values[oldest:]
                found = allowed[int(self._random.random() * len(allowed))]
            place.loads[reader.number, weak] = time, found.order
        if found.value is None:
            raise Finding("access", f"{reader.name} loads {self._name(place)}, unset")
        if found.release is not None:
            if order is ACQUIRE:
                reader.learn(found.release)
            elif order is RELAXED:
                reader.unfenced.append(found.release)
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
        for known in thread.unfenced:
            thread.learn(known)
        thread.unfenced.clear()
        thread.fenced = list(thread.known)

    def widen(self, threads: int) -> None:
        """Add threads, before the first access."""
        self.buffers += [[] for _ in range(threads - len(self.buffers))]
        self._over = [0] * threads

    def next_kernel(
        self, threads: list[Observer], of_rank: set[int], ended: Any
    ) -> None:
        """Start the next kernel of a stream.

        Args:
            threads: the stream's threads.
            of_rank: the numbers of all threads of its rank.
            ended: the launch that has ended; None: it is the first one.
        """
        if ended is not None and ended.is_copy and not self.copies_end:
            for thread in threads:
                before = self._at_start[thread.number]
                before[thread.number] = thread.known[thread.number]
                thread.known = before
            self._at_start |= {each.number: list(each.known) for each in threads}
        else:
            self.follow(threads, of_rank, self.end(threads))

    def latest(self, threads: list[Observer]) -> list[int]:
        """Return what happened before the end of any of these threads."""
        return latest(*(thread.known for thread in threads))

    def follow(
        self, threads: list[Observer], of_rank: set[int], known: list[int]
    ) -> None:
        """Let a stream's next kernel start after what happened before a mark."""
        for thread in threads:
            thread.learn(known)
        if not (self.starts_see and self.starts_inherit):
            self._forget(threads, of_rank)
        if not self.copies_end:
            self._at_start |= {each.number: list(each.known) for each in threads}

    def _forget(self, threads: list[Observer], mine: set[int]) -> None:
        """Remove from the clocks what did not happen before the start of a kernel."""

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
                thread.unfenced.clear()

    def end(self, threads: list[Observer]) -> list[int]:
        """Let all accesses of these threads take effect: their kernel has ended.

        Returns:
            What happened before that.
        """
        for thread in threads if not self.fences_carry else ():
            thread.fenced = None
        for thread in threads if self.ends_count else ():
            for store in list(self.buffers[thread.number]):
                if store in self.buffers[thread.number]:
                    self.send(store)
            self._over = latest(self._over, thread.known, *thread.unfenced)
        for thread in threads if not self.fences_carry else ():
            thread.unfenced.clear()
        return self.latest(threads)

    def send(self, store: Store) -> None:
        """Send a buffered store to memory, after its thread's earlier ones there."""
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
            raise Finding(
                "access", f"{self._name(place)} is accessed in {nbytes} bytes, too"
            )
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
    """Return the maximum of vector clocks."""
    return list(map(max, *known)) if len(known) > 1 else list(*known)


def synchronize(observers: list[Observer]) -> None:
    """Synchronize threads: each gets the maximum of their clocks."""
    known = latest(*(observer.known for observer in observers))
    for observer in observers:
        observer.known = list(known)
