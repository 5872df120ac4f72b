"""The producer's side: the arrays that it shares, and the memory that it must keep.

The producer waits for other processes only for a counter file's lock, which is held for
microseconds. If a process is stopped while it holds the lock, the producer waits once,
for seconds.
"""

import atexit
import functools
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ClosedError, ExchangeError
from numba_symm.gpu import streams
from numba_symm.gpu.events import Event, on_device_of
from numba_symm.memory.allocator import on_allocation_failure
from numba_symm.sharing import broker
from numba_symm.sharing.counters import ALTERED, FinalizerLock, RefCounterFile, log
from numba_symm.sharing.layout import SharedHandle

LIMBO_WARNING = 1000
"""The number of entries in limbo above which a warning is given."""

EVENTS = 1000
"""The most inter-process events in use; CUDA limits their number."""


class SentData:
    """An entry: memory that other processes may open, and its counter.

    Attributes:
        handle: the name of the counter file.
        offset: the slot in the file.
        serial: the number of this use of the slot.
        counter_ptr: the counter's address, an int64 in memory that processes share.
        device: the ordinal of the memory's GPU.
        original_ptr: the object that keeps the memory.
        event: the event that consumers wait for, or None.
        event_sync_required: whether consumers have to wait.
        nbytes: the bytes that the array spans.
        export: returns a new file descriptor of the memory, if its kind needs one.
        digest: the digest with which handles are checked.
        reported: whether the process reports it if it ends while it is shared.

    Source: ``CudaIPCSentData`` of PyTorch.
    """

    def __init__(self, file: RefCounterFile, number: int, offset: int, device: int):
        self.handle = file.handle()
        self.offset = offset
        self.serial = file.serial(offset)
        self.counter_ptr = file.address(offset)
        self.device = device
        self.digest = b""
        self.reported = True
        self.original_ptr: Any = None
        self.event: Event | None = None
        self.event_sync_required = False
        self.nbytes = 0
        self.export: Callable[[], int] | None = None
        self.file = file
        self.number = number
        self._watch: weakref.ref[Any] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The number of its counter file, and its slot."""
        return self.number, self.offset

    def counter_value(self) -> int:
        """Return the number of references, taken or not; 0 after it was retired."""
        current = self.file.serial(self.offset) == self.serial
        return self.file.value(self.offset) if current else 0

    def set_original_ptr(self, keeper: Any, array: Any = None) -> None:
        """Set the object that keeps the memory, and the owner's array.

        When the owner has dropped ``array``, the entry is in limbo. Without an array,
        it is in limbo from the beginning.
        """
        self.original_ptr = keeper
        key, serial, dropped = self.key, self.serial, producer.dropped
        if array is not None:
            try:  # the reference is dropped with this object, and so is its callback
                self._watch = weakref.ref(
                    array, lambda _: dropped.append((key, serial))
                )
                return
            except TypeError:  # an array without weak references
                pass
        dropped.append((key, serial))

    def record(self, stream: int) -> None:
        """Make consumers wait for the work that ``stream`` has now.

        If too many events are in use, the host waits instead, and consumers need not.
        """
        if SIMULATED:
            return
        with on_device_of(stream, self.device):
            if not producer.guard.do(lambda: self._record_event(stream)):
                streams.synchronize(stream)

    def _record_event(self, stream: int) -> bool:
        if producer.events >= EVENTS:
            return False
        event = Event(blocking=True, interprocess=True)
        event.record(stream)
        event.ipc_handle()
        producer.events += 1
        self.event, self.event_sync_required = event, True
        return True

    def set_digest(self, digest: bytes) -> None:
        """Set the digest of handles. Before that, no handle can be opened."""
        self.digest = digest
        self.file.set_digest(self.offset, digest)

    def forget(self) -> Any:
        """Drop everything. Return the object that kept the memory, to be dropped."""
        if self.event is not None:
            self.event = None
            producer.events -= 1
        keeper, self.original_ptr = self.original_ptr, None
        self._watch = self.export = None
        return keeper


class Limbo:
    """Entries that their owner has dropped while references to them remained.

    Source: ``CudaIPCSentDataLimbo`` of PyTorch, which scans all of them whenever one is
    dropped. Here, :meth:`collect` can be restricted to candidates.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], SentData] = {}

    def add(self, block: SentData) -> None:
        """Keep an entry until all references to it were given back."""
        self._blocks[block.key] = block

    def collect(self, candidates: Iterable[SentData] | None = None) -> list[SentData]:
        """Remove and return the entries that have no references.

        Args:
            candidates: the entries to check; None: all.
        """
        found = list(self._blocks.values() if candidates is None else candidates)
        free = [
            block
            for block in found
            if block.key in self._blocks and block.counter_value() == 0
        ]
        for block in free:
            del self._blocks[block.key]
        return free

    def size(self) -> int:
        """Return the number of entries."""
        return len(self._blocks)


