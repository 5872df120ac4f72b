"""Messages through a room: copies that tell hosts of their end by words."""

import pytest

from explore.markers import removed, within
from explore.scenarios import breaks, by_anything_and_by_result, holds
from explore.source import device_code
from explore.world import World

BROKEN = {
    "the word without a fence": removed("message_copy", "fence"),
    "the word before all threads have accessed memory": removed(
        "message_copy", "synchronize"
    ),
    "blocks counted relaxed": within(
        *("message_copy", "count"),
        "intrinsics.atom_add_release_sys_u64",
        "intrinsics.atom_add_relaxed_sys_u64",
    ),
}


def messages_through_a_room(code, reused_early=False):
    """The first rank sends messages to the second one, which copies each to an array.

    Hosts see a word, and then launch the next copy. All messages use one room, and two
    slots of words in turn. If it is reused early, the sender waits for no word.
    """

    def scenario(machine):
        world, random = World(machine, code), machine.random
        most, offset = 16 * 18, random.choice([0, 8, 1])
        room = world.map("room", most + 16)[0]
        words = world.memory.map("words", 32, fill=0)
        counts = world.map("counts", 16, fill=0)
        sizes = [16 * random.choice([1, 3, 4, 9, 18]) for _ in range(3)]
        if offset == 1 or random.random() < 0.5:  # with bytes at the end
            sizes = 3 * [random.choice([3, 35])]
        for number, nbytes in enumerate(sizes, 1):
            place = number % 2
            ready, read = words + 16 * place, words + 16 * place + 8
            if number > 1 and not reused_early:
                before = words + 16 * (1 - place) + 8
                world.launch(0, code.programs.see, 1, before, number - 1)
            source, target = (
                world.map(name, most + 16)[rank] + offset
                for rank, name in enumerate(("sent", "received"))
            )
            plant(world, source, target, nbytes)
            copy(world, 0, room + offset, source, nbytes, counts, place, ready, number)
            world.launch(1, code.programs.see, 1, ready, number)
            copy(world, 1, target, room + offset, nbytes, counts, place, read, number)
        world.run()

    return scenario


def copy(world, rank, target, source, nbytes, counts, place, *word):
    """Enqueue a copy, as the host does."""
    made = world.code.message_copy
    width = width_of(made, target, source)
    grid = min(-(-nbytes // (width * made.THREADS)), made.MOST_BLOCKS)
    given = target, source, nbytes, width, grid, counts[rank] + 8 * place, *word
    world.streams[rank].append(made.kernel().bind(grid, *given))


def width_of(made, target, source):
    """Return how many bytes a thread copies at a time."""
    either = target | source
    return made.VECTOR if either % made.VECTOR == 0 else 8 if either % 8 == 0 else 1


def plant(world, source, target, nbytes):
    """Put values at a source, which are expected at the target."""
    width = width_of(world.code.message_copy, target, source)
    at = 0
    while at < nbytes:
        whole = width >= 8 and at < nbytes // width * width
        element = 8 if whole else 1
        value = world.random.getrandbits(8 * element)
        world.memory.plant(source + at, element, value)
        world.expect(target + at, [value], element)
        at += element


def test_messages_through_a_room():
    holds(messages_through_a_room(device_code()), 2, 400)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_copies_broken_are_found(what, races):
    breaks(messages_through_a_room(device_code(BROKEN[what])), 2, races=races)


@by_anything_and_by_result
def test_a_room_that_is_reused_early_is_found(races):
    breaks(messages_through_a_room(device_code(), reused_early=True), 2, races=races)
