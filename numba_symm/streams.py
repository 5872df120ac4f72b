"""Streams: finding the handle in what a caller passed, and ordering calls."""

import functools
from typing import Any

from numba_symm import driver
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError

LEGACY_DEFAULT = 0
"""Handle of the legacy default stream."""

_LEGACY_DEFAULTS = (LEGACY_DEFAULT, 1)  # __cuda_array_interface__ names it 1


def handle_of(stream: Any) -> int:
    """Return the handle of a Numba, cuda.core, CuPy or torch stream, or of an int."""
    if SIMULATED:
        return LEGACY_DEFAULT
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


class StreamOrder:
    """Orders the calls of one communicator, whichever streams they run on.

    Its kernels share state, so each must follow the one before: eager calls the
    latest eager call, calls in a capture the latest call of that capture. The caller
    orders a graph's replays against other calls.
    """

    def __init__(self) -> None:
        self._eager = _Trail()
        self._captured = _Trail()
        self._capture = 0

    def enter(self, stream: int) -> "_Trail":
        """Make ``stream`` wait for the latest call; return what to leave after."""
        capture = _capture_id(stream)
        if capture == 0:
            trail = self._eager
        else:
            trail = self._captured
            if capture != self._capture:
                self._capture = capture
                trail.forget()
        trail.enter(stream, _identity(stream, capture))
        return trail

    def close(self) -> None:
        """Destroy the events; no call may follow."""
        self._eager.close()
        self._captured.close()


class _Trail:
    """The latest of calls that follow one another.

    Its event is recorded right after it, because its stream may be gone later; the
    legacy default stream, which never goes, is asked when the need comes.
    """

    def __init__(self) -> None:
        self._last: int | None = None

    @functools.cached_property
    def _event(self) -> Any:
        return driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    def enter(self, stream: int, identity: int) -> None:
        """Make ``stream`` wait for the latest call, if that was on another one."""
        if self._last is not None and identity != self._last:
            if self._last == _LEGACY_ID:
                driver.call("cuEventRecord", self._event, LEGACY_DEFAULT)
            driver.call("cuStreamWaitEvent", stream, self._event, 0)
        self._last = identity

    def leave(self, stream: int) -> None:
        """Note that ``stream`` has the latest call."""
        if self._last != _LEGACY_ID:
            driver.call("cuEventRecord", self._event, stream)

    def forget(self) -> None:
        """Let the next call follow none."""
        self._last = None

    def close(self) -> None:
        """Destroy the event."""
        if "_event" in self.__dict__:
            driver.call("cuEventDestroy", self._event)
            del self._event


_LEGACY_ID = -1


def _identity(stream: int, capture: int) -> int:
    """Return what tells a stream from all others of its trail."""
    if stream in _LEGACY_DEFAULTS:
        return _LEGACY_ID
    if capture:
        return stream  # it has no id while it is captured, and outlives the capture
    # A new stream may have the handle of one that was destroyed, but not its id.
    return int(driver.call("cuStreamGetId", stream))


def _capture_id(stream: int) -> int:
    """Return which capture the stream is part of, 0 for none."""
    if not is_capturing(stream):
        return 0
    return int(driver.call("cuStreamGetCaptureInfo", stream)[1])


def is_capturing(stream: int) -> bool:
    """Return whether the stream is being captured into a graph."""
    # The legacy stream cannot be captured, and must not be asked during a capture.
    if stream in _LEGACY_DEFAULTS:
        return False
    from cuda.bindings import driver as binding

    status = driver.call("cuStreamIsCapturing", stream)
    active = binding.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return bool(status == active)


def synchronize(stream: int) -> None:
    """Wait until the stream's work is done."""
    driver.call("cuStreamSynchronize", stream)


def synchronize_device() -> None:
    """Wait until all work of the current device's context is done."""
    driver.call("cuCtxSynchronize")
