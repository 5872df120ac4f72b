"""Requests: messages that run beside all other calls, for which programs wait later.

Each direction of each pair of ranks has a stream of its own. So a request waits only
for requests of its own direction, which match in their order anyway. Requests also have
a workspace of their own, so no other call has to follow them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from numba import cuda

from numba_symm import process
from numba_symm.collectives import kernel_set
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.kernels import transfer
from numba_symm.collectives.protocols.binding import Endpoint, Enqueue, along_ring
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import request_width
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import entry, streams
from numba_symm.gpu.arrays import Memory
from numba_symm.gpu.events import Event, Point
from numba_symm.gpu.streams import SideStream
from numba_symm.launch.call_records import Description
from numba_symm.launch.members import Members

_PAUSE = 20e-6  # seconds between two looks at requests of which none is done


def multiprocessors(size: int) -> int:
    """Return how many multiprocessors the requests of a rank occupy at most."""
    return 2 * (size - 1) * request_width(size)


_EVENTS = 16
"""Events of a direction that are made beforehand."""


class Done(Protocol):
    """The end of a request's work."""

    def query(self) -> bool:
        """Return whether the work is done."""

    def wait(self, stream: int) -> None:
        """Make later work of a stream follow the work."""

    def synchronize(self) -> None:
        """Wait until the work is done."""


class Request:
    """A message that was started with ``isend`` or ``irecv`` of a communicator.

    The request's arrays may be used again when :meth:`test` has returned True, after
    :meth:`synchronize`, or by work of a stream after :meth:`wait`. The communicator
    keeps the arrays alive at least until then, even if the program drops the request.
    """

    def __init__(
        self,
        members: Members,
        what: str,
        done: Done,
        out: Any,
        stream: int,
        settle: Callable[[], None],
    ):
        self._settle = settle
        self._members = members
        self._what = what
        self._done = done
        self._out = out
        self._stream = stream

    def __repr__(self) -> str:
        state = "done" if self._done.query() else "pending"
        return f"<Request: {self._what}, {state}>"

    def wait(self, stream: Any = None) -> Any:
        """Make later work of a stream follow the message. The host does not wait.

        Args:
            stream: the stream; None: the stream with which the message was started.

        Returns:
            The array with the received message; None for a send.

        Raises:
            CollectiveError, ClosedError: as for any call.
        """
        self._members.check()
        named = stream is not None
        self._done.wait(streams.handle_or_default(stream) if named else self._stream)
        return self._out

    def test(self) -> bool:
        """Return whether the message is done. Never waits.

        Raises:
            CollectiveError, ClosedError: as for any call.
        """
        done = self._done.query()
        self._settle()
        self._members.check()
        return done

    def synchronize(self) -> Any:
        """Wait on the host until the message is done, then check for failures.

        Returns:
            The array with the received message; None for a send.

        Raises:
            CollectiveError, ClosedError: as for any call.
        """
        if not self._members.closed:
            self._done.synchronize()
        self._settle()
        self._members.check()
        return self._out

    @staticmethod
    def wait_all(requests: Sequence["Request"], stream: Any = None) -> None:
        """Call :meth:`wait` of all requests."""
        for request in _checked(requests, "wait_all"):
            request.wait(stream)

    @staticmethod
    def wait_any(requests: Sequence["Request"]) -> int:
        """Wait on the host until one of the requests is done, and return its index.

        Raises:
            ArgumentError: ``requests`` is empty.
            CollectiveError, ClosedError: as for any call.
        """
        pending = _checked(requests, "wait_any")
        if not pending:
            raise ArgumentError("wait_any: expected at least one request, got none")
        while True:
            for index, request in enumerate(pending):
                if request.test():
                    return index
            time.sleep(_PAUSE)


def _checked(requests: Any, what: str) -> list[Request]:
    try:
        found = list(requests)
    except Exception:  # an object's own method may raise anything
        found = [None]
    for each in found:
        if not isinstance(each, Request):
            raise ArgumentError(
                f"{what}: expected a sequence of requests, got {requests!r:.100}; pass "
                "what isend and irecv returned"
            )
    return found


