"""Messages through a room: copies that tell hosts of their end by words."""

from dataclasses import replace

import pytest

from explore import intrinsics
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
    "the sender's word relaxed": within(
        *("message_copy", "await"),
        "intrinsics.ld_acquire_sys_u64",
        "intrinsics.ld_relaxed_sys_u64",
    ),
    "the sender's word told relaxed": within(
        *("message_copy", "tell"),
        "intrinsics.atom_add_release_sys_u64",
        "intrinsics.atom_add_relaxed_sys_u64",
    ),
    "the sender's word heard relaxed": within(
        *("message_copy", "listen"),
        "intrinsics.ld_acquire_sys_u64",
        "intrinsics.ld_relaxed_sys_u64",
    ),
    "copies before thread 0 has found the word": within(
        *("message_copy", "meet"),
        "intrinsics.syncthreads_or(thread == 0 and looks == 0)",
        "thread == 0 and looks == 0",
    ),
    "late blocks counted as others": within(
        *("message_copy", "late"), "late * _LATE", "0"
    ),
}


def messages_through_a_room(code, reused_early=False, later=0.3):
    """The first rank sends messages to the second one, which copies each to an array.

    Hosts see a word, and then launch the next copy; or the receiver's launches it
    before, and launches it again if it was late. All messages use one room, and two
    slots of words in turn. If it is reused early, the sender waits for no word. The
    part ``later`` of the receiver's copies is launched after the word.
    """

    def scenario(machine):
        world, random = World(machine, code), machine.random
        most, offset = 16 * 18, random.choice([0, 8, 1])
        room = world.map("room", most + 16)[0]
        words = world.memory.map("words", 48, fill=0)
        counts = world.map("counts", 16, fill=0)
        sizes = [16 * random.choice([1, 3, 4, 9, 18]) for _ in range(3)]
        if offset == 1 or random.random() < 0.5:  # with bytes at the end
            sizes = 3 * [random.choice([3, 35])]
        for number, nbytes in enumerate(sizes, 1):
            place = number % 2
            ready = words + 24 * place
            if number > 1 and not reused_early:
                before = words + 24 * (1 - place) + 8
                world.launch(0, code.programs.see, 1, before, number - 1)
            source, target = (
                world.map(name, most + 16)[rank] + offset
                for rank, name in enumerate(("sent", "received"))
            )
            plant(world, source, target, nbytes)
            copy(
                world, 0, room + offset, source, nbytes, counts, place, 0, ready, number
            )
            given = target, room + offset, nbytes, counts, place
            if random.random() < later:
                world.launch(1, code.programs.see, 1, ready, number)
                copy(world, 1, *given, 0, ready + 8, number)
                continue
            copy(world, 1, *given, random.choice([1, 3]), ready + 8, number)
            world.launch(1, code.programs.see_late, 1, ready, number)
            again = copy(world, 1, *given, 0, ready + 8, number)
            world.streams[1][-1] = replace(
                again, kernel=if_late(again.kernel, ready + 16, number)
            )
        world.run()

    return scenario


def if_late(kernel, late, number):
    """Return a kernel that is run only after it was late, as the host does."""

    def again(*args):
        if (yield from intrinsics.ld_acquire_sys_u64(late)) == number:
            yield from kernel(*args)

    return again


def copy(world, rank, target, source, nbytes, counts, place, looks, *word):
    """Enqueue a copy, as the host does, and return its launch."""
    made = world.code.message_copy
    width = width_of(made, target, source)
    grid = min(-(-nbytes // (width * made.THREADS)), made.MOST_BLOCKS)
    count = counts[rank] + 8 * place
    given = target, source, nbytes, width, grid, count, looks, *word
    world.streams[rank].append(made.kernel().bind(grid, *given))
    return world.streams[rank][-1]


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
    breaks(messages_through_a_room(device_code(BROKEN[what]), later=0), 2, races=races)


@by_anything_and_by_result
def test_a_room_that_is_reused_early_is_found(races):
    breaks(messages_through_a_room(device_code(), reused_early=True), 2, races=races)
