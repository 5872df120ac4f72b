"""Streams and the order of calls on them, and releases that finalizers defer.

Releases that finalizers defer.

The garbage collector runs finalizers at any moment and in any thread. At that moment, a
stream may be in a capture, which a wait for the GPU would invalidate. Peers may wait
for the call during which the finalizer runs. Or that call may be in the middle of a
look-up of memory.
"""

import ctypes
import functools
import operator
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from numba import cuda

from numba_symm import environment, process
from numba_symm.arguments import shown
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, DriverError, SymmError
from numba_symm.gpu import driver, entry

PER_THREAD = 2
"""Handle of the calling thread's default stream."""

_ZERO_IS_PER_THREAD = environment.zero_is_per_thread()

LEGACY_DEFAULT = 1 if _ZERO_IS_PER_THREAD else 0
"""Handle of the legacy default stream."""

_LEGACY_DEFAULTS = (1,) if _ZERO_IS_PER_THREAD else (0, 1)


def handle_or_default(stream: Any) -> int:
    """Return the handle of a Numba, cuda.core, CuPy or torch stream, or of an int.

    For None, and in the simulator, return that of the legacy default stream.
    """
    if stream is None:
        return LEGACY_DEFAULT
    reader = _READERS.get(stream.__class__)
    if reader is not None:
        return reader(stream)
    if type(stream) is int and 0 <= stream < 1 << 64:  # without the calls below
        return LEGACY_DEFAULT if SIMULATED else stream
    if not SIMULATED:
        return _found_in(stream)
    if not isinstance(stream, cuda.stream):  # the simulator's streams have no handle
        _found_in(stream)
    return LEGACY_DEFAULT


_READERS: dict[type, Callable[[Any], int]] = {}
"""What reads the handles of a class of streams that are read by an attribute alone."""


def _found_in(stream: Any) -> int:
    try:
        found = stream if isinstance(stream, int) else _handle_in(stream)
    except Exception:  # whatever a foreign object's own methods raise
        found = None
    if found is None or not 0 <= found < 1 << 64:
        raise ArgumentError(
            f"expected a stream, got {shown(stream)}; pass a stream of Numba, "
            "cuda.core, CuPy or torch, or its handle as an int"
        )
    return found


def _handle_in(stream: Any) -> int | None:
    """Return the handle in a stream's attributes, or None."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
        found = getattr(stream, attribute, None)
        if type(found) is int and type(stream).__module__.split(".")[0] in _KNOWN:
            _READERS[type(stream)] = operator.attrgetter(attribute)
        if found is not None:
            return int(getattr(found, "value", found) or 0)
    return None


_KNOWN = ("torch", "cupy")  # whose streams' attributes are integers


def named(stream: int) -> int:
    """Return a stream's handle; for each default stream, always the same one."""
    if stream in _LEGACY_DEFAULTS:
        return LEGACY_DEFAULT
    return stream or PER_THREAD


def in_capture(stream: int) -> tuple[int, frozenset[int]]:
    """Return the number of a stream's capture, and the stream's place there.

    The place is the graph nodes that the stream's next one follows.
    """
    found = driver.call("cuStreamGetCaptureInfo", stream)
    return int(found[1]), frozenset(int(node) for node in found[3])


class StreamOrder:
    """Orders the calls of one communicator on any streams.

    Its kernels share state, so each call must follow the previous one. An eager call
    follows the latest eager call; the compiled function (``entry.py``) makes it wait. A
    call in a capture follows the latest call of that capture. The caller orders a
    graph's replays against other calls.

    Attributes:
        gate: what the compiled function knows of the communicator.
    """

    def __init__(self) -> None:
        self._eager = _Trail()
        self._captured: OrderedDict[int, _Trail] = OrderedDict()
        self._latest = self._eager
        self.gate = entry.new_gate()
        self.gate.event = 0 if SIMULATED else int(self._eager.event)

    @property
    def side(self) -> "SideStream":
        """The second stream for the latest call.

        Each capture has its own, because a stream in a capture cannot run other work.
        """
        return self._latest.side

    @property
    def across(self) -> "SideStream":
        """Another one, for what an engine does beside kernels, which may use `side`."""
        return self._latest.across

    @contextmanager
    def eager(self, stream: int) -> Iterator[None]:
        """Take steps of an eager call in Python: what follows it follows all of them.

        Args:
            stream: the handle of its stream.
        """
        self._latest = self._eager
        try:
            yield
        finally:
            self._eager.end(stream)

    @contextmanager
    def captured(self, stream: int) -> Iterator[None]:
        """Take the steps of a call in a stream's capture, after its latest call."""
        capture, place = in_capture(stream)
        self._latest = trail = self._of_capture(capture)
        # An unnecessary wait also costs the early launch, because the stream's next
        # kernel would follow the whole latest call.
        if trail.place is not None and place != trail.place:
            driver.call("cuStreamWaitEvent", stream, trail.event, 0)
        try:
            yield
        finally:
            trail.end(stream)
            _, trail.place = in_capture(stream)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Take the steps of a call in a capture of the library's own."""
        self._latest = self._apart
        yield

    @functools.cached_property
    def _apart(self) -> "_Trail":
        return _Trail()

    def _of_capture(self, capture: int) -> "_Trail":
        if capture not in self._captured:
            self._captured[capture] = _Trail()
            if len(self._captured) > _CAPTURES:  # their ends are not reported
                self._captured.popitem(last=False)[1].close()
        self._captured.move_to_end(capture)
        return self._captured[capture]

    def is_done(self) -> bool:
        """Return whether all eager calls are done. Never waits."""
        if not self.gate.event:
            return True
        return not driver.function("cuEventQuery")(self._eager.event)[0]

    def close(self) -> None:
        """Destroy events and streams when their work is done. No call may follow."""
        self.gate.event = 0
        for trail in (self._eager, self._apart, *self._captured.values()):
            trail.close()
        self._captured.clear()


