"""The protocols under thousands of interleavings and a weak memory.

Every claim comes with its negative controls: the same code with one thing broken,
which the same search must find.

With race reports switched off, what is broken must show in what comes out: wrong or
unwritten words, or ranks that wait for ever.
"""

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from explore.memory import Finding
from explore.scheduler import Launch, Machine, explore
from explore.source import MAX_BLOCKS, THREADS, device_code
from numba_symm import dtypes
from numba_symm.collectives import (
    broadcast_signalled,
    exchange_signalled,
    reduce_signalled,
    two_shot_signalled,
)
from numba_symm.collectives.launches import InTurn

INT64, FLOAT64 = (dtypes.element(name, "test") for name in ("int64", "float64"))
ALGORITHMS = (
    "one_shot_sentinel",
    "one_shot_ll",
    "two_shot_sentinel",
    "two_shot_ll",
    "one_shot_marked",
    "two_shot_marked",
    "two_shot_signalled",
    "one_shot_pull",
)
MAILED = ALGORITHMS[:6]
# With a block or two, 1 to 5 rounds; full and partial ones, whole vectors or not.
COUNTS = [1, 2, 3, 5, 6, 8, 9, 13, 18, 21, 36]
WORST = 400  # schedules in which a broken protocol must show; most need under 20
ALL_ONES = 2**64 - 1


def ones(nbytes):
    """Return a word of ones."""
    return 2 ** (8 * nbytes) - 1


by_anything_and_by_result = pytest.mark.parametrize(
    "races", [True, False], ids=["by anything", "by result"]
)
worlds = pytest.mark.parametrize("ranks", [2, 3])
each_transport = pytest.mark.parametrize("transport", ["sentinel", "marked", "ll"])
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


