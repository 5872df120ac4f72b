"""The protocols in larger shapes than elsewhere, with few schedules each.

More threads, blocks and vectors of a thread, and up to four ranks: mailboxes of several
tiles, blocks without work, numbers of ranks that are not powers of 2.
"""

import pytest

from explore.launches import Launch
from explore.markers import removed, within
from explore.scenarios import (
    a_count,
    a_length,
    blocks_of_messages,
    breaks,
    calls_on_own_arrays,
    channels,
    holds,
    messages,
    messages_above_their_capacity,
    messages_too_long,
    some_blocks,
)
from explore.scheduler import TIMEOUT
from explore.source import Shape, device_code
from explore.test_failures import HASTE, IMPATIENT
from explore.world import ALGORITHMS, World, by_way
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.select import GENERAL

TRANSPORTS = "sentinel", "marked", "ll"
EXCHANGES = [name for name, each in OPERATIONS.items() if name != "all_reduce"]
CHUNKED = [name for name in EXCHANGES if not OPERATIONS[name].rooted]
"""Of these, ``chunked.py`` has an exchange."""

each_shape = pytest.mark.parametrize(
    "shape",
    [Shape(2, 2, 4), Shape(3, 3, 4)],
    ids=lambda shape: "-".join(map(str, shape)),
)
each_size = pytest.mark.parametrize("ranks", [2, 3, 4])


def exchanges(code, *ways):
    """Exchanges of every kind."""

    def scenario(machine):
        world = World(machine, code, blocks=2 * some_blocks(machine, code))
        for _ in range(4):
            way = machine.random.choice(ways)
            add_exchange(world, way)
        world.run()

    return scenario


def add_exchange(world, way):
    names = CHUNKED if way == GENERAL else EXCHANGES
    some = [name for name in names if by_way(name, way)]
    world.exchange(way, world.random.choice(some), a_count(world))


def everything(code, late=False):
    """Calls of every kind; a rank may be ``late``, about as long as the others wait."""

    def scenario(machine):
        world = World(machine, code, blocks=2 * some_blocks(machine, code))
        random = machine.random
        some = {
            "all_reduce": lambda: world.all_reduce(
                random.choice(ALGORITHMS), a_count(world)
            ),
            "mailed": lambda: add_exchange(world, random.choice(TRANSPORTS)),
            "chunked": lambda: add_exchange(world, GENERAL),
            "reduce": lambda: world.reduce(a_count(world)),
            "broadcast": lambda: world.broadcast(a_count(world)),
            "barrier": world.barrier,
            "own_arrays": lambda: world.own_arrays(a_count(world)),
            "messages": lambda: world.messages(a_length(world), a_length(world)),
        }
        for _ in range(3 if late else 5):
            random.choice(list(some.values()))()
        if late:
            stream = random.choice(world.streams)
            waiting = Launch(code.programs.come_late, 1, (TIMEOUT,))
            stream.insert(random.randrange(len(stream) + 1), waiting)
        world.run()

    scenario.blocks = lambda ranks, shape: blocks_of_messages(
        ranks, shape._replace(blocks=2 * shape.blocks)
    )
    return scenario


def groups(code, epoch=0):
    """Make ``messages``, which each rank distributes to launches of its own."""

    def scenario(machine):
        world = World(machine, code, blocks=channels(machine, code))
        if epoch:
            world.plant_chunks(epoch)

        def divided(number):
            places = list(range(number))
            while places:
                some = 1 + machine.random.randrange(len(places))
                yield places[:some]
                del places[:some]

        for _ in range(2):
            number = machine.random.choice([2, 3, 4])
            world.groups([a_length(world) for _ in range(number)], divided)
        world.run()

    scenario.blocks = blocks_of_messages
    return scenario


CALLS = {
    "exchanges_mailed": lambda code: exchanges(code, *TRANSPORTS),
    "exchanges_chunked": lambda code: exchanges(code, GENERAL),
    "everything": everything,
    "own_arrays": calls_on_own_arrays,
    "own_arrays_at_the_wrap": lambda code: calls_on_own_arrays(code, 2**32 - 2),
    "messages": messages,
    "groups": groups,
}


