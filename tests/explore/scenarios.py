"""Scenarios: calls of the ranks, in random order and of random sizes.

A scenario runs its calls on a machine, and raises a Finding if it finds a fault.
"""

import pytest

from explore.failures import Finding
from explore.scheduler import Machine, explore
from explore.source import SMALL, device_code
from explore.world import ALGORITHMS, World, an_integer, on_own_arrays
from numba_symm.collectives.operations import ALL_REDUCE
from tests.algorithms import ONE_SHOTS, TWO_SHOTS, transports
from tests.whole import WHOLE

WORST = 1000  # schedules that find every broken protocol; most need fewer than 20
by_anything_and_by_result = pytest.mark.parametrize(
    "races", [True, False], ids=["by anything", "by result"]
)
worlds = pytest.mark.parametrize("ranks", [2, 3])
each_transport = pytest.mark.parametrize("transport", ["sentinel", "marked", "ll"])


def each_broken(table, ranks=(2, 3)):
    """Run a test for each broken variant, affected algorithm, and number of ranks.

    By the name of a variant, ``table`` has the algorithms, and then the edits.
    """
    cases = [
        pytest.param(algorithm, edits, n, id=f"{what}-{algorithm}-{n}")
        for what, (algorithms, *edits) in table.items()
        for algorithm in algorithms
        for n in ranks
    ]
    return pytest.mark.parametrize(("algorithm", "edits", "ranks"), cases)