class World:
    """Ranks with workspaces, boards and pads; their launches; what must come out."""

    def __init__(self, machine, code, timeout=0, blocks=2 * MAX_BLOCKS):
        self.machine, self.memory, self.random = machine, machine.memory, machine.random
        self.code = code
        self.size = machine.ranks
        self.layout = code.workspace.layout(self.size)
        self.streams = [[] for _ in range(self.size)]
        self.expected = {}  # words by address; None: a NaN
        self.alike = []  # addresses of words that must be the same on all ranks
        self.workspaces = self.map("workspace", self.layout.nbytes, self.initial)
        self.board = self.memory.map("board", 8 * self.size, fill=0)
        self.buffers = self.map("buffer", 8 * 64)
        self.pads = self.map("pad", 4 * self.size * MAX_BLOCKS, fill=0)
        Guard, Context = code.signals.Guard, code.signals.Context
        guards = [
            Guard(self.board, rank, self.size, timeout) for rank in range(self.size)
        ]
        self.contexts = [
            Context(guard.rank, self.size, tuple(self.buffers), tuple(self.pads), guard)
            for guard in guards
        ]
        workspace = SimpleNamespace(addresses=self.workspaces)
        self.comms = [
            SimpleNamespace(
                rank=guard.rank,
                size=self.size,
                max_blocks=blocks,
                guard=guard,
                workspace=workspace,
            )
            for guard in guards
        ]

    def map(self, name, nbytes, fill=None):
        """Return every rank's address of new memory."""
        return [
            self.memory.map(f"rank {rank}'s {name}", nbytes, fill)
            for rank in range(self.size)
        ]

    def initial(self, offset):
        """Return bytes and value of a word of a workspace: ones where nothing has come.

        In mailboxes with marks every row of vectors is followed by one of marks.
        """
        code = self.code.workspace
        for region in self.layout.sentinels:
            if region.slots <= offset < region.end:
                place = (offset - region.slots) % code.ONE_SHOT["marked"].row
                marked = self.layout.one_shot_marked, self.layout.two_shot_marked
                nbytes = 4 if region in marked and place >= code.ROW else 8
                return nbytes, ones(nbytes)
        return 0, 0

    def inputs(self, count, draw=None):
        """Return every rank's address of random words, and the words."""
        addresses = self.map("input", 8 * count + 8)
        # Now and then not aligned to 16 bytes.
        addresses = [base + self.random.choice([0, 8]) for base in addresses]
        words = [
            [(draw or an_integer)(self.random) for _ in range(count)] for _ in addresses
        ]
        for address, mine in zip(addresses, words, strict=True):
            for i, word in enumerate(mine):
                self.memory.plant(address + 8 * i, 8, word)
        return addresses, words

    def launch(self, rank, kernel, grid, *args):
        self.streams[rank].append(Launch(kernel, grid, args))

    def expect(self, address, words):
        for i, word in enumerate(words):
            self.expected[address + 8 * i] = word

    def all_reduce(self, algorithm, count):
        module, _, transport = algorithm.rpartition("_")
        bind = getattr(getattr(self.code, algorithm, None), "bind", None)
        if bind is None:
            bind = partial(getattr(self.code, module).bind, transport)
        kind = FLOAT64 if transport == "sentinel" else self.random.choice(KINDS)
        sources, words = self.inputs(count, DRAW[kind])
        in_place = self.random.random() < 0.5
        targets = sources if in_place else self.map("output", 8 * count)
        total = [TOTAL[kind](column) for column in zip(*words, strict=True)]
        for comm, source, target in zip(self.comms, sources, targets, strict=True):
            launch = bind(comm, source, target, count, kind, "sum")
            self.streams[comm.rank].append(launch)
            self.expect(target, total)
        self.alike += [[t + 8 * i for t in targets] for i in range(count)]

    def reduce(self, count):
        """Add a reduction to any root by ``reduce_signalled``."""
        root = self.random.randrange(self.size)
        kind = self.random.choice(KINDS)
        sources, words = self.inputs(count, DRAW[kind])
        target = self.random.choice([sources, self.map("output", 8 * count)])[root]
        total = [TOTAL[kind](column) for column in zip(*words, strict=True)]
        for comm in self.comms:
            mine = target if comm.rank == root else 0
            args = (comm, sources[comm.rank], mine, count, kind, "sum", root)
            self.streams[comm.rank].append(self.code.reduce_signalled.bind(*args))
        self.expect(target, total)

    def broadcast(self, count):
        """Add a broadcast from any root by ``broadcast_signalled``."""
        root = self.random.randrange(self.size)
        arrays, words = self.inputs(count)
        for comm, array in zip(self.comms, arrays, strict=True):
            args = (comm, array, array, count, INT64, "sum", root)
            self.streams[comm.rank].append(self.code.broadcast_signalled.bind(*args))
            self.expect(array, words[root])

    def on_own_arrays(self, name, root, arrays, outputs, count, refusing=None):
        """Add a call of a kernel that works on all ranks' arrays.

        Another one goes through the workspace if rank ``refusing`` has another kind of
        memory.
        """
        for comm, array, output in zip(self.comms, arrays, outputs, strict=True):

            def seen(address, nbytes, refuses=comm.rank == refusing):
                return None if refuses else (address,) * self.size

            comm.heap = SimpleNamespace(seen=seen)
            target = output if "broadcast" in name or comm.rank == root else 0
            args = (comm, array, target, count, INT64, "sum", root)
            bound = getattr(self.code, name).bind(*args)
            launches = bound._calls if isinstance(bound, InTurn) else [bound]
            self.streams[comm.rank] += launches

    def messages(self, *counts):
        """Add messages of some lengths between any ranks, in one launch a rank."""
        Message = self.code.transfer.Message
        sends, receives = [], []
        for count in counts:
            src, dst = self.random.sample(range(self.size), 2)
            arrays, words = self.inputs(count)
            target = self.map("output", 8 * count)[dst]
            sends.append((src, Message(dst, arrays[src], 8 * count)))
            receives.append((dst, Message(src, target, 8 * count)))
            self.expect(target, words[src])
        for comm in self.comms:
            lists = [
                [m for r, m in found if r == comm.rank] for found in (sends, receives)
            ]
            if any(lists):
                self.streams[comm.rank].append(self.code.transfer.bind(comm, *lists))

    def scan(self, count):
        """Add an inclusive scan by ``exchange_signalled``."""
        kind = self.random.choice(KINDS)
        exchanged = self.code.exchange.EXCHANGES["scan"]
        sources, words = self.inputs(count, DRAW[kind])
        targets = self.map("output", 8 * count)
        for comm, source, target in zip(self.comms, sources, targets, strict=True):
            args = (exchanged, comm, source, target, count, kind, "sum")
            self.streams[comm.rank].append(self.code.exchange_signalled.bind(*args))
            columns = zip(*words[: comm.rank + 1], strict=True)
            self.expect(target, [TOTAL[kind](column) for column in columns])

    def gather(self, count):
        """Add an all-gather by ``exchange_signalled``."""
        exchanged = self.code.exchange.EXCHANGES["all_gather"]
        sources, words = self.inputs(count)
        targets = self.map("output", 8 * count * self.size + 8)
        for comm, source, target in zip(self.comms, sources, targets, strict=True):
            args = (exchanged, comm, source, target, count, INT64, "sum")
            self.streams[comm.rank].append(self.code.exchange_signalled.bind(*args))
            for rank, mine in enumerate(words):
                self.expect(target + 8 * count * rank, mine)

    def mailed(self, transport, count):
        """Add a broadcast or a reduction of any root, or a scan, by ``exchange``."""
        name = self.random.choice(["broadcast", "reduce", "scan"])
        exchanged = self.code.exchange.EXCHANGES[name]
        root = self.random.randrange(self.size)
        moved = FLOAT64 if transport == "sentinel" else self.random.choice(KINDS)
        sources, words = self.inputs(count, DRAW[moved])
        in_place = name == "broadcast" or self.random.random() < 0.5
        targets = sources if in_place else self.map("output", 8 * count)
        for comm, source, target in zip(self.comms, sources, targets, strict=True):
            args = (transport, exchanged, comm, source, target, count, moved, "sum")
            self.streams[comm.rank].append(self.code.exchange.bind(*args, root))
            if name == "broadcast":
                total = words[root]
                if transport == "sentinel":
                    total = [w if w != ALL_ONES else None for w in total]
                self.expect(target, total)
            elif name == "scan" or comm.rank == root:
                last = comm.rank + 1 if name == "scan" else self.size
                columns = zip(*words[:last], strict=True)
                self.expect(target, [TOTAL[moved](column) for column in columns])

    def barrier(self):
        for comm in self.comms:
            self.streams[comm.rank].append(self.code.barrier.bind(comm))

    def run(self):
        self.machine.run(self.streams)
        for address, word in self.expected.items():
            found = self.memory.final(address, 8)
            right = (
                found == word
                if word is not None
                else float_of(found) != float_of(found)
            )
            if not right:
                raise Finding("result", f"{found} at {address:#x} is not {word}")
        self.check_alike(self.alike, "results")
        for region in (getattr(self.layout, name) for name in REGIONS):
            blocks = 1 if region is self.layout.barrier else MAX_BLOCKS
            epochs = range(region.epochs, region.epochs + 4 * blocks, 4)
            places = [
                [workspace + at for workspace in self.workspaces] for at in epochs
            ]
            self.check_alike(places, "epochs", 4)
        for workspace in self.workspaces:
            for at, value in self.memory.accessed(workspace, self.layout.nbytes):
                _, empty = self.initial(at)
                if empty not in (0, value):
                    raise Finding("result", f"a vector is left at {workspace + at:#x}")
        for pad in self.pads:
            for slot in range(self.size * MAX_BLOCKS):
                if self.memory.final(pad + 4 * slot, 4) != 0:
                    raise Finding("result", f"slot {slot} of a pad is not 0")

    def check_alike(self, places, what, nbytes=8):
        for addresses in places:
            found = [self.memory.final(address, nbytes) for address in addresses]
            if len(set(found)) > 1:
                raise Finding("result", f"{what} at {addresses} differ: {found}")


REGIONS = (
    "barrier",
    "direct",
    *dict.fromkeys(name.replace("one_shot_pull", "pull") for name in ALGORITHMS),
)


def an_integer(random):
    return random.getrandbits(40)


