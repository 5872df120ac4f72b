"""References to arrays of other processes: counted, cancelled, given back."""

import pickle

import numpy as np
import pytest

import numba_symm as ns
from numba_symm import sharing
from numba_symm.environment import SIMULATED
from numba_symm.gpu import arrays
from numba_symm.memory.backends import Allocation
from tests.sharing.work import (
    OVER,
    SIZE,
    are,
    becomes,
    copied,
    error_of,
    nothing_is_shared,
    numbers,
    say,
)
from tests.spawned import run_ranks


def counts(comm):
    facts = {}
    if comm.rank == 0:
        x = numbers(SIZE)
        handle = ns.share(x, opens=2)
        facts["shared"] = sharing.stats()
        copy = pickle.loads(pickle.dumps(handle))
        facts["equal"] = copy == handle
        del copy
        facts["a copy dropped"] = sharing.stats()
        say(comm, handle)
        comm.barrier()  # opened twice
        sharing.collect()
        facts["two opened"] = sharing.stats()
        comm.barrier()
        comm.barrier()  # opened a third time
        facts["three opened"] = sharing.stats()
        value = sharing.sent.producer.sent[handle.file, handle.slot].counter_value()
        facts["counter"] = value
        comm.barrier()
        comm.barrier()  # all given back
        facts["given back"] = sharing.collect(), sharing.stats()
        facts["opened here"] = error_of(ns.open_shared, handle)
        comm.barrier()
        return facts, are(x, SIZE)
    handle = say(comm)
    text = pickle.dumps(handle)
    opened = [ns.open_shared(handle), ns.open_shared(pickle.loads(text))]
    comm.barrier()
    comm.barrier()
    opened.append(ns.open_shared(handle))  # one more than ``opens``
    facts["mappings"] = sharing.stats().mappings
    comm.barrier()
    comm.barrier()
    facts["right"] = all(are(x, SIZE) for x in opened)
    opened.clear()
    comm.barrier()
    comm.barrier()
    facts["over"] = error_of(ns.open_shared, handle)
    return facts, nothing_is_shared()


def test_references_are_counted():
    (producer, unharmed), (consumer, clean) = run_ranks(2, counts)
    one = sharing.Stats(limbo=0, mappings=0, counters=1, events=0, unopened=2)
    events = producer["shared"].events
    assert events in (0, 1)  # the simulator has none

    def with_unopened(unopened):
        return sharing.Stats(0, 0, one.counters, events, unopened)

    assert producer["shared"] == with_unopened(2)
    assert producer["equal"]
    assert producer["a copy dropped"] == with_unopened(2)
    assert producer["two opened"] == with_unopened(0)
    assert producer["three opened"] == with_unopened(0)
    assert producer["counter"] == 3
    assert producer["given back"] == (True, sharing.Stats(0, 0, 0, 0, 0))
    assert producer["opened here"].startswith(OVER)
    assert unharmed
    assert consumer["mappings"] == 1
    assert consumer["right"]
    assert consumer["over"].startswith(OVER)
    assert clean


def cancels(comm):
    facts = []
    if comm.rank == 0:
        x = numbers(SIZE)
        handles = [ns.share(x, opens=3) for _ in range(3)]
        say(comm, handles)
        comm.barrier()  # the consumer has opened the first, and cancelled the last
        facts.append([handle.cancel() for handle in handles])
        facts.append([handle.cancel() for handle in handles])
        comm.barrier()
        sharing.collect()
        facts.append(sharing.stats().counters)
        comm.barrier()
        comm.barrier()
        return facts, nothing_is_shared()
    handles = say(comm)
    x = ns.open_shared(handles[0])
    facts.append(handles[2].cancel())
    comm.barrier()
    comm.barrier()
    facts.append(error_of(ns.open_shared, handles[1]))
    facts.append(error_of(ns.open_shared, handles[2]))
    another = ns.open_shared(handles[0])  # the first is still out
    facts.append(are(another, SIZE) and are(x, SIZE))
    comm.barrier()  # the producer has looked
    del x, another
    comm.barrier()
    return facts, nothing_is_shared()


def test_unopened_references_can_be_cancelled():
    (producer, clean), (consumer, also) = run_ranks(2, cancels)
    assert producer[:2] == [[2, 3, 0], [0, 0, 0]]
    assert producer[2] == 1
    assert consumer[0] == 3
    assert all(text.startswith(OVER) for text in consumer[1:3])
    assert consumer[3]
    assert clean
    assert also


def opens_its_own(comm):
    x = numbers(SIZE)
    handle = ns.share(x, opens=2)
    first, second = ns.open_shared(handle), ns.open_shared(handle)
    same = arrays.view(first, "").address == arrays.view(second, "").address
    if not SIMULATED:
        same = same and arrays.view(x, "").address == arrays.view(first, "").address
    del x
    right = are(first, SIZE)
    limbo = sharing.stats()
    first.close()
    second_is_well = are(second, SIZE)
    del first
    view = second[10:20]
    del second
    still = sharing.collect(), are(view, 10, 10)
    del view
    return same, right, limbo.limbo, second_is_well, still, nothing_is_shared()


def test_the_producer_opens_its_own_without_inter_process_handles():
    assert run_ranks(1, opens_its_own) == [(True, True, 1, True, (False, True), True)]


