"""Scenarios of collectives within a kernel."""

from explore.memory import Finding
from explore.world import ALL_ONES, INT64, World, an_integer
from numba_symm.device.teams import Team
from numba_symm.memory.allocator import ring_of

THREADS, VECTORS = 32, 2  # of a workspace
VARIED = "REDUCE_SCATTER", "ALL_GATHER", "ALL_TO_ALL"
KINDS = "ALL_REDUCE", "BROADCAST", "EXSCAN", *VARIED


def shard(words, counts, rank):
    """Return a rank's part of words."""
    start = sum(counts[:rank])
    return words[start : start + counts[rank]]


def total(words):
    """Return the sums of several ranks' words."""
    return [sum(column) & ALL_ONES for column in zip(*words, strict=True)]


def wanted(name, words, rank, root, sent):
    """Return the words of a rank's result, of all ranks' ``words``.

    ``sent`` has each rank's numbers of words for all ranks.
    """
    shards = [shard(*each, rank) for each in zip(words, sent, strict=True)]
    if name == "EXSCAN":
        return total(words[:rank]) if rank else [0] * len(words[0])
    if name in ("ALL_REDUCE", "REDUCE_SCATTER"):
        return total(words if name == "ALL_REDUCE" else shards)
    if name == "BROADCAST":
        return words[root]
    return [
        word for each in (words if name == "ALL_GATHER" else shards) for word in each
    ]


