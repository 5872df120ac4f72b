"""What this process has open of others: mappings, counter files, references.

One mapping a base allocation however many arrays, one description of each producer's
counter file. A reference is given back after its stream is done, and after unmapping
where it was the allocation's last: then the producer may free the memory.
"""

import dataclasses
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from numba_symm import driver, streams
from numba_symm.arrays import Memory
from numba_symm.backends import Mapping
from numba_symm.environment import SIMULATED
from numba_symm.errors import ClosedError, SymmError
from numba_symm.sharing import broker, kinds
from numba_symm.sharing.counters import CounterFile, Open
from numba_symm.sharing.guard import Guard, log, under
from numba_symm.sharing.handle import SharedHandle
from numba_symm.sharing.layout import Layout
from numba_symm.sharing.sent import producer

CLOSED = "this shared array was closed; open its handle again, if others still share it"

# The producer's name, kind, base, our GPU. Hashed without a call of a Python function.
Key = tuple[bytes, str, int, int]


class Mapped:
    """An allocation of another process, mapped here.

    Attributes:
        references: the opens that need it.
        last: the reference that is given back once it is unmapped.
        unmapped: whether it is.
        ended: whether unmapping it is over; it may have failed.
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
        """Unmap it after whatever still uses it, and give its last reference back.

        Whoever comes by may do it, so that it is done if one is interrupted.

        Args:
            wait: for another thread that does it; else leave it to that one.
        """
        if under(self._lock, self._unmap, wait=wait):
            consumer.guard.now(functools.partial(consumer.end, self))

    def _unmap(self) -> bool:
        _, kind, _, ordinal = self.key
        if not self.unmapped and not self._lost and self.last is not None:
            # If a signal's handler raises now, nobody knows how far this has come.
            self._lost = kind not in kinds.GOING_WITH_ARRAYS
            try:
                with self.last.in_context():
                    kinds.unmap_memory(kind, self.mapping, ordinal)
                self.unmapped = True
            except SymmError as error:
                log.warning(
                    "the memory of a shared array cannot be unmapped, so that its "
                    "producer keeps it until this process ends: %s",
                    error,
                )
        return True


class _Watch(weakref.ref[Memory]):
    """Notices that an array is gone, and knows its reference."""

    __slots__ = ("reference",)
    reference: "Reference"


class Consumer:
    """What this process has open of others.

    Attributes:
        guard: under which all this changes.
        mapped: the allocations that are mapped.
        closing: those that are just being unmapped, and must not be mapped anew.
        dropped: arrays that are gone and whose references are to be given back.
    """

    def __init__(self) -> None:
        self.guard = Guard(after=self.unmap_unused)
        self.mapped: dict[Key, Mapped] = {}
        self.closing: dict[Key, Mapped] = {}
        self.dropped: deque[Any] = deque()
        self._watches: set[_Watch] = set()
        self._unmappers: set[int] = set()
        self._files: dict[tuple[bytes, bytes, int], CounterFile] = {}

    def checked_counters(self, handle: SharedHandle) -> CounterFile:
        """Return the counter file of a handle that its producer made. Under the guard.

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
            fd = os.dup(lent)  # of the same description, to which locks belong
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
        """Map the allocation that a reference is for, or use it. Under the guard."""
        mapped = self.mapped.get(key)
        if mapped is None:
            mapped = self._map(key, reference)
        reference.mapped = mapped  # and only then the reverse: see Reference._leave
        mapped.references.add(reference)

    def _map(self, key: Key, reference: "Reference") -> Mapped:
        handle = reference.handle
        what = (handle.producer, broker.MEMORY, handle.file, handle.slot)
        try:
            mapping = kinds.map_memory(
                handle.kind,
                handle.base_nbytes,
                handle.base_handle,
                (handle.producer, handle.pool),
                lambda: broker.asked(*what, handle.serial),
                key[-1],
                own=kinds.uuid_of(key[-1]) == handle.device,
            )
            mapped = Mapped(key, mapping)
            reference.mapped = self.mapped[key] = mapped
        except SymmError:
            raise
        except BaseException:  # a signal's handler: it may be mapped, unknown to us
            reference.lost = handle.kind not in kinds.GOING_WITH_ARRAYS
            raise
        return mapped

    def start_closing(self, mapped: Mapped, last: "Reference") -> None:
        """Have no one else use a mapping. Under the guard; again does nothing."""
        if self.mapped.get(mapped.key) is mapped:
            mapped.last = last
            self.closing[mapped.key] = mapped
            del self.mapped[mapped.key]

    def unmap_unused(self) -> None:
        """Unmap what is closing, without the guard, as that waits for the device."""
        if not self.closing:
            return
        me = threading.get_ident()
        if me in self._unmappers:  # which goes on when this returns
            return
        try:
            self._unmappers.add(me)
            seen: set[Mapped] = set()
            while todo := set(self.closing.values()) - seen:
                for mapped in todo:
                    mapped.finish(wait=False)
                seen |= todo
        finally:
            self._unmappers.discard(me)

    def end(self, mapped: Mapped) -> None:
        """Note that a mapping is no more. Under the guard; again does nothing."""
        mapped.ended = True
        if self.closing.get(mapped.key) is mapped:
            del self.closing[mapped.key]
        if mapped.last is not None:
            mapped.last.leave()

    def around(self, address: int) -> Mapped | None:
        """Return the mapping that contains an address, or None. Under the guard."""
        for mapped in self.mapped.values():
            if 0 <= address - mapped.mapping.address < mapped.mapping.nbytes:
                return mapped
        return None

    def watch(self, memory: Memory, reference: "Reference") -> None:
        """Have a reference given back when the memory of its array goes."""
        trigger = weakref.finalize(memory, self.retry)
        trigger.atexit = False  # the process' end gives everything back
        # Called before that one. Written in C, so that a signal's handler cannot keep
        # it from being noted; what retry() does not do, a later one does.
        watch = _Watch(memory, self.dropped.append)
        watch.reference = reference
        self._watches.add(watch)

    def retry(self) -> None:
        """Give back the references of arrays that are gone."""
        for watch in list(self.dropped):
            reference = watch.reference
            reference.drop()
            if reference.done:
                self._watches.discard(watch)
                with suppress(ValueError):  # another thread did it
                    self.dropped.remove(watch)
        self.guard.do_queued()

    def start_anew(self) -> None:
        """Let go of what a forked child has inherited; its parent still has it."""
        for file in self._files.values():
            file.close()
        self.__init__()  # type: ignore[misc]


