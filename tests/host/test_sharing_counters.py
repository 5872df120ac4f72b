"""The counter files of shared arrays, their locks, and the guard, in one process.

Descriptions of a file that were opened apart from each other are as good as other
processes: they exclude each other, and closing one is what the kernel does at death.
"""

import gc
import threading

import numpy as np
import pytest

from numba_symm.errors import BackendError, ClosedError
from numba_symm.sharing import counters
from numba_symm.sharing.counters import CounterFile, RefCounterFile
from numba_symm.sharing.guard import Guard
from numba_symm.sharing.layout import Layout


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
    numbers = [there.take(slot, serial) for _ in range(3)]
    assert len(set(numbers)) == 3
    assert (file.value(slot), file.unopened(slot)) == (3, 0)
    for number in numbers:
        assert file.take_released() == []
        there.give_back(number)
    assert file.value(slot) == 0
    assert file.take_released() == [slot]
    assert file.take_released() == []
    assert there.idle
    with pytest.raises(ClosedError, match="shared no more"):
        there.take(slot, serial)
    there.close()


def test_a_slot_that_is_used_again_refuses_what_names_its_last_use(file):
    slot, serial = shared(file, 1)
    there = consumer_of(file)
    assert there.cancel(slot, serial) == 1
    assert file.take_released() == [slot]
    file.return_offset(slot)
    assert shared(file, 1) == (slot, serial + 1)
    for stale in (there.take, lambda *name: there.add(*name, 1)):
        with pytest.raises(ClosedError, match="shared no more"):
            stale(slot, serial)
    assert there.cancel(slot, serial) == 0
    assert file.value(slot) == 1
    there.close()


def test_cancelling_leaves_what_is_open(file):
    slot, serial = shared(file, 5)
    there = consumer_of(file)
    number = there.take(slot, serial)
    assert file.cancel(slot, serial) == 4
    assert file.cancel(slot, serial) == 0
    assert file.take_released() == []
    there.add(slot, serial, 2)
    assert (file.value(slot), file.unopened(slot)) == (3, 2)
    there.give_back(number)
    assert there.cancel(slot, serial) == 2
    assert file.take_released() == [slot]
    there.close()


def test_the_references_of_the_dead_are_taken_back(file):
    slots = [shared(file, 2) for _ in range(4)]
    killed, alive = consumer_of(file), consumer_of(file)
    for slot, serial in slots[:3]:
        killed.take(slot, serial)
    killed.take(*slots[0])
    kept = alive.take(*slots[0])
    own = file.take(*slots[1])
    assert file.cancel(*slots[1]) == 0
    file.cancel(*slots[2])
    assert file.take_released() == []
    killed.close()
    assert file.take_released() == [slots[2][0]]
    assert [file.value(slot) for slot, _ in slots] == [1, 1, 0, 2]
    assert [file.unopened(slot) for slot, _ in slots] == [0, 0, 0, 2]
    alive.give_back(kept)
    file.give_back(own)
    assert set(file.take_released()) == {slots[0][0], slots[1][0]}
    alive.close()


def test_a_death_amid_a_change_is_made_up_for(file):
    slot, serial = shared(file, 3)
    there = consumer_of(file)
    there.take(slot, serial)
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
            held = [there.take(slot, serial) for _ in range(3)]
            there.add(slot, serial, 2)
            for number in held:
                there.give_back(number)
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


def test_opens_of_one_consumer_lie_together(file):
    slot, serial = shared(file, 1)
    first, second = consumer_of(file), consumer_of(file)
    numbers = [(first.take(slot, serial), second.take(slot, serial)) for _ in range(50)]
    mine = [number for number, _ in numbers]
    assert mine == list(range(mine[0], mine[0] + 50))
    assert len(file._alive()) == 100
    first.give_back(mine[7])
    assert first.take(slot, serial) == mine[7]
    first.close()
    second.close()


def test_the_guard_does_later_what_a_finaliser_asks_for():
    guard, done = Guard(), []
    with guard:
        guard.later(lambda: done.append("later"))
        guard.now(lambda: done.append("now"))  # within the same thread
        assert done == []
    assert done == ["later", "now"]


def test_what_a_job_leaves_is_done_without_the_lock():
    guard, done = Guard(), []

    def job():
        return lambda: guard.now(lambda: done.append("follow-up"))

    guard.now(job)
    guard.later(job)
    assert done == ["follow-up"] * 2


def test_an_error_of_a_later_job_is_logged_and_one_of_now_raised(caplog):
    guard, done = Guard(), []

    def fails():
        raise ValueError("mine")

    with guard:
        guard.later(fails)
        guard.later(lambda: done.append("next"))
    assert done == ["next"]
    assert "ValueError: mine" in caplog.text
    with pytest.raises(ValueError, match="mine"):
        guard.now(fails)
    guard.now(lambda: done.append("free again"))
    assert done[-1] == "free again"


def test_jobs_of_other_threads_are_not_lost():
    guard, done, rounds = Guard(), [], 2000

    def work():
        for i in range(rounds):
            if i % 2:
                guard.later(lambda: done.append(1))
            else:
                with guard:
                    done.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4 * rounds


def test_the_extent_of_layouts():
    dtype = np.dtype(np.int32)
    assert Layout(0, (3, 5), (20, 4), dtype).extent == (0, 60)
    assert Layout(0, (3,), (-8,), dtype).extent == (-16, 4)
    assert Layout(0, (3, 0), (0, 4), dtype).extent == (0, 0)
    assert Layout(0, (), (), dtype).extent == (0, 4)
    assert Layout(8, (2, 2), (0, 16), dtype).extent == (0, 20)


def test_files_go_with_their_objects():
    made = [RefCounterFile("many") for _ in range(10)]
    readers = [consumer_of(file) for file in made]
    for one in (*readers, *made):
        one.close()
    gc.collect()