class Producer:
    """The arrays that this process shares."""

    def __init__(self) -> None:
        self.guard = FinalizerLock()
        self.files: list[RefCounterFile] = []
        self.sent: dict[tuple[int, int], SentData] = {}
        self.limbo = Limbo()
        self.events = 0
        self.stuck: ExchangeError | None = None  # of the latest settle()
        # Arrays that owners have dropped, from callbacks that run at any moment.
        self.dropped: deque[tuple[tuple[int, int], int]] = deque()
        self._broker: broker.Broker | None = None
        self._warned = False

    @property
    def address(self) -> broker.Address:
        """The broker's address for other processes. Starts the broker if needed."""
        if self._broker is None:
            self._broker = broker.Broker(self._answer)
            _register_callbacks()
        return self._broker.address

    def is_at(self, address: broker.Address) -> bool:
        """Return whether this is the address of this process' broker."""
        return self._broker is not None and self._broker.address == address

    def new(self, keeper: Any, device: int, opens: int, made: list[SentData]) -> None:
        """Append a new entry to ``made``, with its counter at ``opens``.

        So the caller has the entry even after an interrupt. Under the guard.
        """
        number, file = self._file_with_room()
        file.set_counter(opens)
        sent = SentData(file, number, file.get_offset(), device)
        sent.original_ptr = keeper
        made.append(sent)
        self.sent[sent.key] = sent
        file.rotate_offset()

    def _file_with_room(self) -> tuple[int, RefCounterFile]:
        for number, file in enumerate(self.files):
            if file.have_offsets() and not file.stuck:
                return number, file
        number = len(self.files)
        name = self.address.name[1:].decode()
        self.files.append(RefCounterFile(f"{name}-{number}"))
        return number, self.files[number]

    def find(self, number: int, offset: int, serial: int) -> SentData:
        """Return an entry.

        Raises:
            ClosedError: the sharing is over.
        """
        sent = self.sent.get((number, offset))
        if sent is None or sent.serial != serial:
            raise ClosedError("this array is no longer shared; share it again")
        return sent

    def checked(self, handle: SharedHandle) -> SentData:
        """Return the entry of a handle that was made here. Under the guard.

        Raises:
            ArgumentError: the handle was altered.
            ClosedError: the sharing is over.
        """
        sent = self.find(handle.file, handle.slot, handle.serial)
        if sent.digest != handle.digest:
            raise ArgumentError(ALTERED)
        return sent

    def settle(self) -> list[Any]:
        """Retire entries that have no references left. Under the guard.

        Only entries that have changed since the last call are checked. A file whose
        lock a stopped process keeps is skipped, and ``stuck`` is set then.

        Returns:
            The objects that kept the memory, to be dropped after the guard.
        """
        self.note_dropped()
        self.stuck = None
        kept: list[Any] = []
        for number, file in enumerate(self.files):
            try:
                released = file.take_released()
            except ExchangeError as error:
                self.stuck = error
                continue
            for offset in released:
                block = self.sent.get((number, offset))
                if block is None:  # a signal interrupted its retirement
                    file.return_offset(offset)
                    continue
                self.limbo.collect([block])
                kept.append(self.retire(block))
            file.settled()
        return kept

    def note_dropped(self) -> None:
        """Move entries that their owners have dropped to limbo. Under the guard."""
        while self.dropped:
            key, serial = self.dropped.popleft()
            block = self.sent.get(key)
            if block is not None and block.serial == serial:
                self.limbo.add(block)

    def retire(self, block: SentData) -> Any:
        """Free an entry's slot. Return the object that kept the memory."""
        kept = block.forget()  # first: it is forgotten only while it is found here
        block.file.return_offset(block.offset)
        del self.sent[block.key]
        return kept

    def withdraw(self, made: list[SentData]) -> None:
        """Retire entries that have no handle. Under the guard."""
        for block in made:
            if self.sent.get(block.key) is block:
                self.retire(block)

    def warn(self) -> None:
        """Warn if many entries are in limbo; again only after they became fewer."""
        size = self.limbo.size()
        if size > LIMBO_WARNING and not self._warned:
            self._warned = True
            warnings.warn(
                f"{size} shared arrays were dropped here while other processes still "
                "use them or have yet to open them, so that their memory cannot be "
                "freed; drop or close the arrays in the consumers, and cancel() "
                "handles that no consumer will open",
                RuntimeWarning,
                stacklevel=4,
            )
        elif size <= LIMBO_WARNING:
            self._warned = False

    def unopened(self) -> int:
        """Return the number of references that no open has taken yet."""
        return sum(file.unopened_in_all() for file in self.files)

    def _answer(self, what: int, file: int, slot: int, serial: int) -> broker.Answer:
        """Answer a request. In the broker's thread, so without the guard."""
        if what == broker.COUNTERS:
            if not 0 <= file < len(self.files):
                raise ClosedError("it has no such counters")
            return self.files[file].describe()
        sent = self.find(file, slot, serial)
        if sent.export is None:
            raise ClosedError("its memory needs no descriptor")
        if SIMULATED:
            return sent.export(), 0
        from cuda.core import Device

        Device(sent.device).set_current()
        return sent.export(), 0

    def start_anew(self) -> None:
        """Give up what a forked child has inherited. Its parent still shares it."""
        if self._broker is not None:
            self._broker.close()
        for file in self.files:
            file.close()
        self.__init__()  # type: ignore[misc]


