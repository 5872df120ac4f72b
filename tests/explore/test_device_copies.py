"""Copies within kernels: between arrays of any alignment, and by packets."""

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


CHUNKS = 5


def pipelines(code, base=0):
    """A ring of ranks, each of which sends chunks to the next one by packets.

    The first chunk follows ``base`` epochs.
    """

    def scenario(machine):
        world = World(machine, code)
        words = machine.random.choice([2, 6])
        world.buffers = world.map("mailboxes", 32 * words, fill=0)
        for pad in world.pads if base else ():
            for channel in range(2):
                for rank in range(world.size):
                    word = code.counting.MAX_CHANNELS * 4 + 8 * channel
                    place = pad + world.size * word + 8 * rank
                    world.memory.plant(place, 8, base)
        inputs, given = world.inputs(CHUNKS * words)
        outputs = world.map("output", 8 * CHUNKS * words)
        for each in world.contexts:
            context = each._replace(buffers=tuple(world.buffers))
            rank = context.rank
            args = context, base, inputs[rank], outputs[rank], CHUNKS, words
            world.launch(rank, code.programs.pipeline_of_packets, 1, *args)
            world.expect(outputs[rank], given[rank - 1])
        world.run()

    return scenario


# A credit that does not release cannot be found: no load is delayed past a later store
# (``memory.py``), and packets are relaxed, so they are in no race.
BROKEN_PACKETS = {
    "no wait for credit": removed("programs", "await-packets"),
    "credit before all threads have read": within(
        "packet_puts", "all-received", "syncthreads_or(not arrived)", "(not arrived)"
    ),
    "a packet of any epoch": within("packets", "wrong", "fourth ^ flag", "0"),
}


@worlds
@pytest.mark.parametrize("base", [0, 2**32 - 3], ids=["first", "wrap"])
def test_a_pipeline_of_packets(ranks, base):
    holds(pipelines(device_code(), base), ranks, 40)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN_PACKETS)
def test_what_is_broken_of_packets_is_found(what, races):
    breaks(pipelines(device_code(BROKEN_PACKETS[what])), 3, races=races)
