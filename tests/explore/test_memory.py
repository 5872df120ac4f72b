"""The memory model permits some outcomes of classic small cases, and no others."""

from itertools import product

import pytest

from explore import intrinsics
from explore.intrinsics import (
    fence_acq_rel_sys,
    ld_acquire_sys_u32,
    ld_relaxed_sys_u32,
    ld_relaxed_sys_v2_u64,
    ld_u32,
    ld_u64,
    ld_v2_u64,
    poll_pause,
    st_relaxed_sys_u32,
    st_relaxed_sys_v2_u64,
    st_release_sys_u32,
    st_u32,
    st_u64,
    syncthreads,
    thread_index,
)
from explore.launches import Launch
from explore.memory import Finding
from explore.scheduler import STEP, Machine

add_relaxed = intrinsics.atom_add_relaxed_sys_u32
add_acquire = intrinsics.atom_add_acquire_sys_u32
add_release = intrinsics.atom_add_release_sys_u32

SCHEDULES = 300


def outcomes(*kernels, threads=1, races=True):
    """Return the outcomes of kernels, one a rank: tuples of the values they loaded."""
    found = set()
    for seed in range(SCHEDULES):
        machine = Machine(len(kernels), 1, threads, seed)
        machine.memory.races = races
        x, y = (machine.memory.map(name, 16, fill=0) for name in "xy")
        seen = []
        machine.run([[Launch(kernel, 1, (x, y, seen))] for kernel in kernels])
        found.add(tuple(seen))
    return found


def writer(store):
    def kernel(x, y, seen):
        yield from st_relaxed_sys_u32(x, 1)
        yield from store(y, 1)

    return kernel


def reader(load):
    def kernel(x, y, seen):
        flag = yield from load(y)
        data = yield from ld_relaxed_sys_u32(x)
        seen += [flag, data]

    return kernel


def test_relaxed_stores_may_arrive_out_of_order():
    found = outcomes(writer(st_relaxed_sys_u32), reader(ld_relaxed_sys_u32))
    assert found == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_release_alone_does_not_order_the_readers_loads():
    assert (1, 0) in outcomes(writer(st_release_sys_u32), reader(ld_relaxed_sys_u32))


def test_an_acquire_alone_does_not_order_the_writers_stores():
    assert (1, 0) in outcomes(writer(st_relaxed_sys_u32), reader(ld_acquire_sys_u32))


def test_an_acquire_of_a_release_shows_what_came_before():
    found = outcomes(writer(st_release_sys_u32), reader(ld_acquire_sys_u32))
    assert found == {(0, 0), (0, 1), (1, 1)}


def test_fences_order_relaxed_accesses():
    def write(x, y, seen):
        yield from st_relaxed_sys_u32(x, 1)
        yield from fence_acq_rel_sys()
        yield from st_relaxed_sys_u32(y, 1)

    def read(x, y, seen):
        flag = yield from ld_relaxed_sys_u32(y)
        yield from fence_acq_rel_sys()
        data = yield from ld_relaxed_sys_u32(x)
        seen += [flag, data]

    assert outcomes(write, read) == {(0, 0), (0, 1), (1, 1)}


def test_loads_of_one_address_never_go_back():
    def write(x, y, seen):
        yield from st_relaxed_sys_u32(x, 1)
        yield from st_relaxed_sys_u32(x, 2)

    def read(x, y, seen):
        first = yield from ld_relaxed_sys_u32(x)
        second = yield from ld_relaxed_sys_u32(x)
        seen += [first, second]

    everything = {(a, b) for a in range(3) for b in range(a, 3)}
    assert outcomes(write, read) == everything


def test_a_store_may_arrive_after_a_later_load():
    def kernel(x, y, seen):
        yield from st_relaxed_sys_u32(x, 1)
        seen.append((yield from ld_relaxed_sys_u32(y)))

    def other(x, y, seen):
        yield from st_relaxed_sys_u32(y, 1)
        seen.append((yield from ld_relaxed_sys_u32(x)))

    assert (0, 0) in outcomes(kernel, other)


