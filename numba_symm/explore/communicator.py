"""Stand-ins for communicators and symmetric memory."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from numba_symm import dtypes, pads
from numba_symm.device.signals import MAX_CHANNELS
from numba_symm.explore.arrays import Array, unsupported
from numba_symm.explore.faults import Fault
from numba_symm.explore.host import AllRanks, Enqueued, RankStream, host
from numba_symm.explore.machine import running
from numba_symm.explore.memory import Area
from numba_symm.explore.mpi import Rank
from numba_symm.explore.observers import Name, Observer
from numba_symm.explore.standins import ExploredKernel
from numba_symm.memory import device_workspaces


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

    def rendezvous(self, array: Any) -> "ExploredMemory":
        """Return all ranks' addresses of an array."""
        mine, region = host(), array.region
        found = self._set_up("rendezvous", (array.address, region))
        pads = [_pad(self._world, each, rank) for rank, (_, each) in enumerate(found)]
        modules = self._world.device
        guard = modules["polling"].Guard(
            self._world.board.base, mine.rank, self.size, 0
        )
        buffers = tuple(address for address, _ in found)
        ctx = modules["signals"].Context(
            mine.rank, self.size, buffers, tuple(pad.base for pad in pads), guard
        )
        ctx.buffer_size = region.nbytes - array.start()
        return ExploredMemory(self._world, ctx)

    def device_workspace(self, blocks: int, threads: int, bytes: int) -> Any:
        """Return the memory of collectives in kernels."""
        mine, module = host(), self._world.device["block_workspace"]
        sizes = device_workspaces.checked(blocks, threads, bytes)
        blocks, threads, bytes = sizes
        vectors = device_workspaces.vectors(threads, bytes)
        threads = device_workspaces.warps(threads)
        region = running().memory.allocate(
            f"the device workspace of rank {mine.rank}",
            module.nbytes(self.size, blocks, threads, vectors),
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
        given = mine.rank, self.size, ring, guard, blocks, threads, vectors
        return SimpleNamespace(ctx=module.WorkspaceContext(*given))

    def launch_limit(self, kernel: Any, threads: int) -> int:
        """Return how many blocks may wait: as many as channels."""
        return MAX_CHANNELS

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
        module, element = self._world.device["slices"], dtypes.element(x.dtype, what)
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


def _pad(world: AllRanks, region: Area, rank: int) -> Area:
    """Return the signal pad of an allocation."""
    pad = world.pads.get(region)
    if pad is None:
        pad = world.machine.memory.allocate(
            f"the signal pad of rank {rank}", pads.pad_nbytes(world.size), 4
        )
        pad.rank = rank
        pad.slots = functools.partial(_slot, world.size)
        world.pads[region] = pad
    return pad


def _slot(size: int, offset: int) -> tuple[str, int, int]:
    """Return what a pad has at an offset, the channel and the source."""
    slots, words = 4 * MAX_CHANNELS * size, 8 * MAX_CHANNELS * size
    if offset < slots:
        return "signal", offset // 4 // size, offset // 4 % size
    if offset < slots + words:
        return "word", (offset - slots) // 8 // size, (offset - slots) // 8 % size
    return "grid barrier", (offset - slots - words) // 16, -1


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
