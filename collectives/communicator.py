"""The communicator: ranks bound to GPUs, and the collectives between them."""

import atexit
import functools
import math
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import numpy as np
from numba.core.errors import NumbaError

from numba_symm import (
    arguments,
    arrays,
    deferred,
    dtypes,
    environment,
    forks,
    streams,
)
from numba_symm.arrays import ArrayView
from numba_symm.cache import UNKNOWN, Cache
from numba_symm.collectives.kernels import barrier, copied_all_reduce
from numba_symm.collectives.messages import (
    Pending,
    Planned,
    Stream,
    Transfers,
    by_one_thread,
    check_apart,
    check_rank,
    second_thread,
)
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXSCAN,
    REDUCE,
    REDUCE_PART,
    REDUCE_SCATTER,
    SCAN,
    Operation,
)
from numba_symm.collectives.protocols.binding import Enqueue, InTurn
from numba_symm.collectives.protocols.workspace import (
    BLOCK_REGISTERS,
    MAX_BLOCKS,
    layout,
)
from numba_symm.collectives.vector_forms import (
    Call,
    VectorForms,
    agree_on_counts,
    check_length,
    check_type,
    places_of,
    table_of,
)
from numba_symm.device.signals import Guard
from numba_symm.environment import SIMULATED
from numba_symm.errors import (
    ArgumentError,
    ClosedError,
    CollectiveError,
    ExchangeError,
    SymmError,
)
from numba_symm.group import Group
from numba_symm.kernels import REGISTERS
from numba_symm.launch import ranks, waiting
from numba_symm.launch.devices import GPU
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.memory.heap import Heap
from numba_symm.memory.symmetric import SymmetricMemory
from numba_symm.streams import StreamOrder

P = ParamSpec("P")
T = TypeVar("T")

_REFUSALS = (ArgumentError, ClosedError, CollectiveError)
"""What a call raises before anything is enqueued, and may be followed by others."""

MAX_PLANS = 1024
"""Calls that a communicator remembers, of those made last."""

_open: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
_in_use: dict[Group, str] = {}  # the kinds of memory of those not closed, in order


def backend() -> str:
    """Return the backend in use, or the one that would be tried first."""
    if _in_use:
        return next(reversed(_in_use.values()))
    return environment.requested_backend() or environment.BACKENDS[0]


class Plan:
    """A collective with its arguments packed: each call only launches.

    Made by ``comm.all_reduce_init`` and its like; keeps its arrays. ``plan()``, or
    ``plan(stream=…)``, enqueues it and returns its output array. Every rank calls the
    plans of a communicator in the same order.
    """

    def __init__(
        self,
        comm: "Communicator",
        launch: Enqueue | None,
        arrays: tuple[Any, Any],
        stream: Stream,
        name: str,
        call: str,
    ):
        self._comm = comm
        self._name = name
        self._call = call
        self._launch = launch
        self._source, self._out = arrays  # the launch has only their addresses
        self._stream = stream

    def __repr__(self) -> str:
        return f"<Plan: {self._words()}>"

    def __call__(self, stream: Any = None) -> Any:
        """Enqueue the collective and return its output array.

        Args:
            stream: where to, instead of the stream the plan was made with.
        """
        comm = self._comm
        thread = get_ident()
        if comm._within.setdefault(None, thread) != thread:  # as _begin
            raise second_thread(self._name)
        try:
            if comm._compares():
                chosen = comm._agreed("a plan", self._words, self._chosen, stream)
            else:
                comm.check()
                chosen = self._chosen(stream)
            comm._run(self._name, self._launch, chosen, self)
        finally:
            if comm._pending is None:
                comm._within.clear()
        return self._out

    def _words(self, _: Stream | None = None) -> str:
        return f"{self._name} of {self._call}"

    def _chosen(self, stream: Any) -> Stream:
        return self._stream if stream is None else _owned(stream)


