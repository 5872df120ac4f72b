"""The communicator: ranks bound to GPUs, and the collectives between them."""

import atexit
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
from numba.core.errors import NumbaError

from numba_symm import arrays, dtypes, environment, streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives import barrier, copy_engine
from numba_symm.collectives.launches import Enqueue
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXSCAN,
    REDUCE,
    REDUCE_SCATTER,
    SCAN,
    Operation,
)
from numba_symm.collectives.point_to_point import (
    Pending,
    Planned,
    Stream,
    Transfers,
    check_apart,
    check_rank,
)
from numba_symm.collectives.vector_forms import (
    Call,
    VectorForms,
    check_length,
    check_type,
    places_of,
    table_of,
)
from numba_symm.collectives.workspace import BLOCK_REGISTERS, MAX_BLOCKS, layout
from numba_symm.device.signals import Guard
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, CollectiveError, SymmError
from numba_symm.group import Group
from numba_symm.kernels import REGISTERS
from numba_symm.launch import ranks
from numba_symm.launch.devices import GPU
from numba_symm.memory import Heap, SymmetricMemory, SymmetricMemoryAllocator
from numba_symm.remembered import UNKNOWN, Remembered
from numba_symm.streams import StreamOrder

MAX_PLANS = 1024
"""Calls that a communicator remembers, of those made last."""

_open: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
_in_use: list[str] = []


def backend() -> str:
    """Return the backend in use, or the one that would be tried first."""
    if _in_use:
        return _in_use[-1]
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
        call: str,
    ):
        self._comm = comm
        self._call = call
        self._launch = launch
        self._source, self._out = arrays  # the launch has only their addresses
        self._stream = stream

    def __repr__(self) -> str:
        return f"<Plan: {self._call}>"

    def __call__(self, stream: Any = None) -> Any:
        """Enqueue the collective and return its output array.

        Args:
            stream: where to, instead of the stream the plan was made with.
        """
        self._comm.check()
        self._comm._agree("a plan", self._call)
        chosen = self._stream if stream is None else _owned(stream)
        self._comm._run(self._launch, chosen, self)
        return self._out


