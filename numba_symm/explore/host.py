"""An explored program's host: its streams, MPI, and what several ranks do together.

Each rank's host is a thread. Calls of MPI, and set-up calls, wait until all ranks make
them. Kernels, collectives and messages are work of the rank's default stream, in order.
A collective or a message copies and reduces when the streams of its ranks have reached
it; it orders what comes before it on the ranks that send before what comes after it on
those that receive.
"""

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numba_symm.dtypes import REDUCTIONS
from numba_symm.explore.machine import Machine, Name, Observer, running
from numba_symm.explore.memory import CodePlace, Fault
from numba_symm.explore.standins import StandIn
from numba_symm.explore.threads import Array, allocated, unsupported

DEFAULT, HOSTS, REQUESTS = range(3)
"""The numbers of streams; those of requests follow."""


class RankStream:
    """A stream of a rank; the calls in which hosts meet have one of their own."""

    def __init__(self, machine: Machine, rank: int, number: int = DEFAULT):
        self.rank, self.number, self.clock = rank, number, machine.clock()
        self._queue: deque[Any] = deque()
        self._running: Any = None
        self.launches = itertools.count(1)

    def learn(self, clock: Any) -> None:
        """Order what a clock knows before later work."""
        np.maximum(self.clock, clock, out=self.clock)

    def enqueue(self, work: Any) -> None:
        """Append work; start it if nothing runs."""
        self._queue.append(work)
        self._advance()

    def finish(self) -> None:
        """End the running work."""
        self._running = None
        self._advance()

    def _advance(self) -> None:
        if self._running is None and self._queue:
            self._running = self._queue.popleft()
            self._running.start(self)

    def idle(self) -> bool:
        """Return whether all work has ended."""
        return self._running is None and not self._queue


class AllRanks:
    """What the ranks of an execution share.

    Attributes:
        size: the number of ranks.
        machine: the execution.
        board: the memory of records of failures, which nobody stores.
    """

    def __init__(self, machine: Machine, size: int):
        self.machine, self.size = machine, size
        self.board = machine.memory.allocate("the status board", 8 * size, 8)
        self._shares: dict[Any, list[RankPart]] = {}
        machine.unmet = self._unmet

    def reached(self, share: "RankPart") -> None:
        """Note that a stream has reached a share; do the whole after the last one."""
        shares = self._shares.setdefault(share.key, [])
        shares.append(share)
        _check_same(*((each.rank, each.what, each.site) for each in (shares[0], share)))
        if len(shares) == share.number:
            del self._shares[share.key]
            self._run(shares)

    def _run(self, shares: list["RankPart"]) -> None:
        observers = [
            Observer(self.machine, each.name(), each.work.clock.copy())
            for each in shares
        ]
        both = list(zip(shares, observers, strict=True))
        loaded = {
            share.rank: [
                x.load(me, share.site) if isinstance(x, Array) else x
                for x in share.reads
            ]
            for share, me in both
        }
        # A rank loads before it follows its sources, and stores after all of them have
        # loaded. Whom a source follows is a source, too.
        for share, me in both:
            for each, other in both:
                if each.rank in share.sources:
                    me.learn(other.clock)
        for share, me in both:
            for array, values in share.stores(loaded):
                array.store(values, me, share.site)
            share.work.stream.learn(me.clock)
        for share in shares:
            share.work.done()

    def _unmet(self) -> list[tuple[Name, str, CodePlace]]:
        """Return which streams wait for which other ranks' calls."""
        return [
            (share.name(), share.what, share.site)
            for shares in self._shares.values()
            for share in shares
            if share.work.stream.number != HOSTS
        ]


def _check_same(*calls: tuple[int, str, CodePlace]) -> None:
    """Refuse calls of two ranks that differ."""
    (one, first, place), (other, second, site) = calls
    if first != second:
        raise Fault(
            "divergence",
            f"rank {one} calls {first}, and rank {other} calls {second}; all ranks "
            "make the same calls in the same order",
            sites=[(f"rank {one}", place), (f"rank {other}", site)],
        )


def _nothing(loaded: dict[int, Any]) -> list[tuple[Array, Any]]:
    return []