@each_shape
@each_size
@pytest.mark.parametrize("name", CALLS)
def test_calls_in_larger_shapes(name, ranks, shape):
    holds(CALLS[name](device_code(shape=shape)), ranks, 36 // ranks, shape=shape)


@each_shape
@each_size
def test_a_rank_about_the_deadline(ranks, shape):
    code = device_code(IMPATIENT, shape=shape)
    calls = everything(code, late=True)
    holds(calls, ranks, 120 // ranks, shape=shape, haste=HASTE)


FOUR_CHANNELS = {2: Shape(2, 8, 2), 3: Shape(2, 16, 2)}
LAST = 2**32 - 3  # chunks, shortly before their number wraps around


@pytest.mark.parametrize("epoch", [0, LAST], ids=["from the start", "at the wrap"])
@pytest.mark.parametrize("calls", [messages, groups])
@pytest.mark.parametrize("ranks", FOUR_CHANNELS)
def test_messages_through_four_channels(ranks, calls, epoch):
    shape = FOUR_CHANNELS[ranks]
    code = device_code(shape=shape)
    assert code.workspace.channels_of(ranks) == 4
    holds(calls(code, epoch), ranks, 30 // ranks, shape=shape)


LENGTHS_BROKEN = {
    "not cleared": removed("credit", "clear"),
    "cleared before all threads have read it": removed("credit", "agree-length"),
    "known to one channel only": removed("credit", "pass-on"),
    "that of the room": within("transfer", "unknown", "count_at != 0", "False"),
}
UNCOMPARED = within("credit", "capacity", "not fits", "False")
ALONE = "thread_index_x() == 0"
UNREPORTED = within("credit", "report", ALONE, f"peer == other and {ALONE}")
UNCHECKED = within("credit", "room", "nbytes > room", "False")


@pytest.mark.parametrize("what", LENGTHS_BROKEN)
@pytest.mark.parametrize("ranks", FOUR_CHANNELS)
def test_lengths_of_messages_broken_are_found(ranks, what):
    shape = FOUR_CHANNELS[ranks]
    breaks(messages(device_code(LENGTHS_BROKEN[what], shape=shape)), ranks, shape=shape)


@pytest.mark.parametrize("ranks", FOUR_CHANNELS)
def test_a_message_too_long_changes_nothing_and_fails_on_all_ranks(ranks):
    shape = FOUR_CHANNELS[ranks]
    calls = messages_too_long(device_code(IMPATIENT, shape=shape))
    holds(calls, ranks, 60 // ranks, shape=shape)
    calls = messages_too_long(device_code(IMPATIENT, UNCHECKED, shape=shape))
    breaks(calls, ranks, shape=shape)


@pytest.mark.parametrize("calls", [messages, groups])
def test_credits_that_are_compared_without_the_wrap_are_found(calls):
    old = "(ld_acquire_sys_u32(flag) - epoch) & 0xFFFFFFFF < 0x80000000"
    edit = within("polling", "await-epoch", old, "ld_acquire_sys_u32(flag) >= epoch")
    shape = FOUR_CHANNELS[2]
    breaks(calls(device_code(edit, shape=shape), LAST), 2, shape=shape)


@pytest.mark.parametrize("ranks", FOUR_CHANNELS)
def test_counts_above_the_capacity_send_nothing_and_fail_on_all_ranks(ranks):
    shape = FOUR_CHANNELS[ranks]
    scenario = messages_above_their_capacity
    holds(
        scenario(device_code(IMPATIENT, shape=shape)), ranks, 60 // ranks, shape=shape
    )
    for edit in (UNCOMPARED, UNREPORTED)[: ranks - 1]:
        code = device_code(IMPATIENT, edit, shape=shape)
        breaks(scenario(code), ranks, shape=shape)


@each_size
def test_a_sender_fills_all_slots_without_its_receiver(ranks):
    def scenario(machine):
        world = World(machine, device_code(), blocks=2 * (ranks - 1))
        for _ in range(2):
            world.ahead()
        world.run()

    scenario.blocks = blocks_of_messages
    holds(scenario, ranks, 10)
