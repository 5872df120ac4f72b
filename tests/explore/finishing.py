"""Scenarios of the kernels that apply an epilogue to an array of their own rank."""

import numpy as np

from explore.scenarios import plant_old_packets, some_blocks
from explore.world import ALL_ONES, World, add
from numba_symm import dtypes
from numba_symm.collectives.operations import ALL_REDUCE, REDUCE_SCATTER
from numba_symm.dtypes import UserEpilogue
from tests.finished import finished

FLOAT32 = dtypes.element("float32", "test")
WIDE = 20  # five runs, so two epochs of two ranks, and three of more
COLUMNS = 12  # three runs: blocks of the explorer have two threads


def plus(value, other):
    return value + other


def square(value, other):
    return (value + other) * (value + other)


def share(value, total, other):
    return (value + other) / total, value + other


ELEMENTS, ROWS = UserEpilogue(plus), UserEpilogue(share, square)


def fused(code, transport=None, wrap=False):
    """Reductions that apply epilogues themselves, and others by the same mailboxes.

    If ``wrap``, their epochs overflow meanwhile, over packets of the first epochs.
    """

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        sums = world.layout.partials
        for workspace in world.workspaces:  # of rows, which only their rank reads
            world.kept |= set(range(workspace + sums.slots, workspace + sums.end, 4))
        way = transport or world.random.choice(["sentinel", "marked", "ll"])
        if wrap:
            region = getattr(world.layout, f"one_shot_{way}")
            last = code.mailboxes.LAST_EPOCH - 2 - world.random.randrange(3)
            world.plant_epochs(region, last)
            for workspace in world.workspaces:
                plant_old_packets(world, workspace, region, 1)
        for _ in range(6 if wrap else 3):
            if world.random.random() < 0.3:
                world.all_reduce(f"one_shot_{way}", world.random.choice([1, 9]))
            one(world, way, world.random.choice([ELEMENTS, ROWS, ROWS]))
        world.run()

    def one(world, way, kind):
        shape = world.random.choice([1, 3]), world.random.choice([4, WIDE])
        if kind is ROWS:  # a thread has one run of a row, and a block one row
            most = world.code.mailed_epilogue.most_rows(world.ends[0], kind, way)
            shape = world.random.choice([1, min(most, 3)]), world.random.choice([4, 8])
        draw = np.random.default_rng(world.random.randrange(99))
        operation = world.random.choice([ALL_REDUCE, REDUCE_SCATTER])
        shards = operation.shards(world.size)
        given = draw.standard_normal((world.size, shards, *shape)).astype(np.float32)
        odd = None
        if kind is ELEMENTS and operation is ALL_REDUCE and world.random.random() < 0.5:
            # A word of two NaNs, instead of which all ranks take the same others.
            odd = world.random.randrange(2 * shape[0])
            world.random.choice(given).reshape(-1).view(np.uint64)[odd] = ALL_ONES
        other = draw.standard_normal(shape).astype(np.float32)
        total = given[0]
        for each in given[1:]:
            total = total + each
        sizes = kind.function, kind.row_sum, (other,), world.code.shape.threads
        nbytes, found = other.nbytes, [results_of(kind, each, sizes) for each in total]
        arrays, others = world.map("input", shards * nbytes), world.map("other", nbytes)
        outputs_of = [world.map(f"output {k}", nbytes) for k in range(len(found[0]))]
        in_place = [arrays[r] + (shards > 1) * r * nbytes for r in range(world.size)]
        outputs_of[0] = world.random.choice([in_place, outputs_of[0]])
        if len(outputs_of) > 1:  # as an updated residual
            outputs_of[1] = world.random.choice([others, outputs_of[1]])
        operand = world.code.puts.Operand(FLOAT32, world.code.puts.EACH)
        for rank, end in enumerate(world.ends):
            for address, host in ((arrays[rank], given[rank]), (others[rank], other)):
                for i, word in enumerate(host.ravel().view(np.int64).tolist()):
                    world.memory.plant(address + 8 * i, 8, word)
            wanted = found[rank % shards]
            target, *more = (each[rank] for each in outputs_of)
            types = kind, FLOAT32, len(wanted) * (FLOAT32,)
            work = world.code.finishing.Work(
                *types, (operand,), (others[rank],), *shape, tuple(more)
            )
            source = arrays[rank]
            call = world.code.binding.Call(source, target, other.size, FLOAT32, "sum")
            bind = world.code.mailed_epilogue.bind
            launch = bind(end, work, call, way, operation.exchange)
            add(launch, world.streams[rank])
            for address, words in zip((target, *more), wanted, strict=True):
                words = [None if i == odd else word for i, word in enumerate(words)]
                world.expect(address, words)
        if odd is not None:
            world.equal += [[each + 8 * odd for each in rank] for rank in outputs_of]

    return scenario


def results_of(kind, reduced, sizes):
    """Return the words that each output of a rank shall have."""
    if kind is ELEMENTS:
        found = [finished(reduced, np.float32, *sizes)]
    else:
        found = finished(reduced, (np.float32, np.float32), *sizes)
    return [each.ravel().view(np.uint64).tolist() for each in found]


def epilogues(code, failed=False, kinds=(ELEMENTS, ROWS)):
    """Each rank applies epilogues of these kinds to rows, one after another.

    Then it does so again, with other rows. If ``failed``, the ranks have failed before,
    and store no result.
    """

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        for workspace in world.workspaces if failed else ():
            for mark in range(8):
                world.memory.plant(workspace + 128 * mark, 4, 1)
        for kind in 2 * tuple(kinds):
            one(world, kind)
        world.run()

    def one(world, kind):
        rows = world.random.choice([1, 4])
        draw = np.random.default_rng(world.random.randrange(99))
        shape, nbytes = (rows, COLUMNS), 4 * rows * COLUMNS
        given, other = draw.standard_normal((2, *shape)).astype(np.float32)
        sizes = kind.function, kind.row_sum, (other,), world.code.shape.threads
        wanted = results_of(kind, given, sizes)
        outputs = [world.map(f"output {k}", nbytes, 0) for k in range(len(wanted))]
        arrays, others = world.map("reduced", nbytes), world.map("other", nbytes)
        runs, finishing = code.puts, code.finishing
        operand = runs.Operand(FLOAT32, runs.EACH)
        for rank, end in enumerate(world.ends):
            for address, host in ((arrays[rank], given), (others[rank], other)):
                for i, word in enumerate(host.ravel().view(np.int64).tolist()):
                    world.memory.plant(address + 8 * i, 8, word)
            target, *more = (each[rank] for each in outputs)
            types = kind, FLOAT32, len(wanted) * (FLOAT32,)
            work = finishing.Work(
                *types, (operand,), (others[rank],), *shape, tuple(more)
            )
            launch = code.epilogue.bind(end, work, arrays[rank], target)
            add(launch, world.streams[rank])
            for address, words in zip((target, *more), wanted, strict=True):
                world.expect(address, [0] * len(words) if failed else words)

    return scenario
