"""The counter files of shared arrays, their locks, and the guard, in one process.

Descriptions of a file that were opened apart from each other are as good as other
processes: they exclude each other, and closing one is what the kernel does at death.
"""

import heapq
import os
import threading
import time

import pytest

from numba_symm.errors import ArgumentError, BackendError, ClosedError, ExchangeError
from numba_symm.launch import locks
from numba_symm.sharing import counters
from numba_symm.sharing.counters import CounterFile, FinalizerLock, Open, RefCounterFile
from numba_symm.sharing.sent import Producer, SentData
from tests.interrupts import interrupted


@pytest.fixture
def file():
    made = RefCounterFile("a name")
    yield made
    made.close()


def shared(file, opens):
    """Take the next slot for that many opens; return it and its serial."""
    slot = file.get_offset()
    file.set_counter(opens)
    file.rotate_offset()
    return slot, file.serial(slot)


def consumer_of(file):
    return CounterFile(*file.describe())


def take(file, slot, serial):
    """Take a reference and return its open."""
    opened = Open(slot, serial)
    file.take(opened)
    return opened


def test_the_members_of_the_source(file):
    assert file.handle() == "a name"
    assert file.have_offsets()
    assert file.offsets_in_use() == 0
    first = file.get_offset()
    assert file.get_offset() == first
    address = file.counter_ptr()
    assert address == file.address(first)
    file.set_counter(3)
    assert file.value(first) == 3
    file.rotate_offset()
    second = file.get_offset()
    assert second != first
    assert file.counter_ptr() == address + 8 * (second - first)
    assert file.offsets_in_use() == 1
    file.return_offset(first)
    assert file.offsets_in_use() == 0
    assert file.value(first) == 0


def test_slots_are_used_again(file):
    taken = [shared(file, 1)[0] for _ in range(counters.SLOTS)]
    assert sorted(taken) == list(range(counters.SLOTS))
    assert not file.have_offsets()
    with pytest.raises(BackendError, match="all 10000 counters of a name are in use"):
        file.get_offset()
    file.return_offset(1234)
    assert file.have_offsets()
    assert shared(file, 1) == (1234, 1)


def test_opens_take_what_is_unopened_and_then_add(file):
    slot, serial = shared(file, 2)
    there = consumer_of(file)
    opens = [take(there, slot, serial) for _ in range(3)]
    assert len({opened.number for opened in opens}) == 3
    assert (file.value(slot), file.unopened(slot)) == (3, 0)
    for opened in opens:
        assert file.take_released() == []
        there.give_back(opened)
        there.give_back(opened)  # does nothing
    assert file.value(slot) == 0
    assert file.take_released() == [slot]
    assert file.take_released() == [slot]  # until ``settled`` is called
    file.settled()
    assert file.take_released() == []
    assert there.idle
    with pytest.raises(ClosedError, match="no longer shared"):
        take(there, slot, serial)
    there.close()


def test_a_slot_that_is_used_again_refuses_what_names_its_last_use(file):
    slot, serial = shared(file, 1)
    there = consumer_of(file)
    assert there.cancel(slot, serial) == 1
    assert file.take_released() == [slot]
    file.return_offset(slot)
    file.settled()
    assert shared(file, 1) == (slot, serial + 1)
    stale_calls = (
        lambda: take(there, slot, serial),
        lambda: there.add(slot, serial, 1),
        lambda: there.check(slot, serial, b""),
    )
    for stale in stale_calls:
        with pytest.raises(ClosedError, match="no longer shared"):
            stale()
    assert there.cancel(slot, serial) == 0
    assert file.value(slot) == 1
    there.close()


def test_cancelling_leaves_what_is_open(file):
    slot, serial = shared(file, 5)
    there = consumer_of(file)
    opened = take(there, slot, serial)
    assert file.cancel(slot, serial) == 4
    assert file.cancel(slot, serial) == 0
    assert file.take_released() == []
    there.add(slot, serial, 2)
    assert (file.value(slot), file.unopened(slot)) == (3, 2)
    there.give_back(opened)
    assert there.cancel(slot, serial) == 2
    assert file.take_released() == [slot]
    there.close()


