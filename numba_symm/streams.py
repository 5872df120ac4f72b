"""Streams: finding the handle in what a caller passed, and ordering calls."""

from typing import Any

from numba_symm import driver
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError

LEGACY_DEFAULT = 0
"""Handle of the legacy default stream."""

_CU_STREAM_LEGACY = 1  # its other handle, which __cuda_array_interface__ names


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
    do; when the stream changes, the new one waits for the old one.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._owner: Any = None
        self._event: Any = None

    def enter(self, stream: int, owner: Any) -> None:
        """Make ``stream`` wait for the latest call, if that was on another one.

        Args:
            stream: handle of the stream about to be used.
            owner: the caller's stream object; kept until the next call, because a
                destroyed stream could not be waited for.
        """
        if self._last is not None and stream != self._last:
            self._order(self._last, stream)
        self._last = stream
        self._owner = owner

    def _order(self, before: int, after: int) -> None:
        if is_capturing(before) != is_capturing(after):
            # A capture cannot wait for eager work, nor eager work for a capture:
            # the caller orders replays against other calls.
            return
        if self._event is None:
            from cuda.core import Device

            self._event = Device().create_event()
        handle = self._event.handle
        driver.call("cuEventRecord", handle, before)
        driver.call("cuStreamWaitEvent", after, handle, 0)


def is_capturing(stream: int) -> bool:
    """Return whether the stream is being captured into a graph."""
    # The legacy stream cannot be captured, and must not be asked during a capture.
    if stream in (LEGACY_DEFAULT, _CU_STREAM_LEGACY):
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
