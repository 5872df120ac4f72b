"""An explored program's host: MPI, communicators, streams, symmetric memory.

Each rank's host is a thread. Calls of MPI, and set-up calls, wait until all ranks make
them. Kernels and collectives are work of the rank's default stream, in order. A
collective copies and reduces when all ranks' streams have reached it; it orders what
comes before it on the ranks that send before what comes after it on those that receive.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from numba_symm import dtypes
from numba_symm.device.signals import CHANNELS
from numba_symm.explore.machine import Machine, Name, Observer, running
from numba_symm.explore.memory import Area, CodePlace, Fault
from numba_symm.explore.standins import ExploredKernel, StandIn
from numba_symm.explore.threads import Array, allocated, unsupported
from numba_symm.memory import allocator, pads


class RankStream:
    """The default stream of a rank."""

    def __init__(self, machine: Machine, rank: int):
        self.rank, self.clock = rank, machine.clock()
        self._queue: deque[Any] = deque()
        self._running: Any = None
        self._launches = 0

    def count(self) -> int:
        """Count a launch; return its number."""
        self._launches += 1
        return self._launches

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

    def __init__(self, machine: Machine, size: int, device: Any):
        self.machine, self.size, self.device = machine, size, device
        self.board = machine.memory.allocate("the status board", 8 * size, 8)
        self.pads: dict[Area, Area] = {}
        self._given: dict[Any, dict[int, Any]] = {}
        self._works: dict[Any, dict[int, Enqueued]] = {}

    def give(self, key: Any, rank: int, what: str, site: CodePlace, value: Any) -> None:
        """Note that a rank makes a call in which all ranks meet."""
        given = self._given.setdefault(key, {})
        for other, (name, place, _, _) in given.items():
            if name != what:
                raise Fault(
                    "divergence",
                    f"rank {other} calls {name}, and rank {rank} calls {what}; all "
                    "ranks make the same calls in the same order",
                    sites=[(f"rank {other}", place), (f"rank {rank}", site)],
                )
        given[rank] = what, site, value, self.machine.me().clock.copy()

    def met(self, key: Any) -> bool:
        """Return whether all ranks make a call."""
        return len(self._given[key]) == self.size

    def given(self, key: Any) -> list[tuple[str, CodePlace, Any, Any]]:
        """Return what all ranks have given, in rank order."""
        return [self._given[key][rank] for rank in range(self.size)]

    def reached(self, key: Any, work: "Enqueued", rank: int) -> list["Enqueued"]:
        """Note that a stream has reached a collective; return all if it may run."""
        works = self._works.setdefault(key, {})
        works[rank] = work
        for other, each in works.items():
            if each.what != work.what:
                raise Fault(
                    "divergence",
                    f"rank {other} calls {each.what}, and rank {rank} {work.what}, as "
                    "their next collective; all ranks make the same calls",
                    sites=[(f"rank {r}", w.site) for r, w in works.items()],
                )
        return [works[r] for r in range(self.size)] if len(works) == self.size else []


class Enqueued:
    """A collective, on one rank's stream.

    Attributes:
        what: its name.
        x, out: the arrays; None: none.
        sources: the ranks from which this one receives.
    """

    def __init__(self, comm: Any, what: str, x: Any, out: Any, run: Any, sources: Any):
        execution = running()
        self._world, self._host = comm._world, execution.me().local
        self.what, self.x, self.out, self._run = what, x, out, run
        self.sources = sources
        self.site = execution.site()
        self._clock = execution.me().clock.copy()
        self._key = comm._number, self._host.count(("stream", comm._number))

    def start(self, stream: RankStream) -> None:
        """Run the collective if all other ranks' streams have reached it."""
        stream.learn(self._clock)
        self._stream = stream
        works = self._world.reached(self._key, self, stream.rank)
        if not works:
            return
        clocks = [work._stream.clock.copy() for work in works]
        machine = self._world.machine
        observers = []
        for rank, work in enumerate(works):
            name = Name(rank, None, 1, f"rank {rank}'s collectives")
            known = [clocks[source] for source in (*work.sources, rank)]
            observers.append(Observer(machine, name, np.maximum.reduce(known)))
        given = [
            None if work.x is None else work.x.load(observers[rank], work.site)
            for rank, work in enumerate(works)
        ]
        # Each rank stores after all that it receives from have loaded.
        for rank, work in enumerate(works):
            for source in work.sources:
                observers[rank].learn(observers[source].clock)
        for rank, work in enumerate(works):
            if work.out is not None:
                found = self._run(given, rank)
                if found is not None:
                    work.out.store(found, observers[rank], work.site)
            work._stream.learn(observers[rank].clock)
        for work in works:
            work._stream.finish()


