"""Packs and enqueues calls, and captures repeated ones into graphs.

Packs calls, admits them, and enqueues them; handles what fails on the way.

The compiled function (``numba_symm/gpu/entry.py``) does this for a call that was made
before. Python does here what that function leaves to it.

Executable graphs of calls that are made often.

The driver launches a graph of any number of steps in less time than one kernel. So the
steps of a call that is repeated are captured into a graph, which its later calls
launch. A graph has the addresses of the call's arrays, as the packed call does.

When the driver's memory for graphs must grow, making a graph waits for the GPU. A
kernel there may wait for another rank, whose host may wait for this one. So a
communicator's construction makes graphs that are never launched. Later, each graph
takes the place of one that is at least as large, which is destroyed immediately before.
"""

import ctypes
import functools
import importlib.util
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from ctypes import addressof
from functools import partial
from typing import Any, NamedTuple, TypeVar

from numba_symm import process
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ClosedError, CollectiveError, DriverError
from numba_symm.gpu import compiled, driver, entry, streams
from numba_symm.gpu.streams import SideStream, StreamOrder
from numba_symm.launch import devices
from numba_symm.launch.call_records import Description
from numba_symm.launch.members import Members

DOMAIN = "numba_symm"
"""The domain of the ranges, by which a profiler groups them."""

ATTACHED = "NVTX_INJECTION64_PATH"
"""The variable by which a profiler attaches itself to NVTX."""