_CAPTURES = 16  # most captures of a communicator at a time


class _Trail:
    """The latest call of a sequence.

    Its event is recorded immediately after it. Later, its stream may have been
    destroyed, or have other work.

    Attributes:
        place: in a capture, where its stream was after the latest call.
    """

    def __init__(self) -> None:
        self.place: frozenset[int] | None = None

    @functools.cached_property
    def event(self) -> Any:
        """Recorded after each call."""
        return driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    @functools.cached_property
    def side(self) -> "SideStream":
        """The second stream of these calls."""
        return SideStream(1)

    @functools.cached_property
    def across(self) -> "SideStream":
        """The third one."""
        return SideStream(1)

    def end(self, stream: int) -> None:
        """Record the event after the latest call."""
        if not SIMULATED:
            driver.call("cuEventRecord", self.event, stream)

    def close(self) -> None:
        """Destroy the event and the side streams."""
        self.place = None
        if "event" in self.__dict__:
            driver.call("cuEventDestroy", self.event)
            del self.event
        for name in self.__dict__.keys() & {"side", "across"}:
            self.__dict__.pop(name).close()


def is_capturing(stream: int) -> bool:
    """Return whether the stream is being captured into a graph."""
    if stream in _LEGACY_DEFAULTS:
        return False
    found = ctypes.c_int()
    quick("cuStreamIsCapturing", stream, ctypes.addressof(found))
    return bool(found)  # CU_STREAM_CAPTURE_STATUS_NONE is 0


def quick(name: str, first: int, second: int) -> None:
    """Call a function of the driver that calls often need; see ``driver_function``."""
    status = entry.driver_function(name)(first, second, 0)
    if status:
        raise driver.failure(name, status)


@contextmanager
def relaxed() -> Iterator[None]:
    """Allow this thread calls that a capture in any thread forbids, such as queries.

    The calls concern neither the stream that is being captured nor its events.
    """
    if SIMULATED:
        yield
        return
    from cuda.bindings import driver as bindings

    modes = bindings.CUstreamCaptureMode
    before = driver.call(
        "cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED
    )
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", before)


def spoil_capture(stream: int) -> bool:
    """Invalidate the stream's capture. Return whether there was one.

    A call that fails in part does this, because the part that was captured must not be
    replayed.
    """
    if SIMULATED or stream in _LEGACY_DEFAULTS:
        return False
    status, capturing = driver.function("cuStreamIsCapturing")(stream)
    if status or not capturing:
        return False
    driver.function("cuStreamQuery")(stream)  # a query invalidates a capture
    return True


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy between addresses of this process, by a copy engine."""
    if SIMULATED:
        ctypes.memmove(target, source, nbytes)
        return
    (status,) = driver.function("cuMemcpyDtoDAsync")(target, source, nbytes, stream)
    if status:
        raise driver.failure("cuMemcpyDtoDAsync", status)


def copy_to_host(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy from an address of the device to one of host memory."""
    if SIMULATED:
        ctypes.memmove(target, source, nbytes)
    else:
        driver.call("cuMemcpyDtoHAsync", target, source, nbytes, stream)


