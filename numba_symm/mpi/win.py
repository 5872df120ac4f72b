"""One-sided calls on device memory, and the locks and fences of a window.

One-sided calls of mpi4py on device memory that every rank has mapped.

Puts and gets are copies between this rank's memory and the target's, enqueued on the
stream of the origin's array. Before each call that synchronizes the window, the host
waits for these streams. Before those that let other ranks access this rank's memory, it
also waits for the streams of the communicator and of the window's array. Then it calls
the same method of a window of mpi4py, which implements epochs, locks and errors. A
fence instead waits for the other ranks itself, because they may end meanwhile.
Accumulates hold a lock of their own on the target (see below), so they are
atomic among each other, for all types and operators.

Locks of a window's accumulates, and its fences, without MPI, which cannot be polled.

All ranks map one file. A lock is a byte of it, which a rank locks while it changes the
memory of one rank (:mod:`numba_symm.launch.locks`). So a rank that waits for a lock has
a deadline, and runs Python's signal handlers. The Linux kernel releases the lock of a
process that ends. But the memory may then be changed in part. So the holder also stores
its number in the file. It stores the number after it has got the lock, and clears it
before it releases the lock. A rank that gets the lock and finds a number raises.

Each rank also keeps a byte of its own locked. So the others see when its process ends,
in their calls and while they wait for it in a fence.
"""

import fcntl
import functools
import inspect
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import dtypes, environment, process
from numba_symm.arguments import shown
from numba_symm.collectives.invocation import check_writable
from numba_symm.errors import ClosedError, CollectiveTimeout, RankLeft, SymmError
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.arrays import ArrayView
from numba_symm.launch import locks
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.ranks import grouped, name_ranks
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait, watching
from numba_symm.memory.backends import file_of_all
from numba_symm.mpi import buffers, collectives, datatypes
from numba_symm.mpi.buffers import BYTE, Items, Kind, message
from numba_symm.mpi.comm import Device
from numba_symm.mpi.datatypes import integer, natural, translated, whole
from numba_symm.mpi.errors import MPIError, MPITypeError, refusal, unsupported
from numba_symm.mpi.started import Started
from numba_symm.sharing import SharedHandle, open_shared, share
from numba_symm.sharing.kinds import locate
from numba_symm.sharing.sent import leave_out

# Beyond the file's end: a byte for each rank.
_LOCKS = 1 << 40  # locked by the rank that changes its memory
_ALIVE = 1 << 41  # locked by the rank itself while it uses the window


