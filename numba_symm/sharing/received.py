"""Opens an array of another process, and gives the reference back."""

import weakref
from typing import Any

from numba_symm import streams
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ClosedError
from numba_symm.events import Event
from numba_symm.own_arrays import Memory
from numba_symm.sharing import kinds, layout
from numba_symm.sharing.consumer import (
    CLOSED,
    Key,
    OpenMapping,
    Reference,
    consumer,
)
from numba_symm.sharing.handle import SharedHandle
from numba_symm.sharing.layout import ArrayLayout
from numba_symm.sharing.sent import SentData, producer


class ReceivedData:
    """A shared array that this process has opened.

    Args:
        handle: a handle of the producer's :func:`~numba_symm.sharing.share`.
        stream: the stream that uses the array. It waits for the producer's work. The
            reference is given back after the work of this stream.

    Raises:
        As :func:`~numba_symm.sharing.open_shared`.

    Source: ``CudaIPCReceivedData`` of PyTorch.
    """

    def __init__(self, handle: SharedHandle, stream: Any = None):
        if not isinstance(handle, SharedHandle):
            raise ArgumentError(
                f"open_shared: expected a handle, got {type(handle).__name__}; pass "
                "a handle of share(), or SharedHandle.from_bytes(...)"
            )
        refuse_capture(streams.handle_or_default(stream), "open_shared")
        kinds.current_ordinal()  # from here on the thread has a context
        consumer.retry()
        self.handle = handle
        self._array: weakref.ref[Any] | None = None
        here = producer.is_at(handle.producer)
        guard = producer.guard if here else consumer.guard
        self._reference = Reference(handle, guard, stream)
        # Before the reference is taken, so that dropping the memory gives it back.
        self._memory: Memory | None = Memory(0, 0, None)
        consumer.watch(self._memory, self._reference)
        try:
            opened = (_open_here if here else _open_there)(self._reference, stream)
        except BaseException:
            self.undo()
            raise
        self._memory.address, self._memory.nbytes, self._memory.owner = opened

    def array(self) -> Any:
        """Return the array. Its method ``close`` closes this object.

        Raises:
            ArgumentError: Numba has no arrays of this layout.
        """
        if self._memory is None:
            raise ClosedError(CLOSED)
        try:
            array = layout.build(self._memory, self.handle.layout)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ArgumentError(
                f"open_shared: {self.handle.layout}: {error}"
            ) from error
        array.close = self.close
        self._array = weakref.ref(array)
        return array

    def undo(self) -> None:
        """Give the reference back as if it had not been taken."""
        self._reference.undo()
        self._memory = None

    @property
    def closed(self) -> bool:
        """Whether the array was closed."""
        return self._memory is None

    def close(self) -> None:
        """Wait for the stream, and give the array back. Idempotent.

        After that, no view of the array may be used.

        Raises:
            ArgumentError: the stream is being captured; the array stays open.
            ExchangeError: another process, which is stopped, keeps the counters
                locked; call it again later.
        """
        if self._memory is None:
            return
        if not self._reference.wait():
            raise ArgumentError(
                "close: the array's stream is being captured; close the array later"
            )
        array = self._array() if self._array is not None else None
        if array is not None:
            _poison(array)
        self._reference.close()
        self._memory = None
        consumer.retry()


_Opened = tuple[int, int, Any]  # the arguments of Memory


def _open_here(reference: Reference, stream: Any) -> _Opened:
    """Open an array of this process, whose own handles CUDA does not open."""
    handle = reference.handle

    def take() -> SentData:
        sent = producer.checked(handle)
        reference.take(sent.file)
        return sent

    sent = producer.guard.do(take)
    if sent.event is not None:
        sent.event.wait(stream)
    return handle.base, handle.base_nbytes, sent.original_ptr


def _open_there(reference: Reference, stream: Any) -> _Opened:
    """Open an array of another process."""
    handle = reference.handle
    key = (handle.producer.name, handle.kind, handle.base, kinds.current_ordinal())
    while closing := consumer.guard.do(lambda: _take(reference, key)):
        closing.finish(wait=True)
    if handle.event_sync_required and not SIMULATED:
        Event.from_ipc_handle(handle.event).wait(stream)
    if reference.mapped is None:
        return 0, 0, None
    mapping = reference.mapped.mapping
    return mapping.address, mapping.nbytes, mapping


def _take(reference: Reference, key: Key) -> OpenMapping | None:
    """Take a reference, and then map the memory that it keeps. Under the guard.

    Returns:
        None, or a mapping of this memory that must be unmapped first.
    """
    closing = consumer.closing.get(key)
    if closing is None:
        reference.take(consumer.checked_counters(reference.handle))
        if reference.handle.kind != "none":
            consumer.map(key, reference)
    return closing


def received_around(address: int, nbytes: int) -> Reference | None:
    """Return an open array of another process that covers some memory, or None.

    Raises:
        ArgumentError: the memory is another process', but not of an open array.
    """
    if not consumer.mapped:  # do not wait for a thread that opens its first array
        return None
    return consumer.guard.do(lambda: _covering(address, nbytes))


def _covering(address: int, nbytes: int) -> Reference | None:
    mapped = consumer.around(address)
    if mapped is None:
        return None
    for reference in mapped.references:
        if reference.spans(address, nbytes):
            return reference
    raise ArgumentError(
        f"share: the memory at {address:#x} is another process' and not "
        "part of an open array; share an array of open_shared, or a slice of it"
    )


def share_again(
    reference: Reference, address: int, found: ArrayLayout, opens: int, stream: int
) -> SharedHandle:
    """Return the original handle of a received array, for the array or a slice of it.

    CUDA cannot export memory that a process has imported. The next consumer waits only
    for the producer's event. So this function waits for the work of this process.
    """
    if not SIMULATED:
        streams.synchronize(stream)
    return reference.again(address, found, opens)


def refuse_capture(stream: int, what: str) -> None:
    """Refuse a stream that is being captured."""
    if not SIMULATED and streams.is_capturing(stream):
        raise ArgumentError(
            f"{what}: the stream is being captured into a graph; call {what} before "
            "or after"
        )


class _Closed:
    """Takes the place of a closed array's memory."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(CLOSED)


def _poison(array: Any) -> None:
    """Make every use of an array raise ClosedError."""
    if SIMULATED:
        array._ary = _Closed()
        return
    array.gpu_data = _Closed()
    array.__dict__.pop("_strided_memory_view_shim", None)  # Numba's cached address