class Communicator(VectorForms):
    """Collectives between the GPUs of the ranks of one host.

    Making one is collective, as are all its methods but messages (``send``, ``recv``,
    ``sendrecv``, ``group``), ``check``, ``synchronize`` and the properties: every rank
    calls them in the same order with arguments that agree as each method says, and with
    the same ``algorithm``. A context manager; leaving it by an exception closes it on
    this rank alone and makes the other ranks' calls fail.

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
            differs. Ranks then wait in each call for all others, and without end:
            ``timeout`` is the kernels'.

    Attributes:
        rank: this rank, from 0.
        size: number of ranks.
        device: this rank's GPU (name, UUID, ordinal …).
        backend: the kind of memory: ``"vmm"``, ``"ipc"`` or ``"host"``.
        refused_backends: why better backends were not taken, by name.
        peer_access: which rank's GPU reaches which other's, None where unknown.
        timeout: as given.
        stream: as given.

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
    ):
        self._group = Group(comm, device, timeout)
        self.timeout = self._group.timeout
        self.rank = self._group.world.rank
        self.size = self._group.world.size
        self.device: GPU = self._group.gpu
        self.backend: str = self._group.backend.name
        self.refused_backends = self._group.refused
        self.peer_access = self._group.peer_access
        self.stream = stream
        self.heap = Heap(self._group)
        self.order = StreamOrder(copy_engine.EVENTS)
        nbytes = layout(self.size).nbytes
        try:
            with self._group.exchange.agreed("Communicator"):
                limit = _block_limit()
            limits = self._group.exchange.all_gather(limit, "grid limits")
            memory, self.workspace = self.heap.allocate(nbytes, "workspace")
            with self._group.exchange.agreed("preparing the workspace"):
                self._fill_sentinels()
        except BaseException:  # on every rank
            with ExitStack() as steps:  # in reverse
                steps.callback(self._group.close)
                steps.callback(self.heap.close_locally)
            raise
        self.max_blocks = min(limits)
        self._memory: arrays.Memory | None = memory
        self._debug = debug
        self._plans = Remembered(MAX_PLANS)
        self._barrier: Enqueue | None = None
        self._pending: Pending | None = None
        _open.add(self)
        _in_use.append(self.backend)

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

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return a new symmetric array; its contents are not defined.

        Collective: every rank passes the same shape and dtype.

        Returns:
            A C-contiguous Numba device array over memory that every rank has mapped.
            Drop it when done: the memory is freed at a later allocation, or at
            ``close``, once every rank has dropped its array.

        Raises:
            ArgumentError: shape or dtype differ between ranks, or are none.
            BackendError: a rank has not enough memory.
        """
        return self._symmetric(shape, dtype, "empty")

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return a new symmetric array of zeros. See :meth:`empty`."""
        return self._symmetric(shape, dtype, "zeros")

    def _symmetric(self, shape: Any, dtype: Any, what: str) -> Any:
        self.enter()
        with self._group.exchange.agreed(what):
            shape = _checked_shape(shape, what)
            dtype = arrays.checked_dtype(dtype, what)
        self._group.exchange.agree_equal(f"shape {shape} of {dtype.name}", what)
        nbytes = math.prod(shape) * dtype.itemsize
        memory, _ = self.heap.allocate(nbytes, what)
        return memory.array(shape, dtype)

    def rendezvous(self, array: Any) -> SymmetricMemory:
        """Return the symmetric memory that ``array`` begins in.

        Collective: every rank passes an array at the same offset of the same block:
        one of :meth:`empty`, of ``comm.allocator``, or memory from cudaMalloc, which
        is registered here. Calls for one block share its mappings and signal pad.

        Raises:
            ArgumentError, BackendError: on all ranks.
        """
        self.enter()
        with self._group.exchange.agreed("rendezvous"):
            view = arrays.view(array, "rendezvous")
            arrays.check_device(view, self.device.ordinal, "rendezvous")
        return self.heap.rendezvous(view.address, array)

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Return a new communicator of the ranks that pass the same color.

        Collective over this communicator, as MPI's Comm_split; fails on all its ranks
        or on none, whatever their colors. The new one has this one's GPU, timeout,
        stream and debug mode, and a workspace, a status board and failures of its
        own; either may be closed first. Communicators may overlap, and may run at
        once on streams of their own; set-up calls and closes that two ranks both
        take part in come in the same order on the two.

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
        self.enter()
        exchange, comm = self._group.exchange, self._group.comm
        with exchange.agreed("split"):
            number, order = ranks.checked_split(comm, color, key)
        with ExitStack() as undo_part, ExitStack() as undo:
            with exchange.agreed("split"):
                part = ranks.split(comm, number, order)
                undo_part.callback(ranks.release, part)  # the child has a duplicate
            child = None
            # It fails on all ranks of a color; here those of the others are told.
            with exchange.agreed("split"):
                if part is not None:
                    child = self._alike(part)
                    undo.callback(child.close)
            undo.pop_all()
        return child

    def dup(self) -> "Communicator":
        """Return a new communicator of the same ranks, in the same order.

        Collective. What :meth:`split` says of a new communicator holds for it; what
        this one was made of needs no method ``split``.

        Raises:
            CollectiveError, ClosedError: this communicator has failed or is closed.
            DeviceError, BackendError, ExchangeError: the new one cannot be made.
        """
        self.enter()
        # Ranks that are in another call are told, and not left in MPI.
        with self._group.exchange.agreed("dup"):
            pass
        return self._alike(self._group.comm)

    def _alike(self, comm: ranks.Comm) -> "Communicator":
        return Communicator(
            comm, self.device.ordinal, self.timeout, self.stream, self._debug
        )

    def barrier(self, stream: Any = None) -> None:
        """Enqueue a barrier of all ranks; the host does not wait.

        What any rank's stream wrote before its barrier is visible to every rank's
        stream after its own.
        """
        self.check()
        self._agree("barrier", "barrier")
        if self._barrier is None:
            self._barrier = barrier.bind(self)
        self._run(self._barrier, self._default_stream(stream))

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
            x: a device array in C order, of any dtype whose elements are at most 16
                bytes. In place: ``out[rank]``.
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
            x: a device array in C order, of any dtype whose elements are at most 16
                bytes; the first axis' length is a multiple of the number of ranks. Its
                r-th part goes to rank r.
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
            out: on the root as for :meth:`all_reduce`; None on the other ranks.
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
            x: a contiguous device array of any shape, of any dtype whose elements are
                at most 16 bytes: the root's is read, the others' are written.
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
        if self._compares():
            self.enter()
            with self._group.exchange.agreed(what):
                prepared = self._parts(what, x, counts, op, out, stream)
            self._group.exchange.agree_equal(prepared[0], what)
        else:
            self._check_open()
            prepared = self._parts(what, x, counts, op, out, stream)
            self.check()
        _, launches, chosen, out = prepared
        for launch in launches:
            self._run(launch, chosen, x, out)
        return out

    def _parts(
        self, what: str, x: Any, counts: Sequence[int], op: Any, out: Any, stream: Any
    ) -> tuple[str, list[Enqueue | None], Stream, Any]:
        """Return the reductions of all ranks' parts, in words and as launches."""
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
            launches.append(self._plan(REDUCE, part, into, op, None, root))
        op = dtypes.reduction(op, what)
        words = f"counts {[n for _, n in places]}, {source.dtype.name}, op {op!r}"
        return words, launches, chosen, out

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
        launch, out, chosen = self._prepared(
            operation, x, op, out, stream, algorithm, root
        )
        self._run(launch, chosen, x, out)
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
        launch, out, chosen = self._prepared(
            operation, x, op, out, stream, algorithm, root
        )
        view = arrays.view(x, operation.name)
        call = _described(operation, view, op, algorithm, root)
        return Plan(self, launch, (x, out), chosen, f"{operation.name} of {call}")

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
            bound = self._bound(operation, x, op, out, stream, algorithm, root)
            self.check()
            return bound
        self.enter()
        exchange, what = self._group.exchange, operation.name
        with exchange.agreed(what):
            bound = self._bound(operation, x, op, out, stream, algorithm, root)
            call = _described(operation, arrays.view(x, what), op, algorithm, root)
        exchange.agree_equal(call, what)
        return bound

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
            root = _checked_root(root, out, self.rank, self.size, operation)
        if out is None and (not operation.at_root or root == self.rank):
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
        return arrays.empty_like(like._replace(shape=shape))

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
        if self._compares():
            self.enter()
            with self._group.exchange.agreed(what):
                call = prepare(what, *args)
            self._group.exchange.agree_equal(call.transfers.words, what)
        else:
            self._check_open()
            call = prepare(what, *args)
        self._transfer(call.transfers, call.stream, *call.keep)
        return call.result

    def _transfer(self, transfers: Transfers, stream: Stream, *keep: Any) -> None:
        """Enqueue messages, or add them to an open group; raise after a failure."""
        self.check()
        if self._pending is not None:
            self._pending.kept += keep
            self._pending.add(transfers, stream)
            return
        self._run(transfers.packed(self), stream)

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

    def _run(self, launch: Enqueue | None, stream: Stream, *keep: Any) -> None:
        """Enqueue a call, or add it to the group that is open.

        Args:
            launch: what enqueues it; None: nothing is to be done.
            stream: where to.
            keep: what must live until it is enqueued.
        """
        if self._pending is not None:
            self._pending.kept += keep
            if launch is not None:
                self._pending.launches.append((launch, stream))
        elif launch is not None:
            trail = self.order.enter(*stream)
            try:
                launch(stream[0])
            finally:  # part of it may have been enqueued
                trail.leave()

    def enter(self) -> None:
        """Wait for every rank to come here, or raise on all of them. Collective.

        Raises:
            CollectiveError: a kernel of any rank gave up, or a rank left by an error.
            ClosedError: the communicator was closed.
        """
        self._group.enter()

    def _compares(self) -> bool:
        """Return whether the ranks are to agree on a call.

        Not after a failure, which each is told once it has made no mistake of its own.
        """
        return self._debug and not self._group.failed

    def _agree(self, what: str, call: str) -> None:
        """Compare a call between the ranks, in debug mode."""
        if self._debug:
            self.enter()
            self._group.exchange.agree_equal(call, what)

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
        self.refuse_in_group("close")
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
            self._close_locally()
            if not isinstance(error, CollectiveError) or self._group.told != told:
                raise

    def _close_locally(self) -> None:
        """Close on this rank, whatever fails on the way; tell the others to leave."""
        with ExitStack() as steps:  # in reverse
            steps.callback(self._group.close_locally)
            steps.callback(self.heap.close_locally)
            steps.callback(self._forget)
            steps.callback(self._group.abandon)

    def _forget(self) -> None:
        _open.discard(self)
        self._plans.clear()
        self._barrier = None
        self.order.close()
        self._memory = None
        if self.backend in _in_use:
            _in_use.remove(self.backend)

    def __enter__(self) -> Self:
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
            try:
                self._close_locally()
            except SymmError as also:  # the first error is the one to see
                error.add_note(f"closing the communicator failed too: {also}")

    def __del__(self) -> None:
        if self in _open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return (
            f"<Communicator rank {self.rank} of {self.size}, {self.backend} memory, "
            f"{self.device.name}>"
        )


