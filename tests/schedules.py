"""A machine that executes the schedules of all ranks of several islands on host memory.

It does so in any order that the steps permit.
"""

import random
from collections import Counter, deque

import numpy as np

from numba_symm.collectives.kernels import pack
from numba_symm.collectives.operations import OPERATIONS
from tests.expected import expected
from tests.island_schedules import SOURCE, STAGING, TARGET
from tests.operators import in_tree


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

    def _exchangestep(self, rank, step):
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

    def _copystep(self, rank, step):
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
        found = folded(dict(enumerate(slots)), step.op)
        if step.number > pack.MOST:  # which stores what it reduces first
            for i in range(0, step.number, pack.MOST):
                self.at(rank, step.first + i * stride, stride)[:] = 0xA5
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
    """Return the reduction of sequences, by number, by their tree."""
    function = {"sum": np.add, "max": np.maximum}[op]
    (dtype,) = {sequence.dtype for sequence in each.values()}
    with np.errstate(all="ignore"):
        return in_tree(function, each).astype(dtype)
