"""A scenario of the kernels of exact sums. Their exchanges are other calls'."""

from dataclasses import replace

import numpy as np

from explore.scenarios import some_blocks
from explore.world import FLOAT64, INT64, World, add
from tests.exact import NAMES, model


def exact_sums(code, failed=False):
    """Each rank sums three arrays of its own, with the same memory for records.

    If ``failed``, the ranks have failed before, and store no result.
    """

    def scenario(machine):
        blocks = machine.random.choice([None, some_blocks(machine, code)])
        world = World(machine, code, blocks=blocks)
        for workspace in world.workspaces if failed else ():
            for mark in range(8):
                world.memory.plant(workspace + 128 * mark, 4, 1)
        found, total = (world.map(name, 128) for name in ("found", "total"))
        for _ in range(3):
            one(world, found, total)
        world.run()

    def one(world, found, total):
        random, kernels = world.random, code.exact_sum
        name, ragged = random.choice(NAMES), random.random() < 0.5
        draw = np.random.default_rng(random.randrange(99))
        block = 8 * code.shape.threads
        # With more than two blocks' elements, some threads have several batches.
        count = random.choice([0, 2, block + 2, 3 * block]) + ragged
        outputs = world.map("output", 8, 0)
        for rank, end in enumerate(world.ends):
            end = replace(end, max_blocks=min(end.max_blocks, world.blocks))
            x, y = draw.standard_normal((2, count))
            arrays = []
            for mine in (x, y):
                arrays.append(world.map("input", 8 * count + 16)[rank])
                for i, word in enumerate(mine.view(np.int64).tolist()):
                    world.memory.plant(arrays[-1] + 8 * i, 8, word)
            grid = kernels.grid_of(end, name, FLOAT64, count)
            of_call = world.size, name, FLOAT64, ragged
            stream, records = world.streams[rank], (found[rank], total[rank])
            for adding, op in ((False, "max"), (True, "sum")):
                kernel = kernels.reduce_kernel(*of_call, adding)
                given = *arrays, count, records[0], records[adding]
                add(kernels.bind(kernel, end, grid, *given), stream)
                if grid > 1:
                    given = records[adding], 1 + adding, 0, grid, INT64, op
                    add(code.pack.bind_reduce_shards(end, *given), stream)
            kernel = kernels.round_kernel(world.size, name, 64)
            add(kernels.bind(kernel, end, 1, *records, outputs[rank]), stream)
            wanted = model(name, x, y).view(np.uint64).item()
            world.expect(outputs[rank], [0 if failed else wanted])

    return scenario
