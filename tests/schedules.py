"""Schedules of calls over several islands as data, and a machine that executes them.

A schedule is what one rank enqueues for a call: a list of the steps below. It needs no
other rank, so there may be as many islands as a test wants. The machine executes the
schedules of all ranks on host memory, in any order that the steps permit.
"""

import random
from collections import Counter, deque
from functools import reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from numba_symm import dtypes
from numba_symm.collectives.islands import moves
from numba_symm.collectives.islands.binder import STEPS
from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.islands.sizes import ON_GPUS
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.binding import Call
from numba_symm.launch.division import Places
from tests.expected import expected

SOURCE, TARGET, STAGING = 1 << 44, 1 << 45, 1 << 46  # addresses, equal on all ranks


class Within(NamedTuple):
    operation: Any
    call: Call


class Exchange(NamedTuple):
    sends: tuple
    receives: tuple
    beside: tuple
    island: bool = False  # by a kernel within the island


class Copy(NamedTuple):
    target: int
    source: int
    nbytes: int


class Pack(NamedTuple):
    whole: int
    spread: int
    shape: tuple
    apart: tuple
    packing: bool


class Combine(NamedTuple):
    element: Any
    op: str
    first: int
    stride: int
    own: int
    number: int


class Convert(NamedTuple):
    kinds: tuple
    source: int
    target: int
    count: int
    divide: bool


class Met(NamedTuple):
    pass


class Recording(Site):
    """A site whose steps are data."""

    def chunks(self, count, most):
        """Return the first two chunks and the last two: the others are like them."""
        firsts = range(0, count, most or 1)
        if len(firsts) > self.islands.most_chunks:
            firsts = [*firsts[:2], *firsts[-2:]]
        return [(first, min(most, count - first)) for first in firsts]

    @property
    def beside(self):
        return self

    def within(self, operation, call):
        return Within(operation, call)

    def between(self, what, sends, receives, beside=()):
        if not sends and not receives:
            return [*beside]
        return [Exchange(tuple(sends), tuple(receives), tuple(beside))]

    def messages(self, sends, receives):
        if not sends and not receives:
            return []
        peers = self.mine

        def whole(each):
            return each._replace(peer=peers[each.peer])

        sends, receives = tuple(map(whole, sends)), tuple(map(whole, receives))
        return [Exchange(sends, receives, (), True)]

    def copy(self, target, source, nbytes):
        return [] if target == source or nbytes == 0 else [Copy(target, source, nbytes)]

    def packed(self, whole, spread, shape, apart, packing=True):
        return [Pack(whole, spread, tuple(shape), tuple(apart), packing)]

    def met(self):
        return [Met()]

    def combined(self, carried, first, stride, own, number):
        assert stride % 16 == first % 16 == 0
        if number == 1:
            return []
        return [Combine(carried.element, carried.op, first, stride, own, number)]

    def finished(self, carried, source, target, count):
        kinds = carried.element, carried.call.element
        if count == 0:
            return []
        if kinds[0] == kinds[1] and carried.call.op != "avg":
            return self.copy(target, source, count * kinds[0].itemsize)
        return [Convert(kinds, source, target, count, carried.call.op == "avg")]

    def widened(self, carried, source, target, count):
        kinds = carried.call.element, carried.element
        if kinds[0] == kinds[1]:
            return [], source
        return [Convert(kinds, source, target, count, False)], target


def even(islands, ranks):
    """Return the ranks of islands of equally many ranks."""
    return tuple(tuple(range(i * ranks, (i + 1) * ranks)) for i in range(islands))


def of_sizes(*sizes):
    """Return the ranks of islands of those sizes."""
    ends = np.cumsum([0, *sizes])
    return tuple(tuple(range(a, b)) for a, b in pairwise(map(int, ends)))


