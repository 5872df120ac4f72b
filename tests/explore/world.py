"""The ranks of a scenario: their memory, their calls and the expected results."""

import itertools
import operator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from explore.copying import Copies, Order
from explore.failures import NoStoreAfterFailure
from explore.launches import Launch
from explore.memory import REGION, Finding
from explore.messages import Messages
from explore.scheduler import TIMEOUT
from numba_symm import dtypes
from numba_symm.collectives.operations import ALL_REDUCE, OPERATIONS
from numba_symm.collectives.select import GENERAL, Arrays
from tests.algorithms import ONE_SHOTS, those
from tests.expected import expected
from tests.operators import in_tree

INT64, FLOAT64 = (dtypes.element(name, "test") for name in ("int64", "float64"))
ALGORITHMS = those("all_reduce", lambda made: not made.handshake)
"""Those of an all-reduce whose kernels work on any arrays."""
SENTINEL, MARKED, LL = (
    those("all_reduce", lambda made, t=transport: made.transport == t)
    for transport in ("sentinel", "marked", "ll")
)
MAILED = [*SENTINEL, *MARKED, *LL]
FLAGGED = [name for name in ALGORITHMS if name not in MAILED]
ALL_ONES = 2**64 - 1


def add(enqueue, stream):
    """Enqueue a launch, or call a function that enqueues several."""
    if isinstance(enqueue, Launch):
        stream.append(enqueue)
    else:
        enqueue(stream)