class Requests:
    """The requests of one communicator on this rank.

    Their kernels are loaded here. Loading one later may wait for a request that waits
    for a peer, and the peer may be loading another one.

    Args:
        end: this rank's end of the communicator.
        workspaces: by rank, at which address this rank sees that rank's workspace of
            requests.
        memory: the memory of that workspace.
        multiprocessors: the most that all kernels of the communicator occupy.

    Attributes:
        multiprocessors: the same.
    """

    def __init__(
        self,
        end: Endpoint,
        workspaces: Sequence[int],
        memory: Memory,
        multiprocessors: int,
    ):
        # A thread block of a request holds as many blocks as it can.
        self._end = replace(end, workspaces=tuple(workspaces), multiprocessors=1)
        self._main = end.workspaces[end.rank]
        self._memory: Memory | None = memory
        self._lanes: dict[tuple[int, bool], _Direction] = {}
        self._settling = threading.RLock()
        self._busy = False  # whether a request may be pending
        self._unfreed = ExitStack()  # until it is closed, Numba frees no memory
        self.multiprocessors = multiprocessors
        if not SIMULATED:
            # Bytes may have any alignment, and arrays may have gaps.
            what = "Communicator: requests=True"
            names = *kernel_set.REQUESTS, kernel_set.GAPS
            found = kernel_set.kernels(names, ["uint8"], ["sum"], self._end, what)
            kernel_set.load(found, end.rank, end.size, what)

    def provide(self) -> None:
        """Make the streams and events of all directions, and use them once.

        The driver may wait for the device when it does this beside a pending request.
        """
        try:
            for peer in along_ring(self._end.rank, tuple(range(self._end.size))):
                for receiving in (False, True):
                    self._lanes[peer, receiving] = lane = _Direction()
                    lane.provide()
        except BaseException:
            self.close()
            raise

    def bind(self, message: Message, receiving: bool) -> Enqueue:
        """Return the packed launch of a message."""
        return transfer.bind_request(self._end, self._main, message, receiving)

    def pack(
        self, direction: tuple[int, bool], about: Description, launch: Enqueue
    ) -> "RequestCall":
        """Return a message that can be started.

        Args:
            direction: the other rank, and whether the message is received.
            about: what it is, for the record.
            launch: enqueues the message.
        """
        with self._settling:  # which looks at all of them
            if direction not in self._lanes:
                self._lanes[direction] = _Direction()
        lane = self._lanes[direction]
        return RequestCall(lane, PackedCall(lane.gate, about, launch, entry.NEVER))

    def start(
        self,
        made: "RequestCall",
        stream: int,
        keep: Any,
        failed: Callable[[BaseException], None],
    ) -> Done:
        """Start a message after the work of a stream so far.

        Args:
            made: the message.
            stream: the handle of the stream.
            keep: objects that must live until the message is done.
            failed: is called if the launch fails.
        """
        with self._settling:
            if made.lane.idle():  # asking takes time; others may keep arrays, too
                self._forget()
            if not (self._busy or SIMULATED):
                self._unfreed.enter_context(cuda.defer_cleanup())
            self._busy = True
            return made.lane.start(made.call, stream, keep, failed)

    def settle(self) -> None:
        """Let Numba free memory again, if no request is pending.

        Freeing memory waits for the device, so for a pending request. Its peer may wait
        for one that this rank could not start then. Not called during captures, which
        asking an event would invalidate.
        """
        if not self._busy:
            return
        with self._settling:  # any thread may ask for the state of its request
            if self._forget():
                self._busy = False
                self._unfreed.close()

    def _forget(self) -> bool:
        """Forget the requests that are done, and return whether all are."""
        # A list: each forgets what has ended, also behind one that is busy.
        return all([lane.idle() for lane in self._lanes.values()])

    def close(self) -> None:
        """Wait for the requests, which have ended or will end soon, and forget them."""
        with self._settling, self._unfreed:
            while self._lanes:
                self._lanes.popitem()[1].close()
            self._busy = False
            self._memory = None


