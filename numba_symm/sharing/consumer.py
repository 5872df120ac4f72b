"""What this process has open of others: mappings, counter files, references.

One mapping a base allocation however many arrays, one description of each producer's
counter file. A reference is given back after its stream is done, and after unmapping
where it was the allocation's last: then the producer may free the memory.
"""

import dataclasses
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba_symm import driver, streams
from numba_symm.backends import Mapping
from numba_symm.environment import SIMULATED
from numba_symm.errors import ClosedError
from numba_symm.sharing import broker, kinds
from numba_symm.sharing.counters import CounterFile
from numba_symm.sharing.guard import FollowUp, Guard, Job, log
from numba_symm.sharing.handle import SharedHandle
from numba_symm.sharing.layout import Layout
from numba_symm.sharing.sent import producer

CLOSED = "this shared array was closed; open its handle again, if others still share it"

Key = tuple[broker.Address, str, int, int]  # producer, kind, base, our GPU


class Mapped:
    """An allocation of another process, mapped here.

    Attributes:
        references: the opens that need it.
        closed: set once it is unmapped.
    """

    def __init__(self, key: Key, mapping: Mapping):
        self.key = key
        self.mapping = mapping
        self.references: set[Reference] = set()
        self.closed = threading.Event()

    def unmap(self) -> None:
        """Unmap it, after whatever still uses it."""
        _, kind, _, ordinal = self.key
        kinds.unmap_memory(kind, self.mapping, ordinal)


class Consumer:
    """What this process has open of others. All methods but ``retry`` under the guard.

    Attributes:
        mapped: the allocations that are mapped.
        closing: those that are just being unmapped, and must not be mapped anew.
        postponed: references that could not be given back yet.
    """

    def __init__(self) -> None:
        self.guard = Guard()
        self.mapped: dict[Key, Mapped] = {}
        self.closing: dict[Key, Mapped] = {}
        self.postponed: deque[Reference] = deque()
        self._files: dict[tuple[broker.Address, int], CounterFile] = {}

    def counters(self, address: broker.Address, number: int) -> CounterFile:
        """Return a producer's counter file.

        Raises:
            ClosedError: the producer has ended.
        """
        file = self._files.get((address, number))
        if file is not None and file.producer_is_alive():
            return file
        _register_callback()
        self._forget_the_dead()
        if file is not None:
            raise ClosedError(broker.ENDED)
        fd, consumer_number = broker.ask(address, broker.COUNTERS, number, 0, 0)
        try:
            file = CounterFile(fd, consumer_number)
        except BaseException:
            os.close(fd)
            raise
        self._files[address, number] = file
        return file

    def _forget_the_dead(self) -> None:
        for key, file in list(self._files.items()):
            if file.idle and not file.producer_is_alive():
                del self._files[key]
                file.close()

    def map(self, key: Key, handle: SharedHandle) -> Mapped:
        """Return the mapping of a handle's allocation, making it if there is none."""
        if key in self.mapped:
            return self.mapped[key]
        where = (handle.producer, broker.MEMORY, handle.file, handle.slot)
        mapping = kinds.map_memory(
            handle.kind,
            handle.base_nbytes,
            handle.base_handle,
            (handle.producer, handle.pool),
            lambda: broker.ask(*where, handle.serial)[0],
            key[-1],
            own=kinds.uuid_of(key[-1]) == handle.device,
        )
        mapped = self.mapped[key] = Mapped(key, mapping)
        return mapped

    def start_closing(self, mapped: Mapped) -> None:
        """Have no one else use a mapping."""
        del self.mapped[mapped.key]
        self.closing[mapped.key] = mapped

    def around(self, address: int) -> Mapped | None:
        """Return the mapping that contains an address, or None."""
        for mapped in self.mapped.values():
            if 0 <= address - mapped.mapping.address < mapped.mapping.nbytes:
                return mapped
        return None

    def retry(self) -> None:
        """Give back what could not be given back before."""
        for _ in range(len(self.postponed)):
            try:
                reference = self.postponed.popleft()
            except IndexError:  # another thread does the same
                return
            reference.drop()

    def start_anew(self) -> None:
        """Let go of what a forked child has inherited; its parent still has it."""
        for file in self._files.values():
            file.close()
        self.__init__()  # type: ignore[misc]