class World(Messages):
    """Ranks with workspaces, boards and pads; their launches; the expected results."""

    def __init__(self, machine, code, blocks=None, multiprocessors=None):
        self.machine, self.memory, self.random = machine, machine.memory, machine.random
        self.code, self.blocks = code, code.shape.blocks
        self.size = machine.ranks
        self.layout = code.workspace.layout(self.size)
        self.requested = []  # by rank, the requests' workspace
        self.streams = [[] for _ in range(self.size)]
        self.expected = {}  # by address and bytes, a word a call; None: a NaN
        self.owners = {}  # ranks, by the number of a region of memory
        self.equal = []  # addresses of words that must be equal on all ranks
        self.kept = set()  # addresses of words that only their own rank reads
        self.marks = set()  # addresses of more words that show that a rank has failed
        self.shared = set()  # regions of arrays that other ranks may store in
        self.workspaces = self.map("workspace", self.layout.nbytes, self.initial)
        self.board = self.memory.map("board", 8 * self.size, fill=0)
        self.buffers = self.map("buffer", 8 * 64)
        self.pads = self.map(
            "pad", code.pads.pad_nbytes(self.size, code.signals.CHANNELS), fill=0
        )
        Guard, Context = code.signals.Guard, code.signals.Context
        timeout = TIMEOUT if machine.haste else 0
        guards = [
            Guard(self.board, rank, self.size, timeout) for rank in range(self.size)
        ]
        self.contexts = [
            Context(guard.rank, self.size, tuple(self.buffers), tuple(self.pads), guard)
            for guard in guards
        ]
        self.ends = [
            code.binding.Endpoint(
                rank=guard.rank,
                size=self.size,
                guard=guard,
                workspaces=tuple(self.workspaces),
                max_blocks=blocks or 2 * self.blocks,
                multiprocessors=multiprocessors or blocks or 2 * self.blocks,
                place=lambda address, nbytes: None,
                order=Order(machine, guard.rank, Copies(code, self.size)),
                choices=None,
            )
            for guard in guards
        ]

    def map(self, name, nbytes, fill=None):
        """Return every rank's address of new memory."""
        found = [
            self.memory.map(f"rank {rank}'s {name}", nbytes, fill)
            for rank in range(self.size)
        ]
        self.owners |= {address // REGION: r for r, address in enumerate(found)}
        return found

    def regions(self, *addresses):
        """Return the numbers of the regions of memory that addresses are in."""
        return {address // REGION for address in addresses}

    def initial(self, offset):
        """Return the width and the initial value of a word of a workspace.

        Empty mailboxes contain ones. In those with marks, the vectors of a block's
        threads are followed by their marks.
        """
        code = self.code.workspace
        for region in self.layout.sentinels:
            if region.slots <= offset < region.end:
                place = (offset - region.slots) % code.ONE_SHOT["marked"].tile_bytes
                marked = self.layout.one_shot_marked, self.layout.two_shot_marked
                nbytes = 4 if region in marked and place >= code.TILE_BYTES else 8
                return nbytes, 2 ** (8 * nbytes) - 1
        return 0, 0

    def epochs(self, region, blocks=None):
        """Return the offsets of the blocks' epochs."""
        return range(region.epochs, region.epochs + 4 * (blocks or self.blocks), 4)

    def plant_epochs(self, region, epoch, flags=None):
        """Let all blocks continue after ``epoch``, with flags of that epoch."""
        for workspace in self.workspaces:
            for at in range(region.epochs, region.flags, 4):
                self.memory.plant(workspace + at, 4, epoch)
            for at in range(region.flags, region.slots, 4):
                known = epoch if flags is None else flags
                self.memory.plant(workspace + at, 4, known)

    def plant_chunks(self, epoch):
        """Let all channels of messages continue after ``epoch`` chunks."""
        region, depth = self.layout.transfer, self.code.workspace.DEPTH
        lanes = (self.size - 1) * self.code.workspace.channels_of(self.size)
        credits_at = region.flags + 8 * depth * lanes
        for workspace in self.workspaces:
            for at in range(region.epochs, region.flags, 4):
                self.memory.plant(workspace + at, 4, epoch)
            for lane in range(lanes):
                self.memory.plant(workspace + credits_at + 4 * lane, 4, epoch)
                for chunk in range(epoch - depth + 1, epoch + 1):
                    slot = depth * lane + chunk % depth
                    word = 8 << 16 | chunk & 0xFFFF  # of a message of 8 bytes
                    self.memory.plant(workspace + region.flags + 8 * slot, 8, word)

    def inputs(self, count, draw=None):
        """Return every rank's address of random words, and the words."""
        addresses = self.map("input", 8 * count + 8)
        # Sometimes not aligned to 16 bytes.
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

    def expect(self, address, words, nbytes=8):
        for i, word in enumerate(words):
            self.expected.setdefault((address + nbytes * i, nbytes), []).append(word)

    def all_reduce(self, algorithm, count):
        kind = self.kind_for(ALL_REDUCE.algorithms[algorithm])
        sources, words = self.inputs(count, DRAW[kind])
        in_place = self.random.random() < 0.5
        targets = sources if in_place else self.map("output", 8 * count)
        ranks = range(len(words))
        total = [TOTAL[kind](column, ranks) for column in zip(*words, strict=True)]
        for end, source, target in zip(self.ends, sources, targets, strict=True):
            call = self.code.binding.Call(source, target, count, kind, "sum")
            launch = self.bound("all_reduce", algorithm, end, call)
            self.streams[end.rank].append(launch)
            self.expect(target, total)
        self.equal += [[t + 8 * i for t in targets] for i in range(count)]

    def kind_for(self, made):
        """Return an element type that an algorithm is for."""
        return FLOAT64 if made.floats else self.random.choice(KINDS)

    def reduce(self, count):
        """Add a reduction to any root by chunks."""
        root = self.random.randrange(self.size)
        kind = self.random.choice(KINDS)
        sources, words = self.inputs(count, DRAW[kind])
        target = self.random.choice([sources, self.map("output", 8 * count)])[root]
        ranks = range(len(words))
        total = [TOTAL[kind](column, ranks) for column in zip(*words, strict=True)]
        for end in self.ends:
            mine = target if end.rank == root else 0
            source = sources[end.rank]
            call = self.code.binding.Call(source, mine, count, kind, "sum", root)
            launch = self.bound("reduce", GENERAL, end, call)
            self.streams[end.rank].append(launch)
        self.expect(target, total)

    def bound(self, name, algorithm, end, call):
        """Return what ``operations.py`` binds for a call."""
        return self.code.operations.OPERATIONS[name].bind(algorithm, end, call)

    def broadcast(self, count):
        """Add a broadcast from any root by chunks."""
        root = self.random.randrange(self.size)
        arrays, words = self.inputs(count)
        for end, array in zip(self.ends, arrays, strict=True):
            call = self.code.binding.Call(array, array, count, INT64, "sum", root)
            launch = self.bound("broadcast", GENERAL, end, call)
            self.streams[end.rank].append(launch)
            self.expect(array, words[root])

    def on_own_arrays(self, name, arrays, words, refusing=None):
        """Add a call between the ranks' own arrays, of these words.

        It uses the workspace if the array of rank ``refusing`` is not symmetric. Each
        rank with an output of its own may be in place.

        Returns:
            The words of the arrays after the call.
        """
        root = self.random.randrange(self.size)
        algorithm = self.random.choice(on_symmetric_arrays(name))
        scatters = name == "reduce_scatter"
        count = len(words[0]) // (self.size if scatters else 1)
        total = [sum(column) for column in zip(*words, strict=True)]
        wanted = words[root] if name == "broadcast" else total
        outputs = self.map("output", 8 * count + 8)
        self.shared |= self.regions(*arrays, *outputs)
        after, off = [], self.random.random() < 0.1
        for end, array, output in zip(self.ends, arrays, outputs, strict=True):

            def place(address, nbytes, refuses=end.rank == refusing):
                return None if refuses else SimpleNamespace(seen=(address,) * self.size)

            first = end.rank * count if scatters else 0
            result, target = wanted[first : first + count], array + 8 * first
            mine = list(words[end.rank])
            if name == "reduce" and end.rank != root:
                target = 0
            elif name == "broadcast" or self.random.random() < 0.5:
                mine[first : first + count] = result
            else:
                # Rarely not aligned to 16 bytes, on this rank or on all.
                target = output + 8 * (off or self.random.random() < 0.1)
                self.expect(target, result)
            after.append(mine)
            there = replace(end, place=place)
            call = self.code.binding.Call(array, target, count, INT64, "sum", root)
            add(self.bound(name, algorithm, there, call), self.streams[end.rank])
        return after

    def own_arrays(self, count):
        """Add a call between new arrays of the ranks, with a random root."""
        name = self.random.choice(on_own_arrays(self.size, count))
        refusing = self.random.choice([None, None, None, *range(self.size)])
        arrays, words = self.inputs(count)
        words = self.on_own_arrays(name, arrays, words, refusing)
        for array, mine in zip(arrays, words, strict=True):
            self.expect(array, mine)

    def scan(self, count):
        """Add an inclusive scan in chunks."""
        self.exchange(GENERAL, "scan", count)

    def gather(self, count):
        """Add an all-gather in chunks."""
        self.exchange(GENERAL, "all_gather", count)

    def mailed(self, transport, count):
        """Add a broadcast or a reduction of any root, or a scan, by mailboxes."""
        names = ["broadcast", "reduce", "scan"]
        some = [name for name in names if by_way(name, transport)]
        self.exchange(transport, self.random.choice(some), count)

    def exchange(self, way, name, count):
        """Add any exchange, by mailboxes of a transport or ``GENERAL``.

        If the input or output has shards, ``count`` is the words of a shard.
        """
        operation, root = OPERATIONS[name], self.random.randrange(self.size)
        (algorithm,) = by_way(name, way)
        made = operation.algorithms[algorithm]
        moved = self.kind_for(made)
        shards = operation.shards(self.size)
        sources, words = self.inputs(count * shards, DRAW[moved])
        wanted = [wanted_of(operation, words, r, root, moved) for r in range(self.size)]
        targets = sources
        if not operation.in_place and (
            len(wanted[root]) != len(words[0]) or self.random.random() < 0.5
        ):
            targets = self.map("output", 8 * len(wanted[root]))
        for end, source, target in zip(self.ends, sources, targets, strict=True):
            call = self.code.binding.Call(source, target, count, moved, "sum", root)
            launch = self.bound(name, algorithm, end, call)
            self.streams[end.rank].append(launch)
            mine = wanted[end.rank] or []
            if made.floats:
                mine = [None if word == ALL_ONES else word for word in mine]
            self.expect(target, mine)

    def barrier(self):
        for end in self.ends:
            self.streams[end.rank].append(self.code.barrier.bind(end))

    def pad_barrier(self):
        """Add the barrier of symmetric memory."""
        kernel = self.code.pads.barrier_kernel(self.size)
        for context in self.contexts:
            self.streams[context.rank].append(kernel.bind(1, context, 0))

    def run(self, mismatch=False):
        """Run all calls, and check memory afterwards.

        With haste, calls may fail, and a rank may leave before its last one. Then every
        word is right or unchanged. If a rank is absent, or after a ``mismatch`` of the
        ranks' calls, every rank has a record.
        """
        leaver = None
        if self.machine.haste or mismatch:
            self.forbid_stores_after_failures()
        if self.machine.haste:
            leaver = self.let_a_rank_leave()
        self.machine.run(self.streams)
        records = [self.record(rank) for rank in range(self.size)]
        failed = any(records) or self.machine.absent is not None or mismatch
        if failed and not all(records):
            raise Finding("result", f"a rank has no record of the failure: {records}")
        for (address, nbytes), words in self.expected.items():
            found = self.memory.final(address, nbytes)
            partly = any(records) or leaver == self.owners[address // REGION]
            allowed = words if partly else words[-1:]
            untouched = partly and found == self.memory.first(address, nbytes)
            if not untouched and not any(is_right(found, word) for word in allowed):
                raise Finding("result", f"{found} at {address:#x} is not {words[-1]}")
        if leaver is None and not any(records):
            self.check_rest()

    def record(self, rank):
        """Return what has reached a rank's board; 0: nothing."""
        return self.memory.final(self.board + 8 * rank, 8)

    def forbid_stores_after_failures(self):
        """Let the machine check each store."""
        board = range(self.board, self.board + 8 * self.size)
        regions = [
            each for each in vars(self.layout).values() if hasattr(each, "slots")
        ]
        marks = self.marks | {
            base + at
            for base in self.workspaces
            for at in range(0, regions[0].epochs, 4)
        }
        places = [
            *(at for each in regions for at in range(each.epochs, each.flags, 4)),
            *self.handshake_places(),
        ]
        kept = self.kept | {base + at for base in self.workspaces for at in places}
        kept |= marks
        state = self.code.workspace.channels(self.size, True)
        own = range(0, state.flags, 4)  # epochs
        kept |= {base + at for base in self.requested for at in own}
        if self.shared:
            self.memory.fresh = board
        self.machine.rule = NoStoreAfterFailure(
            *(board, kept, marks, self.shared),
            lambda lane: lane < self.size and self.record(lane) != 0,
            lambda lane, block: lane < self.size and self.is_marked(lane, block),
        )

    def is_marked(self, rank, block=0):
        """Return whether a rank's mark, which the block loads, shows a failure."""
        workspace = self.code.workspace
        at = workspace._LINE * (block & workspace._MARKS - 1)
        return self.memory.final(self.workspaces[rank] + at, 4) != 0

    def handshake_places(self):
        """Return where in a workspace the words are that others have sent."""
        place_of = self.code.handshake.make_place(self.size)
        words = 2 * (self.size - 1)
        return range(place_of(0, 0), place_of(0, 0) + 8 * words * self.blocks, 8)

    def let_a_rank_leave(self):
        """Let a rank leave before any of its calls; return it, or None."""
        leaver, first = self.machine.absent, 0
        if leaver is None:
            leaver = self.random.choice([None, self.random.randrange(self.size)])
            first = self.random.randrange(len(self.streams[leaver or 0]) + 1)
        if leaver is not None:
            del self.streams[leaver][first:]
            self.machine.drop_unreached(self.streams)
        return leaver

    def check_rest(self):
        """Check that results and epochs agree; mailboxes and pads must be empty."""
        self.check_equal(self.equal, "results")
        for region in (getattr(self.layout, name) for name in REGIONS):
            blocks = 1 if region is self.layout.barrier else self.blocks
            places = [
                [workspace + at for workspace in self.workspaces]
                for at in self.epochs(region, blocks)
            ]
            self.check_equal(places, "epochs", 4)
        for workspace in self.workspaces:
            for at, value in self.memory.accessed(workspace, self.layout.nbytes):
                _, empty = self.initial(at)
                if empty not in (0, value):
                    raise Finding("result", f"a vector is left at {workspace + at:#x}")
        lengths = self.layout.lengths
        for workspace in self.workspaces:
            for at in range(lengths.slots, lengths.end, 8):
                if self.memory.final(workspace + at, 8) != 0:
                    raise Finding("result", f"a length is left at {workspace + at:#x}")
        for pad, channel in itertools.product(self.pads, range(self.blocks)):
            # After two words for grids, and a word for each rank.
            first = pad + self.code.pads.pad_nbytes(self.size, channel)
            first += 16 + 8 * self.size
            for slot in range(self.size):
                if self.memory.final(first + 4 * slot, 4) != 0:
                    raise Finding("result", f"channel {channel} of a pad is not 0")

    def check_equal(self, places, what, nbytes=8):
        for addresses in places:
            found = [self.memory.final(address, nbytes) for address in addresses]
            if len(set(found)) > 1:
                raise Finding("result", f"{what} at {addresses} differ: {found}")


def is_right(found, word):
    """Return whether a word is the wanted one; None: any NaN."""
    if word is not None:
        return found == word
    return found is not None and float_of(found) != float_of(found)


def by_way(name, way):
    """Return an operation's one-shot algorithms of a transport, or ``GENERAL``."""
    if way == GENERAL:
        return [GENERAL]
    return those(name, lambda made: made.transport == way and made.region in ONE_SHOTS)


def on_symmetric_arrays(name):
    """Return an operation's algorithms by kernels between arrays at any addresses."""
    return those(name, lambda made: made.x is Arrays.SYMMETRIC)


def on_own_arrays(size, count, names=None):
    """Return which operations on own arrays can have so many words."""
    whole = "broadcast", "reduce", "all_reduce"
    return [
        each
        for each in names or (*whole, "reduce_scatter")
        if each in whole or count >= size
    ]


REGIONS = {
    "barrier",
    *(
        made.region
        for operation in OPERATIONS.values()
        for made in operation.algorithms.values()
    ),
}


def an_integer(random):
    return random.getrandbits(40)


def a_word(random):
    """Return a number, or sometimes the word of all ones."""
    return ALL_ONES if random.random() < 0.1 else an_integer(random)


def a_float(random):
    """Return the bits of a float: of a number, or sometimes the NaN of all ones."""
    return ALL_ONES if random.random() < 0.1 else bits_of(random.random())


def bits_of(number):
    return int(np.float64(number).view(np.uint64))


def float_of(word):
    return float(np.uint64(word).view(np.float64))


def float_sum(words, ranks):
    """Return the bits of the sum by the tree of ranks, or None if it is a NaN."""
    leaves = dict(zip(ranks, map(float_of, words), strict=True))
    return None if ALL_ONES in words else bits_of(in_tree(operator.add, leaves))


def integer_sum(words, ranks):
    return sum(words) & ALL_ONES


KINDS = INT64, FLOAT64
DRAW = {INT64: a_word, FLOAT64: a_float}
IDENTITY = {INT64: 0, FLOAT64: 1 << 63}  # 0 and -0.0
TOTAL = {INT64: integer_sum, FLOAT64: float_sum}


def wanted_of(operation, words, rank, root, kind):
    """Return the expected words of a rank's output; None if it has no output."""

    def total(used):
        columns = zip(*used.values(), strict=True)
        return [TOTAL[kind](column, used) for column in columns]

    def of_none(count):
        return [IDENTITY[kind]] * count

    def joined(used):
        return [word for each in used for word in each]

    return expected(operation, words, rank, root, total, of_none, joined)
