"""Streams: the handles of the objects that callers pass, and the order of calls."""

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from numba import cuda

from numba_symm import driver, environment
from numba_symm.arguments import shown
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, DriverError

PER_THREAD = 2
"""Handle of the calling thread's default stream."""

_ZERO_IS_PER_THREAD = environment.zero_is_per_thread()

LEGACY_DEFAULT = 1 if _ZERO_IS_PER_THREAD else 0
"""Handle of the legacy default stream."""

_LEGACY_DEFAULTS = (1,) if _ZERO_IS_PER_THREAD else (0, 1)


def handle_of(stream: Any) -> int:
    """Return the handle of a Numba, cuda.core, CuPy or torch stream, or of an int.

    In the simulator, return the handle of the legacy default stream.
    """
    if not SIMULATED:
        return _found_in(stream)
    if not isinstance(stream, cuda.stream):  # the simulator's streams have no handle
        _found_in(stream)
    return LEGACY_DEFAULT


def handle_or_default(stream: Any) -> int:
    """Return the handle of a stream; None is the legacy default stream."""
    if stream is None:
        return LEGACY_DEFAULT
    if type(stream) is int and 0 <= stream < 1 << 64:  # without the calls below
        return LEGACY_DEFAULT if SIMULATED else stream
    return handle_of(stream)


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
        if found is not None:
            return int(getattr(found, "value", found) or 0)
    return None


def named(stream: int) -> int:
    """Return a stream's handle; for each default stream, always the same one."""
    if stream in _LEGACY_DEFAULTS:
        return LEGACY_DEFAULT
    return stream or PER_THREAD


def _identity(stream: Any) -> int:
    """Return a number that no other stream of this process has, then or later.

    A handle is not unique: 2 is another stream in each thread, and a new stream may get
    the handle of one that was destroyed. During a capture of the stream, this query
    invalidates the capture.
    """
    status, number = driver.function("cuStreamGetId")(stream)
    if status:
        raise driver.failure("cuStreamGetId", status)
    return number  # type: ignore[no-any-return]


_LEGACY_IDENTITY = -1  # the driver's are not negative

StreamPosition = int | frozenset[int]
"""A stream's identity; in a capture, the graph nodes that its next one follows."""


def in_capture(stream: Any) -> tuple[int, frozenset[int]]:
    """Return the number of a stream's capture, and the stream's place there."""
    found = driver.call("cuStreamGetCaptureInfo", stream)
    return int(found[1]), frozenset(int(node) for node in found[3])


class StreamOrder:
    """Orders the calls of one communicator on any streams.

    Its kernels share state, so each call must follow the previous one. An eager call
    follows the latest eager call, and a call in a capture the latest call of that
    capture. The caller orders a graph's replays against other calls.

    Args:
        events: the number of events that a call's side stream needs.
    """

    def __init__(self, events: int) -> None:
        self._events = events
        self._eager = _Trail(events)
        self._captured: OrderedDict[int, _Trail] = OrderedDict()
        self._latest = self._eager

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

    def enter(self, stream: int) -> "_Trail":
        """Make the stream of a handle wait for the latest call.

        Returns:
            The object whose ``leave`` is called after this call.
        """
        place: StreamPosition
        asked: Any = stream
        # The legacy stream cannot be captured. Do not query it during a capture.
        if stream in _LEGACY_DEFAULTS:
            trail, place = self._eager, _LEGACY_IDENTITY
        else:
            # cuda-bindings convert an int in every call, and this in none.
            asked = driver.function("CUstream")(stream)
            if _captures(asked):
                capture, place = in_capture(asked)
                trail = self._of_capture(capture)
            else:
                trail, place = self._eager, _identity(asked)
        self._latest = trail
        trail.enter(asked, place)
        return trail

    def _of_capture(self, capture: int) -> "_Trail":
        if capture not in self._captured:
            self._captured[capture] = _Trail(self._events, captured=True)
            if len(self._captured) > _CAPTURES:  # their ends are not reported
                self._captured.popitem(last=False)[1].close()
        self._captured.move_to_end(capture)
        return self._captured[capture]

    def close(self) -> None:
        """Destroy events and streams when their work is done. No call may follow."""
        self._eager.close()
        while self._captured:
            self._captured.popitem()[1].close()


