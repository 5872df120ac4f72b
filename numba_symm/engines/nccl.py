"""The engine of NCCL, through nccl4py: its kernels move the bytes, in stream order.

Its communicator is *non-blocking*: a call of NCCL's returns before it is done, and the
host asks for its state. So the library detects a rank that is late or has ended while
NCCL connects to it, and the watchdog can abort NCCL at any moment.
"""

import functools
import importlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from numba_symm.engines.deadline import Deadline, TimedExchange
from numba_symm.engines.protocol import Collective, EnqueueCollective, Parcel
from numba_symm.environment import SIMULATED
from numba_symm.errors import BackendError, CollectiveError, RankLeft
from numba_symm.gpu import streams
from numba_symm.gpu.streams import StreamOrder
from numba_symm.launch.waiting import Wait
from numba_symm.launch.watchdog import Questions

CURE = (
    "pip install nccl4py nvidia-nccl-cu13 (or nvidia-nccl-cu12 with a driver for "
    "CUDA 12)"
)

_SUCCESS, _REMOTE_ERROR, _IN_PROGRESS = 0, 6, 7  # ncclResult_t
_KINDS = dict(int8=0, uint8=1, int32=2, uint32=3, int64=4, uint64=5, float32=7)
"""ncclDataType_t"""
_BYTES = _KINDS["uint8"]
_OPERATORS = {"sum": 0, "prod": 1, "max": 2, "min": 3}  # ncclRedOp_t
_COLLECTIVES = "all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"
_GRACE = 0.06  # seconds: three looks of the watchdog
_POLLS = 200  # polls of NCCL's state, before a wait that looks for failures
_EXIT = 2.0  # seconds that the end of the program waits for threads in NCCL

_aborting: deque[threading.Thread] = deque(maxlen=64)


def wait_for_aborts() -> None:
    """Wait for threads that abort NCCL, because CUDA must not end before they do.

    A thread waits until no graph has NCCL's kernels. A graph that the program keeps
    until its end would never let the thread end, so this wait is bounded.
    """
    until = time.monotonic() + _EXIT
    for thread in list(_aborting):
        thread.join(max(0, until - time.monotonic()))


class Installation(NamedTuple):
    """What a process has of NCCL.

    Attributes:
        version: such as "NCCL 2.28.9"; "" if it is missing.
        missing: why, with the cure; "" if it is there.
    """

    version: str
    missing: str


@functools.cache
def found() -> Installation:
    """Return whether this process can use NCCL."""
    if SIMULATED:
        return Installation("", "NCCL needs GPUs, and this is Numba's CUDA simulator")
    try:
        number = _functions().get_version()
    except ImportError as error:
        return Installation("", f"nccl4py cannot be imported ({error}): {CURE}")
    except RuntimeError:
        return Installation("", f"nccl4py finds no NCCL library: {CURE}")
    return Installation(
        f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}", ""
    )


def _functions() -> Any:
    """Return nccl4py's functions of NCCL itself, which take addresses.

    Those of ``nccl.core`` take arrays, and import torch and CuPy to find out of whom.
    """
    return importlib.import_module("nccl.bindings.nccl")


def unique_id() -> bytes:
    """Return an identifier for a new communicator of NCCL's."""
    return bytes(_functions().get_unique_id())