class WindowLocks:
    """The locks of one window, one for the memory of each rank. Collective.

    Args:
        exchange: the ranks.
        what: the call that makes the window.
        seconds: how long a rank waits for a lock; 0: indefinitely.
    """

    def __init__(self, exchange: StoreExchange, what: str, seconds: float):
        self._rank, self._seconds, size = exchange.rank, seconds, exchange.size
        self._fd = -1
        process.note(self, what)
        self._threads = threading.RLock()  # threads of one process share its locks
        self._inside = [False] * size  # whether this rank is in ``held``
        with (
            IpcChannel(exchange) as channel,
            file_of_all(exchange, channel, "locks of a window", 16 * size) as fd,
            ExitStack() as made,
        ):
            made.callback(self.close)
            with exchange.agreed("mapping the locks of a window"):
                self._fd = locks.reopened(fd)
                locks.lock(self._fd, _ALIVE + self._rank)
                memory = mmap.mmap(fd, 16 * size)
                both = np.frombuffer(memory, "i8").reshape(2, size)
                self._holders, self._met = both
            made.pop_all()
        process.watch(self)

    @contextmanager
    def held(self, target: int, what: str) -> Iterator[None]:
        """Hold the lock of a rank's memory during the block.

        Args:
            target: the rank.
            what: the call, for errors.

        Raises:
            CollectiveTimeout: another rank has held it for too long.
            RankLeft: a rank has ended while it held the lock.
            SymmError: this thread holds it, so a signal handler makes this call.
        """
        self._check()
        mine, release = self._rank + 1, locks.unlocking(_LOCKS + target)
        with self._threads:
            # The file's lock would admit the handler, and its end would release it.
            if self._inside[target]:
                raise SymmError(
                    f"{what}: expected no signal handler to make this call while it "
                    "interrupts another change of the same memory in this window; let "
                    "the handler set a flag, and make the call after it"
                )
            try:
                self._inside[target] = True
                self._acquire(target, what)
                holder = int(self._holders[target])
                if holder:
                    raise RankLeft(
                        f"{what}: rank {holder - 1} ended while it changed the memory "
                        f"of rank {target} in this window; free the window, and make "
                        "a new one of the remaining ranks",
                        ranks=(holder - 1,),
                        operation=what,
                    )
                self._holders[target] = mine
                yield
            finally:
                # Not only after the store: a signal handler may have raised before it.
                if self._holders[target] == mine:
                    self._holders[target] = 0
                self._inside[target] = False
                # The first call here, because a signal handler may raise after it.
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, release)

    def _acquire(self, target: int, what: str) -> None:
        wait = Wait(what, self._rank, self._seconds)
        while not locks.try_lock(self._fd, _LOCKS + target):
            number = int(self._holders[target])  # 0: it has just got the lock
            holder = (number - 1,) if number else ()
            if wait.pause(holder):
                raise CollectiveTimeout(
                    f"{what}: rank {self._rank} {wait.text(holder)}, which changes the "
                    f"memory of rank {target} in this window (timeout: "
                    f"{self._seconds:g} s); continue or end the rank that changes it, "
                    "or pass a longer timeout= to MPI.Comm",
                    ranks=(self._rank, *holder),
                    operation=what,
                )

    def meet(self, what: str, seconds: float = 0) -> list[int]:
        """Wait until every rank has called this as often as this one, or has ended.

        Collective. After an exception, a rank may call it again in the same place.

        Args:
            what: the call, for errors.
            seconds: how long to wait; 0: indefinitely.

        Returns:
            The ranks that have ended before.

        Raises:
            CollectiveTimeout: a rank did not come in time.
        """
        self._check()
        wait, met = Wait(what, self._rank, seconds), self._met
        met[self._rank] += 1
        try:
            while True:
                absent = [
                    rank for rank in range(len(met)) if met[rank] < met[self._rank]
                ]
                running = [rank for rank in absent if self._runs(rank)]
                if not running:
                    return absent
                if wait.pause(running):
                    raise wait.error(running)
        except BaseException:
            met[self._rank] -= 1
            raise

    def check(self, what: str, ranks: Sequence[int]) -> None:
        """Raise RankLeft if the process of one of these ranks has ended."""
        self._check()
        for rank in ranks:
            if rank != self._rank and not self._runs(rank):
                raise RankLeft(
                    f"{what}: rank {rank} has ended without freeing the window; free "
                    "the window, and make a new one of the remaining ranks",
                    ranks=(rank,),
                    operation=what,
                )

    def _runs(self, rank: int) -> bool:
        return locks.is_locked(self._fd, _ALIVE + rank)

    def _check(self) -> None:
        if self._fd < 0:
            raise ClosedError("Win: Free was called on the window; make a new one")

    def close(self) -> None:
        """Close the file, and so release this rank's locks. Local and idempotent."""
        process.forget(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def disown(self) -> None:
        """Close a forked child's copy, which would keep its parent's locks."""
        self.close()


def bytes_of(found: Items) -> Any:
    """Return the bytes of a message without gaps."""
    return buffers.at(found.address, found.nbytes, BYTE, found.array)


def copied(of: Items, into: Items) -> list[buffers.PackedStep]:
    """Return the copy of one message's elements to those of another one."""
    if not of.nbytes:
        return []
    if of.layout.runs is None and into.layout.runs is None:
        to, source, nbytes = into.address, of.address, of.nbytes
        return [lambda stream: streams.copy(to, source, nbytes, stream)]
    if of.layout.runs is None:
        return [buffers.unpack(into, bytes_of(of))]
    if into.layout.runs is None:
        return [buffers.pack(of, bytes_of(into))]
    between = arrays.empty((of.nbytes,), BYTE, "a one-sided call")
    return [buffers.pack(of, between), buffers.unpack(into, between)]


def reduced(of: Items, into: Items, op: Any, what: str) -> list[buffers.PackedStep]:
    """Return the reduction of one message's elements into those of another one."""
    if op == MPI.NO_OP or not of.nbytes:
        return []
    if op == MPI.REPLACE:
        return copied(of, into)
    base = of.layout.base
    if base != into.layout.base or not (of.layout.uniform and into.layout.uniform):
        raise refusal(
            MPI.ERR_TYPE,
            f"{what}: expected elements of one type at origin and target, got {base} "
            f"and {into.layout.base}",
        )
    name = collectives.operator(op, base, what)
    if name in dtypes.LOCATED:
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.MINLOC and MPI.MAXLOC are for collectives; pass another "
            "operator, or copy the pairs to the host",
        )
    element = dtypes.element(base, what)
    dtypes.check(name, element, what)
    function = dtypes.REDUCTIONS.get(name, name)
    made = [
        buffers.at(each.address, each.size, base, each.array)
        if each.layout.runs is None
        else arrays.empty((each.size,), base, what)
        for each in (of, into)
    ]
    steps = [buffers.pack(of, made[0])] if of.layout.runs is not None else []
    if into.layout.runs is None:
        return [*steps, buffers.fold(function, made[1], made[0])]
    steps += [buffers.pack(into, made[1]), buffers.fold(function, made[1], made[0])]
    return [*steps, buffers.unpack(into, made[1])]


