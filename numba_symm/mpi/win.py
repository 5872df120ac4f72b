"""One-sided calls of mpi4py on device memory that every rank has mapped.

Puts and gets are copies between this rank's memory and the target's, enqueued on the
stream of the origin's array. Before each call that synchronizes the window, the host
waits for these streams. Before those that let other ranks access this rank's memory, it
also waits for the streams of the communicator and of the window's array. Then it calls
the same method of a window of mpi4py, which implements epochs, locks and errors. A
fence instead waits for the other ranks itself, because they may end meanwhile.
Accumulates hold a lock of their own on the target (``window_locks.py``), so they are
atomic among each other, for all types and operators.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import arrays, environment, streams
from numba_symm.arguments import shown
from numba_symm.environment import SIMULATED
from numba_symm.launch.ranks import grouped, name_ranks
from numba_symm.launch.waiting import watching
from numba_symm.mpi import addresses, buffers, packing
from numba_symm.mpi.buffers import Items
from numba_symm.mpi.comm import Device
from numba_symm.mpi.errors import refusal, unsupported
from numba_symm.mpi.kinds import Kind
from numba_symm.mpi.one_sided import (
    Origin,
    bytes_of,
    check_single,
    copied,
    mapped_by_all,
    moving,
    reduced,
    synchronizing,
    target_of,
    units_of_all,
)
from numba_symm.mpi.pending import DoneRequest
from numba_symm.mpi.reading import natural, translated
from numba_symm.mpi.window_locks import WindowLocks

_BYTE = np.dtype(np.uint8)
_Use = tuple[int, list[packing.PackedStep]]
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
            if addresses.on_device(memory):
                raise refusal(
                    MPI.ERR_COMM,
                    "Win.Create: expected a communicator of numba_symm.mpi, such as "
                    "comm=MPI.Comm(MPI.COMM_WORLD), for a device array, got "
                    f"{shown(comm)}; pass one",
                )
            return cls(MPI.Win.Create(memory, disp_unit, info, comm))
        nowhere = memory is None or buffers.is_bottom(memory)
        where = "nowhere" if nowhere else _where(memory)
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
        own = None if nowhere else addresses.there(memory)
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
            return memory.array(nbytes, _BYTE)

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
            self._used[next(self._numbers)] = post.stream_of(array, what), []
        self._settle()

    def _settle(self, what: str = "Win") -> None:
        """Wait for this rank's copies, also of those that other threads enqueued."""
        used = list(self._used.items())
        for stream in dict.fromkeys(stream for _, (stream, _) in used):
            if not SIMULATED:
                streams.synchronize(stream)
        # Until now, their arrays were in use, and other threads had to wait, too.
        for number, _ in used:
            self._used.pop(number, None)

    def _run(self, steps: list[packing.PackedStep], array: Any) -> None:
        stream = self._comm.post.stream_of(array, "Win")
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
        if target_rank == MPI.PROC_NULL:
            return
        with Origin(self, origin) as found:
            into = self._target(target_rank, target, found, "Put")
            self._run(copied(found, into), found.array)

    @moving
    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Copy items of a rank's memory to the origin."""
        if target_rank == MPI.PROC_NULL:
            return
        with Origin(self, origin, written=True) as found:
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
        if target_rank == MPI.PROC_NULL:
            return
        with Origin(self, origin) as found, self._atomic(target_rank, "Accumulate"):
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
        self._get_accumulate(origin, result, target_rank, target, op, what)

    def _get_accumulate(
        self, origin: Any, result: Any, rank: int, target: Any, op: Any, what: str
    ) -> None:
        if rank == MPI.PROC_NULL:
            return
        if op == MPI.NO_OP:
            origin = result  # any array serves, because it is ignored
        with (
            Origin(self, result, written=True) as got,
            Origin(self, origin) as found,
            self._atomic(rank, what),
        ):
            into = self._target(rank, target, got, what)
            steps = copied(into, got)
            if op != MPI.NO_OP:
                self._target(rank, target, found, what)
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
        if target_rank == MPI.PROC_NULL:
            return
        check_single(origin=origin, result=result)
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
        if target_rank == MPI.PROC_NULL:
            return
        check_single(origin=origin, compare=compare, result=result)
        with (
            Origin(self, result, written=True) as got,
            Origin(self, origin) as new,
            Origin(self, compare) as old,
            self._atomic(target_rank, "Compare_and_swap"),
        ):
            into = self._target(target_rank, target_disp, new, "Compare_and_swap")
            steps = copied(into, got)
            parts = [bytes_of(each) for each in (into, old, new)]
            self._run([*steps, packing.compare_and_swap(*parts)], got.array)

    # With requests, which are done when the origin may be used.

    @moving
    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Any:
        """Do as :meth:`Put`; return a request."""
        return self._requested(self.Put, origin, target_rank, target)

    @moving
    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Any:
        """Do as :meth:`Get`; return a request."""
        return self._requested(self.Get, origin, target_rank, target)

    @moving
    def Raccumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: Any = MPI.SUM
    ) -> Any:
        """Do as :meth:`Accumulate`; return a request."""
        return self._requested(self.Accumulate, origin, target_rank, target, op)

    @moving
    def Rget_accumulate(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target: Any = None,
        op: Any = MPI.SUM,
    ) -> Any:
        """Do as :meth:`Get_accumulate`; return a request."""
        call = self.Get_accumulate
        return self._requested(call, origin, result, target_rank, target, op)

    @translated
    def _requested(self, call: Callable[..., None], *args: Any) -> DoneRequest:
        call(*args)
        self._settle()
        return DoneRequest()

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


def _plain(comm: Any) -> Any:
    """Return the communicator of mpi4py."""
    return comm.host if isinstance(comm, Device) else comm


def _where(memory: Any) -> str:
    return "device" if addresses.on_device(memory) else "host"