class Communicator(VectorForms):
    """Collectives between the GPUs of the ranks of one host.

    Making one is collective, as are all its methods but messages (``send``, ``recv``,
    ``sendrecv``, ``group``), ``check``, ``synchronize`` and the properties: every rank
    calls them in the same order with arguments that agree as each method says, and with
    the same ``algorithm``. One thread at a time: a call amid another thread's call is
    refused. The CUDA context that was current when it was made must be current in every
    call: after ``cuda.select_device``, select this GPU again first.

    A context manager; leaving it by an exception closes it on this rank alone and makes
    the other ranks' calls fail, as does a call that fails on one rank other than by its
    arguments.

    Args:
        comm: an ``mpi4py`` communicator, which is duplicated, or any object with
            ``rank``, ``size``, ``allgather`` and ``barrier``; :meth:`split` needs
            its method ``split(color, key)``, too.
        device: ordinal of this rank's GPU. None: the device of the current CUDA
            context, else the GPU of this rank's number on its host.
        timeout: seconds that a kernel waits for a peer before it gives up, 0 for
            ever, equal on all ranks. None: ``NUMBA_SYMM_TIMEOUT``, else 300.
        stream: the stream of calls whose array names none. None: the legacy default
            stream.
        debug: compare every call's arguments between the ranks first. Slow; turns a
            mismatch from a timeout, or from wrong results, into an error that says what
            differs. Ranks then wait in each call for all others, as in set-up calls:
            ``timeout`` is the kernels'.
        multiprocessors: the most multiprocessors of a GPU that this communicator's
            kernels occupy at any time, from 1, equal on all ranks. Messages, and the
            collectives made of them, take at least 2 * (size - 1). None:
            ``NUMBA_SYMM_MULTIPROCESSORS``, else up to 256 blocks of 128 threads, which
            occupy all of them.

    Attributes:
        rank: this rank, from 0.
        size: number of ranks.
        device: this rank's GPU (name, UUID, ordinal …).
        backend: the kind of memory: ``"vmm"``, ``"ipc"`` or ``"host"``.
        refused_backends: why better backends were not taken, by name.
        peer_access: which rank's GPU reaches which other's, None where unknown.
        timeout: as given.
        stream: as given.
        multiprocessors: as given, or the environment's.

    Raises:
        ArgumentError, DeviceError, BackendError, ExchangeError: on all ranks.
    """

    def __init__(
        self,
        comm: ranks.Comm,
        device: int | None = None,
        timeout: float | None = None,
        stream: Any = None,
        debug: bool = False,
        multiprocessors: int | None = None,
    ):
        environment.warn_of_unknown()
        ranks.warn_if_alone(comm)
        self._make(Group(comm, device, timeout), stream, debug, multiprocessors)

    def _make(
        self, group: Group, stream: Any, debug: bool, multiprocessors: int | None
    ) -> None:
        """Become the communicator of a group. Collective, as its construction is."""
        heap = None
        try:
            self._group = group
            self.timeout = group.timeout
            self.rank = group.world.rank
            self.size = group.world.size
            self.device: GPU = group.gpu
            self.backend: str = group.backend.name
            self.refused_backends = group.refused
            self.peer_access = group.peer_access
            self.stream = stream
            self.heap = heap = Heap(group)
            self.order = StreamOrder(copied_all_reduce.EVENTS)
            with group.exchange.agreed("Communicator"):
                self._debug = arguments.flag(debug, "Communicator", "debug")
                self._default_stream(stream)
                asked = environment.chosen_multiprocessors(multiprocessors)
                limit = _block_limit(asked)
            self.multiprocessors = asked
            given = f"multiprocessors={asked}, debug={self._debug}"
            group.exchange.agree_equal(given, "Communicator")
            limits = group.exchange.all_gather(limit, "grid limits")
            nbytes = layout(self.size).nbytes
            memory, self.workspace = heap.allocate(nbytes, "workspace")
            with group.exchange.agreed("preparing the workspace"):
                self._fill_sentinels()
            self.max_blocks = min(limits)
            self._memory: arrays.Memory | None = memory
            self._plans = Cache(MAX_PLANS)
            self._barrier: Enqueue | None = None
            self._pending: Pending | None = None
            self._within: dict[None, int] = {}  # the thread that is in a call
            _open.add(self)
            _in_use[self._group] = self.backend
            held = self._group, self.heap, self.order, streams.current_context()
            self._when_dropped = weakref.finalize(self, _drop, repr(self), *held)
            self._when_dropped.atexit = False  # the process' end frees it
            forks.watch(self)
        except BaseException as error:
            with ExitStack() as steps:  # in reverse
                steps.callback(group.give_up, error)
                if heap is not None:
                    steps.callback(heap.close_locally)
            raise

    def _fill_sentinels(self) -> None:
        """Mark mailboxes as empty, before any peer may post to them."""
        for region in layout(self.size).sentinels:
            address = self.workspace.addresses[self.rank] + region.slots
            self._group.backend.fill(address, region.end - region.slots, 0xFF)

    @property
    def guard(self) -> Guard:
        """What this communicator's kernels need to give up a wait."""
        return self._group.guard

    @property
    def allocator(self) -> SymmetricMemoryAllocator:
        """This process' allocator of symmetric memory."""
        return self.heap.allocator

    @by_one_thread
    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return a new symmetric array; its contents are not defined.

        Collective: every rank passes the same shape and dtype.

        Returns:
            A C-contiguous Numba device array over memory that every rank has mapped.
            Drop it when done: the memory is freed at a later allocation, or at
            ``close``, once every rank has dropped its array. Dropped after ``close``,
            it is freed at a later allocation, or ``close``, of any communicator.

        Raises:
            ArgumentError: shape or dtype differ between ranks, or are none.
            BackendError: a rank has not enough memory.
        """
        return self._symmetric(shape, dtype, "empty")

    @by_one_thread
    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return a new symmetric array of zeros. See :meth:`empty`."""
        return self._symmetric(shape, dtype, "zeros")

    def _symmetric(self, shape: Any, dtype: Any, what: str) -> Any:
        with self.set_up(what):
            with self._group.exchange.agreed(what):
                dtype = arrays.checked_dtype(dtype, what)
                shape = arrays.checked_shape(shape, dtype, what)
            self._group.exchange.agree_equal(f"shape {shape} of {dtype.name}", what)
            nbytes = math.prod(shape) * dtype.itemsize
            memory, _ = self.heap.allocate(nbytes, what)
            return memory.array(shape, dtype)

    @by_one_thread
    def rendezvous(self, array: Any) -> SymmetricMemory:
        """Return the symmetric memory that ``array`` begins in.

        Collective: every rank passes an array at the same offset of the same block:
        one of :meth:`empty`, of ``comm.allocator``, or memory from cudaMalloc, which
        is registered here. Calls for one block share its mappings and signal pad.

        Raises:
            ArgumentError, BackendError: on all ranks.
        """
        with self.set_up("rendezvous"):
            with self._group.exchange.agreed("rendezvous"):
                view = arrays.view(array, "rendezvous")
                arrays.check_device(view, self.device.ordinal, "rendezvous")
            return self.heap.rendezvous(view.address, array)

    @by_one_thread
    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Return a new communicator of the ranks that pass the same color.

        Collective over this communicator, as MPI's Comm_split; fails on all its ranks
        or on none, whatever their colors. The new one has this one's GPU, timeout,
        stream, debug mode and limit of multiprocessors, and a workspace, a status
        board and failures of its own; either may be closed first. Communicators may
        overlap, and may run simultaneously on streams of their own, though beside
        other kernels only with ``multiprocessors``. Set-up calls and closes that two
        ranks both take part in come in the same order on the two.

        Args:
            color: which communicator this rank goes to, from 0 to 2**31 - 1. None,
                or MPI.UNDEFINED: to none.
            key: orders the ranks, those of equal key as they are here; 32 bits.

        Returns:
            The communicator, to be closed by all its ranks; None for color None.

        Raises:
            ArgumentError: color or key is none, or this communicator was made of an
                object without a method ``split``.
            CollectiveError, ClosedError: this communicator has failed or is closed.
            DeviceError, BackendError, ExchangeError: a new one cannot be made.
        """
        with self.set_up("split"):
            comm = self._group.comm
            with self._group.exchange.agreed("split"):
                number, order = ranks.checked_split(comm, color, key)
            colors = self._group.exchange.all_gather(number, "split: colors")
            members = [rank for rank in range(self.size) if colors[rank] == number]
            part = functools.partial(ranks.split, comm, number, order)
            return self._child("split", part, members)

    @by_one_thread
    def dup(self) -> "Communicator":
        """Return a new communicator of the same ranks, in the same order.

        Collective. What :meth:`split` says of a new communicator holds for it; what
        this one was made of needs no method ``split``.

        Raises:
            CollectiveError, ClosedError: this communicator has failed or is closed.
            DeviceError, BackendError, ExchangeError: the new one cannot be made.
        """
        with self.set_up("dup"):
            same = functools.partial(ranks.duplicate, self._group.comm)
            return cast(Communicator, self._child("dup", same, range(self.size)))

    def _child(
        self, what: str, make: Callable[[], ranks.Comm | None], members: Sequence[int]
    ) -> "Communicator | None":
        """Return a communicator like this one, within a call that all ranks make.

        Args:
            what: that call.
            make: returns the ranks of the new communicator, None for none. It may
                block in MPI: all ranks are there, or none comes.
            members: these ranks, by their numbers here.
        """
        exchange = self._group.exchange

        def made() -> ranks.Comm | None:
            exchange.barrier(f"{what}: all are here")
            return make()

        with exchange.agreed(what):
            part = waiting.undisturbed(made)
        child = None
        try:
            # It fails on all ranks of a child; here those of the others are told.
            with exchange.agreed(what):
                if part is not None:
                    child = self._alike(part, members)
        except BaseException as error:
            together = exchange.is_everybodys(error)
            if together:
                have = exchange.all_gather(child is not None, f"{what}: undone")
                together = all(have[rank] for rank in members)
            if child is not None and together:
                child.close()
            elif child is not None:
                child._close_locally(error)
            raise
        return child

    def _alike(self, comm: ranks.Comm, members: Sequence[int]) -> "Communicator":
        board, child = self._group.board, Communicator.__new__(Communicator)

        def left() -> bool:
            board.look()
            return any(map(board.is_ahead, members))

        try:
            with waiting.watching(left):  # who leaves may not get as far as the child
                group = Group(comm, self.device.ordinal, self.timeout, own=True)
                child._make(group, self.stream, self._debug, self.multiprocessors)
        except CollectiveError as error:
            board.look()
            raise ExchangeError(str(error)) from error  # this one has not failed
        return child

    def barrier(self, stream: Any = None) -> None:
        """Enqueue a barrier of all ranks; the host does not wait.

        What any rank's stream wrote before its barrier is visible to every rank's
        stream after its own.
        """
        what = "barrier"
        thread = get_ident()
        if self._within.setdefault(None, thread) != thread:  # as _begin
            raise second_thread(what)
        try:
            if self._compares():
                chosen = self._agreed(
                    what, lambda _: what, self._default_stream, stream
                )
            else:
                self.check()
                chosen = self._default_stream(stream)
            try:
                if self._barrier is None:
                    self._barrier = barrier.bind(self)
            except BaseException as error:
                self._give_up_unless_refused(error, what)
                raise
            self._run(what, self._barrier, chosen)
        finally:
            if self._pending is None:
                self._within.clear()

    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce ``x`` over all ranks, element by element; every rank gets the result.

        Collective: every rank passes arrays of equal count and dtype, the same ``op``
        and the same ``algorithm``. All ranks get identical bits. Asynchronous.

        Args:
            x: a contiguous device array of any shape; symmetric or not; of bool, an
                integer of 8 to 64 bits, a float of 8 (e4m3fn and e5m2, from compute
                capability 8.9 on) to 64, bfloat16, complex64 or complex128. Floats of
                fewer than 32 bits accumulate in float32 and are rounded once; integers
                wrap around, and of bool "sum" is "lor", as in NumPy.
            op: one of

                - ``"sum"``, ``"prod"``, ``"min"``, ``"max"``: a NaN on any rank gives
                  NaN; of 0.0 and -0.0, equal to each other, the later rank's is the
                  least and the greatest. Complex numbers have no "min" and "max".
                - ``"avg"``: the sum, divided by the number of ranks before it is
                  rounded; an integer's towards zero, and only sums of 64-bit ones
                  wrap around before. Not for bool.
                - ``"band"``, ``"bor"``, ``"bxor"``: of bool and integers, bit by bit.
                - ``"land"``, ``"lor"``, ``"lxor"``: 0 or 1 in x's type; NaN is true.
                  Not for complex numbers.
                - the MPI.Op of one of these names.
                - a function of two scalars of the type x accumulates in, plain or
                  decorated by ``cuda.jit(device=True)``, that returns one; the result
                  is cast to that type. It is applied in rank order, so it need not be
                  commutative or associative. Each function object is compiled once
                  in each process and kept: define it outside of loops.
            out: where to, of equal size, dtype and order (C or Fortran); ``x`` itself
                for in place. None: a new array of ordinary device memory.
            stream: a Numba, cuda.core, CuPy or torch stream, or a handle. None: the
                stream the array names, torch's or CuPy's current one for their
                arrays, else ``comm.stream``.
            algorithm: ``"one_shot_sentinel"`` and ``"two_shot_sentinel"`` (floats),
                ``"one_shot_marked"``, ``"two_shot_marked"``, ``"one_shot_ll"``,
                ``"two_shot_ll"``, ``"two_shot_signalled"``, ``"copy_engine"`` or
                ``"one_shot_pull"``. None: the fastest.

        Returns:
            ``out``, or the new array, of x's shape.

        Raises:
            ArgumentError: an array or name is wrong; in debug mode, calls differ.
            ExchangeError: in debug mode, the ranks are in different methods.
            CollectiveError: an earlier call of the communicator has failed.
            ClosedError: it was closed.
        """
        return self._call(ALL_REDUCE, x, op, out, stream, algorithm)

    def all_reduce_init(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Prepare an all-reduce to be called many times, as MPI-4's persistent calls.

        Takes what :meth:`all_reduce` takes, and raises what it raises. Calling the
        plan, ``plan()`` or ``plan(stream=…)``, is collective, making it is too in debug
        mode.
        """
        return self._init(ALL_REDUCE, x, op, out, stream, algorithm)

    def all_gather(
        self, x: Any, out: Any = None, stream: Any = None, algorithm: str | None = None
    ) -> Any:
        """Give every rank the arrays of all.

        Collective: every rank passes an array of equal shape and dtype. Asynchronous.

        Args:
            x: a device array in C order, of any dtype. In place: ``out[rank]``.
            out: where to: an array of shape ``(size, *x.shape)`` and x's dtype, in C
                order. None: a new array of ordinary device memory.
            stream: as for :meth:`all_reduce`.
            algorithm: ``"ll"``, ``"marked"``, ``"signalled"`` or ``"copy_engine"``.
                None: the fastest.

        Returns:
            ``out``, or the new array: ``out[r]`` is rank r's x, to the bit.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._call(ALL_GATHER, x, None, out, stream, algorithm)

    def all_to_all(
        self, x: Any, out: Any = None, stream: Any = None, algorithm: str | None = None
    ) -> Any:
        """Send each rank its part of ``x``, and give it every rank's part for it.

        Collective: every rank passes an array of equal shape and dtype. Asynchronous.

        Args:
            x: a device array in C order, of any dtype; the first axis' length is a
                multiple of the number of ranks. Its r-th part goes to rank r.
            out: where to: an array of x's shape and dtype, or x itself. None: a new
                array of ordinary device memory.
            stream: as for :meth:`all_reduce`.
            algorithm: ``"ll"``, ``"marked"``, ``"signalled"`` or ``"copy_engine"``.
                None: the fastest.

        Returns:
            ``out``, or the new array: its r-th part is rank r's part for this rank.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._call(ALL_TO_ALL, x, None, out, stream, algorithm)

    def reduce_scatter(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce ``x`` over all ranks and give each rank its part of the result.

        Collective: every rank passes an array of equal shape and dtype and the same
        ``op``. Asynchronous.

        Args:
            x: a device array in C order, of a dtype that :meth:`all_reduce` takes; the
                first axis' length is a multiple of the number of ranks.
            op: as for :meth:`all_reduce`.
            out: where to: an array of shape ``(x.shape[0] // size, *x.shape[1:])``,
                or x's own part for this rank. None: a new array of ordinary device
                memory.
            stream: as for :meth:`all_reduce`.
            algorithm: ``"sentinel"`` (floats), ``"ll"``, ``"marked"`` or
                ``"signalled"``. None: the fastest.

        Returns:
            ``out``, or the new array: on rank r the r-th part of the reduction, the
            same bits that :meth:`all_reduce` gives, but for a NaN's.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._call(REDUCE_SCATTER, x, op, out, stream, algorithm)

    def scan(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce ``x`` over the ranks up to each: rank r gets that of ranks 0 to r.

        Collective: every rank passes an array of equal count and dtype and the same
        ``op``. Asynchronous.

        Args:
            x: a contiguous device array of any shape, of a dtype that
                :meth:`all_reduce` takes.
            op: as for :meth:`all_reduce`, but not ``"avg"``.
            out: where to, of equal size, dtype and order; ``x`` itself for in place.
                None: a new array of ordinary device memory.
            stream: as for :meth:`all_reduce`.
            algorithm: ``"sentinel"`` (floats), ``"ll"``, ``"marked"`` or
                ``"signalled"``. None: the fastest.

        Returns:
            ``out``, or the new array, of x's shape. The last rank's is what
            :meth:`all_reduce` gives, to the bit, but for a NaN's.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._call(SCAN, x, op, out, stream, algorithm)

    def exscan(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce ``x`` over the ranks before each: rank r gets that of ranks 0 to r-1.

        Takes what :meth:`scan` takes, and raises what it raises.

        Returns:
            ``out``, or the new array, of x's shape. On rank 0, where there is nothing
            to reduce, it holds the operator's identity (``dtypes.identity``; of a sum
            of floats -0.0). A function's identity is not known: with one, rank 0's
            ``out`` is left as it is, and what a new array holds is not defined.
        """
        return self._call(EXSCAN, x, op, out, stream, algorithm)

    def reduce(
        self,
        x: Any,
        op: Any = "sum",
        root: int = 0,
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce ``x`` over all ranks, for one of them.

        Collective: every rank passes an array of equal count and dtype, the same
        ``op`` and the same ``root``. Asynchronous.

        Args:
            x: a contiguous device array of any shape, of a dtype that
                :meth:`all_reduce` takes.
            op: as for :meth:`all_reduce`.
            root: the rank that gets the result.
            out: on the root as for :meth:`all_reduce`. Elsewhere ignored, as in MPI.
            stream: as for :meth:`all_reduce`.
            algorithm: ``"sentinel"`` and ``"two_shot_sentinel"`` (floats), ``"ll"``,
                ``"two_shot_ll"``, ``"marked"``, ``"two_shot_marked"``, ``"signalled"``
                or ``"direct"`` (between symmetric arrays of this communicator, the
                root's ``out`` among them; if one is not, as ``"signalled"``). None:
                the fastest.

        Returns:
            On the root ``out``, or the new array, of x's shape: the same bits that
            :meth:`all_reduce` gives, but for a NaN's. None on the other ranks.

        Raises:
            As :meth:`all_reduce`; ArgumentError for a root that is no rank.
        """
        return self._call(REDUCE, x, op, out, stream, algorithm, root)

    def broadcast(
        self, x: Any, root: int = 0, stream: Any = None, algorithm: str | None = None
    ) -> Any:
        """Give every rank what ``x`` holds on rank ``root``.

        Collective: every rank passes an array of equal count and dtype and the same
        ``root``. Asynchronous.

        Args:
            x: a contiguous device array of any shape and dtype: the root's is read,
                the others' are written.
            root: the rank that has the contents.
            stream: as for :meth:`all_reduce`.
            algorithm: ``"ll"``, ``"marked"``, ``"signalled"``, ``"direct"`` (between
                symmetric arrays of this communicator; if one is not, or of 2 ranks, as
                ``"signalled"``) or ``"copy_engine"``. None: the fastest.

        Returns:
            ``x``.

        Raises:
            As :meth:`all_reduce`; ArgumentError for a root that is no rank.
        """
        return self._call(BROADCAST, x, None, x, stream, algorithm, root)

    def all_gather_init(
        self, x: Any, out: Any = None, stream: Any = None, algorithm: str | None = None
    ) -> Plan:
        """Prepare an :meth:`all_gather`, as :meth:`all_reduce_init` does."""
        return self._init(ALL_GATHER, x, None, out, stream, algorithm)

    def all_to_all_init(
        self, x: Any, out: Any = None, stream: Any = None, algorithm: str | None = None
    ) -> Plan:
        """Prepare an :meth:`all_to_all`, as :meth:`all_reduce_init` does."""
        return self._init(ALL_TO_ALL, x, None, out, stream, algorithm)

    def reduce_scatter_init(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Prepare a :meth:`reduce_scatter`, as :meth:`all_reduce_init` does."""
        return self._init(REDUCE_SCATTER, x, op, out, stream, algorithm)

    def scan_init(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Prepare a :meth:`scan`, as :meth:`all_reduce_init` does."""
        return self._init(SCAN, x, op, out, stream, algorithm)

    def exscan_init(
        self,
        x: Any,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Prepare an :meth:`exscan`, as :meth:`all_reduce_init` does."""
        return self._init(EXSCAN, x, op, out, stream, algorithm)

    def reduce_init(
        self,
        x: Any,
        op: Any = "sum",
        root: int = 0,
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Prepare a :meth:`reduce`, as :meth:`all_reduce_init` does."""
        return self._init(REDUCE, x, op, out, stream, algorithm, root)

    def broadcast_init(
        self, x: Any, root: int = 0, stream: Any = None, algorithm: str | None = None
    ) -> Plan:
        """Prepare a :meth:`broadcast`, as :meth:`all_reduce_init` does."""
        return self._init(BROADCAST, x, None, x, stream, algorithm, root)

    @by_one_thread
    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Reduce ``x`` over all ranks and give each rank its part, of any length.

        Collective: every rank passes an array of equal count and dtype, the same
        ``counts`` and the same ``op``. Asynchronous. One :meth:`reduce` for each part.

        Args:
            x: a device array in C order, of a dtype that :meth:`all_reduce` takes.
            counts: how many elements each rank gets; together as many as x has.
            op: as for :meth:`all_reduce`.
            out: where to: an array of ``counts[rank]`` elements of x's type, apart from
                x or its own part. None: a new array of one axis.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        what = "reduce_scatter_v"
        given = what, x, counts, op, out, stream
        if self._compares():
            prepared = self._agreed(what, operator.itemgetter(0), self._parts, *given)
        else:
            self._check_open()
            try:
                prepared = self._parts(*given)
            except BaseException as error:
                self._give_up_unless_refused(error, what)
                raise
            self.check()
        _, launch, chosen, out = prepared
        self._run(what, launch, chosen, x, out)
        return out

    def _parts(
        self, what: str, x: Any, counts: Sequence[int], op: Any, out: Any, stream: Any
    ) -> tuple[str, Enqueue | None, Stream, Any]:
        """Return the reductions of all ranks' parts, in words and as a launch."""
        source = self._flat(arrays.view(x, what), what)
        places = places_of(table_of(counts, None, self.size, f"{what}: counts"))
        check_length(source, sum(places[-1]), f"{what}: x", "the sum of counts")
        first, count = places[self.rank]
        chosen = self._stream_for(stream, source)
        if out is None:
            out = self._new(source, (count,), chosen[0], what)
        target = self._flat(arrays.view(out, f"{what}: out"), f"{what}: out", True)
        check_length(target, count, f"{what}: out", "counts[rank]")
        check_type(target, source, what)
        itemsize = source.dtype.itemsize
        if target.address != source.address + first * itemsize:
            # Another rank's part is reduced after this one's was written.
            check_apart(source, target, what)
        launches = []
        for root, (first, count) in enumerate(places):
            address = source.address + first * itemsize
            part = source._replace(address=address, shape=(count,), size=count)
            into = target._replace(shape=(count,)) if root == self.rank else None
            launches.append(self._plan(REDUCE_PART, part, into, op, None, root))
        op = dtypes.reduction(op, what)
        words = f"counts {[n for _, n in places]}, {source.dtype.name}, op {op!r}"
        todo = [launch for launch in launches if launch is not None]
        return words, InTurn(*todo) if todo else None, chosen, out

    def _call(
        self,
        operation: Operation,
        x: Any,
        op: Any,
        out: Any,
        stream: Any,
        algorithm: str | None,
        root: int | None = None,
    ) -> Any:
        thread = get_ident()
        if self._within.setdefault(None, thread) != thread:  # as _begin
            raise second_thread(operation.name)
        try:
            launch, out, chosen = self._prepared(
                operation, x, op, out, stream, algorithm, root
            )
            self._run(operation.name, launch, chosen, x, out)
        finally:
            if self._pending is None:
                self._within.clear()
        return out

    def _init(
        self,
        operation: Operation,
        x: Any,
        op: Any,
        out: Any,
        stream: Any,
        algorithm: str | None,
        root: int | None = None,
    ) -> Plan:
        with self._alone(operation.name):
            launch, out, chosen = self._prepared(
                operation, x, op, out, stream, algorithm, root
            )
        view = arrays.view(x, operation.name)
        call = _described(operation, view, op, algorithm, root)
        return Plan(self, launch, (x, out), chosen, operation.name, call)

    def _prepared(
        self,
        operation: Operation,
        x: Any,
        op: Any,
        out: Any,
        stream: Any,
        algorithm: str | None,
        root: int | None = None,
    ) -> tuple[Enqueue | None, Any, Stream]:
        """Return a call's launch, its output, its stream's handle and owner.

        In debug mode the ranks agree first, so that an error of one is all ranks'.
        """
        if not self._compares():
            self._check_open()
            try:
                bound = self._bound(operation, x, op, out, stream, algorithm, root)
            except BaseException as error:
                self._give_up_unless_refused(error, operation.name)
                raise
            self.check()
            return bound
        what = operation.name

        def words(_: object) -> str:
            return _described(operation, arrays.view(x, what), op, algorithm, root)

        given = operation, x, op, out, stream, algorithm, root
        return self._agreed(what, words, self._bound, *given)

    def _bound(
        self,
        operation: Operation,
        x: Any,
        op: Any,
        out: Any,
        stream: Any,
        algorithm: str | None,
        root: int | None = None,
    ) -> tuple[Enqueue | None, Any, Stream]:
        what = operation.name
        source = arrays.dense(arrays.view(x, what), what)
        chosen = self._stream_for(stream, source)
        if operation.rooted:
            root = check_rank(root, self.size, f"{what}: root")
        if operation.at_root and root != self.rank:
            out = None  # ignored, as in MPI
        elif out is None:
            out = self._new_output(operation, source, chosen[0])
        target = None
        if out is not None:
            target = source if out is x else arrays.view(out, f"{what}: out")
        launch = self._plan(operation, source, target, op, algorithm, root)
        return launch, out, chosen

    def _new_output(self, operation: Operation, source: ArrayView, handle: int) -> Any:
        shape = operation.shape(source, self.size)
        return self._new(source, shape, handle, operation.name)

    def _new(
        self, like: ArrayView, shape: tuple[int, ...], handle: int, what: str
    ) -> Any:
        """Return a new array of that type and order, for work on a stream."""
        if not SIMULATED and streams.is_capturing(handle):
            raise ArgumentError(
                f"{what}: pass out= while a stream is being captured into a "
                "graph; memory cannot be allocated then"
            )
        return arrays.empty(shape, like.dtype, what, like.order or "C")

    def _plan(
        self,
        operation: Operation,
        source: ArrayView,
        target: ArrayView | None,
        op: Any,
        algorithm: str | None,
        root: int | None,
    ) -> Enqueue | None:
        """Return the packed launch, a remembered one if there is; None for no work.

        ``target`` is None on a rank that gets nothing.
        """
        what = operation.name
        op = dtypes.reduction(op if operation.reduces else "sum", what)
        if algorithm is not None:
            operation.check_algorithm(algorithm)
        # All that a check below looks at.
        read = (source.address, source.shape, source.dtype, source.order)
        written = None
        if target is not None:
            written = (target.address, target.size, target.order, target.readonly)
        # Plans hold peers' addresses, which go when a symmetric block does.
        key = (what, algorithm, op, root, read, written, self.heap.generation)
        alike = target is None or target.dtype == source.dtype
        known: Enqueue | None = self._plans.get(key)
        if known is not UNKNOWN and alike:
            return known
        parts = operation.parts(self.size)
        if operation.reduces:
            operation.check(op)
            element = self._reducible(source.dtype, op, what)
            count = source.size // parts
        else:
            element, count = dtypes.moved(source.dtype, source.size // parts)
        if target is not None:
            _check_output(operation, source, target, self.rank, self.size)
            # A broadcast's root only reads it.
            reads = operation.rooted and not operation.at_root and root == self.rank
            if target.readonly and not reads:
                raise ArgumentError(f"{what}: out is read-only")
        nbytes = source.nbytes // parts
        name = operation.chosen(algorithm, nbytes, self.size, element)
        launch = None
        if count > 0:
            for view in filter(None, (source, target)):
                arrays.check_device(view, self.device.ordinal, what)
            self.check()  # before a kernel is compiled for nothing
            address = 0 if target is None else target.address
            rooted = {"root": root} if operation.rooted else {}
            with _compiling(op, element, what):
                launch = operation.algorithms[name](
                    self, source.address, address, count, element, op, **rooted
                )
        self._plans.put(key, launch)
        return launch

    def _collected(self, what: str, prepare: Callable[..., Call], *args: Any) -> Any:
        """Enqueue a collective that ``prepare(what, *args)`` makes, return its result.

        In debug mode the ranks agree first, so that an error of one is all ranks'.
        """
        with self._alone(what):
            if self._compares():
                with self.set_up(what):
                    call = self._compared(what, self._admitted, prepare, what, *args)
                    agree_on_counts(self._group.exchange, what, call.transfers)
            else:
                self._check_open()
                try:
                    call = prepare(what, *args)
                except BaseException as error:
                    self._give_up_unless_refused(error, what)
                    raise
            self._transfer(what, call.transfers, call.stream, *call.keep)
        return call.result

    def _admitted(self, call: Call) -> str:
        """Return what the ranks must agree on, if an open group can take the call."""
        if self._pending is not None:
            self._pending.check(call.transfers, call.stream)
        return call.transfers.words

    def _transfer(
        self, what: str, transfers: Transfers, stream: Stream, *keep: Any
    ) -> None:
        """Enqueue messages, or add them to an open group; raise after a failure."""
        self.check()
        if self._pending is not None:
            self._pending.kept += keep
            self._pending.add(transfers, stream)
            return
        try:
            launch = transfers.packed(self)
        except BaseException as error:
            self._give_up_unless_refused(error, what)
            raise
        self._run(what, launch, stream)

    def _planned(self, plan: Callable[..., Planned], *given: Any) -> Planned:
        """Return what ``plan(self, *given)`` returns, remembered.

        It may look at nothing else that changes, and keep no array.
        """
        # Peers' addresses hold as long as what is mapped. Whose memory lies at an
        # address is not asked again.
        key = (plan, given, self.heap.generation)
        found: Planned = self._plans.get(key)
        if found is UNKNOWN:
            found = plan(self, *given)
            self._plans.put(key, found)
        return found

    def _usable(self, view: ArrayView, what: str, written: bool = False) -> ArrayView:
        """Return a dense array of this rank's GPU, or refuse what is none."""
        arrays.check_device(arrays.dense(view, what), self.device.ordinal, what)
        if written and view.readonly:
            raise ArgumentError(f"{what} is read-only")
        return view

    def _reducible(self, dtype: Any, op: dtypes.Op, what: str) -> dtypes.Element:
        """Return the element type, or refuse what it or this GPU cannot do."""
        element = dtypes.element(dtype, what)
        dtypes.check(op, element, what)
        if not SIMULATED:
            capability, gpu = self.device.compute_capability, self.device.name
            dtypes.check_capability(element, capability, gpu, what)
        return element

    def _stream_for(self, stream: Any, array: ArrayView) -> Stream:
        """Return the handle of the stream to use for an array, and what keeps it."""
        if stream is None and array.stream is not None:
            return array.stream, None
        return self._default_stream(stream)

    def _default_stream(self, stream: Any) -> Stream:
        chosen = self.stream if stream is None else stream
        return (streams.LEGACY_DEFAULT, None) if chosen is None else _owned(chosen)

    def _run(
        self, what: str, launch: Enqueue | None, stream: Stream, *keep: Any
    ) -> None:
        """Enqueue a call, or add it to the group that is open.

        If it fails, part of it may have been enqueued, or all while the other ranks
        have theirs: the communicator fails, unless a capture has taken what there was.

        Args:
            what: the operation.
            launch: what enqueues it; None: nothing is to be done.
            stream: where to.
            keep: what must live until it is enqueued.
        """
        if self._pending is not None:
            self._pending.kept += keep
            if launch is not None:
                self._pending.launches.append((what, launch, stream))
        elif launch is not None:
            handle = stream[0]
            try:
                trail = self.order.enter(handle)
                try:
                    launch(handle)
                finally:
                    trail.leave()
            except BaseException as error:
                self._give_up(error, what, handle)
                raise

    def _begin(self, what: str) -> None:
        """Keep other threads' calls out, which are refused until :meth:`_end`.

        The calls that take least time do the same without calling these methods.

        Args:
            what: the call that begins.

        Raises:
            ArgumentError: another thread is in a call.
        """
        # Atomic, and of no effect if an interrupt left this thread's mark behind.
        thread = get_ident()
        if self._within.setdefault(None, thread) != thread:
            raise second_thread(what)

    def _end(self) -> None:
        """Let other threads' calls in, unless this one was added to an open group."""
        if self._pending is None:
            self._within.clear()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Make a call between :meth:`_begin` and :meth:`_end`."""
        self._begin(what)
        try:
            yield
        finally:
            self._end()

    def _give_up_unless_refused(self, error: BaseException, what: str) -> None:
        """Make the communicator fail after an error before anything was enqueued.

        Not after a rank's own mistake, which the right call may follow.
        """
        if not isinstance(error, _REFUSALS):
            self._give_up(error, what)

    def _give_up(self, error: BaseException, what: str, *stream_handles: int) -> None:
        """Make the communicator fail after any error amid a call.

        Not if all of the call was on streams in captures: no graph comes of them.
        """
        spoiled = [streams.spoil_capture(handle) for handle in stream_handles]
        if not (spoiled and all(spoiled)):
            self._group.abandon(error, what)

    def set_up(self, what: str) -> AbstractContextManager[None]:
        """Make a call that all ranks make, once all are here, or raise on all.

        A rank that leaves the block by an exception of its own tells the others.

        Args:
            what: the call, as the user names it.

        Raises:
            CollectiveError: the communicator has failed.
            ClosedError: the communicator was closed.
        """
        return self._group.set_up(what)

    def _compares(self) -> bool:
        """Return whether the ranks are to agree on a call.

        Not after a failure, which each is told once it has made no mistake of its own.
        """
        return self._debug and not self._group.failed

    def _agreed(
        self,
        what: str,
        words: Callable[[T], str],
        prepare: Callable[..., T],
        *args: Any,
    ) -> T:
        """Return what ``prepare(*args)`` does, once every rank is ready for the call.

        Collective, for debug mode.

        Args:
            what: the operation.
            words: returns, of what was prepared, what all ranks must pass alike.
            prepare: checks all that this rank passes.
            *args: what it passes.

        Raises:
            SymmError: on all ranks: one could not prepare, or they differ in words.
        """
        with self.set_up(what):
            return self._compared(what, words, prepare, *args)

    def _compared(
        self,
        what: str,
        words: Callable[[T], str],
        prepare: Callable[..., T],
        *args: Any,
    ) -> T:
        """Do what :meth:`_agreed` does, within a call that all ranks make."""
        with self._group.exchange.agreed(what):
            made = prepare(*args)
            said = words(made)
        self._group.exchange.agree_equal(said, what)
        return made

    def check(self) -> None:
        """Raise if the communicator has failed or is closed; never waits.

        Raises:
            CollectiveError: it has failed, and why: CollectiveTimeout, CallMismatch
                or RankLeft.
            ClosedError: the communicator was closed.
        """
        self._group.check()

    def _check_open(self) -> None:
        """Raise if it is closed: a rank's own mistakes are told before failures."""
        self._group.check_open()

    def synchronize(self, stream: Any = None) -> None:
        """Wait for a stream, then :meth:`check`. Not collective.

        Args:
            stream: None waits for ``comm.stream``.
        """
        self.refuse_in_group("synchronize")
        handle, _ = self._default_stream(stream)
        if not SIMULATED and not self._group.closed:
            streams.synchronize(handle)
        self.check()

    def close(self) -> None:
        """Wait for this GPU's work, unmap all peers and free what nobody uses.

        Collective, and idempotent. Arrays of :meth:`empty` stay usable on their own
        rank. After a failure it is local and never waits for a peer.

        Raises:
            CollectiveError: it had failed, and no call of this rank has said so; it is
                closed now.
        """
        if self._group.closed:
            return
        with self._alone("close"):
            self.refuse_in_group("close")
            self._close()

    def _close(self) -> None:
        told = self._group.told
        try:
            if not SIMULATED:
                streams.synchronize_device()
            failure = self._group.failure_after_meeting()
            if failure is not None:
                raise failure
            self._forget()
            self.heap.close()
            self._group.close()
        except BaseException as error:
            self._close_locally(error, "close")
            if not isinstance(error, CollectiveError) or self._group.told != told:
                raise

    def _close_locally(self, cause: BaseException, operation: str = "") -> None:
        """Close on this rank, whatever fails on the way; tell the others why."""
        with ExitStack() as steps:  # in reverse
            steps.callback(self._group.close_locally)
            steps.callback(self.heap.close_locally)
            steps.callback(self._forget)
            steps.callback(self._group.abandon, cause, operation)

    def disown(self) -> None:
        """Leave it to the parent, in a forked child, which may drop it silently."""
        _open.discard(self)
        self._when_dropped.detach()

    def _forget(self) -> None:
        _open.discard(self)
        self._when_dropped.detach()
        self._plans.clear()
        self._barrier = None
        self.order.close()
        self._memory = None
        _in_use.pop(self._group, None)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif error is not None and not self._group.closed:
            # The other ranks may not be leaving: wait for nobody.
            self._group.abandon(error)
            try:
                with self._alone("close"):
                    self._close_locally(error)
            except SymmError as also:  # the first error is the one to see
                error.add_note(f"closing the communicator failed too: {also}")

    def __repr__(self) -> str:
        return (
            f"<Communicator rank {self.rank} of {self.size}, {self.backend} memory, "
            f"{self.device.name}>"
        )


def _drop(
    name: str, group: Group, heap: Heap, order: StreamOrder, context: Any
) -> None:
    """Give up a communicator that nobody can close any more, and tell the others.

    The garbage collector may call it in any thread, at any moment: nothing is unmapped
    here, as that waits for the GPU.
    """
    group.why_closed = "the communicator was dropped; keep it until it is closed"
    with ExitStack() as steps:  # in reverse
        steps.callback(warnings.warn, f"{name} was not closed", ResourceWarning)
        steps.callback(_in_use.pop, group, None)
        steps.callback(setattr, group, "closed", True)
        steps.callback(deferred.defer, _undo, group, heap, order, context)
        steps.callback(group.abandon, "dropped the communicator without closing it")


def _undo(group: Group, heap: Heap, order: StreamOrder, context: Any) -> None:
    """Unmap what a dropped communicator had mapped."""
    with ExitStack() as steps:  # in reverse
        steps.enter_context(streams.on_context(context))
        steps.callback(group.close_locally)
        steps.callback(heap.close_locally)
        steps.callback(order.close)


def _owned(stream: Any) -> Stream:
    """Return a stream's handle, and the object that keeps the stream, if any."""
    return streams.handle_of(stream), None if isinstance(stream, int) else stream


def _block_limit(asked: int | None) -> int:
    """Return how many blocks of a call this GPU should hold at most.

    A GPU spreads few blocks over as many multiprocessors, so the multiprocessors that
    were ``asked`` for are blocks. Unasked, a quarter of the blocks that it can hold, so
    that those of four communicators of a process can wait at the same time.
    """
    if SIMULATED:
        return MAX_BLOCKS if asked is None else min(MAX_BLOCKS, asked)
    from cuda.core import Device

    multiprocessors = int(Device().properties.multiprocessor_count)
    resident = multiprocessors * (REGISTERS // BLOCK_REGISTERS)
    limit = min(MAX_BLOCKS, resident // 4)
    if asked is None:
        return limit
    if asked > multiprocessors:
        raise ArgumentError(
            f"multiprocessors={asked}: this GPU has {multiprocessors}; pass at most "
            "as many"
        )
    return min(limit, asked)


@contextmanager
def _compiling(op: dtypes.Op, element: dtypes.Element, what: str) -> Iterator[None]:
    """Say whose function it is that Numba cannot compile."""
    try:
        yield
    except NumbaError as error:
        if not isinstance(op, dtypes.UserOperator):
            raise
        raise ArgumentError(
            f"{what}: op={op} cannot be compiled for two {element.accumulate.name}; "
            f"pass a function that numba.cuda compiles: {error}"
        ) from error


def _described(
    operation: Operation,
    x: ArrayView,
    op: Any,
    algorithm: str | None,
    root: int | None,
) -> str:
    """Return what the ranks must agree on, in words."""
    words = [f"{x.size} {x.dtype.name} in {x.order} order"]
    if operation.reduces:
        words.append(f"op {dtypes.reduction(op, operation.name)!r}")
    if operation.rooted:
        words.append(f"root {root}")
    return ", ".join([*words, f"algorithm {algorithm!r}"])


def _check_output(
    operation: Operation, source: ArrayView, target: ArrayView, rank: int, size: int
) -> None:
    what = operation.name
    arrays.dense(target, f"{what}: out")
    wanted = math.prod(operation.shape(source, size))
    if target.dtype != source.dtype or target.size != wanted:
        raise ArgumentError(
            f"{what}: out has {target.size} {target.dtype.name}, x has {source.size} "
            f"{source.dtype.name}; out must have {wanted} of x's type"
        )
    if target.order != source.order:
        raise ArgumentError(
            f"{what}: x is in {source.order} order and out in {target.order} order, so "
            "their elements do not correspond; pass both in one order"
        )
    # In place, the smaller of the two is this rank's part of the larger.
    small, large = sorted((source, target), key=lambda view: view.nbytes)
    place = large.address + (rank * small.nbytes if large.size > small.size else 0)
    apart = (
        small.address >= large.address + large.nbytes
        or large.address >= small.address + small.nbytes
    )
    if not apart and small.address != place:
        raise ArgumentError(
            f"{what}: out overlaps x without being x, or this rank's part of it; pass "
            "that, or an array apart"
        )


@atexit.register
def _warn_of_open() -> None:
    """Say which communicators were never closed; the exit code stays.

    The other ranks are told why, so that they do not wait for this one.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    for comm in list(_open):
        comm._group.abandon(error or "ended without closing the communicator")
        warnings.warn(
            f"{comm!r} was still open at exit: call close() on every rank, or use a "
            "with statement",
            RuntimeWarning,
            stacklevel=1,
        )
