"""Packs calls, admits them, and enqueues them; handles what fails on the way.

The compiled function (``numba_symm/entry.py``) does this for a call that was made
before. Python does here what that function leaves to it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import addressof
from functools import partial
from typing import Any, TypeVar

from numba_symm import driver, driver_table, entry, profiling, streams
from numba_symm.collectives.graphs import Graphs
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.errors import ArgumentError, ClosedError, CollectiveError
from numba_symm.launch import devices
from numba_symm.members import Members
from numba_symm.record import Description
from numba_symm.streams import StreamOrder

T = TypeVar("T")
A = TypeVar("A")

REFUSALS = (ArgumentError, ClosedError, CollectiveError)
"""Errors before anything is enqueued, after which other calls may follow."""


class PackedCall:
    """A call that was checked and bound: what is enqueued, in one block.

    Attributes:
        about: what the call is.
        block: its steps, as the compiled function reads them.
        enqueue: the function: ``enqueue(stream, mode=PLAIN)`` returns a status.
        parts: what the steps were made of.
        python: by number, the steps that Python takes.
    """

    __slots__ = ("__weakref__", "about", "block", "enqueue", "parts", "python")

    def __init__(
        self, gate: Any, about: Description, launch: Enqueue | None, countdown: int
    ):
        self.about = about
        self.python: dict[int, Enqueue] = {}
        steps: list[tuple[int, ...]] = []
        self.parts = parts = list(_parts(launch))
        for part in parts:
            words = getattr(part, "steps", None)
            if words is None:
                self.python[len(steps)] = part
                words = ((entry.PYTHON,),)
            steps += words
        self.block = entry.block_of(
            gate,
            about.address,
            about.digest,
            steps,
            countdown if steps else entry.NEVER,
        )
        self.enqueue = entry.function_of(self.block, (gate, about, parts))


def _parts(launch: Enqueue | None) -> Iterator[Enqueue]:
    if isinstance(launch, Series):
        for each in launch.calls:
            yield from _parts(each)
    elif launch is not None:
        yield launch


class ThreadGuard:
    """Refuses the calls of other threads while one is in a call of a communicator.

    Args:
        ordinal: the ordinal of the communicator's GPU.
        gate: the communicator's.

    Attributes:
        held: whether a group is open, so that the thread is in a call between calls.
        claim: the compiled function that admits a thread.
    """

    def __init__(self, ordinal: int, gate: Any):
        self.held = False
        self._ordinal = ordinal
        self._gate = gate
        claim, ready, address = (
            entry.compiled("claim"),
            entry.compiled("ready"),
            addressof(gate),
        )
        self.claim, self._ready = partial(claim, address), partial(ready, address)

    def begin(self, what: str) -> None:
        """Begin a call. Calls of other threads are refused until :meth:`finish`.

        Args:
            what: the call that begins.

        Raises:
            ArgumentError: another thread is in a call, or another GPU is current.
        """
        # If an interrupt prevented this thread's finish, it may begin again.
        status = self.claim()
        if status == entry.BUSY:
            raise busy(what)
        if status == entry.SLOW:
            try:
                devices.enter_thread(self._ordinal, what)
            except BaseException:
                self.finish()
                raise
            self._ready()

    def finish(self) -> None:
        """End a call; in an open group, other threads are still refused."""
        if not self.held:
            self._gate.thread = 0

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Make a call between :meth:`begin` and :meth:`finish`."""
        self.begin(what)
        try:
            yield
        finally:
            self.finish()


def busy(what: str) -> ArgumentError:
    """Return the error of a thread's call while another thread is in one."""
    return ArgumentError(
        f"{what}: expected one thread at a time in a communicator's calls, "
        "got a second one; give each thread its own, made with dup()"
    )


