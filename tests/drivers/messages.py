"""Messages of a program: sends, receives and probes of all ranks, in any order."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from mpi4py import MPI as plain
from mpi4py.MPI import ANY_SOURCE, ANY_TAG, PROC_NULL

from tests.drivers.matching import all_matched
from tests.drivers.sides import KINDS, SMALL, Layout, content, rng, untouched
from tests.drivers.waiting import Pending

MOST = 5  # messages to a rank: the explorer of matchings takes milliseconds
NEVER = 77  # a tag that no message has
SENDS = ("Send", "Isend", "Issend", "Bsend", "Ibsend", "Rsend", "Send_init")
BUFFERED = {"Send": "Bsend", "Rsend": "Bsend", "Isend": "Ibsend"}
BUFFERED["Send_init"] = "Bsend_init"
NONBLOCKING = ("Irecv", "Recv_init")
RECEIVES = (*NONBLOCKING, "Recv", "Probe", "Iprobe", "Mprobe", "Improbe", "Imrecv")


@dataclass
class Sent:
    source: int
    dest: int
    tag: int
    how: str
    layout: Layout
    key: tuple


@dataclass
class Wanted:
    number: int
    source: int
    tag: int
    how: str
    layout: Layout
    alone: bool
    cancels: bool


def drawn_count(draw, unit):
    """Return a number of elements, around where messages become large, or none."""
    most = draw.choice([0, 1, 7, 40, 400, 3000])
    return unit * draw.randrange(most // unit + 1)


def drawn(seed, size):
    """Return the kind of elements, those of a derived type, and all messages."""
    draw = rng(*seed)
    kind, unit = draw.choice(KINDS), draw.choice([1, 2, 6])
    tags = draw.choice([[0], [0, 1], [0, 1, 2, 32767]])
    sent, to = [], dict.fromkeys(range(size), 0)
    for number in range(draw.randrange(4 * size)):
        dest = draw.randrange(size)
        if to[dest] < MOST:
            to[dest] += 1
            layout = Layout(draw, drawn_count(draw, unit), kind, unit)
            how, source = draw.choice(SENDS), draw.randrange(size)
            key = (*seed, number)
            sent.append(Sent(source, dest, draw.choice(tags), how, layout, key))
    return kind, unit, sent


def wanted_by(rank, seed, kind, unit, sent):
    """Return a rank's receives, which surely end."""
    draw = rng(*seed, rank)
    to_me = [each for each in sent if each.dest == rank]
    messages, largest = {}, max([unit, *(each.layout.count for each in to_me)])
    for each in to_me:
        messages.setdefault(each.source, []).append(each.tag)
    to_me = draw.sample(to_me, len(to_me))
    # Open MPI does not report that a message of the rank itself was too long.
    others = [at for at, each in enumerate(to_me) if each.source != rank]
    short = {number for number in others if draw.random() < 0.15}
    patterns = [
        (
            ANY_SOURCE if draw.random() < 0.4 and number not in short else each.source,
            ANY_TAG if draw.random() < 0.4 else each.tag,
        )
        for number, each in enumerate(to_me)
    ]
    while not all_matched(messages, patterns):
        number = draw.randrange(len(patterns))
        patterns[number] = ANY_SOURCE, ANY_TAG
        short.discard(number)
    found = []
    for number, (source, tag) in enumerate(patterns):
        alone = number in short
        room = unit * draw.randrange(largest // unit + 1) if alone else largest
        layout = Layout(draw, room, kind, unit)
        if alone:  # Open MPI writes beyond the items if the message is too long
            layout.widen(8 * largest)
        how, cancels = draw.choice(RECEIVES), draw.random() < 0.1
        found.append(Wanted(number, source, tag, how, layout, alone, cancels))
    return found


class Messages:
    """A rank's part of a phase of messages."""

    def __init__(self, side, seed):
        self.side, self.seed = side, seed
        self.draw = rng(*seed, "order", side.comms[0].rank)
        self.comm = side.comms[rng(*seed, "comm").randrange(len(side.comms))]
        self.rank = self.comm.rank
        self.pending = Pending(side, self.draw)
        self.with_host = rng(*seed, "host").random() < 0.3
        self.rooms, self.persistent, self.lost = [], [], 0

    def run(self):
        self.kind, self.unit, sent = drawn(self.seed, self.comm.size)
        args = self.seed, self.kind, self.unit, sent
        wanted = wanted_by(self.rank, *args)
        mine = [each for each in sent if each.source == self.rank]
        largest = [e.layout.count for e in sent if e.dest == self.rank]
        self.largest = max([self.unit, *largest])
        self._before_and_with_sends(wanted, mine)
        if self.draw.random() < 0.3:
            self._of_nobody()
        if self.draw.random() < 0.3:
            self._never()
        if self.with_host:
            self._between_hosts()
        for each in wanted:
            if self.draw.random() < 0.5:
                self.pending.step()
            self.receive(each)
        self.pending.finish()
        for number in range(self.lost):  # of receives that were cancelled
            layout = Layout(self.draw, self.largest, self.kind, derived=False)
            args = ANY_SOURCE, ANY_TAG, "Recv", layout, False, False
            self.receive(Wanted(100 + number, *args))
        for request in self.persistent:
            request.Free()
        for room in self.rooms:
            self.side.note("afterwards", self.side.read(room).tobytes())

    def _before_and_with_sends(self, wanted, mine):
        """Post the first receives that do not block, among the sends."""
        first = 0
        while first < len(wanted) and wanted[first].how in NONBLOCKING:
            first += 1
        early = wanted[: self.draw.randrange(first + 1)]
        del wanted[: len(early)]
        steps = ["send"] * len(mine) + ["receive"] * len(early)
        self.draw.shuffle(steps)
        sends, receives = iter(mine), iter(early)
        for step in steps:
            if step == "send":
                self.send(next(sends))
            else:
                self.receive(next(receives))

    def _of_nobody(self):
        """Send to no rank, and receive from none."""
        array, status = (
            self.side.array(content(self.seed, 3, self.kind)),
            plain.Status(),
        )
        self.comm.Send(array, PROC_NULL)
        self.comm.Recv(array, PROC_NULL, status=status)
        layout = Layout(self.draw, 0, self.kind)
        self.side.note("nobody", *self._said(status, layout))
        self.comm.Probe(PROC_NULL, status=status)
        self.side.note(status.source, self.side.read(array).tobytes())
        done = partial(self._arrived, None, array, layout)
        request = self.comm.Irecv(array, PROC_NULL)
        self.pending.add(request, done, receives=True)

    def _never(self):
        """Post a receive of no message, and cancel it."""
        layout = Layout(self.draw, self.unit, self.kind, self.unit)
        source = self.draw.choice([ANY_SOURCE, self.rank])
        self.receive(Wanted(1000, source, NEVER, "Irecv", layout, False, True))
        self.pending.entries[-1].cancels()
        self.pending.entries[-1].cancels = None
        self.pending.entries[-1].receives = True

    def _between_hosts(self):
        """Have mpi4py's requests among the others, persistent ones that end, too."""
        comm = self.side.of_host
        arrays = np.full(3, comm.rank), np.zeros(3, int)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        requests = comm.Recv_init(arrays[1], left), comm.Send_init(arrays[0], right)
        arrived = lambda status: self.side.note("host", status.source, arrays[1][0])  # noqa: E731
        for request, done in zip(requests, (arrived, lambda status: None), strict=True):
            request.Start()
            self.persistent.append(request)
            self.pending.add(request, done)

    # Sends.

    def send(self, each):
        layout, side, how = each.layout, self.side, each.how
        host = content(each.key, layout.room, self.kind)
        array = side.array(host)
        args = layout.spec(array), each.dest, each.tag
        if side.limited:
            how = "Isend" if how in ("Send", "Rsend") else how
        # Sends of the device do not wait for the receiver, whatever their size.
        if not side.on_device and (host.nbytes > SMALL or how == "Rsend"):
            how = BUFFERED.get(how, how)
        if how in ("Send", "Bsend", "Rsend"):
            getattr(self.comm, how)(*args)
            self._reuse(array, host, None)
            return
        request = getattr(self.comm, how)(*args)
        if how.endswith("_init"):
            request.Start()
            self.persistent.append(request)
        self.pending.add(request, partial(self._reuse, array, host))

    def _reuse(self, array, host, status):
        """Change a sent array, which does not change the message."""
        self.side.write(array, host[::-1].copy() + host.dtype.type(1))

    # Receives.

    def receive(self, each):
        layout, key = each.layout, (*self.seed, self.rank, each.number)
        array = self.side.array(untouched(layout.room, self.kind))
        if not each.alone:
            self.rooms.append(array)
        source = each.source
        if not self.side.on_device and source == ANY_SOURCE:
            source = self.side.sources[key]
        done = partial(self._arrived, key, array, layout)
        if each.how in NONBLOCKING:
            self._post(each, key, array, source, done)
            return
        status = plain.Status()
        how = {"Recv": self._recv, "Probe": self._probed, "Iprobe": self._probed}
        call = how.get(each.how, self._matched)
        args = each, layout.spec(array), source, status
        error = self.side.refused(lambda: call(*args))
        if error is not None:
            self.side.note("failed", error)
            return
        done(status)

    def _post(self, each, key, array, source, done):
        comm, tag = self.comm, each.tag
        cancels = partial(self._cancelled, key)
        if each.cancels and self.side.sources.get(key, source) == "cancelled":
            comm, source, tag = plain.COMM_SELF, 0, NEVER  # no message fits
        request = getattr(comm, each.how)(each.layout.spec(array), source, tag)
        if each.how == "Recv_init":
            request.Start()
            self.persistent.append(request)
        more = {"receives": not each.cancels, "alone": each.alone}
        entry = self.pending.add(request, done, **more)
        if each.cancels:
            entry.cancels = partial(cancels, entry)

    def _cancelled(self, key, entry):
        """Cancel a receive, if the first run did; it may have been matched."""
        if self.side.on_device or self.side.sources[key] == "cancelled":
            entry.request.Cancel()
        entry.receives = True

    def _recv(self, each, spec, source, status):
        self.comm.Recv(spec, source, each.tag, status)

    def _probed(self, each, spec, source, status):
        if each.how == "Iprobe":
            while not self.comm.Iprobe(source, each.tag, status):
                pass
        else:
            self.comm.Probe(source, each.tag, status)
        self.side.note("probed", *self._said(status, each.layout))
        self.comm.Recv(spec, status.source, status.tag, status)

    def _matched(self, each, spec, source, status):
        if each.how == "Improbe":
            while (found := self.comm.Improbe(source, each.tag, status)) is None:
                pass
        else:
            found = self.comm.Mprobe(source, each.tag, status)
        self.side.note("matched", *self._said(status, each.layout))
        if each.how == "Imrecv":
            found.Irecv(spec).Wait(status)
        else:
            found.Recv(spec, status)

    def _said(self, status, layout):
        """Return what a status says of a received message."""
        counts = status.Get_count(layout.datatype), status.Get_elements(layout.basic)
        where = status.Get_source(), status.Get_tag()
        return (*where, *counts, status.Get_count(plain.BYTE), status.Is_cancelled())

    def _arrived(self, key, array, layout, status):
        """Note a message, or what a receive says that has none."""
        side = self.side
        if status is None:  # it was too long
            return
        if status.Is_cancelled():
            side.note("cancelled", side.read(array).tobytes())
            self.lost += key[-1] < 1000
            side.sources[key] = "cancelled"
            return
        if side.on_device and key is not None:
            side.sources[key] = status.source
        side.note("arrived", *self._said(status, layout), side.read(array).tobytes())