def test_a_packet_comes_in_halves_but_its_halves_in_one_piece():
    def write(x, y, seen):
        yield from st_relaxed_sys_v2_u64(x, (1 << 32 | 1, 1 << 32 | 1))

    def read(x, y, seen):
        seen += yield from ld_relaxed_sys_v2_u64(x)

    assert outcomes(write, read) == {*product((0, 1 << 32 | 1), repeat=2)}


def two_stores(fence, by_kernel=False, ends_count=True):
    """Return the final values of x: rank 0 stores 1, and after that rank 1 stores 2."""

    def write(x, y):
        yield from st_relaxed_sys_u32(x, 1)

    def tell(x, y):
        yield from fence()
        yield from st_relaxed_sys_u32(y, 1)

    def write_and_tell(x, y):
        yield from write(x, y)
        yield from tell(x, y)
        while (yield from ld_relaxed_sys_u32(y)) != 2:  # the kernel must not end before
            yield from poll_pause()

    def follow(x, y):
        while (yield from ld_relaxed_sys_u32(y)) == 0:
            yield from poll_pause()
        yield from fence()
        yield from st_relaxed_sys_u32(x, 2)
        yield from st_relaxed_sys_u32(y, 2)

    first = [write, tell] if by_kernel else [write_and_tell]
    found = set()
    for seed in range(SCHEDULES):
        machine = Machine(2, 1, 1, seed)
        machine.memory.ends_count = ends_count
        args = tuple(machine.memory.map(name, 4, fill=0) for name in "xy")
        machine.run([[Launch(k, 1, args) for k in ks] for ks in (first, [follow])])
        found.add(machine.memory.final(args[0], 4))
    return found


def no_fence():
    yield STEP


def test_stores_to_one_address_take_effect_in_any_order_without_fences():
    assert two_stores(no_fence) == {1, 2}


def test_stores_to_one_address_take_effect_in_the_order_that_fences_give():
    assert two_stores(fence_acq_rel_sys) == {2}


def test_a_kernels_stores_take_effect_before_its_rank_goes_on():
    assert two_stores(no_fence, by_kernel=True) == {2}
    assert two_stores(no_fence, by_kernel=True, ends_count=False) == {1, 2}


def both_threads(before, after):
    """A block whose thread 1 stores data, and whose thread 0 releases it."""

    def write(x, y, seen):
        if thread_index() == 1:
            yield from st_u64(x, 1)
        if before:
            yield from syncthreads()
        if thread_index() == 0:
            yield from st_release_sys_u32(y, 1)

    def read(x, y, seen):
        while thread_index() == 0 and (yield from ld_acquire_sys_u32(y)) == 0:
            yield from poll_pause()
        if after:
            yield from syncthreads()
        if thread_index() == 1:
            seen.append((yield from ld_v2_u64(x))[0])

    return write, read


def test_syncthreads_orders_before_a_release_and_after_an_acquire():
    assert outcomes(*both_threads(True, True), threads=2) == {(1,)}


@pytest.mark.parametrize("before", [True, False])
def test_without_syncthreads_other_threads_of_the_block_race(before):
    kernels = both_threads(before, not before)
    assert (0,) in outcomes(*kernels, threads=2, races=False)
    with pytest.raises(Finding, match="race"):
        outcomes(*kernels, threads=2)


def test_a_kernel_loads_what_the_one_before_it_stored():
    def write(x, seen):
        if thread_index() == 1:
            yield from st_u32(x, 1)

    def read(x, seen):
        seen.append((yield from ld_u32(x)))

    for seed in range(SCHEDULES):
        machine = Machine(1, 1, 2, seed)
        args = machine.memory.map("x", 4, fill=0), []
        machine.run([[Launch(write, 1, args), Launch(read, 1, args)]])
        assert args[-1] == [1, 1]


def write(x, y, seen):
    if thread_index() == 0:
        yield from st_relaxed_sys_u32(x, 1)


def write_and_fence(x, y, seen):
    yield from st_relaxed_sys_u32(x, 1)
    yield from fence_acq_rel_sys()


def write_and_tell(x, y, seen):
    yield from st_relaxed_sys_u32(x, 1)
    yield from st_release_sys_u32(y, 1)


def tell(x, y, seen):
    yield from st_relaxed_sys_u32(y, 1)