def target_of(
    target: Any, origin: Items, memory: Any, rank: int, unit: int, what: str
) -> Items:
    """Return the items of a target specification, of as many bytes as origin.

    Args:
        target: the specification: None, a displacement, or a list or tuple of a
            displacement, a count and a datatype, of which the last ones may be missing.
        origin: the origin's items.
        memory: the memory of the target rank.
        rank: the target rank.
        unit: its displacement unit.
        what: the call.
    """
    given = (target,) if not isinstance(target, (list, tuple)) else tuple(target)
    if len(given) > 3:
        raise refusal(
            MPI.ERR_ARG,
            f"{what}: expected a target of 3 items at most, got {len(given)}; pass "
            "[displacement, count, type]",
        )
    disp, number, layout = 0, origin.number, origin.layout
    if given and given[0] is not None:
        disp = whole(given[0], "displacement", MPI.ERR_DISP)
    if len(given) > 1:
        number = natural(given[1], "count", MPI.ERR_COUNT)
    if len(given) > 2:
        layout = buffers.layout_of(given[2])
    view = ArrayView(0, (0,), BYTE, "C", False)
    if memory is not None:
        view = arrays.view(memory, what)
    found = Items(memory, view, disp * unit, number, layout)
    try:
        buffers.check_room(found)
    except ValueError as error:
        raise refusal(
            MPI.ERR_RMA_RANGE,
            f"{what}: expected items within the {view.nbytes} bytes of rank {rank},"
            f" got displacement {disp} and {number} items; pass fewer",
        ) from error
    if found.nbytes != origin.nbytes:
        raise refusal(
            MPI.ERR_COUNT,
            f"{what}: expected as many bytes at the target as the origin's "
            f"{origin.nbytes}, got {found.nbytes}; pass as many",
        )
    return found


def units_of_all(exchange: StoreExchange, what: str, given: Any) -> list[int]:
    """Return all ranks' displacement units, or refuse a wrong one on all ranks."""
    unit, text = 0, shown(given)
    with suppress(MPIError):
        unit = integer(given, what, "disp_unit", MPI.ERR_DISP)
    everyone = exchange.all_gather((unit, text), "displacement units")
    for rank, (unit, text) in enumerate(everyone):
        if unit < 1:
            raise refusal(
                MPI.ERR_DISP,
                f"{what}: expected a displacement unit of 1 byte or more, got {text} "
                f"on rank {rank}; pass the bytes of an item",
            )
    return [unit for unit, _ in everyone]


def mapped_by_all(
    exchange: StoreExchange, what: str, make: Callable[[], Any]
) -> tuple[Any, list[Any]]:
    """Return this rank's memory, which ``make`` returns, and that of all ranks.

    Raise on all ranks or on none. A rank that failed alone would not allocate what the
    other ranks allocate with it.
    """
    mapped = []
    with ExitStack() as undo:
        with exchange.agreed(f"{what}: sharing memory") as shared:
            memory, shared.mine = make(), None
            if memory is not None:
                own = _shared(memory, exchange.size, what)
                undo.callback(own.cancel)
                shared.mine = own.to_bytes()
        with exchange.agreed(f"{what}: mapping memory"):
            for handle in shared.all:
                found = handle and open_shared(SharedHandle.from_bytes(handle))
                mapped.append(found)
                if found is not None:
                    undo.callback(found.close)
        undo.pop_all()
    return memory, mapped