@functools.cache
def _register_callback() -> None:
    os.register_at_fork(after_in_child=consumer.start_anew)


class Reference:
    """One open's reference to a shared array, from before it is taken.

    Knows nothing of the Memory with which it goes.

    Attributes:
        handle: of the array.
        mapped: the allocation that it needs mapped.
        lost: whether it is kept until the process ends, as memory may still be mapped.
        failed: whether the open has failed that took it.
    """

    def __init__(self, handle: SharedHandle, guard: Guard, stream: Any):
        self.handle = handle
        self.mapped: Mapped | None = None
        self.lost = False
        self.failed = False
        self._guard = guard
        self._open = Open(handle.slot, handle.serial)
        self._counters: CounterFile | None = None
        self._stream = stream  # kept, so that its handle stays its own
        self._process = os.getpid()
        self._context = None if SIMULATED else driver.call("cuCtxGetCurrent")

    def take(self, counters: CounterFile) -> None:
        """Take it. Under the guard."""
        self._counters = counters
        counters.take(self._open)

    @property
    def done(self) -> bool:
        """Whether there is nothing to give back, or nothing that can be."""
        mapped = self.mapped
        if self.lost or (mapped is not None and mapped.ended and not mapped.unmapped):
            return True
        return self._open.number is None

    def spans(self, address: int, nbytes: int) -> bool:
        """Return whether the array it is for covers some memory of the mapping."""
        if self.mapped is None:
            return False
        layout = self.handle.layout
        low, high = layout.extent
        first = self.mapped.mapping.address + layout.offset
        return first + low <= address and address + nbytes <= first + high

    def again(self, address: int, found: Layout, opens: int) -> SharedHandle:
        """Return the handle for an array within this one, and add its references."""
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
        """Wait for the stream; return False if it cannot, as it is being captured."""
        if SIMULATED:
            return True
        stream = streams.handle_or_default(self._stream)
        with self.in_context():
            if streams.is_capturing(stream):
                return False
            streams.synchronize(stream)
        return True

    def drop(self) -> None:
        """Give the reference back, from wherever a finaliser may run; or do nothing.

        Call it again while it is not :attr:`done`.
        """
        if self.done or os.getpid() != self._process:  # a forked child's parent has it
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
            self._guard.now(self.leave)  # raises what kept it from being given back

    def undo(self) -> None:
        """Give the reference back as if never taken, because its open has failed."""
        self.failed = True
        self._guard.later(self.leave)

    def leave(self) -> None:
        """Give the reference back, or begin to unmap first. Under the guard.

        Again does nothing, so that it can be done again after an interrupt.
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

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """Make the GPU current on which the array was opened."""
        if self._context is None:
            yield
            return
        driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            driver.call("cuCtxPopCurrent")


consumer = Consumer()


def _cancel(handle: SharedHandle) -> int:
    """Do what :meth:`SharedHandle.cancel` says, on either side."""

    def cancelled(file: CounterFile) -> int:
        return file.cancel(handle.slot, handle.serial)

    try:
        if producer.is_at(handle.producer):
            return producer.guard.do(lambda: cancelled(producer.checked(handle).file))
        return consumer.guard.do(lambda: cancelled(consumer.checked_counters(handle)))
    except ClosedError:  # the sharing is over, or the producer has ended
        return 0


SharedHandle._cancel = _cancel
