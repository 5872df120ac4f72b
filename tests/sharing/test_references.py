"""References to arrays of other processes: counted, cancelled, given back."""

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