class Host:
    """A rank's host thread: what it has made, and its stream."""

    def __init__(self, world: AllRanks, rank: int):
        self.world, self.rank = world, rank
        self.stream = RankStream(world.machine, rank)
        self._counts: dict[Any, int] = {}

    def ended(self, thread: Any) -> None:
        """Do nothing: kernels go on after their host."""

    def count(self, what: Any) -> int:
        """Return how often this was called before."""
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        return number

    def check_stream(self, stream: Any) -> None:
        """Refuse other streams than the default one."""
        if stream is not None and stream != 0:
            raise unsupported("a stream", "use the default stream")

    def drain(self) -> None:
        """Wait for the stream."""
        running().block(self.stream.idle, "synchronize")
        running().me().learn(self.stream.clock)

    def copy_in(self, target: Array, values: Any) -> None:
        """Copy into a device array, on the stream.

        CUDA returns from such a copy when it has read the host's memory, which may be
        before the GPU has stored it. So only work of the stream follows the copy.
        """
        self.drain()
        execution = running()
        given = values.load() if isinstance(values, Array) else values
        name = Name(self.rank, None, 2, f"a copy of rank {self.rank}")
        copies = Observer(execution, name, execution.me().clock.copy())
        target.store(given, copies, execution.site())
        self.stream.learn(copies.clock)

    def meet(self, what: str, value: Any = None, comm: Any = "MPI") -> list[Any]:
        """Wait until all ranks make a call; return the values of all."""
        machine, world = running(), self.world
        key = comm, self.count(comm)
        world.give(key, self.rank, what, machine.site(), value)
        machine.block(lambda: world.met(key), what)
        given = world.given(key)
        for _, _, _, clock in given:
            machine.me().learn(clock)
        return [value for _, _, value, _ in given]

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


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "min": np.minimum,
    "max": np.maximum,
    "land": lambda a, b: np.logical_and(a, b),
    "lor": lambda a, b: np.logical_or(a, b),
}


class Rank:
    """What MPI's communicators and those of the library have in common."""

    @property
    def rank(self) -> int:
        """The rank."""
        return host().rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return host().world.size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = type(self).__name__.removeprefix("Explored")
        raise unsupported(f"{kind}.{name}")