def test_the_references_of_the_dead_are_taken_back(file):
    slots = [shared(file, 2) for _ in range(4)]
    killed, alive = consumer_of(file), consumer_of(file)
    for slot in slots[:3]:
        take(killed, *slot)
    take(killed, *slots[0])
    kept = take(alive, *slots[0])
    own = take(file, *slots[1])
    assert file.cancel(*slots[1]) == 0
    file.cancel(*slots[2])
    assert file.take_released() == []
    killed.close()
    assert file.take_released() == [slots[2][0]]
    file.return_offset(slots[2][0])
    file.settled()
    assert [file.value(slot) for slot, _ in slots] == [1, 1, 0, 2]
    assert [file.unopened(slot) for slot, _ in slots] == [0, 0, 0, 2]
    alive.give_back(kept)
    file.give_back(own)
    assert set(file.take_released()) == {slots[0][0], slots[1][0]}
    alive.close()


def test_a_change_that_a_death_interrupts_is_corrected(file):
    slot, serial = shared(file, 3)
    there = consumer_of(file)
    take(there, slot, serial)
    there._unopened[slot] -= 1  # as if killed before the open was noted
    there.close()
    assert file.take_released() == []
    assert (file.value(slot), file.unopened(slot)) == (1, 1)
    other = consumer_of(file)
    other._counter[slot] = other._unopened[slot] = 0  # before it was linked
    other.close()
    assert file.take_released() == [slot]


def test_consumers_see_whether_the_producer_lives():
    file = RefCounterFile("short-lived")
    there = consumer_of(file)
    assert there.producer_is_alive()
    file.close()
    assert not there.producer_is_alive()
    there.close()


def test_changes_are_atomic_between_descriptions(file):
    slot, serial = shared(file, 1)
    threads, rounds = 4, 300
    file.add(slot, serial, 3 * threads * rounds)  # one for each open

    def work():
        there = consumer_of(file)
        for _ in range(rounds):
            held = [take(there, slot, serial) for _ in range(3)]
            there.add(slot, serial, 2)
            for opened in held:
                there.give_back(opened)
        there.close()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    left = 1 + 2 * threads * rounds  # every open took an unopened one
    assert file.value(slot) == file.unopened(slot) == left
    assert file.cancel(slot, serial) == left
    assert file.take_released() == [slot]


def test_the_guard_does_later_what_a_finaliser_asks_for():
    guard, done = FinalizerLock(), []

    def job():
        guard.later(lambda: done.append("later"))
        guard.now(lambda: done.append("now"))  # within the same thread
        return list(done)

    assert guard.do(job) == []
    assert done == ["later", "now"]


def test_what_comes_after_is_done_without_the_lock():
    done = []

    def after():
        if len(done) % 2:
            guard.now(lambda: done.append("after"))

    guard = FinalizerLock(after)
    guard.now(lambda: done.append("now"))
    guard.later(lambda: done.append("later"))
    guard.do_queued()
    assert done == ["now", "after", "later", "after"]


def test_an_error_of_a_later_job_is_logged_and_one_of_now_raised(caplog):
    guard, done = FinalizerLock(), []

    def fails():
        raise BackendError("mine")

    def queue():
        guard.later(fails)
        guard.later(lambda: done.append("next"))

    guard.do(queue)
    assert done == ["next"]
    assert "BackendError: mine" in caplog.text
    with pytest.raises(BackendError, match="mine"):
        guard.now(fails)
    guard.now(lambda: done.append("free again"))
    assert done[-1] == "free again"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(counters, "PATIENCE", 1.0)


def test_who_keeps_the_lock_is_named_at_the_deadline(file, impatient, caplog):
    slot, serial = shared(file, 3)
    stopped, there = consumer_of(file), consumer_of(file)
    mine = take(there, slot, serial)
    there.cancel(slot, serial)
    there.give_back(mine)
    mine = take(there, *shared(file, 2))
    stopped._process = 4711
    stopped._acquire()
    waits = (
        (file, file.take_released),
        (there, lambda: take(there, slot, serial)),
        (there, lambda: there.give_back(mine)),
        (there, lambda: there.add(slot, serial, 1)),
        (there, lambda: there.cancel(slot, serial)),
    )
    for one, call in waits:
        started, known = time.monotonic(), one.stuck
        with pytest.raises(ExchangeError, match=r"process 4711 .* locked for 1 s"):
            call()
        seconds = time.monotonic() - started
        assert (seconds < 0.9) if known else (seconds >= 1)
        assert one.stuck
    assert caplog.text.count("process 4711") == 2  # once for each who waited
    stopped.close()  # as if killed
    there.give_back(mine)
    assert file.take_released() == [slot]
    assert not file.stuck
    assert not there.stuck
    there.close()


