"""The kernel of docs/own-collective.md, from which users write their own."""

from pathlib import Path

import pytest

from explore.intrinsics import array_at
from explore.scenarios import breaks, holds, worlds
from explore.source import device_code, program
from explore.test_failures import HASTE, IMPATIENT
from explore.world import World

PROGRAM = Path(__file__).parents[2] / "docs/programs/one_shot.py"

BARRIER = "if symm.barrier(ctx, block):"
UNORDERED = "cuda.syncthreads()", "pass"
AFTER_FAILURES = {
    "a failure that is ignored": (BARRIER, "if symm.barrier(ctx, block) or True:"),
    "another chunk": ("epoch = FAILED", "epoch += 1"),
    "another call": ("epochs[block] = epoch", "epochs[block] = max(epoch, 0)"),
}


def calls(code, *edits):
    """Calls of any size, one right after the other, in place or not."""
    found = program(PROGRAM, code, *edits)
    found.BLOCKS, found.THREADS = blocks, threads = (
        code.shape.blocks,
        code.shape.threads,
    )
    found.SLOTS = 2, blocks, threads

    def a_small_integer(random):
        return random.getrandbits(20)  # sums of these are exact in float32

    def scenario(machine):
        world, random = World(machine, code), machine.random
        epochs = world.map("epochs", 8 * blocks, fill=0)
        world.kept |= {at + 8 * b for at in epochs for b in range(blocks)}
        for _ in range(4):
            count = random.choice([1, 2, 3, 5, 8, 11])
            sources, words = world.inputs(count, a_small_integer)
            targets = random.choice([sources, world.map("output", 8 * count)])
            total = [sum(column) for column in zip(*words, strict=True)]
            for context in world.contexts:
                rank = context.rank
                args = (
                    array_at(epochs[rank], blocks, None),
                    array_at(sources[rank], count, None),
                    array_at(targets[rank], count, None),
                )
                world.launch(rank, found.all_reduce, blocks, context, *args)
                world.expect(targets[rank], total)
        world.run()

    return scenario


@worlds
def test_calls(ranks):
    holds(calls(device_code()), ranks, 300)


@worlds
def test_an_epoch_that_a_thread_may_not_have_loaded_is_found(ranks):
    """It is only a race, because a block without elements stores what it has loaded."""
    breaks(calls(device_code(), UNORDERED), ranks)


@worlds
def test_calls_that_fail(ranks):
    holds(calls(device_code(IMPATIENT)), ranks, 120, haste=HASTE)


@worlds
def test_every_rank_leaves_when_one_is_absent(ranks):
    scenario = calls(device_code(IMPATIENT))
    holds(scenario, ranks, 20, haste=HASTE, absent=ranks - 1)


@pytest.mark.parametrize("what", AFTER_FAILURES)
def test_stores_after_a_failure_are_found(what):
    scenario = calls(device_code(IMPATIENT), AFTER_FAILURES[what])
    breaks(scenario, 3, haste=HASTE)
