"""The communicator: ranks bound to GPUs, and the collectives between them."""

import atexit
import math
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from numba_symm import arrays, dtypes, environment, streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives import barrier, select
from numba_symm.collectives.workspace import MAX_BLOCKS, layout
from numba_symm.device.signals import Guard
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, SymmError
from numba_symm.group import Group
from numba_symm.kernels import Launch
from numba_symm.launch import ranks
from numba_symm.launch.devices import GPU
from numba_symm.memory import Heap, SymmetricMemory, SymmetricMemoryAllocator
from numba_symm.streams import StreamOrder

MAX_PLANS = 1024
"""Packed launches a communicator remembers; the least recently used one goes."""

_open: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
_in_use: list[str] = []


def backend() -> str:
    """Return the backend in use, or the one that would be tried first."""
    if _in_use:
        return _in_use[-1]
    return environment.requested_backend() or environment.BACKENDS[0]


class Plan:
    """A collective with its arguments packed: each call is one launch.

    Made by ``comm.all_reduce_init``; keeps its arrays. Every rank calls the plans of
    a communicator in the same order.
    """

    def __init__(
        self,
        comm: "Communicator",
        launch: Launch | None,
        arrays: tuple[Any, Any],
        stream: int,
        call: str,
    ):
        self._comm = comm
        self._call = call
        self._launch = launch
        self._source, self._out = arrays  # the launch has only their addresses
        self._stream = stream

    def __call__(self, stream: Any = None) -> Any:
        """Enqueue the collective and return its output array.

        Args:
            stream: where to, instead of the stream the plan was made with.
        """
        self._comm.check()
        self._comm._agree("a plan's all_reduce", self._call)
        handle = self._stream if stream is None else streams.handle_of(stream)
        self._comm._run(self._launch, handle)
        return self._out