class Tag(AbstractContextManager[None]):
    """Labels the calls within ``with`` blocks. It may be entered again, and nested.

    Args:
        begin: returns what labels the calls of one block.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[None]]):
        self._begin = begin
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        block = self._begin()
        block.__enter__()
        self._open.append(block)

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def marks() -> Any:
    """Return the package that marks ranges; None without a profiler, or without it."""
    if ATTACHED not in os.environ or importlib.util.find_spec("nvtx") is None:
        return None
    return importlib.import_module("nvtx")


PLACES = ((1, False, 128), (4, False, 64), (8, True, 32), (64, True, 16))
"""The graphs of a process for all communicators on a GPU: how many nodes they have,
whether they fork, as calls do that use copy engines, and how many such graphs."""

FIRST = 3
"""Before which call of the same arguments the graph is made."""

AGAIN = 64
"""How many calls later the next attempt is made if there was no place."""


class _Graph(NamedTuple):
    """An executable graph.

    Attributes:
        nodes: how many it has.
        forked: whether some of them are beside others.
        handle: the driver's.
    """

    nodes: int
    forked: bool
    handle: Any

    def fits(self, other: "_Graph") -> bool:
        """Return whether the other one has room in its place."""
        return self.nodes >= other.nodes and self.forked >= other.forked


class _Places:
    """The graphs of a context that no call has, of which each may be replaced."""

    def __init__(self) -> None:
        self._unused: list[_Graph] = []
        self._lock = threading.Lock()  # of communicators in several threads
        process.watch(self)
        stream = int(driver.call("cuStreamCreate", _NON_BLOCKING))
        side = SideStream(1)
        module = driver.call("cuModuleLoadData", _NOTHING)
        function = int(driver.call("cuModuleGetFunction", module, b"nothing"))
        for nodes, forked, number in PLACES:
            enqueue = partial(_launch, function, nodes, side if forked else None)
            graph = _captured(stream, enqueue)
            for _ in range(number):
                made = driver.call("cuGraphInstantiate", graph, 0)
                self._unused.append(_Graph(nodes, forked, made))
            driver.call("cuGraphDestroy", graph)
        side.close()
        driver.call("cuStreamDestroy", stream)

    def disown(self) -> None:
        """Use nothing that a forked child has inherited."""
        self._unused.clear()
        self._lock = threading.Lock()

    def replaced(self, graph: Any) -> _Graph | None:
        """Instantiate a graph in the place of one that is at least as large.

        Return None if there is none.
        """
        _, nodes = driver.call("cuGraphGetNodes", graph, 0)
        *_, edges = driver.call("cuGraphGetEdges", graph, 0)
        wanted = _Graph(nodes, edges >= nodes, None)
        with self._lock:
            fitting = [each for each in self._unused if each.fits(wanted)]
            if not fitting:
                return None
            found = min(fitting, key=lambda each: (each.forked, each.nodes))
            self._unused.remove(found)
            driver.call("cuGraphExecDestroy", found.handle)
            made = driver.call("cuGraphInstantiate", graph, 0)
            return wanted._replace(handle=made)

    def give_back(self, graphs: Iterable[_Graph]) -> None:
        """Let graphs be replaced that no call has any more."""
        with self._lock:
            self._unused += graphs


@functools.cache
def _of_context(context: int) -> _Places:
    return _Places()


def places() -> _Places:
    """Return those of the current context."""
    return _of_context(int(streams.current_context()))


class Graphs:
    """The graphs of one communicator.

    Args:
        order: orders its calls.
        possible: whether its calls consist of steps that a graph can have.

    Attributes:
        countdown: that of a new call.
    """

    def __init__(self, order: StreamOrder, possible: bool):
        self._order = order
        self._made: dict[weakref.ref[Any], _Graph] = {}
        self._dropped: list[weakref.ref[Any]] = []  # finalizers append to it
        self.countdown = entry.NEVER
        if not SIMULATED:  # before anything waits, for later communicators, too
            self._places = places()
        if possible and not SIMULATED:
            self.countdown = FIRST
            self._stream = int(driver.call("cuStreamCreate", _NON_BLOCKING))

    def make(self, call: Any, enqueue: Callable[[int], None]) -> None:
        """Make the graph of a call, if there is a place.

        Args:
            call: the packed call; its ``block`` gets the graph.
            enqueue: enqueues its steps on a stream.
        """
        head = entry.Head.from_buffer(call.block)
        head.countdown = AGAIN
        # The stream may be beside one that is being captured. If there is too little
        # memory, for example, the steps are enqueued one by one.
        with streams.relaxed(), suppress(DriverError), ExitStack() as steps:
            with self._order.apart():
                graph = _captured(self._stream, enqueue)
            steps.callback(driver.call, "cuGraphDestroy", graph)
            self._give_back()
            made = self._places.replaced(graph)
            if made is not None:
                self._made[weakref.ref(call, self._dropped.append)] = made
                driver.call("cuGraphUpload", made.handle, self._stream)
                head.graph = int(made.handle)

    def _give_back(self) -> None:
        """Let others have the graphs of dropped calls, if all calls are done."""
        if self._dropped and self._order.is_done():
            number = len(self._dropped)  # others may be dropped meanwhile
            dropped = [self._dropped.pop() for _ in range(number)]
            self._places.give_back(self._made.pop(each) for each in dropped)

    def close(self) -> None:
        """Release the graphs, and close the order. No call may follow."""
        if self.countdown != entry.NEVER:
            self.countdown = entry.NEVER
            made = [*self._made.values()]
            self._made.clear()
            if self._order.is_done():
                self._places.give_back(made)
            else:  # after a failure; what replaced them could not have their memory
                for each in made:
                    driver.call("cuGraphExecDestroy", each.handle)
            driver.call("cuStreamDestroy", self._stream)
        self._order.close()


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def _captured(stream: int, enqueue: Callable[[int], None]) -> Any:
    """Return the graph of what a function enqueues on a stream."""
    from cuda.bindings import driver as bindings

    mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.call("cuStreamBeginCapture", stream, mode)
    try:
        enqueue(stream)
    except BaseException:
        with suppress(DriverError):
            driver.call("cuGraphDestroy", driver.call("cuStreamEndCapture", stream))
        raise
    return driver.call("cuStreamEndCapture", stream)


_NOTHING = b".version 7.0\n.target sm_70\n.address_size 64\n.entry nothing() { ret; }\0"


def _launch(function: int, times: int, side: SideStream | None, stream: int) -> None:
    """Launch a kernel without arguments several times, half of them beside others."""
    config = compiled.Config(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    def launch(times: int) -> None:
        for _ in range(times):
            status = compiled.launch()(ctypes.addressof(config), function, 0, 0)
            if status:
                raise driver.failure("cuLaunchKernelEx", status)

    if side is None:
        launch(times)
        return
    launch(1)
    side.follow(stream, 0)
    launch(times // 2)
    config.stream = side.stream
    launch(times - times // 2 - 2)
    side.mark(1)
    side.lead(stream, 1)
    config.stream = stream
    launch(1)


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

    def steps(self, stream: int) -> None:
        """Enqueue the steps, without order and record."""
        self.resume(self.enqueue(stream, entry.FIRST), stream)

    def resume(self, status: int, stream: int) -> None:
        """Take the step that a status names, if it names one, and enqueue the rest.

        Raises:
            DriverError: the driver, or a step, has failed.
        """
        while status <= entry.RESUME:
            step = entry.RESUME - status
            self.python[step](stream)
            status = self.enqueue(stream, entry.FIRST + step + 1)
        if status:
            raise _failure(status)


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
        group: the open ``Group`` of ``messages.py``, in which the thread is in a call
            between calls, or None.
        claim: the compiled function that admits a thread.
        open, close: those that admit it to a group, and let other threads in again.
    """

    def __init__(self, ordinal: int, gate: Any):
        self.group: Any = None
        self._ordinal = ordinal
        claim, address = entry.compiled("claim"), addressof(gate)
        self.claim, self.open = (partial(claim, address, n) for n in (0, entry.GROUPED))
        self.close = partial(entry.compiled("leave"), address, entry.GROUPED)
        self._ready = partial(entry.compiled("ready"), address)

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
        if self.group is None:
            self.close()  # what an interrupt left of a group that did not open, too

    def alone(self, what: str) -> "Alone":
        """Make a call between :meth:`begin` and :meth:`finish`, in a with block."""
        return Alone(self, what)


