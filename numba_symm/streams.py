"""Streams: finding the handle in what a caller passed, and ordering calls."""

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from numba import cuda

from numba_symm import driver, environment
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, DriverError

_PER_THREAD = 2  # the handle of the calling thread's default stream
_ZERO_IS_PER_THREAD = environment.zero_is_per_thread()

LEGACY_DEFAULT = 1 if _ZERO_IS_PER_THREAD else 0
"""Handle of the legacy default stream."""

_LEGACY_DEFAULTS = (1,) if _ZERO_IS_PER_THREAD else (0, 1)


def handle_of(stream: Any) -> int:
    """Return the handle of a Numba, cuda.core, CuPy or torch stream, or of an int.

    In the simulator it is always the legacy default stream's.
    """
    if not SIMULATED:
        return _found_in(stream)
    if not isinstance(stream, cuda.stream):  # the simulator's own have no handle
        _found_in(stream)
    return LEGACY_DEFAULT


def handle_or_default(stream: Any) -> int:
    """Return the handle of a stream; None is the legacy default stream."""
    return LEGACY_DEFAULT if stream is None else handle_of(stream)


def _found_in(stream: Any) -> int:
    try:
        found = stream if isinstance(stream, int) else _told_by(stream)
    except Exception:  # whatever a foreign object's own methods raise
        found = None
    if found is None or not 0 <= found < 1 << 64:
        raise ArgumentError(
            f"stream={stream!r} is no stream: pass one of Numba, cuda.core, CuPy or "
            "torch, or its handle as an int"
        )
    return found


def _told_by(stream: Any) -> int | None:
    """Return the handle that a stream's attributes tell, or None."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
        found = getattr(stream, attribute, None)
        if found is not None:
            return int(getattr(found, "value", found) or 0)
    return None


def named(stream: int) -> int:
    """Return a stream's handle, a default stream's always the same one."""
    if stream in _LEGACY_DEFAULTS:
        return LEGACY_DEFAULT
    return stream or _PER_THREAD


def identity(stream: int) -> int:
    """Return a number that no other stream has in the life of the process.

    A handle has no such meaning: 2 is another stream in each thread, and a new stream
    may get the handle of one that was destroyed.
    """
    if stream in _LEGACY_DEFAULTS:
        return _LEGACY_IDENTITY
    status, number = driver.function("cuStreamGetId")(stream)
    if status:
        raise driver.failure("cuStreamGetId", status)
    return number  # type: ignore[no-any-return]


_LEGACY_IDENTITY = -1  # the driver's are not negative

Place = int | frozenset[int]
"""Where a stream is: its identity; in a capture, what its next node will follow."""


def _in_capture(stream: int) -> tuple[int, Place]:
    """Return which capture a stream is in, and where; asks for no identity."""
    found = driver.call("cuStreamGetCaptureInfo", stream)
    return int(found[1]), frozenset(int(node) for node in found[3])


class StreamOrder:
    """Orders the calls of one communicator, whichever streams they run on.

    Its kernels share state, so each must follow the one before: eager calls the
    latest eager call, calls in a capture the latest call of that capture. The caller
    orders a graph's replays against other calls.

    Args:
        events: how many a call's side stream needs.
    """

    def __init__(self, events: int) -> None:
        self._events = events
        self._eager = _Trail(events)
        self._captured: OrderedDict[int, _Trail] = OrderedDict()
        self._latest = self._eager

    @property
    def side(self) -> "SideStream":
        """The second stream for the call that was entered last.

        Each capture has its own: one that a capture holds cannot run anything else.
        """
        return self._latest.side

    def enter(self, stream: int) -> "_Trail":
        """Make the stream of a handle wait for the latest call.

        Returns:
            What to leave after this call.
        """
        place: Place
        # The legacy stream cannot be captured, and must not be asked during a capture.
        if stream in _LEGACY_DEFAULTS or not is_capturing(stream):
            trail, place = self._eager, identity(stream)
        else:
            capture, place = _in_capture(stream)
            trail = self._of_capture(capture)
        self._latest = trail
        trail.enter(stream, place)
        return trail

    def _of_capture(self, capture: int) -> "_Trail":
        if capture not in self._captured:
            self._captured[capture] = _Trail(self._events, captured=True)
            if len(self._captured) > _CAPTURES:  # nobody tells when one ends
                self._captured.popitem(last=False)[1].close()
        self._captured.move_to_end(capture)
        return self._captured[capture]

    def close(self) -> None:
        """Destroy events and streams once their work is done; no call may follow."""
        self._eager.close()
        while self._captured:
            self._captured.popitem()[1].close()


_CAPTURES = 16  # of one communicator at the same time, at most


class _Trail:
    """The latest of calls that follow one another.

    Its event is recorded right after it: its stream may be gone later, or have work
    that must not be waited for.

    Args:
        events: how many a call's side stream needs.
        captured: whether the calls are in a capture.
    """

    def __init__(self, events: int, captured: bool = False) -> None:
        self._events = events
        self._captured = captured
        self._stream = LEGACY_DEFAULT
        self._last: Place | None = None  # where that stream was after the latest call

    @functools.cached_property
    def _event(self) -> Any:
        return driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    @functools.cached_property
    def side(self) -> "SideStream":
        """The second stream of these calls."""
        return SideStream(self._events)

    def enter(self, stream: int, place: Place) -> None:
        """Make ``stream`` wait for the latest call, unless it is right behind that.

        In a capture a wait too many is more than time: what the stream does next would
        follow the whole of the latest call, and could not start early.

        Args:
            stream: its handle.
            place: where it is.
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
        if self._captured:
            _, self._last = _in_capture(self._stream)

    def close(self) -> None:
        """Destroy event and side stream."""
        self._last = None
        if "_event" in self.__dict__:
            driver.call("cuEventDestroy", self._event)
            del self._event
        if "side" in self.__dict__:
            self.side.close()
            del self.side