def _owned(stream: Any) -> Stream:
    """Return a stream's handle, and the object that keeps the stream, if any."""
    return streams.handle_of(stream), None if isinstance(stream, int) else stream


def _block_limit() -> int:
    """Return how many blocks of a call this GPU should hold at most.

    A quarter of what it can run at once, so that four communicators of a process can
    wait for their peers at the same time.
    """
    if SIMULATED:
        return MAX_BLOCKS
    from cuda.core import Device

    multiprocessors = int(Device().properties.multiprocessor_count)
    resident = multiprocessors * (REGISTERS // BLOCK_REGISTERS)
    return min(MAX_BLOCKS, resident // 4)


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


def _checked_shape(shape: Any, what: str) -> tuple[int, ...]:
    axes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if any(not isinstance(n, int | np.integer) or n < 0 for n in axes):
        raise ArgumentError(f"{what}: shape={shape!r}; give integers from 0")
    return tuple(int(n) for n in axes)


def _checked_root(
    asked: Any, out: Any, rank: int, size: int, operation: Operation
) -> int:
    what = operation.name
    root = check_rank(asked, size, f"{what}: root")
    if operation.at_root and out is not None and rank != root:
        raise ArgumentError(
            f"{what}: out is not None on rank {rank}; only the root, rank {root}, gets "
            "the result"
        )
    return root


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

    After an uncaught error the other ranks are told, so that they do not wait.
    """
    failed = getattr(sys, "last_value", None) is not None
    for comm in list(_open):
        if failed:
            comm._group.abandon()
        warnings.warn(
            f"{comm!r} was still open at exit: call close() on every rank, or use a "
            "with statement",
            RuntimeWarning,
            stacklevel=1,
        )
