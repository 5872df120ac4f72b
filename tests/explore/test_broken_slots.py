"""Broken variants of the kernels that share slots, which the search must find."""

import pytest

from explore.markers import moved, removed, replaced, within
from explore.scenarios import breaks, by_anything_and_by_result, calls_of, worlds
from explore.source import device_code

SETS_BROKEN = {
    "one half": replaced("slots", "half", "half = 1"),
    "one set of slots": within("slots", "set", "chunk & 1", "0"),
    "the halves alternate with each chunk": within(
        "slots", "half", "chunk >> 1", "chunk"
    ),
}


def stages_broken(module):
    """Return the broken variants of a kernel that alternates between sets of slots."""
    return {
        "signalled before the work": moved(module, "signal", after="wait"),
        "used before all ranks have signalled": moved(module, "wait", before="signal"),
    }


REDUCE_BROKEN = {
    **stages_broken("chunked_reduce"),
    "slots numbered as by their receiver": replaced("order", "mirror", "return k"),
    "results sent to another rank than the root": within(
        "chunked_reduce", "to-root", "k == root", "k == 0"
    ),
    "shards counted from this rank": within("chunked_reduce", "collect", "0", "number"),
}
BROADCAST_BROKEN = stages_broken("chunked_broadcast")
BROADCAST_OF_THREE_BROKEN = {
    "relayed to the root, but not to the next rank": within(
        "chunked_broadcast", "to-root", "k != to_root", "k != 0"
    ),
    "shards counted from the root": within(
        "chunked_broadcast", "collect", "mine + 1", "0"
    ),
}
EXCHANGE_BROKEN = {
    "a wait for the previous chunk": within(
        "chunked_exchange",
        "wait",
        "await_flags(guard, operation, own + flag, block, last, failed)",
        "await_flags(guard, operation, own + flag, block, last - 1, failed)",
    ),
    "signalled before it is read": moved("chunked_exchange", "signal", before="wait"),
}
NEXT_BROKEN = {  # calls that disturb the next one, or the one before
    "chunked": removed("chunked_all_reduce", "wait"),
    "gather": replaced("slots", "more", "more = 0"),
    "reduce": replaced("slots", "more", "more = 0"),
    "broadcast": replaced("slots", "more", "more = 0"),
}


@by_anything_and_by_result
@pytest.mark.parametrize("name", ["gather", "reduce"])
@pytest.mark.parametrize("what", SETS_BROKEN)
def test_sets_broken_are_found(what, name, races):
    breaks(calls_of(device_code(SETS_BROKEN[what]), name), 3, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", REDUCE_BROKEN)
def test_reductions_broken_are_found(what, races):
    breaks(calls_of(device_code(REDUCE_BROKEN[what]), "reduce"), 3, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BROADCAST_BROKEN)
def test_broadcasts_broken_are_found(what, races, ranks):
    code = device_code(BROADCAST_BROKEN[what])
    breaks(calls_of(code, "broadcast"), ranks, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROADCAST_OF_THREE_BROKEN)
def test_broadcasts_of_three_ranks_broken_are_found(what, races):
    code = device_code(BROADCAST_OF_THREE_BROKEN[what])
    breaks(calls_of(code, "broadcast"), 3, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", EXCHANGE_BROKEN)
def test_exchanges_broken_are_found(what, races, ranks):
    code = device_code(EXCHANGE_BROKEN[what])
    breaks(calls_of(code, "gather", "scan", "chunked"), ranks, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("name", NEXT_BROKEN)
def test_calls_that_disturb_each_other_are_found(name, races):
    breaks(calls_of(device_code(NEXT_BROKEN[name]), name, "gather"), 3, races=races)