def a_word(random):
    """Return a number, or now and then the word of all ones."""
    return ALL_ONES if random.random() < 0.1 else an_integer(random)


def a_float(random):
    """Return a float's bits: of a number, or now and then the NaN of all ones."""
    return ALL_ONES if random.random() < 0.1 else bits_of(random.random())


def bits_of(number):
    return int(np.float64(number).view(np.uint64))


def float_of(word):
    return float(np.uint64(word).view(np.float64))


def float_sum(words):
    """Return the bits of the sum in that order, or None if it is a NaN."""
    return None if ALL_ONES in words else bits_of(sum(map(float_of, words)))


def integer_sum(words):
    return sum(words) & ALL_ONES


KINDS = INT64, FLOAT64
DRAW = {INT64: a_word, FLOAT64: a_float}
TOTAL = {INT64: integer_sum, FLOAT64: float_sum}


def all_reduces(code, *algorithms):
    """Calls of any size, one right after the other."""

    def scenario(machine):
        world = World(machine, code, blocks=a_limit(machine.random, algorithms))
        for _ in range(4):
            algorithm = machine.random.choice(algorithms)
            world.all_reduce(algorithm, machine.random.choice(COUNTS))
            if machine.random.random() < 0.1:
                world.barrier()
        world.run()

    return scenario


def calls_of(code, *names):
    """Calls of collectives, of which some use the same slots and flags."""

    def scenario(machine):
        world = World(machine, code, blocks=machine.random.choice([1, 2]))
        for _ in range(4):
            name = machine.random.choice(names)
            count = machine.random.choice(COUNTS)
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
        world = World(machine, code, blocks=a_limit(machine.random, [algorithm]))
        for _ in range(4):
            count = machine.random.choice(COUNTS)
            if machine.random.random() < 0.2:
                world.all_reduce(algorithm, count)
            else:
                world.mailed(transport, count)
        world.run()

    return scenario


def calls_on_own_arrays(code, epochs=0, lag=0):
    """Broadcasts and reductions of the same arrays, one right after the other.

    After so many ``epochs``, as which the flags are, or older by ``lag``.
    """

    def scenario(machine):
        world = World(machine, code, blocks=machine.random.choice([1, 2]))
        region = world.layout.direct
        for workspace in world.workspaces if epochs else ():
            for at in [
                *range(region.epochs, region.epochs + 4 * MAX_BLOCKS, 4),
            ]:
                world.memory.plant(workspace + at, 4, epochs)
            for at in range(region.flags, region.slots, 4):
                world.memory.plant(workspace + at, 4, epochs - lag)
            packets = 8 * (world.size - 1)
            for at in range(region.slots, region.slots + 8 * packets, 8):
                world.memory.plant(workspace + at, 8, epochs << 32 | 77)
        count = machine.random.choice(COUNTS)
        arrays = world.map("array", 8 * count + 8)
        if machine.random.random() < 0.1:
            arrays[0] += 8  # not aligned to 16 bytes
        words = [[an_integer(machine.random) for _ in range(count)] for _ in arrays]
        for array, mine in zip(arrays, words, strict=True):
            for i, word in enumerate(mine):
                world.memory.plant(array + 8 * i, 8, word)
        for _ in range(4):
            root = machine.random.randrange(world.size)
            name = machine.random.choice(["broadcast_direct", "reduce_direct"])
            refusing = machine.random.choice([None, None, None, *range(world.size)])
            outputs = arrays
            if name == "broadcast_direct":
                words = [words[root]] * world.size
            else:
                total = [sum(column) for column in zip(*words, strict=True)]
                if machine.random.random() < 0.5:
                    outputs = world.map("output", 8 * count)
                    world.expect(outputs[root], total)
                else:
                    words = [*words[:root], total, *words[root + 1 :]]
            world.on_own_arrays(name, root, arrays, outputs, count, refusing)
            # What follows on each stream reads and writes the array at once.
            copies = world.map("copy", 8 * count)
            inputs, new = world.inputs(count)
            for rank, array in enumerate(arrays):
                args = (copies[rank], array, count)
                world.launch(rank, code.programs.write, 1, *args)
                world.expect(copies[rank], words[rank])
                world.launch(rank, code.programs.write, 1, array, inputs[rank], count)
            words = new
        world.run()

    return scenario


def calls_after_many(code, lag):
    """All-reduces after calls that raise one set of flags only, for so many epochs."""

    def scenario(machine):
        world = World(machine, code, blocks=machine.random.choice([1, 2]))
        region = world.layout.two_shot_signalled
        first_set = 4 * world.size * MAX_BLOCKS
        for workspace in world.workspaces:
            for at in [
                *range(region.epochs, region.epochs + 4 * MAX_BLOCKS, 4),
                *range(region.flags, region.flags + first_set, 4),
            ]:
                world.memory.plant(workspace + at, 4, lag)
        for _ in range(2):
            world.all_reduce("two_shot_signalled", machine.random.choice(COUNTS))
        world.run()

    return scenario


def calls_at_the_wrap(code, *names):
    """Calls on the same slots as the epochs come round."""

    def scenario(machine):
        world = World(machine, code, blocks=machine.random.choice([1, 2]))
        region = world.layout.two_shot_signalled
        epoch = 2**32 - 1 - machine.random.randrange(12)
        for workspace in world.workspaces:
            for at in [
                *range(region.epochs, region.epochs + 4 * MAX_BLOCKS, 4),
                *range(region.flags, region.slots, 4),
            ]:
                world.memory.plant(workspace + at, 4, epoch)
        for _ in range(4):
            name, count = machine.random.choice(names), machine.random.choice(COUNTS)
            if name in ALGORITHMS:
                world.all_reduce(name, count)
            else:
                getattr(world, name)(count)
        world.run()

    return scenario


def messages(code):
    """Launches of several messages each, between any ranks, and of none at some."""

    def scenario(machine):
        world = World(machine, code, blocks=machine.random.choice([2, 4]))
        for _ in range(3):
            lengths = [1, 2, 3, 8, 9, 17, 33]
            number = machine.random.choice([1, 2, 2, 3])
            world.messages(*(machine.random.choice(lengths) for _ in range(number)))
        world.run()

    return scenario


