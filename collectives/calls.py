"""The life of a call: read, check, agree, choose, remember, enqueue.

``Calls`` owns the parts of a communicator: its ranks, their symmetric memory, the
workspace and the order of streams. ``communicator.py`` contains the methods that users
call; ``lifetime.py`` makes and closes these parts.
"""

import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from numba_symm import dtypes
from numba_symm.arguments import flag
from numba_symm.collectives import staging
from numba_symm.collectives.binder import Binder, Descriptions
from numba_symm.collectives.enqueueing import Agreement, Enqueuer, PackedCall
from numba_symm.collectives.invocation import (
    NEW,
    NONE,
    OPTIONS,
    ROOT,
    UNKNOWN,
    Cache,
    CallStreams,
    Invocation,
    check_rank,
    check_writable,
)
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import Call, Endpoint, Enqueue, Series
from numba_symm.collectives.requests import Requests
from numba_symm.collectives.staging import BoundCall, Prepared, agree_on_counts
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, entry, loads, streams
from numba_symm.gpu.arrays import ArrayView, Fields
from numba_symm.gpu.streams import StreamOrder
from numba_symm.launch.members import Members
from numba_symm.memory.allocator import Heap

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

Ready = BoundCall | Prepared
"""A call that was checked."""

MAX_PLANS = 1024
"""The number of latest different calls that a communicator remembers, at least."""


