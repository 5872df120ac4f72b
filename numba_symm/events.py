"""Streams and events, which may cross processes.

Streams are cuda.core's. Here they and events get what it lacks: opening an event by the
64 bytes of its handle, queries, waiting for any library's streams, and Numba's
simulator, where everything is complete as soon as it is called.

Source: ``CUDAStream`` and ``CUDAEvent`` of PyTorch's ``jit/cuda/cuda.h``.
"""

import ctypes
import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from numba_symm import driver, streams
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, DeviceError, DriverError

HANDLE_BYTES = 64
"""The size of an event's inter-process handle."""

_DEFAULT = streams.LEGACY_DEFAULT

_BLOCKING, _NO_TIMING, _INTERPROCESS = 1, 2, 4  # CU_EVENT_*


def _handle_of(stream: Any) -> int:
    return _DEFAULT if stream is None else streams.handle_of(stream)


def _is_done(query: str, handle: Any) -> bool:
    try:
        driver.call(query, handle)
    except DriverError as error:
        if "CUDA_ERROR_NOT_READY" in str(error):
            return False
        raise
    return True


def current_device() -> Any:
    """Return the thread's current device, as cuda.core's; Numba chooses if none is.

    Raises:
        DeviceError: there is no GPU.
    """
    from cuda.core import Device
    from numba import cuda
    from numba.cuda.cudadrv.error import CudaSupportError

    try:
        cuda.current_context()
    except CudaSupportError as error:
        raise DeviceError(
            f"no GPU can be used: {error}; NUMBA_ENABLE_CUDASIM=1 runs without GPUs"
        ) from error
    device = Device(int(driver.call("cuCtxGetDevice")))
    device.set_current()  # it is; cuda.core wants to be told
    return device


class Event:
    """A point in a stream's work, which other streams and the host can wait for.

    Belongs to the device that is current when it is made. An event that was never
    recorded counts as complete.

    Args:
        timing: whether :meth:`elapsed_time` is wanted.
        blocking: whether :meth:`synchronize` gives up the processor while it waits.
        interprocess: whether :meth:`ipc_handle` is wanted; not together with timing.

    Raises:
        ArgumentError: both ``timing`` and ``interprocess``, which CUDA cannot do.

    Source: ``CUDAEvent`` of PyTorch's ``jit/cuda/cuda.h``.
    """

    def __init__(
        self, timing: bool = False, blocking: bool = False, interprocess: bool = False
    ):
        if timing and interprocess:
            raise ArgumentError(
                "Event: timing=True and interprocess=True; an event of CUDA cannot be "
                "both, so make two and record both"
            )
        self.timing = timing
        self.blocking = blocking
        self.interprocess = interprocess
        self._ipc_handle: bytes | None = None
        self._recorded: float | None = None  # the simulator's
        if SIMULATED:
            return
        # cuda.core makes inter-process events only by recording them, and none of its
        # own can be recorded again elsewhere: the driver's flags, then.
        current_device()
        flags = blocking * _BLOCKING | (not timing) * _NO_TIMING
        flags |= interprocess * _INTERPROCESS
        self._owned = _Owned(driver.call("cuEventCreate", flags))
        self._handle = self._owned.handle

    @classmethod
    def from_ipc_handle(cls, handle: bytes) -> Self:
        """Open an event of another process by what :meth:`ipc_handle` gave there.

        The other process keeps its event for as long as this one is used.

        Args:
            handle: 64 bytes.

        Raises:
            ArgumentError: it is no such handle.
            DriverError: the event is gone, or is this process' own.
        """
        if len(handle) != HANDLE_BYTES:
            raise ArgumentError(
                f"Event.from_ipc_handle: {len(handle)} bytes; an event's handle has "
                f"{HANDLE_BYTES}"
            )
        event = cls.__new__(cls)
        event.timing = event.blocking = False
        event.interprocess = True
        event._ipc_handle = bytes(handle)
        event._recorded = None
        if not SIMULATED:
            event._owned = _Owned(_opened(handle))
            event._handle = event._owned.handle
        return event

    def record(self, stream: Any = None) -> None:
        """Put the event after all work that ``stream`` has so far.

        Args:
            stream: any library's, or a handle; None: the legacy default stream.
        """
        handle = _handle_of(stream)
        if SIMULATED:
            self._recorded = time.perf_counter()
            return
        driver.call("cuEventRecord", self._handle, handle)

    def wait(self, stream: Any = None) -> None:
        """Have what ``stream`` gets from now on wait for the latest record."""
        handle = _handle_of(stream)
        if not SIMULATED:
            driver.call("cuStreamWaitEvent", handle, self._handle, 0)

    def query(self) -> bool:
        """Return whether all work before the latest record is done."""
        return SIMULATED or _is_done("cuEventQuery", self._handle)

    def synchronize(self) -> None:
        """Wait until all work before the latest record is done."""
        if not SIMULATED:
            driver.call("cuEventSynchronize", self._handle)

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event's record to that of ``end``.

        Raises:
            ArgumentError: one of them was made without timing.
            DriverError: one of them was not recorded, or is not complete.
        """
        if not (self.timing and end.timing):
            raise ArgumentError(
                "elapsed_time: make both events with Event(timing=True)"
            )
        if not SIMULATED:
            return float(driver.call("cuEventElapsedTime", self._handle, end._handle))
        if self._recorded is None or end._recorded is None:
            raise DriverError("elapsed_time: record both events first")
        return (end._recorded - self._recorded) * 1e3

    def ipc_handle(self) -> bytes:
        """Return 64 bytes by which another process can open the event.

        Raises:
            ArgumentError: it was not made with ``interprocess=True``.
        """
        if not self.interprocess:
            raise ArgumentError("ipc_handle: make the event with interprocess=True")
        if self._ipc_handle is None:
            self._ipc_handle = self._export()
        return self._ipc_handle

    def _export(self) -> bytes:
        if SIMULATED:
            return secrets.token_bytes(HANDLE_BYTES)
        handle = driver.call("cuIpcGetEventHandle", self._handle)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _opened(ipc_handle: bytes) -> Any:
    """Return another process' event."""
    from cuda.bindings import driver as binding

    current_device()
    ipc = binding.CUipcEventHandle()
    ctypes.memmove(ipc.getPtr(), ipc_handle, HANDLE_BYTES)
    return driver.call("cuIpcOpenEventHandle", ipc)


