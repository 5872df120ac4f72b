"""The schedule: the threads of all ranks are coroutines, of which one runs at a time.

A kernel's threads are generators that stop before each access to memory, at each
barrier and in each ``poll_pause``. A task is a thread, or a buffered store that will
reach memory. A seed determines which task is next, by one of two rules:

- any task, with equal probabilities; or
- the task of the highest priority. Priorities are random, change a few times at random
  steps, and fall when a thread polls. This is probabilistic concurrency testing: it
  delays one thread for very long, which equal probabilities hardly ever do.

A thread whose poll has failed sleeps until memory changes. So if no task can run, none
ever will, which is a deadlock.

A kernel that is launched early starts as soon as all thread blocks of the one before
permit it (``griddepcontrol.launch_dependents``), or have ended. Each of its threads is
ordered after that kernel by its own ``griddepcontrol.wait``, and by nothing else. If
all threads wait before they access memory, the two kernels need one set of vector
clocks. If one does not, the schedule is repeated with a second set (``overlap``). A
third kernel does not start before the first one has ended, because a kernel that waits
does not permit it earlier.
"""

import gc
import math
from collections import deque
from collections.abc import Callable
from itertools import chain, product
from operator import attrgetter
from random import Random
from typing import Any

import numpy as np

from explore.launches import (
    BEYOND_THE_GRID,
    Follow,
    Grid,
    Launch,
    Mark,
    Overlap,
    Stream,
    Thread,
    Work,
)
from explore.memory import Finding, Memory, Observer, synchronize

STEP, SYNC, POLL, WAIT = range(4)  # the reasons for which a thread stops
VOTES = 32  # from this number on, barriers are votes, which order no accesses

_MOST_STEPS = 100_000  # of one run, about fifty times the usual number
_PRIORITY_CHANGES = 4
_TYPICAL_STEPS = 1500  # of one run, within which priorities change
_TRACE = 80  # lines shown of a schedule that has found a fault

TIMEOUT = 1000
"""The timeout of waits, if deadlines may pass. The clock jumps by more, or stops."""