class Communicator:
    """Collectives between the GPUs of the ranks of one host.

    Making one is collective, as are all its methods but ``check``, ``synchronize``
    and the properties: every rank calls them in the same order with arguments that
    agree as each method says. A context manager; leaving it by an exception closes
    it on this rank alone and makes the other ranks' calls fail.

    Args:
        comm: an ``mpi4py`` communicator, which is duplicated, or any object with
            ``rank``, ``size``, ``allgather`` and ``barrier``.
        device: ordinal of this rank's GPU. None: the device of the current CUDA
            context, else the GPU of this rank's number on its host.
        timeout: seconds that a kernel waits for a peer before it gives up, 0 for
            ever, equal on all ranks. None: ``NUMBA_SYMM_TIMEOUT``, else 300.
        stream: the stream of calls whose array names none. None: the legacy default
            stream.
        debug: compare every call's arguments between the ranks first. Slow; turns a
            mismatch from a timeout into an error that says what differs.

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
        nbytes = layout(self.size).nbytes
        try:
            with self._group.exchange.agreed("Communicator"):
                limit = _block_limit()
            limits = self._group.exchange.all_gather(limit, "grid limits")
            memory, self.workspace = self.heap.allocate(nbytes, "workspace")
        except BaseException:  # on every rank
            self._group.close()
            raise
        self.max_blocks = min(limits)
        self._memory: arrays.Memory | None = memory
        self._debug = debug
        self._order = StreamOrder()
        self._plans: OrderedDict[Any, Launch | None] = OrderedDict()
        self._barrier: Launch | None = None
        _open.add(self)
        _in_use.append(self.backend)

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
            shape, dtype = _checked_shape(shape, what), _checked_dtype(dtype, what)
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
            x: a contiguous device array of float16, bfloat16, float32, float64,
                int32 or int64, of any shape; symmetric or not. 16-bit floats
                accumulate in float32, integers wrap around.
            op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or the MPI.Op. A NaN on
                any rank gives NaN.
            out: where to, of equal size, dtype and order (C or Fortran); ``x`` itself
                for in place. None: a new array of ordinary device memory.
            stream: a Numba, cuda.core, CuPy or torch stream, or a handle. None: the
                stream the array names, torch's or CuPy's current one for their
                arrays, else ``comm.stream``.
            algorithm: ``"one_shot_ll"`` or ``"one_shot_pull"``. None: the fastest.

        Returns:
            ``out``, or the new array, of x's shape.

        Raises:
            ArgumentError: an array or name is wrong; in debug mode, calls differ.
            CollectiveTimeout: an earlier call of the communicator has failed.
            ClosedError: it was closed.
        """
        launch, out, handle = self._prepared(x, op, out, stream, algorithm)
        self._run(launch, handle)
        return out

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
        plan is collective, making it is too in debug mode.
        """
        launch, out, handle = self._prepared(x, op, out, stream, algorithm)
        call = _described(arrays.view(x, "all_reduce"), op, algorithm)
        return Plan(self, launch, (x, out), handle, call)

    def _prepared(
        self, x: Any, op: Any, out: Any, stream: Any, algorithm: str | None
    ) -> tuple[Launch | None, Any, int]:
        """Return an all-reduce's launch, its output and its stream's handle.

        In debug mode the ranks agree first, so that an error of one is all ranks'.
        """
        self.check()
        if not self._debug:
            return self._bound(x, op, out, stream, algorithm)
        self.enter()
        exchange, what = self._group.exchange, "all_reduce"
        with exchange.agreed(what):
            bound = self._bound(x, op, out, stream, algorithm)
            call = _described(arrays.view(x, what), op, algorithm)
        exchange.agree_equal(call, what)
        return bound

    def _bound(
        self, x: Any, op: Any, out: Any, stream: Any, algorithm: str | None
    ) -> tuple[Launch | None, Any, int]:
        source = arrays.dense(arrays.view(x, "all_reduce"), "all_reduce")
        handle = self._stream_for(stream, source)
        if out is None:
            out = self._new_output(source, handle)
        target = source if out is x else arrays.view(out, "all_reduce: out")
        launch = self._all_reduce_plan(source, target, op, algorithm)
        return launch, out, handle

    def _new_output(self, source: ArrayView, handle: int) -> Any:
        if not SIMULATED and streams.is_capturing(handle):
            raise ArgumentError(
                "all_reduce: pass out= while a stream is being captured into a graph; "
                "memory cannot be allocated then"
            )
        return arrays.empty_like(source)

    def _all_reduce_plan(
        self, source: ArrayView, target: ArrayView, op: Any, algorithm: str | None
    ) -> Launch | None:
        op = dtypes.reduction(op, "all_reduce")
        count, dtype = source.size, source.dtype
        key = (algorithm, source.address, target.address, count, dtype, op)
        if key in self._plans and _same(source, target):
            self._plans.move_to_end(key)
            return self._plans[key]
        element = dtypes.element(dtype, "all_reduce")
        _check_output(source, target, "all_reduce")
        name = select.named(algorithm, source.nbytes, self.size)
        launch = None
        if count > 0:
            for view in (source, target):
                arrays.check_device(view, self.device.ordinal, "all_reduce")
            launch = select.ALL_REDUCE[name].bind(
                self, source.address, target.address, count, element, op
            )
        self._plans[key] = launch
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return launch

    def _stream_for(self, stream: Any, array: ArrayView) -> int:
        """Return the handle of the stream to use for an array."""
        if stream is None and array.stream is not None:
            return array.stream
        return self._default_stream(stream)

    def _default_stream(self, stream: Any) -> int:
        chosen = self.stream if stream is None else stream
        return streams.LEGACY_DEFAULT if chosen is None else streams.handle_of(chosen)

    def _run(self, launch: Launch | None, stream: int) -> None:
        if launch is not None:
            trail = self._order.enter(stream)
            launch(stream)
            trail.leave(stream)

    def enter(self) -> None:
        """Wait for every rank to come here, or raise on all of them. Collective.

        Raises:
            CollectiveTimeout: a kernel of any rank gave up, or a rank left by an error.
            ClosedError: the communicator was closed.
        """
        self._group.enter()

    def _agree(self, what: str, call: str) -> None:
        """Compare a call between the ranks, in debug mode."""
        if self._debug:
            self.enter()
            self._group.exchange.agree_equal(call, what)

    def check(self) -> None:
        """Raise if the communicator has failed or is closed; never waits.

        Raises:
            CollectiveTimeout: a kernel of any rank gave up; says who waited for whom.
            ClosedError: the communicator was closed.
        """
        self._group.check()

    def synchronize(self, stream: Any = None) -> None:
        """Wait for a stream, then :meth:`check`. Not collective.

        Args:
            stream: None waits for ``comm.stream``.
        """
        if not SIMULATED and not self._group.closed:
            streams.synchronize(self._default_stream(stream))
        self.check()

    def close(self) -> None:
        """Wait for this GPU's work, unmap all peers and free what nobody uses.

        Collective, and idempotent. Arrays of :meth:`empty` stay usable on their own
        rank. After a failure it is local and never waits for a peer.

        Raises:
            CollectiveTimeout: a kernel had given up; the communicator is closed.
        """
        if self._group.closed:
            return
        try:
            if not SIMULATED:
                streams.synchronize_device()
            failure = self._group.failure_after_meeting()
            if failure is not None:
                raise failure
            self._forget()
            self.heap.close()
            self._group.close()
        except BaseException:
            self._close_locally()
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
        self._order.close()
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


def _block_limit() -> int:
    """Return how many blocks of a call this GPU should hold at most.

    A quarter of what it can run at once, counting one block a multiprocessor, so that
    four communicators of a process can wait for their peers at the same time.
    """
    if SIMULATED:
        return MAX_BLOCKS
    from cuda.core import Device

    multiprocessors = int(Device().properties.multiprocessor_count)
    return min(MAX_BLOCKS, max(1, multiprocessors // 4))


def _described(x: ArrayView, op: Any, algorithm: str | None) -> str:
    """Return what the ranks must agree on, in words."""
    return (
        f"{x.size} {x.dtype.name} in {x.order} order, "
        f"op {dtypes.reduction(op, 'all_reduce')!r}, algorithm {algorithm!r}"
    )


def _checked_shape(shape: Any, what: str) -> tuple[int, ...]:
    axes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if any(not isinstance(n, int | np.integer) or n < 0 for n in axes):
        raise ArgumentError(f"{what}: shape={shape!r}; give integers from 0")
    return tuple(int(n) for n in axes)


def _checked_dtype(dtype: Any, what: str) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"{what}: dtype={dtype!r}; {error}") from error
    if found.hasobject:
        raise ArgumentError(f"{what}: dtype={dtype!r}; a GPU has no Python objects")
    return found


def _same(source: ArrayView, target: ArrayView) -> bool:
    """Return whether a target can be of the plan that its address is the key of."""
    return not target.readonly and (
        target is source
        or (
            target.size == source.size
            and target.dtype == source.dtype
            and target.order == source.order
        )
    )


def _check_output(source: ArrayView, target: ArrayView, what: str) -> None:
    arrays.dense(target, f"{what}: out")
    if target.dtype != source.dtype or target.size != source.size:
        raise ArgumentError(
            f"{what}: out has {target.size} {target.dtype.name}, x has {source.size} "
            f"{source.dtype.name}; they must match"
        )
    if target.order != source.order:
        raise ArgumentError(
            f"{what}: x is in {source.order} order and out in {target.order} order, so "
            "their elements do not correspond; pass both in one order"
        )
    if target.readonly:
        raise ArgumentError(f"{what}: out is read-only")
    apart = abs(target.address - source.address)
    if 0 < apart < source.nbytes:
        raise ArgumentError(
            f"{what}: out overlaps x without being x; pass x itself or an array apart"
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