def _shared(memory: Any, opens: int, what: str) -> SharedHandle:
    """Return the handle of an array that every rank opens once."""
    view = arrays.dense(arrays.view(memory, what), what)
    if locate(view.address, view.nbytes) is None:
        raise refusal(
            MPI.ERR_BUFFER,
            f"{what}: the array is in this process' private memory; under the "
            "simulator, use MPI.Win.Allocate_device or comm.communicator.empty",
        )
    shared = share(memory, opens=opens)
    leave_out(shared)  # the program itself has not shared it
    return shared


def synchronizing(name: str, step: Callable[[Any, str], None]) -> Any:
    """Return the method of ``MPI.Win`` of that name, after a step of the window."""
    plain = getattr(MPI.Win, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **options: Any) -> None:
        if not self._of_host:
            step(self, name)
        plain(self, *args, **options)

    return translated(method)


_OVER_HOST = "the window is over host memory; make it with MPI.Win.Allocate_device"


def moving(method: Any) -> Any:
    """Return a method of windows of device memory as one of all windows.

    mpi4py's method serves windows of host memory. It would read or write addresses of
    the device there. A call for nobody does nothing.
    """
    plain = buffers.of_host(getattr(MPI.Win, method.__name__), _OVER_HOST)
    place = list(inspect.signature(method).parameters).index("target_rank")

    @functools.wraps(method)
    def either(*args: Any) -> Any:
        if args[0]._of_host:
            return plain(*args)
        return None if args[place] == MPI.PROC_NULL else method(*args)

    return translated(either)


@contextmanager
def used(win: Any, spec: Any, written: bool = False) -> Iterator[Items]:
    """Yield the items of an origin, on the device.

    A host array is copied there, and if it is written, back.
    """
    array, host = buffers.array_in(spec), None
    if array is not None and not buffers.buffer_on_device(array):
        host = _numpy(array)
        if written and not host.flags.writeable:
            raise refusal(
                MPI.ERR_BUFFER,
                f"message: expecting an array that may be written, got "
                f"{type(array).__name__} that is read-only; pass a copy",
            )
        array = buffers.copied_to_device(np.ascontiguousarray(host))
        spec = [array, *spec[1:]] if isinstance(spec, (list, tuple)) else array
    found = message(spec)
    if written:
        check_writable(found.view, "Win")
    yield found
    if host is not None:
        win._settle()  # the copy there lives as long
        if written:
            host[...] = array.copy_to_host()