class Job:
    """A job whose ranks exist as schedules only.

    Args:
        parts: the ranks of each island.
        sizes: the limits of its calls.
        most_chunks: with more chunks, some are left out.
    """

    def __init__(self, parts, sizes=ON_GPUS, most_chunks=1 << 30):
        self.parts, self.sizes, self.most_chunks = parts, sizes, most_chunks
        self.places = Places(parts)
        self.size = sum(map(len, parts))

    def site(self, rank):
        """Return a rank's site."""
        index, local = self.places.of[rank]
        islands = SimpleNamespace(
            parts=self.parts,
            places=self.places,
            world=SimpleNamespace(rank=rank, size=self.size),
            index=index,
            local=local,
            most_chunks=self.most_chunks,
        )
        end = SimpleNamespace(size=len(self.parts[index]))
        return Recording(islands, end, STAGING, sizes=self.sizes)

    def schedule(self, rank, name, count, kind="int64", op="sum", root=0, place=False):
        """Return a rank's steps of a call."""
        if name == "barrier":
            return moves.barrier(self.site(rank))
        operation = OPERATIONS[name]
        in_place = place or operation.in_place
        target = TARGET if not operation.at_root or rank == root else 0
        source = TARGET if in_place else SOURCE
        element = dtypes.element(np.dtype(kind), "test")
        call = Call(source, target, count, element, op, root)
        return STEPS[name](self.site(rank), call)


def flat(steps):
    """Yield all steps, also those beside exchanges."""
    for step in steps:
        yield step
        yield from flat(getattr(step, "beside", ()))


def exchanges(steps):
    """Return the exchanges between islands."""
    return [s for s in flat(steps) if isinstance(s, Exchange) and not s.island]


def launches(steps):
    """Return how many kernels and copies a rank enqueues, without the engine's."""
    return sum(not isinstance(s, Exchange) or s.island for s in flat(steps))