def a_limit(random, algorithms):
    """Return the most blocks of a communicator's calls: one of an algorithm or two."""
    weight = 2 if any(name.endswith("_ll") for name in algorithms) else 1
    return weight * random.choice([1, 2])


def all_reduces_at_the_wrap(code, algorithm):
    """Calls as the epoch comes round, over packets of 2**32 rounds ago.

    Mailboxes that only large calls use still hold the packets of any old epoch, among
    them those that follow the wrap.
    """

    def scenario(machine):
        world = World(machine, code, blocks=a_limit(machine.random, [algorithm]))
        region = getattr(world.layout, algorithm.replace("one_shot_pull", "pull"))
        mailed = algorithm in MAILED
        one_flight = mailed and algorithm.startswith("one")
        last = device_code().mailboxes.LAST_EPOCH if mailed else 2**32 - 1
        epoch = last - 2 - machine.random.randrange(3)
        for workspace in world.workspaces:
            for at in [
                *range(region.epochs, region.epochs + 4 * MAX_BLOCKS, 4),
                *range(region.flags, region.slots, 4),
            ]:
                world.memory.plant(workspace + at, 4, epoch)
            if algorithm.endswith("_ll"):
                plant_old_packets(world, workspace, region, algorithm)
        # Small calls leave old packets where the large ones find them.
        for _ in range(7):
            count = machine.random.choice([1, 2, 5, 9, 18])
            if one_flight and machine.random.random() < 0.3:
                world.mailed(algorithm.rpartition("_")[2], count)
            else:
                world.all_reduce(algorithm, count)
        world.run()

    return scenario


def plant_old_packets(world, workspace, region, algorithm):
    """Fill mailboxes with packets of the first epochs of their half."""
    sets = 2 if algorithm.startswith("two") else 1
    steps = world.code.workspace.ONE_SHOT["ll"].steps(world.size)
    packets = MAX_BLOCKS * sets * (world.size - 1) * steps * 2 * THREADS  # in a half
    assert region.slots + 2 * 16 * packets <= region.end
    for packet in range(2 * packets):
        half = packet // packets
        old = world.random.choice([2, 4]) - half
        for word in range(2):
            address = workspace + region.slots + 16 * packet + 8 * word
            data = world.random.getrandbits(32)
            world.memory.plant(address, 8, old << 32 | data)


def exchanges_between_barriers(code):
    """Kernels that write to peers, meet them with ``barrier``, and read."""

    def scenario(machine):
        world = World(machine, code)
        for _ in range(2):
            grid, rounds = 1 + machine.random.randrange(MAX_BLOCKS), 2
            workers = THREADS * grid
            inputs, words = world.inputs(rounds * workers)
            outputs = world.map("output", 8 * rounds * workers * world.size)
            for context in world.contexts:
                rank = context.rank
                args = (context, inputs[rank], outputs[rank], rounds)
                world.launch(rank, code.programs.exchange, grid, *args)
                for worker in range(workers):
                    for i in range(rounds):
                        # Of every rank, what the other thread of this block sent.
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
                for first, count in parts(machine.random, total):
                    args = (context, rank - 1, outputs[rank], first, count)
                    world.launch(rank, code.programs.receive, 1, *args)
                world.expect(outputs[rank], words[rank - 1])
            if rank < world.size - 1:
                for first, count in parts(machine.random, total):
                    args = (context, rank + 1, inputs[rank], first, count)
                    world.launch(rank, code.programs.send, 1, *args)
        world.run()

    return scenario


def parts(random, total):
    """Return a split of ``range(total)`` into two kernels' shares."""
    middle = 1 + random.randrange(total - 1)
    return [(0, middle), (middle, total - middle)]


def plain_stores_between_barriers(code):
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
            world.barrier()
            for rank in range(world.size):
                args = (world.buffers, outputs[rank], count)
                world.launch(rank, code.programs.read, 1, *args)
                world.expect(outputs[rank], [word for mine in words for word in mine])
            world.barrier()
        world.run()

    return scenario


def a_rank_that_never_calls(code, algorithm):
    """A wait with a deadline, for a rank that launches nothing."""

    def scenario(machine):
        machine.time_passes = True
        machine.memory.races = False  # results are undefined after a deadline
        world = World(machine, code, timeout=50_000)
        for _ in range(2):
            world.all_reduce(algorithm, machine.random.choice(COUNTS))
        world.streams[-1] = []
        machine.run(world.streams)
        for rank in range(world.size):
            if world.memory.final(world.board + 8 * rank, 8) == 0:
                raise Finding("result", f"rank {rank} was told of no failure")

    return scenario


def search(scenario, ranks, schedules, races=True):
    # Each end of a pair has a block for its messages, each way.
    blocks = 2 * (ranks - 1) if scenario.__qualname__.startswith("messages") else 0

    def make(seed):
        machine = Machine(ranks, max(MAX_BLOCKS, blocks), THREADS, seed)
        machine.memory.races = races
        return machine

    return explore(scenario, make, schedules)


def holds(scenario, ranks, schedules):
    found = search(scenario, ranks, schedules)
    if found:
        seed, finding = found
        steps = "\n".join(finding.__notes__)
        pytest.fail(f"seed {seed}: {finding}\n{steps}", pytrace=False)


def breaks(scenario, ranks, races=True):
    found = search(scenario, ranks, WORST, races)
    assert found, f"{WORST} schedules show nothing wrong"
    seed, finding = found
    print(f"found after {seed + 1} schedules: {finding}")


@worlds
@each_algorithm
def test_calls_of_one_algorithm(algorithm, ranks):
    holds(all_reduces(device_code(), algorithm), ranks, 200)


@worlds
@each_algorithm
def test_calls_as_the_epochs_come_round(algorithm, ranks):
    holds(all_reduces_at_the_wrap(device_code(), algorithm), ranks, 60)


@worlds
def test_calls_of_all_algorithms_in_turns(ranks):
    holds(all_reduces(device_code(), *ALGORITHMS), ranks, 200)