DAMAGE = {
    "a circle": lambda file, free: file._next.__setitem__(free[1], free[0] + 1),
    "itself": lambda file, free: file._next.__setitem__(free[0], free[0] + 1),
    "no slot": lambda file, free: file._next.__setitem__(free[0], 123_456),
    "a negative one": lambda file, free: file._next.__setitem__(free[0], -1),
    "an unused one": lambda file, free: file._next.__setitem__(free[0], 5000),
    "no first": lambda file, free: file._released.__setitem__(0, -(1 << 62)),
    "one in use": lambda file, free: file._next.__setitem__(free[0], free[2] + 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_list_is_counted_again(file, caplog, damage):
    slots = [shared(file, 1) for _ in range(3)]
    there = consumer_of(file)
    taken = take(there, *slots[2])
    for slot in slots[:2]:
        there.cancel(*slot)
    there._slot[1000:1010] = 65535  # no slot
    DAMAGE[damage](there, [slot for slot, _ in reversed(slots[:2])] + [slots[2][0]])
    assert sorted(file.take_released()) == [slot for slot, _ in slots[:2]]
    assert "overwritten the counters" in caplog.text
    for slot, _ in slots[:2]:
        file.return_offset(slot)
    file.settled()
    assert file.value(slots[2][0]) == 1
    there.give_back(taken)
    assert file.take_released() == [slots[2][0]]
    there.close()


def test_handles_are_checked_by_what_was_recorded(file):
    slot, serial = shared(file, 1)
    there = consumer_of(file)
    digest = bytes(range(counters.DIGEST_BYTES))
    with pytest.raises(ArgumentError, match="altered"):
        there.check(slot, serial, digest)
    file.set_digest(slot, digest)
    there.check(slot, serial, digest)
    with pytest.raises(ArgumentError, match="altered"):
        there.check(slot, serial, digest[::-1])
    there.close()


def test_interrupts_leave_no_lock_and_no_half_change(file):
    slot, serial = shared(file, 5)
    there, other = consumer_of(file), consumer_of(file)
    opened = Open(slot, serial)

    def change():
        there.take(opened)
        there.give_back(opened, unused=True)

    def check():
        assert locks.try_lock(other._fd, counters._MUTEX)
        locks.unlock(other._fd, counters._MUTEX)
        taken = int(opened.number is not None)
        assert (file.value(slot), file.unopened(slot) + taken) == (5, 5)
        there.give_back(opened, unused=True)
        assert (file.value(slot), file.unopened(slot)) == (5, 5)
        assert there.idle

    assert interrupted(change, check, 6000) > 1000
    there.close()
    other.close()


def test_interrupts_leave_no_guard_held():
    guard, done = FinalizerLock(), []

    def work():
        guard.do(lambda: done.append("now"))
        guard.later(lambda: done.append("later"))

    def check():
        assert not guard._lock._is_owned()

    assert interrupted(work, check, 10_000) > 2000
    guard.do_queued()
    assert {*done} == {"now", "later"}


def test_nobody_can_change_the_size_of_a_file(file):
    there = consumer_of(file)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(there._fd, size)
    assert file.value(0) == 0  # else SIGBUS
    there.close()


INTERRUPTED = {
    "before it is forgotten": (SentData, "forget", lambda block: None),
    "before its slot is free": (heapq, "heappush", heapq.heappush),
    "after": (RefCounterFile, "return_offset", RefCounterFile.return_offset),
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_entry_whose_end_a_signal_interrupts_is_forgotten_by_the_next_try(
    file, monkeypatch, when
):
    """The number of events in use is limited. No slot has two arrays."""
    producer, made = Producer(), []
    monkeypatch.setattr("numba_symm.sharing.sent.producer", producer)
    producer.files.append(file)
    producer.new("memory", 0, 1, made)
    made[0].event, producer.events = "event", 1

    where, name, before = INTERRUPTED[when]

    def interrupt(*args):
        before(*args)
        raise KeyboardInterrupt  # by a handler: when a function starts, or a call ends

    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            producer.withdraw(made)
    producer.withdraw(made)
    assert producer.events == 0
    assert not producer.sent
    assert file.offsets_in_use() == 0
    slots = [shared(file, 1)[0] for _ in range(counters.SLOTS)]
    assert len(set(slots)) == counters.SLOTS
