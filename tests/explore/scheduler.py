"""The schedule: the threads of all ranks are coroutines, of which one runs at a time.

A kernel's threads are generators that stop before each access to memory, at each
``syncthreads`` and in each ``poll_pause``. A task is a thread, or a buffered store that
will reach memory. A seed determines which task is next, by one of two rules:

- any task, with equal probabilities; or
- the task of the highest priority. Priorities are random, change a few times at random
  steps, and fall when a thread polls. This is probabilistic concurrency testing: it
  delays one thread for very long, which equal probabilities hardly ever do.

A thread whose poll has failed sleeps until memory changes. So if no task can run, none
ever will, which is a deadlock.
"""

import gc
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product
from operator import attrgetter
from random import Random
from typing import Any

import numpy as np

from explore.memory import Finding, Memory, Observer, latest, synchronize

STEP, SYNC, POLL = range(3)  # the reasons for which a thread stops

_MOST_STEPS = 100_000  # of one run, about fifty times the usual number
_PRIORITY_CHANGES = 4
_TYPICAL_STEPS = 1500  # of one run, within which priorities change
_TRACE = 80  # lines shown of a schedule that has found a fault

TIMEOUT = 1000
"""The timeout of waits, if deadlines may pass. The clock jumps by more, or stops."""

_PRIORITY = attrgetter("priority")


@dataclass(frozen=True)
class Launch:
    """A kernel of plain device code, with its grid and arguments.

    Attributes:
        is_copy: whether it represents a copy that was enqueued on the stream.
    """

    kernel: Callable[..., Any]
    grid: int
    args: tuple[Any, ...]
    is_copy: bool = False

    def __call__(self, stream: list["Launch"]) -> None:
        """Enqueue it."""
        stream.append(self)


@dataclass(eq=False)
class Mark:
    """An event that is recorded on a stream, after all that precedes it there.

    Attributes:
        known: what had happened before it; None: it is not complete.
    """

    known: list[int] | None = None


@dataclass(frozen=True)
class Follow:
    """What follows on a stream follows a mark of another stream."""

    mark: Mark


Work = Launch | Mark | Follow
"""What is enqueued on a stream."""


class Stream(list[Work]):
    """A stream of a rank besides its first one, for copies and kernels of one block.

    Its methods are those of ``numba_symm.streams.SideStream``.
    """

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        self.stream = self
        self._marks: dict[int, Mark] = {}

    def follow(self, stream: list[Work], event: int) -> None:
        """Make what follows here follow all work of another stream."""
        self._marks[event] = Mark()
        stream.append(self._marks[event])
        self.append(Follow(self._marks[event]))

    def mark(self, event: int) -> None:
        """Record an event here."""
        self._marks[event] = Mark()
        self.append(self._marks[event])

    def lead(self, stream: list[Work], event: int) -> None:
        """Make what follows on another stream follow an event of this one."""
        stream.append(Follow(self._marks[event]))

    @contextmanager
    def joined(self, stream: list[Work]) -> Iterator[None]:
        """Do nothing: no step of the ``with`` block fails."""
        yield


class Thread:
    """One simulated thread, of one launch."""

    def __init__(
        self, launch: Launch, lane: int, block: int, index: int, observer: Observer
    ):
        self.priority = 0.0
        self.lane = lane
        self.block = block
        self.index = index
        self.grid = launch.grid
        self.copies = launch.is_copy
        self.observer = observer
        self.code: Generator[int, None, None] = launch.kernel(*launch.args)
        self.at_sync = False
        self.failed = False  # whether a thread of its block has found a failure
        self.condition = False  # its argument of syncthreads_or
        self.any_condition = False  # the result of syncthreads_or
        self.done = False
        self.polled_at = -1  # memory.changes when its poll began
        self.asleep_until = 0  # memory.changes at which it wakes


current: Thread | None = None
"""The running thread, from which device functions take their index and memory."""

machine: "Machine | None" = None
"""The machine of that thread."""


