"""Signals that count, in a pipeline of several steps."""

import pytest

from explore.markers import removed, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.world import World

CHUNKS = 5
ADD_RELAXED = within("signals", "signal-add", "'release'", "'relaxed'")
RELAXED = within(
    "signals",
    "load-count",
    "ld_acquire_sys_u64(address)",
    "ld_relaxed_sys_u64(address)",
)
SET_RELAXED = within("signals", "set", "st_release_sys_u64", "st_relaxed_sys_u64")
BROKEN = {
    "a signal that does not release": ADD_RELAXED,
    "a wait that does not acquire": RELAXED,
    "a signal before all threads have copied": removed("signals", "copied"),
    "no wait for credit": removed("programs", "await-credit"),
    "credit before all threads have read": removed("programs", "all-read"),
}


def pipelines(code):
    """A ring of ranks, each of which sends chunks to the next one."""

    def scenario(machine):
        world = World(machine, code)
        by_element = machine.random.random() < 0.5
        words = CHUNKS * code.shape.threads
        inputs, given = world.inputs(words)
        outputs = world.map("output", 8 * words)
        for context in world.contexts:
            rank = context.rank
            args = context, inputs[rank], outputs[rank], CHUNKS, by_element
            world.launch(rank, code.programs.pipeline, 1, *args)
            world.expect(outputs[rank], given[rank - 1])
        world.run()

    return scenario


@worlds
def test_a_pipeline(ranks):
    holds(pipelines(device_code()), ranks, 80)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(what, races):
    breaks(pipelines(device_code(BROKEN[what])), 3, races=races)


def test_credit_that_does_not_release_is_a_race():
    """Only a race: no load is delayed past a later store (``memory.py``)."""
    breaks(pipelines(device_code(SET_RELAXED)), 3)
