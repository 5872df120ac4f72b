"""Collectives of a program: all forms, in any number at a time, in place, with gaps."""

from functools import partial

import numpy as np
from mpi4py import MPI as plain

from tests.drivers.messages import drawn_count
from tests.drivers.sides import KINDS, Layout, content, rng, untouched
from tests.drivers.waiting import Pending

OPERATORS = {
    "i": ["SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"],
    "f": ["SUM", "PROD", "MIN", "MAX"],
    "c": ["SUM", "PROD"],
}
OPERATORS["u"] = OPERATORS["i"][1:]  # Open MPI's sums of bytes do not wrap
FORMS = ("blocking", "nonblocking", "nonblocking", "persistent")


class Argument:
    """An array of a call, and how the call names its elements.

    Args:
        phase: the phase.
        layout: where they are.
        key: of the contents; None: nothing has been written.
    """

    def __init__(self, phase, layout, key=None):
        kind = layout.kind
        host = untouched(layout.room, kind)
        if key is not None:
            host = content(key, layout.room, kind)
        self.array = phase.side.array(host)
        self.spec = layout.spec(self.array)


class Places:
    """Items for each rank, in any order, with gaps: what a v form names.

    Args:
        draw: the generator.
        counts: of items for each rank.
        kind: the dtype of an item.
    """

    def __init__(self, draw, counts, kind):
        self.kind, self.counts, self.displs, end = kind, counts, [0] * len(counts), 0
        order = [*range(len(counts))]
        self._dense = draw.random() < 0.3
        if not self._dense:
            draw.shuffle(order)
        for rank in order:
            end += 0 if self._dense else draw.randrange(3)
            self.displs[rank] = end
            end += counts[rank]
        self.room = end + (0 if self._dense else draw.randrange(4))
        self._basic = plain.Datatype.fromcode(np.dtype(kind).char)

    def spec(self, array):
        if self._dense:
            return [array, self.counts]
        return [array, (self.counts, self.displs), self._basic]


class Typed(Places):
    """Such items, with a type for each rank, and displacements in bytes."""

    def spec(self, array):
        size = self._basic.size
        types = [self._basic] * len(self.counts)
        return [array, (self.counts, [size * each for each in self.displs]), types]


