"""Collectives that kernels make, one right after the other."""

import pytest

from explore.block_calls import broadcasts_of_other_roots, collectives
from explore.markers import removed, replaced, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.test_failures import IMPATIENT

BROKEN = {
    "one set": within("block_exchange", "set", "2 * ws.depth - 1", "0"),
    "half as many sets": within(
        "block_exchange", "set", "2 * ws.depth - 1", "ws.depth - 1"
    ),
    "epochs that do not advance": within("block_exchange", "next", "epoch + 1", "1"),
    "epochs that are not kept": removed("block_exchange", "keep"),
    "waits that are not kept": removed("block_exchange", "keep-wait"),
    "one epoch for all threads": within(
        "block_exchange",
        "epoch",
        "ws.threads * block + thread",
        "ws.threads * block",
    ),
    "one mailbox for all ranks": replaced("block_exchange", "ranks", "return 0"),
    "one mailbox for all vectors": replaced("block_exchange", "vectors", "return 0"),
    "one mailbox for all blocks": within("block_exchange", "line", "block", "0"),
    "no wait for packets": within("block_exchange", "wait", "wanted", "0"),
    "loads before all threads have stored": removed("block_exchange", "stored"),
    "results before all threads have stored": removed("block_exchange", "agree"),
}
"""Of a block's arrays; two of them need no other rank."""

ONE_WAY = (
    within("block_exchange", "wait", "wanted", "1 << (root - ws.rank) % size >> 1"),
    removed("block_exchange", "roots"),
)
"""Without what a rank receives from those that have no data for it."""

ONLY_DATA = within("block_exchange", "first-of-all", "EVERYONE", "0")
"""Without vectors between ranks that have no data for each other."""

UNCHECKED = (
    removed("block_exchange", "roots"),
    within("block_exchange", "is-none", "wrong >> 32 == 0", "wrong == 0"),
)
"""Without finding that a rank has no data, or that it expects another root."""

AT_THE_WRAP = {
    "nothing wiped": removed("block_exchange", "wipe"),
    "half a vector wiped": removed("block_exchange", "wipe-second"),
    "the later half of the sets wiped": within(
        "block_exchange", "wipe", "2 * ws.depth", "ws.depth"
    ),
    "the earlier half of the sets wiped": within(
        "block_exchange",
        "wipe",
        "epoch > LAST_EPOCH - 2 * ws.depth",
        "LAST_EPOCH - 2 * ws.depth < epoch <= LAST_EPOCH - ws.depth",
    ),
    "no fence before the next epoch": removed("block_exchange", "wiped"),
    "no fence after the next epoch": removed("block_exchange", "follows-wipe"),
    "no fence at some epochs before": within(
        "block_exchange", "follows", "LAST_EPOCH - ws.depth", "LAST_EPOCH - 1"
    ),
    "no fence at some epochs after": within(
        "block_exchange", "follows", "epoch <= ws.depth", "epoch == 1"
    ),
    "an odd last epoch": replaced(
        "block_exchange", "last-epoch", "LAST_EPOCH = 2**32 - 3"
    ),
}


@worlds
@pytest.mark.parametrize("items", [False, True], ids=["blocks", "items"])
def test_collectives(items, ranks):
    holds(collectives(device_code(), items), ranks, 24 // ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_of_teams(ranks):
    holds(collectives(device_code(), divided=True), ranks, 24 // ranks)


@worlds
@pytest.mark.parametrize("enough", ["starts_inherit", "ends_count"])
def test_collectives_as_the_epochs_overflow(ranks, enough):
    """What one kernel has cleared and the next one posts, either assumption orders."""
    names = {"starts_inherit", "copies_end", "ends_count", "fences_carry"} - {enough}
    dropped = dict.fromkeys(names, False)
    scenario = collectives(device_code(), steps=3, wrap=True)
    holds(scenario, ranks, 16 // ranks, **dropped)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(what, races):
    breaks(collectives(device_code(BROKEN[what]), items=False), 3, races=races)


@worlds
@by_anything_and_by_result
def test_broadcasts_in_one_direction_are_found(races, ranks):
    scenario = collectives(device_code(*ONE_WAY), items=True, kinds=["BROADCAST"])
    breaks(scenario, ranks, races=races)


@by_anything_and_by_result
def test_shards_of_no_elements_in_one_direction_are_found(races):
    scenario = collectives(device_code(ONLY_DATA), steps=8, kinds=["ALL_TO_ALL"])
    breaks(scenario, 3, races=races)


@worlds
def test_roots_that_differ_are_found_on_every_rank(ranks):
    holds(broadcasts_of_other_roots(device_code(IMPATIENT)), ranks, 20 // ranks)
    for edit in UNCHECKED:
        breaks(broadcasts_of_other_roots(device_code(IMPATIENT, edit)), ranks)


@pytest.mark.parametrize("what", AT_THE_WRAP)
def test_what_is_broken_at_the_wrap_is_found(what):
    code = device_code(AT_THE_WRAP[what])
    breaks(collectives(code, kernels=1, steps=6, wrap=True), 2, races=False)
