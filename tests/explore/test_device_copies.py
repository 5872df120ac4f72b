"""Copies within kernels: between arrays of any alignment, and by packets."""

import pytest

from explore.markers import removed, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.test_counting import SET_RELAXED
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


CHUNKS, MOST = 5, 6  # of a pipeline, and the words of its longest chunks
WRAP = 2**31 - 3  # two epochs later, each mailbox has been used before numbers repeat


def pipelines(code, base=0):
    """A ring of ranks, each of which sends chunks to the next one by packets.

    The first chunk follows ``base`` epochs. Unless that is 0, mailboxes contain packets
    of 2**31 epochs before the last chunks.
    """

    def scenario(machine):
        world, random = World(machine, code), machine.random
        counts = [random.choice([1, 2, 3, MOST]) for _ in range(CHUNKS)]
        world.buffers = world.map("mailboxes", 32 * MOST, fill=0)
        for pad, mailboxes in zip(world.pads, world.buffers, strict=True):
            if base == 0:
                break
            for channel in range(2):
                for rank in range(world.size):
                    first = pad + code.pads.pad_nbytes(world.size, channel) + 16
                    world.memory.plant(first + 8 * rank, 8, base)
            for at in range(0, 32 * MOST, 8):
                parity = at // (16 * MOST)
                old = random.choice([e for e in (0, 1, 2) if e % 2 == parity])
                packet = (2 * old + 1) << 32 | random.getrandbits(32)
                world.memory.plant(mailboxes + at, 8, packet)
        inputs, given = world.inputs(CHUNKS * MOST)
        outputs = world.map("output", 8 * CHUNKS * MOST)
        for each in world.contexts:
            context = each._replace(buffers=tuple(world.buffers))
            rank = context.rank
            args = context, base, inputs[rank], outputs[rank], counts, MOST
            world.launch(rank, code.programs.pipeline_of_packets, 1, *args)
            for first, count in zip(range(0, CHUNKS * MOST, MOST), counts, strict=True):
                chunk = given[rank - 1][first : first + count]
                world.expect(outputs[rank] + 8 * first, chunk)
        world.run()

    return scenario


# A credit that does not release can be found only where mailboxes are cleared: no load
# is delayed past a later store (``memory.py``), and packets are relaxed, so they are in
# no race.
BROKEN_PACKETS = {
    "no wait for credit": (0, removed("programs", "await-packets")),
    "credit before all threads have read": (
        0,
        within(
            "packets",
            "all-received",
            "syncthreads_or(not arrived)",
            "(not arrived)",
        ),
    ),
    "a packet of any epoch": (0, within("packets", "wrong", "fourth ^ flag", "0")),
    "nothing wiped": (WRAP, removed("packets", "wipe")),
    "half a vector wiped": (WRAP, removed("packets", "wipe-second")),
    "one mailbox wiped": (
        WRAP,
        within(
            "packets",
            "wipe",
            "word_of(epoch) & _LAST",
            "epoch * (epoch & 1) & _LAST",
        ),
    ),
    "what is wiped is of an epoch": (
        WRAP,
        within("packets", "number", "word_of(epoch) << 1 | 1", "epoch << 1"),
    ),
    "credit that does not release what is wiped": (WRAP, SET_RELAXED),
}


@worlds
@pytest.mark.parametrize(
    "base", [0, WRAP, 2**31 + WRAP], ids=["first", "wrap", "second-wrap"]
)
def test_a_pipeline_of_packets(ranks, base):
    holds(pipelines(device_code(), base), ranks, 40)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN_PACKETS)
def test_what_is_broken_of_packets_is_found(what, races):
    base, edit = BROKEN_PACKETS[what]
    breaks(pipelines(device_code(edit), base), 3, races=races)
