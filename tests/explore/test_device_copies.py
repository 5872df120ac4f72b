"""Copies within kernels, between arrays of any alignment."""

import pytest

from explore.markers import removed, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.world import World

BROKEN = {
    "a get before the puts": removed("programs", "between-copies"),
    "a load from before the source": removed("puts", "from-the-first"),
    "a load from after the source": within(
        "puts", "to-the-last", "loaded", "loaded - _VECTOR"
    ),
}


def puts_and_gets(code):
    """Each rank puts words at the next one, and gets what another rank has put."""

    def scenario(machine):
        world = World(machine, code)
        count = machine.random.choice([1, 2, 9, 22])
        inputs, words = world.inputs(count)
        outputs = world.map("output", 8 * count + 8)
        for context in world.contexts:
            rank = context.rank
            out = outputs[rank] + 8 * machine.random.randrange(2)
            args = context, inputs[rank], out, count
            world.launch(rank, code.programs.put_and_get, 1, *args)
            world.expect(out, words[rank - 2])
        world.run()

    return scenario


@worlds
def test_puts_and_gets(ranks):
    holds(puts_and_gets(device_code()), ranks, 60)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(what, races):
    breaks(puts_and_gets(device_code(BROKEN[what])), 3, races=races)
