"""One rank of ``numba-symm soak``: calls, cycles and failures, with deadlines.

    python -m numba_symm.bench.soak FOLDER JOB

A *lane* is a communicator with two streams. In each round, every lane draws calls, the
same on all its ranks, and makes each once. So all kernels are loaded before the lanes
run side by side, because loading may wait for calls that wait for this rank. Then each
rank makes the calls of all lanes many times, in an order of its own. Products, pauses
and replays of a graph are between them. The host waits only at the end of a round.

A failure ends all lanes on all ranks. Those that are left rebuild the communicator,
make new lanes, and go on with the next round. An error without a failure is a fault.

The calls of a soak: random ones on a communicator, each with its check.

On the GPU, a kernel fills the arrays before a call, and another one compares the result
after it. So the host waits only at the end of a round.

The failures of a soak: what happens to a rank, when, and what it may cause.

At most one failure is pending. All ranks know which one, because their random numbers
are equal. A rank that is killed or stopped is hit at a moment that only time decides.
"""

import faulthandler
import gc
import json
import math
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import environment
from numba_symm.bench.bench_operations import (
    NO_REDUCTION,
    OPERATIONS,
    PERIOD,
    POISON,
    TYPES,
    Contents,
    EnqueueOn,
    Tiled,
)
from numba_symm.bench.measure import new_stream
from numba_symm.bench.overlap import Product, new_product
from numba_symm.bench.soak_marks import FAILURES, JobMarks, SoakJob, Watch
from numba_symm.collectives import kernel_set
from numba_symm.collectives.communicator import inside
from numba_symm.environment import SIMULATED
from numba_symm.errors import CollectiveError, ExchangeError, SymmError

CALLS, REPEATS = (4, 1) if SIMULATED else (40, 25)
"""The calls that a lane draws for a round, and how often it makes each."""

MOST = 1 << (10 if SIMULATED else 24)
"""Bytes of the longest message."""

ROOM = 4 * MOST
"""Bytes of each array that contains inputs or outputs."""

MISALIGNED = 4
"""Arrays begin fewer than this many elements after an aligned address."""

KINDS = (
    ("float", "sum"),
    ("float", "max"),
    ("bfloat16", "sum"),
    ("int32", "min"),
    ("int64", "sum"),
)
"""Types with reductions. With more, compiling would take most of the time."""

GRID, BLOCK = (1, 1) if SIMULATED else (512, 256)