class Calls:
    """The calls of one communicator on this rank.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        gpu: this rank's GPU.
        members: the ranks with their GPUs and their status board.
        heap: their symmetric memory.
        end: this rank's end of the communicator, for kernels.
        binder: binds calls to kernels.
        thread: admits one thread at a time.
        memory: the calls that were made before, and what was worked out for them.
        streams: chooses the streams of calls.
        agreement: prepares calls, and compares them in debug mode.
        enqueuer: enqueues calls, and has those of an open group.
        descriptions: what calls are.
        staging: contiguous memory in place of strided arrays.
        requests: the messages beside all other calls; None if it has none.
        experts_made: how many objects of ``experts`` the ranks have made.
        when_dropped: releases all this if the communicator is dropped but not closed.
    """

    when_dropped: "weakref.finalize[..., Calls]"
    requests: Requests | None = None
    experts_made = 0

    def __init__(
        self,
        members: Members,
        heap: Heap,
        order: StreamOrder,
        end: Endpoint,
        stream: Any,
        debug: bool,
        memory: arrays.Memory | None,
    ):
        self.rank, self.size, self.gpu = end.rank, end.size, members.gpu
        self.members = members
        self.heap = heap
        heap.debug = debug
        self.end = end
        self.binder: Binder = Binder(end)
        self.streams = CallStreams(stream)
        self.staging = staging.Staging()
        self.enqueuer = Enqueuer(members, order, (memory, self.staging))
        self.thread = self.enqueuer.thread
        self.agreement = Agreement(members, self.enqueuer, debug)
        self.memory = Cache(MAX_PLANS)
        heap.changed = self.memory.clear  # packed calls have addresses of peers
        by_algorithms = end.size > 1 and len(members.parts) == 1
        self.descriptions = Descriptions(MAX_PLANS, by_algorithms)

    def __repr__(self) -> str:
        return (
            f"<Communicator rank {self.rank} of {self.size}, "
            f"{self.members.backend.name} memory, {self.gpu.name}>"
        )

    # Operations.

    def operate(
        self,
        operation: Any,
        x: Any,
        out: Any,
        stream: Any,
        options: tuple[Any, ...],
        others: tuple[Any, ...] = NONE,
    ) -> Any:
        """Make a call of an operation, and return its output.

        Args:
            operation: the operation, or another kind of a call with its attributes.
            x: the input.
            out: the output; None: a new array.
            stream: the stream; None: that of the arrays.
            options: the fields of an :class:`Invocation` that are options.
            others: the inputs after the first one.
        """
        key, root = None, options[ROOT]
        # A root of another class may equal a known one, and be refused.
        if root is None or root.__class__ is int:
            try:
                source: Any = (  # of a rank that has an input
                    None if x is None else arrays.KINDS[x.__class__].read(x, "")
                )
                handle = self.streams.of(stream, out if x is None else x)
                target: Fields | None = source
                for each in others:
                    source = source, arrays.KINDS[each.__class__].read(each, "")
                if operation.at_root and root != self.rank:
                    target = None
                elif out is not x:
                    if out is None:
                        new = operation.name, options, source, NEW
                        like, shape = self.memory.young[new]
                        out = self.new(x, like, shape, handle, operation.name)
                    target = arrays.KINDS[out.__class__].read(out, "")
                key = operation.name, options, source, target
                call = self.memory.young.get(key)
            except Exception:  # of an allocation, too: the other ranks must learn of it
                call = None  # a call that was not made, or what follows raises it
            if call is not None:
                status = call.enqueue(handle)
                if status == entry.DONE or self.made(
                    status, call, handle, x, out, others
                ):
                    return None if target is None else out
        given = Invocation(operation, x, out, stream, *options)
        return self.call(given._replace(args=others) if others else given, key)

    def made(self, status: int, call: PackedCall, handle: int, *keep: Any) -> bool:
        """Go on with a plain call that was made before.

        Args:
            status: what the compiled function has returned.
            call: the call.
            handle: the handle of the stream.
            keep: its arrays, which must live until it is enqueued.

        Returns:
            Whether it was enqueued. If not, make the call as if it was new.
        """
        if status not in (entry.DONE, entry.SLOW):
            try:
                self.enqueuer.go_on(status, call, handle, *keep)
            finally:
                if status != entry.BUSY:
                    self.thread.finish()
        return status != entry.SLOW

    def call(self, given: Invocation[Any], key: Any = None) -> Any:
        """Check, pack and enqueue a call; return its output.

        Args:
            given: the call. Its operation has a name, prepares calls, and is collective
                or not.
            key: by which messages are remembered; None: they are not.
        """
        what = given.operation.name
        with self.thread.alone(what):
            return self.enqueue(what, self.prepared(given), key)

    def prepared(self, given: Invocation[Any]) -> Ready:
        """Check a call; if it is collective, the ranks compare it in debug mode."""
        operation = given.operation
        prepare: Callable[[Invocation[Any]], Ready] = partial(operation.prepare, self)
        if operation.collective:
            what = operation.name
            return self.agreement.checked(what, _words, prepare, given, self._compare)
        self.members.check_open()
        return prepare(given)

    def _compare(self, made: Ready, given: Invocation[Any]) -> None:
        if isinstance(made, Prepared):
            what = given.operation.name
            agree_on_counts(self.members.exchange, what, made.transfers)

    def enqueue(self, what: str, made: Ready, key: Any = None) -> Any:
        """Enqueue a call, or add it to an open group; raise after a failure.

        Args:
            what: the call.
            made: the same, checked.
            key: as for :meth:`call`.

        Returns:
            The result of the call.
        """
        self.members.check()
        if isinstance(made, BoundCall):
            call = made.call
        elif self.thread.group is not None:
            self.thread.group.add(made, key)
            return made.result
        else:
            call = self.agreement.made(what, self.packed_messages, what, made)
            if key is not None and call is made.transfers.call:
                self.memory.put(key, call)
        self.enqueuer.run(call, made.stream, made.result, *made.keep)
        return made.result

    def bound(self, given: Invocation[Operation]) -> BoundCall:
        """Check and bind a call of an operation."""
        operation, x, out, stream = given[:4]
        what = operation.name
        if given.epilogue is not None and isinstance(out, tuple):
            return self._of_two(given)
        source = whole = arrays.fields(x, what)
        if given.leaves is not False:
            from numba_symm.collectives import composed

            given = given._replace(leaves=flag(given.leaves, what, "leaves"))
            if given.leaves:
                _, source = composed.leaves_of(given, whole)
        self.staging.stream = chosen = self.streams.of(stream, x)
        has_output = True
        if operation.rooted:
            root = check_rank(given.root, self.size, f"{what}: root")
            given = given._replace(root=root) if root is not given.root else given
            has_output = not operation.at_root or root == self.rank
        if not has_output:
            out = None  # ignored, as in MPI
        gaps, alike = source[3] is None, None
        if out is None and has_output and not gaps:
            like = arrays.dense(ArrayView(*source), what)
            alike = like, operation.shape(like, self.size)
            out = self.new(x, *alike, chosen, what)
        target = None
        if out is not None:
            target = whole if out is x else arrays.fields(out, f"{what}: out")
            gaps = gaps or target[3] is None
        if gaps:
            return staging.bound(self, given, out, self.bound)
        call = self.packed(given, whole, target)
        if alike is not None and type(given.op) is str and given.args is NONE:
            self.memory.put((what, given[OPTIONS], whole, NEW), alike)
        return BoundCall(call, chosen, (x, out, stream, *given.args), out)

    def _of_two(self, given: Invocation[Operation]) -> BoundCall:
        """Do what ``bound`` does for a call with two outputs."""
        if len(given.out) != 2 or given.out[1] is None:
            raise ArgumentError(
                f"{given.operation.name}: expected out of one array, or of two for an "
                f"epilogue that returns two numbers, got {len(given.out)} of "
                f"{given.out}; pass out=(y, z)"
            )
        first, second = given.out
        made = self.bound(given._replace(out=first, second=second))
        return made._replace(result=(made.result, second))

    def packed(
        self,
        given: Invocation[Operation],
        source: Fields,
        target: Fields | None,
    ) -> PackedCall:
        """Return the packed call, remembered or new.

        Args:
            given: the call, whose root was checked.
            source: its input.
            target: its output; None on a rank that has none.
        """
        operation = given.operation
        what = operation.name
        if type(given.op) is not str:  # another one is checked if it is not remembered
            given = given._replace(op=dtypes.reduction(given.op, what))
        if (
            given.epilogue is not None
            or given.args is not NONE
            or given.row_sum is not None
        ):
            from numba_symm.collectives import epilogues

            given = epilogues.read(given)
        if given.algorithm is not None:
            operation.check_algorithm(given.algorithm)
        if given.wire is not None or given.leaves:
            from numba_symm.collectives import composed
        if given.wire is not None:
            composed.check_name(given.wire, what)
        key = what, given[OPTIONS], source, target  # all that is checked below
        known: PackedCall = self.memory.get(key)
        if known is not UNKNOWN:
            return known
        if isinstance(given.op, str):
            dtypes.reduction(given.op, what)
        if given.leaves:
            number, source = composed.leaves_of(given, source)
            given = given._replace(leaves=number)
        read = arrays.dense(ArrayView(*source), what)
        if given.wire is not None:
            composed.check_codes(given, read.dtype, self.gpu)
        written = None if target is None else ArrayView(*target)
        name, call = operation.work(given, read, written, self.end, self.gpu)
        launch = None
        if call is not None:
            self.members.check()  # after a failure, do not compile a kernel
            with loads.of(what):
                launch = self._launch(given, name, call, read, written)
        about = self.descriptions.operation(given, read, name)
        made = self.enqueuer.pack(about, launch)
        self.memory.put(key, made)
        return made

    def _launch(
        self,
        given: Invocation[Operation],
        algorithm: str,
        call: Call,
        x: ArrayView,
        out: ArrayView | None,
    ) -> Enqueue:
        """Bind a checked call of these arrays."""
        if given.leaves:
            from numba_symm.collectives import composed

            shards = given.operation.shards(self.size)
            needs = composed.room_of_leaves(call, given.leaves, shards)
            room = self.staging.scratch(needs, f"{given.operation.name}: leaves=")
            return composed.bind_leaves(self.end, self.binder, given, call, room)
        if given.wire is None and given.epilogue is None:
            return self.binder.operation(given.operation, algorithm, call)
        from numba_symm.collectives import composed, epilogues

        work, kept, coded = None, 0, 0
        if given.epilogue is not None:
            assert out is not None
            work = epilogues.checked(given, x, out, self.size, self.gpu)
            if given.wire is None and len(self.members.parts) == 1:
                made = epilogues.fused(self.end, work, given, algorithm, call)
                if made is not None:
                    return made
            kept = epilogues.room_of(work, given, out)
        if given.wire is not None:
            coded = composed.room_of_codes(call.count, self.size)
        room = 0
        if kept + coded:
            which = "epilogue=" if given.wire is None else "wire="
            what = f"{given.operation.name}: {which}"
            room = self.staging.scratch(kept + coded, what)
        reduced = replace(call, target=room) if kept else call
        if given.wire is None:
            launch = self.binder.operation(given.operation, algorithm, reduced)
        else:
            more = given.wire, reduced, room + kept
            launch = composed.bind_codes(self.end, self.binder, *more)
        if work is None:
            return launch
        last = epilogues.bind(self.binder.end, work, reduced.target, call.target)
        return Series(launch, last)

    # Messages, and collectives that consist of messages.

    def packed_messages(self, what: str, call: Prepared) -> PackedCall:
        """Return the packed call of messages."""
        kept = call.transfers
        if kept.call is None:
            about = self.descriptions.messages(what, kept)
            launch = kept.packed(self.binder.messages, what)
            kept.call = self.enqueuer.pack(about, launch)
        return self.enqueuer.around(call.before, kept.call, call.after)

    def remembered(self, work_out: Callable[["Calls", H], T], given: H) -> T:
        """Return ``work_out(calls, given)``, from memory if it was called before.

        The result must depend on ``given`` only, and must not refer to an array.
        """
        # The GPU that owns the memory at an address is not checked again.
        key = work_out, given
        found: T = self.memory.get(key)
        if found is UNKNOWN:
            found = work_out(self, given)
            self.memory.put(key, found)
        return found

    # Arrays and streams.

    def usable(self, view: ArrayView, what: str, written: bool = False) -> ArrayView:
        """Return a dense array of this rank's GPU, or refuse it."""
        arrays.check_device(arrays.dense(view, what), self.gpu.ordinal, what)
        if written:
            check_writable(view, what)
        return view

    def new(
        self, x: Any, like: ArrayView, shape: tuple[int, ...], handle: int, what: str
    ) -> Any:
        """Return a new array for work on a stream, of the library that ``x`` is of.

        ``like`` has its type and its order.
        """
        if not SIMULATED and streams.is_capturing(handle):
            raise ArgumentError(
                f"{what}: pass out= while a stream is being captured into a "
                "graph; memory cannot be allocated then"
            )
        order = like.order or "C"
        made = arrays.empty_like(x, shape, order, handle, what)
        return arrays.empty(shape, like.dtype, what, order) if made is None else made

    def disown(self) -> None:
        """In a forked child, release nothing when the communicator is dropped."""
        self.when_dropped.detach()
        self.enqueuer.gate.slow |= entry.CLOSED
        self.enqueuer.gate.thread = 0  # that of another thread of the parent

    def forget(self) -> None:
        """Drop references to memory and streams, before these are released."""
        self.memory.clear()
        self.enqueuer.forget()


def _words(made: Ready, _: object) -> str:
    return made.words


class Barrier:
    """The kind of a barrier of all ranks."""

    name = "barrier"
    collective = True
    at_root = False

    def prepare(self, calls: Calls, given: "Invocation[Barrier]") -> BoundCall:
        """Bind a barrier once."""
        what, chosen = self.name, calls.streams.default(given.stream)
        key = what, given[OPTIONS], None, None  # as of a call without arrays
        call = calls.memory.get(key)
        if call is UNKNOWN:
            about = calls.descriptions.of(what, key="all")
            with loads.of(what):
                call = calls.enqueuer.pack(about, calls.binder.barrier())
            calls.memory.put(key, call)
        return BoundCall(call, chosen, (given.stream,), None)


BARRIER = Barrier()