class Machine:
    """Ranks with their streams, their memory, and the schedule that a seed chooses.

    A *lane* is the number of a stream: first those of the ranks' first streams.
    """

    def __init__(self, ranks: int, blocks: int, threads: int, seed: int):
        self.random = Random(seed)
        self.ranks = ranks
        self.threads = threads
        self.time = 1
        self.haste = 0.0  # the probability that a deadline has passed at a check
        self.absent: int | None = None  # a rank that launches no kernel, given haste
        self.rule: Any = None  # checks every access, see ``failures``
        names = list(product(range(ranks), range(blocks), range(threads)))
        self._observers = {
            name: Observer(i, "rank {} block {} thread {}".format(*name), len(names))
            for i, name in enumerate(names)
        }
        self.memory = Memory(len(names), self.random)
        self._lowest = 0.0
        self._changes: list[int] = []  # steps at which the highest priority falls
        self._choose = self._any
        if self.random.random() < 0.5:
            self._choose = self._first
            self._changes = sorted(
                int(self.random.random() * _TYPICAL_STEPS)
                for _ in range(_PRIORITY_CHANGES)
            )
        self._ranks = list(range(ranks))  # by lane
        self._running: list[list[Thread]] = [[] for _ in range(ranks)]
        self._stale = True  # whether the following must be computed again
        self._awake: list[Thread] = []  # the threads that can run
        self._best: Thread | None = None  # the one of highest priority
        self._wakes = math.inf  # memory.changes at which another one wakes
        self._shift = [0] * ranks
        self._more: list[Stream] = []

    def stream_of(self, rank: int) -> Stream:
        """Return a new stream of a rank. No kernel may have run before."""
        stream, lane = Stream(rank), len(self._ranks)
        self._ranks.append(rank)
        self._running.append([])
        self._shift.append(0)
        self._more.append(stream)
        number = len(self._observers)
        for index in range(self.threads):
            name = f"rank {rank} stream {lane} thread {index}"
            self._observers[lane, 0, index] = Observer(number + index, name, 0)
        self.memory.widen(len(self._observers))
        for observer in self._observers.values():
            observer.known = [0] * len(self._observers)
        return stream

    def drop_unreached(self, streams: list[list[Work]]) -> None:
        """Drop what follows a mark that a rank did not enqueue before it left."""
        every = [*streams, *self._more]
        cut = True
        while cut:
            work = chain(*every)
            marks = {each for each in work if isinstance(each, Mark)}
            cut = False
            for stream in every:
                for place, work in enumerate(stream):
                    if isinstance(work, Follow) and work.mark not in marks:
                        del stream[place:]
                        cut = True
                        break

    def run(self, streams: list[list[Work]]) -> None:
        """Run each stream's work in order, in a schedule that the seed determines."""
        global current, machine
        machine = self
        self._streams = [deque(stream) for stream in (*streams, *self._more)]
        for lane in range(len(self._streams)):
            self.memory.next_kernel(*self._threads_of(lane), False)
        for lane in range(len(self._streams)):
            self._advance(lane)
        memory = self.memory
        for step in range(_MOST_STEPS):
            if self._stale or memory.changes >= self._wakes:
                self._look()
            if not self._awake and not memory.waiting:
                if not any(self._running):
                    if any(self._streams):
                        raise Finding("deadlock", "streams follow one another")
                    break
                self._nothing_can_run()
                continue
            task = self._choose(step)
            if isinstance(task, Thread):
                current = task
                self._step(task)
            else:
                memory.send(task)
        else:
            raise Finding("deadlock", f"no end after {_MOST_STEPS} steps")

    def _look(self) -> None:
        """Find the threads that can run, and when another one wakes."""
        changes = self.memory.changes
        self._awake, self._wakes, self._stale = [], math.inf, False
        for thread in chain(*self._running):
            if thread.done or thread.at_sync:
                continue
            if thread.asleep_until <= changes:
                self._awake.append(thread)
            else:
                self._wakes = min(self._wakes, thread.asleep_until)
        self._best = max(self._awake, key=_PRIORITY, default=None)

    def _any(self, step: int) -> Any:
        number = len(self._awake) + self.memory.waiting
        place = int(self.random.random() * number)
        for ready in (self._awake, *self.memory.buffers):
            if place < len(ready):
                return ready[place]
            place -= len(ready)
        raise AssertionError("memory miscounts the stores that wait")

    def _first(self, step: int) -> Any:
        if self._changes and step >= self._changes[0]:
            self._changes.pop(0)
            best = self._of_highest_priority()
            self._lowest -= 1
            best.priority = self._lowest
            self._look()
        return self._of_highest_priority()

    def _of_highest_priority(self) -> Any:
        best: Any = self._best
        for buffer in self.memory.buffers if self.memory.waiting else ():
            for store in buffer:
                if best is None or store.priority > best.priority:
                    best = store
        return best

    def _launch_next(self, lane: int) -> None:
        """Start a stream's next kernel, after the last one has ended."""
        running = self._running[lane]
        after_copy = bool(running) and running[0].copies
        self.memory.next_kernel(*self._threads_of(lane), after_copy)
        running.clear()
        self._advance(lane)

    def _threads_of(self, lane: int) -> tuple[list[Observer], set[int]]:
        """Return a stream's threads, and the numbers of all threads of its rank."""
        rank = self._ranks[lane]
        own, whole = [], set()
        for (other, _, _), observer in self._observers.items():
            if other == lane:
                own.append(observer)
            if self._ranks[other] == rank:
                whole.add(observer.number)
        return own, whole

    def _advance(self, lane: int) -> None:
        """Start a stream's next kernel, unless that follows another stream's work."""
        stream, marked = self._streams[lane], False
        observers, of_rank = self._threads_of(lane)
        while stream and not self._running[lane]:
            work = stream[0]
            if isinstance(work, Mark):
                work.known, marked = latest(*(o.known for o in observers)), True
            elif isinstance(work, Follow):
                if work.mark.known is None:
                    break
                self.memory.follow(observers, of_rank, work.mark.known)
            else:
                self._start(work, lane)
            stream.popleft()
        for other, rank in enumerate(self._ranks) if marked else ():
            if rank == self._ranks[lane] and other != lane:
                self._advance(other)

    def _start(self, launch: Launch, lane: int) -> None:
        """Start a kernel on a stream.

        If the memory drops ``starts_see`` or ``copies_end``, each thread gets the clock
        of another thread of its block, so that the accesses of the earlier thread of
        its index did not happen before it in program order.
        """
        if not (self.memory.starts_see and self.memory.copies_end):
            self._shift[lane] += 1
        for block in range(launch.grid):
            for index in range(self.threads):
                number = (index + self._shift[lane]) % self.threads
                observer = self._observers[lane, block, number]
                observer.outdated = self.random.random() < 0.5
                thread = Thread(launch, lane, block, index, observer)
                if self.rule is not None:
                    self.rule.starts(thread)
                thread.priority = self.random.random()
                if self.haste and self.random.random() < 0.2:
                    # It starts late: other threads of its launch may have failed.
                    thread.asleep_until = self.memory.changes + self.random.randrange(
                        50
                    )
                self._running[lane].append(thread)

    def _step(self, thread: Thread) -> None:
        observer = thread.observer
        if thread.polled_at < 0:
            thread.polled_at = self.memory.changes
        try:
            stopped_for = next(thread.code)
        except StopIteration:
            thread.done = self._stale = True
            if all(other.done for other in self._running[thread.lane]):
                self._launch_next(thread.lane)
            return
        if stopped_for == STEP:
            return
        self._stale = True
        if stopped_for == POLL:
            # If it loaded the latest values, it loads the same until memory changes.
            if not observer.outdated and not (
                self.haste and self.random.random() < 0.2
            ):
                thread.asleep_until = thread.polled_at + 1
            thread.polled_at = -1
            observer.outdated = self.random.random() < 0.5
            self._lowest -= 1
            thread.priority = self._lowest
        else:
            thread.at_sync = True
            block = [
                other
                for other in self._running[thread.lane]
                if other.block == thread.block
            ]
            if all(other.at_sync for other in block):
                synchronize([other.observer for other in block])
                found = any(other.condition for other in block)
                failed = any(other.failed for other in block)
                for other in block:
                    other.failed = failed
                    other.at_sync = other.condition = False
                    other.any_condition = found
                    other.observer.outdated = self.random.random() < 0.5

    def clock(self) -> int:
        """Return the time; with the probability ``haste``, after all deadlines."""
        if self.random.random() < self.haste:
            self.time += 2 * TIMEOUT
        return self.time

    def _nothing_can_run(self) -> None:
        stuck = [t for running in self._running for t in running if not t.done]
        asleep = [thread for thread in stuck if not thread.at_sync]
        if not asleep:
            names = ", ".join(thread.observer.name for thread in stuck)
            raise Finding(
                "divergence", f"other threads have ended; at syncthreads: {names}"
            )
        if not self.haste:
            names = ", ".join(thread.observer.name for thread in asleep)
            raise Finding("deadlock", f"waiting indefinitely: {names}")
        self.time += 2 * TIMEOUT
        for thread in asleep:
            thread.asleep_until = 0
        self._stale = True


def explore(
    scenario: Callable[[Machine], None],
    make: Callable[[int], Machine],
    schedules: int,
) -> tuple[int, Finding] | None:
    """Run a scenario under many schedules. Return the first seed that finds a fault.

    The finding carries the last steps of its schedule.
    """
    gc.freeze()  # schedules leave cycles; the collector looks through these only
    try:
        with np.errstate(all="ignore"):  # as in the simulator's threads
            return _explore(scenario, make, schedules)
    finally:
        gc.unfreeze()


def _explore(
    scenario: Callable[[Machine], None],
    make: Callable[[int], Machine],
    schedules: int,
) -> tuple[int, Finding] | None:
    for seed in range(schedules):
        try:
            scenario(make(seed))
        except Finding:
            again = make(seed)
            steps: list[str] = []
            again.memory.log = steps.append
            try:
                scenario(again)
            except Finding as finding:
                finding.add_note("\n".join(steps[-_TRACE:]))
                return seed, finding
            raise AssertionError(f"seed {seed} is not deterministic") from None
    return None