producer = Producer()


def new_ref_counted_sent_data(keeper: Any, device: int, opens: int = 1) -> SentData:
    """Return a new entry for memory, its counter at ``opens``.

    Args:
        keeper: the object that keeps the memory.
        device: the ordinal of its GPU.
        opens: the number of references.

    Source: ``GetNewRefCountedSentData`` of PyTorch.
    """
    with new_sent_data(keeper, device, opens) as sent:
        return sent


@contextmanager
def new_sent_data(keeper: Any, device: int, opens: int) -> Iterator[SentData]:
    """Yield a new entry. If the block raises, nothing is shared."""
    made: list[SentData] = []
    try:
        kept = producer.guard.do(producer.settle)
        producer.guard.do(lambda: producer.new(keeper, device, opens, made))
        del kept  # not under the guard, because finalizers may need it
        yield made[0]
    except BaseException:
        producer.guard.do(lambda: producer.withdraw(made))
        raise


def leave_out(handle: SharedHandle) -> None:
    """Leave an array out of what the process reports when it ends."""
    producer.guard.do(lambda: setattr(producer.checked(handle), "reported", False))


def collect_sent() -> bool:
    """Free memory without references. Return whether any was freed.

    Raises:
        ExchangeError: a stopped process keeps counters locked; the text names it.
    """
    kept = producer.guard.do(producer.settle)
    producer.warn()
    if producer.stuck is not None:
        raise producer.stuck
    return bool(kept)


@functools.cache
def _register_callbacks() -> None:
    on_allocation_failure(_free_memory)
    atexit.register(_tell_what_is_shared)
    os.register_at_fork(after_in_child=producer.start_anew)


def _free_memory() -> None:
    """Collect, and make Numba free the memory that it would free later."""
    producer.guard.do(producer.settle)
    if not SIMULATED:
        from numba import cuda

        manager = cuda.current_context().memory_manager
        if hasattr(manager, "deallocations"):
            manager.deallocations.clear()


def _tell_what_is_shared() -> None:
    kept = producer.guard.do(producer.settle)
    sent = [block for block in [*producer.sent.values()] if block.reported]
    left = [block for block in sent if block.counter_value()]
    del kept
    if left:
        log.warning(
            "this process ends while %d of its arrays (%d bytes) are still shared: "
            "consumers that use them may fail, and later opens will; keep it running "
            "until its consumers are done",
            len(left),
            sum(block.nbytes for block in left),
        )
