"""Messages that are drawn: in rings, in groups, as requests, between neighbours.

All ranks draw all messages of a round from a seed, and each one its own arrays and the
order of its calls. Messages of a pair of ranks match in order.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numba import cuda

from numba_symm import Request
from numba_symm.collectives.kernels.transfer import few_of
from numba_symm.collectives.protocols.workspace import (
    DEPTH,
    TILE_BYTES,
    channels_of,
    transfer_tiles,
)
from tests.drivers.calls import DTYPES, Arrays, Pool, failing
from tests.drivers.sides import rng

NOBODY = (None, MPI.PROC_NULL)
FORMS = ("ring", "ring", "group", "group", "neighbors")


def edges(size):
    """Return sizes of messages around those that need another chunk or channel."""
    channels, tiles = channels_of(size), transfer_tiles(size)
    few = few_of(channels, False)  # those of a message with one chunk in each
    in_tiles = [1, channels, few * tiles, channels * tiles, channels * tiles * DEPTH]
    whole = [TILE_BYTES * number for number in in_tiles]
    found = {0, 1, 3, *(n + d for n in whole for d in (-1, 0, 1)), 3 * whole[-1] + 5}
    return sorted(n for n in found if n >= 0)


class Message(NamedTuple):
    """A message.

    Attributes:
        source: who sends it; None: nobody.
        dest: who receives it; None: nobody.
        count: its elements.
        room: those of the receiver's array, which asks for the number if it has more.
        key: of its contents.
    """

    source: int | None
    dest: int | None
    count: int
    room: int
    key: tuple

    def content(self, dtype, step):
        lot = np.random.default_rng([*self.key, step])
        return np.frombuffer(lot.bytes(self.count * dtype.itemsize), dtype)


class Round:
    """The messages of all ranks in one call of each, or in one group."""

    def __init__(self, comm, pool, *seed):
        self.comm, self.seed, self.draw = comm, seed, rng(*seed)
        self.form = self.draw.choice(FORMS)
        self.kind = self.draw.choice([*DTYPES])
        self.dtype = DTYPES[self.kind]
        self.planned, self.own = self.draw.random() < 0.3, rng(*seed, comm.rank)
        self.arrays = Arrays(pool, self.own, self.dtype, False)
        self.messages = getattr(self, "_" + self.form)()
        self.received, self.checks, self.sums = [], [], []

    def run(self):
        """Make the calls, those of a plan twice, with other contents."""
        getattr(self, "_make_" + self.form)()

    def check(self):
        """Compare what has arrived, and what is around it."""
        for check in self.checks:
            check()

    def _message(self, source, dest, number):
        count = self.draw.randrange(200)
        if self.draw.random() < 0.4:
            count = self.draw.choice(edges(self.comm.size)) // self.dtype.itemsize
        room = count
        if self.draw.random() < 0.3 and len(self.comm.islands) == 1:
            room += self.draw.choice([0, 1, 7])
        return Message(source, dest, count, room, (*self.seed, number))

    # A message from each rank, along a ring or a line.

    def _ring(self):
        order, ends = [*range(self.comm.size)], self.draw.random() < 0.3
        self.draw.shuffle(order)
        found = []
        for number, source in enumerate(order):
            dest = order[(number + 1) % len(order)]
            if ends and number == 0:
                found.append(self._message(source, None, 98))
                found.append(self._message(None, dest, 99))
            else:
                found.append(self._message(source, dest, number))
        return found

    def _make_ring(self):
        rank = self.comm.rank
        (sent,) = [each for each in self.messages if each.source == rank]
        (taken,) = [each for each in self.messages if each.dest == rank]
        x, out, more = self._source(sent), *self._room(taken)
        peers = {"dst": self._peer(sent.dest), "src": self._peer(taken.source)}
        if not self.planned:
            assert self.comm.sendrecv(x, out=out, **peers, **more) is out
            return
        plan = self.comm.sendrecv_init(x, out=out, **peers, **more)
        plan()
        self.arrays.write(x, sent.content(self.dtype, 1))
        self.step = 1
        plan()

    # Messages between any ranks, to themselves, too, which progress together.

    def _group(self):
        number = self.draw.randrange(1, 2 * self.comm.size + 1)
        ranks = range(self.comm.size)
        pairs = [(self.draw.choice(ranks), self.draw.choice(ranks))] * 2
        while len(pairs) < number:
            pairs.append((self.draw.choice(ranks), self.draw.choice(ranks)))
        self.reduces = self.draw.random() < 0.3
        return [self._message(*pair, n) for n, pair in enumerate(pairs[:number])]

    def _make_group(self):
        """Make this rank's calls in any order; those of a pair stay in order."""
        rank, queues, written = self.comm.rank, {}, []
        for each in self.messages:
            if each.source == rank:
                queues.setdefault(("to", each.dest), []).append(each)
            if each.dest == rank:
                queues.setdefault(("from", each.source), []).append(each)
        if self.reduces:
            queues["all"] = [None]
        with (self.comm.group_init if self.planned else self.comm.group)() as plan:
            while queues:
                key = self.own.choice([*queues])
                each = queues[key].pop(0)
                if not queues[key]:
                    del queues[key]
                if key == "all":
                    self.sums.append(self.comm.all_reduce(self._ranks()))
                elif key[0] == "to":
                    x = self._source(each)
                    written.append((x, each))
                    self.comm.send(x, dst=each.dest)
                else:
                    out, more = self._room(each)
                    assert self.comm.recv(out, src=each.source, **more) is out
        if self.planned:
            plan()
            for x, each in written:
                self.arrays.write(x, each.content(self.dtype, 1))
            self.step = 1
            plan()
        total = sum(range(self.comm.size))
        self.checks += [lambda y=y: self._is(y, total) for y in self.sums]

    def _ranks(self):
        return cuda.to_device(np.full(3, self.comm.rank))

    @staticmethod
    def _is(y, total):
        assert (y.copy_to_host() == total).all(), "the sum in the group"

    # Collectives between neighbours.

    def _neighbors(self):
        ranks = range(self.comm.size)
        number = self.draw.randrange(3 * self.comm.size)
        self.gathers = self.draw.random() < 0.5
        self.count = self.draw.choice([0, 1, 7, 60])
        return [
            (self.draw.choice(ranks), self.draw.choice(ranks)) for _ in range(number)
        ]

    def _sides(self, rank):
        """Return where a rank sends to, and where it receives from, in any order."""
        draw, sides = rng(*self.seed, "order", rank), []
        for this, other in ((0, 1), (1, 0)):
            peers = [each[other] for each in self.messages if each[this] == rank]
            peers += [draw.choice(NOBODY)] * (draw.random() < 0.2)
            draw.shuffle(peers)
            sides.append(peers)
        return sides

    def _make_neighbors(self):
        rank, count = self.comm.rank, self.count
        sides = [self._sides(each) for each in range(self.comm.size)]
        dests, sources = sides[rank]
        inputs = []
        for each, (to, _) in enumerate(sides):
            whole = count * (1 if self.gathers else len(to))
            message = Message(each, None, whole, 0, (*self.seed, each))
            inputs.append(message.content(self.dtype, 0))
        name = "neighbor_all_gather" if self.gathers else "neighbor_all_to_all"
        x, out = self.arrays.of(inputs[rank]), self._nothing(count * len(sources))
        given = {"sources": sources, "destinations": dests, "out": out}
        if self.planned:
            plan = getattr(self.comm, name + "_init")(x, **given)
            plan()
            assert plan() is out
        else:
            assert getattr(self.comm, name)(x, **given) is out
        wanted, met = [], {}
        for source in sources:
            if source in NOBODY:
                wanted.append(self._untouched(count))
                continue
            nth = met[source] = met.get(source, -1) + 1
            at = [k for k, dest in enumerate(sides[source][0]) if dest == rank][nth]
            first = 0 if self.gathers else at * count
            wanted.append(inputs[source][first : first + count])
        self._has_later(out, b"".join(each.tobytes() for each in wanted))

    def _has_later(self, array, text):
        self.checks.append(lambda: self._has(array, text))

    def _has(self, array, text):
        assert self.arrays.read(array).tobytes() == text, "other bytes"

    # Arrays.

    step = 0

    def _untouched(self, count):
        return np.full(count * self.dtype.itemsize, 0xA5, np.uint8).view(self.dtype)

    def _nothing(self, count):
        return self.arrays.of(self._untouched(count))

    def _peer(self, rank):
        if rank is None:
            return self.own.choice(NOBODY)
        return np.uint8(rank) if self.own.random() < 0.3 else rank

    def _source(self, message):
        return self.arrays.of(message.content(self.dtype, 0))

    def _room(self, message):
        """Return an array for a message, and an argument for its number of elements."""
        out, count = self._nothing(message.room), None
        alone = len(self.comm.islands) == 1
        if message.room > message.count or (message.source is None and alone):
            count = cuda.to_device(np.full(1, -1))
        self.checks.append(lambda: self._arrived(message, out, count))
        return out, {} if count is None else {"count": count}

    def _arrived(self, message, out, count):
        sent = 0 if message.source is None else message.count
        content = message.content(self.dtype, self.step)[:sent].tobytes()
        rest = self._untouched(message.room - sent).tobytes()
        self._has(out, content + rest)
        assert count is None or count.copy_to_host()[0] == sent, "another count"