def copy_from_host(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy from an address of host memory to one of the device."""
    if SIMULATED:
        ctypes.memmove(target, source, nbytes)
    else:
        driver.call("cuMemcpyHtoDAsync", target, source, nbytes, stream)


@dataclass(frozen=True)
class Copy:
    """A copy between addresses of this process, as a step of a call."""

    target: int
    source: int
    nbytes: int

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The step for the compiled function."""
        return ((entry.COPY, self.target, self.source, self.nbytes),)

    def __call__(self, stream: int) -> None:
        """Enqueue it."""
        copy(self.target, self.source, self.nbytes, stream)


@dataclass(frozen=True)
class Fill:
    """A store of an integer of 8 bytes, as a step of a call."""

    address: int
    number: int

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Its halves, as values that a graph keeps."""
        halves = ((4 * n, self.number >> 32 * n & 0xFFFFFFFF) for n in range(2))
        return tuple((entry.FILL, self.address + at, half) for at, half in halves)

    def __call__(self, stream: int) -> None:
        """Enqueue it."""
        if SIMULATED:
            ctypes.c_int64.from_address(self.address).value = self.number
            return
        for _, address, half in self.steps:
            driver.call("cuMemsetD32Async", address, half, 1, stream)


def current_context() -> Any:
    """Return the CUDA context that is current in this thread."""
    return None if SIMULATED else driver.call("cuCtxGetCurrent")


@contextmanager
def on_context(context: Any) -> Iterator[None]:
    """Make a CUDA context current in this thread within the block."""
    if SIMULATED:
        yield
        return
    driver.call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        driver.call("cuCtxPopCurrent")


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class SideStream:
    """A second stream for a part of a call's work, and its events.

    Args:
        events: the number of events.
    """

    def __init__(self, events: int):
        self.stream = LEGACY_DEFAULT
        self._events: list[Any] = []
        if not SIMULATED:
            self.stream = int(driver.call("cuStreamCreate", _NON_BLOCKING))
            try:
                for _ in range(events + 1):  # the last one is for failures
                    self._events.append(driver.call("cuEventCreate", 2))  # no timing
            except BaseException:
                self.close()
                raise

    def follow(self, stream: int, event: int) -> None:
        """Make this stream's next work follow all work of another stream."""
        if self._events:
            driver.call("cuEventRecord", self._events[event], stream)
            driver.call("cuStreamWaitEvent", self.stream, self._events[event], 0)

    def mark(self, event: int) -> None:
        """Record an event on this stream."""
        if self._events:
            driver.call("cuEventRecord", self._events[event], self.stream)

    def lead(self, stream: int, event: int) -> None:
        """Make another stream's next work follow an event of this one."""
        if self._events:
            driver.call("cuStreamWaitEvent", stream, self._events[event], 0)

    @contextmanager
    def joined(self, stream: int) -> Iterator[None]:
        """Make ``stream`` follow all work of this one if the ``with`` block fails.

        The block has the steps between :meth:`follow` and :meth:`lead`. Work on this
        stream may write an array that the program uses again after the error.
        """
        try:
            yield
        except BaseException:
            self.join(stream)
            raise

    def join(self, stream: int) -> None:
        """Make ``stream`` follow all work of this one after a failure."""
        with suppress(DriverError):  # in a capture, which is invalidated anyway
            self.mark(-1)
            self.lead(stream, -1)

    def close(self) -> None:
        """Destroy the stream and the events when their work is done."""
        while self._events:
            driver.call("cuEventDestroy", self._events.pop())
        if self.stream != LEGACY_DEFAULT:
            driver.call("cuStreamDestroy", self.stream)
            self.stream = LEGACY_DEFAULT


def synchronize(stream: int) -> None:
    """Wait until the stream's work is done."""
    if not SIMULATED:
        driver.call("cuStreamSynchronize", stream)


def is_done(handle: Any) -> bool:
    """Return whether a stream's work is done. Never waits."""
    return is_ready("cuStreamQuery", driver.function("cuStreamQuery")(handle)[0])


def is_ready(query: str, status: int) -> bool:
    """Return the answer of a query of the driver from its status."""
    if status not in (0, _NOT_READY):
        raise driver.failure(query, status)
    return bool(status == 0)


_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def synchronize_device() -> None:
    """Wait until all work of the current device's context is done."""
    driver.call("cuCtxSynchronize")


class _Queue:
    def __init__(self) -> None:
        self.steps: deque[Callable[[], object]] = deque()
        process.watch(self)

    def disown(self) -> None:
        """Release nothing in a forked child."""
        self.steps.clear()


_queue = _Queue()


def defer(step: Callable[..., object], *args: object) -> None:
    """Run ``step(*args)`` in the next :func:`give_back`. For finalizers."""
    _queue.steps.append(lambda: step(*args))


def give_back() -> None:
    """Run the steps that finalizers have deferred.

    For calls that may wait for the GPU. If that is impossible now, nothing is run, so
    memory that cannot be unmapped safely stays mapped.
    """
    steps = _queue.steps
    if not steps:
        return
    if not SIMULATED:
        try:
            synchronize_device()
        except DriverError:  # in a capture, or after a fault
            return
    while steps:
        try:
            step = steps.popleft()
        except IndexError:  # another thread took it
            return
        try:
            step()
        except SymmError as error:
            text = f"memory of a dropped object stays until the process ends: {error}"
            warnings.warn(text, ResourceWarning, stacklevel=2)