class RankPart:
    """A rank's part in what several ranks, or streams, do together.

    Attributes:
        key: that of all its parts, of which there are ``number``.
        what: what they do.
        rank: the rank.
        reads: the arrays that the rank loads, or values.
        sources: the ranks from which it receives.
        stores: returns arrays with the values that they get, from what each rank has
            loaded.
        site: where in the program.
        work: the work of which it is a part, at ``place``.
    """

    work: "StreamWork"
    place = 0

    def __init__(
        self,
        key: Any,
        number: int,
        what: str,
        rank: int,
        reads: Sequence[Any] = (),
        sources: Sequence[int] = (),
        stores: Callable[[dict[int, Any]], list[tuple[Array, Any]]] = _nothing,
    ):
        self.key, self.number, self.what, self.rank = key, number, what, rank
        self.reads, self.sources, self.stores = reads, sources, stores
        self.site = running().site()

    def name(self) -> Name:
        """Return what makes its accesses; those of one work have no order."""
        number = self.place + 1024 * self.work.stream.number
        return Name(self.rank, None, 1 + number, f"the stream of rank {self.rank}")


class StreamWork:
    """Parts of a rank that start together, on a stream."""

    stream: RankStream

    def __init__(self, world: AllRanks, shares: list[RankPart]):
        self._world, self._shares = world, shares
        self.clock, self._left = running().me().clock.copy(), 1 + len(shares)
        for place, share in enumerate(shares):
            share.work, share.place = self, place

    def start(self, stream: RankStream) -> None:
        """Note that the stream has reached the work."""
        stream.learn(self.clock)
        self.stream, self.clock = stream, stream.clock.copy()
        for share in self._shares:
            self._world.reached(share)
        self.done()

    def done(self) -> None:
        """Note the end of a part; go on with the stream after the last one."""
        self._left -= 1
        if not self._left:
            self.stream.finish()


class Host:
    """A rank's host thread: what it has made, and its stream."""

    def __init__(self, world: AllRanks, rank: int):
        self.world, self.rank = world, rank
        self.stream = RankStream(world.machine, rank)
        self._counts = Counter[Any]()

    def ended(self, thread: Any) -> None:
        """Do nothing: kernels go on after their host."""

    def count(self, what: Any) -> int:
        """Return how often this was called before."""
        self._counts[what] += 1
        return self._counts[what] - 1

    def check_stream(self, stream: Any, *_: Any) -> int:
        """Refuse other streams than the default one, and return its handle."""
        if stream is not None and stream != 0:
            raise unsupported("a stream", "use the default stream")
        return 0

    def drain(self) -> None:
        """Wait for the default stream."""
        self.wait_for(self.stream)

    def wait_for(self, stream: RankStream, what: str = "synchronize") -> None:
        """Wait for a stream."""
        running().block(stream.idle, what)
        running().me().learn(stream.clock)

    def order(self, earlier: RankStream, later: RankStream) -> None:
        """Order the work of a stream so far before later work of another one."""
        key, rank = ("order", self.rank, self.count("order")), self.rank
        for stream, sources in ((earlier, []), (later, [rank])):
            share = RankPart(key, 2, "an order of streams", rank, [], sources)
            stream.enqueue(StreamWork(self.world, [share]))

    def copy_in(self, target: Array, values: Any) -> None:
        """Copy into a device array, on the stream.

        CUDA returns from such a copy when it has read the host's memory, which may be
        before the GPU has stored it. So only work of the stream follows the copy.
        """
        self.drain()
        self.stream.enqueue(StreamWork(self.world, [self.copy(target, values)]))

    def copy(self, target: Array, source: Any) -> RankPart:
        """Return a copy within this rank, of an array or of values."""

        def stores(loaded: dict[int, Any]) -> list[tuple[Array, Any]]:
            return [(target, loaded[self.rank][0])]

        key = "copy", self.rank, self.count("copy")
        return RankPart(key, 1, "a copy", self.rank, [source], (), stores)

    def meet(self, what: str, value: Any = None, comm: Any = "MPI") -> list[Any]:
        """Wait until all ranks make a call; return the values of all."""
        found, world = list[Any](), self.world
        every = range(world.size)

        def stores(loaded: dict[int, Any]) -> list[tuple[Array, Any]]:
            found.extend(loaded[rank][0][0] for rank in every)
            return []

        aside, key = (
            RankStream(world.machine, self.rank, HOSTS),
            (comm, self.count(comm)),
        )
        share = RankPart(key, world.size, what, self.rank, [(value,)], every, stores)
        aside.enqueue(StreamWork(world, [share]))
        self.wait_for(aside, what)
        return found

    def new(
        self, shape: Any, dtype: Any, *, unset: bool = False, what: str = "an array"
    ) -> Array:
        """Return a new array of this rank."""
        name = f"{what} of rank {self.rank}"
        region = allocated(name, self.rank, shape, dtype, unset=unset)
        region.made = running().site()
        return Array.of(region, shape, dtype)


