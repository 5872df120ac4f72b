"""The life of a call: read, check, agree, choose, remember, enqueue.

``Calls`` owns the parts of a communicator: the island of ranks, its symmetric memory,
the workspace and the order of streams. ``communicator.py`` has the methods that users
call; ``lifetime.py`` makes and closes these parts.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident, local
from typing import Any, TypeVar

from numba_symm import arrays, dtypes, loads, own_arrays, streams
from numba_symm.arrays import ArrayView, Fields
from numba_symm.cache import UNKNOWN, Cache
from numba_symm.collectives import staging
from numba_symm.collectives.binder import Binder
from numba_symm.collectives.checks import check_rank, check_writable
from numba_symm.collectives.invocation import OPTIONS, Invocation
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import Endpoint, Enqueue
from numba_symm.collectives.requests import Requests
from numba_symm.collectives.transfers import Pending, Prepared, Stream, owned
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ClosedError, CollectiveError
from numba_symm.island import Island
from numba_symm.launch import devices
from numba_symm.memory.heap import Heap
from numba_symm.streams import StreamOrder

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

REFUSALS = (ArgumentError, ClosedError, CollectiveError)
"""Errors before anything is enqueued, after which other calls may follow."""

MAX_PLANS = 1024
"""The number of latest different calls that a communicator remembers, at least."""


class Calls:
    """The calls of one communicator on this rank.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        gpu: this rank's GPU.
        island: the ranks with their GPUs and their status board.
        heap: their symmetric memory.
        order: orders the calls of all streams.
        end: this rank's end of the communicator, for kernels.
        binder: binds calls to kernels.
        stream: the stream of calls whose array names none; None: the legacy default
            stream.
        debug: whether the ranks compare their calls.
        staging: contiguous memory in place of arrays with gaps.
        pending: the calls of a group that is open, or None.
        memory: the memory of the workspace; None once the communicator is closed.
        requests: the messages beside all other calls; None if it has none.
        when_dropped: releases all this if the communicator is dropped but not closed.
    """

    when_dropped: "weakref.finalize[..., Calls]"
    requests: Requests | None = None

    def __init__(
        self,
        island: Island,
        heap: Heap,
        order: StreamOrder,
        end: Endpoint,
        stream: Any,
        debug: bool,
        memory: own_arrays.Memory,
    ):
        self.rank, self.size, self.gpu = end.rank, end.size, island.gpu
        self.island = island
        self.heap = heap
        self.order = order
        self.end = end
        self.binder: Binder = Binder(end)
        self.stream = stream
        self.debug = debug
        self.memory: own_arrays.Memory | None = memory
        self.pending: Pending | None = None
        self.staging = staging.Staging()
        self._own = owned(stream)
        self._within: dict[None, int] = {}  # the identifier of the thread in a call
        self._threads = local()  # has ``ready`` in threads where the GPU is current
        self._plans = Cache(MAX_PLANS)
        self._barrier: Enqueue | None = None

    def __repr__(self) -> str:
        return (
            f"<Communicator rank {self.rank} of {self.size}, "
            f"{self.island.backend.name} memory, {self.gpu.name}>"
        )

    # One thread at a time.

    def begin(self, what: str) -> None:
        """Begin a call. Calls of other threads are refused until :meth:`finish`.

        Args:
            what: the call that begins.

        Raises:
            ArgumentError: another thread is in a call, or another GPU is current.
        """
        if not hasattr(self._threads, "ready"):
            devices.enter_thread(self.gpu.ordinal, what)
            self._threads.ready = True
        # Atomic. If an interrupt prevented this thread's finish, it may begin again.
        thread = get_ident()
        if self._within.setdefault(None, thread) != thread:
            raise ArgumentError(
                f"{what}: expected one thread at a time in a communicator's calls, "
                "got a second one; give each thread its own, made by dup()"
            )

    def finish(self) -> None:
        """End a call; in an open group, other threads are still refused."""
        if self.pending is None:
            self._within.clear()

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Make a call between :meth:`begin` and :meth:`finish`."""
        self.begin(what)
        try:
            yield
        finally:
            self.finish()

    # Calls that all ranks make at the same time.

    def set_up(self, what: str) -> AbstractContextManager[None]:
        """Wait for every rank, then make a call that all ranks make, or raise on all.

        If only this rank leaves the block by an exception, the other ranks raise, too.

        Args:
            what: the call, as the user names it.

        Raises:
            CollectiveError: the communicator has failed.
            ClosedError: the communicator was closed.
        """
        return self.island.set_up(what)

    def compares(self) -> bool:
        """Return whether the ranks compare this call; they do not after a failure.

        Then a rank raises its own argument errors, or the failure if it has none.
        """
        return self.debug and not self.island.failed

    def agreed(
        self,
        what: str,
        words: Callable[[T], str],
        prepare: Callable[..., T],
        *args: Any,
    ) -> T:
        """Return ``prepare(*args)``, if all ranks pass arguments that agree.

        Collective, for debug mode.

        Args:
            what: the operation.
            words: returns a text from the prepared call, which must be equal on all
                ranks.
            prepare: checks the arguments of this rank.
            *args: these arguments.

        Raises:
            SymmError: on all ranks: ``prepare`` failed on one, or their texts differ.
        """
        with self.set_up(what):
            return self.compared(what, words, prepare, *args)

    def compared(
        self,
        what: str,
        words: Callable[[T], str],
        prepare: Callable[..., T],
        *args: Any,
    ) -> T:
        """Do what :meth:`agreed` does, within a call that all ranks make."""
        with self.island.exchange.agreed(what):
            made = prepare(*args)
            said = words(made)
        self.island.exchange.agree_equal(said, what)
        return made

    def checked(
        self,
        what: str,
        words: Callable[[T], str],
        prepare: Callable[..., T],
        *args: Any,
    ) -> T:
        """Return ``prepare(*args)``, if this rank may make the call.

        In debug mode the ranks agree first, so an error of one rank is raised on all.
        The arguments are those of :meth:`agreed`.
        """
        if self.compares():
            return self.agreed(what, words, prepare, *args)
        return self.made(what, prepare, *args)

    def made(self, what: str, prepare: Callable[..., T], *args: Any) -> T:
        """Do as :meth:`checked`, but never compare the ranks' arguments."""
        self.island.check_open()  # argument errors are raised before a failure
        try:
            made = prepare(*args)
        except BaseException as error:
            self.give_up_unless_refused(error, what)
            raise
        self.island.check()
        return made

    # Operations.

    def call(self, given: Invocation[Operation]) -> Any:
        """Check, pack and enqueue an operation; return its output."""
        what = given.operation.name
        self.begin(what)
        try:
            if self.debug:
                launch, out, chosen = self.prepared(given)
            else:  # what made() does, without the cost of passing on all arguments
                self.island.check_open()
                try:
                    launch, out, chosen = self.bound(given)
                except BaseException as error:
                    self.give_up_unless_refused(error, what)
                    raise
                self.island.check()
            self.run(what, launch, chosen, given.x, out)
        finally:
            self.finish()
        return out

    def prepared(self, given: Invocation[Operation]) -> staging.Bound:
        """Check and pack a call that is enqueued later."""
        operation = given.operation

        def words(_: object) -> str:
            return operation.described(given)

        return self.checked(operation.name, words, self.bound, given)

    def bound(self, given: Invocation[Operation]) -> staging.Bound:
        """Check and pack a call; see :meth:`call`."""
        operation, x, out = given[:3]
        what = operation.name
        source = arrays.fields(x, what)
        chosen = self.stream_for(given.stream, x)
        has_output = True
        if operation.rooted:
            root = check_rank(given.root, self.size, f"{what}: root")
            given = given._replace(root=root) if root is not given.root else given
            has_output = not operation.at_root or root == self.rank
        if not has_output:
            out = None  # ignored, as in MPI
        gaps = source[3] is None
        if out is None and has_output and not gaps:
            like = arrays.dense(ArrayView(*source), what)
            out = self.new(like, operation.shape(like, self.size), chosen[0], what)
        target = None
        if out is not None:
            target = source if out is x else arrays.fields(out, f"{what}: out")
            gaps = gaps or target[3] is None
        if gaps:
            return staging.bound(self, given, out, chosen)
        return self.packed(given, source, target), out, chosen

    def packed(
        self, given: Invocation[Operation], source: Fields, target: Fields | None
    ) -> Enqueue | None:
        """Return the packed launch, remembered or new; None for a call of no elements.

        ``target`` is None on a rank that has no output.
        """
        operation, what = given.operation, given.operation.name
        if type(given.op) is not str:  # another one is checked if it is not remembered
            given = given._replace(op=dtypes.reduction(given.op, what))
        if given.algorithm is not None:
            operation.check_algorithm(given.algorithm)
        # All that is checked below. Plans hold peers' addresses, which change when a
        # symmetric block is unmapped.
        key = (what, given[OPTIONS:], source, target, self.heap.generation)
        known: Enqueue | None = self._plans.get(key)
        if known is not UNKNOWN:
            return known
        if isinstance(given.op, str):
            dtypes.reduction(given.op, what)
        read = arrays.dense(ArrayView(*source), what)
        written = None if target is None else ArrayView(*target)
        name, call = operation.work(given, read, written, self.end, self.gpu)
        launch = None
        if call is not None:
            self.island.check()  # after a failure, do not compile a kernel
            with loads.of(what):
                launch = self.binder.operation(operation, name, call)
        self._plans.put(key, launch)
        return launch

    def barrier(self, stream: Any) -> None:
        """Enqueue a barrier of all ranks."""
        what = "barrier"
        self.begin(what)
        try:
            chosen = self.checked(what, lambda _: what, self.default_stream, stream)
            if self._barrier is None:
                with loads.of(what):
                    self._barrier = self.made(what, self.binder.barrier)
            self.run(what, self._barrier, chosen)
        finally:
            self.finish()

    # Messages, and collectives that consist of messages.

    def transfer(self, what: str, call: Prepared) -> None:
        """Enqueue messages, or add them to an open group; raise after a failure."""
        self.island.check()
        if self.pending is not None:
            self.pending.add(call)
            return
        try:
            launch = call.packed(self.binder.messages, what)
        except BaseException as error:
            self.give_up_unless_refused(error, what)
            raise
        self.run(what, launch, call.stream, *call.keep)

    def remembered(self, work_out: Callable[["Calls", H], T], given: H) -> T:
        """Return ``work_out(calls, given)``, from memory if it was called before.

        The result must depend on ``given`` only, and must not refer to an array.
        """
        # The key has the generation of mappings, because results may contain peers'
        # addresses. The GPU that owns the memory at an address is not checked again.
        key = (work_out, given, self.heap.generation)
        found: T = self._plans.get(key)
        if found is UNKNOWN:
            found = work_out(self, given)
            self._plans.put(key, found)
        return found

    # Arrays and streams.

    def usable(self, view: ArrayView, what: str, written: bool = False) -> ArrayView:
        """Return a dense array of this rank's GPU, or refuse it."""
        arrays.check_device(arrays.dense(view, what), self.gpu.ordinal, what)
        if written:
            check_writable(view, what)
        return view

    def new(
        self, like: ArrayView, shape: tuple[int, ...], handle: int, what: str
    ) -> Any:
        """Return a new array of ``like``'s type and order, for work on a stream."""
        if not SIMULATED and streams.is_capturing(handle):
            raise ArgumentError(
                f"{what}: pass out= while a stream is being captured into a "
                "graph; memory cannot be allocated then"
            )
        return own_arrays.empty(shape, like.dtype, what, like.order or "C")

    def stream_for(self, stream: Any, array: Any) -> Stream:
        """Return the stream for work on an array."""
        if stream is None:
            named = arrays.stream_of(array)
            return self._own if named is None else (named, None)
        return owned(stream)

    def default_stream(self, stream: Any) -> Stream:
        """Return the stream that was passed; for None, the communicator's."""
        return self._own if stream is None else owned(stream)

    # Enqueueing, and its failures.

    def run(
        self, what: str, launch: Enqueue | None, stream: Stream, *keep: Any
    ) -> None:
        """Enqueue a call, or add it to the open group.

        If this raises, the communicator fails, because other ranks may have enqueued
        their part of the call. If all streams are in captures, these become invalid,
        and the communicator fails only if an engine between islands has raised.

        Args:
            what: the operation.
            launch: enqueues the call; None: a call without elements.
            stream: the stream to enqueue it on.
            keep: objects that must live until it is enqueued.
        """
        if self.pending is not None:
            self.pending.kept += keep
            if launch is not None:
                self.pending.launches.append((what, launch, stream))
        elif launch is not None:
            handle = stream[0]
            try:
                trail = self.order.enter(handle)
                try:
                    launch(handle)
                finally:
                    trail.leave()
            except BaseException as error:
                self.island.keep(self.memory, *keep)
                self.give_up(error, what, handle)
                raise

    def give_up_unless_refused(self, error: BaseException, what: str) -> None:
        """Make the communicator fail after an error before anything was enqueued.

        It does not fail after an argument error, because the rank may repeat the call.
        """
        if not isinstance(error, REFUSALS):
            self.give_up(error, what)

    def give_up(self, error: BaseException, what: str, *stream_handles: int) -> None:
        """Make the communicator fail after an error within a call.

        It does not fail if all streams of the call are in captures. These captures are
        invalidated, so no graph contains a part of the call.
        """
        spoiled = [streams.spoil_capture(handle) for handle in stream_handles]
        if not (spoiled and all(spoiled)):
            self.island.abandon(error, what)

    def refuse_in_group(self, what: str) -> None:
        """Refuse a call that is impossible before the calls of a group have started."""
        if self.pending is not None:
            raise ArgumentError(f"{what}: a group is open; leave its with block first")

    def disown(self) -> None:
        """In a forked child, release nothing when the communicator is dropped."""
        self.when_dropped.detach()

    def forget(self) -> None:
        """Drop references to memory and streams, before these are released."""
        self._plans.clear()
        self._barrier = None
        self.order.close()
        self.memory = None