_WORDS: dict[int, np.dtype[Any]] = {
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


NOT_DRAWN = "barrier", "experts", "experts_stored", "all_reduce_fp8", "rms_norm"
"""Operations without a message of any length, that some GPUs lack, or whose functions
each process compiles."""


class SoakCall(NamedTuple):
    """A call with its check.

    Attributes:
        words: describe it, for a report of wrong elements.
        operation: its name.
        stream: the number of its stream in the lane.
        enqueue: fills the arrays, makes the call and compares them, on the stream
            with the given handle.
    """

    words: str
    operation: str
    stream: int
    enqueue: EnqueueOn


class Client:
    """A communicator with two streams, and arrays for its calls. Collective.

    Args:
        comm: the communicator.
        seed: determines the calls; equal on all ranks of the communicator.
        note: called before each call or wait, with what it is.
    """

    def __init__(
        self,
        comm: ns.Communicator,
        seed: Sequence[int],
        note: Callable[[str], object] = lambda words: None,
    ):
        self.comm, self._note = comm, note
        self._random = np.random.default_rng(seed)  # the same on all ranks
        self._own = np.random.default_rng((*seed, comm.rank))
        self._streams = [new_stream() for _ in range(2)]
        # For each stream, inputs and outputs: symmetric arrays and ordinary ones.
        self._rooms = [
            [
                (comm.zeros(ROOM, np.uint8), cuda.device_array(ROOM, np.uint8))
                for _ in range(2)
            ]
            for _ in self._streams
        ]
        self._contents: dict[str, Contents] = {}
        self._patterns: dict[Any, Any] = {}  # on the GPU
        self._wrong = cuda.to_device(np.zeros(CALLS, np.uint32))
        self._drawn: list[SoakCall] = []
        self._graph: Any = None

    def draw(self) -> None:
        """Draw the calls of a round, make each once, and wait.

        Those of the first stream are also captured in a graph.
        """
        self._graph = None
        self._drawn = [self._call(number) for number in range(CALLS)]
        for each in self._drawn:
            self._make(each)
        self.wait()
        calls = [each.enqueue for each in self._drawn if not each.stream]
        if calls:
            self._note("a graph")
            self._graph = self._streams[0].capture(calls, lambda _: nullcontext())
            self._streams[0].launch(self._graph)  # its first launch may allocate
            self.wait()

    def _make(self, call: SoakCall) -> None:
        self._note(call.operation)
        call.enqueue(self._streams[call.stream].handle)

    @property
    def drawn(self) -> int:
        """The number of calls that :meth:`draw` makes, with those of the graph."""
        return len(self._drawn) + self._captured

    @property
    def _captured(self) -> int:
        return sum(not each.stream for each in self._drawn)

    def steps(self) -> Iterator[int]:
        """Make the calls of a round, one or a graph's a step.

        Lanes have equally many steps, because the simulator's ranks have one order.

        Yields:
            The number of calls in the step; minus that of a graph's.
        """
        indices = [*range(CALLS), -1] * REPEATS
        for index in self._random.permutation(indices):
            if index < 0 and self._graph is None:
                yield 0
            elif index < 0:
                # The communicator does not notice replays.
                first, second = self._streams
                self._note("a replay")
                first.follow(second)
                first.launch(self._graph)
                second.follow(first)
                yield -self._captured
            else:
                self._make(self._drawn[index])
                yield 1

    def clear(self) -> None:
        """Drop all arrays. The calls refer to this object, and it to them."""
        self._graph = None
        self._drawn.clear()
        self._rooms.clear()
        self._patterns.clear()

    @property
    def handle(self) -> int:
        """The handle of the first stream."""
        return int(self._streams[0].handle)

    def wait(self) -> None:
        """Wait for all calls, and raise if the communicator has failed."""
        self._note("a wait")
        for stream in self._streams:
            stream.synchronize()
        self.comm.check()

    def wrong(self) -> list[str]:
        """Describe this rank's wrong results of the round, after :meth:`wait`."""
        counts = self._wrong.copy_to_host()
        self._wrong.copy_to_device(np.zeros(CALLS, np.uint32))
        pairs = zip(counts, self._drawn, strict=True)
        return [f"{count} wrong of {each.words}" for count, each in pairs if count]

    def _call(self, number: int) -> SoakCall:
        draw, comm = self._random, self.comm
        name = str(draw.choice([each for each in OPERATIONS if each not in NOT_DRAWN]))
        operation = OPERATIONS[name]
        kinds = [
            (type_, op)
            for type_, op in KINDS
            if not operation.types or type_ in operation.types
            if not operation.reductions or op in operation.reductions
        ]
        type_, op = kinds[draw.integers(len(kinds))]
        if not operation.reductions:
            op = NO_REDUCTION
        dtype = TYPES[type_]
        nbytes = math.exp(draw.uniform(0, math.log(MOST)))
        counts = operation.shapes(max(1, int(nbytes) // dtype.itemsize), comm.size)
        stream, planned, same = (int(each) for each in draw.integers(2, size=3))
        equal = counts[0] == counts[1] and not operation.apart
        in_place = operation.in_place or (equal and bool(same))
        x, out = (
            self._view(self._rooms[stream][side], counts[side], dtype)
            for side in (0, 1)
        )
        if in_place:
            x = out
        start, key = int(draw.integers(PERIOD)), (name, type_, op)
        contents = self._contents.setdefault(name, Contents(draw, comm))
        mine, expected = contents.of(operation, type_, op, counts[0], start)
        make = operation.plan if planned else operation.call
        call = make(comm, x, out, op, None)
        words = (
            f"{name} of {counts[0]} {type_} ({op}), {'in' if in_place else 'out of'} "
            f"place, {'planned' if planned else 'plain'}, {comm!r}"
        )
        source = x.view(_WORDS[dtype.itemsize])
        target = out.view(_WORDS[dtype.itemsize])
        given = self._on_device((*key, "input"), mine)
        ones = np.full(PERIOD, POISON, np.uint8).repeat(dtype.itemsize)
        poison = self._on_device(
            ("poison", dtype.itemsize), Tiled(ones.view(target.dtype), 0, PERIOD)
        )
        # An input must stay as it is.
        wanted = [] if in_place else [(source, *given)]
        first = 0
        for index, part in enumerate(expected):
            array = target[first : first + part.count]
            wanted.append((array, *self._on_device((*key, index), part)))
            first += part.count

        def enqueue(handle: int) -> None:
            on = 0 if SIMULATED else cuda.external_stream(handle)
            if not in_place:
                _fill[GRID, BLOCK, on](target, *poison)
            _fill[GRID, BLOCK, on](source, *given)
            call(handle)
            for each in wanted:
                _compare[GRID, BLOCK, on](*each, self._wrong, number)

        return SoakCall(words, name, stream, enqueue)

    def _view(self, rooms: Any, count: int, dtype: np.dtype[Any]) -> Any:
        """Return elements anywhere in a symmetric or an ordinary array.

        Each rank draws for itself, because no peer needs to know where its arrays are.
        """
        own, nbytes = self._own, count * dtype.itemsize
        shift = int(own.integers(MISALIGNED)) * dtype.itemsize
        first = int(own.integers((ROOM - nbytes - shift) // 16)) * 16 + shift
        return rooms[own.integers(2)][first : first + nbytes].view(dtype)

    def _on_device(self, key: Any, part: Tiled) -> tuple[Any, int]:
        """Return a pattern on the GPU, and the index in it of the first element."""
        if key not in self._patterns:
            words = np.ascontiguousarray(part.pattern).view(_WORDS[part.itemsize])
            self._patterns[key] = cuda.to_device(words)
        return self._patterns[key], part.start % PERIOD


@cuda.jit  # type: ignore[untyped-decorator]
def _fill(array: Any, pattern: Any, start: Any) -> None:
    for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
        array[i] = pattern[(start + i) % PERIOD]


@cuda.jit  # type: ignore[untyped-decorator]
def _compare(array: Any, pattern: Any, start: Any, wrong: Any, number: Any) -> None:
    for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
        if array[i] != pattern[(start + i) % PERIOD]:
            cuda.atomic.add(wrong, number, 1)


EVERY = 3 if SIMULATED else 8
"""Rounds from one failure to the next, if none is pending."""

LATEST = 0.5
"""Seconds after the beginning of a round in which a failure hits a rank."""


class Planned(ValueError):
    """The exception by which a rank leaves."""


class PlannedFailure(NamedTuple):
    """What happens to a rank.

    Attributes:
        kind: one of ``FAILURES``.
        rank: the rank of the communicator.
        at: where it happens, from 0 to 1 of what is possible.
        seconds: for how long the rank is stopped.
    """

    kind: str
    rank: int
    at: float
    seconds: float = 0


class Failures:
    """The failures of a job, and this rank's part in them.

    Args:
        job: the job.
        marks: the files of all ranks.
        world: this rank's number in the job.
        timeout: the deadline of calls in seconds.

    Attributes:
        pending: the failure that ranks are expected to notice; None: there is none.
        kills: the ranks that were killed, or will be.
    """

    def __init__(self, job: SoakJob, marks: JobMarks, world: int, timeout: float):
        self._random = random.Random(f"{job.seed} {job.number}")
        self._marks, self._world, self._timeout = marks, world, timeout
        self._place = marks.places[world]
        self._left: list[str] = []  # kinds that are drawn before any is drawn again
        self._thread: threading.Thread | None = None
        self._armed = self._owed = False
        self._comm: ns.Communicator | None = None
        self.pending: PlannedFailure | None = None
        self.kills = 0
        signal.signal(signal.SIGINT, self._on_interrupt)

    def draw(self, size: int, number: int, kill: bool) -> PlannedFailure | None:
        """Draw the failure of a round; equal on all ranks.

        Args:
            size: the number of ranks.
            number: of the round.
            kill: whether a rank is to be killed.
        """
        if not kill and (number % EVERY or size < 2):
            return None
        if not self._left:
            self._left = list(FAILURES[1:])
            self._random.shuffle(self._left)
        kind = FAILURES[0] if kill else self._left.pop()
        rank, at = self._random.randrange(size), self._random.random()
        # A short stop ends in time, and a long one passes the deadline.
        stops = (self._timeout / 5, self._timeout + 1)
        seconds = self._random.choice(stops) if kind == "stopped" else 0
        self.kills += kill
        return PlannedFailure(kind, rank, at, seconds)

    def begin(
        self, failure: PlannedFailure, comm: ns.Communicator, world: list[int]
    ) -> None:
        """Let a failure happen during the next calls.

        Args:
            failure: the failure.
            comm: the communicator.
            world: by its ranks, their numbers in the job.
        """
        self.pending, self._comm, self._owed = failure, comm, False
        mine = comm.rank == failure.rank
        target: Callable[..., None] | None = None
        arguments: tuple[Any, ...] = (failure.at * LATEST,)
        if failure.kind == "stopped":
            if comm.rank == (failure.rank + 1) % comm.size:
                target = self._stop
                arguments += world[failure.rank], failure.seconds
        elif mine:
            target = {
                "killed": self._kill,
                "aborted": self._abort,
                "interrupted": self._interrupt,
            }.get(failure.kind)
        self._thread = None
        if target is not None:
            self._thread = threading.Thread(target=target, args=arguments, daemon=True)
            self._thread.start()

    def raise_at(self, comm: ns.Communicator, step: int, steps: int) -> None:
        """Raise in this rank's step, if it is the one that raises there."""
        failure = self.pending
        if failure is None or failure.kind != "raised" or failure.rank != comm.rank:
            return
        if step >= int(failure.at * steps):
            self._count("raised")
            raise Planned("a rank of the soak raises")

    def is_over(self) -> bool:
        """Return whether this rank has done its part of a failure that may pass.

        Only a stop passes without a failure of the communicator.
        """
        if self.pending is None:
            return True
        thread = self._thread
        return self.pending.kind == "stopped" and not (thread and thread.is_alive())

    def explains(self, error: BaseException) -> bool:
        """Return whether the pending failure may have caused an error here."""
        if self.pending is None:
            return False
        if type(error) is SymmError:  # of a set-up call that another rank has left
            return "KeyboardInterrupt" in str(error)
        kinds = CollectiveError, ExchangeError, Planned, KeyboardInterrupt
        return isinstance(error, kinds)

    def end(self) -> None:
        """Forget the failure: all ranks have noticed it, or it has passed."""
        self.pending = None
        if self._thread is not None:
            self._thread.join()
        self._thread = self._comm = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let this rank be interrupted within the block, and nowhere else."""
        try:
            self._armed = True
            if self._owed:
                self._on_interrupt(signal.SIGINT, None)
            yield
        finally:
            self._armed = False

    def _count(self, kind: str) -> None:
        self._place.failures[FAILURES.index(kind)] += 1

    def _kill(self, delay: float) -> None:
        time.sleep(delay)
        self._count("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def _abort(self, delay: float) -> None:
        time.sleep(delay)
        self._count("aborted")
        if self._comm is not None:
            self._comm.abort("the soak aborts")

    def _interrupt(self, delay: float) -> None:
        # Again and again, because an exception in a finalizer is lost.
        while self.pending is not None:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)
            delay = LATEST

    def _on_interrupt(self, number: int, frame: object) -> None:
        if self.pending is None or self.pending.kind != "interrupted":
            return
        if not self._armed:
            self._owed = True
            return
        self._armed = self._owed = False
        self._count("interrupted")
        raise KeyboardInterrupt

    def _stop(self, delay: float, rank: int, seconds: float) -> None:
        time.sleep(delay)
        place = self._marks.places[rank]
        os.kill(place.pid, signal.SIGSTOP)
        place.failures[FAILURES.index("stopped")] += 1
        place.stopped += seconds  # of its step; it writes neither while it is stopped
        time.sleep(seconds)
        os.kill(place.pid, signal.SIGCONT)


PRODUCTS, PAUSES = 0.1, 0.02
"""The probabilities of a product, and of a pause of the host, before a call."""

LONGEST_PAUSE = 1e-3  # seconds

TOGETHER = 50
"""The most cycles in a round."""

WARM, ROUNDS = 10, 50
"""The rounds of a job's first lanes, and of later ones. After the first, the library's
caches have what they will have."""

LOADING = 0 if SIMULATED else 120
"""Seconds that a step may take longer because it compiles or loads kernels."""


class Soak:
    """What one rank does in a job.

    Args:
        world: mpi4py's communicator of all ranks.
        job: the job.
        marks: the files that the command reads.
    """

    def __init__(self, world: Any, job: SoakJob, marks: JobMarks):
        self._world, self._job, self._marks = world, job, marks
        self._place = marks.places[world.rank]
        self._watch = Watch(self._place)
        self._timeout = environment.timeout()
        self._set_up = environment.chosen_setup_timeout()
        self._failures = Failures(job, marks, world.rank, self._timeout)
        self._round = 0
        self._numbers: list[int] = []  # by rank of the communicator, in the job
        self._progress = 0.0  # of the job, by the first rank; from 0 to 1
        self._cycles = 0  # the same
        self._began = time.monotonic()

    def run(self) -> int:
        """Return the number of ranks that are left at the end. Collective."""
        self._watch.step("Communicator", self._set_up + LOADING)
        comm = ns.Communicator(self._world)
        while True:
            try:
                with comm:
                    self._play(comm)
                    self._watch.step("close", self._set_up)
                return int(comm.size)
            except BaseException as error:
                if not self._failures.explains(error):
                    raise
            comm = self._rebuilt(comm)

    def _rebuilt(self, comm: ns.Communicator) -> ns.Communicator:
        failure = self._failures.pending
        assert failure is not None
        # The others arrive after the deadline of the call in which they wait.
        self._watch.step("rebuild", self._timeout + self._set_up)
        left = comm.rebuild()
        self._place.rebuilds += 1
        expected = comm.size - (failure.kind == "killed")
        if left.size != expected:
            text = f"rebuild: expected {expected} ranks, got {left.size}"
            self._marks.found(self._world.rank, "ranks", f"{text}, after {failure}")
        self._failures.end()
        return left

    def _play(self, comm: ns.Communicator) -> None:
        """Make rounds until the job is done or a failure raises."""
        self._watch.step("exchange", self._set_up)
        mine = self._world.rank, self._round, self._progress, self._cycles
        ranks = self._exchange(comm, mine)
        self._numbers = [each[0] for each in ranks]
        self._round = max(each[1] for each in ranks)
        self._progress, self._cycles = ranks[0][2:]
        self._measure(comm)
        while not self._is_done(comm):
            self._play_lanes(comm)
            self._measure(comm)

    def _play_lanes(self, comm: ns.Communicator) -> None:
        """Make lanes, make some rounds on them, and close them."""
        self._watch.step("lanes", self._set_up + LOADING)
        lanes: list[Client] = []
        with ExitStack() as stack:
            # After the communicators have closed: freeing waits for their kernels.
            stack.callback(_clear, lanes)
            lanes.extend(self._lanes(comm, stack))
            product = new_product(comm.device.ordinal)
            for lane in lanes:  # the first product on a stream allocates
                with product.current(lane.handle):
                    product.call(lane.handle)
                lane.wait()
            for _ in range(WARM if self._round < WARM else ROUNDS):
                if not self._is_done(comm):
                    self._play_round(comm, lanes, product)
            self._watch.step("close", self._set_up)

    def _is_done(self, comm: ns.Communicator) -> bool:
        job, failures = self._job, self._failures
        if comm.size == 1 and self._world.size > 1:
            return True
        return (
            self._progress >= 1
            and self._cycles >= job.cycles
            and failures.kills >= job.kills
            and failures.pending is None
        )

    def _exchange(self, comm: ns.Communicator, mine: Any) -> list[Any]:
        """Return every rank's value. Collective."""
        return inside(comm).ranks.exchange.all_gather(mine, "soak")

    def _lanes(self, comm: ns.Communicator, stack: ExitStack) -> Iterator[Client]:
        """Make the lanes: twice all ranks, then parts, if these are two or more."""
        rank, size = comm.rank, comm.size
        colors = [0, 0, 0, 0]
        if size > 3:
            colors[2:] = rank % 2, min(rank // 2, size // 2 - 1)
        for number, color in enumerate(colors):
            part = comm.split(color)
            assert part is not None  # no rank is left out
            stack.enter_context(part)
            if not SIMULATED:
                names = [each for each in OPERATIONS if each in kernel_set.NAMES]
                for dtype, op in KINDS:
                    part.prepare(*names, dtypes=[TYPES[dtype]], ops=[op])
            seed = self._job.seed, self._job.number, self._round, number, color
            yield Client(part, seed, self._note)

    def _note(self, words: str) -> None:
        self._watch.step(words, self._timeout)

    def _play_round(
        self, comm: ns.Communicator, lanes: Sequence[Client], product: Product
    ) -> None:
        self._round += 1
        self._fail(comm)
        with self._failures.armed():
            self._make_cycles(comm)
            for lane in lanes:
                lane.draw()
                self._place.calls += lane.drawn
            with cuda.defer_cleanup():  # freeing waits for calls that wait for others
                self._make_calls(comm, lanes, product)
                for lane in lanes:
                    lane.wait()
            self._watch.step("results", self._timeout)
            words = [each for lane in lanes for each in lane.wrong()]
            self._watch.step("exchange", self._set_up)
            mine = self._progress_of_this_rank(), self._cycles, self._failures.is_over()
            ranks = self._exchange(comm, mine)
        self._place.wrong += len(words)
        for each in words:
            text = f"round {self._round}: {each}"
            self._marks.found(self._world.rank, "wrong", text)
        self._progress, self._cycles, _ = ranks[0]
        if all(over for *_, over in ranks):
            self._failures.end()

    def _fail(self, comm: ns.Communicator) -> None:
        """Begin the failure of this round, if it has one. Collective."""
        failures, job = self._failures, self._job
        if failures.pending is not None:
            return
        due = int(min(self._progress, 1) * job.kills)
        failure = failures.draw(comm.size, self._round, failures.kills < due)
        if failure is not None:
            failures.begin(failure, comm, self._numbers)

    def _make_cycles(self, comm: ns.Communicator) -> None:
        """Make communicators, use and close them; as many on all ranks."""
        job = self._job
        due = int(min(self._progress, 1) * job.cycles)
        if not job.calls and not job.seconds:
            due = job.cycles
        x = cuda.to_device(np.arange(1, 9, dtype=np.int32))
        for number in range(min(due - self._cycles, TOGETHER)):
            self._watch.step("cycle", self._set_up)
            whole = not job.kills and number % 2
            made = ns.Communicator(self._world) if whole else comm.dup()
            with made:
                found = made.all_reduce(x)
                made.synchronize()
                if (found.copy_to_host() != comm.size * np.arange(1, 9)).any():
                    self._place.wrong += 1
                    self._marks.found(self._world.rank, "wrong", f"cycle of {made!r}")
            self._cycles += 1
            self._place.cycles += 1

    def _make_calls(
        self, comm: ns.Communicator, lanes: Sequence[Client], product: Product
    ) -> None:
        """Make the lanes' calls in a random order."""
        # The simulator's calls return when they are done, so all ranks have one order.
        own = 0 if SIMULATED else self._world.rank
        order = random.Random(f"{self._job} {self._round} {own}")
        left = {lane: lane.steps() for lane in lanes}
        step, place = 0, self._place
        steps = 4 * len(lanes)  # fewer than there are
        while left:
            self._failures.raise_at(comm, step, steps)
            step += 1
            lane = order.choice([*left])
            if order.random() < PRODUCTS:
                with product.current(lane.handle):
                    product.call(lane.handle)
            if order.random() < PAUSES:
                time.sleep(order.uniform(0, LONGEST_PAUSE))
            made = next(left[lane], None)
            if made is None:
                del left[lane]
            else:
                place.calls += abs(made)
                place.replays += made < 0

    def _progress_of_this_rank(self) -> float:
        """Return the part of the job that is done, from 0 to 1 or more."""
        job = self._job
        if job.calls:
            return float(self._place.calls / job.calls)
        if job.seconds:
            return (time.monotonic() - self._began) / job.seconds
        return self._cycles / job.cycles if job.cycles else 1.0

    def _measure(self, comm: ns.Communicator) -> None:
        """Note memory and open files, while no lane exists. Collective."""
        gc.collect()  # what has failed has many cycles of references
        if self._round < WARM and self._progress < 1:
            return
        self._watch.step("measure", self._set_up)
        with comm.dup() as child:  # closing it frees what finalizers have deferred
            child.barrier()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        open_files = [*Path("/proc/self/fd").iterdir()]
        for when in (1,) if self._place.memory[0] else (0, 1):
            self._place.memory[when] = pages * resource.getpagesize()
            self._place.descriptors[when] = len(open_files)


def _clear(lanes: Sequence[Client]) -> None:
    for lane in lanes:
        lane.clear()


def main(argv: Sequence[str] | None = None) -> None:
    """Play a job as one rank. Collective.

    Args:
        argv: the folder of the marks, and the job as JSON.
    """
    folder, words = sys.argv[1:] if argv is None else argv
    world, job = MPI.COMM_WORLD, SoakJob(**json.loads(words))
    marks = JobMarks(Path(folder), world.size)
    place = marks.places[world.rank]
    with marks.stack(world.rank).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        place.pid = os.getpid()
        try:
            left = Soak(world, job, marks).run()
        except BaseException:
            marks.found(world.rank, "error", traceback.format_exc())
            raise
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    place.done = 1
    if left < world.size:  # MPI would wait for the ranks that have died
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