class Blocks:
    """A world with a device workspace, and kernels that make collectives in it."""

    def __init__(self, machine, code, depth=None, wrap=False, divided=False):
        self.machine, self.code = machine, code
        self.world = world = World(machine, code)
        self.size, self.grid = world.size, machine.random.randrange(world.blocks) + 1
        made = code.block_exchange
        depths = [1, 2] if wrap else [1, 2, 4]
        self.depth = machine.random.choice(depths) if depth is None else depth
        sizes = self.grid, THREADS, VECTORS, self.depth
        addresses = world.map("workspace", made.nbytes(self.size, *sizes), 0)
        self.contexts, self.marks, self.teams = [], [], self._teams(divided)
        # If the epochs overflow: each set has one yet in which threads clear it.
        epoch = made.LAST_EPOCH - 2 * self.depth - machine.random.randrange(3)
        for rank, address in enumerate(addresses):
            ctx = world.contexts[rank]
            team = Team.of(ctx, next(team for team in self.teams if rank in team))
            ring = ring_of(team)
            found = made.TeamGuard(*ctx.guard, ring), team
            there = tuple(addresses[other] for other in ring)
            self.contexts.append(made.WorkspaceContext(*ctx[:4], *found, there, *sizes))
            marks = range(address, address + made.MARK * self.grid, made.MARK)
            end = marks.stop + made.EPOCHS * THREADS * self.grid
            self.marks.append(marks)
            world.marks |= set(marks)
            world.kept |= {*marks, *range(marks.stop, end, 4)}
            if wrap:
                self._plant(marks.stop, end, address + made.nbytes(self.size, *sizes))
                self._continue(marks.stop, epoch)

    def _teams(self, divided):
        """Return the ranks of one team, or of two if they are divided."""
        ranks = list(range(self.size))
        if not divided:
            return [ranks]
        self.machine.random.shuffle(ranks)
        first = self.machine.random.randrange(1, self.size)
        return [ranks[:first], ranks[first:]]

    def _continue(self, epochs, epoch):
        """Let all threads continue after an epoch."""
        for block in range(self.grid):
            for thread in range(self.code.shape.threads):
                at = epochs + 8 * (THREADS * block + thread)
                self.world.memory.plant(at, 4, epoch)
                self.world.memory.plant(at + 4, 4, epoch)

    def _plant(self, epochs, boxes, end):
        """Fill all mailboxes with packets of the first epochs of their set."""
        random, sets = self.machine.random, 2 * self.depth
        nbytes = (end - boxes) // sets
        for at in range(boxes, end, 8):
            if (at - boxes) // 16 % 32 < self.code.shape.threads:
                old = ((at - boxes) // nbytes or sets) + random.choice([0, sets])
                self.world.memory.plant(at, 8, old << 32 | random.getrandbits(32))

    def check_marks(self):
        """Check that each block of a rank that launched kernels knows of a failure."""
        for rank, marks in enumerate(self.marks):
            found = [self.world.memory.final(mark, 4) for mark in marks]
            if rank != self.machine.absent and not all(found):
                raise Finding("result", f"blocks of rank {rank} have no mark: {found}")

    def steps(self, number, items, kinds):
        """Return, by rank, collectives of random kinds; expect their results."""
        found = [[] for _ in range(self.size)]
        for team in self.teams:
            for _ in range(number):
                step = self._step(team, items, self.machine.random.choice(kinds))
                for rank, mine in zip(team, step, strict=True):
                    found[rank].append(mine)
        return found

    def _step(self, team, items, name):
        """Return, by a team's rank, a collective; expect its results."""
        world, random, size = self.world, self.machine.random, len(team)
        threads = self.code.shape.threads
        most = 2 * VECTORS * (1 if items else threads)
        workers = threads * self.grid if items else 1
        root, kind = random.randrange(size), getattr(self.code.block_exchange, name)
        varied = name in VARIED and random.random() < 0.5
        sent, received = self._counts(kind, most, varied, size)
        lengths = list(map(sum, sent))
        if not kind.sends_shards:
            lengths = [each[place] for place, each in enumerate(sent)]
        sources, words = world.inputs(max(lengths) * workers, an_integer)
        sizes = size, INT64, "sum", kind, items, varied
        exchange = self.code.block_exchange.make_exchange(*sizes)
        results = world.map("result", 8 * most * size * workers)
        in_place = name in ("ALL_REDUCE", "BROADCAST", "EXSCAN")
        steps = []
        for place, rank in enumerate(team):
            for worker in range(workers):
                given = [
                    words[other][worker * n : (worker + 1) * n]
                    for other, n in zip(team, lengths, strict=True)
                ]
                found = wanted(name, given, place, root, sent)
                world.expect(results[rank] + 8 * len(found) * worker, found)
            counts = (sent[place], received[place]) if varied else (None, None)
            x, taken = (sources[rank], lengths[place]), len(found)
            steps.append((exchange, x, taken, in_place, root, results[rank], counts))
        return steps

    def _counts(self, kind, most, varied, size):
        """Return, by rank, the numbers of words that it sends and that it receives."""
        random = self.machine.random
        if not varied:
            sent = [[random.randrange(1, most + 1)] * size] * size
        elif kind.sends_shards and kind.gathers:
            sent = [
                [random.randrange(most + 1) for _ in range(size)] for _ in range(size)
            ]
            return sent, [list(column) for column in zip(*sent, strict=True)]
        else:
            sent = [[random.randrange(most + 1) for _ in range(size)]] * size
        return sent, sent

    def launch(self, number, items, kinds):
        """Launch a kernel that makes so many collectives, on each rank."""
        programs, world = self.code.programs, self.world
        ahead = self.machine.random.randrange(self.depth)
        if items:
            for rank, steps in enumerate(self.steps(number, True, kinds)):
                args = self.contexts[rank], steps, ahead
                world.launch(rank, programs.collectives_of_items, self.grid, *args)
            return
        of_blocks = [self.steps(number, False, kinds) for _ in range(self.grid)]
        nbytes = 8 * 2 * VECTORS * self.code.shape.threads * self.size
        arrays = [
            [(world.map("x", nbytes), world.map("y", nbytes)) for _ in range(ahead + 1)]
            for _ in of_blocks
        ]
        for address in (each for mine in arrays for xs, _ in mine for each in xs):
            # The program stores there, whatever has failed.
            world.kept |= set(range(address, address + nbytes, 8))
        for rank, ws in enumerate(self.contexts):
            mine = [[(x[rank], y[rank]) for x, y in each] for each in arrays]
            steps = [each[rank] for each in of_blocks]
            args = ws, mine, steps, ahead
            world.launch(rank, programs.collectives_of_blocks, self.grid, *args)


def broadcasts_of_other_roots(code):
    """A broadcast for which the ranks have different roots."""

    def scenario(machine):
        blocks = Blocks(machine, code)
        world, kind = blocks.world, code.block_exchange.BROADCAST
        sizes = blocks.size, INT64, "sum", kind, True
        exchange, count = code.block_exchange.make_exchange(*sizes), 3
        workers = code.shape.threads * blocks.grid
        arrays, words = world.inputs(count * workers, an_integer)
        results = world.map("result", 8 * count * workers)
        odd = machine.random.randrange(blocks.size)
        for rank, ws in enumerate(blocks.contexts):
            root = 1 if rank == odd else 0
            x, none = (arrays[rank], count), (None, None)
            step = exchange, x, count, True, root, results[rank], none
            kernel = code.programs.collectives_of_items
            world.launch(rank, kernel, blocks.grid, ws, [step], 0)
            world.expect(results[rank], words[root])
        world.run(mismatch=True)

    return scenario


def collectives(
    code, items=None, kernels=2, steps=4, wrap=False, kinds=KINDS, depth=None,
    divided=False,
):  # fmt: skip
    """Kernels that make several collectives each.

    Args:
        code: the device code.
        items: whether of items or of a block's arrays; None: either.
        kernels: the number of kernels.
        steps: the number of collectives in each, for each set of half of them if
            epochs overflow.
        wrap: whether the epochs overflow meanwhile.
        kinds: the names of collectives to choose from.
        depth: that of the workspace; None: any.
        divided: whether the ranks are two teams.
    """

    def scenario(machine):
        blocks = Blocks(machine, code, depth, wrap, divided)
        for _ in range(kernels):
            either = machine.random.random() < 0.5
            number = steps * blocks.depth if wrap else steps
            blocks.launch(number, either if items is None else items, kinds)
        blocks.world.run()
        if machine.absent is not None:
            blocks.check_marks()

    return scenario
