"""The arrays of other processes that are open here.

The arrays of other processes that are open here: mappings, counters, references.

There is one mapping for each allocation, for any number of arrays, and one description
of each counter file. A reference is given back when its stream is done. The last
reference to an allocation is given back after the allocation was unmapped, because the
producer may free the memory then.
"""

import dataclasses
import functools
import os
import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager, suppress
from typing import Any

from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ClosedError, SymmError
from numba_symm.gpu import streams
from numba_symm.gpu.arrays import Memory
from numba_symm.gpu.events import Event
from numba_symm.memory.backends import Mapping
from numba_symm.sharing import broker, kinds, layout
from numba_symm.sharing.counters import CounterFile, FinalizerLock, Open, log, under
from numba_symm.sharing.layout import ArrayLayout, SharedHandle
from numba_symm.sharing.sent import SentData, producer

CLOSED = "this shared array was closed; open its handle again, if others still share it"

# The producer's name, kind, base, own GPU. No Python function is called to hash it.
Key = tuple[bytes, str, int, int]


class OpenMapping:
    """An allocation of another process, mapped here.

    Attributes:
        references: the references of the opens that use it.
        last: the reference that is given back after it was unmapped.
        unmapped: whether it was unmapped.
        ended: whether unmapping has ended, with success or not.
    """

    def __init__(self, key: Key, mapping: Mapping):
        self.key = key
        self.mapping = mapping
        self.references: set[Reference] = set()
        self.last: Reference | None = None
        self.unmapped = False
        self.ended = False
        self._lost = False
        self._lock = threading.RLock()

    def finish(self, *, wait: bool) -> None:
        """Unmap it when its work is done, and give its last reference back.

        Any thread may call it. So it is done even if one thread is interrupted.

        Args:
            wait: whether to wait for another thread that is doing it.
        """
        if under(self._lock, self._unmap, wait=wait):
            consumer.guard.now(functools.partial(consumer.end, self))

    def _unmap(self) -> bool:
        _, kind, _, ordinal = self.key
        if not self.unmapped and not self._lost and self.last is not None:
            # If a signal handler raises now, it is unknown which steps were made.
            self._lost = kind not in kinds.GOING_WITH_ARRAYS
            try:
                with self.last.in_context():
                    kinds.unmap_memory(kind, self.mapping, ordinal)
                self.unmapped = True
            except SymmError as error:
                log.warning(
                    "the memory of a shared array cannot be unmapped, so its producer "
                    "keeps it until this process ends: %s",
                    error,
                )
        return True


class _Watch(weakref.ref[Memory]):
    """A weak reference to an array's memory, with the array's reference."""

    __slots__ = ("reference",)
    reference: "Reference"


