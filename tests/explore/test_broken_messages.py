"""Broken variants of messages and of signals, which the search must find."""

import pytest

from explore.markers import removed, replaced, within
from explore.scenarios import (
    breaks,
    by_anything_and_by_result,
    exchanges_between_barriers,
    messages,
    words_by_signals,
    worlds,
)
from explore.source import device_code

TRANSFER_BROKEN = {
    "no credit": removed("transfer", "wait"),
    "too much credit": within("transfer", "due", "epoch - DEPTH", "epoch - DEPTH - 1"),
    "the block does not wait": removed("transfer", "agree"),
    "a flag before all have written": removed("transfer", "flag-meet"),
    "a credit before all have read": removed("transfer", "credit-meet"),
    "no fence before a flag": removed("transfer", "flag-fence"),
    "no fence before a credit": removed("transfer", "credit-fence"),
    "a flag awaited relaxed": within(
        "transfer", "await", "ld_acquire_sys_u64(flag)", "ld_relaxed_sys_u64(flag)"
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
    "awaited relaxed": within(
        "signals", "await-slot", "ld_acquire_sys_u32(slot)", "ld_relaxed_sys_u32(slot)"
    ),
}
IN_KERNEL_BROKEN = {
    "no syncthreads before": removed("signals", "meet"),
    "no syncthreads after": replaced("signals", "agree", "return met"),
    "no waiting": removed("signals", "wait"),
}


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", TRANSFER_BROKEN)
def test_messages_broken_are_found(what, races, ranks):
    if what == "no fence before a credit" and not races:
        pytest.skip("loads are never late here, so that no result is wrong")
    breaks(messages(device_code(TRANSFER_BROKEN[what])), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", IN_KERNEL_BROKEN)
def test_the_barrier_in_a_kernel_broken_is_found(what, races, ranks):
    code = device_code(IN_KERNEL_BROKEN[what])
    breaks(exchanges_between_barriers(code), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", SIGNALS_BROKEN)
def test_signals_broken_are_found(what, races, ranks):
    code = device_code(SIGNALS_BROKEN[what])
    breaks(words_by_signals(code), ranks, races=races)