def keeps_in_limbo(comm, how):
    if comm.rank == 0:
        x = numbers(SIZE)
        say(comm, ns.share(x))
        del x
        before = sharing.stats()
        comm.barrier()  # opened
        sharing.collect()
        during = sharing.stats()
        comm.barrier()
        comm.barrier()  # given back
        kept = sharing.stats().limbo
        if how == "collect":
            sharing.collect()
        elif how == "share":
            y = numbers(3)
            ns.share(y).cancel()
        else:
            fails_once().alloc(100)
        left = sharing.stats()
        comm.barrier()
        return before.limbo, during.limbo, kept, left.limbo
    x = ns.open_shared(say(comm))
    comm.barrier()
    right = are(x, SIZE)
    comm.barrier()
    x.close()
    comm.barrier()
    comm.barrier()
    return right, nothing_is_shared()


def fails_once():
    """Return an allocator whose first allocation fails."""

    class Backend:
        failed = False

        def allocate(self, nbytes, ranks):
            if not self.failed:
                self.failed = True
                raise ns.BackendError("no memory")
            return Allocation(4096, nbytes, None)

    return ns.SymmetricMemoryAllocator(Backend())


@pytest.mark.parametrize("how", ["collect", "share", "failed allocation"])
def test_dropped_memory_waits_in_limbo_until_it_is_given_back(how):
    producer, consumer = run_ranks(2, keeps_in_limbo, how)
    assert producer == (1, 1, 1, 0)
    assert consumer == (True, True)


def shares_parts(comm):
    if comm.rank == 0:
        x = numbers(SIZE)
        if SIMULATED:  # where only a communicator's memory is shared in place
            own = ns.Communicator(comm.among([0]), timeout=60)
            x = own.empty(SIZE, np.float32)
            x.copy_to_device(np.arange(SIZE, dtype=np.float32))
        say(comm, [ns.share(x[start : start + 10]) for start in range(0, 500, 10)])
        comm.barrier()
        del x
        gone = becomes(nothing_is_shared)
        comm.barrier()
        return gone
    parts = [ns.open_shared(handle) for handle in say(comm)]
    right = [are(part, 10, 10 * index) for index, part in enumerate(parts)]
    mappings = [sharing.stats().mappings]
    del parts[1:]
    mappings.append(sharing.stats().mappings)
    del parts[0]
    mappings.append(sharing.stats().mappings)
    comm.barrier()
    comm.barrier()
    return all(right), mappings


def test_one_mapping_for_all_arrays_of_an_allocation():
    assert run_ranks(2, shares_parts) == [True, (True, [1, 1, 0])]


def closes(comm):
    if comm.rank == 0:
        x = numbers(SIZE)
        handle = say(comm, ns.share(x))
        comm.barrier()
        sharing.collect()
        return sharing.stats().counters, error_of(ns.open_shared, handle)
    handle = say(comm)
    x = ns.open_shared(handle)
    view = x[3:4]
    kernel = copied(x)  # compiled, and with Numba's caches of x filled
    x.close()
    x.close()
    del view
    uses = {
        "copy_to_host": x.copy_to_host,
        "slice": lambda: x[1:2],
        "kernel": lambda: copied(x),
        "write": lambda: x.copy_to_device(np.zeros(SIZE, np.float32)),
        "share": lambda: ns.share(x),
        "interface": lambda: arrays.view(x, "use"),
    }
    if SIMULATED:  # a kernel's threads raise it there
        del uses["kernel"]
    errors = {name: error_of(use) for name, use in uses.items()}
    del kernel
    comm.barrier()
    return errors, nothing_is_shared()


def test_closing_twice_and_use_after_closing():
    (counters, over), (errors, clean) = run_ranks(2, closes)
    assert counters == 0
    assert over.startswith(OVER)
    for use, error in errors.items():
        assert error.startswith("ClosedError: this shared array was closed"), use
    assert clean


def shares_on(comm):
    """A, B and C are ranks 0, 1 and 2."""
    if comm.rank == 0:
        x = numbers(SIZE)
        say(comm, ns.share(x))
        del x
        say(comm)
        comm.barrier()  # B has closed, C has opened
        sharing.collect()
        during = sharing.stats()
        comm.barrier()
        gone = becomes(nothing_is_shared)
        comm.barrier()
        return during.limbo, gone
    if comm.rank == 1:
        handle = say(comm)
        x = ns.open_shared(handle)
        on = ns.share(x, opens=1)
        part = ns.share(x[100:200])
        say(comm, (on, part))
        x.close()
        comm.barrier()
        comm.barrier()
        comm.barrier()
        return on == handle, sharing.stats().counters
    say(comm)
    on, part = say(comm)
    x, y = ns.open_shared(on), ns.open_shared(part)
    right = are(x, SIZE) and are(y, 100, 100)
    mappings = sharing.stats().mappings
    comm.barrier()
    comm.barrier()  # A has looked
    del x, y
    comm.barrier()
    return right, mappings, nothing_is_shared()


def test_a_received_array_is_shared_on():
    facts = run_ranks(3, shares_on)
    assert facts == [(1, True), (True, 0), (True, 1, True)]


def three_open(comm):
    if comm.rank == 0:
        x = numbers(SIZE)
        say(comm, ns.share(x, opens=3))
        del x
        comm.barrier()
        limbo = sharing.stats().limbo
        comm.barrier()
        return limbo, becomes(nothing_is_shared)
    x = ns.open_shared(say(comm))
    comm.barrier()
    right = are(x, SIZE)
    comm.barrier()
    if comm.rank == 1:
        x.close()
    del x
    return right, nothing_is_shared()


def test_three_consumers():
    assert run_ranks(4, three_open) == [(1, True)] + [(True, True)] * 3
