"""Broken variants of the kernels that share slots, which the search must find."""

import pytest

from explore.markers import moved, replaced, within
from explore.scenarios import breaks, by_anything_and_by_result, calls_of, worlds
from explore.source import device_code

SETS_BROKEN = {
    "one half": replaced("slots", "half", "half = 1"),
    "one set of slots": within("slots", "set", "chunk & 1", "0"),
    "the halves alternate with each chunk": within(
        "slots", "half", "chunk >> 1", "chunk"
    ),
}


STAGES_BROKEN = {
    "signalled before the work": moved("chunked", "signal", after="wait"),
    "used before all ranks have signalled": moved("chunked", "wait", before="signal"),
}
NUMBERS_BROKEN = {
    "passed on to the wrong ranks": within("chunked", "to-root", "k == root", "k == 0"),
    "shards numbered from the next rank on": replaced("chunked", "whose", "return k"),
}
REDUCE_BROKEN = {
    **STAGES_BROKEN,
    **NUMBERS_BROKEN,
    "slots numbered as by their receiver": replaced("order", "mirror", "return k"),
}
EXCHANGE_BROKEN = {
    "a wait for the previous chunk": within(
        "chunked",
        "wait",
        "await_flags(guard, operation, own + flag, block, last, failed)",
        "await_flags(guard, operation, own + flag, block, last - 1, failed)",
    ),
    "signalled before it is read": moved("chunked", "signal", before="wait"),
}
NEXT_BROKEN = {  # calls that disturb the next one, or the one before
    "chunked": replaced("slots", "more", "more = 0"),
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
@pytest.mark.parametrize("what", STAGES_BROKEN)
def test_broadcasts_broken_are_found(what, races, ranks):
    code = device_code(STAGES_BROKEN[what])
    breaks(calls_of(code, "broadcast"), ranks, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", NUMBERS_BROKEN)
def test_broadcasts_of_three_ranks_broken_are_found(what, races):
    code = device_code(NUMBERS_BROKEN[what])
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