@worlds
def test_reductions_to_any_root(ranks):
    holds(calls_of(device_code(), "reduce"), ranks, 300)


@worlds
def test_exchanges(ranks):
    holds(calls_of(device_code(), "gather", "scan"), ranks, 150)


@worlds
@each_transport
def test_calls_in_which_few_threads_exchange(transport, ranks):
    holds(mailed_calls(device_code(), transport), ranks, 100)


@worlds
def test_calls_on_shared_slots(ranks):
    names = "reduce", "scan", "gather", "broadcast", "two_shot_signalled"
    holds(calls_of(device_code(), *names), ranks, 300)


@worlds
def test_calls_on_shared_slots_as_the_epochs_come_round(ranks):
    names = "reduce", "scan", "gather", "broadcast", "two_shot_signalled"
    holds(calls_at_the_wrap(device_code(), *names), ranks, 60)


@worlds
@pytest.mark.parametrize("lag", [2**31 - 100, 2**31 + 10])
def test_flags_that_were_not_raised_for_long(lag, ranks):
    holds(calls_after_many(device_code(), lag), ranks, 60)


@worlds
@by_anything_and_by_result
def test_flags_that_were_never_renewed_are_found(races, ranks):
    edit = ("two_shot_signalled", "if turn == 0:", "if turn == -1:")
    breaks(calls_after_many(device_code(edit), 2**31 + 10), ranks, races)


