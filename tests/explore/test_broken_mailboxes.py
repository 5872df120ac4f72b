"""Broken variants of the mailboxes, which the search must find."""

import pytest

from explore.markers import moved, removed, replaced, within
from explore.scenarios import (
    all_reduces,
    all_reduces_at_the_wrap,
    breaks,
    each_broken,
    each_transport,
    mailed_calls,
    worlds,
)
from explore.source import device_code
from explore.test_operations import calls_of_pairs
from explore.world import LL, MAILED, MARKED, SENTINEL

CLEARED = [*SENTINEL, *MARKED]

# What is broken: the algorithms that it must spoil, and the edits that break them.
BROKEN = {
    "one half": (
        MAILED,
        within("mailboxes", "half", "(epoch & 1) * half_stride", "0"),
    ),
    "no synchronization between epochs": (MAILED, removed("mailboxes", "synchronize")),
    "no fence between epochs": (CLEARED, removed("mailboxes", "fence")),
    "a fence before the synchronization": (
        CLEARED,
        moved("mailboxes", "synchronize", after="fence"),
    ),
    "not cleared": (CLEARED, removed("mailboxes", "clear")),
    "cleared after the next post": (
        CLEARED,
        within(
            "mailboxes",
            "clear",
            "first + k * rank_stride",
            "first + k * rank_stride + (1 - 2 * (epoch & 1)) * half_stride",
        ),
    ),
    "the low word not compared": (
        SENTINEL,
        within("mailboxes", "empty", "low == EMPTY", "False"),
    ),
    "the high word not compared": (
        SENTINEL,
        within("mailboxes", "empty", "high == EMPTY", "False"),
    ),
    "the low word sent unchanged": (
        SENTINEL,
        within("mailboxes", "sent", "low == EMPTY", "False"),
    ),
    "the high word sent unchanged": (
        SENTINEL,
        within("mailboxes", "sent", "high == EMPTY", "False"),
    ),
    "the low marked word not compared": (
        MARKED,
        within("mailboxes", "missing", "first == EMPTY", "False"),
    ),
    "the high marked word not compared": (
        MARKED,
        within("mailboxes", "missing", "second == EMPTY", "False"),
    ),
    "marks not compared": (
        MARKED,
        within("mailboxes", "missing", "unmarked", "False"),
    ),
    "the low word's mark not set": (
        MARKED,
        within("mailboxes", "post-marked", "marks = 1", "marks = 0"),
    ),
    "the high word's mark not set": (
        MARKED,
        within("mailboxes", "post-marked", "marks += 2", "marks += 0"),
    ),
    "a marked word sent unchanged": (
        MARKED,
        within("mailboxes", "post-marked", "first = 0", "first = EMPTY"),
    ),
    "marks not cleared": (MARKED, removed("mailboxes", "unmark")),
    "one address for the marks of all threads": (
        MARKED,
        within("mailboxes", "marks", "VECTOR - MARK", "VECTOR"),
    ),
    "the sender continues with another NaN": (
        SENTINEL,
        removed("one_shot", "sent"),
        replaced(
            "two_shot", "result", "store(target, mine, count, packed[0], packed[1])"
        ),
    ),
    **{
        f"the {which} flag not looked at": (
            LL,
            within("packets", "wrong", f"{which} ^ flag", "0"),
        )
        for which in ("first", "second", "third", "fourth")
    },
    "one set of mailboxes": (
        ("two_shot_sentinel", "two_shot_marked"),
        within("mailboxes", "half", "which * set_stride", "0"),
    ),
}
OF_TWO_RANKS_BROKEN = {  # who have more than one tile
    "one mailbox for all tiles": (
        MAILED,
        within("mailboxes", "tile", "tile * line", "0"),
    ),
}
WRAP_BROKEN = {
    "nothing wiped": (LL, removed("mailboxes", "wipe")),
    "one half wiped": (
        LL,
        within("mailboxes", "wipe", "epoch >= last_epoch - 1", "epoch >= last_epoch"),
    ),
    "the other half wiped": (
        LL,
        within(
            "mailboxes", "wipe", "epoch >= last_epoch - 1", "epoch == last_epoch - 1"
        ),
    ),
    "half a packet wiped": (LL, removed("mailboxes", "wipe-second")),
    "no fence between epochs": (LL, removed("mailboxes", "fence")),
    "an odd last epoch": (
        MAILED,
        replaced("mailboxes", "last-epoch", "LAST_EPOCH = 2**32 - 1"),
    ),
}
EPOCH_BROKEN = {  # flags have a synchronization of their own
    "the epoch changed before all have read it": (
        MAILED,
        removed("one_shot", "resumed"),
        removed("two_shot", "resumed"),
    ),
}
FEW_BROKEN = {
    "thread 0 exchanges only what the others do": (
        within("one_shot", "post-to", "thread != 0", "True"),
        within("one_shot", "wanted", "thread != 0", "True"),
    ),
    "no fence of thread 0 before the synchronization": (removed("one_shot", "fence"),),
}


RELAYED = "broadcast", "two_shot_marked"
RELAYED_BROKEN = {
    "thread 0 exchanges only what the others do": (
        within("two_shot_broadcast", "posts", "thread == 0", "False"),
        within("two_shot_broadcast", "wanted", "thread == 0", "False"),
    ),
    "no fence of thread 0 before the synchronization": (
        removed("two_shot_broadcast", "fence"),
    ),
    "the epoch changed before all have read it": (
        removed("two_shot_broadcast", "resumed"),
    ),
}


@each_broken(BROKEN)
def test_mailboxes_broken_are_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@each_broken(OF_TWO_RANKS_BROKEN, [2])
def test_steps_broken_are_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@each_broken(WRAP_BROKEN)
def test_what_is_broken_at_the_wrap_is_found(algorithm, edits, ranks):
    breaks(all_reduces_at_the_wrap(device_code(*edits), algorithm), ranks)


@each_broken(EPOCH_BROKEN)
def test_an_epoch_changed_too_early_is_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@worlds
@each_transport
@pytest.mark.parametrize("what", FEW_BROKEN)
def test_few_threads_exchanging_broken_are_found(what, transport, ranks):
    if (what, transport) == ("no fence of thread 0 before the synchronization", "ll"):
        pytest.skip("nothing is cleared, and loads are never late here")
    breaks(mailed_calls(device_code(*FEW_BROKEN[what]), transport), ranks)


@pytest.mark.parametrize("what", RELAYED_BROKEN)
def test_a_broadcast_in_two_phases_broken_is_found(what):
    breaks(calls_of_pairs(device_code(*RELAYED_BROKEN[what]), RELAYED), 3)