class Requests(Round):
    """Messages by isend and irecv beside an all-reduce, done in any order."""

    def __init__(self, comm, pool, *seed):
        super().__init__(comm, pool, *seed)
        self.form = "group"
        self.messages = [each for each in self._group() if each.source != each.dest]

    def _make_group(self):
        comm, rank, queues = self.comm, self.comm.rank, {}
        for each in self.messages:
            if each.source == rank:
                send = partial(comm.isend, self._source(each), dst=each.dest)
                queues.setdefault(("to", each.dest), []).append(send)
            if each.dest == rank:
                out, more = self._room(each)
                receive = partial(comm.irecv, out, src=each.source, **more)
                queues.setdefault(("from", each.source), []).append(receive)
        ranks, out = self._ranks(), self._ranks()  # allocated before a request waits
        pending = [comm.isend(ranks, dst=None)]
        while queues := {key: each for key, each in queues.items() if each}:
            pending.append(queues[self.own.choice([*queues])].pop(0)())
        total = comm.all_reduce(ranks, out=out)
        self.own.shuffle(pending)
        while pending:
            how = self.own.choice(["any", "stream", "host"])
            if how == "any":
                pending.pop(Request.wait_any(pending))
            elif how == "stream":
                pending.pop().wait()
            else:
                pending.pop().synchronize()
        self.checks.append(lambda: self._is(total, sum(range(comm.size))))


def run(comm, seed, first, last, kind=Round):
    """Make rounds of messages of a seed, some without a wait; check them."""
    pool, made = Pool(comm, 2 * edges(comm.size)[-1]), []
    for step in range(first, last):
        made.append(kind(comm, pool, seed, step))
        made[-1].run()
        if step % 3 == 2 or step == last - 1:
            comm.synchronize()
            for each in made:
                with failing((each.form, each.kind, each.seed, each.messages)):
                    each.check()
            made.clear()
            pool.reset()
