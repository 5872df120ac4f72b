"""One-sided calls of a program, in epochs of every kind."""

import numpy as np
from mpi4py import MPI as plain

from tests.drivers.sides import Layout, content, rng, untouched

SLOT = 24  # elements of a rank's memory that one origin stores into, in an epoch
KIND = np.dtype("i4")
EPOCHS = ("fence", "lock", "lock_all", "groups")
OPERATORS = ("SUM", "PROD", "MIN", "MAX", "BXOR")  # in any order, with equal results


class Windows:
    """A rank's part of a phase on a window.

    Each origin has a part of every rank's memory to itself, for stores and for what
    returns the contents. In another part, all origins accumulate with one operator.
    """

    def __init__(self, side, seed):
        self.side, self.seed, self.draw = side, seed, rng(*seed)
        self.comm = side.comms[self.draw.randrange(len(side.comms))]
        self.rank, self.size = self.comm.rank, self.comm.size
        self.mine = rng(*seed, "order", side.comms[0].rank)
        self.results, self.number, self.requests = [], 0, []

    def run(self):
        self.unit = self.draw.choice([1, KIND.itemsize])
        nbytes = KIND.itemsize * SLOT * (self.size + 1)
        made = self.side.MPI.Win
        allocate = made.Allocate_device if self.side.on_device else made.Allocate
        self.win = allocate(nbytes, self.unit, comm=self.comm)
        host = content((*self.seed, self.rank), nbytes // KIND.itemsize, KIND)
        memory = self.win.array if self.side.on_device else self.win.tomemory()
        self.memory = memory
        if self.side.on_device:
            memory.copy_to_device(host.view(np.uint8))
        else:
            memory[:] = host.tobytes()
        self.comm.Barrier()
        for _ in range(1 + self.draw.randrange(3)):
            self.op = getattr(plain, self.draw.choice(OPERATORS))
            self.taken = [0] * self.size
            getattr(self, "_" + self.draw.choice(EPOCHS))()
            self.comm.Barrier()
            self._note()
            self.comm.Barrier()
        self.win.Free()

    def _note(self):
        found = self.memory.copy_to_host() if self.side.on_device else self.memory
        self.side.note("memory", bytes(found))
        for array in self.results:
            self.side.note("result", self.side.read(array).tobytes())
        self.results.clear()

    # Epochs.

    def _fence(self):
        self.win.Fence()
        for _ in range(self.mine.randrange(4)):
            self._access(self.mine.randrange(self.size), requests=False)
        self.win.Fence()

    def _lock(self):
        for _ in range(self.mine.randrange(3)):
            target = self.mine.randrange(self.size)
            kind = self.mine.choice([plain.LOCK_SHARED, plain.LOCK_EXCLUSIVE])
            self.win.Lock(target, kind)
            for _ in range(self.mine.randrange(3)):
                self._access(target)
                if self.mine.random() < 0.5:
                    self.win.Flush(target)
                    self.taken[target] = 0
            self._waited()
            self.win.Unlock(target)

    def _lock_all(self):
        self.win.Lock_all()
        for _ in range(self.mine.randrange(4)):
            self._access(self.mine.randrange(self.size))
            self.mine.choice([self.win.Flush_all, self.win.Flush_local_all])()
        self._waited()
        self.win.Unlock_all()

    def _groups(self):
        """A ring: each rank lets the one on its left access its memory."""
        everyone = self.win.Get_group()
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        groups = everyone.Incl([left]), everyone.Incl([right])
        self.win.Post(groups[0])
        self.win.Start(groups[1])
        for _ in range(self.mine.randrange(3)):
            self._access(right, requests=False)
        self.win.Complete()
        self.win.Wait()
        for group in (everyone, *groups):
            group.Free()

    def _waited(self):
        for request in self.requests:
            request.Wait()
        self.requests.clear()

    # Accesses.

    def _access(self, target, requests=True):
        """Access elements that this epoch has not accessed: their order is open."""
        count = self.mine.randrange(7)
        self.number += 1
        if self.taken[target] + count > SLOT:
            return
        calls = [self._moved, self._accumulate, self._returned, self._single]
        self.mine.choice(calls)(target, count, requests)

    def _target(self, target, count):
        """Return a target argument for the next elements of this rank's part."""
        displ = (SLOT * self.rank + self.taken[target]) * KIND.itemsize // self.unit
        self.taken[target] += count
        return [displ, count, plain.INT]

    def _array(self, layout, given):
        host = untouched(layout.room, KIND)
        if given:
            key = (*self.seed, self.rank, self.number, len(self.results))
            host = content(key, layout.room, KIND)
        self.results.append(self.side.array(host))
        return layout.spec(self.results[-1])

    def _origin(self, count, given=True):
        return self._array(Layout(self.mine, count, KIND, derived=False), given)

    def _call(self, name, requests, *args):
        if requests and self.mine.random() < 0.3:
            self.requests.append(getattr(self.win, "R" + name.lower())(*args))
        else:
            getattr(self.win, name)(*args)

    def _moved(self, target, count, requests):
        name = self.mine.choice(["Put", "Get"])
        origin = self._origin(count, name == "Put")
        self._call(name, requests, origin, target, self._target(target, count))

    def _accumulate(self, target, count, requests):
        first = SLOT * self.size + self.mine.randrange(SLOT - count)
        place = [first * KIND.itemsize // self.unit, count, plain.INT]
        self._call("Accumulate", requests, self._origin(count), target, place, self.op)

    def _returned(self, target, count, requests):
        op = self.mine.choice([plain.SUM, plain.MAX, plain.REPLACE, plain.NO_OP])
        result, place = self._origin(count, False), self._target(target, count)
        args = self._origin(count), result, target, place, op
        self._call("Get_accumulate", requests, *args)

    def _single(self, target, count, requests):
        if self.taken[target] == SLOT:
            return
        result, displ = self._one(False), self._target(target, 1)[0]
        if self.mine.random() < 0.5:
            args = self._one(True), result, target, displ
            self.win.Fetch_and_op(*args, self.mine.choice([plain.SUM, plain.REPLACE]))
        else:
            self.win.Compare_and_swap(
                self._one(True), self._one(True), result, target, displ
            )

    def _one(self, given):
        found = Layout(self.mine, 1, KIND, derived=False)
        found.displ, found.room = 0, 1
        return self._array(found, given)
