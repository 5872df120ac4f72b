"""Signals that count, in a pipeline of several steps."""

import itertools

import pytest

from explore.markers import removed, replaced, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.world import World
from numba_symm.device.teams import Team

CHUNKS = 5
ADD_RELAXED = within("signals", "signal-add", "'release'", "'relaxed'")
RELAXED = within(
    "signals",
    "load-count",
    "ld_acquire_sys_u64(address)",
    "ld_relaxed_sys_u64(address)",
)
SET_RELAXED = within("signals", "set", "st_release_sys_u64", "st_relaxed_sys_u64")
BROKEN = {
    "a signal that does not release": ADD_RELAXED,
    "a wait that does not acquire": RELAXED,
    "a signal before all threads have copied": removed("signals", "copied"),
    "no wait for credit": removed("programs", "await-credit"),
    "a wait of one thread": replaced("signals", "until-agree", "return arrived"),
    "no wait for the words": within(
        "signals",
        "until-each",
        "wait_until(ctx, rank, at, comparison, wanted)",
        "wait_until(ctx, rank, at, LE, wanted)",
    ),
    "credit before all threads have read": removed("programs", "all-read"),
}


def pipelines(code):
    """A ring of ranks, each of which sends chunks to the next one."""

    def scenario(machine):
        world = World(machine, code)
        by_element = machine.random.random() < 0.5
        words = CHUNKS * code.shape.threads
        inputs, given = world.inputs(words)
        outputs = world.map("output", 8 * words)
        for context in world.contexts:
            rank = context.rank
            args = context, inputs[rank], outputs[rank], CHUNKS, by_element
            world.launch(rank, code.programs.pipeline, 1, *args)
            world.expect(outputs[rank], given[rank - 1])
        world.run()

    return scenario


ROUNDS = 3
EARLY = {
    "signals before all threads have stored": removed("programs", "all-stored"),
    "a wait of one thread": replaced("signals", "until-agree", "return arrived"),
    "a wait for no rank": removed("signals", "until-each"),
}


def gatherings(code):
    """Ranks that store at each other, and wait for some or all of the others at once.

    Those of a mask, which are all sources, or which a mask selects of all.
    """

    def scenario(machine):
        world, random = World(machine, code), machine.random
        threads, size = code.shape.threads, world.size
        mask = random.choice([3, (1 << size) - 1])
        ranks = [rank for rank in range(size) if mask >> rank & 1]
        inputs, words = world.inputs(ROUNDS * threads)
        outputs = world.map("output", 8 * ROUNDS * threads * size)
        for rank in ranks:
            context = world.contexts[rank]
            others = [-1 if each == rank else each for each in ranks]
            team = Team.of(context, ranks)
            sources = random.choice([None, tuple(others), team])
            args = context, sources, mask, inputs[rank], outputs[rank], ROUNDS
            world.launch(rank, code.programs.gather_words, 1, *args)
            for thread, i, other in itertools.product(
                range(threads), range(ROUNDS), ranks
            ):
                if other != rank:
                    place = (ROUNDS * thread + i) * size + other
                    word = words[other][ROUNDS * (1 - thread) + i]
                    world.expect(outputs[rank] + 8 * place, [word])
        world.run()

    return scenario


@worlds
def test_waits_of_a_block_for_several_ranks(ranks):
    holds(gatherings(device_code()), ranks, 60)


@by_anything_and_by_result
@pytest.mark.parametrize("what", EARLY)
def test_what_is_broken_of_several_is_found(what, races):
    breaks(gatherings(device_code(EARLY[what])), 3, races=races)


@worlds
def test_a_pipeline(ranks):
    holds(pipelines(device_code()), ranks, 80)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(what, races):
    breaks(pipelines(device_code(BROKEN[what])), 3, races=races)


def test_credit_that_does_not_release_is_a_race():
    """Only a race: no load is delayed past a later store (``memory.py``)."""
    breaks(pipelines(device_code(SET_RELAXED)), 3)
