"""The communicator: what users call, and what each call does."""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar, cast

import numpy as np

from numba_symm import arguments, environment
from numba_symm.arguments import shown
from numba_symm.collectives import (
    kernel_set,
    lifetime,
    messages,
    vector_forms,
)
from numba_symm.collectives.calls import BARRIER, Calls
from numba_symm.collectives.enqueueing import Tag
from numba_symm.collectives.invocation import (
    NO_ROOT,
    NO_WIRE,
    NONE,
    Cache,
    Invocation,
    OthersNames,
    spelled,
)
from numba_symm.collectives.islands import construction
from numba_symm.collectives.messages import IRECV, ISEND, RECV, SEND, SENDRECV
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXSCAN,
    REDUCE,
    REDUCE_SCATTER,
    REVERSE_SCAN,
    SCAN,
    with_algorithms,
)
from numba_symm.collectives.plans import Plan, init_of, of_group
from numba_symm.collectives.requests import Request
from numba_symm.collectives.vector_forms import (
    GATHER,
    GATHER_V,
    NEIGHBOR_ALL_GATHER,
    NEIGHBOR_ALL_TO_ALL,
    REDUCE_SCATTER_V,
    SCATTER,
    SCATTER_V,
)
from numba_symm.device.teams import Team
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, kernels, streams
from numba_symm.gpu.arrays import DeviceArray
from numba_symm.launch import call_records, devices, ranks
from numba_symm.launch.devices import GPU
from numba_symm.launch.members import Members
from numba_symm.memory import allocator
from numba_symm.memory.allocator import DeviceWorkspace, SymmetricMemoryAllocator
from numba_symm.memory.symmetric import SymmetricMemory

if TYPE_CHECKING:
    from numba_symm.collectives.experts import Experts

P = ParamSpec("P")
T = TypeVar("T")

FIXED = (
    *("rank", "size", "device", "backend", "refused_backends", "peer_access"),
    *("islands", "timeout", "multiprocessors"),
)
"""The attributes of a communicator, which the construction sets once."""


def by_one_thread(method: Callable[P, T]) -> Callable[P, T]:
    """Refuse other threads' calls while one is in this method of a communicator."""

    @functools.wraps(method)
    def alone(*args: P.args, **options: P.kwargs) -> T:
        calls: Calls = args[0]._calls  # type: ignore[attr-defined]
        with calls.thread.alone(method.__name__):
            return method(*args, **options)

    return alone


class Inside(NamedTuple):
    """What other packages of this library may use of a communicator.

    Attributes:
        ranks: the ranks, with their GPUs, their engine and their failures.
        debug: whether the ranks compare their calls.
        give_up: makes it fail after an error within a call, as ``Enqueuer.give_up``.
        memory: the calls that were made before, by key.
        made: goes on with one of them, as ``Calls.made``.
    """

    ranks: Members
    debug: bool
    give_up: Callable[..., None]
    memory: Cache
    made: Callable[..., bool]


def inside(comm: "Communicator") -> Inside:
    """Return what other packages of this library may use of a communicator."""
    calls = comm._calls
    return Inside(
        calls.members,
        calls.agreement.debug,
        calls.enqueuer.give_up,
        calls.memory,
        calls.made,
    )