class MPIComm(Rank):
    """Stand-in for ``MPI.COMM_WORLD``."""

    def Get_rank(self) -> int:
        """Return the rank."""
        return self.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def barrier(self) -> None:
        """Wait for all ranks."""
        host().meet("MPI's barrier")

    Barrier = barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Return the root's object."""
        return host().meet("bcast", obj)[root]

    def gather(self, sendobj: Any, root: int = 0) -> Any:
        """Return all objects on the root."""
        found = host().meet("gather", sendobj)
        return found if self.rank == root else None

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Return this rank's object of the root's."""
        return host().meet("scatter", sendobj)[root][self.rank]

    def allgather(self, sendobj: Any) -> Any:
        """Return all objects."""
        return host().meet("allgather", sendobj)

    def alltoall(self, sendobj: Any) -> Any:
        """Return the object of each rank for this one."""
        return [each[self.rank] for each in host().meet("alltoall", sendobj)]

    def allreduce(self, sendobj: Any, op: Any = "sum") -> Any:
        """Return the reduced object."""
        return functools.reduce(OPERATORS[op], host().meet("allreduce", sendobj))

    def reduce(self, sendobj: Any, op: Any = "sum", root: int = 0) -> Any:
        """Return the reduced object on the root."""
        found = functools.reduce(OPERATORS[op], host().meet("reduce", sendobj))
        return found if self.rank == root else None

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's array."""
        buf[...] = host().meet("Bcast", np.array(_of_host(buf)))[root]

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
        """Reduce arrays."""
        given = recvbuf if sendbuf is IN_PLACE else sendbuf
        found = host().meet("Allreduce", np.array(_of_host(given)))
        recvbuf[...] = functools.reduce(OPERATORS[op], found)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect arrays."""
        found = host().meet("Allgather", np.array(_of_host(sendbuf)))
        recvbuf[...] = np.reshape(found, recvbuf.shape)


def _of_host(array: Any) -> Any:
    if not isinstance(array, np.ndarray) or isinstance(array, Array):
        raise unsupported(
            f"{type(array).__name__} in a call of MPI", "pass host arrays"
        )
    return array


IN_PLACE = object()


def make_mpi(device_modules: Any) -> dict[str, Any]:
    """Return the stand-ins for ``mpi4py``, by name."""
    operators = {name.upper(): name for name in OPERATORS}
    mpi = StandIn(
        "mpi4py.MPI", COMM_WORLD=MPIComm(), IN_PLACE=IN_PLACE, PROC_NULL=-1,
        Comm=MPIComm, Intracomm=MPIComm, **operators,
    )  # fmt: skip
    return {"mpi4py": StandIn("mpi4py", MPI=mpi), "mpi4py.MPI": mpi}


class ExploredCommunicator(Rank):
    """Stand-in for ``numba_symm.Communicator``."""

    def __init__(
        self,
        comm: Any,
        device: int | None = None,
        timeout: float | None = None,
        stream: Any = None,
        debug: bool = False,
        multiprocessors: int | None = None,
        requests: bool = False,
    ):
        mine = host()
        mine.check_stream(stream)
        self._world = mine.world
        self._number = mine.count("communicators")
        mine.meet("ExploredCommunicator", None, ("set-up", self._number))

    def _set_up(self, what: str, value: Any) -> list[Any]:
        return host().meet(what, value, ("set-up", self._number))

    def __enter__(self) -> "ExploredCommunicator":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """Wait for the stream and for all ranks."""
        host().drain()
        self._set_up("close", None)

    def empty(self, shape: Any, dtype: Any = np.float32, *, like: Any = None) -> Array:
        """Return a new symmetric array without values."""
        _check_unused("empty", like=like)
        return self._array("empty", shape, dtype, True)

    def zeros(self, shape: Any, dtype: Any = np.float32, *, like: Any = None) -> Array:
        """Return a new symmetric array of zeros."""
        _check_unused("zeros", like=like)
        return self._array("zeros", shape, dtype, False)

    def _array(self, what: str, shape: Any, dtype: Any, unset: bool) -> Array:
        found = host().new(shape, dtype, unset=unset, what="a symmetric array")
        _check_equal(what, self._set_up(what, found.nbytes))
        return found

    def rendezvous(
        self, array: Any, *, channels: int | None = None
    ) -> "ExploredMemory":
        """Return all ranks' addresses of an array."""
        mine, region = host(), array.region
        number = CHANNELS if channels is None else channels
        found = self._set_up("rendezvous", (array.address, region, channels))
        _check_equal("rendezvous", [each for _, _, each in found])
        made = [
            _pad(self._world, one, r, number) for r, (_, one, _) in enumerate(found)
        ]
        modules = self._world.device
        guard = modules["polling"].Guard(
            self._world.board.base, mine.rank, self.size, 0
        )
        buffers = tuple(address for address, _, _ in found)
        ctx = modules["signals"].Context(
            mine.rank, self.size, buffers, tuple(pad.base for pad in made), guard
        )
        ctx.buffer_size = region.nbytes - array.start()
        ctx.channels = made[mine.rank].nbytes // pads.pad_nbytes(self.size, 1)
        if number > ctx.channels:
            raise Fault(
                "error",
                f"rendezvous: expected at most {ctx.channels} channels of the "
                f"allocation's signal pad, got {number}; pass the most that a kernel "
                "needs in the allocation's first rendezvous",
            )
        return ExploredMemory(self._world, ctx)

    def device_workspace(
        self, blocks: int, threads: int, bytes: int, depth: int = 1
    ) -> Any:
        """Return the memory of collectives in kernels."""
        mine, module = host(), self._world.device["block_exchange"]
        sizes = allocator.checked(blocks, threads, bytes, depth)
        blocks, threads, bytes, depth = sizes
        vectors = allocator.vectors(threads, bytes)
        threads = allocator.warps(threads)
        region = running().memory.allocate(
            f"the device workspace of rank {mine.rank}",
            module.nbytes(self.size, blocks, threads, vectors, depth),
            4,
        )
        found = self._set_up("device_workspace", (region.base, sizes))
        _check_equal("device_workspace", [each for _, each in found])
        ring = tuple(
            found[(mine.rank + 1 + k) % self.size][0] for k in range(self.size)
        )
        guard = self._world.device["polling"].Guard(
            self._world.board.base, mine.rank, self.size, 0
        )
        given = mine.rank, self.size, ring, guard, blocks, threads, vectors, depth
        return SimpleNamespace(ctx=module.WorkspaceContext(*given))

    def launch_limit(self, kernel: Any, threads: int) -> int:
        """Return how many blocks may wait: as many as channels."""
        return CHANNELS

    def synchronize(self, stream: Any = None) -> None:
        """Wait for the stream."""
        host().check_stream(stream)
        host().drain()

    def _enqueue(
        self, what: str, x: Any, out: Any, run: Any, stream: Any, sources: Any = None
    ) -> Any:
        host().check_stream(stream)
        every = range(self.size) if sources is None else sources
        host().stream.enqueue(Enqueued(self, what, x, out, run, every))
        return out

    def _reducing(self, what: str, op: Any, x: Any) -> Callable[[Sequence[Any]], Any]:
        """Return the reduction of the ranks' arrays, as the simulator's kernels do."""
        if op not in dtypes.REDUCTIONS:
            raise unsupported(f"the operator {op!r}")
        module, element = self._world.device["lanes"], dtypes.element(x.dtype, what)
        dtypes.check(op, element, what)

        def reduced(given: Sequence[Any]) -> Any:
            rows = [
                np.frombuffer(each.tobytes() + bytes(-each.nbytes % 16), module.VECTOR)
                for each in given
            ]
            with np.errstate(all="ignore"):
                found = module.fold(element, op, len(given), rows)
            return found.view(element.dtype)[: x.size].reshape(x.shape)

        return reduced

    def barrier(self, stream: Any = None) -> None:
        """Order all ranks' streams."""
        self._enqueue("barrier", None, None, None, stream)

    def all_reduce(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
        wire: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = (),
        row_sum: Any = None,
        leaves: bool = False,
    ) -> Any:
        """Reduce over all ranks."""
        _check_unused("all_reduce", wire=wire, epilogue=epilogue, leaves=leaves or None)
        reduced = self._reducing("all_reduce", op, x)
        out = host().new(x.shape, x.dtype, unset=True) if out is None else out
        return self._enqueue(
            "all_reduce", x, out, lambda given, rank: reduced(given), stream
        )

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = (),
        row_sum: Any = None,
        leaves: bool = False,
    ) -> Any:
        """Reduce over all ranks; each gets its shard."""
        _check_unused("reduce_scatter", epilogue=epilogue, leaves=leaves or None)
        reduced, size = self._reducing("reduce_scatter", op, x), self.size
        if out is None:
            out = host().new((x.shape[0] // size, *x.shape[1:]), x.dtype, unset=True)

        def run(given: Any, rank: int) -> Any:
            return reduced(given).reshape(size, -1)[rank]

        return self._enqueue("reduce_scatter", x, out, run, stream)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = (),
        row_sum: Any = None,
    ) -> Any:
        """Collect all ranks' arrays."""
        _check_unused("all_gather", epilogue=epilogue)
        if out is None:
            out = host().new((self.size, *x.shape), x.dtype, unset=True)
        return self._enqueue(
            "all_gather", x, out, lambda given, rank: np.stack(given), stream
        )

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Exchange shards."""
        size = self.size
        out = host().new(x.shape, x.dtype, unset=True) if out is None else out

        def run(given: Any, rank: int) -> Any:
            return np.stack([each.reshape(size, -1)[rank] for each in given])

        return self._enqueue("all_to_all", x, out, run, stream)

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Copy the root's array."""

        def run(given: Any, rank: int) -> Any:
            return None if rank == root else given[root]

        return self._enqueue("broadcast", x, x, run, stream, [root])


def _check_equal(what: str, sizes: list[Any]) -> None:
    if len(set(sizes)) > 1:
        raise Fault("error", f"{what}: the ranks pass sizes {sizes}; pass equal ones")


def _check_unused(what: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise unsupported(f"{what} with {name}")


def _pad(world: AllRanks, region: Area, rank: int, channels: int) -> Area:
    """Return the signal pad of an allocation."""
    pad = world.pads.get(region)
    if pad is None:
        pad = world.machine.memory.allocate(
            f"the signal pad of rank {rank}", pads.pad_nbytes(world.size, channels), 4
        )
        pad.rank = rank
        pad.slots = functools.partial(_slot, world.size)
        world.pads[region] = pad
    return pad


def _slot(size: int, offset: int) -> tuple[str, int, int]:
    """Return what a pad has at an offset, the channel and the source."""
    channel, place = divmod(offset, pads.pad_nbytes(size, 1))
    if place < 16:
        return "grid barrier", channel, -1
    if place < 16 + 8 * size:
        return "word", channel, (place - 16) // 8
    return "signal", channel, (place - 16 - 8 * size) // 4


class ExploredMemory:
    """Stand-in for ``numba_symm.SymmetricMemory``."""

    def __init__(self, world: AllRanks, ctx: Any):
        self._world, self.ctx = world, ctx
        self.rank, self.world_size = ctx.rank, ctx.size
        self.buffer_size = ctx.buffer_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported(f"ExploredMemory.{name}")

    def get_buffer(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int = 0
    ) -> Array:
        """Return a rank's buffer as an array."""
        region, offset = running().memory.at(self.ctx.buffers[rank], 1)
        return Array.of(
            region, shape, dtype, offset + storage_offset * np.dtype(dtype).itemsize
        )

    def _launch(self, function: Any, stream: Any) -> None:
        host().check_stream(stream)
        ExploredKernel(function)[1, 32]()

    def barrier(self, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a barrier of all ranks."""
        barrier = self._world.device["barriers"].barrier
        self._launch(lambda: barrier(self.ctx, channel), stream)

    def put_signal(self, dst: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a signal."""
        put, index = self._world.device["signals"].put_signal, self._world.device["sim"]
        self._launch(
            lambda: index.thread_index() or put(self.ctx, dst, channel), stream
        )

    def wait_signal(self, src: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a wait for a signal."""
        wait, index = (
            self._world.device["signals"].wait_signal,
            self._world.device["sim"],
        )
        self._launch(
            lambda: index.thread_index() or wait(self.ctx, src, channel), stream
        )

    def put(
        self, x: Any, rank: int, storage_offset: int = 0, stream: Any = None
    ) -> None:
        """Enqueue a copy into a rank's buffer."""
        host().check_stream(stream)
        target = self.get_buffer(rank, x.shape, x.dtype, storage_offset)
        host().stream.enqueue(_Copy(target, x))

    def get(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int = 0,
        out: Any = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Enqueue a copy from a rank's buffer."""
        host().check_stream(stream)
        source = self.get_buffer(rank, shape, dtype, storage_offset)
        out = host().new(source.shape, dtype, unset=True) if out is None else out
        host().stream.enqueue(_Copy(out, source))
        return out


class _Copy:
    """A copy by a copy engine, on a stream."""

    def __init__(self, target: Array, source: Array):
        execution = running()
        self._target, self._source = target, source
        self._site, self._clock = execution.site(), execution.me().clock.copy()

    def start(self, stream: RankStream) -> None:
        stream.learn(self._clock)
        name = Name(stream.rank, None, 2, f"a copy of rank {stream.rank}")
        observer = Observer(running(), name, stream.clock.copy())
        values = self._source.load(observer, self._site)
        self._target.store(values, observer, self._site)
        stream.learn(observer.clock)
        stream.finish()