def share(multiprocessors: int) -> int:
    """Return how many of a communicator's multiprocessors NCCL's kernels may occupy.

    NCCL takes a power of two. The others are left to a kernel beside it.
    """
    return 1 << (max(1, 2 * multiprocessors // 3).bit_length() - 1)


class _Aborted(Exception):
    """NCCL's communicator was aborted."""


class _Work(NamedTuple):
    """Work of NCCL's.

    Attributes:
        peers: the ranks that it is with.
        connections: what NCCL connects when it is used for the first time.
        enqueue: ``(communicator, stream)`` calls NCCL.
    """

    peers: tuple[int, ...]
    connections: set[tuple[Any, ...]]
    enqueue: Callable[[Any, int], None]


class NcclEngine:
    """Moves bytes by NCCL's sends, receives and collectives. Collective.

    Args:
        unique: the identifier of :func:`unique_id`, the same on all ranks.
        rank: this rank.
        size: the number of ranks.
        multiprocessors: how many NCCL's kernels may occupy, at most.
        wait: starts a wait in a call, with the communicator's deadline.
        look: raises if the communicator has failed.
        operation: returns the call that is being enqueued.
        deadline: that of exchanges on the GPU.
        questions: answer for whom other ranks wait.
    """

    name = "nccl"
    capturable = True

    def __init__(
        self,
        unique: bytes,
        rank: int,
        size: int,
        multiprocessors: int,
        wait: Callable[[str], Wait],
        look: Callable[[], None],
        operation: Callable[[], str],
        deadline: Deadline,
        questions: Questions,
    ):
        self.version = found().version
        self.multiprocessors = multiprocessors
        self.collectives: Mapping[str, EnqueueCollective] = dict.fromkeys(
            _COLLECTIVES, self._collective
        )
        self._rank = rank
        self._others = tuple(each for each in range(size) if each != rank)
        self._wait, self._look, self._operation = wait, look, operation
        self._deadline, self._questions = deadline, questions
        self._asks = False  # whether it finds out which rank NCCL's error is about
        self._captured = False
        self._alone = math.inf  # from when on NCCL's error counts as the cause
        self._connected: set[tuple[Any, ...]] = set()
        # Reentrant, because a finalizer may abort, too.
        self._lock = threading.RLock()  # NCCL takes one call at a time
        self._ending: threading.Thread | None = None
        self._nccl = _functions()
        config = self._nccl.Config()
        config.blocking, config.max_ctas = 0, multiprocessors
        init, identifier = self._nccl.comm_init_rank_scalable, bytearray(unique)
        self._comm: Any = None
        try:
            with self._translated("Communicator"):
                self._comm = init(size, rank, 1, identifier, config.ptr)
                self._finish(TimedExchange("Communicator", ()), True)
        except BaseException:
            self.abort()
            raise

    def exchange(
        self,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        stream: int,
        beside: Callable[[int], None] | None = None,
        order: StreamOrder | None = None,
    ) -> None:
        """Enqueue the exchange. See :class:`Engine`.

        The first exchange with a rank waits on the host until NCCL has connected to it.
        """
        sends = [each for each in sends if each.nbytes]
        receives = [each for each in receives if each.nbytes]
        connections: set[tuple[Any, ...]] = {("to", each.peer) for each in sends}
        connections |= {("from", each.peer) for each in receives}
        peers = tuple(sorted({peer for _, peer in connections}))

        def enqueue(comm: Any, stream: int) -> None:
            for peer, address, nbytes in receives:
                self._nccl.recv(address, nbytes, _BYTES, peer, comm, stream)
            for peer, address, nbytes in sends:
                self._nccl.send(address, nbytes, _BYTES, peer, comm, stream)

        self._run(_Work(peers, connections, enqueue), stream, beside, order)

    def _collective(
        self, work: Collective, order: StreamOrder | None, stream: int
    ) -> None:
        """Enqueue a collective. See :class:`Engine`.

        NCCL connects what its algorithm needs, which depends on the bytes.
        """
        name, source, target, number, kind, op, root = work
        of_call = [source, target, number, _KINDS[kind]]
        of_call += [_OPERATORS[op]] if op else []
        of_call += [root] if name in ("broadcast", "reduce") else []
        enqueue = functools.partial(getattr(self._nccl, name), *of_call)
        connections: set[tuple[Any, ...]] = {(name, number.bit_length(), kind, op)}
        self._run(_Work(self._others, connections, enqueue), stream, None, order)

    def _run(
        self,
        work: _Work,
        stream: int,
        beside: Callable[[int], None] | None,
        order: StreamOrder | None,
    ) -> None:
        """Enqueue work of NCCL's, on a stream that its thread can use."""
        # NCCL enqueues in a thread of its own, which has another per-thread stream.
        if beside is None and streams.named(stream) != streams.PER_THREAD:
            self._enqueue(work, stream)
            return
        assert order is not None
        side = order.across
        side.follow(stream, 0)
        with side.joined(stream):
            if beside is not None:
                beside(stream)
            self._enqueue(work, side.stream)
            side.mark(0)
            side.lead(stream, 0)

    def _enqueue(self, work: _Work, stream: int) -> None:
        if not work.peers:
            return
        exchange = TimedExchange(self._operation(), work.peers)
        captured = streams.is_capturing(stream)
        self._captured = self._captured or captured
        self._deadline.begin(exchange, stream, captured)
        with self._translated(exchange.operation):
            with self._lock:
                comm = self._usable()
                self._nccl.group_start()
                try:
                    work.enqueue(comm, stream)
                finally:
                    self._nccl.group_end()
            self._finish(exchange, not work.connections <= self._connected)
        self._connected |= work.connections
        self._deadline.end(stream, captured)

    def _usable(self) -> Any:
        """Return NCCL's communicator. The caller holds the lock.

        Raises:
            _Aborted: there is none; :meth:`_translated` finds the reason.
        """
        if self._comm is None:
            raise _Aborted
        return self._comm

    def _finish(self, exchange: TimedExchange, connecting: bool) -> None:
        """Wait until NCCL's latest call is done: on the host, not on the GPU.

        If it only enqueues work, that may wait for other work of the GPU's, which has
        no deadline.
        """
        for _ in range(_POLLS):
            if (state := self._state()) != _IN_PROGRESS:
                break
        else:
            wait = self._wait(exchange.operation)
            while (state := self._state()) == _IN_PROGRESS:
                self._look()
                wait.pause(exchange.peers)
                # The watchdog reports it earlier if the GPU is in the exchange.
                if connecting and wait.overdue:
                    raise wait.error(exchange.peers)
        while self._is_early(state) or self._asks:
            self._look()
            time.sleep(_GRACE / 60)
        if state != _SUCCESS:
            raise self._error(state, exchange)

    def _is_early(self, state: int) -> bool:
        """Return whether a state may have a cause that another rank will still report.

        A rank that aborts NCCL reports the reason to the other ranks. Its connections
        may end before that report arrives.
        """
        if state != _REMOTE_ERROR:
            return False
        self._alone = min(self._alone, time.monotonic() + _GRACE)
        return time.monotonic() < self._alone

    def _state(self) -> int:
        with self._lock:
            return int(self._nccl.comm_get_async_error(self._usable()))

    def _error(self, state: int, exchange: TimedExchange) -> CollectiveError:
        """Return the error for a state of NCCL's."""
        operation, peers = exchange
        kind = RankLeft if state == _REMOTE_ERROR else CollectiveError
        whom = self._wait(operation).text(peers)
        reason = self._nccl.get_error_string(state)
        text = f"rank {self._rank} {whom}, and NCCL reports: {reason}"
        return kind(text, ranks=(self._rank, *peers), operation=operation)

    @contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        """Raise errors of NCCL's functions as errors of this library.

        The block releases the engine's lock before this calls ``_look``, because
        ``_look`` takes the watchdog's lock, whose holder may wait for the engine's.
        """
        try:
            yield
        except _Aborted:
            self._look()
            text = "NCCL was aborted: the communicator was closed"
            raise BackendError(text) from None
        except self._nccl.NCCLError as error:
            raise BackendError(
                f"{operation}: NCCL failed: {error}; NCCL_DEBUG=WARN shows more"
            ) from error

    def status(self) -> CollectiveError | None:
        """Return why exchanges cannot be finished: an error of NCCL, or the deadline.

        The watchdog calls it.
        """
        with self._translated(self._operation()), self._lock:
            if self._comm is None:
                return None
            state = self._state()
        found = self._deadline.look()
        if found is None:
            self._questions.absent = ()
            exchange = TimedExchange(self._operation(), ())
        else:
            exchange, wait = found
            self._questions.absent = exchange.peers
        self._asks = state == _REMOTE_ERROR and found is not None
        if self._is_early(state):
            return None
        if state not in (_SUCCESS, _IN_PROGRESS) and not self._asks:
            return self._error(state, exchange)
        if found is None:
            return None
        if self._asks:
            wait.end()
        if not (late := self._questions.late(wait)):
            return None
        if self._asks:
            return self._error(state, exchange._replace(peers=late))
        return wait.error(late)

    def abort(self) -> None:
        """End NCCL's kernels and its communicator. See :class:`Engine`.

        NCCL itself waits in another thread, until no graph has its kernels any more.
        """
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is None:
            return
        ending = threading.Thread(target=self._end, args=(comm,), daemon=True)
        with suppress(RuntimeError):  # Python is ending, and the process with it
            ending.start()
            self._ending = ending
            _aborting.append(ending)

    def _end(self, comm: Any) -> None:
        with suppress(self._nccl.NCCLError):
            self._nccl.comm_abort(comm)

    def keep(self, *objects: Any) -> None:
        """Do nothing: until an abort ends NCCL's kernels, these run in stream order.

        A graph may have registered its arrays, which its owner keeps in any case.
        """

    def settle(self) -> None:
        """Do nothing: no thread runs kernels."""

    def close(self) -> None:
        """Release NCCL's communicator when its work is done. Collective."""
        self.abort()
        if self._ending is not None and not self._captured:
            self._ending.join()
        self._deadline.close()