class Consumer:
    """The arrays of other processes that are open here.

    Attributes:
        guard: guards every change of this state.
        mapped: the allocations that are mapped.
        closing: allocations that are being unmapped, and must not be mapped again yet.
        dropped: arrays that were dropped, and whose references must be given back.
    """

    def __init__(self) -> None:
        self.guard = FinalizerLock(after=self.unmap_unused)
        self.mapped: dict[Key, OpenMapping] = {}
        self.closing: dict[Key, OpenMapping] = {}
        self.dropped: deque[Any] = deque()
        self._watches: set[_Watch] = set()
        self._unmappers: set[int] = set()
        self._files: dict[tuple[bytes, bytes, int], CounterFile] = {}

    def checked_counters(self, handle: SharedHandle) -> CounterFile:
        """Return the counter file of a handle, after a check. Under the guard.

        Raises:
            ArgumentError: the handle was altered.
            ClosedError: the sharing is over, or the producer has ended.
        """
        counters = self._counters(handle.producer, handle.file)
        counters.check(handle.slot, handle.serial, handle.digest)
        return counters

    def _counters(self, address: broker.Address, number: int) -> CounterFile:
        key = (address.name, address.token, number)
        file = self._files.get(key)
        if file is not None and file.producer_is_alive():
            return file
        _register_callback()
        self._forget_the_dead()
        if file is not None:
            raise ClosedError(broker.ENDED)
        with broker.asked(address, broker.COUNTERS, number, 0, 0) as (lent, mine):
            fd = os.dup(lent)  # has the same description, and so the locks
            try:
                file = self._files[key] = CounterFile(fd, mine)
            except BaseException:
                os.close(fd)
                raise
        return file

    def _forget_the_dead(self) -> None:
        for key, file in list(self._files.items()):
            if file.idle and not file.producer_is_alive():
                del self._files[key]
                file.close()

    def map(self, key: Key, reference: "Reference") -> None:
        """Map a reference's allocation, unless it is mapped. Under the guard."""
        mapped = self.mapped.get(key)
        if mapped is None:
            mapped = self._map(key, reference)
        reference.mapped = mapped  # before the reverse; see Reference.leave
        mapped.references.add(reference)

    def _map(self, key: Key, reference: "Reference") -> OpenMapping:
        handle = reference.handle
        ask = functools.partial(
            broker.asked,
            handle.producer,
            broker.MEMORY,
            handle.file,
            handle.slot,
            handle.serial,
        )
        try:
            mapping = kinds.map_memory(
                handle.kind,
                handle.base_nbytes,
                handle.base_handle,
                (handle.producer, handle.pool),
                ask,
                key[-1],
                own=kinds.uuid_of(key[-1]) == handle.device,
            )
            mapped = OpenMapping(key, mapping)
            reference.mapped = self.mapped[key] = mapped
        except SymmError:
            raise
        except BaseException:  # a signal handler raised; the memory may be mapped
            reference.lost = handle.kind not in kinds.GOING_WITH_ARRAYS
            raise
        return mapped

    def start_closing(self, mapped: OpenMapping, last: "Reference") -> None:
        """Remove a mapping from those in use. Under the guard. Idempotent."""
        if self.mapped.get(mapped.key) is mapped:
            mapped.last = last
            self.closing[mapped.key] = mapped
            del self.mapped[mapped.key]

    def unmap_unused(self) -> None:
        """Unmap closing mappings. Not under the guard, because it waits for the GPU."""
        if not self.closing:
            return
        me = threading.get_ident()
        if me in self._unmappers:  # that call continues when this one returns
            return
        try:
            self._unmappers.add(me)
            seen: set[OpenMapping] = set()
            while todo := set(self.closing.values()) - seen:
                for mapped in todo:
                    mapped.finish(wait=False)
                seen |= todo
        finally:
            self._unmappers.discard(me)

    def end(self, mapped: OpenMapping) -> None:
        """Note that a mapping has ended. Under the guard. Idempotent."""
        mapped.ended = True
        if self.closing.get(mapped.key) is mapped:
            del self.closing[mapped.key]
        if mapped.last is not None:
            mapped.last.leave()

    def around(self, address: int) -> OpenMapping | None:
        """Return the mapping that contains an address, or None. Under the guard."""
        for mapped in self.mapped.values():
            if 0 <= address - mapped.mapping.address < mapped.mapping.nbytes:
                return mapped
        return None

    def watch(self, memory: Memory, reference: "Reference") -> None:
        """Give a reference back when the memory of its array is dropped."""
        trigger = weakref.finalize(memory, self.retry)
        trigger.atexit = False  # the end of the process gives everything back
        # Called before the trigger. It is a C function, so a signal handler cannot
        # prevent it. If retry() is interrupted, a later retry() does the rest.
        watch = _Watch(memory, self.dropped.append)
        watch.reference = reference
        self._watches.add(watch)

    def retry(self) -> None:
        """Give back the references of arrays that were dropped."""
        for watch in list(self.dropped):
            reference = watch.reference
            reference.drop()
            if reference.done:
                self._watches.discard(watch)
                with suppress(ValueError):  # another thread did it
                    self.dropped.remove(watch)
        self.guard.do_queued()

    def start_anew(self) -> None:
        """Give up what a forked child has inherited. Its parent still has it."""
        for file in self._files.values():
            file.close()
        self.__init__()  # type: ignore[misc]


@functools.cache
def _register_callback() -> None:
    os.register_at_fork(after_in_child=consumer.start_anew)