def host() -> Host:
    """Return the host that runs."""
    local = running().me().local
    if not isinstance(local, Host):
        raise unsupported("a call of the host in a kernel")
    return local


def _reduced(given: Sequence[Any], op: str) -> Any:
    return functools.reduce(REDUCTIONS[op], given)


OF_MPI: dict[str, Callable[..., Any]] = {
    "barrier": lambda given, rank: None,
    "bcast": lambda given, rank, root=0: given[root],
    "gather": lambda given, rank, root=0: given if rank == root else None,
    "scatter": lambda given, rank, root=0: given[root][rank],
    "allgather": lambda given, rank: given,
    "alltoall": lambda given, rank: [each[rank] for each in given],
    "allreduce": lambda given, rank, op="sum": _reduced(given, op),
    "reduce": lambda given, rank, op="sum", root=0: (
        _reduced(given, op) if rank == root else None
    ),
    "scan": lambda given, rank, op="sum": _reduced(given[: rank + 1], op),
}
"""By MPI's name, what a rank gets from what all ranks give."""


class MPIComm:
    """Stand-in for ``MPI.COMM_WORLD``."""

    rank = property(lambda self: host().rank)
    size = property(lambda self: host().world.size)
    Get_rank, Get_size = rank.fget, size.fget

    def __getattr__(self, name: str) -> Any:
        if name in OF_MPI or name == "Barrier":
            return functools.partial(_of_objects, name.lower())
        if name.lower() in OF_MPI and name == name.capitalize():
            return functools.partial(_of_arrays, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported(f"MPI.Comm.{name}")


def _of_objects(name: str, sendobj: Any = None, *args: Any, **options: Any) -> Any:
    """Make a call of Python objects: ``comm.bcast(obj, root=0)``."""
    given, mine = options.pop("obj", sendobj), host()
    return OF_MPI[name](mine.meet(f"MPI's {name}", given), mine.rank, *args, **options)


def _of_arrays(name: str, *args: Any, **options: Any) -> None:
    """Make a call of host arrays: ``comm.Allreduce(sendbuf, recvbuf, op)``."""
    names = ("buf",) if name == "Bcast" else ("sendbuf", "recvbuf")
    buffers = dict(zip(names, args, strict=False))
    buffers |= {each: options.pop(each) for each in names if each in options}
    sent, received = buffers[names[0]], buffers[names[-1]]
    sent, mine = received if sent is IN_PLACE else sent, host()
    given = None if sent is None else np.array(_of_host(sent))
    model, every = OF_MPI[name.lower()], mine.meet(f"MPI's {name}", given)
    found = model(every, mine.rank, *args[len(names) :], **options)
    if found is not None:
        target = _of_host(received)
        target[...] = np.reshape(found, target.shape)


def _of_host(array: Any) -> Any:
    if not isinstance(array, np.ndarray) or isinstance(array, Array):
        raise unsupported(
            f"{type(array).__name__} in a call of MPI", "pass host arrays"
        )
    return array


IN_PLACE = object()


def make_mpi() -> dict[str, Any]:
    """Return the stand-ins for ``mpi4py``, by name."""
    operators = {name.upper(): name for name in REDUCTIONS}
    mpi = StandIn(
        "mpi4py.MPI", COMM_WORLD=MPIComm(), IN_PLACE=IN_PLACE, PROC_NULL=-1,
        Comm=MPIComm, Intracomm=MPIComm, **operators,
    )  # fmt: skip
    return {"mpi4py": StandIn("mpi4py", MPI=mpi), "mpi4py.MPI": mpi}