class _Direction:
    """The requests of one direction, one after another.

    In the simulator, in which launches block, a thread replaces the stream.

    Attributes:
        gate: what the compiled function knows of it.
    """

    def __init__(self) -> None:
        self.gate = entry.new_gate()  # of its own, because no call orders it
        self._entries: deque[_StartedRequest] = (
            deque()
        )  # of all that may be pending, in order
        self._side = SideStream(0)
        self._idle: list[Event] = []  # events of requests that the program has dropped
        self._worker = _Worker() if SIMULATED else None

    def provide(self) -> None:
        """Make events, and use the stream."""
        self._idle += [Event() for _ in range(_EVENTS)]
        self._side.mark(-1)

    def start(
        self,
        call: PackedCall,
        stream: int,
        keep: Any,
        failed: Callable[[BaseException], None],
    ) -> Done:
        begun = _StartedRequest(keep)
        self._entries.append(begun)  # first: a signal may interrupt what follows
        if self._worker is not None:
            done: Done = self._worker.launch(call.steps, failed)
        else:
            done = self._enqueue(call, stream)
        begun.done = done
        return done

    def _enqueue(self, call: PackedCall, stream: int) -> Done:
        """Enqueue a message after a stream's work, and return its end.

        The compiled function makes this direction's stream wait for the gate's event,
        and records the event again after the message. ``wait`` of the former point was
        enqueued by then, so one event serves both.
        """
        point, own = Point(self._idle, stream), self._side.stream
        self.gate.event, self.gate.latest = point.handle, entry.LEGACY
        try:
            call.resume(call.enqueue(own, entry.CHECKED), own)
            if call.python:  # the function has not reached the end
                point.move(own)
        except BaseException:
            self._side.join(stream)
            raise
        finally:
            self.gate.thread = 0  # a step of Python leaves it claimed
        return point

    def idle(self) -> bool:
        """Forget the requests that are done, and return whether all are."""
        while self._entries and self._entries[0].ended():
            self._entries.popleft()
        return not self._entries

    def close(self) -> None:
        try:
            if self._worker is not None:
                self._worker.close()
            else:  # until then, a pool must not hand out the arrays' memory again
                streams.synchronize(self._side.stream)
        finally:
            self._side.close()
            self._entries.clear()


class RequestCall(NamedTuple):
    """A message that can be started.

    Attributes:
        lane: of its direction.
        call: the message.
    """

    lane: _Direction
    call: PackedCall


@dataclass(slots=True)
class _StartedRequest:
    """A request of a lane.

    Attributes:
        keep: what must live until it is done.
        done: the end of its work; None: it is being started, or that failed.
    """

    keep: Any
    done: Done | None = None

    def ended(self) -> bool:
        """Return whether the request is done."""
        return self.done is not None and self.done.query()


class _Worker(threading.Thread):
    """Runs the simulator's launches of one direction."""

    def __init__(self) -> None:
        from queue import SimpleQueue

        super().__init__(name="numba_symm requests", daemon=True)
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        process.start(self, "requests=True")

    def run(self) -> None:
        while (call := self._todo.get()) is not None:
            call()

    def launch(self, launch: Enqueue, failed: Callable[[BaseException], None]) -> Done:
        """Run a launch after those before it."""
        done = _Simulated()

        def call() -> None:
            try:
                launch(streams.LEGACY_DEFAULT)
            except BaseException as error:
                failed(error)
            finally:
                done.set_result(None)

        self._todo.put(call)
        return done

    def close(self) -> None:
        """Wait for the launches, and end the thread."""
        self._todo.put(None)
        self.join()


class _Simulated(Future[None]):
    """The end of a launch in the simulator."""

    query = Future.done

    def wait(self, stream: Any = None) -> None:
        self.result()

    synchronize = wait
