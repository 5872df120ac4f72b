"""Packets of the LL protocol, and the wait for one vector of each other rank.

A vector of 16 bytes is two packets. Each has 8 bytes of data and, beside each 4 of
them, the epoch. So no flag or fence is needed: a packet shows by itself that it has
arrived, with its data. Only accesses of up to 8 bytes are assumed to be atomic.

Source: the LL protocol of NCCL and of MSCCL++ (``LLPacket``).
"""

import functools
from collections.abc import Callable
from typing import Any

from numba_symm.device.intrinsics import (
    device_function,
    ld_relaxed_sys_v2_u64,
    st_relaxed_sys_v2_u64,
    word_of,
)
from numba_symm.device.polling import (
    is_time_to_check,
    must_give_up,
    pause,
    since,
    wait_record,
)

_LOW = 0xFFFFFFFF


@device_function
def post_packets(box: int, stride: int, low: int, high: int, epoch: int) -> None:
    """Send a vector as two packets, ``stride`` bytes apart."""
    flag = word_of(epoch << 32)
    first, second = (low & _LOW) | flag, (low >> 32 & _LOW) | flag
    st_relaxed_sys_v2_u64(box, (first, second))
    third, fourth = (high & _LOW) | flag, (high >> 32 & _LOW) | flag
    st_relaxed_sys_v2_u64(box + stride, (third, fourth))


@device_function
def peek_packets(box: int, stride: int, epoch: int) -> Any:
    """Return a vector's two words, then 0 if both packets are of that epoch."""
    flag = word_of(epoch << 32)
    first, second = ld_relaxed_sys_v2_u64(box)
    third, fourth = ld_relaxed_sys_v2_u64(box + stride)
    # explore: wrong
    wrong = (first ^ flag) | (second ^ flag) | (third ^ flag) | (fourth ^ flag)
    low = word_of((first & _LOW) | second << 32)
    high = word_of((third & _LOW) | fourth << 32)
    return low, high, wrong >> 32


@functools.cache
def make_poll(size: int, peek: Any) -> Callable[..., bool]:
    """Return a device function that waits for one vector of each other rank.

    ``(guard, operation, first, rank_stride, epoch, block, low, high, wanted)``. The
    strides are arguments, so that Numba types it once for all protocols.
    """
    others = size - 1

    @device_function
    def poll(
        guard: Any,
        operation: int,
        first: int,
        rank_stride: int,
        epoch: int,
        block: int,
        low: Any,
        high: Any,
        wanted: int,
    ) -> bool:
        polls = 0
        started = 0
        arrived = False
        given_up = False
        while not arrived and not given_up:
            # All mailboxes are loaded before any is compared, because a branch on one
            # would make the next load wait for it.
            missing = 0
            for k in range(others):
                low[k + 1], high[k + 1], gap = peek(first + k * rank_stride, epoch)
                missing |= gap if wanted >> k & 1 != 0 else 0
            arrived = missing == 0
            if not arrived:
                polls = pause(polls)
                if is_time_to_check(polls):
                    started = since(started)
                    late = 0
                    for k in range(others):
                        _, _, gap = peek(first + k * rank_stride, epoch)
                        if gap != 0 and wanted >> k & 1 != 0:
                            late = (guard.rank + 1 + k) % size
                    record = wait_record(operation, guard.rank, late, block, epoch)
                    given_up = must_give_up(guard, started, record)
        return arrived

    return poll