@functools.cache
def _register_callback() -> None:
    os.register_at_fork(after_in_child=consumer.start_anew)


class Reference:
    """One open's reference to a shared array, taken when it is made.

    Knows nothing of the Memory whose finaliser it is.
    """

    def __init__(
        self, handle: SharedHandle, counters: CounterFile, guard: Guard, stream: Any
    ):
        self.handle = handle
        self.mapped: Mapped | None = None
        self._counters = counters
        self._guard = guard
        self._stream = stream  # kept, so that its handle stays its own
        self._process = os.getpid()
        self._context = None if SIMULATED else driver.call("cuCtxGetCurrent")
        self._number = counters.take(handle.slot, handle.serial)

    def attach(self, mapped: Mapped) -> None:
        """Need a mapping until the reference is given back."""
        mapped.references.add(self)
        self.mapped = mapped

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
        with self._guard:
            if not self._counters.producer_is_alive():
                raise ClosedError(broker.ENDED)
            self._counters.add(self.handle.slot, self.handle.serial, opens)
        offset = address - self.mapped.mapping.address
        return dataclasses.replace(self.handle, layout=found.at(offset))

    def wait(self) -> bool:
        """Wait for the stream; return False if it cannot, as it is being captured."""
        if SIMULATED:
            return True
        stream = stream_handle(self._stream)
        with self._in_context():
            if streams.is_capturing(stream):
                return False
            streams.synchronize(stream)
        return True

    def drop(self) -> None:
        """Give the reference back, from wherever a finaliser may run."""
        if os.getpid() != self._process:  # a forked child; the parent has it still
            return
        try:
            ready = self.wait()
        except Exception as error:
            log.warning("a shared array cannot be given back yet: %s", error)
            ready = False
        if ready:
            self.leave(self._guard.later)
        else:
            consumer.postponed.append(self)

    def close(self) -> None:
        """Give the reference back, after :meth:`wait`, before returning."""
        self.leave(self._guard.now)

    def leave(self, run: Callable[[Job], None]) -> None:
        """Give the reference back by jobs that ``run`` does under the guard."""
        run(functools.partial(self._leave, run))

    def _leave(self, run: Callable[[Job], None]) -> FollowUp:
        if self.mapped is not None:
            self.mapped.references.discard(self)
            if not self.mapped.references:
                consumer.start_closing(self.mapped)
                return functools.partial(self._unmap, self.mapped, run)
        self._counters.give_back(self._number)
        return None

    def _unmap(self, mapped: Mapped, run: Callable[[Job], None]) -> None:
        # Without the guard, as it waits for the device.
        unmapped = False
        try:
            with self._in_context():
                mapped.unmap()
            unmapped = True
        finally:
            run(functools.partial(self._end, mapped, unmapped))

    def _end(self, mapped: Mapped, unmapped: bool) -> FollowUp:
        del consumer.closing[mapped.key]
        mapped.closed.set()
        if unmapped:  # else the producer must not free what may still be mapped
            self._counters.give_back(self._number)
        return None

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        if self._context is None:
            yield
            return
        driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            driver.call("cuCtxPopCurrent")


consumer = Consumer()


@contextmanager
def counters_of(handle: SharedHandle) -> Iterator[CounterFile]:
    """Give the counter file of a handle, under its guard."""
    if producer.is_at(handle.producer):
        with producer.guard:
            yield producer.files[handle.file]
    else:
        with consumer.guard:
            yield consumer.counters(handle.producer, handle.file)


def stream_handle(stream: Any) -> int:
    """Return a stream's handle; None is the legacy default stream."""
    return streams.LEGACY_DEFAULT if stream is None else streams.handle_of(stream)
