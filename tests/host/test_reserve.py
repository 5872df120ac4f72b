"""Memory of dropped outputs: when it is used again, and when it is freed."""

import itertools
from types import SimpleNamespace

import pytest

from numba_symm import errors
from numba_symm.gpu import driver, loads

MIB = 1 << 20
CAPTURE = SimpleNamespace(name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")  # is true


class Gpu:
    """Memory and events of a context of 100 MiB, whose work is done when told to be.

    Attributes:
        calls: the names of calls that may wait for the GPU, in order.
    """

    def __init__(self):
        self.addresses = itertools.count(512, 1 << 40)
        self.owned = {}
        self.recorded = []  # events whose work is not done
        self.calls = []
        self.version = 13000
        self.capturing = False

    def function(self, name):
        return getattr(self, name)

    def call(self, name, *args):
        status, *found = getattr(self, name)(*args)
        if status:
            raise errors.DriverError(name)
        return found[0] if found else None

    def cuDriverGetVersion(self):
        return 0, self.version

    def cuMemGetInfo(self):
        return 0, (1, 100 * MIB)

    def cuMemAlloc(self, size):
        if sum(self.owned.values()) + size > 100 * MIB:
            return (2,)
        address = next(self.addresses)
        self.owned[address] = size
        return 0, address

    def cuMemFree(self, address):
        self.calls.append("free")
        assert not self.recorded, "the driver would wait for the GPU"
        del self.owned[address]
        return (0,)

    def cuEventCreate(self, flags):
        return 0, object()

    def cuCtxRecordEvent(self, context, event):
        assert event not in self.recorded
        if self.capturing:
            return (CAPTURE,)
        self.recorded.append(event)
        return (0,)

    def cuEventQuery(self, event):
        return (event in self.recorded,)

    def cuCtxSynchronize(self):
        self.calls.append("wait")
        self.recorded.clear()
        return (0,)


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    monkeypatch.setattr(driver, "function", found.function)
    monkeypatch.setattr(driver, "call", found.call)
    loads._records.cache_clear()
    yield found
    loads._records.cache_clear()


@pytest.fixture
def held(gpu):
    return loads.Reserve(context=1)


def test_memory_is_used_again_after_all_work_before_its_drop(gpu, held):
    first = held.take(1000)
    other = held.take(9 * MIB)
    held.drop(first)
    second = held.take(1000)  # work that was enqueued before the drop is not done
    assert second != first
    held.drop(second)
    third = held.take(1000)
    gpu.recorded.pop(0)  # what came before the first drop
    assert held.take(1020) == first
    assert held.take(1020) not in (first, second, third)
    gpu.recorded.pop(0)
    assert held.take(1000) == second
    held.drop(other)
    gpu.recorded.clear()
    assert held.take(8 * MIB) != other  # too large for that
    assert gpu.calls == []


def test_a_drop_between_the_event_and_its_entry_waits_for_a_later_event(gpu, held):
    first, second = held.take(1), held.take(1)
    held.drop(first)
    record = gpu.cuCtxRecordEvent

    def record_and_drop(context, event):
        gpu.cuCtxRecordEvent = record
        found = record(context, event)
        held.drop(second)
        return found

    gpu.cuCtxRecordEvent = record_and_drop
    third = held.take(1)
    assert third not in (first, second)
    gpu.recorded.clear()
    assert held.take(1) == first
    assert held.take(1) != second


def test_a_fifth_of_the_memory_is_kept_then_the_host_waits(gpu, held):
    rooms = [held.take(MIB) for _ in range(21)]
    for room in rooms:
        held.drop(room)
    again = held.take(MIB)  # after a wait; none is freed
    assert again in rooms
    assert gpu.calls == ["wait"]
    held.drop(again)
    held.take(2 * MIB)  # what is kept is freed, because none has this size
    assert gpu.calls == ["wait", "wait", *21 * ["free"]]
    assert list(gpu.owned.values()) == [2 * MIB]


def test_without_room_what_is_kept_is_freed_first(gpu, held):
    small, large = held.take(10 * MIB), held.take(80 * MIB)
    held.drop(small)
    kept = held.take(20 * MIB)
    assert gpu.calls == ["wait", "free"]
    assert set(gpu.owned) == {large[0], kept[0]}
    with pytest.raises(errors.DriverError, match="cuMemAlloc"):
        held.take(20 * MIB)


def test_a_capture_refuses_and_loses_nothing(gpu, held):
    first = held.take(100)
    held.drop(first)
    gpu.capturing = True
    with pytest.raises(errors.ArgumentError, match="pass out= while a stream is being"):
        held.take(100)
    gpu.capturing = False
    held.take(100)
    gpu.recorded.clear()
    assert held.take(100) == first


def test_an_older_driver_waits_only_beyond_the_limit(gpu):
    gpu.version = 12040
    held = loads.Reserve(context=1)
    rooms = [held.take(MIB) for _ in range(21)]
    for room in rooms[:20]:
        held.drop(room)
    assert held.take(MIB) not in rooms
    assert gpu.calls == []
    held.drop(rooms[20])
    assert held.take(MIB) in rooms
    assert gpu.calls == ["wait"]
    held.release()
    assert len(gpu.owned) == 2


def test_a_forked_child_uses_nothing_of_its_parent(gpu, held):
    rooms = [held.take(100) for _ in range(3)]
    for room in rooms:
        held.drop(room)
        held.take(5000)
        gpu.recorded.clear()
    held.disown()
    assert held.take(100) not in rooms
    held.release()
    assert gpu.calls == []


def test_a_gpu_is_idle_if_all_work_is_done(gpu, held):
    """Each call looks at one event, and no call waits."""
    assert not held.is_idle()
    assert not held.is_idle()
    (event,) = gpu.recorded
    gpu.recorded.clear()
    gpu.cuCtxRecordEvent = lambda context, event: (0,)  # passes immediately
    assert held.is_idle()
    assert held.is_idle()
    assert held._events == [event]
    gpu.version = 12040
    loads._records.cache_clear()
    assert not held.is_idle()
    assert gpu.calls == []