def counts(shape):
    """Return the numbers of words of calls.

    With one or two blocks, a call takes 1 to 5 epochs, full or partial, with whole
    vectors or not.
    """
    half = shape.threads * shape.vectors  # of what a block sends to a peer in an epoch
    larger = [half * n // 4 for n in (6, 8, 9, 13, 18, 21, 36)]
    return [1, 2, 3, 5, *larger]


def a_count(world):
    """Return a call's number of words."""
    return world.random.choice(counts(world.code.shape))


def some_blocks(machine, code):
    """Return a communicator's agreed limit of blocks."""
    return machine.random.choice(range(1, code.shape.blocks + 1))


def all_reduces(code, *algorithms):
    """All-reduces of random sizes, one after another."""

    def scenario(machine):
        world = World(machine, code, blocks=a_limit(machine, code, algorithms))
        for _ in range(4):
            algorithm = machine.random.choice(algorithms)
            world.all_reduce(algorithm, a_count(world))
            if machine.random.random() < 0.1:
                world.barrier()
        world.run()

    return scenario


def calls_of(code, *names):
    """Collectives, of which some use the same slots and flags."""

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        for _ in range(4):
            name = machine.random.choice(names)
            count = a_count(world)
            if name in ALGORITHMS:
                world.all_reduce(name, count)
            else:
                getattr(world, name)(count)
        world.run()

    return scenario


def mailed_calls(code, transport):
    """Calls that share mailboxes, in some of which few threads exchange."""

    def scenario(machine):
        algorithm = f"one_shot_{transport}"
        world = World(machine, code, blocks=a_limit(machine, code, [algorithm]))
        for _ in range(4):
            count = a_count(world)
            if machine.random.random() < 0.2:
                world.all_reduce(algorithm, count)
            else:
                world.mailed(transport, count)
        world.run()

    return scenario


def calls_on_own_arrays(code, epochs=0, lag=0, names=None):
    """Broadcasts and reductions of the same arrays, one after another.

    The first call follows ``epochs`` epochs; the flags are older than that by ``lag``.
    All operations between own arrays, or those of ``names``.
    """

    def scenario(machine):
        blocks = some_blocks(machine, code)
        fewer = machine.random.choice([blocks, (blocks + 1) // 2])
        world = World(machine, code, blocks, fewer)
        region = world.layout.direct
        if epochs:
            world.plant_epochs(region, epochs, epochs - lag)
        for workspace in world.workspaces if epochs else ():
            packets = 8 * (world.size - 1) * world.blocks
            for at in range(region.slots, region.slots + 8 * packets, 8):
                world.memory.plant(workspace + at, 8, epochs << 32 | 77)
        count = a_count(world)
        arrays = world.map("array", 8 * count + 8)
        if machine.random.random() < 0.1:
            arrays[0] += 8  # not aligned to 16 bytes
        refusals = arrays[0] % 16
        words = [[an_integer(machine.random) for _ in range(count)] for _ in arrays]
        for array, mine in zip(arrays, words, strict=True):
            for i, word in enumerate(mine):
                world.memory.plant(array + 8 * i, 8, word)
        for _ in range(4):
            name = machine.random.choice(on_own_arrays(world.size, count, names))
            refusing = machine.random.choice([None, None, None, *range(world.size)])
            refusals += refusing is not None
            words = world.on_own_arrays(name, arrays, words, refusing)
            if machine.haste:
                # A rank that gave up may use its array again while a rank that did not
                # have to wait still accesses it: see ``handshake``.
                for rank, array in enumerate(arrays):
                    world.expect(array, words[rank])
                continue
            # Later kernels of each stream read and write the array.
            copies = world.map("copy", 8 * count)
            inputs, new = world.inputs(count)
            for rank, array in enumerate(arrays):
                args = (copies[rank], array, count)
                world.launch(rank, code.programs.write, 1, *args)
                world.expect(copies[rank], words[rank])
                world.launch(rank, code.programs.write, 1, array, inputs[rank], count)
            words = new
        world.run()
        marked = {world.is_marked(rank) for rank in range(world.size)}
        # After a refusal, a call through the workspace may fail, which marks one rank.
        if len(marked) > 1 and not refusals:
            raise Finding("result", "a rank is not marked as failed")

    return scenario


def long_all_reduces(code):
    """All-reduces in more chunks than a block has sets of slots."""

    def scenario(machine):
        world, workspace = World(machine, code, blocks=1), code.workspace
        vectors = workspace.THREADS * workspace.CHUNKED.tiles(world.size)
        for _ in range(2):
            chunks = machine.random.choice([1, 4, 5, 6])
            world.all_reduce("chunked", 2 * world.size * vectors * chunks)
        world.run()

    return scenario


def calls_at_the_wrap(code, *names):
    """Calls on the same slots as the epochs wrap around."""

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        region = world.layout.chunked
        epoch = 2**32 - 1 - machine.random.randrange(12)
        world.plant_epochs(region, epoch)
        for _ in range(4):
            name, count = machine.random.choice(names), a_count(world)
            if name in ALGORITHMS:
                world.all_reduce(name, count)
            else:
                getattr(world, name)(count)
        world.run()

    return scenario


def messages(code, epoch=0):
    """Launches of several messages each, between random ranks.

    Each channel has transferred ``epoch`` chunks before.
    """

    def scenario(machine):
        world = World(machine, code, blocks=channels(machine, code))
        if epoch:
            world.plant_chunks(epoch)
        for _ in range(3):
            number = machine.random.choice([1, 2, 2, 3])
            world.messages(*(a_length(world) for _ in range(number)))
        world.run()

    scenario.blocks = blocks_of_messages
    return scenario


def requests(code):
    """Requests between random ranks, beside other messages."""

    def scenario(machine):
        world = World(machine, code, blocks=channels(machine, code))
        for _ in range(2):
            world.requests(*(a_length(world) for _ in range(3)))
            world.messages(a_length(world))
        world.run()

    scenario.blocks = blocks_of_messages
    return scenario


def requests_and_sums(code, name):
    """All-reduces that follow requests, or requests that follow all-reduces."""

    def scenario(machine):
        world = World(machine, code, blocks=channels(machine, code))
        for _ in range(2):
            getattr(world, name)(max(1, a_length(world)))
        world.run()

    scenario.blocks = blocks_of_messages
    return scenario


def messages_with_gaps(code):
    """Messages between arrays with gaps, of random ranks."""

    def scenario(machine):
        world = World(machine, code, blocks=channels(machine, code))
        for _ in range(3):
            world.with_gaps(machine.random.choice([1, 2, 3, 5, 9]))
        world.run()

    scenario.blocks = blocks_of_messages
    return scenario


def messages_too_long(code):
    """A message that is longer than the room for it."""
    return _failing(code, lambda world: world.too_long(a_length(world)))


def messages_above_their_capacity(code):
    """A message whose count is above its capacity, or beyond the array."""
    return _failing(code, lambda world: world.above(a_length(world) + 1))


def _failing(code, add_one):
    """Return a scenario of one message, after which all ranks have a record."""

    def scenario(machine):
        world = World(machine, code, blocks=channels(machine, code))
        add_one(world)
        world.run()
        boards = range(world.board, world.board + 8 * world.size, 8)
        if not all(machine.memory.final(board, 8) for board in boards):
            raise Finding("result", "a rank has no record of the message")

    scenario.blocks = blocks_of_messages
    return scenario


def blocks_of_messages(ranks, shape):
    """Return the most blocks of a launch: one for each peer and direction."""
    return max(shape.blocks, 2 * (ranks - 1))


def channels(machine, code):
    """Return a limit of blocks that permits a random number of channels."""
    most = code.workspace.channels_of(machine.ranks)
    return 2 * (machine.ranks - 1) * machine.random.choice(range(1, most + 1))


def a_length(world):
    """Return a message's number of words: none, up to five chunks of each channel."""
    shape = world.code.shape
    chunk = 2 * shape.threads * shape.vectors
    all_channels = chunk * world.code.workspace.channels_of(world.size)
    larger = [chunk, chunk + 1, 2 * all_channels + 1, 4 * all_channels + 1]
    return world.random.choice([0, 1, 2, 3, *larger])


def a_limit(machine, code, algorithms):
    """Return a limit of blocks that permits one block of each algorithm, or more."""
    found = set().union(*map(transports, algorithms))
    weights = [code.mailboxes.TRANSPORTS[transport].weight for transport in found]
    return max(weights, default=1) * some_blocks(machine, code)


def all_reduces_at_the_wrap(code, algorithm):
    """Calls as the epoch wraps around, over packets of 2**32 epochs ago.

    Mailboxes that only large calls use may contain packets of any old epoch, such as
    those that follow the wrap.
    """

    def scenario(machine):
        world = World(machine, code, blocks=a_limit(machine, code, [algorithm]))
        made = ALL_REDUCE.algorithms[algorithm]
        region, mailed = getattr(world.layout, made.region), bool(made.transport)
        last = device_code().mailboxes.LAST_EPOCH if mailed else 2**32 - 1
        epoch = last - 2 - machine.random.randrange(3)
        world.plant_epochs(region, epoch)
        for workspace in world.workspaces if made.transport == "ll" else ():
            plant_old_packets(world, workspace, region, 1 + (made.region in TWO_SHOTS))
        # Small calls leave old packets in mailboxes that large calls use.
        for _ in range(7):
            count = machine.random.choice([1, 2, 5, 9, 18])
            if made.region in ONE_SHOTS and machine.random.random() < 0.3:
                world.mailed(made.transport, count)
            else:
                world.all_reduce(algorithm, count)
        world.run()

    return scenario


def plant_old_packets(world, workspace, region, sets):
    """Fill sets of mailboxes with packets of the first epochs of their half."""
    tiles = world.code.workspace.ONE_SHOT["ll"].tiles(world.size)
    boxes = world.blocks * world.code.shape.threads * sets * (world.size - 1) * tiles
    packets = 2 * boxes  # in a half
    assert region.slots + 2 * 16 * packets <= region.end
    for packet in range(2 * packets):
        half = packet // packets
        old = world.random.choice([2, 4]) - half
        for word in range(2):
            address = workspace + region.slots + 16 * packet + 8 * word
            data = world.random.getrandbits(32)
            world.memory.plant(address, 8, old << 32 | data)


def exchanges_between_barriers(code):
    """Kernels that store into peers' memory, call ``barrier``, and load."""

    def scenario(machine):
        world = World(machine, code)
        # After a failure, a user's later kernels do not find it.
        for _ in range(1 if machine.haste else 2):
            grid, rounds = 1 + machine.random.randrange(world.blocks), 2
            workers = code.shape.threads * grid
            inputs, words = world.inputs(rounds * workers)
            outputs = world.map("output", 8 * rounds * workers * world.size)
            for context in world.contexts:
                rank = context.rank
                args = (context, inputs[rank], outputs[rank], rounds)
                world.launch(rank, code.programs.exchange, grid, *args)
                for worker in range(workers):
                    for i in range(rounds):
                        # From every rank, the words of this block's other thread.
                        theirs = [mine[rounds * (worker ^ 1) + i] for mine in words]
                        place = (rounds * worker + i) * world.size
                        world.expect(outputs[rank] + 8 * place, theirs)
        world.run()

    return scenario


def words_by_signals(code):
    """A chain of ranks, each of which signals the next one after every word."""

    def scenario(machine):
        world = World(machine, code)
        total = 6
        inputs, words = world.inputs(total)
        outputs = world.map("output", 8 * total)
        for context in world.contexts:
            rank = context.rank
            if rank > 0:
                for first, count in parts(machine, total):
                    args = (context, rank - 1, outputs[rank], first, count)
                    world.launch(rank, code.programs.receive, 1, *args)
                world.expect(outputs[rank], words[rank - 1])
            if rank < world.size - 1:
                for first, count in parts(machine, total):
                    args = (context, rank + 1, inputs[rank], first, count)
                    world.launch(rank, code.programs.send, 1, *args)
        world.run()

    return scenario


def parts(machine, total):
    """Return a split of ``range(total)`` into the ranges of two kernels.

    Where calls may fail, of one kernel: a second one would not find the failure.
    """
    middle = 0 if machine.haste else 1 + machine.random.randrange(total - 1)
    return [(0, middle), (middle, total - middle)][middle == 0 :]


def words_by_signals_of_the_host(code):
    """A chain of ranks, which put and wait for a signal between kernels."""

    def scenario(machine):
        world = World(machine, code)
        total = 3
        inputs, words = world.inputs(total)
        outputs = world.map("output", 8 * total)
        write = code.programs.write
        for context in world.contexts:
            rank, stream = context.rank, world.streams[context.rank]
            for at in range(0, 8 * total, 8):
                if rank > 0:
                    wait = code.pads.wait_signal_kernel(world.size)
                    stream.append(wait.bind(1, context, rank - 1, 0))
                    args = (outputs[rank] + at, world.buffers[rank] + at, 1)
                    world.launch(rank, write, 1, *args)
                if rank < world.size - 1:
                    args = (world.buffers[rank + 1] + at, inputs[rank] + at, 1)
                    world.launch(rank, write, 1, *args)
                    if machine.random.random() < 0.5:
                        stream.append(code.pads.fence_kernel().bind(1))
                    put = code.pads.put_signal_kernel(world.size)
                    stream.append(put.bind(1, context, rank + 1, 0))
            if rank > 0:
                world.expect(outputs[rank], words[rank - 1])
        world.run()

    return scenario


def plain_stores_between_barriers(code, barrier=World.barrier):
    """Kernels that write, a barrier on the stream, and kernels that read from peers."""

    def scenario(machine):
        world = World(machine, code)
        for _ in range(3):
            count = machine.random.choice([1, 2, 5])
            inputs, words = world.inputs(count)
            outputs = world.map("output", 8 * count * world.size)
            for rank in range(world.size):
                args = (world.buffers[rank], inputs[rank], count)
                world.launch(rank, code.programs.write, 1, *args)
            barrier(world)
            for rank in range(world.size):
                args = (world.buffers, outputs[rank], count)
                world.launch(rank, code.programs.read, 1, *args)
                world.expect(outputs[rank], [word for mine in words for word in mine])
            barrier(world)
        world.run()

    return scenario


def search(scenario, ranks, schedules, shape=SMALL, haste=0.0, absent=None, **memory):
    """Run a scenario under many schedules; return what ``explore`` returns.

    Args:
        scenario: the scenario.
        ranks: the number of ranks.
        schedules: the number of schedules.
        shape: the shape of the device code.
        haste: the probability that a deadline has passed when the clock is read.
        absent: with haste, a rank that launches no kernel, so that all others fail.
        memory: attributes of the memory.
    """
    blocks = getattr(scenario, "blocks", lambda ranks, shape: shape.blocks)

    def make(seed):
        machine = Machine(ranks, blocks(ranks, shape), shape.threads, seed)
        machine.haste, machine.absent = haste, absent
        machine.memory.last = 0.3 if haste else 0.05
        for name, value in memory.items():
            setattr(machine.memory, name, value)
        return machine

    return explore(scenario, make, schedules)


def holds(scenario, ranks, schedules, **settings):
    """Fail if a schedule finds a fault; except in full, try a quarter of them."""
    found = search(scenario, ranks, -(-schedules // (4 - 3 * WHOLE)), **settings)
    if found:
        seed, finding = found
        steps = "\n".join(finding.__notes__)
        pytest.fail(f"seed {seed}: {finding}\n{steps}", pytrace=False)


def breaks(scenario, ranks, **settings):
    """Fail if no schedule finds a fault."""
    found = search(scenario, ranks, WORST, **settings)
    assert found, f"{WORST} schedules find no fault"
    seed, finding = found
    print(f"found after {seed + 1} schedules: {finding}")
