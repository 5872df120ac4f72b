"""Streams: finding the handle in what a caller passed, and ordering calls."""

import ctypes
import functools
from collections import OrderedDict
from typing import Any

from numba import cuda

from numba_symm import driver
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError

LEGACY_DEFAULT = 0
"""Handle of the legacy default stream."""

_LEGACY_DEFAULTS = (LEGACY_DEFAULT, 1)  # __cuda_array_interface__ names it 1


def handle_of(stream: Any) -> int:
    """Return the handle of a Numba, cuda.core, CuPy or torch stream, or of an int.

    In the simulator it is always the legacy default stream's.
    """
    if not SIMULATED:
        return _found_in(stream)
    if not isinstance(stream, cuda.stream):  # the simulator's own have no handle
        _found_in(stream)
    return LEGACY_DEFAULT


def _found_in(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
        found = getattr(stream, attribute, None)
        if found is not None:
            return int(getattr(found, "value", found) or 0)
    raise ArgumentError(
        f"stream={stream!r} is no stream: pass one of Numba, cuda.core, CuPy or "
        "torch, or its handle as an int"
    )


def named(stream: int) -> int:
    """Return a stream's handle, the legacy default stream's always the same one."""
    return LEGACY_DEFAULT if stream in _LEGACY_DEFAULTS else stream


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

    def enter(self, stream: int, owner: Any) -> "_Trail":
        """Make ``stream`` wait for the latest call; return what to leave after.

        Args:
            stream: its handle.
            owner: an object that keeps the stream, or None.
        """
        # The legacy stream cannot be captured, and must not be asked during a capture.
        if stream in _LEGACY_DEFAULTS or not is_capturing(stream):
            trail = self._eager
        else:
            capture = int(driver.call("cuStreamGetCaptureInfo", stream)[1])
            trail = self._of_capture(capture)
        self._latest = trail
        trail.enter(stream, owner)
        return trail

    def _of_capture(self, capture: int) -> "_Trail":
        if capture not in self._captured:
            self._captured[capture] = _Trail(self._events)
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
    """

    def __init__(self, events: int) -> None:
        self._events = events
        self._last: int | None = None
        self._owner: Any = None

    @functools.cached_property
    def _event(self) -> Any:
        return driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    @functools.cached_property
    def side(self) -> "SideStream":
        """The second stream of these calls."""
        return SideStream(self._events)

    def enter(self, stream: int, owner: Any) -> None:
        """Make ``stream`` wait for the latest call, unless it surely follows it."""
        stream = named(stream)
        # A new stream may have the handle of one that was destroyed; only an object
        # that was kept since tells that it is the same one.
        same = stream == self._last and (owner is self._owner is not None or not stream)
        if self._last is not None and not same:
            driver.call("cuStreamWaitEvent", stream, self._event, 0)
        self._last = stream
        self._owner = owner

    def leave(self) -> None:
        """Note that the latest call was enqueued."""
        if SIMULATED:
            return
        (status,) = driver.function("cuEventRecord")(self._event, self._last)
        if status:
            raise driver.failure("cuEventRecord", status)

    def close(self) -> None:
        """Destroy event and side stream, and let the stream go."""
        self._last = self._owner = None
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


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy between addresses of this process, by a copy engine."""
    if SIMULATED:
        ctypes.memmove(target, source, nbytes)
    else:
        driver.call("cuMemcpyDtoDAsync", target, source, nbytes, stream)


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
                for _ in range(events):
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