def is_capturing(stream: int) -> bool:
    """Return whether the stream is being captured into a graph."""
    if stream in _LEGACY_DEFAULTS:
        return False
    status, found = driver.function("cuStreamIsCapturing")(stream)
    if status:
        raise driver.failure("cuStreamIsCapturing", status)
    return bool(found)  # CU_STREAM_CAPTURE_STATUS_NONE is 0


def spoil_capture(stream: int) -> bool:
    """Make sure that no graph comes of a capture; return whether there was one.

    For what fails amid a call: its part that was captured must not be replayed.
    """
    if SIMULATED or stream in _LEGACY_DEFAULTS:
        return False
    status, capturing = driver.function("cuStreamIsCapturing")(stream)
    if status or not capturing:
        return False
    driver.function("cuStreamQuery")(stream)  # which invalidates a capture
    return True


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy between addresses of this process, by a copy engine."""
    if SIMULATED:
        ctypes.memmove(target, source, nbytes)
    else:
        driver.call("cuMemcpyDtoDAsync", target, source, nbytes, stream)


def current_context() -> Any:
    """Return the CUDA context that is current in this thread."""
    return None if SIMULATED else driver.call("cuCtxGetCurrent")


@contextmanager
def on_context(context: Any) -> Iterator[None]:
    """Make a CUDA context current in this thread for a while."""
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
    """A second stream for part of a call's work; its steps are marked by events.

    Args:
        events: how many there are.
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
        """Let this stream's next work follow all work of another."""
        if self._events:
            driver.call("cuEventRecord", self._events[event], stream)
            driver.call("cuStreamWaitEvent", self.stream, self._events[event], 0)

    def mark(self, event: int) -> None:
        """Record an event on this stream."""
        if self._events:
            driver.call("cuEventRecord", self._events[event], self.stream)

    def lead(self, stream: int, event: int) -> None:
        """Let another stream's next work follow an event of this one."""
        if self._events:
            driver.call("cuStreamWaitEvent", stream, self._events[event], 0)

    @contextmanager
    def joined(self, stream: int) -> Iterator[None]:
        """Let ``stream`` follow all work of this one if the ``with`` block fails.

        For the steps between :meth:`follow` and :meth:`lead`: what runs here may write
        an array that the program uses again after the error.
        """
        try:
            yield
        except BaseException:
            with suppress(DriverError):  # of a capture, which is spoiled anyway
                self.mark(-1)
                self.lead(stream, -1)
            raise

    def close(self) -> None:
        """Destroy stream and events once their work is done."""
        while self._events:
            driver.call("cuEventDestroy", self._events.pop())
        if self.stream != LEGACY_DEFAULT:
            driver.call("cuStreamDestroy", self.stream)
            self.stream = LEGACY_DEFAULT


def synchronize(stream: int) -> None:
    """Wait until the stream's work is done."""
    driver.call("cuStreamSynchronize", stream)


def synchronize_device() -> None:
    """Wait until all work of the current device's context is done."""
    driver.call("cuCtxSynchronize")
