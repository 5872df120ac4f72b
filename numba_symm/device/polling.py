"""Waits with a deadline: how a thread polls, and how it gives up.

Every wait has a deadline. When it passes, the waiting thread stores a record on every
rank's status board and stops waiting. A thread that finds a record on its rank's board
stops waiting too, so all kernels end and the CUDA context stays usable.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.device.intrinsics import (
    device_function,
    globaltimer,
    ld_acquire_sys_u32,
    ld_relaxed_sys_u64,
    poll_pause,
    st_relaxed_sys_u64,
)
from numba_symm.environment import SIMULATED

POLLS_PER_CHECK = 8 if SIMULATED else 4096  # explore: polls
"""Polls between two reads of the clock and the board: some milliseconds on a GPU.

The board is read across PCIe, and every thread of a grid may be waiting. With 128
polls, ranks that were 80 us apart delayed each other permanently by these reads (4
GPUs, 64 KiB by LL packets: 128 us instead of 4).
"""


class Guard(NamedTuple):
    """The timeout of a kernel's waits, and where the kernel reports failures.

    Attributes:
        board: the address of the status board, one 8-byte record for each rank.
        rank: this rank.
        size: the number of ranks.
        timeout: the longest wait in nanoseconds; 0: indefinitely.
    """

    board: int
    rank: int
    size: int
    timeout: int


@device_function
def wait_record(operation: int, rank: int, peer: int, place: int, epoch: int) -> int:
    """Return a record of a wait: 8 bytes, which are stored atomically.

    Bits 56-62 operation (a number of ``failures.TABLE``), 48-55 rank, 40-47 peer, 24-39
    channel or block, 0-23 epoch. Signals have the number of blocks that the simulator
    runs after this one instead of an epoch.
    """
    who = operation << 56 | rank << 48 | peer << 40
    return who | (place & 0xFFFF) << 24 | (epoch & 0xFFFFFF)


@device_function
def fail(guard: Any, record: int) -> None:
    """Store ``record`` on every rank's board, so that all waits end without success.

    Peers may be reading their boards. The record is one relaxed store, which publishes
    nothing else.
    """
    # Before a range, the compiler would compute its length on the way to every wait.
    r = 0
    while r < guard.size:
        st_relaxed_sys_u64(guard.board + 8 * r, record)  # explore: fail
        r += 1


@device_function
def must_give_up(guard: Any, started: int, record: int) -> bool:
    """Return whether a wait that began at ``started`` (ns) must end without success.

    It must end if a rank has failed, or if its deadline has passed. In the second case,
    store ``record`` on every rank's board.
    """
    if ld_relaxed_sys_u64(guard.board + 8 * guard.rank) != 0:
        return True
    # explore: deadline
    if guard.timeout == 0 or globaltimer() - started <= guard.timeout:
        return False
    fail(guard, record)
    return True


@device_function
def pause(polls: int) -> int:
    """Pause between two polls, and return how many there were."""
    poll_pause(polls)
    return polls + 1


@device_function
def is_time_to_check(polls: int) -> bool:
    """Return whether a thread that has polled so often calls ``must_give_up``."""
    return polls % POLLS_PER_CHECK == 0


@device_function
def since(started: int) -> int:
    """Return when a wait began: the time of its first check."""
    return globaltimer() if started == 0 else started


def make_wait(has_arrived: Callable[[int, int], bool]) -> Callable[..., bool]:
    """Return a device function that polls until something has arrived.

    ``(guard, address, expected, record)`` polls ``has_arrived(address, expected)``,
    which acquires if what it waits for publishes other data; it returns False if it
    gave up.
    """

    @device_function
    def wait(guard: Any, address: int, expected: int, record: int) -> bool:
        polls = 0
        started = 0
        while not has_arrived(address, expected):
            polls = pause(polls)
            if is_time_to_check(polls):
                started = since(started)
                if must_give_up(guard, started, record):
                    return False
        return True

    return wait


@device_function
def _has_reached(flag: int, epoch: int) -> bool:
    # Epochs only grow, modulo 2**32. A peer may be ahead, but never by 2**31.
    # explore: await-epoch
    return (ld_acquire_sys_u32(flag) - epoch) & 0xFFFFFFFF < 0x80000000


wait_for_epoch = make_wait(_has_reached)
"""Poll the flag at an address until it has reached an epoch (acquire)."""
