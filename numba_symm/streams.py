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

    Its kernels share state, so each must follow the one before. Calls on one stream
    do; when the stream changes, the new one waits for the old one's latest call. That
    call's event is recorded right after it, because its stream may be gone later; the
    legacy default stream, which never goes, is asked when the need comes.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._capture = 0

    @functools.cached_property
    def _event(self) -> Any:
        return driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    def enter(self, stream: int) -> None:
        """Make ``stream``, about to be used, wait for the latest call."""
        if self._last is not None and stream != self._last:
            self._wait(stream)
        self._last = stream

    def leave(self, stream: int) -> None:
        """Note that ``stream`` has the latest call."""
        if stream not in _LEGACY_DEFAULTS:
            self._capture = _capture_id(stream)
            driver.call("cuEventRecord", self._event, stream)

    def _wait(self, stream: int) -> None:
        capture = _capture_id(stream)
        if self._last in _LEGACY_DEFAULTS:
            self._capture = 0
            if capture == 0:
                driver.call("cuEventRecord", self._event, self._last)
        # A capture can wait for its own calls only, eager work for eager work: the
        # caller orders replays against other calls.
        if capture == self._capture:
            driver.call("cuStreamWaitEvent", stream, self._event, 0)

    def close(self) -> None:
        """Destroy the event; no call may follow."""
        if "_event" in self.__dict__:
            driver.call("cuEventDestroy", self._event)
            del self._event


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
