"""Broken variants of messages and of signals, which the search must find."""

import pytest

from explore.markers import removed, replaced, within
from explore.scenarios import (
    breaks,
    by_anything_and_by_result,
    exchanges_between_barriers,
    messages,
    plain_stores_between_barriers,
    requests,
    words_by_signals,
    words_by_signals_of_the_host,
    worlds,
)
from explore.source import device_code
from explore.world import World

TRANSFER_BROKEN = {
    "no credit": removed("credit", "wait"),
    "too much credit": within("credit", "due", "epoch - DEPTH", "epoch - DEPTH - 1"),
    "the block does not synchronize after a wait": removed("transfer", "agree"),
    "a flag before all threads have stored": removed("credit", "flag-synchronize"),
    "a credit before all threads have read": removed("credit", "credit-synchronize"),
    "no fence before a flag": removed("credit", "flag-fence"),
    "no fence before a credit": removed("credit", "credit-fence"),
    "a flag polled relaxed": within(
        "credit", "await", "ld_acquire_sys_u64(flag)", "ld_relaxed_sys_u64(flag)"
    ),
}
SIGNALS_BROKEN = {
    "stored without waiting for 0": replaced("signals", "put-wait", "taken = True"),
    "taken without waiting for 1": replaced("signals", "take-wait", "arrived = True"),
    "stored relaxed": within(
        "signals",
        "put",
        "st_release_sys_u32(slot, 1)",
        "st_relaxed_sys_u32(slot, 1)",
    ),
    "polled relaxed": within(
        "signals", "await-slot", "ld_acquire_sys_u32(slot)", "ld_relaxed_sys_u32(slot)"
    ),
}
BLOCKS_BROKEN = {
    **SIGNALS_BROKEN,
    "a block does not wait": removed("signals", "wait-each"),
    "a block goes on with its first thread": replaced(
        "signals", "agree", "return arrived"
    ),
}
PADS_BROKEN = {
    **SIGNALS_BROKEN,
    "every thread signals": within("pads", "put", "cuda.threadIdx.x == 0", "True"),
    "every thread waits": within("pads", "wait", "cuda.threadIdx.x == 0", "True"),
}
IN_KERNEL_BROKEN = {
    "no syncthreads before": removed("barriers", "synchronize"),
    "no syncthreads after": replaced("barriers", "agree", "return arrived"),
    "no wait": removed("barriers", "wait"),
}


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", TRANSFER_BROKEN)
def test_messages_broken_are_found(what, races, ranks):
    if what == "no fence before a credit" and not races:
        pytest.skip("loads are never late here, so that no result is wrong")
    breaks(messages(device_code(TRANSFER_BROKEN[what])), ranks, races=races)


@worlds
@pytest.mark.parametrize("what", TRANSFER_BROKEN)
def test_requests_broken_are_found(what, ranks):
    breaks(requests(device_code(TRANSFER_BROKEN[what])), ranks)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", IN_KERNEL_BROKEN)
def test_the_barrier_in_a_kernel_broken_is_found(what, races, ranks):
    code = device_code(IN_KERNEL_BROKEN[what])
    breaks(exchanges_between_barriers(code), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BLOCKS_BROKEN)
def test_signals_broken_are_found(what, races, ranks):
    code = device_code(BLOCKS_BROKEN[what])
    breaks(words_by_signals(code), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", PADS_BROKEN)
def test_signals_of_the_host_broken_are_found(what, races, ranks):
    code = device_code(PADS_BROKEN[what])
    breaks(words_by_signals_of_the_host(code), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", SIGNALS_BROKEN)
def test_the_barrier_of_symmetric_memory_broken_is_found(what, races, ranks):
    code = device_code(SIGNALS_BROKEN[what])
    breaks(plain_stores_between_barriers(code, World.pad_barrier), ranks, races=races)