class _Owned:
    """An event of the driver, destroyed with this object."""

    def __init__(self, handle: Any):
        self.handle = handle
        self._destroy = driver.function("cuEventDestroy")  # there when Python ends

    def __del__(self) -> None:
        self._destroy(self.handle)  # a failure here has no one to tell


class Stream:
    """A queue of work on a GPU; it does not wait for the legacy default stream.

    Every object is a stream of its own, which goes with it. Accepted wherever this
    library takes a stream, and by whoever knows ``__cuda_stream__``; give
    ``stream.core`` to Numba's launches and copies.

    Args:
        device: the GPU's number; None: the current one.
        priority: lower numbers first; 0 is the lowest priority. What a GPU offers is
            between ``cuCtxGetStreamPriorityRange``'s two numbers, such as 0 to -5.

    Attributes:
        id: tells the stream from all others that this process ever has.
        device_index: the GPU's number.
        priority: as given.

    Raises:
        ArgumentError: there is no such GPU or priority.

    Source: ``CUDAStream`` of PyTorch's ``jit/cuda/cuda.h``, whose streams come from a
    pool, so that two objects may be one stream.
    """

    _ids = itertools.count(1)

    def __init__(self, device: int | None = None, priority: int = 0):
        self.priority = priority
        if SIMULATED:
            self.device_index = _checked_device(device, 1) if device else 0
            self.id = next(self._ids)
            return
        from cuda.core import StreamOptions

        chosen = _device(device)
        self.device_index = int(chosen.device_id)
        with _current(chosen):
            _check_priority(priority)
            options = StreamOptions(nonblocking=True, priority=priority)
            self._core = chosen.create_stream(options=options)
        self.id = int(driver.call("cuStreamGetId", self._core.handle))

    @property
    def device(self) -> Any:
        """The GPU, as a :class:`numba_symm.GPU`."""
        from numba_symm.launch.devices import visible_gpus

        return visible_gpus()[self.device_index]

    @property
    def core(self) -> Any:
        """The stream as cuda.core's object, or as the simulator's."""
        if SIMULATED:
            from numba import cuda

            return cuda.stream()
        return self._core

    @property
    def handle(self) -> int:
        """The ``CUstream``; 0 under the simulator."""
        return _DEFAULT if SIMULATED else int(self._core.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle."""
        return (0, self.handle)

    def __repr__(self) -> str:
        return f"<Stream {self.id} of GPU {self.device_index}>"

    def query(self) -> bool:
        """Return whether all its work is done."""
        return SIMULATED or _is_done("cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Wait until all its work is done."""
        if not SIMULATED:
            streams.synchronize(self.handle)

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, after its work so far; return it."""
        if event is None:
            event = self._new_event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Have what it gets from now on wait for the event's latest record."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Have what it gets from now on wait for all that ``stream`` has so far.

        Args:
            stream: any library's, or a handle; None: the legacy default stream.
        """
        handle = _handle_of(stream)
        if not SIMULATED:
            _join(self.handle, handle)

    def _new_event(self) -> Event:
        if SIMULATED:
            return Event()
        with on_device_of(self.handle, self.device_index):
            return Event()


def _join(waiting: int, awaited: int) -> None:
    """Have a stream wait for what another one, of any device, has so far."""
    driver.call("cuCtxPushCurrent", driver.call("cuStreamGetCtx", awaited))
    try:
        event = driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING
        try:
            driver.call("cuEventRecord", event, awaited)
            driver.call("cuStreamWaitEvent", waiting, event, 0)
        finally:
            driver.call("cuEventDestroy", event)  # once it is complete
    finally:
        driver.call("cuCtxPopCurrent")


def _checked_device(device: int, count: int) -> int:
    if not 0 <= device < count:
        raise ArgumentError(
            f"Stream: device={device}; this process sees {count} GPU(s), from 0"
        )
    return device


def _device(ordinal: int | None) -> Any:
    from cuda.core import Device

    if ordinal is None:
        return current_device()
    from numba_symm.launch.devices import visible_gpus

    return Device(_checked_device(ordinal, len(visible_gpus())))


@contextmanager
def _current(device: Any) -> Iterator[None]:
    """Make a device of cuda.core current for a while."""
    before = current_device()
    device.set_current()
    try:
        yield
    finally:
        before.set_current()


@contextmanager
def on_device_of(stream: int, ordinal: int) -> Iterator[None]:
    """Make a stream's device current; for the default streams, GPU ``ordinal``."""
    if stream > 2:  # 0, 1 and 2 name the default streams of whatever is current
        driver.call("cuCtxPushCurrent", driver.call("cuStreamGetCtx", stream))
        try:
            ordinal = int(driver.call("cuCtxGetDevice"))
        finally:
            driver.call("cuCtxPopCurrent")
    from cuda.core import Device

    with _current(Device(ordinal)):
        yield


def _check_priority(priority: int) -> None:
    least, greatest = driver.call("cuCtxGetStreamPriorityRange")
    if not greatest <= priority <= least:
        raise ArgumentError(
            f"Stream: priority={priority}; this GPU has priorities from {greatest} "
            f"(first) to {least} (last)"
        )