@worlds
def test_broadcasts(ranks):
    holds(calls_of(device_code(), "broadcast"), ranks, 300)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_on_the_ranks_own_arrays(ranks):
    holds(calls_on_own_arrays(device_code()), ranks, 600 // ranks)


def test_calls_on_the_ranks_own_arrays_as_the_epochs_come_round():
    for epochs in range(2**32 - 4, 2**32):
        holds(calls_on_own_arrays(device_code(), epochs), 3, 20)
        holds(calls_on_own_arrays(device_code(), epochs), 2, 10)
    holds(calls_on_own_arrays(device_code(), 2**31, 2**31 - 1), 3, 60)


@worlds
def test_messages_between_any_ranks(ranks):
    holds(messages(device_code()), ranks, 300)


@worlds
def test_the_barrier_on_a_stream(ranks):
    holds(plain_stores_between_barriers(device_code()), ranks, 300)


@worlds
def test_the_barrier_in_a_kernel(ranks):
    holds(exchanges_between_barriers(device_code()), ranks, 300)


@worlds
def test_signals(ranks):
    holds(words_by_signals(device_code()), ranks, 300)


@worlds
@each_algorithm
def test_every_rank_leaves_when_one_never_comes(algorithm, ranks):
    holds(a_rank_that_never_calls(device_code(), algorithm), ranks, 30)


# What is broken: the algorithms that it must spoil, and the edits (module, text that
# must be there, text instead) that break them.

FENCE, SYNC = "        fence_acq_rel_sys()\n", "        syncthreads()\n"
NEXT_ROUND = SYNC + FENCE
LAST = "LAST_EPOCH = 2**32 - 2"
THREAD = "thread = thread_index()"
STORE = "if thread == 0:\n            st_u32(epoch_at"
RELAXED = (
    ("signals", "while (ld_acquire_sys_u32(flag)", "while (ld_relaxed_sys_u32(flag)"),
    (
        "signals",
        "    ld_acquire_sys_u32,",
        "    ld_acquire_sys_u32, ld_relaxed_sys_u32,",
    ),
)


def turns_parts(module, *begins):
    """Return the parts of a kernel's turns, which begin so."""
    text = Path(module.__file__).read_text()
    begins = [*begins, "# All threads have"]
    places = [re.search(r"\n *" + begin, text).start() + 1 for begin in begins]
    return [text[a:b] for a, b in pairwise(places)]


GATHER, AWAIT, SCATTER, REDUCE = turns_parts(
    two_shot_signalled,
    "if turn >= 2:",
    "if turn == 1:",
    "if turn < chunks:",
    "if 1 <= turn <= chunks:",
)
_, EXCHANGE_TAKE, EXCHANGE_TELL = turns_parts(
    exchange_signalled,
    r"if turn < chunks and not .*:\n +slot",
    "if turn >= 1:",
    r"if turn < chunks:\n +tell",
)
TURNS = {
    module: turns_parts(
        module,
        "if turn < chunks( and is_root)?:",
        "if turn >= 1:",
        "if 1 <= turn <= chunks and",
        "if turn >= (2|hops) and",
        r"if turn (<= chunks:|< chunks \+)",
    )
    for module in (reduce_signalled, broadcast_signalled)
}

SENTINEL, LL, MARKED = MAILED[:4:2], MAILED[1:4:2], MAILED[4:]
NOT_TWO_LL = [name for name in MAILED if name != "two_shot_ll"]
CLEARED = [*SENTINEL, *MARKED]
FLAGGED = ALGORITHMS[6:]

MAILBOXES_BROKEN = {
    # By LL, two flights are in step without all this: a thread answers its twin only
    # after it has read what the twin sent, and nothing is cleared.
    "one half": (NOT_TWO_LL, ("mailboxes", "(epoch & 1) * half_stride", "0")),
    "no syncthreads between rounds": (NOT_TWO_LL, ("mailboxes", NEXT_ROUND, FENCE)),
    "no fence between rounds": (CLEARED, ("mailboxes", NEXT_ROUND, SYNC)),
    "a fence before the threads meet": (
        CLEARED,
        ("mailboxes", NEXT_ROUND, FENCE + SYNC),
    ),
    "not cleared": (
        CLEARED,
        ("mailboxes", "clear(first + k * rank_stride)", "pass"),
    ),
    "cleared after the next post": (
        CLEARED,
        (
            "mailboxes",
            "clear(first + k * rank_stride)",
            "clear(first + k * rank_stride + (1 - 2 * (epoch & 1)) * half_stride)",
        ),
    ),
    "one word not looked at": (SENTINEL, ("mailboxes", "(low == EMPTY) | ", "")),
    "the other not looked at": (SENTINEL, ("mailboxes", " | (high == EMPTY)", "")),
    "one word sent as it is": (SENTINEL, ("mailboxes", "if low == EMPTY", "if False")),
    "the other sent as it is": (
        SENTINEL,
        ("mailboxes", "if high == EMPTY", "if False"),
    ),
    "one of the marked words not looked at": (
        MARKED,
        ("mailboxes", "(first == EMPTY) | ", ""),
    ),
    "the other of the marked words not looked at": (
        MARKED,
        ("mailboxes", " | (second == EMPTY)", ""),
    ),
    "marks not looked at": (MARKED, ("mailboxes", " | unmarked", "")),
    "one mark not set": (MARKED, ("mailboxes", "marks = 1\n", "marks = 0\n")),
    "the other mark not set": (MARKED, ("mailboxes", "marks += 2", "marks += 0")),
    "one marked word sent as it is": (
        MARKED,
        ("mailboxes", "        first = 0\n", "        first = EMPTY\n"),
    ),
    "marks left as they were": (
        MARKED,
        ("mailboxes", "st_relaxed_sys_u32(_marks(box), UNMARKED)", "pass"),
    ),
    "one place for the marks of all threads": (
        MARKED,
        (
            "mailboxes",
            "(VECTOR - MARK) * thread_index_x()",
            "VECTOR * thread_index_x()",
        ),
    ),
    "the sender goes on with another NaN": (
        SENTINEL,
        ("one_shot", "= sent(words[0], words[1])", "= words"),
        (
            "two_shot",
            "store(target, mine, count, result[0], result[1])",
            "store(target, mine, count, packed[0], packed[1])",
        ),
    ),
    **{
        f"{name} flag not looked at": (LL, ("mailboxes", *edit))
        for name, edit in {
            "the first": ("(first ^ flag) | ", ""),
            "the second": ("(second ^ flag) | ", ""),
            "the third": ("(third ^ flag) | ", ""),
            "the fourth": (" | (fourth ^ flag)", ""),
        }.items()
    },
    "one set of mailboxes": (
        ("two_shot_sentinel", "two_shot_ll", "two_shot_marked"),
        ("mailboxes", " + which * set_stride", ""),
    ),
}
OF_TWO_RANKS = {  # who have more than one step
    "one mailbox for all steps": (MAILED, ("mailboxes", " + step * line", "")),
}
OF_THREE_RANKS = {  # who have more than one neighbour
    "one flag for all ranks": (
        FLAGGED,
        ("flags", "ring[k] + flags + 4 * rank", "ring[k] + flags"),
        ("flags", "flags + 4 * peer", "flags"),
    ),
    "neighbours counted as their receiver does": (
        MAILED,
        ("mailboxes", "(others - 1 - k) * rank_stride", "k * rank_stride"),
    ),
    "vectors in the ring's order": (
        ALGORITHMS[:-1],
        ("ring", "turning = rank >> bit & 1 != 0", "turning = False"),
    ),
    "one mailbox for all ranks": (
        MAILED,
        ("mailboxes", "rank_stride = count * line", "rank_stride = 0"),
    ),
    "slots counted as their receiver does": (
        ("two_shot_signalled",),
        (
            "two_shot_signalled",
            "# The sender is its k-th neighbour's (n - 2 - k)-th.\n"
            "                            there = slot + (others - 1 - k) * rank_stride",
            "there = slot + k * rank_stride",
        ),
    ),
}
WRAP_BROKEN = {
    "nothing wiped": (LL, ("mailboxes", "if epoch >= last_epoch - 1:", "if False:")),
    "one half wiped": (
        LL,
        ("mailboxes", "epoch >= last_epoch - 1:", "epoch >= last_epoch:"),
    ),
    "the other half wiped": (
        LL,
        ("mailboxes", "epoch >= last_epoch - 1:", "epoch == last_epoch - 1:"),
    ),
    "half a packet wiped": (
        LL,
        ("mailboxes", "    st_relaxed_sys_v2_u64(box + ROW, (0, 0))\n", ""),
    ),
    "one set wiped": (
        ("two_shot_ll",),
        ("mailboxes", "range(sets * others * count)", "range(others * count)"),
    ),
    "no fence between rounds": (LL, ("mailboxes", NEXT_ROUND, SYNC)),
    "an odd last epoch": (MAILED, ("mailboxes", LAST, "LAST_EPOCH = 2**32 - 1")),
}

FLAGS_BROKEN = {
    "no fence before the flags": (
        FLAGGED,
        ("flags", "            fence_acq_rel_sys()\n", "            pass\n"),
    ),
    "no syncthreads before the flags": (
        FLAGGED,
        ("flags", "syncthreads()\n        thread = thread_index()", THREAD),
    ),
    "flags loaded relaxed": (FLAGGED, *RELAXED),
    "no syncthreads after the flags": (
        FLAGGED,
        (
            "flags",
            "        syncthreads()\n        return failed",
            "        return failed",
        ),
    ),
    "one half": (
        FLAGGED,
        ("two_shot_signalled", "(2 * block + (epoch & 1))", "2 * block"),
        ("one_shot_pull", "(2 * block + (epoch & 1))", "2 * block"),
    ),
    "slots by element": (
        ("one_shot_pull",),
        (
            "one_shot_pull",
            "half = slots + (2 * block + (epoch & 1)) * half_bytes",
            f"half = slots + (epoch & 1) * {MAX_BLOCKS} * half_bytes"
            f" + 16 * (start % ({MAX_BLOCKS} * PULL.rows * THREADS))",
        ),
    ),
    "one set of slots": (
        ("two_shot_signalled",),
        ("two_shot_signalled", "half + which * set_stride", "half"),
    ),
    "one set of flags": (
        ("two_shot_signalled",),
        ("two_shot_signalled", "which * flag_set + ", ""),
    ),
    "scatter before gather": (
        ("two_shot_signalled",),
        (
            "two_shot_signalled",
            GATHER + AWAIT + SCATTER,
            AWAIT + SCATTER + GATHER,
        ),
    ),
    "gather last": (
        ("two_shot_signalled",),
        (
            "two_shot_signalled",
            GATHER + AWAIT + SCATTER + REDUCE,
            AWAIT + SCATTER + REDUCE + GATHER,
        ),
    ),
}
FENCED = "fence_acq_rel_sys()\n            "


PARTS_BROKEN = {
    "one half": ("half = (before + 1 + (chunk >> 1)) & 1", "half = 1"),
    "one set of slots": (" + (chunk & 1)", ""),
    "chunks in turn in the halves": ("(chunk >> 1)) & 1", "chunk) & 1"),
}


def turns_broken(module):
    """Return what breaks the turns of a kernel that has parts of the slots in turn."""
    _, wait, *work, tell = TURNS[module]
    work = "".join(work)
    return {
        "told before the work": (work + tell, tell + work),
        "used before all have told": (wait + work, work + wait),
    }


REDUCE_BROKEN = {
    **turns_broken(reduce_signalled),
    "slots counted as their receiver does": (
        "to = ring[k] + slot + (others - 1 - k) * rank_stride",
        "to = ring[k] + slot + k * rank_stride",
    ),
    "the root forgotten": ("if k == root:", "if k == 0:"),
    "shards counted from this rank": (
        "target, k * share + at",
        "target, number * share + at",
    ),
}
BROADCAST_BROKEN = turns_broken(broadcast_signalled)
BROADCAST_OF_THREE_BROKEN = {
    "relayed to the next": ("if k != to_root:", "if k != 0:"),
    "shards counted from the root": (
        "there = owner * share + vector + step * THREADS",
        "there = k * share + vector + step * THREADS",
    ),
}
EXCHANGE_BROKEN = {
    "the chunk before awaited": (
        "own + flag, block, last, failed",
        "own + flag, block, last - 1, failed",
    ),
    "told before it is taken": (
        EXCHANGE_TAKE + EXCHANGE_TELL,
        EXCHANGE_TELL + EXCHANGE_TAKE,
    ),
}
FEW_BROKEN = {
    "thread 0 exchanges no more than the others": [
        ("sent_to if rooted and thread != 0 else", "sent_to if rooted else"),
        ("got_of if rooted and thread != 0 else", "got_of if rooted else"),
    ],
    "the threads meet before thread 0's fence": [
        ("if rooted and thread == 0:", "if False:")
    ],
}
NEXT_BROKEN = {  # calls that disturb the next one, or the one before
    "two_shot_signalled": ("two_shot_signalled", AWAIT, ""),
    "gather": ("parts", "more = (told", "more = 0 * (told"),
    "reduce": ("parts", "more = (told", "more = 0 * (told"),
    "broadcast": ("parts", "more = (told", "more = 0 * (told"),
}
SYNCED = {
    "the block does not wait": (
        "# What one thread has waited for, the whole block may use.\n" + 16 * " "
    ),
    "a flag before all have written": (
        "# What the whole block has written of the piece comes before its flag.\n"
        + 8 * " "
    ),
    "a credit before all have read": (
        "# What the whole block has read of the piece, it has read before it says so.\n"
        + 8 * " "
    ),
}
TRANSFER_BROKEN = {
    "no credit": ("failed = not wait_for_epoch(guard, credit, due, record)", "pass"),
    "too much credit": ("due = (epoch - DEPTH)", "due = (epoch - DEPTH - 1)"),
    **{what: (text + "syncthreads()", "pass") for what, text in SYNCED.items()},
    "no fence before a flag": (
        FENCED + "st_relaxed_sys_u64",
        "st_relaxed_sys_u64",
    ),
    "no fence before a credit": (
        FENCED + "st_relaxed_sys_u32",
        "st_relaxed_sys_u32",
    ),
    "a flag awaited relaxed": (
        "while ld_acquire_sys_u64(flag)",
        "while ld_relaxed_sys_u64(flag)",
    ),
}
DIRECT_BROKEN = {
    "no fence before the addresses": (
        "direct",
        "fence_acq_rel_sys()\n        for k",
        "pass\n        for k",
    ),
    "no fence after them": (
        "direct",
        "fence_acq_rel_sys()\n\n    return meet",
        "pass\n\n    return meet",
    ),
    "a refusal of one's own forgotten": ("direct", "if first[0] == 0 or", "if"),
    "another's refusal forgotten": ("direct", "or first == 0", ""),
    "what was refused left undone": (
        "reduce_signalled",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) or True)",
    ),
    "what was not refused done twice": (
        "reduce_signalled",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) and False)",
    ),
    "the digest not looked at": ("direct", " | late", ""),
    "nobody waits for the others' loads and stores": (
        "direct",
        "told(guard, own + flags, 0, epoch, False)",
        "pass",
    ),
    "what is refused worked on": ("broadcast_direct", "refused(own) or", ""),
    "what is refused reduced": ("reduce_direct", "refused(own) or", ""),
    "what was refused not relayed": (
        "broadcast_signalled",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) or True)",
    ),
    "the input taken for the output": (
        "reduce_direct",
        "_, into = ld_v2_u64",
        "into, _ = ld_v2_u64",
    ),
}
DIRECT_OF_TWO_BROKEN = {
    "what was refused left undone": (
        "two_shot_signalled",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) or True)",
    ),
    "what was not refused done twice": (
        "two_shot_signalled",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) and False)",
    ),
    "nobody waits for the other's loads": DIRECT_BROKEN[
        "nobody waits for the others' loads and stores"
    ],
    "no fence before the addresses": DIRECT_BROKEN["no fence before the addresses"],
    "no fence after them": DIRECT_BROKEN["no fence after them"],
}
EPOCH_BROKEN = {  # flags have a syncthreads of their own
    "the epoch changed before all have read it": (
        MAILED,
        ("one_shot", f"cuda.syncthreads()\n        {STORE}", STORE),
        ("two_shot", f"cuda.syncthreads()\n        {STORE}", STORE),
    ),
}
BARRIER_BROKEN = {
    "no fence before the flags": FLAGS_BROKEN["no fence before the flags"][1:],
    "flags loaded relaxed": RELAXED,
}
SIGNALS_BROKEN = {
    "stored without waiting for 0": [
        ("taken = _wait_for_slot(ctx.guard, slot, 0, record)", "taken = True")
    ],
    "taken without waiting for 1": [
        ("arrived = _wait_for_slot(ctx.guard, slot, 1, record)", "arrived = True")
    ],
    "stored relaxed": [
        ("st_release_sys_u32(slot, 1)", "st_relaxed_sys_u32(slot, 1)"),
        ("    st_release_sys_u32,", "    st_release_sys_u32, st_relaxed_sys_u32,"),
    ],
    "awaited relaxed": [
        ("    ld_acquire_sys_u32,", "    ld_relaxed_sys_u32 as ld_acquire_sys_u32,")
    ],
}
IN_KERNEL_BROKEN = {
    "no syncthreads before": [
        (
            "# All writes of this block come before its release of the signals below.\n"
            "    syncthreads()",
            "",
        )
    ],
    "no syncthreads after": [
        (
            "# The peers' writes, acquired by one thread each, become visible to all.\n"
            "    syncthreads()",
            "",
        )
    ],
    "no waiting": [
        ("met = wait_signal(ctx, peer, channel) and met", "pass"),
    ],
}