class Reference:
    """One open's reference to a shared array. It is made before it is taken.

    It does not refer to the array's Memory, whose finalizer gives it back.

    Attributes:
        handle: the array's handle.
        mapped: the array's mapping.
        lost: whether it is kept until the process ends, because memory may still be
            mapped.
        failed: whether its open has failed.
    """

    def __init__(self, handle: SharedHandle, guard: FinalizerLock, stream: Any):
        self.handle = handle
        self.mapped: OpenMapping | None = None
        self.lost = False
        self.failed = False
        self._guard = guard
        self._open = Open(handle.slot, handle.serial)
        self._counters: CounterFile | None = None
        self.stream = stream  # kept, so that no other stream gets its handle
        self._process = os.getpid()
        self._context = streams.current_context()

    def take(self, counters: CounterFile) -> None:
        """Take it. Under the guard."""
        self._counters = counters
        counters.take(self._open)

    @property
    def done(self) -> bool:
        """Whether nothing remains that can be given back."""
        mapped = self.mapped
        if self.lost or (mapped is not None and mapped.ended and not mapped.unmapped):
            return True
        return self._open.number is None

    def spans(self, address: int, nbytes: int) -> bool:
        """Return whether its array covers some memory of the mapping."""
        if self.mapped is None:
            return False
        layout = self.handle.layout
        low, high = layout.extent
        first = self.mapped.mapping.address + layout.offset
        return first + low <= address and address + nbytes <= first + high

    def again(self, address: int, found: ArrayLayout, opens: int) -> SharedHandle:
        """Return the handle of an array within this one, and add its references."""
        if self.mapped is None:
            raise ClosedError(CLOSED)
        offset = address - self.mapped.mapping.address
        handle = dataclasses.replace(self.handle, layout=found.at(offset))
        self._guard.do(lambda: self._add(opens))
        return handle

    def _add(self, opens: int) -> None:
        if self._counters is None or not self._counters.producer_is_alive():
            raise ClosedError(broker.ENDED)
        self._counters.add(self.handle.slot, self.handle.serial, opens)

    def wait(self) -> bool:
        """Wait for the stream. Return False if the stream is being captured."""
        if SIMULATED:
            return True
        stream = streams.handle_or_default(self.stream)
        with self.in_context():
            if streams.is_capturing(stream):
                return False
            streams.synchronize(stream)
        return True

    def drop(self) -> None:
        """Give the reference back if that is possible now. For finalizers.

        Call it again until it is :attr:`done`.
        """
        if self.done or os.getpid() != self._process:  # in a forked child
            return
        try:
            ready = self.wait()
        except SymmError as error:
            log.warning("a shared array cannot be given back yet: %s", error)
            return
        if ready:
            self._guard.later(self.leave)

    def close(self) -> None:
        """Give the reference back, after :meth:`wait`, before returning."""
        if os.getpid() != self._process:
            return
        self._guard.now(self.leave)
        if self.mapped is not None and self.mapped.last is self:
            self.mapped.finish(wait=True)
            self._guard.now(self.leave)  # raises if it cannot be given back

    def undo(self) -> None:
        """Give the reference back as if not taken, because its open has failed."""
        self.failed = True
        self._guard.later(self.leave)

    def leave(self) -> None:
        """Give the reference back, or first begin to unmap. Under the guard.

        Idempotent, so that it can be repeated after an interrupt.
        """
        if self._counters is None or self.done:
            return
        mapped = self.mapped
        if mapped is not None:
            mapped.references.discard(self)
            if not mapped.references and not mapped.ended:
                consumer.start_closing(mapped, self)
                return
        self._counters.give_back(self._open, unused=self.failed)

    def in_context(self) -> AbstractContextManager[None]:
        """Make the array's GPU current within the block."""
        return streams.on_context(self._context)


consumer = Consumer()


def _cancel(handle: SharedHandle) -> int:
    """Cancel a handle on either side; see :meth:`SharedHandle.cancel`."""

    def cancelled(file: CounterFile) -> int:
        return file.cancel(handle.slot, handle.serial)

    try:
        if producer.is_at(handle.producer):
            return producer.guard.do(lambda: cancelled(producer.checked(handle).file))
        return consumer.guard.do(lambda: cancelled(consumer.checked_counters(handle)))
    except ClosedError:  # the sharing is over, or the producer has ended
        return 0


SharedHandle._cancel = _cancel


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
            opened = (_open_here if here else _open_there)(self._reference)
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


def _open_here(reference: Reference) -> _Opened:
    """Open an array of this process, whose own handles CUDA does not open."""
    handle = reference.handle

    def take() -> SentData:
        sent = producer.checked(handle)
        reference.take(sent.file)
        return sent

    sent = producer.guard.do(take)
    if sent.event is not None:
        sent.event.wait(reference.stream)
    return handle.base, handle.base_nbytes, sent.original_ptr


def _open_there(reference: Reference) -> _Opened:
    """Open an array of another process."""
    handle = reference.handle
    key = (handle.producer.name, handle.kind, handle.base, kinds.current_ordinal())
    while closing := consumer.guard.do(lambda: _take(reference, key)):
        closing.finish(wait=True)
    if handle.event_sync_required and not SIMULATED:
        Event.from_ipc_handle(handle.event).wait(reference.stream)
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