class Alone(NamedTuple):
    """A call of one thread; see :meth:`ThreadGuard.alone`."""

    guard: ThreadGuard
    what: str

    def __enter__(self) -> None:
        self.guard.begin(self.what)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.guard.finish()
        if isinstance(error, ArgumentError | ClosedError):
            error.__traceback__ = None  # its text says all that the caller can use


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
        marks: the package of ranges for a profiler; None: there is none.
    """

    def __init__(self, members: Members, order: StreamOrder, memory: object):
        self.order = order
        self.gate = order.gate
        self.thread = ThreadGuard(members.gpu.ordinal, order.gate)
        self.record = members.board.record
        self.marks = marks()
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
        if self.thread.group is not None:
            self.thread.group.append(call, stream, keep)
            return
        if self.marks is not None:
            self.marks.push_range(str(call.about), domain=DOMAIN)
        try:
            self.go_on(entry.STEPS, call, stream, *keep)
        finally:
            if self.marks is not None:
                self.marks.pop_range(domain=DOMAIN)

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
                    self.graphs.make(call, call.steps)
                status = call.enqueue(stream, entry.CHECKED)
            if status == entry.CAPTURED:
                with self.order.captured(stream):
                    if self.record is not None:
                        self.record.note_captured(call.about, stream)
                    call.steps(stream)
            elif status <= entry.RESUME:
                with self.order.eager(stream):
                    call.resume(status, stream)
            elif status:
                raise _failure(status)
        except BaseException as error:
            if self._members.engine is not None:
                self._members.engine.keep(self._memory, *keep)
            self.give_up(error, what, stream)
            raise

    @contextmanager
    def tagged(self, text: str) -> Iterator[None]:
        """Name the calls within the block, in the record and for a profiler."""
        with ExitStack() as block:
            if self.record is not None:
                block.enter_context(self.record.tagged(text))
            if self.marks is not None:
                self.marks.push_range(text, domain=DOMAIN)
                block.callback(self.marks.pop_range, domain=DOMAIN)
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
        if self.thread.group is not None:
            raise ArgumentError(f"{what}: a group is open; leave its with block first")

    def forget(self) -> None:
        """Drop references to memory and streams, before these are released."""
        self.gate.slow |= entry.CLOSED
        self.graphs.close()
        self.record = None
        self._memory = None


def _failure(status: int) -> BaseException:
    """Return the error for a step that has failed."""
    own = compiled.raised()
    return own or driver.failure(compiled.WHERE[status >> 16], status & 0xFFFF)


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
