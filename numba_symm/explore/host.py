"""The host's part of an explored program: MPI, communicators, streams and copies.

Each rank's host is a thread. Calls of MPI, and set-up calls, wait until all ranks make
them. Kernels and collectives are work of the rank's default stream, in order. A
collective copies and reduces when all ranks' streams have reached it; it orders what
comes before it on the ranks that send before what comes after it on those that receive.
"""

from collections import deque
from typing import Any

import numpy as np

from numba_symm.explore.arrays import Array, allocated, unsupported
from numba_symm.explore.faults import CodePlace, Fault
from numba_symm.explore.machine import Machine, running
from numba_symm.explore.memory import Area
from numba_symm.explore.observers import Name, Observer


class RankStream:
    """The default stream of a rank."""

    def __init__(self, machine: Machine, rank: int):
        self.rank, self.clock = rank, machine.clock()
        self._queue: deque[Any] = deque()
        self._running: Any = None
        self._launches = 0

    def count(self) -> int:
        """Count a launch; return its number."""
        self._launches += 1
        return self._launches

    def learn(self, clock: Any) -> None:
        """Order what a clock knows before later work."""
        np.maximum(self.clock, clock, out=self.clock)

    def enqueue(self, work: Any) -> None:
        """Append work; start it if nothing runs."""
        self._queue.append(work)
        self._advance()

    def finish(self) -> None:
        """End the running work."""
        self._running = None
        self._advance()

    def _advance(self) -> None:
        if self._running is None and self._queue:
            self._running = self._queue.popleft()
            self._running.start(self)

    def idle(self) -> bool:
        """Return whether all work has ended."""
        return self._running is None and not self._queue


class AllRanks:
    """What the ranks of an execution share.

    Attributes:
        size: the number of ranks.
        machine: the execution.
        board: the memory of records of failures, which nobody stores.
    """

    def __init__(self, machine: Machine, size: int, device: Any):
        self.machine, self.size, self.device = machine, size, device
        self.board = machine.memory.allocate("the status board", 8 * size, 8)
        self.pads: dict[Area, Area] = {}
        self._given: dict[Any, dict[int, Any]] = {}
        self._works: dict[Any, dict[int, Enqueued]] = {}

    def give(self, key: Any, rank: int, what: str, site: CodePlace, value: Any) -> None:
        """Note that a rank makes a call in which all ranks meet."""
        given = self._given.setdefault(key, {})
        for other, (name, place, _, _) in given.items():
            if name != what:
                raise Fault(
                    "divergence",
                    f"rank {other} calls {name}, and rank {rank} calls {what}; all "
                    "ranks make the same calls in the same order",
                    sites=[(f"rank {other}", place), (f"rank {rank}", site)],
                )
        given[rank] = what, site, value, self.machine.me().clock.copy()

    def met(self, key: Any) -> bool:
        """Return whether all ranks make a call."""
        return len(self._given[key]) == self.size

    def given(self, key: Any) -> list[tuple[str, CodePlace, Any, Any]]:
        """Return what all ranks have given, in rank order."""
        return [self._given[key][rank] for rank in range(self.size)]

    def reached(self, key: Any, work: "Enqueued", rank: int) -> list["Enqueued"]:
        """Note that a stream has reached a collective; return all if it may run."""
        works = self._works.setdefault(key, {})
        works[rank] = work
        for other, each in works.items():
            if each.what != work.what:
                raise Fault(
                    "divergence",
                    f"rank {other} calls {each.what}, and rank {rank} {work.what}, as "
                    "their next collective; all ranks make the same calls",
                    sites=[(f"rank {r}", w.site) for r, w in works.items()],
                )
        return [works[r] for r in range(self.size)] if len(works) == self.size else []


class Enqueued:
    """A collective, on one rank's stream.

    Attributes:
        what: its name.
        x, out: the arrays; None: none.
        sources: the ranks from which this one receives.
    """

    def __init__(self, comm: Any, what: str, x: Any, out: Any, run: Any, sources: Any):
        execution = running()
        self._world, self._host = comm._world, execution.me().local
        self.what, self.x, self.out, self._run = what, x, out, run
        self.sources = sources
        self.site = execution.site()
        self._clock = execution.me().clock.copy()
        self._key = comm._number, self._host.count(("stream", comm._number))

    def start(self, stream: RankStream) -> None:
        """Run the collective if all other ranks' streams have reached it."""
        stream.learn(self._clock)
        self._stream = stream
        works = self._world.reached(self._key, self, stream.rank)
        if not works:
            return
        clocks = [work._stream.clock.copy() for work in works]
        machine = self._world.machine
        observers = []
        for rank, work in enumerate(works):
            name = Name(rank, None, 1, f"rank {rank}'s collectives")
            known = [clocks[source] for source in (*work.sources, rank)]
            observers.append(Observer(machine, name, np.maximum.reduce(known)))
        given = [
            None if work.x is None else work.x.load(observers[rank], work.site)
            for rank, work in enumerate(works)
        ]
        # Each rank stores after all that it receives from have loaded.
        for rank, work in enumerate(works):
            for source in work.sources:
                observers[rank].learn(observers[source].clock)
        for rank, work in enumerate(works):
            if work.out is not None:
                found = self._run(given, rank)
                if found is not None:
                    work.out.store(found, observers[rank], work.site)
            work._stream.learn(observers[rank].clock)
        for work in works:
            work._stream.finish()


class Host:
    """A rank's host thread: what it has made, and its stream."""

    def __init__(self, world: AllRanks, rank: int):
        self.world, self.rank = world, rank
        self.stream = RankStream(world.machine, rank)
        self._counts: dict[Any, int] = {}

    def ended(self, thread: Any) -> None:
        """Do nothing: kernels go on after their host."""

    def count(self, what: Any) -> int:
        """Return how often this was called before."""
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        return number

    def check_stream(self, stream: Any) -> None:
        """Refuse other streams than the default one."""
        if stream is not None and stream != 0:
            raise unsupported("a stream", "use the default stream")

    def drain(self) -> None:
        """Wait for the stream."""
        running().block(self.stream.idle, "synchronize")
        running().me().learn(self.stream.clock)

    def copy_in(self, target: Array, values: Any) -> None:
        """Copy into a device array, on the stream.

        CUDA returns from such a copy when it has read the host's memory, which may be
        before the GPU has stored it. So only work of the stream follows the copy.
        """
        self.drain()
        execution = running()
        given = values.load() if isinstance(values, Array) else values
        name = Name(self.rank, None, 2, f"a copy of rank {self.rank}")
        copies = Observer(execution, name, execution.me().clock.copy())
        target.store(given, copies, execution.site())
        self.stream.learn(copies.clock)

    def meet(self, what: str, value: Any = None, comm: Any = "MPI") -> list[Any]:
        """Wait until all ranks make a call; return the values of all."""
        machine, world = running(), self.world
        key = comm, self.count(comm)
        world.give(key, self.rank, what, machine.site(), value)
        machine.block(lambda: world.met(key), what)
        given = world.given(key)
        for _, _, _, clock in given:
            machine.me().learn(clock)
        return [value for _, _, value, _ in given]

    def new(
        self, shape: Any, dtype: Any, *, unset: bool = False, what: str = "an array"
    ) -> Array:
        """Return a new array of this rank."""
        name = f"{what} of rank {self.rank}"
        region = allocated(name, self.rank, shape, dtype, unset=unset)
        region.made = running().site()
        return Array.of(region, shape, dtype)


def host() -> Host:
    """Return the host that runs."""
    local = running().me().local
    if not isinstance(local, Host):
        raise unsupported("a call of the host in a kernel")
    return local
