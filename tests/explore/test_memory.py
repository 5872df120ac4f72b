"""The memory model permits some outcomes of classic small cases, and no others."""

from itertools import product

import pytest

from explore import intrinsics
from explore.intrinsics import (
    fence_acq_rel_sys,
    ld_acquire_sys_u32,
    ld_relaxed_sys_u32,
    ld_relaxed_sys_v2_u64,
    ld_u64,
    poll_pause,
    st_relaxed_sys_u32,
    st_relaxed_sys_v2_u64,
    st_release_sys_u32,
    st_u64,
    syncthreads,
    thread_index,
)
from explore.launches import Launch
from explore.memory import Finding
from explore.scheduler import Machine

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


def test_a_packet_comes_in_halves_but_its_halves_in_one_piece():
    def write(x, y, seen):
        yield from st_relaxed_sys_v2_u64(x, (1 << 32 | 1, 1 << 32 | 1))

    def read(x, y, seen):
        seen += yield from ld_relaxed_sys_v2_u64(x)

    assert outcomes(write, read) == {*product((0, 1 << 32 | 1), repeat=2)}


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