def each(table, ranks=(2, 3)):
    """Run a test for each broken thing, algorithm that it must spoil, and world."""
    cases = [
        pytest.param(algorithm, edits, n, id=f"{what}-{algorithm}-{n}")
        for what, (algorithms, *edits) in table.items()
        for algorithm in algorithms
        for n in ranks
    ]
    return pytest.mark.parametrize(("algorithm", "edits", "ranks"), cases)


@each(MAILBOXES_BROKEN)
def test_mailboxes_broken_are_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@each(OF_TWO_RANKS, [2])
def test_steps_broken_are_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@by_anything_and_by_result
@each(OF_THREE_RANKS, [3])
def test_the_ring_broken_is_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races)


@each(WRAP_BROKEN)
def test_what_is_broken_at_the_wrap_is_found(algorithm, edits, ranks):
    breaks(all_reduces_at_the_wrap(device_code(*edits), algorithm), ranks)


@by_anything_and_by_result
@each(FLAGS_BROKEN)
def test_flags_broken_are_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", REDUCE_BROKEN)
def test_reductions_broken_are_found(what, races):
    code = device_code(("reduce_signalled", *REDUCE_BROKEN[what]))
    breaks(calls_of(code, "reduce"), 3, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", EXCHANGE_BROKEN)
def test_exchanges_broken_are_found(what, races, ranks):
    code = device_code(("exchange_signalled", *EXCHANGE_BROKEN[what]))
    breaks(calls_of(code, "gather", "scan", "two_shot_signalled"), ranks, races)


@worlds
@each_transport
@pytest.mark.parametrize("what", FEW_BROKEN)
def test_few_threads_exchanging_broken_are_found(what, transport, ranks):
    if (what, transport) == ("the threads meet before thread 0's fence", "ll"):
        pytest.skip("nothing is cleared, and loads are never late here")
    code = device_code(*(("exchange", *edit) for edit in FEW_BROKEN[what]))
    breaks(mailed_calls(code, transport), ranks)


@by_anything_and_by_result
@pytest.mark.parametrize("name", ["gather", "reduce"])
@pytest.mark.parametrize("what", PARTS_BROKEN)
def test_parts_broken_are_found(what, name, races):
    code = device_code(("parts", *PARTS_BROKEN[what]))
    breaks(calls_of(code, name), 3, races)


@by_anything_and_by_result
@pytest.mark.parametrize("name", NEXT_BROKEN)
def test_calls_that_disturb_each_other_are_found(name, races):
    code = device_code(NEXT_BROKEN[name])
    breaks(calls_of(code, name, "gather"), 3, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BROADCAST_BROKEN)
def test_broadcasts_broken_are_found(what, races, ranks):
    code = device_code(("broadcast_signalled", *BROADCAST_BROKEN[what]))
    breaks(calls_of(code, "broadcast"), ranks, races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROADCAST_OF_THREE_BROKEN)
def test_broadcasts_of_three_ranks_broken_are_found(what, races):
    code = device_code(("broadcast_signalled", *BROADCAST_OF_THREE_BROKEN[what]))
    breaks(calls_of(code, "broadcast"), 3, races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", DIRECT_BROKEN)
def test_calls_on_own_arrays_broken_are_found(what, races):
    code = device_code(DIRECT_BROKEN[what])
    breaks(calls_on_own_arrays(code), 3, races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", DIRECT_OF_TWO_BROKEN)
def test_reductions_of_two_ranks_own_arrays_broken_are_found(what, races):
    code = device_code(DIRECT_OF_TWO_BROKEN[what])
    breaks(calls_on_own_arrays(code), 2, races)


@by_anything_and_by_result
def test_flags_that_refused_calls_did_not_renew_are_found(races):
    told = "tell(ring, flags, guard.rank, epoch)"
    code = device_code(("direct", told, f"if not to_do:\n                {told}"))
    breaks(calls_on_own_arrays(code, 2**31, 2**31 - 1), 3, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", TRANSFER_BROKEN)
def test_messages_broken_are_found(what, races, ranks):
    if what == "no fence before a credit" and not races:
        pytest.skip("loads are never late here, so that no result is wrong")
    code = device_code(("transfer", *TRANSFER_BROKEN[what]))
    breaks(messages(code), ranks, races)


@each(EPOCH_BROKEN)
def test_an_epoch_changed_too_early_is_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BARRIER_BROKEN)
def test_the_barrier_on_a_stream_broken_is_found(what, races, ranks):
    code = device_code(*BARRIER_BROKEN[what])
    breaks(plain_stores_between_barriers(code), ranks, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", IN_KERNEL_BROKEN)
def test_the_barrier_in_a_kernel_broken_is_found(what, races, ranks):
    code = device_code(*(("signals", *edit) for edit in IN_KERNEL_BROKEN[what]))
    breaks(exchanges_between_barriers(code), ranks, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", SIGNALS_BROKEN)
def test_signals_broken_are_found(what, races, ranks):
    code = device_code(*(("signals", *edit) for edit in SIGNALS_BROKEN[what]))
    breaks(words_by_signals(code), ranks, races)
