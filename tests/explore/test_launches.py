"""Kernels that start early, and logical blocks that share a thread block."""

import pytest

from explore.intrinsics import (
    bar_sync,
    block_index,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_relaxed_sys_u32,
    ld_u32,
    st_relaxed_sys_u32,
    thread_index_x,
    thread_index_y,
)
from explore.launches import Launch, Overlap
from explore.memory import Finding
from explore.scheduler import Machine
from explore.test_memory import SCHEDULES, read, write


def overlapping(*kernels, threads=1, races=True, held=1):
    """Return what the kernels of one stream loaded, of which the later start early."""
    found = set()
    for seed in range(SCHEDULES):
        machine = Machine(1, held, threads, seed)
        machine.overlap()
        machine.memory.races = races
        x, y = (machine.memory.map(name, 4, fill=0) for name in "xy")
        seen = []
        machine.run(
            [[Launch(k, held, (x, y, seen), held=held, early=True) for k in kernels]]
        )
        found.add(tuple(seen))
    return found


def write_and_permit(x, y, seen):
    griddepcontrol_launch_dependents()
    yield from st_relaxed_sys_u32(x, 1)


def follow_and_read(x, y, seen):
    yield from griddepcontrol_wait()
    yield from read(x, y, seen)


def test_a_kernel_starts_early_where_the_one_before_permits_it():
    assert overlapping(write_and_permit, read) == {(0,), (1,)}
    assert overlapping(write, read) == {(1,)}
    assert overlapping(write_and_permit, follow_and_read) == {(1,)}


def test_an_early_kernel_races_with_the_one_before_even_if_that_has_ended():
    def read_weakly(x, y, seen):
        seen.append((yield from ld_u32(x)))

    assert overlapping(write_and_permit, read_weakly, races=False) == {(0,), (1,)}
    with pytest.raises(Finding, match="race"):
        overlapping(write_and_permit, read_weakly)


def test_an_early_access_needs_a_second_set_of_clocks():
    machine = Machine(1, 1, 1, 0)
    args = (*(machine.memory.map(name, 4, fill=0) for name in "xy"), [])
    with pytest.raises(Overlap):
        machine.run(
            [[Launch(k, 1, args, early=True) for k in (write_and_permit, read)]]
        )


def synchronized(barrier):
    """Return the outcomes of two logical blocks that each synchronize two threads."""

    def kernel(x, y, seen):
        place = x if block_index() == 0 else y
        if thread_index_x() == 0:
            yield from st_relaxed_sys_u32(place, 1)
        yield from bar_sync(barrier(thread_index_y()), 2)
        if thread_index_x() == 1:
            seen.append((yield from ld_relaxed_sys_u32(place)))

    found = set()
    for seed in range(SCHEDULES):
        machine = Machine(1, 2, 2, seed)
        x, y = (machine.memory.map(name, 4, fill=0) for name in "xy")
        seen = []
        machine.run([[Launch(kernel, 2, (x, y, seen), held=2)]])
        found.add(tuple(seen))
    return found


def test_blocks_that_share_a_thread_block_need_barriers_of_their_own():
    assert synchronized(lambda row: row) == {(1, 1)}
    assert (0, 1) in synchronized(lambda row: 0)


def test_a_barrier_for_two_numbers_of_threads_is_reported():
    def kernel(x, y, seen):
        yield from bar_sync(0, 2 + thread_index_y())

    machine = Machine(1, 2, 2, 0)
    with pytest.raises(Finding, match="another number of threads"):
        machine.run([[Launch(kernel, 2, (0, 0, []), held=2)]])


def test_blocks_beyond_the_grid_access_nothing():
    def kernel(x, y, seen):
        if block_index() < 1:
            yield from st_relaxed_sys_u32(x, 1)

    def kernel_without_a_check(x, y, seen):
        yield from st_relaxed_sys_u32(x, 1)

    machine = Machine(1, 1, 1, 0)
    x = machine.memory.map("x", 4, fill=0)
    machine.run([[Launch(kernel, 1, (x, 0, []), held=2)]])
    machine = Machine(1, 1, 1, 0)
    machine.memory.map("x", 4, fill=0)
    with pytest.raises(Finding, match="beyond its grid"):
        machine.run([[Launch(kernel_without_a_check, 1, (x, 0, []), held=2)]])
