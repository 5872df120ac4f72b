"""Streams and events; an event may be shared between processes.

They add to those of cuda.core:

- opening an event from the 64 bytes of its handle, and queries;
- waiting for streams of any library;
- Numba's simulator, where every call blocks until its work is complete.

Source: ``CUDAStream`` and ``CUDAEvent`` of PyTorch's ``jit/cuda/cuda.h``.
"""

import ctypes
import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from numba_symm import arguments
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, DeviceError, DriverError
from numba_symm.gpu import driver, entry, streams
from numba_symm.launch import devices

HANDLE_BYTES = 64
"""The size of an event's inter-process handle."""


_PRIORITIES = 1 << 31  # the range of C's int; a GPU has a few priorities

_BLOCKING, _NO_TIMING, _INTERPROCESS = 1, 2, 4  # CU_EVENT_*


def current_device() -> Any:
    """Return the thread's current device of cuda.core; Numba makes one current.

    Raises:
        DeviceError: this process has no GPU.
    """
    from cuda.core import Device
    from numba import cuda

    try:
        cuda.current_context()
    except cuda.CudaSupportError as error:
        raise DeviceError(
            f"expected a GPU, got {error}; set NUMBA_ENABLE_CUDASIM=1 to run without"
        ) from error
    device = Device(int(driver.call("cuCtxGetDevice")))
    device.set_current()  # it is current; this initializes cuda.core's object
    return device