class Collectives:
    """A rank's part of a phase of collectives, some of them at a time."""

    def __init__(self, side, seed):
        self.side, self.seed, self.draw = side, seed, rng(*seed)
        self.comm = side.comms[self.draw.randrange(len(side.comms))]
        self.rank, self.size = self.comm.rank, self.comm.size
        self.pending = Pending(side, rng(*seed, "order", side.comms[0].rank))
        self.persistent, self.used, self.number = [], [], 0

    def run(self):
        for _ in range(1 + self.draw.randrange(4)):
            self.number += 1
            self._call()
            self.pending.step()
        self.pending.finish()
        for request in self.persistent:
            request.Free()
        for array in self.used:
            self.side.note("afterwards", self.side.read(array).tobytes())

    def _call(self):
        self.kind, self.unit = self.draw.choice(KINDS), self.draw.choice([1, 2, 6])
        self.root, self.form = self.draw.randrange(self.size), self.draw.choice(FORMS)
        self.in_place = self.draw.random() < 0.25
        self.count = drawn_count(self.draw, self.unit) // 4 // self.unit * self.unit
        makes = [self._moved, self._reduced, self._scattered, self._spread]
        name, args, result = self.draw.choice(makes)()
        self._start(name, args, result)

    def _start(self, name, args, result):
        """Make the call, and note its result when it has one."""
        form = self.form
        done = partial(self._done, name, form, result)
        if form == "blocking":
            getattr(self.comm, name)(*args)
            done(None)
            return
        if form == "nonblocking":
            request = getattr(self.comm, "I" + name.lower())(*args)
        else:
            request = getattr(self.comm, name + "_init")(*args)
            self.persistent.append(request)
            request.Start()
            if self.draw.random() < 0.5:
                request.Wait()
                request.Start()
        self.pending.add(request, done, receives=True)

    def _done(self, name, form, result, status):
        if result is not None:
            self.side.note(name, form, self.side.read(result).tobytes())

    def _layout(self, count, derived=True, blocks=1):
        every = count * blocks
        return Layout(self.draw, every, self.kind, self.unit, derived, blocks)

    def _argument(self, layout, given):
        key = (*self.seed, self.number, self.rank)
        found = Argument(self, layout, key if given else None)
        self.used.append(found.array)
        return found

    def _ends(self, sent, received, sends=True, receives=True, in_place=None):
        """Return both arguments of a call, and the array with the result.

        Args:
            sent: where the elements are that a rank sends.
            received: where those are that it receives.
            sends: whether this rank sends any.
            receives: whether it receives any.
            in_place: which argument is the only one of this rank, if the call is in
                place; None: there is no such form.
        """
        if self.in_place and in_place is not None:
            layout = (sent, received)[in_place]
            only = self._argument(layout, True)
            args = [plain.IN_PLACE, plain.IN_PLACE]
            args[in_place] = only.spec
            return args, only.array
        first = self._argument(sent, True)
        second = self._argument(received, False)
        args = [first.spec if sends else None, second.spec if receives else None]
        return args, second.array if receives else None

    def _moved(self):
        """Data movement of equal parts, of derived types, too."""
        name = self.draw.choice(["Bcast", "Gather", "Scatter", "Allgather", "Alltoall"])
        own, root = self._layout(self.count), self.rank == self.root
        if name == "Bcast":
            only = self._argument(own, True)
            return name, (only.spec, self.root), only.array
        sent = self._layout(self.count, blocks=self.size if name == "Alltoall" else 1)
        whole = self._layout(self.count, blocks=self.size)
        if name == "Gather":
            at = 1 if root else None
            args, out = self._ends(sent, whole, receives=root, in_place=at)
        elif name == "Scatter":
            at = 0 if root else None
            args, out = self._ends(whole, sent, sends=root, in_place=at)
        else:
            args, out = self._ends(sent, whole, in_place=1)
        more = (self.root,) if name in ("Gather", "Scatter") else ()
        return name, (*args, *more), out

    def _operator(self, alone=False):
        """Return an operator; a logical one leaves an input that is alone in MPI."""
        names = OPERATORS[np.dtype(self.kind).kind]
        if alone or self.size == 1:
            names = [each for each in names if each[0] != "L"]
        return getattr(plain, self.draw.choice(names))

    def _reduced(self):
        """Reductions of equal inputs."""
        names = ["Reduce", "Allreduce", "Scan", "Exscan", "Reduce_scatter_block"]
        name = self.draw.choice(names)
        op = self._operator(alone="scan" in name.lower())
        many = self.size if name == "Reduce_scatter_block" else 1
        sent = self._layout(self.count, derived=False, blocks=many)
        received = self._layout(self.count, derived=False)
        root = self.rank == self.root or name != "Reduce"
        self.in_place &= many == 1  # which part MPI leaves is not determined
        if name == "Exscan" and self.form != "blocking":
            self.in_place = False  # Open MPI 5 stores addresses
        args, out = self._ends(
            sent, received, receives=root, in_place=1 if root else None
        )
        if name == "Exscan" and self.rank == 0:  # MPI leaves what is there, or not
            out = None
            self.used.pop()
        more = (op, self.root) if name == "Reduce" else (op,)
        return name, (*args, *more), out

    def _counts(self):
        most = self.draw.choice([2, 9, 200])
        return [self.draw.randrange(most) for _ in range(self.size)]

    def _scattered(self):
        """Movement and reduction of parts of several sizes."""
        names = ["Gatherv", "Scatterv", "Allgatherv", "Reduce_scatter"]
        name, counts = self.draw.choice(names), self._counts()
        own = self._layout(counts[self.rank], derived=False)
        whole, root = Places(self.draw, counts, self.kind), self.rank == self.root
        if name == "Reduce_scatter":
            whole = self._layout(sum(counts), derived=False)
            args, out = self._ends(whole, own)
            return name, (*args, counts, self._operator()), out
        if name == "Gatherv":
            at = 1 if root else None
            args, out = self._ends(own, whole, receives=root, in_place=at)
        elif name == "Scatterv":
            at = 0 if root else None
            args, out = self._ends(whole, own, sends=root, in_place=at)
        else:
            args, out = self._ends(own, whole, in_place=1)
        return name, (*args, self.root)[: 2 if name == "Allgatherv" else 3], out

    def _spread(self):
        """Exchanges of parts of several sizes."""
        name = self.draw.choice(["Alltoallv", "Alltoallw"])
        if self.size == 1:  # Open MPI 5 reads and writes at other displacements
            name = "Alltoallv"
        kind = Places if name == "Alltoallv" else Typed
        counts = [self._counts() for _ in range(self.size)]
        if name == "Alltoallw" and self.form != "blocking":
            self.in_place = False  # Open MPI 5 waits for ever if counts are 0
        if self.in_place:  # both ranks of a pair have as many
            for a in range(self.size):
                for b in range(a):
                    counts[a][b] = counts[b][a]
        places = [
            (
                kind(self.draw, counts[rank], self.kind),
                kind(self.draw, [each[rank] for each in counts], self.kind),
            )
            for rank in range(self.size)
        ]
        args, out = self._ends(*places[self.rank], in_place=1)
        return name, tuple(args), out