class Enqueuer:
    """Enqueues the calls of a communicator.

    Args:
        members: the ranks.
        order: orders the calls of all streams.
        memory: an object that keeps all memory of the communicator that an engine
            between islands may access in a call.

    Attributes:
        order: the same.
        thread: admits one thread at a time.
        graphs: the graphs of calls that are made often.
        record: the record of calls; None: they are not recorded.
        marks: ranges for a profiler; None: there is none.
        group: the open ``Group`` of ``messages.py``, or None.
    """

    def __init__(self, members: Members, order: StreamOrder, memory: object):
        self.order = order
        self.gate = order.gate
        self.thread = ThreadGuard(members.gpu.ordinal, order.gate)
        self.record = members.board.record
        self.marks = profiling.marks()
        self.group: Any = None
        self.graphs = Graphs(order, possible=members.engine is None)
        self._members = members
        self._memory = memory
        members.board.open(order.gate)
        if self.marks is not None:
            self.gate.slow |= entry.MARKED

    def pack(self, about: Description, launch: Enqueue | None) -> PackedCall:
        """Return a call that can be enqueued; None: a call without elements."""
        return PackedCall(self.gate, about, launch, self.graphs.countdown)

    def around(
        self, before: Sequence[Enqueue], call: PackedCall, after: Sequence[Enqueue]
    ) -> PackedCall:
        """Return a call with other steps before and after it, if it has any."""
        if not call.parts or not (before or after):
            return call
        return self.pack(call.about, Series(*before, *call.parts, *after))

    def run(self, call: PackedCall, stream: int, *keep: Any) -> None:
        """Enqueue a call that was checked, or add it to the open group.

        Args:
            call: the call.
            stream: the handle of the stream to enqueue it on.
            keep: objects that must live until it is enqueued.
        """
        if self.group is not None:
            self.group.append(call, stream, keep)
            return
        if self.marks is not None:
            self.marks.push(str(call.about))
        try:
            self.go_on(entry.STEPS, call, stream, *keep)
        finally:
            if self.marks is not None:
                self.marks.pop()

    def go_on(self, status: int, call: PackedCall, stream: int, *keep: Any) -> None:
        """Do what the compiled function has left to Python, or raise an error.

        If this raises, the communicator fails, because other ranks may have enqueued
        their part of the call. If the stream is in a capture, that becomes invalid, and
        the communicator fails only if an engine between islands has raised.

        Args:
            status: what the function has returned, neither DONE nor SLOW.
            call: the call.
            stream: the handle of its stream.
            keep: as for :meth:`run`.
        """
        what = call.about.what
        if status == entry.BUSY:
            raise busy(what)
        try:
            while status in (entry.STEPS, entry.UNKNOWN, entry.GRAPH):
                if status == entry.UNKNOWN and self.record is not None:
                    self.record.publish(call.about, stream)
                elif status == entry.GRAPH:
                    self.graphs.make(call, partial(self._enqueue, call))
                status = call.enqueue(stream, entry.CHECKED)
            if status == entry.CAPTURED:
                with self.order.captured(stream):
                    if self.record is not None:
                        self.record.note_captured(call.about, stream)
                    self._enqueue(call, stream)
            elif status <= entry.RESUME:
                with self.order.eager(stream):
                    self._resume(status, call, stream)
            elif status:
                raise _failure(status)
        except BaseException as error:
            if self._members.engine is not None:
                self._members.engine.keep(self._memory, *keep)
            self.give_up(error, what, stream)
            raise

    def _enqueue(self, call: PackedCall, stream: int) -> None:
        """Enqueue a call's steps, without order and record."""
        self._resume(call.enqueue(stream, entry.FIRST), call, stream)

    def _resume(self, status: int, call: PackedCall, stream: int) -> None:
        """Take the step that a status names, and enqueue the rest."""
        while status <= entry.RESUME:
            step = entry.RESUME - status
            call.python[step](stream)
            status = call.enqueue(stream, entry.FIRST + step + 1)
        if status:
            raise _failure(status)

    @contextmanager
    def tagged(self, text: str) -> Iterator[None]:
        """Name the calls within the block, in the record and for a profiler."""
        with ExitStack() as block:
            if self.record is not None:
                block.enter_context(self.record.tagged(text))
            if self.marks is not None:
                self.marks.push(text)
                block.callback(self.marks.pop)
            yield

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
            self._members.abandon(error, what)

    def refuse_in_group(self, what: str) -> None:
        """Refuse a call that is impossible before the calls of a group have started."""
        if self.group is not None:
            raise ArgumentError(f"{what}: a group is open; leave its with block first")

    def forget(self) -> None:
        """Drop references to memory and streams, before these are released."""
        self.gate.slow |= entry.CLOSED
        self.graphs.close()
        self.record = None
        self._memory = None


def _failure(status: int) -> BaseException:
    """Return the error for a step that has failed."""
    own = driver_table.raised()
    return own or driver.failure(driver_table.WHERE[status >> 16], status & 0xFFFF)


class Agreement:
    """Prepares calls; in debug mode, the ranks then compare them.

    Args:
        members: the ranks.
        enqueuer: makes the communicator fail after an error that is not a refusal.
        debug: whether the ranks compare their calls.

    Attributes:
        debug: the same.
    """

    def __init__(self, members: Members, enqueuer: Enqueuer, debug: bool):
        self.debug = debug
        self._members = members
        self._enqueuer = enqueuer
        if debug:
            enqueuer.gate.slow |= entry.DEBUG

    def made(self, what: str, prepare: Callable[..., T], *args: Any) -> T:
        """Return ``prepare(*args)``, or raise why this rank may not make the call.

        Args:
            what: the call.
            prepare: checks the arguments of this rank, and binds the call to kernels.
            *args: these arguments.

        Raises:
            ClosedError: the communicator was closed.
            CollectiveError: it has failed. Argument errors are raised before that.
        """
        self._members.check_open()
        try:
            made = prepare(*args)
        except BaseException as error:
            self._enqueuer.give_up_unless_refused(error, what)
            raise
        self._members.check()
        return made

    def checked(
        self,
        what: str,
        words: Callable[[T, A], str],
        prepare: Callable[[A], T],
        given: A,
        then: Callable[[T, A], None] | None = None,
    ) -> T:
        """Do as :meth:`made`; in debug mode, raise an error of one rank on all.

        Args:
            what: the operation.
            words: ``words(made, given)`` returns a text of the prepared call, which
                must be equal on all ranks.
            prepare: as for :meth:`made`.
            given: its argument.
            then: ``then(made, given)`` compares more, if the texts are equal.
                Collective.

        Raises:
            SymmError: in debug mode, on all ranks: ``prepare`` failed on one, or they
                differ.
        """
        if self._members.closed:
            self._members.check_open()
        try:
            made = prepare(given)
        except BaseException as error:
            if self.debug and isinstance(error, Exception) and not self._members.failed:
                self._raise_on_all(error, what)
            self._enqueuer.give_up_unless_refused(error, what)
            raise
        self._members.check()
        if self.debug:
            exchange = self._members.exchange
            with self._members.set_up(what, recorded=False):
                with exchange.agreed(what):
                    text = words(made, given)
                exchange.agree_equal(text, what)
                if then is not None:
                    then(made, given)
        return made

    def _raise_on_all(self, error: Exception, what: str) -> None:
        """Raise this rank's error on all ranks, which are in the same call."""
        recorded = self._members.set_up(what, recorded=False)
        with recorded, self._members.exchange.agreed(what):
            raise error