class Machine:
    """Executes the schedules of all ranks.

    Args:
        job: the job.
        nbytes: of each rank's input, and of its output.
        seed: of the order of what may happen in any order.
    """

    def __init__(self, job, nbytes, seed=0):
        self.job, self.random = job, random.Random(seed)
        room = {SOURCE: nbytes, TARGET: nbytes, STAGING: job.sizes.staging}
        self.memory = [
            {at: np.zeros(n, np.uint8) for at, n in room.items()}
            for _ in range(job.size)
        ]
        self.queues = {}
        self.sent = Counter()  # messages between islands, by rank
        self.nbytes = Counter()
        self.arrived = {}  # by island and number of a step, what its ranks passed

    def at(self, rank, address, nbytes):
        """Return memory of a rank."""
        base = max(b for b in self.memory[rank] if b <= address)
        start, whole = address - base, self.memory[rank][base]
        assert 0 <= start <= start + nbytes <= len(whole), (rank, hex(address), nbytes)
        return whole[start : start + nbytes]

    def values(self, rank, address, count, element):
        """Return elements of a rank's memory."""
        found = self.at(rank, address, count * element.itemsize)
        return np.frombuffer(found.tobytes(), element.dtype)

    def run(self, schedules):
        """Execute all ranks' steps; fail if ranks wait for each other."""
        self.passed = Counter()  # by rank, its steps within the island
        ranks = {rank: self._rank(rank, steps) for rank, steps in schedules.items()}
        while ranks:
            moved = False
            for rank in self.random.sample([*ranks], len(ranks)):
                for waiting in ranks[rank]:
                    if waiting:
                        break
                    moved = True
                else:
                    del ranks[rank]
                    moved = True
            assert moved, f"ranks {sorted(ranks)} wait for each other"
        assert not any(self.queues.values()), "messages that no rank receives"

    def _rank(self, rank, steps):
        for step in steps:
            yield from getattr(self, f"_{type(step).__name__.lower()}")(rank, step)
            yield False

    def _within(self, rank, step):
        yield from self._together(rank, step, self._reduced)

    def _met(self, rank, step):
        yield from self._together(rank, step, lambda island, steps: None)

    def _together(self, rank, step, done):
        island, local = self.job.places.of[rank]
        key = island, self.passed[rank]
        self.passed[rank] += 1
        steps = self.arrived.setdefault(key, {})
        steps[local] = step
        if len(steps) == len(self.job.parts[island]):
            done(self.job.parts[island], [steps[k] for k in range(len(steps))])
            steps["done"] = True
            yield False
        while "done" not in steps:
            yield True

    def _reduced(self, ranks, steps):
        (name,) = {step.operation.name for step in steps}
        operation = OPERATIONS[name]
        calls, size = [step.call for step in steps], len(steps)
        assert len({(c.count, c.element, c.op, c.root) for c in calls}) == 1, calls
        number = operation.shards(size) * calls[0].count
        element, op = calls[0].element, calls[0].op
        inputs = [
            self.values(rank, call.source, number, element)
            if call.source and (not operation.in_place or call.root == local)
            else np.zeros(number, element.dtype)
            for local, (rank, call) in enumerate(zip(ranks, calls, strict=True))
        ]
        for local, (rank, call) in enumerate(zip(ranks, calls, strict=True)):
            found = expected(
                *(operation, inputs, local, call.root),
                lambda each: folded(each, op),
                lambda n: np.full(n, 7, element.dtype),  # anything
                np.concatenate,
            )
            if found is not None:
                at = self.at(rank, call.target, found.nbytes)
                at[:] = found.view(np.uint8)

    def _exchange(self, rank, step):
        contents = [self.at(rank, p.address, p.nbytes).copy() for p in step.sends]
        for parcel, bytes_sent in zip(step.sends, contents, strict=True):
            assert parcel.peer != rank
            key = step.island, rank, parcel.peer
            self.queues.setdefault(key, deque()).append(bytes_sent)
            if not step.island:
                self.sent[rank] += 1
                self.nbytes[rank] += parcel.nbytes
        yield False
        halves = [self._received(rank, step), self._rank(rank, step.beside)]
        if self.random.random() < 0.5:
            halves.reverse()
        for half in halves:
            yield from half
        for parcel, bytes_sent in zip(step.sends, contents, strict=True):
            after = self.at(rank, parcel.address, parcel.nbytes)
            assert (after == bytes_sent).all(), "sent bytes were changed meanwhile"

    def _received(self, rank, step):
        for parcel in step.receives:
            key = step.island, parcel.peer, rank
            while not (queue := self.queues.get(key)):
                yield True
            found = queue.popleft()
            assert len(found) == parcel.nbytes, (rank, parcel, len(found))
            self.at(rank, parcel.address, parcel.nbytes)[:] = found
            yield False

    def _copy(self, rank, step):
        found = self.at(rank, step.source, step.nbytes).copy()
        self.at(rank, step.target, step.nbytes)[:] = found
        yield False

    def _pack(self, rank, step):
        *outer, run = step.shape
        whole = step.whole
        for index in np.ndindex(*outer):
            ends = whole, step.spread + int(np.dot(index, step.apart))
            to, from_ = ends if step.packing else ends[::-1]
            self.at(rank, to, run)[:] = self.at(rank, from_, run)
            whole += run
        yield False

    def _combine(self, rank, step):
        element, stride = step.element, step.stride
        count = stride // element.itemsize
        slots = [
            self.values(rank, step.first + i * stride, count, element)
            for i in range(step.number)
        ]
        found = folded(slots, step.op)
        at = step.first + step.own * stride
        self.at(rank, at, found.nbytes)[:] = found.view(np.uint8)
        yield False

    def _convert(self, rank, step):
        source, target = step.kinds
        found = self.values(rank, step.source, step.count, source)
        with np.errstate(all="ignore"):
            if step.divide:
                found = found / source.dtype.type(self.job.size)
            found = found.astype(target.dtype)
        self.at(rank, step.target, found.nbytes)[:] = found.view(np.uint8)
        yield False


def folded(each, op):
    """Return the reduction of sequences in their order."""
    function = {"sum": np.add, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        return reduce(function, each).astype(each[0].dtype)