class Event:
    """A point in a stream's work, which other streams and the host can wait for.

    An event belongs to the device that is current at its construction. An event that
    was never recorded is complete.

    Args:
        timing: whether to support :meth:`elapsed_time`.
        blocking: whether :meth:`synchronize` yields the CPU while it waits.
        interprocess: whether to support :meth:`ipc_handle`; excludes ``timing``.

    Raises:
        ArgumentError: both ``timing`` and ``interprocess``, which CUDA does not allow.

    Source: ``CUDAEvent`` of PyTorch's ``jit/cuda/cuda.h``.
    """

    def __init__(
        self, timing: bool = False, blocking: bool = False, interprocess: bool = False
    ):
        timing = arguments.flag(timing, "Event", "timing")
        blocking = arguments.flag(blocking, "Event", "blocking")
        interprocess = arguments.flag(interprocess, "Event", "interprocess")
        if timing and interprocess:
            raise ArgumentError(
                "Event: expected timing=True or interprocess=True, got both; make two "
                "events and record both"
            )
        self.timing, self.blocking, self.interprocess = timing, blocking, interprocess
        self._ipc_handle: bytes | None = None
        self._recorded: float | None = None  # the simulator's
        if SIMULATED:
            return
        # cuda.core makes inter-process events only by recording them, and its events
        # cannot be recorded again on another stream, so the driver makes this one.
        current_device()
        flags = blocking * _BLOCKING | (not timing) * _NO_TIMING
        flags |= interprocess * _INTERPROCESS
        self._owned = _Owned(driver.call("cuEventCreate", flags))
        self._handle = int(self._owned.handle)

    @classmethod
    def from_ipc_handle(cls, handle: bytes) -> Self:
        """Open another process's event, from the result of its :meth:`ipc_handle`.

        The other process must keep its event while this process uses the opened one.

        Args:
            handle: 64 bytes.

        Raises:
            ArgumentError: the handle is not 64 bytes.
            DriverError: the event was destroyed, or belongs to this process.
        """
        if not isinstance(handle, bytes) or len(handle) != HANDLE_BYTES:
            raise ArgumentError(
                f"Event.from_ipc_handle: expected {HANDLE_BYTES} bytes, got "
                f"{handle!r:.100}; pass what ipc_handle() returned"
            )
        event = cls.__new__(cls)
        event.timing = event.blocking = False
        event.interprocess = True
        event._ipc_handle = handle
        event._recorded = None
        if not SIMULATED:
            event._owned = _Owned(_opened(handle))
            event._handle = int(event._owned.handle)
        return event

    def __repr__(self) -> str:
        options = "timing", "blocking", "interprocess"
        given = [f"{name}=True" for name in options if getattr(self, name)]
        return f"<Event {', '.join(given) or 'without timing'}>"

    def record(self, stream: Any = None) -> None:
        """Record the event after all work enqueued on ``stream`` so far.

        Args:
            stream: a stream of any library, or a handle; None: the legacy default
                stream.
        """
        handle = streams.handle_or_default(stream)
        if SIMULATED:
            self._recorded = time.perf_counter()
            return
        streams.quick("cuEventRecord", self._handle, handle)

    def wait(self, stream: Any = None) -> None:
        """Make later work of ``stream`` wait for the latest ``record``."""
        handle = streams.handle_or_default(stream)
        if not SIMULATED:
            streams.quick("cuStreamWaitEvent", handle, self._handle)

    def query(self) -> bool:
        """Return whether all work before the latest ``record`` is done."""
        if SIMULATED:
            return True
        status = entry.driver_function("cuEventQuery")(self._handle, 0, 0)
        return streams.is_ready("cuEventQuery", status)

    def synchronize(self) -> None:
        """Wait on the host until all work before the latest ``record`` is done."""
        if not SIMULATED:
            driver.call("cuEventSynchronize", self._handle)

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event's record to the record of ``end``.

        Raises:
            ArgumentError: one of the events was made without timing.
            DriverError: one of the events was not recorded, or is not complete.
        """
        if not (self.timing and _checked_event(end, "elapsed_time").timing):
            raise ArgumentError(
                "elapsed_time: expected two events with timing, got one without; make "
                "both by Event(timing=True)"
            )
        if not SIMULATED:
            return float(driver.call("cuEventElapsedTime", self._handle, end._handle))
        if self._recorded is None or end._recorded is None:
            raise DriverError(
                "elapsed_time: expected two recorded events; record both first"
            )
        return (end._recorded - self._recorded) * 1e3

    def ipc_handle(self) -> bytes:
        """Return 64 bytes from which another process can open the event.

        Raises:
            ArgumentError: the event was not made with ``interprocess=True``.
        """
        if not self.interprocess:
            raise ArgumentError(
                "ipc_handle: expected an inter-process event, got another; make it "
                "with Event(interprocess=True)"
            )
        if self._ipc_handle is None:
            self._ipc_handle = self._export()
        return self._ipc_handle

    def _export(self) -> bytes:
        if SIMULATED:
            return secrets.token_bytes(HANDLE_BYTES)
        handle = driver.call("cuIpcGetEventHandle", self._handle)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _checked_event(event: Any, what: str) -> Event:
    if not isinstance(event, Event):
        raise ArgumentError(
            f"{what}: expected an Event of numba_symm, got {event!r}; pass one"
        )
    return event


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
        self._destroy = driver.function("cuEventDestroy")  # usable at exit, too
        self.handle = handle

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # not interrupted before it was kept
            self._destroy(self.handle)  # a failure cannot be reported here


class Point:
    """A point in a stream's work, whose event is used again: making one takes longer.

    Args:
        idle: events that no point has; this one takes one, and returns it at its end.
        stream: the stream's handle.
    """

    def __init__(self, idle: list[Event], stream: int):
        self._idle = idle
        self._event = idle.pop() if idle else Event()
        self.move(stream)

    @property
    def handle(self) -> int:
        """The event's handle, with which compiled code moves the point."""
        return self._event._handle

    def move(self, stream: int) -> None:
        """Be a later point, of this or another stream."""
        if not SIMULATED:
            streams.quick("cuEventRecord", self._event._handle, stream)

    def wait(self, stream: int) -> None:
        """Make later work of a stream follow the point."""
        if not SIMULATED:
            streams.quick("cuStreamWaitEvent", stream, self._event._handle)

    def query(self) -> bool:
        """Return whether the work before the point has ended."""
        return self._event.query()

    def synchronize(self) -> None:
        """Wait on the host until the work before the point has ended."""
        self._event.synchronize()

    def __del__(self) -> None:
        if hasattr(self, "_event"):  # not interrupted before it had one
            self._idle.append(self._event)


