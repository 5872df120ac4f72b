"""What users may build of atomic operations, and the orders that they need."""

import pytest

from explore.markers import removed, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.world import World

TIMES = 3


def locks(code):
    """All blocks of all ranks increment a word of the first rank."""

    def scenario(machine):
        world = World(machine, code)
        lock = world.map("lock", 8, fill=0)[0]
        word = world.map("word", 8, fill=0)[0]
        for rank in range(world.size):
            args = lock, word, TIMES
            world.launch(rank, code.programs.count_under_a_lock, world.blocks, *args)
        world.expect(word, [TIMES * world.blocks * world.size])
        world.run()

    return scenario


def counts(code):
    """The rank that counts last reads what all have stored."""

    def scenario(machine):
        world = World(machine, code)
        count = world.map("count", 8, fill=0)[0]
        out = world.map("out", 8)[0]
        words = world.map("word", 8)
        inputs, drawn = world.inputs(1)
        for rank in range(world.size):
            args = count, words, rank, inputs[rank], out
            world.launch(rank, code.programs.last_one_reads, 1, *args)
        world.expect(out, [sum(word for (word,) in drawn)])
        world.run()

    return scenario


BROKEN = {
    "a lock that does not acquire": (
        locks,
        within("programs", "lock", "'acquire'", "'relaxed'"),
    ),
    "an unlocking that does not release": (
        locks,
        within("programs", "unlock", "'release'", "'relaxed'"),
    ),
    "a count that does not release": (
        counts,
        within("programs", "count", "'release'", "'relaxed'"),
    ),
    "a last count that does not acquire": (
        counts,
        removed("programs", "acquire-counts"),
    ),
}


@worlds
@pytest.mark.parametrize("calls", [locks, counts])
def test_atomic_operations_order_plain_accesses(calls, ranks):
    holds(calls(device_code()), ranks, 150)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(what, races):
    calls, edit = BROKEN[what]
    breaks(calls(device_code(edit)), 3, races=races)
