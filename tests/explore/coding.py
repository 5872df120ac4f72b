"""Scenarios of the kernels of quantized sums. Their exchanges are other calls'."""

import numpy as np

from explore.scenarios import some_blocks
from explore.world import World, add
from numba_symm import dtypes
from tests.coded import coded, coded_sum

FLOAT32 = dtypes.element("float32", "test")
RANKS = 2, 3, 11  # whose codes are added


def sums_by_codes(code, failed=False):
    """Each rank encodes the arrays of two ranks, adds the codes, and decodes the sum.

    Then it does so again, with the same memory for codes. If ``failed``, the ranks have
    failed before, and store no result.
    """

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        for workspace in world.workspaces if failed else ():
            for mark in range(8):
                world.memory.plant(workspace + 128 * mark, 4, 1)
        ranks = machine.random.choice(RANKS)
        memory = world.map("codes", ranks * 528), world.map("sum", 528)
        for _ in range(2):
            one(world, ranks, *memory)
        world.run()

    def one(world, ranks, coded, summed):
        random, kernels = world.random, code.coded_sum
        wire = random.choice(["int8", "fp8"])
        codes = code.groups.INT8 if wire == "int8" else code.groups.FP8
        draw = np.random.default_rng(random.randrange(99))
        count = 128 * random.choice([1, 2]) - 8
        groups = -(-count // 128)
        given = draw.standard_normal((ranks, count)).astype(np.float32)
        total = coded_sum([*given], wire).view(np.uint64).tolist()
        encode = kernels.encode_kernel(world.size, codes, FLOAT32, False)
        sum_up = kernels.add_kernel(world.size, codes, ranks)
        decode = kernels.decode_kernel(world.size, codes, FLOAT32, False)
        outputs = world.map("output", 4 * count, 0)
        arrays = [world.map("input", 4 * count) for _ in given]
        for rank, end in enumerate(world.ends):

            def launch(kernel, *arguments, end=end, stream=world.streams[rank]):
                add(kernels.bind(kernel, end, groups, *arguments), stream)

            for which, mine in enumerate(given):
                array = arrays[which][rank]
                for i, word in enumerate(mine.view(np.int64).tolist()):
                    world.memory.plant(array + 8 * i, 8, word)
                launch(encode, array, coded[rank] + 528 * which, count, groups)
            launch(sum_up, coded[rank], summed[rank], groups, 528)
            launch(decode, summed[rank], outputs[rank], count, groups)
            world.expect(outputs[rank], [0] * len(total) if failed else total)

    return scenario


def tokens_by_codes(code, failed=False):
    """Each rank encodes two tokens of two groups, and decodes what it has received.

    Of each rank, there is room for two tokens, of which some are there. If ``failed``,
    the ranks have failed before, and store no token.
    """
    capacity, width = 2, 2

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        for workspace in world.workspaces if failed else ():
            for mark in range(8):
                world.memory.plant(workspace + 128 * mark, 4, 1)
        kernels, codes = code.coded_sum, code.groups.FP8
        elements, number = 128 * width * capacity, width * capacity
        draw = np.random.default_rng(world.random.randrange(99))
        encode = kernels.encode_kernel(world.size, codes, FLOAT32, False)
        decode = kernels.decode_rows_kernel(world.size, codes, FLOAT32)
        received = world.map("codes", world.size * 528)
        outputs = world.map("output", world.size * 4 * elements, 0)
        counts = world.map("counts", 8 * world.size)
        for rank, end in enumerate(world.ends):
            for r in range(world.size):
                x = draw.standard_normal(elements).astype(np.float32)
                array = world.map("input", 4 * elements)[rank]
                for i, word in enumerate(x.view(np.int64).tolist()):
                    world.memory.plant(array + 8 * i, 8, word)
                given = array, received[rank] + 528 * r, elements, number
                add(kernels.bind(encode, end, number, *given), world.streams[rank])
                count = world.random.randrange(capacity + 1)
                world.memory.plant(counts[rank] + 8 * r, 8, count)
                there = coded(x, "fp8").ravel()[: 128 * width * count]
                wanted = np.zeros(elements, np.float32)
                wanted[: 0 if failed else there.size] = there[: 0 if failed else None]
                words = wanted.view(np.uint64).tolist()
                world.expect(outputs[rank] + 4 * elements * r, words)
            given = received[rank], outputs[rank], counts[rank], capacity, width
            launch = kernels.bind(decode, end, world.size * number, *given)
            add(launch, world.streams[rank])
        world.run()

    return scenario
