"""Barriers of teams, and of the grids of all ranks."""

import pytest

from explore.markers import removed, replaced, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.world import World
from numba_symm.device.teams import Team

ROUNDS = 2
RELAXED = within(
    "barriers",
    "await-generation",
    "ld_acquire_sys_u64(generation)",
    "ld_relaxed_sys_u64(generation)",
)
BROKEN = {
    "a count before all threads have stored": removed("barriers", "grid-synchronize"),
    "a count that does not release": within(
        "barriers", "count", "atom_add_release_sys_u64", "atom_add_relaxed_sys_u64"
    ),
    "a last count that does not acquire": removed("barriers", "acquire-counts"),
    "counts that are not reset": removed("barriers", "reset"),
    "a generation before all signals": within(
        "barriers", "share-signals", "syncthreads_or(not arrived)", "(not arrived)"
    ),
    "a generation that does not release": within(
        "barriers", "generation", "st_release_sys_u64", "st_relaxed_sys_u64"
    ),
    "a generation loaded relaxed": RELAXED,
    "no synchronization after the generation": replaced(
        "barriers", "grid-agree", "return arrived"
    ),
}


def exchanges(code, teams=None):
    """Kernels that store at the ranks of their team, meet in a barrier, and load."""

    def scenario(machine):
        world = World(machine, code)
        groups = [list(range(world.size))]
        if teams:
            groups = [[world.size - 1, 0], [1]] if world.size > 2 else [[1, 0]]
        grid = world.blocks
        kernel = code.programs.exchange_between_grids
        if teams == "blocks":
            grid, kernel = 1, code.programs.exchange_in_teams
        threads = code.shape.threads
        workers = threads * grid
        inputs, words = world.inputs(ROUNDS * workers)
        outputs = world.map("output", 8 * ROUNDS * workers * world.size)
        for group in groups:
            for rank in group:
                context = world.contexts[rank]
                team = Team.of(context, group)
                args = context, team, inputs[rank], outputs[rank], ROUNDS
                world.launch(rank, kernel, grid, *args)
                for worker in range(workers):
                    block, thread = divmod(worker, threads)
                    other = threads * ((block + 1) % grid) + 1 - thread
                    for i in range(ROUNDS):
                        theirs = [words[r][ROUNDS * other + i] for r in group]
                        place = (ROUNDS * worker + i) * len(group)
                        world.expect(outputs[rank] + 8 * place, theirs)
        world.run()

    return scenario


def meetings(code):
    """Kernels that only meet: so short that a thread waits between any two steps."""

    def scenario(machine):
        machine.change_within(200)
        world = World(machine, code)
        for context in world.contexts:
            args = context, ROUNDS
            world.launch(context.rank, code.programs.meet, world.blocks, *args)
        world.run()

    return scenario


def test_meetings():
    holds(meetings(device_code()), 2, 1000)


@worlds
@pytest.mark.parametrize("teams", [None, "grids", "blocks"])
def test_barriers(teams, ranks):
    holds(exchanges(device_code(), teams=teams), ranks, 30)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(what, races):
    breaks(exchanges(device_code(BROKEN[what])), 3, races=races)
