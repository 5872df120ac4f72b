"""The assumptions about the platform that each protocol needs.

``memory.py`` defines the assumptions, ``docs/protocols.md`` gives their sources. If
an assumption that a protocol needs is dropped, the search finds a fault. If all others
are dropped together, it finds none.
"""

import pytest

from explore.block_calls import collectives
from explore.markers import replaced
from explore.scenarios import (
    all_reduces,
    all_reduces_at_the_wrap,
    breaks,
    calls_of,
    calls_on_own_arrays,
    exchanges_between_barriers,
    holds,
    mailed_calls,
    messages,
    messages_with_gaps,
    plain_stores_between_barriers,
    words_by_signals,
)
from explore.source import device_code
from explore.test_barriers import exchanges as exchanges_of_grids
from explore.test_copies import calls_by_copies, puts_and_gets
from explore.test_counting import gatherings, pipelines
from explore.test_device_copies import WRAP
from explore.test_device_copies import pipelines as pipelines_of_packets
from explore.test_device_copies import puts_and_gets as puts_and_gets_in_kernels
from explore.test_expert_calls import calls_of_experts, calls_of_few_tokens

ASSUMPTIONS = "starts_see", "starts_inherit", "copies_end", "ends_count", "fences_carry"

# A kernel loads epochs, or a program's data, that an earlier kernel has stored.
SEES = {"starts_see"}
# A rank stores where peers have read, or loads what they have stored, because an
# earlier kernel of the rank acquired the flag that permits it.
INHERITS = SEES | {"starts_inherit"}
# A kernel empties a mailbox, and packets of the next kernel permit the peer to fill it
# again. Only the first kernel's end orders the two.
EMPTIES = SEES | {"ends_count"}
# Copies acquire and release nothing: the kernels before and after them do.
COPIES = INHERITS | {"copies_end"}

PROTOCOLS = {
    "one_shot_sentinel": (lambda code: all_reduces(code, "one_shot_sentinel"), EMPTIES),
    "one_shot_marked": (lambda code: all_reduces(code, "one_shot_marked"), EMPTIES),
    "two_shot_sentinel": (lambda code: all_reduces(code, "two_shot_sentinel"), EMPTIES),
    "two_shot_marked": (lambda code: all_reduces(code, "two_shot_marked"), EMPTIES),
    "few_sentinel": (lambda code: mailed_calls(code, "sentinel"), EMPTIES),
    "few_marked": (lambda code: mailed_calls(code, "marked"), EMPTIES),
    # A packet's epoch shows whether it is new. So only the two calls before the epochs
    # overflow empty mailboxes.
    "one_shot_ll": (lambda code: all_reduces(code, "one_shot_ll"), SEES),
    "few_ll": (lambda code: mailed_calls(code, "ll"), SEES),
    "one_shot_ll_at_the_wrap": (
        lambda code: all_reduces_at_the_wrap(code, "one_shot_ll"),
        EMPTIES,
    ),
    "chunked": (lambda code: all_reduces(code, "chunked"), INHERITS),
    "exchanges": (lambda code: calls_of(code, "gather", "scan"), INHERITS),
    "reduce": (lambda code: calls_of(code, "reduce"), INHERITS),
    "broadcast": (lambda code: calls_of(code, "broadcast"), INHERITS),
    "direct": (calls_on_own_arrays, INHERITS),
    "copies": (calls_by_copies, COPIES),
    "experts": (calls_of_experts, INHERITS),
    "few_tokens": (calls_of_few_tokens, EMPTIES),
    "puts": (puts_and_gets, COPIES),
    # Each kernel itself acquires the flags, credits and signals that it relies on.
    "messages": (messages, SEES),
    "messages_with_gaps": (messages_with_gaps, SEES),
    "signals": (words_by_signals, SEES),
    # Of one kernel, which needs no other one.
    "counted_signals": (pipelines, set()),
    "waits_for_several": (gatherings, set()),
    "copies_in_kernels": (puts_and_gets_in_kernels, set()),
    "packets_in_kernels": (pipelines_of_packets, set()),
    "packets_at_the_wrap": (lambda code: pipelines_of_packets(code, WRAP), set()),
    "barriers_of_grids": (exchanges_of_grids, set()),
    "collectives_in_a_kernel": (
        lambda code: collectives(code, kernels=1, steps=3),
        set(),
    ),
    "collectives_at_the_wrap": (
        lambda code: collectives(code, kernels=1, steps=6, wrap=True),
        set(),
    ),
    # The next kernel continues with the epochs.
    "collectives_in_kernels": (lambda code: collectives(code, steps=2), SEES),
    # The program stores and loads in other kernels before and after.
    "barrier_in_a_kernel": (exchanges_between_barriers, INHERITS),
    "barrier_on_a_stream": (plain_stores_between_barriers, INHERITS),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_protocol_does_not_need_may_be_dropped(protocol, ranks):
    calls, needs = PROTOCOLS[protocol]
    dropped = {name: False for name in ASSUMPTIONS if name not in needs}
    holds(calls(device_code()), ranks, 80 // ranks, **dropped)


@pytest.mark.parametrize(
    ("protocol", "assumption"),
    [(name, each) for name, (_, needs) in PROTOCOLS.items() for each in sorted(needs)],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_protocol_needs_is_found(protocol, assumption, ranks):
    calls, _ = PROTOCOLS[protocol]
    breaks(calls(device_code()), ranks, **{assumption: False})


FENCE = "fence_acq_rel_sys()\n"
AT_START = replaced(
    "workspace",
    "failed",
    FENCE + "failed = load_failure(own, block)",
)
AT_END = replaced("workspace", "keep", FENCE + "keep_failure(own, failed)")
WITH_MAILBOXES = [name for name, (_, needs) in PROTOCOLS.items() if needs is EMPTIES]


@pytest.mark.parametrize("protocol", WITH_MAILBOXES)
def test_fences_at_both_ends_of_a_kernel_would_do_instead(protocol):
    calls, _ = PROTOCOLS[protocol]
    dropped = {name: False for name in ASSUMPTIONS if name not in INHERITS}
    holds(calls(device_code(AT_START, AT_END)), 3, 30, **dropped)
    for only in (AT_START, AT_END):
        breaks(calls(device_code(only)), 3, **dropped)