_CAPTURES = 16  # most captures of a communicator at a time


class _Trail:
    """The latest call of a sequence.

    Its event is recorded immediately after it. Later, its stream may have been
    destroyed, or have other work.

    Args:
        events: the number of events that a call's side stream needs.
        captured: whether the calls are in a capture.

    Attributes:
        captured: the same.
    """

    def __init__(self, events: int, captured: bool = False) -> None:
        self._events = events
        self.captured = captured
        self._stream: Any = LEGACY_DEFAULT
        self._last: StreamPosition | None = (
            None  # where that stream was after the latest call
        )

    @functools.cached_property
    def _event(self) -> Any:
        return driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    @functools.cached_property
    def side(self) -> "SideStream":
        """The second stream of these calls."""
        return SideStream(self._events)

    @functools.cached_property
    def across(self) -> "SideStream":
        """The third one."""
        return SideStream(1)

    def enter(self, stream: Any, place: StreamPosition) -> None:
        """Make ``stream`` wait for the latest call, unless it follows that anyway.

        In a capture, an unnecessary wait also costs the early launch, because the
        stream's next kernel would follow the whole latest call.

        Args:
            stream: its handle, as the driver takes it.
            place: its place.
        """
        if self._last is not None and place != self._last:
            driver.call("cuStreamWaitEvent", stream, self._event, 0)
        self._stream, self._last = stream, place

    def leave(self) -> None:
        """Note that the latest call was enqueued."""
        if SIMULATED:
            return
        (status,) = driver.function("cuEventRecord")(self._event, self._stream)
        if status:
            raise driver.failure("cuEventRecord", status)
        if self.captured:
            _, self._last = in_capture(self._stream)

    def close(self) -> None:
        """Destroy the event and the side streams."""
        self._last = None
        if "_event" in self.__dict__:
            driver.call("cuEventDestroy", self._event)
            del self._event
        for name in self.__dict__.keys() & {"side", "across"}:
            self.__dict__.pop(name).close()


def is_capturing(stream: int) -> bool:
    """Return whether the stream is being captured into a graph."""
    return stream not in _LEGACY_DEFAULTS and _captures(stream)


def _captures(stream: Any) -> bool:
    status, found = driver.function("cuStreamIsCapturing")(stream)
    if status:
        raise driver.failure("cuStreamIsCapturing", status)
    return bool(found)  # CU_STREAM_CAPTURE_STATUS_NONE is 0


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


def fill(target: int, number: int, stream: int) -> None:
    """Enqueue a store of an integer of 8 bytes at an address of this process."""
    if SIMULATED:
        ctypes.c_int64.from_address(target).value = number
        return
    for half in range(2):  # as a value that a graph keeps, not as a copy
        word = number >> 32 * half & 0xFFFFFFFF
        driver.call("cuMemsetD32Async", target + 4 * half, word, 1, stream)


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
            with suppress(DriverError):  # in a capture, which is invalidated anyway
                self.mark(-1)
                self.lead(stream, -1)
            raise

    def close(self) -> None:
        """Destroy the stream and the events when their work is done."""
        while self._events:
            driver.call("cuEventDestroy", self._events.pop())
        if self.stream != LEGACY_DEFAULT:
            driver.call("cuStreamDestroy", self.stream)
            self.stream = LEGACY_DEFAULT


def synchronize(stream: int) -> None:
    """Wait until the stream's work is done."""
    driver.call("cuStreamSynchronize", stream)


def is_done(stream: int) -> bool:
    """Return whether all work of the stream is done. Never waits."""
    status = driver.function("cuStreamQuery")(stream)[0]
    if status not in (0, _NOT_READY):
        raise driver.failure("cuStreamQuery", status)
    return bool(status == 0)


_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def synchronize_device() -> None:
    """Wait until all work of the current device's context is done."""
    driver.call("cuCtxSynchronize")
