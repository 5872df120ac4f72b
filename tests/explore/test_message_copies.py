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
    "the message's number relaxed": within(
        *("message_copy", "await"),
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


def messages_through_a_room(code, reused_early=False, alone=0.3, count_of_both=False):
    """Ranks send messages to each other or to themselves, through a room of each rank.

    Hosts see a word, and then launch the next copy. Or one launch has the copies of the
    message that a rank sends and of the one that it receives, and the second one is
    launched again if it was late. All messages of a rank use one room, and two slots of
    words in turn. If it is reused early, the sender waits for no word. The part
    ``alone`` of the copies have a launch each. Both copies of a message may have one
    count, which is wrong.
    """

    def scenario(machine):
        world, random = World(machine, code), machine.random
        most, offset = 16 * 18, random.choice([0, 8, 1])
        head = code.message_copy.HEAD
        rooms = [at + head for at in world.map("room", head + most)]
        for room in rooms:
            world.memory.plant(room - head, 8, 0)
        words = [world.memory.map(f"words of {n}", 48, fill=0) for n in range(2)]
        counts = world.map("counts", 64, fill=0)
        envelopes = world.memory.map("envelopes", 64, fill=0)
        ends = random.choice([3, 35] if offset == 1 else [3, 35, 0, 0])  # with bytes
        for number in range(1, 4):
            place = number % 2
            slots = [mine + 24 * place for mine in words]
            arrays = [world.map(name, most + 16) for name in ("sent", "received")]
            senders = random.choice([(0, 1), (1, 0), (1, 0)])  # by receiver
            sizes = [16 * random.choice([1, 3, 4, 9, 18]) for _ in rooms]
            if ends:
                sizes = 2 * [ends]
            for rank, sender in enumerate(senders):
                sent, received = (each[rank] + offset for each in arrays)
                plant(world, arrays[0][sender] + offset, received, sizes[sender])
                if number > 1 and not reused_early:
                    before = words[rank] + 24 * (1 - place) + 8
                    world.launch(rank, code.programs.see, 1, before, number - 1)
                mine, theirs = (
                    envelopes + 32 * each + 8 * number for each in (rank, sender)
                )
                world.launch(rank, code.programs.tell, 1, mine, number)
                count = [
                    counts[rank] + 8 * (4 * place + 2 * each + second)
                    for each, second in ((rank, 0), (sender, not count_of_both))
                ]
                ready = slots[sender]
                sends = rooms[rank], sent, sizes[rank], count[0]
                receives = received, rooms[sender], sizes[sender], count[1]
                sends = part(code, *sends, slots[rank], number)
                receives = part(code, *receives, ready + 8, number)
                if random.random() < alone:
                    launch(world, rank, sends, NONE)
                    world.launch(rank, code.programs.see, 1, ready, number)
                    launch(world, rank, NONE, receives)
                    continue
                world.launch(rank, code.programs.see, 1, theirs, number)
                launch(world, rank, sends, receives, code.message_copy.LOOKS)
                world.launch(rank, code.programs.see_late, 1, ready, number)
                again = launch(world, rank, NONE, receives)
                late = if_late(again.kernel, ready + 16, number)
                world.streams[rank][-1] = replace(again, kernel=late)
        world.run()

    scenario.blocks = lambda ranks, shape: 2 * shape.blocks
    return scenario


def if_late(kernel, late, number):
    """Return a kernel that is run only after it was late, as the host does."""

    def again(*args):
        if (yield from intrinsics.ld_acquire_sys_u64(late)) == number:
            yield from kernel(*args)

    return again


def part(code, target, source, nbytes, *rest):
    """Return the arguments of a copy."""
    made = code.message_copy
    width = width_of(made, target, source)
    grid = min(-(-nbytes // (width * made.THREADS)), made.MOST_BLOCKS)
    return target, source, nbytes, width, grid, *rest


NONE = (0,) * 8  # no copy


def launch(world, rank, sends, receives, looks=0):
    """Enqueue one copy or two, as the host does, and return their launch."""
    grid, made = sends[4] + receives[4], world.code.message_copy
    world.streams[rank].append(made.kernel().bind(grid, *sends, *receives, looks))
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
    breaks(messages_through_a_room(device_code(BROKEN[what]), alone=0), 2, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("how", ["reused_early", "count_of_both"])
def test_memory_that_is_shared_is_found(how, races):
    breaks(messages_through_a_room(device_code(), **{how: True}), 2, races=races)