@with_algorithms
@spelled
class Communicator(OthersNames):
    """Collectives between the GPUs of ranks, on one node or several.

    Construction and the methods are collective, except messages (``send``, ``recv``,
    ``sendrecv``, ``isend``, ``irecv``, ``group``), the properties, and methods that are
    described as local or not collective. Every rank makes the collective calls in the
    same order. Each method's text lists the arguments that must be equal on all ranks;
    ``algorithm`` must always be equal.

    Only one thread at a time may be in a call; a call of a second thread raises an
    error. The CUDA context in which the communicator was constructed must be current in
    every call. If the thread has selected another GPU, select this GPU again before the
    call.

    The communicator is a context manager. If a rank leaves the ``with`` block with an
    exception, the communicator is closed on this rank only, and calls of the other
    ranks raise an error. The same happens if a call fails on one rank for a reason
    other than its arguments.

    Assigning to one of its attributes raises an AttributeError.

    Args:
        comm: an ``mpi4py`` communicator, which the construction duplicates, or any
            object with ``rank``, ``size``, ``allgather`` and ``barrier``. For
            :meth:`split`, the object also needs a method ``split(color, key)``.
        device: the ordinal of this rank's GPU. None: the device of the current CUDA
            context. If no context is current: GPU r, where r is this rank's index on
            its node.
        timeout: seconds that a kernel waits for a peer, equal on all ranks; 0:
            indefinitely. None: ``NUMBA_SYMM_TIMEOUT``, else 300.
        stream: the stream of calls that pass no ``stream`` and whose arrays name no
            stream. None: the legacy default stream.
        debug: whether to compare the arguments of every collective call between the
            ranks before the call starts. If they differ, every rank raises an error.
            This is slow, because the hosts wait for all ranks, as in set-up calls.
            ``timeout`` does not limit these waits. In this mode, functions of
            ``numba_symm.device`` check their arguments on GPUs, too.
        multiprocessors: the maximum number of multiprocessors that this communicator's
            kernels on one rank occupy at any time, at least 1, equal on all ranks.
            Messages, and the collectives that consist of messages, occupy at least one
            multiprocessor for each four other ranks. None:
            ``NUMBA_SYMM_MULTIPROCESSORS``, else one less than a quarter of the GPU's
            multiprocessors, divided by the number of this communicator's ranks that
            share the GPU. So the kernels of four communicators leave some
            multiprocessors to other kernels.
        requests: whether :meth:`isend` and :meth:`irecv` may be called, equal on all
            ranks. If True, requests get their own memory and, for each other rank, two
            multiprocessors of the limit, or up to eight in all among few ranks. All
            other calls use the rest.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        device: this rank's GPU (name, UUID, ordinal …).
        backend: the backend: ``"vmm"``, ``"ipc"`` or ``"host"``.
        refused_backends: a dict with the names of backends that were tried before, and
            the reason why each was rejected.
        peer_access: which of the GPUs of this node's ranks can access which; None where
            it is unknown.
        islands: the ranks of each island. There is one island, unless the ranks are on
            several nodes, or not all of their GPUs have peer access to each other.
        timeout: the seconds that a kernel waits for a peer.
        multiprocessors: the limit for its kernels, which is the lowest limit of any
            rank.

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
        requests: bool = False,
    ):
        if ranks.launched_rank() == 0:  # the others have the same variables
            environment.warn_of_unknown()
        ranks.warn_if_alone(comm)
        options = lifetime.Options(stream, debug, multiprocessors, requests)
        try:
            self._become(construction.begin(comm, device, timeout, options))
        except ArgumentError as error:
            raise error.with_traceback(None) from error.__cause__
        if self.rank == 0:
            devices.warn_if_sliced(self._calls.members.gpus)
            if requests:
                devices.warn_if_queues_are_few(self._calls.members.gpus)

    def _become(self, calls: Calls) -> None:
        self._calls = calls
        self._group = messages.Group(calls, "group")
        self.rank: int = calls.rank
        self.size: int = calls.size
        self.device: GPU = calls.gpu
        self.backend: str = calls.members.backend.name
        self.refused_backends = calls.members.refused
        self.peer_access = calls.members.peer_access
        self.islands = calls.members.parts
        self.timeout = calls.members.timeout
        self.multiprocessors = lifetime.multiprocessors_of(calls)

    def __setattr__(self, name: str, value: Any) -> None:
        # Properties or a look into __dict__ would slow every later read.
        if name in FIXED and hasattr(self, name):
            raise AttributeError(
                f"{name} of a communicator: expected no assignment, which would have "
                f"no effect, got {shown(value)}; make another communicator"
            )
        super().__setattr__(name, value)

    @staticmethod
    def _of(calls: Calls | None) -> "Communicator | None":
        if calls is None:
            return None
        made = Communicator.__new__(Communicator)
        made._become(calls)
        return made

    @property
    def stream(self) -> Any:
        """The stream given to the constructor; None is the legacy default stream."""
        return self._calls.streams.given

    @property
    def allocator(self) -> SymmetricMemoryAllocator:
        """This process's allocator of symmetric memory."""
        return self._calls.heap.allocator

    @by_one_thread
    def empty(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = np.float32,
        *,
        like: Any = None,
    ) -> Any:
        """Return a new symmetric array with undefined contents.

        Collective: every rank passes the same shape and dtype.

        Args:
            shape: the length of each axis.
            dtype: of NumPy or ml_dtypes.
            like: ``cupy``, ``torch``, or an array of one of them: the result is an
                array of that library. Ranks may pass different libraries.

        Returns:
            A C-contiguous device array, by default Numba's, whose memory every rank has
            mapped. Drop the array when you no longer need it. When every rank has
            dropped its array, the memory is freed at a later allocation, or at
            ``close``. An array that is dropped after ``close`` is freed at a later
            allocation, or ``close``, of any communicator.

        Raises:
            ArgumentError: shape or dtype are wrong, or differ between ranks.
            BackendError: a rank does not have enough memory.
        """
        return self._calls.heap.array(shape, dtype, "empty", like)

    @by_one_thread
    def zeros(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = np.float32,
        *,
        like: Any = None,
    ) -> Any:
        """Return a new symmetric array of zeros. See :meth:`empty`."""
        return self._calls.heap.array(shape, dtype, "zeros", like)

    @by_one_thread
    def rendezvous(
        self, array: DeviceArray, *, channels: int | None = None
    ) -> SymmetricMemory:
        """Return the symmetric memory that begins at ``array``.

        Collective: every rank passes an array at the same offset of the same
        allocation. The array is from :meth:`empty` or ``comm.allocator``, or in memory
        from cudaMalloc, which this call maps. The array must be contiguous, because
        peers' kernels get only its address. All calls for one allocation share its
        mappings and its signal pad.

        Args:
            array: the array.
            channels: the number of channels that kernels need, such as one for each
                block, up to 65536; the same on all ranks. The first call for an
                allocation makes the signal pad, and later ones may ask for at most as
                many. A channel takes 12 bytes for each rank of the island, and another
                16. None: as many as the pad has, or 128 for a new one.

        Raises:
            ArgumentError, BackendError: on all ranks.
        """
        calls = self._calls
        with calls.members.set_up("rendezvous"):
            with calls.members.exchange.agreed("rendezvous"):
                view = arrays.dense(arrays.view(array, "rendezvous"), "rendezvous")
                arrays.check_device(view, self.device.ordinal, "rendezvous")
            return calls.heap.rendezvous(view.address, array, channels)

    def _rendezvous(self, ptr: int) -> SymmetricMemory:
        """Rendezvous by address, for ``comm.allocator.rendezvous(ptr, comm)``."""
        with (
            self._calls.thread.alone("rendezvous"),
            self._calls.members.set_up("rendezvous"),
        ):
            return self._calls.heap.rendezvous(ptr)

    @by_one_thread
    def device_workspace(
        self,
        blocks: int,
        threads: int,
        bytes: int,
        depth: int = 1,
        *,
        team: Team | None = None,
        memory: SymmetricMemory | None = None,
    ) -> DeviceWorkspace:
        """Return the memory for collectives within kernels.

        Collective: every rank passes the same numbers. The workspace's attribute
        ``ctx`` is an argument of kernels, for :func:`numba_symm.device.all_reduce` and
        the other collectives there. Only one kernel at a time may use the workspace,
        with the same grid on every rank; later kernels on the stream may use it again.
        The ranks must be of one island. On each rank, a block needs 4 * ``depth`` *
        ``bytes``, rounded up, for each other rank, 8 bytes for each thread, and another
        128 bytes. In debug mode, ``bytes`` counts as 16 more for each thread.

        Args:
            blocks: the maximum number of blocks of a kernel.
            threads: the maximum number of threads of a block, up to 1024.
            bytes: the maximum number of bytes that a block sends to each rank in a
                call. A kernel with fewer threads may send proportionally fewer bytes.
            depth: the maximum number of collectives that a block has started and not
                yet awaited, a power of two up to 64.
            team: the ranks of the collectives, among them this one; None: all ranks.
                All ranks of a team pass the same. A kernel that has collectives of
                several teams needs a workspace for each.
            memory: the result of a :meth:`rendezvous`. The workspace's ``ctx`` is then
                also that memory's context, so a kernel needs no other one.

        Raises:
            ArgumentError: an argument is wrong. A number, whether there is a memory, or
                a team's ranks differ between the ranks that must agree.
            BackendError: a rank does not have enough memory.
        """
        calls = self._calls
        sizes = blocks, threads, bytes, depth
        return allocator.new(calls.heap, calls.members, *sizes, team, memory)

    @by_one_thread
    def experts(
        self,
        experts: int,
        *,
        top_k: int,
        hidden: int,
        tokens: int,
        capacity: int | None = None,
        dtype: Any = np.float32,
        like: Any = None,
    ) -> "Experts":
        """Return an object that exchanges the tokens of a mixture of experts.

        Collective: every rank passes the same arguments, except ``like``. The ranks
        must be of one island. On each rank, the object allocates memory for twice
        ``capacity`` tokens for each rank, and for their metadata.

        Args:
            experts: the total number of experts of all ranks, a multiple of the number
                of ranks.
            top_k: the number of experts that a token chooses.
            hidden: the number of elements of a token, whose size is a multiple of 16
                bytes.
            tokens: the maximum number of tokens that a rank passes to a dispatch, up to
                32767. If ``tokens`` is at most 128, each call waits for the other ranks
                only once.
            capacity: the maximum number of tokens that a rank sends to any one rank,
                itself included, in a dispatch. A dispatch with more fails. None:
                ``tokens``, which always suffices.
            dtype: of tokens and results: float32, bfloat16 or float16.
            like: the library of the arrays that the object returns; see :meth:`empty`.

        Raises:
            ArgumentError: an argument is wrong, or differs between ranks.
            BackendError: a rank does not have enough memory.
        """
        from numba_symm.collectives import experts as made

        given = experts, top_k, hidden, tokens, capacity, dtype, like
        return made.new(self._calls, *given)

    @by_one_thread
    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Return a new communicator of the ranks that pass the same color.

        Collective, as MPI's Comm_split. It fails on all ranks of this communicator or
        on none, whatever their colors. The new communicator has the same GPU, timeout,
        stream, debug mode and limit of multiprocessors. It has its own workspace,
        status board and failures. Either communicator may be closed first.

        Calls of communicators with common ranks may run simultaneously on different
        streams, if the GPUs have enough multiprocessors for all of them. If two ranks
        share several communicators, both must make the set-up calls of these
        communicators, including ``close``, in the same order.

        Args:
            color: the number of this rank's new communicator, from 0 to 2**31 - 1.
                None, or MPI.UNDEFINED: no new communicator.
            key: orders the ranks of a color, 32 bits. Ranks of equal key keep their
                order.

        Returns:
            The communicator, which all its ranks must close; None for color None.

        Raises:
            ArgumentError: color or key is wrong, or this communicator was made from an
                object without a method ``split``.
            CollectiveError, ClosedError: this communicator has failed or was closed.
            DeviceError, BackendError, ExchangeError: a new communicator cannot be made.
        """
        everyone = self._calls.members
        with everyone.set_up("split"):
            with everyone.exchange.agreed("split"):
                number, order = ranks.checked_split(everyone.comm, color, key)
            given = everyone.exchange.all_gather((number, order), "split: colors")
            ranked = sorted(range(self.size), key=lambda rank: given[rank][1])  # stable
            same = [rank for rank in ranked if given[rank][0] == number]
            members = [] if number is None else same
            part = functools.partial(ranks.split, everyone.comm, number, order)
            return self._of(construction.child(self._calls, "split", part, members))

    @by_one_thread
    def dup(self) -> "Communicator":
        """Return a new communicator of the same ranks, in the same order.

        Collective. The new communicator has the properties that :meth:`split` lists.
        The object from which this communicator was made needs no method ``split``.

        Raises:
            CollectiveError, ClosedError: this communicator has failed or was closed.
            DeviceError, BackendError, ExchangeError: the new communicator cannot be
                made.
        """
        with self._calls.members.set_up("dup"):
            everyone = range(self.size)
            comm = self._calls.members.comm
            made = construction.child(self._calls, "dup", lambda: comm, everyone)
            return cast(Communicator, self._of(made))

    def barrier(self, stream: Any = None) -> None:
        """Enqueue a barrier of all ranks. The host does not wait.

        What each rank's stream wrote before the barrier is visible to every rank's
        stream after the barrier.
        """
        options = ("sum", None, *NO_ROOT)
        self._calls.operate(BARRIER, None, None, stream, options)

    def all_reduce(
        self,
        x: DeviceArray,
        *,
        op: Any = "sum",
        out: DeviceArray | tuple[DeviceArray, DeviceArray] | None = None,
        stream: Any = None,
        algorithm: str | None = None,
        wire: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = NONE,
        row_sum: Any = None,
        leaves: bool = False,
    ) -> Any:
        """Reduce ``x`` over all ranks, element by element. Every rank gets the result.

        Collective: every rank passes arrays of equal count and dtype, and the same
        ``op``, ``algorithm`` and ``wire``. All ranks get identical bits. Asynchronous.

        Args:
            x: a device array of any shape, strided or not, symmetric or not. Its
                type is bool, an integer of 8 to 64 bits, a float of 8 to 64 bits,
                bfloat16, complex64 or complex128. Floats of 8 bits (e4m3fn and e5m2)
                need compute capability 8.9 or higher. Floats of fewer than 32 bits
                accumulate in float32 and are rounded once.
                Integers wrap around, and "sum" of bool is "lor", as in NumPy.
            op: one of

                - ``"sum"``, ``"prod"``, ``"min"``, ``"max"``: the result is NaN if any
                  rank has NaN. 0.0 and -0.0 are equal; of the two, "min" and "max"
                  return the value of the later rank. "min" and "max" do not accept
                  complex numbers.
                - ``"avg"``: the sum, divided by the number of ranks before the result
                  is rounded. Integers are rounded towards zero, and only sums of 64-bit
                  integers wrap around before the division. Not for bool.
                - ``"band"``, ``"bor"``, ``"bxor"``: bit by bit, for bool and integers.
                - ``"land"``, ``"lor"``, ``"lxor"``: 0 or 1 in x's type; NaN is true.
                  Not for complex numbers.
                - ``"minloc"``, ``"maxloc"``: of pairs of a value and an index, the pair
                  with the least or greatest value; among equal values, the pair with
                  the lowest index. Pairs have a structured dtype of 8 or 16 bytes, or
                  are in two columns.
                - an MPI.Op of one of these names.
                - a function of two scalars of the type in which x accumulates, plain or
                  decorated with ``cuda.jit(device=True)``. Its result is cast to that
                  type. It is applied by the tree of the ranks (docs/bits.md), so it
                  need not be commutative or associative. Each function object is
                  compiled once in each process and kept, so define it outside of loops.
            out: the output, of x's size, dtype and order (C or Fortran); ``x`` itself
                for a call in place. None: a new array of ordinary device memory. With
                ``epilogue``, the output's dtype may differ, and ``out`` may be a pair:
                the output, and an array for the epilogue's second result. The second
                array must be contiguous, of equal size and any of these dtypes, and
                must not overlap x or the output.
            stream: a stream of Numba, cuda.core, CuPy or torch, or a handle. None: the
                stream that the array names (torch's or CuPy's current one for their
                arrays), else ``comm.stream``.
            algorithm: None for the fastest one, or {algorithms}
            wire: the form in which ranks send the elements of a sum. None: the elements
                themselves. ``"int8"``, or ``"fp8"`` (compute capability 8.9 or higher):
                codes of one byte, in groups of 128 with a scale each. Ranks then send
                about a quarter of the bytes of float32, and the result is approximate.
                x must be of float32, bfloat16 or float16.
            epilogue: a function of scalars, plain or decorated with
                ``cuda.jit(device=True)``. It returns an element of ``out``, or for a
                pair an element of each array. Its arguments are the reduced element,
                rounded to x's dtype; then, with ``row_sum``, the row's sum; then the
                entries of ``args`` for this element. All have the types in which their
                dtypes accumulate. The result is cast to the type in which ``out``
                accumulates, and rounded to that of ``out``.
            args: at most 8 device arrays in C order, and numbers, for ``epilogue`` and
                ``row_sum``. The shape of an array is the output's shape, the output's
                last axis alone, or the output's shape with a last axis of length 1; or
                the array has one element. An array may be an output itself. Python's
                floats become float32, or float64 if x accumulates in float64.
            row_sum: a function like ``epilogue``, of the reduced element and the
                entries of ``args``. Its results are added over each row, that is along
                the output's last axis, in a fixed order. x must be of floats.
            leaves: whether the first axis of x is leaves, to be reduced as well. All
                ranks have the same number of them, 1, 2, 4, 8, …, in C order. Then the
                result is the tree of all leaves, in the order of ranks: 8 leaves on one
                rank and 2 on each of 4 ranks give the same bits. An average divides by
                their number. Only with the fastest algorithm, without ``wire`` and
                ``epilogue``.

        Returns:
            ``out``, or the new array, of x's shape (without the axis of leaves); for a
            pair, a tuple of both arrays.

        Raises:
            ArgumentError: an array or a name is wrong; in debug mode, calls differ.
            ExchangeError: in debug mode, the ranks call different methods.
            CollectiveError: an earlier call of the communicator has failed.
            ClosedError: the communicator was closed.
        """
        options = op, algorithm, None, wire, epilogue, args, row_sum, None, leaves
        return self._calls.operate(ALL_REDUCE, x, out, stream, options)

    @by_one_thread
    def prepare(
        self,
        *calls: str,
        dtypes: Sequence[Any] = ("float32",),
        ops: Sequence[Any] = ("sum",),
    ) -> None:
        """Load the kernels that later calls need, so that later calls load no kernels.

        Afterwards, such calls of any size and alignment neither compile nor load a
        kernel. There are two exceptions: calls that name an ``algorithm``, and a
        :meth:`group` with several messages from a rank to the same rank.

        Not collective, but every rank should call it. Otherwise peers wait, in the
        first call, for a rank that is still loading. The ranks of a node share the
        compilation. Call ``prepare`` before other calls, because loading may wait until
        the GPU is idle.

        Args:
            *calls: the names of methods, such as ``"all_reduce"`` or ``"send"``;
                ``"gaps"`` for strided arrays, in any call; ``"counts"`` for counts on
                the GPU; ``"experts"`` for mixtures of experts; ``"wire_int8"`` and
                ``"wire_fp8"`` for quantized sums; ``"leaves"`` for reductions of
                leaves; ``"signals"`` for the methods of :class:`SymmetricMemory`.
            dtypes: the dtypes of the calls' arrays.
            ops: the operators of the calls that reduce, as for :meth:`all_reduce`. An
                operator is skipped for a dtype or a call that does not accept it.

        Raises:
            ArgumentError: a name, dtype or operator is unknown, or none of the calls
                accepts it; or a request is named, but the constructor did not get
                ``requests=True``.
            CollectiveError, ClosedError: as :meth:`check`.
        """
        self.check()
        end, gpu, binder = self._calls.end, self._calls.gpu, self._calls.binder
        found = kernel_set.kernels(calls, dtypes, ops, end, "prepare", binder)
        for name in calls:
            if name in kernel_set.REQUESTS:
                messages.requests_of(self._calls, f"prepare({name!r})")
        if not SIMULATED:
            kernel_set.check_capability(found, gpu.compute_capability, "prepare")
            kernel_set.load(found, self.rank, self.size, "prepare")

    def all_gather(
        self,
        x: DeviceArray,
        *,
        out: DeviceArray | tuple[DeviceArray, DeviceArray] | None = None,
        stream: Any = None,
        algorithm: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = NONE,
        row_sum: Any = None,
    ) -> Any:
        """Give every rank the arrays of all ranks.

        Collective: every rank passes an array of equal shape and dtype. Asynchronous.

        Args:
            x: a device array in C order, of any dtype. In place: ``out[rank]``.
            out: the output, an array of shape ``(size, *x.shape)`` and x's dtype, in C
                order. None: a new array of ordinary device memory.
            stream: as for :meth:`all_reduce`.
            algorithm: None for the fastest one, or {algorithms}
            epilogue: as for :meth:`all_reduce`, of each gathered element; then
                ``out`` may have another dtype, or be a pair.
            args: as for :meth:`all_reduce`, of shapes that fit the output's.
            row_sum: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array: ``out[r]`` has the bits of rank r's x, or what
            ``epilogue`` makes of them.

        Raises:
            As :meth:`all_reduce`.
        """
        options = "sum", algorithm, None, None, epilogue, args, row_sum, None, False
        return self._calls.operate(ALL_GATHER, x, out, stream, options)

    def all_to_all(
        self,
        x: DeviceArray,
        *,
        out: DeviceArray | None = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Send shard r of ``x`` to each rank r, and receive a shard from every rank.

        Collective: every rank passes an array of equal shape and dtype. Asynchronous.

        Args:
            x: a device array in C order, of any dtype. The length of its first axis is
                a multiple of the number of ranks. Rank r receives its r-th shard.
            out: the output, an array of x's shape and dtype, or x itself. None: a new
                array of ordinary device memory.
            stream: as for :meth:`all_reduce`.
            algorithm: None for the fastest one, or {algorithms}

        Returns:
            ``out``, or the new array: its r-th shard is rank r's shard for this rank.

        Raises:
            As :meth:`all_reduce`.
        """
        options = ("sum", algorithm, *NO_ROOT)
        return self._calls.operate(ALL_TO_ALL, x, out, stream, options)

    def reduce_scatter(
        self,
        x: DeviceArray,
        *,
        op: Any = "sum",
        out: DeviceArray | tuple[DeviceArray, DeviceArray] | None = None,
        stream: Any = None,
        algorithm: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = NONE,
        row_sum: Any = None,
        leaves: bool = False,
    ) -> Any:
        """Reduce ``x`` over all ranks, and give each rank its shard of the result.

        Collective: every rank passes an array of equal shape and dtype, and the same
        ``op``. Asynchronous.

        Args:
            x: a device array in C order, of a dtype of :meth:`all_reduce`. The length
                of its first axis is a multiple of the number of ranks.
            op: as for :meth:`all_reduce`.
            out: the output, an array of shape ``(x.shape[0] // size, *x.shape[1:])``,
                or x's shard for this rank. None: a new array of ordinary device memory.
            stream: as for :meth:`all_reduce`.
            algorithm: None for the fastest one, or {algorithms}
            epilogue: as for :meth:`all_reduce`, of each element of the shard;
                then ``out`` may have another dtype, or be a pair.
            args: as for :meth:`all_reduce`, of shapes that fit the output's.
            row_sum: as for :meth:`all_reduce`.
            leaves: as for :meth:`all_reduce`; then the second axis of x has the shards.

        Returns:
            ``out``, or the new array: shard r of the reduction on rank r, with the bits
            of :meth:`all_reduce`, except for those of a NaN.

        Raises:
            As :meth:`all_reduce`.
        """
        options = op, algorithm, None, None, epilogue, args, row_sum, None, leaves
        return self._calls.operate(REDUCE_SCATTER, x, out, stream, options)

    def scan(
        self,
        x: DeviceArray,
        *,
        op: Any = "sum",
        out: DeviceArray | None = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Give each rank r the reduction of ``x`` over ranks 0 to r.

        Collective: every rank passes an array of equal count and dtype, and the same
        ``op``. Asynchronous.

        Args:
            x: a device array of any shape, of a dtype of :meth:`all_reduce`.
            op: as for :meth:`all_reduce`, except ``"avg"``.
            out: the output, of equal size, dtype and order; ``x`` itself for a call in
                place. None: a new array of ordinary device memory.
            stream: as for :meth:`all_reduce`.
            algorithm: None for the fastest one, or {algorithms}

        Returns:
            ``out``, or the new array, of x's shape. The last rank gets the bits of
            :meth:`all_reduce`, except for those of a NaN.

        Raises:
            As :meth:`all_reduce`.
        """
        options = (op, algorithm, *NO_ROOT)
        return self._calls.operate(SCAN, x, out, stream, options)

    def exscan(
        self,
        x: DeviceArray,
        *,
        op: Any = "sum",
        out: DeviceArray | None = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Give each rank r the reduction of ``x`` over ranks 0 to r - 1.

        The arguments and errors are those of :meth:`scan`.

        Returns:
            ``out``, or the new array, of x's shape. Rank 0, which has nothing to
            reduce, gets the identity of the operator; for a sum of floats, that is
            -0.0. The identity of a function is unknown: then rank 0's ``out`` keeps its
            contents, and a new array has undefined contents.
        """
        options = (op, algorithm, *NO_ROOT)
        return self._calls.operate(EXSCAN, x, out, stream, options)

    def reverse_scan(
        self,
        x: DeviceArray,
        *,
        op: Any = "sum",
        out: DeviceArray | None = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Give each rank r the reduction of ``x`` over ranks r to size - 1.

        The arguments and errors are those of :meth:`scan`. The reduction is in rank
        order, too. (MPI has no such scan; there, a program needs a communicator with
        the ranks in reverse order.)

        Returns:
            ``out``, or the new array, of x's shape. Rank 0 gets the bits of
            :meth:`all_reduce`, except for those of a NaN.
        """
        options = (op, algorithm, *NO_ROOT)
        return self._calls.operate(REVERSE_SCAN, x, out, stream, options)

    def reduce(
        self,
        x: DeviceArray,
        *,
        op: Any = "sum",
        root: int = 0,
        out: DeviceArray | None = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce ``x`` over all ranks. The root gets the result.

        Collective: every rank passes an array of equal count and dtype, the same ``op``
        and the same ``root``. Asynchronous.

        Args:
            x: a device array of any shape, of a dtype of :meth:`all_reduce`.
            op: as for :meth:`all_reduce`.
            root: the rank that gets the result.
            out: on the root as for :meth:`all_reduce`. Ignored on other ranks, as in
                MPI.
            stream: as for :meth:`all_reduce`.
            algorithm: None for the fastest one, or {algorithms}

        Returns:
            On the root ``out``, or the new array, of x's shape, with the bits of
            :meth:`all_reduce`, except for those of a NaN. None on other ranks.

        Raises:
            As :meth:`all_reduce`; ArgumentError if ``root`` is not a rank.
        """
        options = (op, algorithm, root, *NO_WIRE)
        return self._calls.operate(REDUCE, x, out, stream, options)

    def broadcast(
        self,
        x: DeviceArray,
        *,
        root: int = 0,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Copy ``x`` of rank ``root`` into ``x`` of every rank.

        Collective: every rank passes an array of equal count and dtype, and the same
        ``root``. Asynchronous.

        Args:
            x: a device array of any shape and dtype, which the call reads on the root,
                and writes on the other ranks.
            root: the rank whose array is sent.
            stream: as for :meth:`all_reduce`.
            algorithm: None for the fastest one, or {algorithms}

        Returns:
            ``x``.

        Raises:
            As :meth:`all_reduce`; ArgumentError if ``root`` is not a rank.
        """
        options = ("sum", algorithm, root, *NO_WIRE)
        return self._calls.operate(BROADCAST, x, x, stream, options)

    def reduce_scatter_v(
        self,
        x: DeviceArray,
        *,
        counts: Sequence[int],
        op: Any = "sum",
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce ``x`` over all ranks, and give each rank a range of the result.

        Collective: every rank passes an array of equal count and dtype, the same
        ``counts`` and the same ``op``. Asynchronous. The call consists of one
        :meth:`reduce` for each range.

        Args:
            x: a device array in C order, of a dtype of :meth:`all_reduce`.
            counts: the number of elements of each rank's range; their sum is the size
                of x.
            op: as for :meth:`all_reduce`.
            out: the output, an array of ``counts[rank]`` elements of x's type. It must
                not overlap x, unless it is this rank's range of x. None: a new array of
                one axis.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        tables = ((counts, None),)
        given = Invocation(REDUCE_SCATTER_V, x, out, stream, op=op, tables=tables)
        return self._calls.call(given)

    def sum(
        self, x: DeviceArray, *, out: DeviceArray | None = None, stream: Any = None
    ) -> Any:
        """Return the sum of all elements of all ranks' ``x``, the same bits always.

        The bits depend on the elements and their type only. They do not depend on the
        order of the elements, the number of ranks, or which rank has which elements.
        Collective: every rank passes an array of the same dtype, of any number of
        elements, or none. Asynchronous.

        Each element is rounded to a multiple of one unit, which follows from the
        largest magnitude M of all elements. These multiples are added exactly, and the
        total is rounded once, to nearest even. So the error is at most half a unit in
        the last place of the result, plus n * M * 2**-94 for n elements. There may be
        2**30 elements for each thread of a grid, which is more than a GPU's memory
        holds.

        As in exact arithmetic, only the result itself may overflow, to an infinity.
        It is NaN if there is a NaN, or infinities of both signs; else an infinity if
        there is one. A sum of no elements, or of 0, is 0.0.

        Args:
            x: a device array of any shape, strided or not, of float64, float32,
                bfloat16 or float16. The last two are converted to float32, which is
                exact.
            out: an array of one element for the result: of x's dtype, or of float32
                if x has fewer bits. None: a new array of shape ``()``.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        from numba_symm.collectives import composed

        return self._calls.operate(composed.SUM, x, out, stream, composed.PLAIN)

    def dot(
        self,
        x: DeviceArray,
        y: DeviceArray,
        *,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Return the sum of products of elements of ``x`` and ``y``, the same always.

        The sum is that of :meth:`sum`, where M is the largest magnitude of a product.
        Products are exact, and neither overflow nor underflow. A product of 0 and an
        infinity is NaN. A result that underflows to 0 keeps its sign.

        Args:
            x: as for :meth:`sum`.
            y: an array of x's shape and dtype.
            out: as for :meth:`sum`.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        from numba_symm.collectives import composed

        return self._calls.operate(composed.DOT, x, out, stream, composed.PLAIN, (y,))

    def norm(
        self, x: DeviceArray, *, out: DeviceArray | None = None, stream: Any = None
    ) -> Any:
        """Return the square root of the sum of all squares, the same bits always.

        The total of :meth:`dot` of x and x is not rounded, but its root is, once. It
        may overflow only if the result does. The arguments, and what holds of the bits,
        are those of :meth:`sum`.

        Returns:
            ``out``, or the new array.
        """
        from numba_symm.collectives import composed

        return self._calls.operate(composed.NORM, x, out, stream, composed.PLAIN)

    def gather(
        self,
        x: DeviceArray,
        *,
        root: int = 0,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Gather every rank's array on rank ``root``.

        Collective: every rank passes an array of equal shape and dtype, and the same
        ``root``. Asynchronous.

        Args:
            x: a device array in C order. In place on the root: ``out[root]``.
            root: the rank that gets all arrays.
            out: on the root, the output, an array of shape ``(size, *x.shape)``; None:
                a new array of ordinary device memory. Ignored on other ranks, as in
                MPI.
            stream: as for :meth:`all_reduce`.

        Returns:
            On the root ``out``, or the new array: ``out[r]`` is rank r's x. None on
            other ranks.

        Raises:
            As :meth:`all_reduce`.
        """
        options = ("sum", None, root, *NO_WIRE)
        return self._calls.operate(GATHER, x, out, stream, options)

    def gather_v(
        self,
        x: DeviceArray,
        *,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Gather every rank's array, of any length, on rank ``root``.

        Collective: every rank passes the same ``root`` and dtype. Asynchronous.

        Args:
            x: a device array in C order.
            counts: on the root, the number of elements of each rank's x. Ignored on
                other ranks.
            displs: on the root, the index in ``out`` at which each rank's elements
                begin; None: directly after the previous rank's elements. Ignored on
                other ranks.
            root: the rank that gets all arrays.
            out: on the root, the output; None: a new array of one axis. Ignored on
                other ranks.
            stream: as for :meth:`all_reduce`.

        Returns:
            On the root ``out``, or the new array. None on other ranks.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._calls.call(
            Invocation(GATHER_V, x, out, stream, root=root, tables=((counts, displs),))
        )

    def scatter(
        self,
        x: DeviceArray | None = None,
        *,
        root: int = 0,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Give each rank its shard of rank ``root``'s array.

        Collective: every rank passes the same ``root``. Asynchronous.

        Args:
            x: on the root, a device array in C order. The length of its first axis is a
                multiple of the number of ranks. Rank r receives its r-th shard. Ignored
                on other ranks, as in MPI.
            root: the rank that has x.
            out: the output, an array of the shard's size and x's dtype; required on all
                ranks but the root. None on the root: a new array of shape
                ``(x.shape[0] // size, *x.shape[1:])``. In place on the root: x's own
                shard.
            stream: as for :meth:`all_reduce`. None: as for x on the root, and for out
                on other ranks.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        options = ("sum", None, root, *NO_WIRE)
        if root.__class__ is int and root != self._calls.rank:
            x = None  # ignored, as in MPI, and so is its stream
        return self._calls.operate(SCATTER, x, out, stream, options)

    def scatter_v(
        self,
        x: DeviceArray | None = None,
        *,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Give each rank a range, of any length, of rank ``root``'s array.

        Collective: every rank passes the same ``root``. Asynchronous.

        Args:
            x: on the root, a device array in C order. Ignored on other ranks, as in
                MPI.
            counts: on the root, the number of elements for each rank. Ignored on other
                ranks.
            displs: on the root, the index in ``x`` at which each rank's elements begin;
                None: directly after the previous rank's elements. Ignored on other
                ranks.
            root: the rank that has x.
            out: the output, an array of this rank's number of elements; required on all
                ranks but the root. None on the root: a new array of one axis.
            stream: as for :meth:`all_reduce`. None: as for x on the root, and for out
                on other ranks.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._calls.call(
            Invocation(SCATTER_V, x, out, stream, root=root, tables=((counts, displs),))
        )

    def all_gather_v(
        self,
        x: DeviceArray,
        *,
        counts: Sequence[int] | DeviceArray,
        displs: Sequence[int] | None = None,
        capacity: int | None = None,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Give every rank the arrays of all ranks, of any lengths.

        Collective: every rank passes the same ``counts`` and dtype, or the same
        ``capacity`` and dtype. Asynchronous.

        With ``capacity``, the counts are on the GPU, and the host does not wait, so
        each replay of a graph may have other counts. If a rank's count is negative or
        above the capacity, that rank sends nothing, and the communicator fails.

        Args:
            x: a device array in C order with ``counts[rank]`` elements; with
                ``capacity``, an array of ``capacity`` elements, of which the call sends
                the first ``counts[rank]``.
            counts: the number of elements of each rank's x. With ``capacity``, a device
                array of int64, one for each rank. The kernel reads ``counts[rank]``,
                and stores the other ranks' counts in the other elements.
            displs: the index in ``out`` at which each rank's elements begin; None:
                directly after the previous rank's elements or, with ``capacity``, at
                multiples of ``capacity``.
            capacity: the maximum number of elements of any rank; None: the counts are
                on the host.
            out: the output; None: a new array of one axis. In place: x is this rank's
                range.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        form, tables = vector_forms.gathering(counts, displs, capacity)
        return self._calls.call(Invocation(form, x, out, stream, tables=tables))

    def all_to_all_v(
        self,
        x: DeviceArray,
        *,
        send_counts: Sequence[int] | DeviceArray,
        recv_counts: Sequence[int] | DeviceArray,
        send_displs: Sequence[int] | Any = None,
        recv_displs: Sequence[int] | None = None,
        capacity: int | None = None,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Send each rank a range of ``x``, and receive a range from every rank.

        Collective: every rank passes the same dtype, and the same ``capacity``. The
        ``send_counts[s]`` of rank r equals the ``recv_counts[r]`` of rank s.
        Asynchronous.

        With ``capacity``, the counts are on the GPU, and the host does not wait, so
        each replay of a graph may have other counts. If a count is negative or above
        the capacity, or its range is not within x, the call sends nothing to the
        count's rank, and the communicator fails.

        Args:
            x: a device array in C order.
            send_counts: the number of elements for each rank. With ``capacity``, a
                device array of int64, which the kernel reads.
            recv_counts: the number of elements from each rank. With ``capacity``, a
                device array of int64, in which the kernel stores these numbers.
            send_displs: the index in ``x`` at which the elements for each rank begin;
                None: directly after the previous rank's elements. With ``capacity``, a
                device array of int64, or None.
            recv_displs: the index in ``out`` at which the elements from each rank
                begin; None: directly after the previous rank's elements or, with
                ``capacity``, at multiples of ``capacity``.
            capacity: the maximum number of elements that any rank sends to another one;
                None: the counts are on the host.
            out: the output, which must not overlap x. Without ``capacity``, it may be x
                itself, which the call copies first. None: a new array of one axis.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        sent, received = (send_counts, send_displs), (recv_counts, recv_displs)
        form, tables = vector_forms.exchanging(sent, received, capacity)
        return self._calls.call(Invocation(form, x, out, stream, tables=tables))

    def neighbor_all_gather(
        self,
        x: DeviceArray,
        *,
        sources: Sequence[int | None],
        destinations: Sequence[int | None] | None = None,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Send ``x`` to each destination, and receive an array from each source.

        Collective among neighbours: rank s names rank r as a source as often as rank r
        names s as a destination. Asynchronous.

        Args:
            x: a device array in C order, of the same size and dtype as the x of each
                neighbour.
            sources: ranks to receive from. The list may contain a rank, this one
                included, several times; its messages then match in order. None or
                MPI.PROC_NULL: no rank; this source's part of out keeps its contents.
            destinations: ranks to send to; None: the sources.
            out: the output, an array of shape ``(len(sources), *x.shape)``, which does
                not overlap x. None: a new array of ordinary device memory.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array: ``out[i]`` is the x of ``sources[i]``.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._calls.call(
            Invocation(
                NEIGHBOR_ALL_GATHER, x, out, stream, peers=(destinations, sources)
            )
        )

    def neighbor_all_to_all(
        self,
        x: DeviceArray,
        *,
        sources: Sequence[int | None],
        destinations: Sequence[int | None] | None = None,
        out: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Send each destination its part of ``x``, and receive a part from each source.

        Collective among neighbours, as :meth:`neighbor_all_gather`. Asynchronous.

        Args:
            x: a device array in C order. The length of its first axis is a multiple of
                the number of destinations; ``destinations[i]`` receives the i-th part.
            sources: as for :meth:`neighbor_all_gather`.
            destinations: as for :meth:`neighbor_all_gather`.
            out: the output, which has a part of equal size for each source, and does
                not overlap x. None: a new array of ordinary device memory.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array: its i-th part is from ``sources[i]``.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._calls.call(
            Invocation(
                NEIGHBOR_ALL_TO_ALL, x, out, stream, peers=(destinations, sources)
            )
        )

    def send(
        self,
        x: DeviceArray,
        *,
        dst: int | None,
        stream: Any = None,
    ) -> None:
        """Send ``x`` to rank ``dst``, which calls :meth:`recv`. Asynchronous.

        The calls of two ranks match in the order in which they are made. On the GPU, a
        large message waits until the receiver reads it. So two ranks that send to each
        other must use :meth:`sendrecv`, or a :meth:`group`.

        Args:
            x: a device array of any shape and dtype.
            dst: the rank to send to; this rank only within a group that also receives
                the message. None or MPI.PROC_NULL: no rank.
            stream: as for :meth:`all_reduce`.

        Raises:
            ArgumentError: an array or a rank is wrong.
            CollectiveError: an earlier call of the communicator has failed.
            ClosedError: the communicator was closed.
        """
        # Returns a plan to send_init.
        return messages.start(  # type: ignore[no-any-return]
            self._calls, SEND, x, dst, None, None, None, stream
        )

    def recv(
        self,
        out: DeviceArray,
        *,
        src: int | None,
        count: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Receive rank ``src``'s message into ``out``. Asynchronous.

        Rank ``src`` calls :meth:`send`.

        Args:
            out: a device array of as many bytes as the message. With ``count``, it may
                have more bytes, but must have the message's element type. If the number
                of bytes is wrong, later calls of all ranks raise CallMismatch, and out
                keeps its contents.
            src: the rank to receive from; this rank only within a group that also
                sends the message. None or MPI.PROC_NULL: no rank; ``out`` keeps its
                contents.
            count: a device array of one int64, which does not overlap out. The message
                may then be shorter than out, and the call stores the number of received
                elements in this array, 0 if ``src`` is None or MPI.PROC_NULL. None: the
                message has the size of out.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``.

        Raises:
            As :meth:`send`.
        """
        return messages.start(self._calls, RECV, None, None, out, src, count, stream)

    def sendrecv(
        self,
        x: DeviceArray,
        *,
        dst: int | None,
        out: DeviceArray,
        src: int | None,
        count: DeviceArray | None = None,
        stream: Any = None,
    ) -> Any:
        """Send ``x`` to rank ``dst``, and receive into ``out`` from rank ``src``.

        Asynchronous. The call matches :meth:`send`, :meth:`recv` and :meth:`sendrecv`
        of other ranks.

        Args:
            x: as for :meth:`send`.
            dst: the rank to send to. It may be this rank if ``src`` is this rank, too,
                or within a group. None or MPI.PROC_NULL: no rank.
            out: as for :meth:`recv`; does not overlap x.
            src: the rank to receive from; it may be this rank under the same conditions
                as ``dst``. None or MPI.PROC_NULL: no rank; ``out`` keeps its contents.
            count: as for :meth:`recv`; does not overlap x or out.
            stream: as for :meth:`all_reduce`; None: as for ``x``.

        Returns:
            ``out``.

        Raises:
            As :meth:`send`.
        """
        return messages.start(self._calls, SENDRECV, x, dst, out, src, count, stream)

    def isend(self, x: DeviceArray, *, dst: int | None, stream: Any = None) -> Request:
        """Start to send ``x`` to rank ``dst``, which calls :meth:`irecv`.

        No later call waits for the message, because it has a stream of its own. The
        communicator must have been made with ``requests=True``. Requests between two
        ranks match in the order in which they are started, and never match
        :meth:`recv`.

        Args:
            x: as for :meth:`send`. Do not write it before the request is done.
            dst: another rank. None or MPI.PROC_NULL: no rank.
            stream: as for :meth:`all_reduce`; the message follows the stream's earlier
                work.

        Raises:
            ArgumentError: an array or a rank is wrong, the communicator has no
                requests, a group is open, or the stream is being captured.
            CollectiveError, ClosedError: as for any call.
        """
        return messages.start(  # type: ignore[no-any-return]
            self._calls, ISEND, x, dst, None, None, None, stream
        )

    def irecv(
        self,
        out: DeviceArray,
        *,
        src: int | None,
        count: DeviceArray | None = None,
        stream: Any = None,
    ) -> Request:
        """Start to receive into ``out`` from rank ``src``, which calls :meth:`isend`.

        As with :meth:`isend`, no later call waits for the message.

        Args:
            out: as for :meth:`recv`. Do not use it before the request is done.
            src: another rank. None or MPI.PROC_NULL: no rank, as for :meth:`recv`.
            count: as for :meth:`recv`. Do not use it before the request is done.
            stream: as for :meth:`isend`.

        Raises:
            As :meth:`isend`.
        """
        return messages.start(  # type: ignore[no-any-return]
            self._calls, IRECV, None, None, out, src, count, stream
        )

    def group(self) -> AbstractContextManager[None]:
        """Start the calls within a ``with`` block together, at the block's end.

        Until the end of the block, no call starts, and no result may be used. Messages,
        and the collectives that consist of messages, proceed side by side in one kernel
        and on one stream, in any order. So two ranks may both send first. The
        collectives that consist of messages are ``gather``, ``scatter``, ``gather_v``,
        ``scatter_v``, ``all_gather_v`` and ``all_to_all_v``. Other collectives follow,
        in the order of their calls. After an exception within the block, no call is
        started.

        Not collective. Ranks may group their messages differently, because messages of
        two ranks match in the order of their calls. But any other collective call must
        be within a group on every rank or on none. A rank may send to itself if the
        same group also receives the message.

        Raises:
            ArgumentError: the block is within another group. A call raises it if the
                messages are on several streams, or if there are too many between two
                ranks (more than 16 with 8 ranks, or 64 with 2). The block's end raises
                it if a message to this rank itself has no match, or a match of another
                size.
            CollectiveError, ClosedError: as for any call.
        """
        return self._group

    all_reduce_init = init_of(all_reduce)
    all_gather_init = init_of(all_gather)
    all_to_all_init = init_of(all_to_all)
    reduce_scatter_init = init_of(reduce_scatter)
    scan_init = init_of(scan)
    exscan_init = init_of(exscan)
    reverse_scan_init = init_of(reverse_scan)
    reduce_init = init_of(reduce)
    broadcast_init = init_of(broadcast)
    reduce_scatter_v_init = init_of(reduce_scatter_v)
    sum_init = init_of(sum)
    dot_init = init_of(dot)
    norm_init = init_of(norm)
    gather_init = init_of(gather)
    gather_v_init = init_of(gather_v)
    scatter_init = init_of(scatter)
    scatter_v_init = init_of(scatter_v)
    all_gather_v_init = init_of(all_gather_v)
    all_to_all_v_init = init_of(all_to_all_v)
    neighbor_all_gather_init = init_of(neighbor_all_gather)
    neighbor_all_to_all_init = init_of(neighbor_all_to_all)
    send_init = init_of(send)
    recv_init = init_of(recv)
    sendrecv_init = init_of(sendrecv)

    def group_init(self) -> AbstractContextManager[Plan]:
        """Return a plan of the calls within a ``with`` block, which start together.

        No call starts, neither in the block nor at its end. The plan is ``plan`` in
        ``with comm.group_init() as plan:``, and may be called after the block, which
        returns None. All its messages are one launch. In debug mode, the ranks compare
        the calls when the plan is made, not when it is called.

        If another plan is called within the block, that call is one of the block's
        calls. The rules for calls and ranks are those of :meth:`group`.

        Raises:
            As :meth:`group`.
        """
        return of_group(self._calls)

    @by_one_thread
    def launch_limit(self, kernel: Any, threads: int) -> int:
        """Return how many blocks of a kernel may wait for each other. Not collective.

        A block that waits keeps its place on a multiprocessor. So all blocks of a grid
        must run together if they wait for each other, such as in ``grid_barrier``.
        Ranks that share a GPU divide its multiprocessors. Other kernels, the library's
        own included, take places, too: launch fewer blocks if such kernels run
        meanwhile.

        Args:
            kernel: a compiled kernel of ``numba.cuda.jit``: one with a signature, or
                one that was launched before. Its registers and its static shared memory
                determine the limit.
            threads: of a block, 1 to 1024.

        Returns:
            The number of blocks; 0 if a block needs more than this rank's share. In the
            simulator, 1024 divided by ``threads``.

        Raises:
            ArgumentError: ``kernel`` is not a compiled kernel, or ``threads`` is not
                from 1 to 1024.
            ClosedError: the communicator was closed.
        """
        members = self._calls.members
        members.check_open()
        threads = arguments.integer(
            threads,
            "launch_limit",
            "threads to be an integer from 1 to 1024",
            least=1,
            most=1024,
            do="pass the threads of a block",
        )
        most = kernels.most_blocks(kernel, threads)
        return most // devices.sharers(members.gpus)[members.gpu.uuid]

    @by_one_thread
    def digest(self, x: DeviceArray, *, stream: Any = None) -> int:
        """Return a 64-bit digest of an array's bits. Not collective.

        Arrays of equal bits in index order have equal digests, whatever their dtypes,
        shapes, strides and addresses. Different arrays have equal digests with a
        probability of 2**-64. The digest is not a cryptographic hash: one can construct
        different arrays with equal digests. The host waits for the stream.

        Args:
            x: a device array of any shape and dtype. An array that is not in C order is
                first copied into memory of the communicator.
            stream: as for :meth:`all_reduce`; it must not be in a capture.

        Returns:
            The digest, from 0 to 2**64 - 1. It is 0 for an array without elements.

        Raises:
            ArgumentError: the array or the stream is wrong, or a group is open.
            CollectiveError, ClosedError: the communicator has failed or was closed.
        """
        from numba_symm.collectives import equality

        return equality.digest(self._calls, x, stream)

    @by_one_thread
    def check_equal(self, x: DeviceArray, *, stream: Any = None) -> None:
        """Raise on every rank if the ranks' arrays do not have equal bits.

        Collective: every rank passes an array of equal shape and dtype. The hosts wait
        for their streams and for each other. The ranks compare their arrays' digests
        (:meth:`digest`). If these differ, the ranks compare digests of shorter ranges
        until they have found the first difference.

        Args:
            x: as for :meth:`digest`.
            stream: as for :meth:`digest`.

        Raises:
            ArraysDiffer: on all ranks. The text names the ranks whose arrays differ
                from those of most ranks, the first index that differs, and each rank's
                element there.
            ArgumentError: on all ranks: shapes or dtypes differ, an array or a stream
                is wrong, or a group is open.
            CollectiveError, ClosedError: the communicator has failed or was closed.
        """
        from numba_symm.collectives import equality

        equality.check_equal(self._calls, x, stream)

    def check(self) -> None:
        """Raise an error if the communicator failed or was closed. Local; never waits.

        Raises:
            CollectiveError: it has failed: CollectiveTimeout, CallMismatch, Aborted or
                RankLeft. The text states the cause.
            ClosedError: the communicator was closed.
        """
        self._calls.members.check()

    def synchronize(self, stream: Any = None) -> None:
        """Wait for a stream, compare ranks' calls, then :meth:`check`. Not collective.

        The ranks must have made the same calls, with equal arguments where a method
        requires that. ``synchronize`` compares this rank's calls with those that the
        other ranks of its island have made so far, and waits for none of these ranks.
        It does not compare messages, collectives that consist of messages, or calls
        after a rank's first capture into a graph.

        Args:
            stream: the stream; None: ``comm.stream``.

        Raises:
            CallMismatch: calls differ. Later calls of all ranks raise it, too. The text
                contains a table of the calls around the first difference.
            CollectiveError, ClosedError: as for :meth:`check`.
        """
        self._calls.enqueuer.refuse_in_group("synchronize")
        handle = self._calls.streams.default(stream)
        if not self._calls.members.closed:
            streams.synchronize(handle)
            if self._calls.requests is not None:
                self._calls.requests.settle()
        self.check()
        self._calls.members.compare_calls()

    def tag(self, text: str) -> AbstractContextManager[None]:
        """Label this rank's calls within a ``with`` block. Local.

        The label appears in the tables of errors, in ``numba-symm status``, in
        :meth:`trace`, and in the ranges of a profiler. Blocks may be nested, and the
        returned object may be entered again.

        Args:
            text: the label, such as ``"step 3"``; a longer text is cut to 127 bytes.

        Raises:
            ArgumentError: ``text`` is not a str.
            ClosedError: the communicator was closed.
        """
        if not isinstance(text, str):
            raise ArgumentError(
                f"tag: expected text to be a str, got {shown(text)}; pass the name of "
                "the calls in the block"
            )
        calls = self._calls
        calls.members.check_open()

        def begin() -> AbstractContextManager[None]:
            calls.members.check_open()
            return calls.enqueuer.tagged(text)

        return Tag(begin)

    def trace(self, file: str | os.PathLike[str]) -> None:
        """Write the record of calls as a Chrome trace. Local.

        For each rank of this rank's island, the file contains the last 1024 collective
        calls, and the last 1024 other calls, such as messages. A slice of the trace
        lasts from a call to the rank's next call.

        Args:
            file: the path of a JSON file, which is replaced. Perfetto
                (ui.perfetto.dev) and ``chrome://tracing`` show it.

        Raises:
            ArgumentError: the file cannot be written, or the calls are not recorded.
            ClosedError: the communicator was closed.
        """
        self._calls.members.check_open()
        record = self._calls.members.board.record
        if record is None:
            raise ArgumentError(
                "trace: expected a record of calls, got NUMBA_SYMM_RECORD=0; unset it"
            )
        try:
            call_records.write(Path(file), record)
        except (OSError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"trace: expected the path of a file that can be written, got "
                f"{shown(file)}: {error}"
            ) from error

    def abort(self, reason: str = "") -> None:
        """End the communicator on all ranks. Local, from any thread.

        Waiting kernels end within 100 ms, and waits of hosts in set-up calls within a
        second. The next call of every rank raises :class:`~numba_symm.Aborted`, with
        this rank and the reason. If the communicator had already failed, calls raise
        that first failure. Close the communicator on every rank afterwards.

        Args:
            reason: a text for the errors of all ranks.

        Raises:
            ArgumentError: ``reason`` is not a str.
            ClosedError: the communicator was closed.
        """
        if not isinstance(reason, str):
            raise ArgumentError(
                f"abort: expected reason to be a str, got {shown(reason)}; pass a text "
                "for the errors of all ranks"
            )
        self._calls.members.abort(reason)

    def rebuild(self) -> "Communicator":
        """Return a new communicator of the remaining ranks, after a failure.

        Collective over the ranks of this communicator whose processes still run. The
        call closes this communicator on this rank, if it is still open. The new
        communicator has the same GPU, timeout, stream, debug mode, requests and limit
        of multiprocessors, and its ranks are in the same order. The program must make
        new arrays and new child communicators.

        If a process has ended, MPI must continue without it: start the job with
        ``numba-symm run --survive``. If a process ends during the call, the call begins
        again.

        Returns:
            The communicator, which all its ranks must close.

        Raises:
            ArgumentError: this communicator has not failed, was split from a
                communicator with more ranks, or was not made from an mpi4py
                communicator.
            ClosedError: this communicator was closed without a failure, or was rebuilt
                before.
            ExchangeError: a process has ended, and MPI cannot continue.
            DeviceError, BackendError: the new communicator cannot be made.
        """
        from numba_symm.collectives.islands import rebuilding

        return cast(Communicator, self._of(rebuilding.rebuilt(self._calls)))

    def close(self) -> None:
        """Wait for this GPU's work, unmap peers' memory, and free unused memory.

        Collective, and idempotent. Arrays from :meth:`empty` stay usable on their own
        rank. After a failure, the call is local, and never waits for a peer.

        Raises:
            CollectiveError: the communicator had failed, and no call of this rank had
                reported that yet. The communicator is closed nonetheless.
        """
        lifetime.close(self._calls)

    def __enter__(self) -> Self:
        self._calls.members.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lifetime.leave(self._calls, error)

    def __repr__(self) -> str:
        closed = "" if self._calls.when_dropped.alive else "closed "
        return repr(self._calls).replace("<", f"<{closed}", 1)
