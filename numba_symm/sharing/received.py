"""Opening what another process has shared, and giving it back."""

import weakref
from typing import Any

from numba_symm import streams
from numba_symm.arrays import Memory
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ClosedError
from numba_symm.events import Event
from numba_symm.sharing import kinds, layout
from numba_symm.sharing.consumer import (
    CLOSED,
    Key,
    Reference,
    consumer,
    stream_handle,
)
from numba_symm.sharing.handle import SharedHandle
from numba_symm.sharing.layout import Layout
from numba_symm.sharing.sent import producer


class ReceivedData:
    """A shared array that this process has open, until it is dropped or closed.

    Args:
        handle: what the producer's :func:`~numba_symm.sharing.share` gave.
        stream: what uses the array; it waits for the producer's work, and the
            reference is given back after it.

    Raises:
        ClosedError: the array is shared no more, or its producer has ended.
        ArgumentError: the stream is being captured.

    Source: ``CudaIPCReceivedData`` of PyTorch.
    """

    def __init__(self, handle: SharedHandle, stream: Any = None):
        refuse_capture(stream_handle(stream), "open_shared")
        kinds.current_ordinal()  # from here on the thread has a context
        consumer.retry()
        self.handle = handle
        self._array: weakref.ref[Any] | None = None
        if producer.is_at(handle.producer):
            self._reference, memory = _open_here(handle, stream)
        else:
            self._reference, memory = _open_there(handle, stream)
        self._memory: Memory | None = memory
        self._finalizer = weakref.finalize(memory, self._reference.drop)
        self._finalizer.atexit = False  # the process' end gives everything back

    def array(self) -> Any:
        """Return the array; it has a method ``close``, which is this object's."""
        if self._memory is None:
            raise ClosedError(CLOSED)
        array = layout.build(self._memory, self.handle.layout)
        array.close = self.close
        self._array = weakref.ref(array)
        return array

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._memory is None

    def close(self) -> None:
        """Give the array back once the stream is done with it; again does nothing.

        No view of the array may be used any more.

        Raises:
            ArgumentError: the stream is being captured; the array stays open.
        """
        if self._memory is None:
            return
        if not self._reference.wait():
            raise ArgumentError("close: the array's stream is being captured")
        if self._finalizer.detach() is None:  # another thread closes it
            return
        self._memory = None
        array = self._array() if self._array is not None else None
        if array is not None:
            _poison(array)
        self._reference.close()
        consumer.retry()


def _open_here(handle: SharedHandle, stream: Any) -> tuple[Reference, Memory]:
    """Open an array of this very process, for which CUDA opens no handle."""
    with producer.guard:
        sent = producer.find(handle.file, handle.slot, handle.serial)
        reference = Reference(handle, sent.file, producer.guard, stream)
    try:
        if sent.event is not None:
            sent.event.wait(stream)
    except BaseException:
        reference.drop()
        raise
    return reference, Memory(handle.base, handle.base_nbytes, sent.original_ptr)


def _open_there(handle: SharedHandle, stream: Any) -> tuple[Reference, Memory]:
    """Open an array of another process."""
    key = (handle.producer, handle.kind, handle.base, kinds.current_ordinal())
    reference = None
    while reference is None:
        with consumer.guard:
            closing = consumer.closing.get(key)
            if closing is None:
                reference = _take(handle, key, stream)
        if closing is not None:
            closing.closed.wait()
    try:
        if handle.event_sync_required and not SIMULATED:
            Event.from_ipc_handle(handle.event).wait(stream)
    except BaseException:
        reference.drop()
        raise
    if reference.mapped is None:
        return reference, Memory(0, 0, None)
    mapping = reference.mapped.mapping
    return reference, Memory(mapping.address, mapping.nbytes, mapping)


def _take(handle: SharedHandle, key: Key, stream: Any) -> Reference:
    """Take a reference, and only then map what it keeps alive. Under the guard."""
    counters = consumer.counters(handle.producer, handle.file)
    reference = Reference(handle, counters, consumer.guard, stream)
    if handle.kind != "none":
        try:
            reference.attach(consumer.map(key, handle))
        except BaseException:
            reference.leave(consumer.guard.later)
            raise
    return reference


def received_around(address: int, nbytes: int) -> Reference | None:
    """Return an open array of another process that covers some memory, or None.

    Raises:
        ArgumentError: the memory is another process', but of no array that is open.
    """
    if not consumer.mapped:  # do not wait for whoever opens its first
        return None
    with consumer.guard:
        mapped = consumer.around(address)
        if mapped is None:
            return None
        for reference in mapped.references:
            if reference.spans(address, nbytes):
                return reference
    raise ArgumentError(
        f"share: the memory at {address:#x} is another process' and not part of any "
        "array that is open here; share what open_shared gave, or a slice of it"
    )


def share_again(
    reference: Reference, address: int, found: Layout, opens: int, stream: int
) -> SharedHandle:
    """Return the original handle of a received array, or of the slice of it asked for.

    CUDA exports no memory that was imported. The next consumer waits for the first
    producer's event only, so the work of this process is waited for here.
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
    """Stands for the memory of a closed array."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(CLOSED)


def _poison(array: Any) -> None:
    """Have every use of an array raise ClosedError."""
    if SIMULATED:
        array._ary = _Closed()
        return
    array.gpu_data = _Closed()
    array.__dict__.pop("_strided_memory_view_shim", None)  # Numba's cached address