def _numpy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.frombuffer(array, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise MPITypeError(
            MPI.ERR_BUFFER,
            f"message: expecting an array on the device or the host, got "
            f"{shown(array)}; pass one",
        ) from error


_Use = tuple[int, list[buffers.PackedStep]]
"""A stream, and steps on it, which keep temporary arrays."""


class Win(MPI.Win, metaclass=Kind):
    """A window; the methods are those of ``mpi4py.MPI.Win``.

    :meth:`Create` of device arrays and :meth:`Allocate_device` make windows over device
    memory, whose origins may be on the device or on the host. All other windows are
    over host memory, and mpi4py makes their calls.

    Attributes:
        array: this rank's memory: a device array, or None.
    """

    _plain = MPI.Win
    _of_host = True
    array: Any = None
    _comm: Device
    _locks: WindowLocks
    _units: list[int]
    _memory: list[Any]
    _used: dict[int, _Use]  # by number
    _numbers: Iterator[int]

    @translated
    def __new__(cls, win: Any = None) -> Any:
        """Return another object of a window, or of none."""
        made = MPI.Win.__new__(cls, win)
        if type.__instancecheck__(Win, win):
            vars(made).update(vars(win))
        return made

    @classmethod
    @translated
    def Create(
        cls,
        memory: Any,
        disp_unit: int = 1,
        info: MPI.Info = MPI.INFO_NULL,
        comm: Any = MPI.COMM_SELF,
    ) -> Any:
        """Return a window over an array. Collective.

        Ranks of ``numba_symm.mpi.Comm`` pass device arrays, host arrays or None. The
        window is over device memory if any array is on the device.
        """
        if not isinstance(comm, Device):
            if buffers.buffer_on_device(memory):
                raise refusal(
                    MPI.ERR_COMM,
                    "Win.Create: expected a communicator of numba_symm.mpi, such as "
                    "comm=MPI.Comm(MPI.COMM_WORLD), for a device array, got "
                    f"{shown(comm)}; pass one",
                )
            return cls(MPI.Win.Create(memory, disp_unit, info, comm))
        nowhere = memory is None or buffers.is_bottom(memory)
        there = not nowhere and buffers.buffer_on_device(memory)
        where = "device" if there else "nowhere" if nowhere else "host"
        with comm.post.set_up("Win.Create") as exchange:
            everywhere = set(exchange.all_gather(where, "memory"))
        if "device" not in everywhere:
            return cls(MPI.Win.Create(memory, disp_unit, info, comm.host))
        if "host" in everywhere:
            raise refusal(
                MPI.ERR_BUFFER,
                "Win.Create: expected arrays on the device on all ranks, or on the host"
                " on all, got both; copy one to where the others are",
            )
        own = None if nowhere else buffers.there(memory)
        return cls._made(comm, "Win.Create", lambda: own, disp_unit, info)

    @classmethod
    @translated
    def Allocate(
        cls,
        size: int,
        disp_unit: int = 1,
        info: MPI.Info = MPI.INFO_NULL,
        comm: Any = MPI.COMM_SELF,
    ) -> Any:
        """Return a window over ``size`` new bytes of host memory. Collective."""
        return cls(MPI.Win.Allocate(size, disp_unit, info, _plain(comm)))

    @classmethod
    @translated
    def Allocate_device(
        cls,
        size: int,
        disp_unit: int = 1,
        info: MPI.Info = MPI.INFO_NULL,
        comm: Any = MPI.COMM_SELF,
    ) -> Any:
        """Return a window over ``size`` new bytes of device memory, zeros. Collective.

        ``comm`` is a communicator of ``numba_symm.mpi``; ``win.array`` is the array.
        """
        if not isinstance(comm, Device):
            raise refusal(
                MPI.ERR_COMM,
                "Win.Allocate_device: expected a communicator of numba_symm.mpi, such "
                f"as comm=MPI.Comm(MPI.COMM_WORLD), got {shown(comm)}; pass one",
            )

        def allocated() -> Any:
            nbytes = natural(size, "size", MPI.ERR_SIZE)
            if not nbytes:
                return None
            allocator = comm.post.words.allocator
            memory = allocator.memory_of(allocator.allocate(nbytes, comm.size))
            return memory.array(nbytes, BYTE)

        return cls._made(comm, "Win.Allocate_device", allocated, disp_unit, info)

    @classmethod
    def Allocate_shared(
        cls,
        size: int,
        disp_unit: int = 1,
        info: MPI.Info = MPI.INFO_NULL,
        comm: Any = MPI.COMM_SELF,
    ) -> Any:
        """Return a window of mpi4py, over host memory that all ranks access."""
        return cls(MPI.Win.Allocate_shared(size, disp_unit, info, _plain(comm)))

    @classmethod
    def Create_dynamic(
        cls, info: MPI.Info = MPI.INFO_NULL, comm: Any = MPI.COMM_SELF
    ) -> Any:
        """Return a window of mpi4py, to which host memory is attached later."""
        return cls(MPI.Win.Create_dynamic(info, _plain(comm)))

    Attach, Detach = (
        buffers.of_host(each, "a dynamic window takes no others; use MPI.Win.Create")
        for each in (MPI.Win.Attach, MPI.Win.Detach)
    )

    @classmethod
    def _made(
        cls,
        comm: Device,
        what: str,
        make: Callable[[], Any],
        unit: int,
        info: MPI.Info,
    ) -> "Win":
        parts = grouped(dict(enumerate(map(str, comm.post.islands))))
        if len(parts) > 1:
            islands = "; ".join(map(name_ranks, parts.values()))
            raise unsupported(
                f"{what}: expected ranks of one island, which can map each other's "
                f"memory, got the islands {islands}; make a window for each, with "
                "comm.Split"
            )
        seconds = environment.chosen_timeout(comm._options.get("timeout"))
        with comm.post.set_up(what) as exchange, ExitStack() as undo:
            units = units_of_all(exchange, what, unit)  # before memory is allocated
            found = undo.enter_context(closing(WindowLocks(exchange, what, seconds)))
            memory, mapped = mapped_by_all(exchange, what, make)
            # Memory of MPI's own, so that its locks need nothing of their target.
            made: Win = cls(MPI.Win.Allocate(1, 1, info, comm.host))
            undo.pop_all()
        made._locks, made._of_host = found, False
        made.array, made._comm = memory, comm
        made._units, made._memory = units, mapped
        made._used, made._numbers = {}, itertools.count()
        return made

    def tomemory(self) -> Any:
        """Return this rank's memory: a device array, or mpi4py's buffer."""
        return super().tomemory() if self._of_host else self.array

    @property
    def attrs(self) -> tuple[int, int, int]:  # type: ignore[override]
        """The address, the bytes and the displacement unit of this rank's memory."""
        if self._of_host:
            return super().attrs
        unit = self._units[self.group_rank]
        if self.array is None:
            return 0, 0, unit
        view = arrays.view(self.array, "Win")
        return view.address, view.nbytes, unit

    @translated
    def Free(self) -> None:
        """Free the window. Collective."""
        if self._of_host:
            super().Free()
            return
        self._settle()
        seconds = environment.chosen_setup_timeout()
        if not self._locks.meet("Win.Free", seconds):
            super().Free()  # else MPI keeps it, because its call waits for all ranks
        for rank, memory in enumerate(self._memory):
            if memory is not None:
                self._memory[rank] = None
                memory.close()
        self.array = None
        with closing(self._locks):  # the owner may free its memory afterwards
            self._locks.meet("Win.Free", seconds)

    def free(self) -> None:
        """Do as :meth:`Free`, but nothing for a null window."""
        if self:
            self.Free()

    # Calls on the memory of a rank.

    def _check_target(self, rank: int, what: str) -> None:
        """Refuse a call after Free, or with a wrong rank."""
        if not self:
            raise refusal(
                MPI.ERR_WIN, f"{what}: Free was called on the window; make a new one"
            )
        if not 0 <= rank < len(self._memory):
            raise refusal(
                MPI.ERR_RANK,
                f"{what}: expected a rank from 0 to {len(self._memory) - 1} or "
                f"MPI.PROC_NULL, got {rank}; pass one of these",
            )

    def _target(self, rank: int, target: Any, origin: Items, what: str) -> Items:
        """Return the items of a target specification, of as many bytes as origin."""
        self._check_target(rank, what)
        self._locks.check(what, [rank])
        memory, unit = self._memory[rank], self._units[rank]
        return target_of(target, origin, memory, rank, unit, what)

    @contextmanager
    def _atomic(self, rank: int, what: str) -> Iterator[None]:
        """Hold the lock of a target's accumulates until the block's work has ended."""
        self._check_target(rank, what)
        with self._locks.held(rank, what):
            try:
                yield
            finally:
                self._settle()

    def _expose(self, what: str) -> None:
        """Wait for this rank's copies, and for its program's work on its memory."""
        post = self._comm.post
        for array in (None, self.array):
            stream = post.stream_of(array)
            post.refuse_capture(stream, what)
            self._used[next(self._numbers)] = stream, []
        self._settle()

    def _settle(self, what: str = "Win") -> None:
        """Wait for this rank's copies, also of those that other threads enqueued."""
        used = list(self._used.items())
        for stream in dict.fromkeys(stream for _, (stream, _) in used):
            streams.synchronize(stream)
        # Until now, their arrays were in use, and other threads had to wait, too.
        for number, _ in used:
            self._used.pop(number, None)

    def _run(self, steps: list[buffers.PackedStep], array: Any) -> None:
        post = self._comm.post
        stream = post.stream_of(array)
        post.refuse_capture(stream, "Win")
        first, last = next(self._numbers), next(self._numbers)
        self._used[first] = stream, steps  # an interrupt may leave some steps enqueued
        for step in steps:
            step(stream)
        # Another thread may have waited before, and then drops the first number.
        self._used[last] = stream, steps
        self._used.pop(first, None)

    @moving
    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Copy the origin's items to a rank's memory."""
        with used(self, origin) as found:
            into = self._target(target_rank, target, found, "Put")
            self._run(copied(found, into), found.array)

    @moving
    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Copy items of a rank's memory to the origin."""
        with used(self, origin, written=True) as found:
            of = self._target(target_rank, target, found, "Get")
            self._run(copied(of, found), found.array)

    @moving
    def Accumulate(
        self,
        origin: Any,
        target_rank: int,
        target: Any = None,
        op: Any = MPI.SUM,
    ) -> None:
        """Reduce the origin's items into those of a rank's memory, atomically."""
        with used(self, origin) as found, self._atomic(target_rank, "Accumulate"):
            into = self._target(target_rank, target, found, "Accumulate")
            self._run(reduced(found, into, op, "Accumulate"), found.array)

    @moving
    def Get_accumulate(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target: Any = None,
        op: Any = MPI.SUM,
    ) -> None:
        """Get a rank's items, and reduce the origin's into them, atomically."""
        what = "Get_accumulate"
        if op == MPI.NO_OP:
            origin = result  # any array serves, because it is ignored
        self._get_accumulate(origin, result, target_rank, target, op, what)

    def _get_accumulate(
        self, origin: Any, result: Any, rank: int, target: Any, op: Any, what: str
    ) -> None:
        with (
            used(self, result, written=True) as got,
            used(self, origin) as found,
            self._atomic(rank, what),
        ):
            into = self._target(rank, target, got, what)
            steps = copied(into, got)
            _check_equal(what, self._target(rank, target, found, what), into)
            steps += reduced(found, into, op, what)
            self._run(steps, got.array)

    @moving
    def Fetch_and_op(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target_disp: int = 0,
        op: Any = MPI.SUM,
    ) -> None:
        """Do as :meth:`Get_accumulate`, for one item."""
        target, what = (target_disp, 1), "Fetch_and_op"
        self._get_accumulate(origin, result, target_rank, target, op, what)

    @moving
    def Compare_and_swap(
        self,
        origin: Any,
        compare: Any,
        result: Any,
        target_rank: int,
        target_disp: int = 0,
    ) -> None:
        """Get an item; replace it by the origin if it is equal to ``compare``."""
        target, what = (target_disp, 1), "Compare_and_swap"
        with (
            used(self, result, written=True) as got,
            used(self, origin) as new,
            used(self, compare) as old,
            self._atomic(target_rank, what),
        ):
            given, found = (target_rank, target), (new, old, got)
            into, *others = (self._target(*given, each, what) for each in found)
            _check_equal(what, into, *others)
            steps = copied(into, got)
            parts = [bytes_of(each) for each in (into, old, new)]
            self._run([*steps, buffers.compare_and_swap(*parts)], got.array)

    @translated
    def Fence(self, assertion: int = 0) -> None:
        """End the accesses of all ranks, and begin others. Collective.

        It waits for the other ranks without a deadline, and raises if one has ended or
        the communicator has failed.
        """
        if self._of_host:
            super().Fence(assertion)
            return
        self._expose("Fence")
        with watching(self._comm._life.check), watching(self._check_all):
            if self._locks.meet("Fence"):
                self._check_all()

    def _check_all(self, what: str = "Fence") -> None:
        """Refuse to wait for ranks of which one has ended."""
        self._locks.check(what, range(len(self._memory)))

    # Synchronization, in MPI's methods after a step of this window.

    Start: Any = synchronizing("Start", _check_all)
    Wait: Any = synchronizing("Wait", _check_all)
    Post: Any = synchronizing("Post", _expose)
    Sync: Any = synchronizing("Sync", _expose)
    Complete: Any = synchronizing("Complete", _expose)
    Unlock: Any = synchronizing("Unlock", _expose)
    Unlock_all: Any = synchronizing("Unlock_all", _expose)
    Flush: Any = synchronizing("Flush", _settle)
    Flush_all: Any = synchronizing("Flush_all", _settle)
    Flush_local: Any = synchronizing("Flush_local", _settle)
    Flush_local_all: Any = synchronizing("Flush_local_all", _settle)


def _requested(call: Any, plain: Any) -> Any:
    """Return a call that returns a request, which is done: the origin may be used."""

    def method(self: Win, *args: Any) -> Any:
        if self._of_host:
            return plain(self, *args)
        call(self, *args)
        self._settle()
        return Started()

    return datatypes.like(plain, method)


for _name in ("Put", "Get", "Accumulate", "Get_accumulate"):
    _own = f"R{_name.lower()}"
    _mpis = buffers.of_host(getattr(MPI.Win, _own), _OVER_HOST)
    setattr(Win, _own, _requested(getattr(Win, _name), _mpis))


def _check_equal(what: str, into: Items, *others: Items) -> None:
    """Refuse items of different sizes."""
    for each in others:
        if each.nbytes != into.nbytes:
            raise refusal(
                MPI.ERR_TYPE,
                f"{what}: expected items of {into.nbytes} bytes, got {each.nbytes}; "
                "pass items of one type",
            )


def _plain(comm: Any) -> Any:
    """Return the communicator of mpi4py."""
    return comm.host if isinstance(comm, Device) else comm