class Stream:
    """A non-blocking stream, which does not wait for the legacy default stream.

    Every object makes a new stream, and destroys the stream when the object ends. All
    calls of this library accept a ``Stream``, as does any library that supports
    ``__cuda_stream__``. Pass ``stream.core`` to Numba's launches and copies.

    Args:
        device: the GPU's number; None: the current one.
        priority: work of lower numbers runs first; 0 is the lowest priority.
            ``cuCtxGetStreamPriorityRange`` returns a GPU's range, such as 0 to -5,
            which is also the simulator's.

    Attributes:
        id: a number that this process never uses for another stream.
        device_index: the GPU's number.
        priority: its priority.

    Raises:
        ArgumentError: the GPU or the priority does not exist.

    Source: ``CUDAStream`` of PyTorch's ``jit/cuda/cuda.h``. Its streams come from a
    pool, so two objects may be the same stream.
    """

    _ids = itertools.count(1)

    def __init__(self, device: int | None = None, priority: int = 0):
        priority = arguments.integer(
            priority,
            "Stream",
            "priority to be an int",
            least=-_PRIORITIES,
            most=_PRIORITIES,
            do="pass one such as 0 or -1",
        )
        self.priority = priority
        if SIMULATED:
            self.device_index = 0 if device is None else _checked_device(device, 1)
            _check_priority(priority, 0, -5)  # as on a GPU
            self.id = next(self._ids)
            return
        from cuda.core import StreamOptions

        chosen = _device(device)
        self.device_index = int(chosen.device_id)
        with _current(chosen):
            _check_priority(priority, *driver.call("cuCtxGetStreamPriorityRange"))
            options = StreamOptions(nonblocking=True, priority=priority)
            self._core = chosen.create_stream(options=options)
        self.id = int(driver.call("cuStreamGetId", self._core.handle))

    @property
    def device(self) -> Any:
        """The GPU, as a :class:`numba_symm.GPU`."""
        return devices.visible_gpus()[self.device_index]

    @property
    def core(self) -> Any:
        """The stream as an object of cuda.core, or of the simulator."""
        if SIMULATED:
            from numba import cuda

            return cuda.stream()
        return self._core

    @property
    def handle(self) -> int:
        """The ``CUstream``; 0 in the simulator."""
        return streams.LEGACY_DEFAULT if SIMULATED else int(self._core.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle."""
        return (0, self.handle)

    def __repr__(self) -> str:
        return f"<Stream {self.id} of GPU {self.device_index}>"

    def query(self) -> bool:
        """Return whether all work of the stream is done."""
        return SIMULATED or streams.is_done(self.handle)

    def synchronize(self) -> None:
        """Wait on the host until all work of the stream is done."""
        streams.synchronize(self.handle)

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` or a new event after the work so far; return the event."""
        if event is None:
            event = self._new_event()
        _checked_event(event, "record_event").record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the event's latest ``record``."""
        _checked_event(event, "wait_event").wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for all work of ``stream`` so far.

        Args:
            stream: a stream of any library, or a handle; None: the legacy default
                stream.
        """
        handle = streams.handle_or_default(stream)
        if not SIMULATED:
            _join(self.handle, handle)

    def _new_event(self) -> Event:
        if SIMULATED:
            return Event()
        with on_device_of(self.handle, self.device_index):
            return Event()


def _join(waiting: int, awaited: int) -> None:
    """Make a stream wait for the work so far of another one, of any device."""
    with streams.on_context(driver.call("cuStreamGetCtx", awaited)):
        event = driver.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING
        try:
            driver.call("cuEventRecord", event, awaited)
            driver.call("cuStreamWaitEvent", waiting, event, 0)
        finally:
            driver.call("cuEventDestroy", event)  # the driver does so on completion


def _checked_device(device: int, count: int) -> int:
    what = f"device to be a GPU's number from 0 to {count - 1}"
    do = "pass one that CUDA_VISIBLE_DEVICES shows, or None"
    return arguments.integer(device, "Stream", what, 0, count - 1, do)


def _device(ordinal: int | None) -> Any:
    from cuda.core import Device

    if ordinal is None:
        return current_device()
    return Device(_checked_device(ordinal, len(devices.visible_gpus())))


@contextmanager
def _current(device: Any) -> Iterator[None]:
    """Make a device of cuda.core current within the context."""
    before = current_device()
    device.set_current()
    try:
        yield
    finally:
        before.set_current()


@contextmanager
def on_device_of(stream: int, ordinal: int) -> Iterator[None]:
    """Make a stream's device current; for the default streams, GPU ``ordinal``."""
    if stream > 2:  # 0, 1 and 2 are the default streams of the current device
        with streams.on_context(driver.call("cuStreamGetCtx", stream)):
            ordinal = int(driver.call("cuCtxGetDevice"))
    from cuda.core import Device

    with _current(Device(ordinal)):
        yield


def _check_priority(priority: int, least: int, greatest: int) -> None:
    if not greatest <= priority <= least:
        raise ArgumentError(
            f"Stream: expected a priority from {greatest} (runs first) to {least}, got "
            f"priority={priority}; pass one of this range"
        )