def wait(x, y, seen):
    while (yield from ld_acquire_sys_u32(y)) == 0:
        yield from poll_pause()


def wait_and_read(x, y, seen):
    yield from wait(x, y, seen)
    yield from read(x, y, seen)


def read(x, y, seen):
    seen.append((yield from ld_relaxed_sys_u32(x)))


@pytest.mark.parametrize(
    ("assumption", "streams"),
    [
        ("starts_see", [[write, read]]),
        ("copies_end", [[write, read]]),
        ("starts_inherit", [[write_and_tell], [wait, read]]),
        ("fences_carry", [[write_and_fence, tell], [wait_and_read]]),
    ],
)
def test_earlier_kernels_are_visible_unless_that_is_dropped(assumption, streams):
    def seen_with(assumed):
        found = set()
        for seed in range(SCHEDULES):
            machine = Machine(len(streams), 1, 2, seed)
            setattr(machine.memory, assumption, assumed)
            x, y = (machine.memory.map(name, 4, fill=0) for name in "xy")
            seen = []
            machine.run(
                [
                    [Launch(k, 1, (x, y, seen), is_copy=k is write) for k in kernels]
                    for kernels in streams
                ]
            )
            found |= set(seen)
        return found

    assert seen_with(True) == {1}
    assert seen_with(False) == {0, 1}


def alone(kernel, threads=1):
    machine = Machine(1, 1, threads, 0)
    machine.run([[Launch(kernel, 1, (machine.memory.map("x", 8),))]])


def test_a_load_of_unwritten_memory_is_reported():
    with pytest.raises(Finding, match="unset"):
        alone(ld_u64)


@pytest.mark.parametrize("offset", [-8, 8, 1 << 30])
def test_an_access_outside_all_memory_is_reported(offset):
    with pytest.raises(Finding, match="outside"):
        alone(lambda x: st_u64(x + offset, 1))


def test_a_wait_that_nothing_ends_is_a_deadlock():
    def kernel(x):
        yield from st_relaxed_sys_u32(x, 0)
        while (yield from ld_relaxed_sys_u32(x)) == 0:
            yield from poll_pause()

    with pytest.raises(Finding, match="deadlock"):
        alone(kernel)


def test_a_thread_that_leaves_the_others_at_syncthreads_is_reported():
    def kernel(x):
        if thread_index() == 0:
            yield from syncthreads()

    with pytest.raises(Finding, match="divergence"):
        alone(kernel, threads=2)


def test_no_update_is_lost():
    def kernel(x, y, seen):
        seen.append((yield from add_relaxed(x, 1)))

    assert {frozenset(each) for each in outcomes(*[kernel] * 3)} == {
        frozenset(range(3))
    }


def test_a_relaxed_store_comes_before_or_after_an_update():
    def store(x, y, seen):
        yield from st_relaxed_sys_u32(x, 10)

    def add(x, y, seen):
        for _ in range(2):
            seen.append((yield from add_relaxed(x, 1)))

    assert outcomes(store, add) == {(0, 1), (0, 10), (10, 11)}


def test_a_weak_load_races_with_an_update():
    def add(x, y, seen):
        yield from add_relaxed(x, 1)

    def load(x, y, seen):
        yield from ld_u32(x)

    with pytest.raises(Finding, match="race"):
        outcomes(add, load)


@pytest.mark.parametrize(
    ("publish", "take", "ordered"),
    [
        (add_release, add_acquire, True),
        (add_relaxed, add_acquire, False),
        (add_release, add_relaxed, False),
    ],
)
def test_updates_in_order_show_what_came_before(publish, take, ordered):
    """The update of a third rank in between continues the release."""

    def first(x, y, seen):
        yield from st_relaxed_sys_u32(x, 1)
        yield from publish(y, 1)

    def between(x, y, seen):
        yield from add_relaxed(y, 10)

    def last(x, y, seen):
        count = yield from take(y, 100)
        seen += [count, (yield from ld_relaxed_sys_u32(x))]

    found = outcomes(first, between, last)
    assert {count for count, _ in found} == {0, 1, 10, 11}
    stale = {(1, 0), (11, 0)} & found
    assert bool(stale) != ordered
