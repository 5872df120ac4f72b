"""One rank of ``numba-symm soak``: calls, cycles and failures, each with a deadline.

    python -m numba_symm.bench.soak FOLDER JOB

A *lane* is a communicator with two streams. In each round, every lane draws calls, the
same on all its ranks, and makes each once. So all kernels are loaded before the lanes
run side by side, because loading may wait for calls that wait for this rank. Then each
rank makes the calls of all lanes many times, in an order of its own. Products, pauses
and replays of a graph are between them. The host waits only at the end of a round.

A failure ends all lanes on all ranks. Those that are left rebuild the communicator,
make new lanes, and go on with the next round. An error without a failure is a fault.
"""

import faulthandler
import gc
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import environment
from numba_symm.bench import soak_failures
from numba_symm.bench.operations import OPERATIONS, TYPES
from numba_symm.bench.product import Product, new_product
from numba_symm.bench.soak_calls import KINDS, Client
from numba_symm.bench.soak_failures import Failures
from numba_symm.bench.soak_marks import FAILURES, JobMarks, SoakJob, Watch
from numba_symm.collectives import kernel_set
from numba_symm.collectives.communicator import inside
from numba_symm.environment import SIMULATED

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
            product = new_product(comm.device.ordinal, 0)
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
        if failure is None:
            return
        if not soak_failures.refuses(failure):
            failures.begin(failure, comm, self._numbers)
            return
        self._watch.step(failure.kind, 4 * self._set_up)
        wrong = soak_failures.refuse(comm, failure)
        if wrong:
            self._marks.found(self._world.rank, "refusal", wrong)
        if comm.rank == failure.rank:
            self._place.failures[FAILURES.index(failure.kind)] += 1

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