_PRIORITY = attrgetter("priority")


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
        names = list(product([False], range(ranks), range(blocks), range(threads)))
        self._observers = {
            name: Observer(i, "rank {} block {} thread {}".format(*name[1:]), 0)
            for i, name in enumerate(names)
        }
        self.memory = Memory(len(names), self.random)
        self._widen()
        self.overlapping = False  # whether there is a second set of observers
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
        self._running: list[list[Grid]] = [[] for _ in range(ranks)]
        self._second = [False] * ranks  # by lane, which set its last kernel had
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
        self._second.append(False)
        self._shift.append(0)
        self._more.append(stream)
        for index in range(self.threads):
            name = f"rank {rank} stream {lane} thread {index}"
            observer = Observer(len(self._observers), name, 0)
            self._observers[False, lane, 0, index] = observer
        self._widen()
        return stream

    def change_within(self, steps: int) -> None:
        """Let priorities change within so many steps, if the run has few."""
        self._changes = sorted(int(self.random.random() * steps) for _ in self._changes)

    def overlap(self) -> None:
        """Let kernels access memory while the one before runs. None may have run."""
        for (_, *place), first in list(self._observers.items()):
            name = f"{first.name} (second)"
            observer = Observer(len(self._observers), name, 0)
            self._observers[True, *place] = observer
        self.overlapping = True
        self._widen()

    def _widen(self) -> None:
        self.memory.widen(len(self._observers))
        for observer in self._observers.values():
            observer.known = [0] * len(self._observers)

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
            self.memory.next_kernel(*self._threads_of(lane), None)
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
        for grid in chain(*self._running):
            for thread in grid.threads:
                if thread.done or thread.at_sync or thread.follows:
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

    def _threads_of(self, lane: int) -> tuple[list[Observer], set[int]]:
        """Return a stream's threads, and the numbers of all threads of its rank."""
        rank, now = self._ranks[lane], self._second[lane]
        own, whole = [], set()
        for (second, other, _, _), observer in self._observers.items():
            if other == lane and second == now:
                own.append(observer)
            if self._ranks[other] == rank:
                whole.add(observer.number)
        return own, whole

    def _end(self, lane: int) -> None:
        """End a stream's kernels that are over, and start what follows."""
        running = self._running[lane]
        while running and running[0].is_over:
            ended = running.pop(0)
            self._second[lane] = ended.second
            own, whole = self._threads_of(lane)
            if ended.before is not None:
                for observer in own:
                    observer.learn(ended.before)  # its threads may not have waited
            if running and self.overlapping:
                running[0].before = self.memory.end(own)
            else:
                self.memory.next_kernel(own, whole, ended.launch)
            for thread in running[0].threads if running else ():
                if thread.follows:
                    thread.follows = False
                    self._order(thread)
            if running and self.rule is not None:
                self.rule.starts(running[0])
        self._advance(lane)

    def _advance(self, lane: int) -> None:
        """Start a stream's next kernel, unless that must follow other work."""
        stream, marked = self._streams[lane], False
        while stream and self._may_start(stream[0], lane):
            work = stream.popleft()
            if isinstance(work, Launch):
                self._start(work, lane)
                continue
            own, whole = self._threads_of(lane)
            if isinstance(work, Mark):
                work.known, marked = self.memory.latest(own), True
            else:
                self.memory.follow(own, whole, work.mark.known)
        for other, rank in enumerate(self._ranks) if marked else ():
            if rank == self._ranks[lane] and other != lane:
                self._advance(other)

    def _may_start(self, work: Work, lane: int) -> bool:
        """Return whether the next work of a stream may start."""
        running = self._running[lane]
        if isinstance(work, Follow) and work.mark.known is None:
            return False
        if not running or not isinstance(work, Launch):
            return not running
        before = running[0]
        first_stream = lane < self.ranks  # others have no second set
        ready = len(running) == 1 and not before.not_ready and not before.launch.is_copy
        return work.early and ready and first_stream

    def _start(self, launch: Launch, lane: int) -> None:
        """Start a kernel on a stream, early if another one is running there.

        If the memory drops ``starts_see`` or ``copies_end``, each thread gets the clock
        of another thread of its block, so that the accesses of the earlier thread of
        its index did not happen before it in program order.
        """
        if not (self.memory.starts_see and self.memory.copies_end):
            self._shift[lane] += 1
        running = self._running[lane]
        grid = Grid(launch, lane, self.threads, early=bool(running))
        grid.second = self._second[lane]
        if running and self.overlapping:
            grid.second = not running[0].second
        running.append(grid)
        self._stale = True
        for thread in grid.threads:
            if thread.block >= launch.grid:
                thread.observer = BEYOND_THE_GRID
            elif not grid.early:
                self._order(thread)
            elif self.overlapping:
                self._begin(thread).forget()
            thread.priority = self.random.random()
            if self.haste and self.random.random() < 0.2:
                # It starts late: other threads of its launch may have failed.
                thread.asleep_until = self.memory.changes + self.random.randrange(50)
        if self.rule is not None and not grid.early:
            self.rule.starts(grid)

    def _begin(self, thread: Thread) -> Observer:
        """Give a thread its vector clock."""
        grid, lane = thread.grid, thread.lane
        number = (thread.index + self._shift[lane]) % self.threads
        observer = self._observers[grid.second, lane, thread.block, number]
        observer.outdated = self.random.random() < 0.5
        thread.observer = observer
        return observer

    def _order(self, thread: Thread) -> None:
        """Let a thread follow the end of the kernel before its own."""
        self._stale = True
        if thread.observer is BEYOND_THE_GRID:
            return
        before, observer = thread.grid.before, self._begin(thread)
        if before is not None:
            _, whole = self._threads_of(thread.lane)
            self.memory.follow([observer], whole, before)

    def must_wait(self, thread: Thread) -> bool:
        """Return whether a thread must wait for the end of the kernel before its own.

        If that has ended, order the thread after it.
        """
        if thread.grid is not self._running[thread.lane][0]:
            return True
        if thread.grid.early:
            self._order(thread)
        return False

    def permit_next(self, thread: Thread) -> None:
        """Let the next kernel start, as far as a thread's block is concerned."""
        grid = thread.grid
        if thread.thread_block in grid.not_ready:
            grid.not_ready.discard(thread.thread_block)
            if not grid.not_ready:
                self._advance(thread.lane)

    def _step(self, thread: Thread) -> None:
        if thread.polled_at < 0:
            thread.polled_at = self.memory.changes
        try:
            stopped_for = next(thread.code)
        except StopIteration:
            thread.done = self._stale = True
            grid, block = thread.grid, thread.thread_block
            grid.left[block] -= 1
            if not grid.left[block]:
                if grid.is_over:
                    self._end(thread.lane)
                else:
                    self.permit_next(thread)
            return
        if stopped_for == STEP:
            return
        self._stale = True
        observer = thread.observer
        if stopped_for == WAIT:
            thread.follows = True
        elif stopped_for == POLL:
            if self.rule is not None:
                self.rule.polls(thread)
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
            self._synchronize(thread)

    def _synchronize(self, thread: Thread) -> None:
        """Let a thread wait at its barrier, and all that wait there go on if complete.

        Barriers belong to a thread block. Threads that wait at one must agree on how
        many of them it is for.
        """
        thread.at_sync = True
        number, expected = thread.barrier
        here = [
            other
            for other in thread.grid.blocks[thread.thread_block]
            if other.at_sync and other.barrier[0] == number
        ]
        if any(other.barrier != thread.barrier for other in here):
            name = thread.observer.name
            text = f"{name} waits at barrier {number} for another number of threads"
            raise Finding("divergence", text)
        if len(here) < expected:
            return
        found = sum(1 << other.index for other in here if other.condition)
        failed = any(other.failed for other in here)
        if number < VOTES:
            synchronize([other.observer for other in here])
        for other in here:
            other.at_sync = other.condition = False
            other.conditions = found
            if number < VOTES:
                other.failed = failed
                other.observer.outdated = self.random.random() < 0.5

    def clock(self) -> int:
        """Return the time; with the probability ``haste``, after all deadlines."""
        if self.random.random() < self.haste:
            self.time += 2 * TIMEOUT
        return self.time

    def _nothing_can_run(self) -> None:
        running = chain(*(grid.threads for grid in chain(*self._running)))
        stuck = [t for t in running if not t.done and not t.follows]
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
    gc.collect()  # what earlier schedules have left
    gc.freeze()  # from now on, the collector looks through what schedules leave only
    with np.errstate(all="ignore"):  # as in the simulator's threads
        return _explore(scenario, make, schedules)


def _explore(
    scenario: Callable[[Machine], None],
    make: Callable[[int], Machine],
    schedules: int,
) -> tuple[int, Finding] | None:
    for seed in range(schedules):
        try:
            _run(scenario, make, seed, None)
        except Finding:
            steps: list[str] = []
            try:
                _run(scenario, make, seed, steps.append)
            except Finding as finding:
                finding.add_note("\n".join(steps[-_TRACE:]))
                return seed, finding
            raise AssertionError(f"seed {seed} is not deterministic") from None
    return None


def _run(
    scenario: Callable[[Machine], None],
    make: Callable[[int], Machine],
    seed: int,
    log: Callable[[str], None] | None,
) -> None:
    """Run a scenario under one schedule, with a second set of clocks if needed."""
    for overlapping in (False, True):
        machine = make(seed)
        machine.memory.log = log
        if overlapping:
            machine.overlap()
        try:
            scenario(machine)
        except Overlap:
            assert not overlapping
        else:
            return
