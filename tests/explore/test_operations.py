"""Every algorithm of every operation in the library's table.

Where a kernel works on the ranks' own arrays, these are symmetric in most of the calls;
in the others the ranks refuse. ``test_copies.py`` has copies between symmetric arrays.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from explore.markers import removed, replaced, within
from explore.scenarios import (
    a_count,
    a_limit,
    breaks,
    by_anything_and_by_result,
    holds,
    worlds,
)
from explore.source import device_code
from explore.world import DRAW, INT64, World, add, wanted_of
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.select import Arrays

PAIRS = [
    (name, algorithm)
    for name, operation in OPERATIONS.items()
    for algorithm in operation.algorithms
]


def anywhere(size, but=0):
    """Return an endpoint's ``place`` by which all ranks see an array at its address.

    Except for the array at the address ``but``.
    """

    def place(address, nbytes):
        return None if address == but else SimpleNamespace(seen=(address,) * size)

    return place


def add_call(world, name, algorithm, count):
    """Add a call of an operation to every rank's stream."""
    operation, random = OPERATIONS[name], world.random
    made = operation.algorithms[algorithm]
    kind = world.kind_for(made) if operation.reduces else INT64
    sources, words = world.inputs(count * operation.shards(world.size), DRAW[kind])
    root = random.randrange(world.size)
    wanted = [wanted_of(operation, words, r, root, kind) for r in range(world.size)]
    in_place = len(wanted[root]) == len(words[0]) and random.random() < 0.5
    targets = sources
    if len(wanted[root]) < len(words[0]) and random.random() < 0.5:
        # In place, too: each rank's shard of its input.
        targets = [at + 8 * count * rank for rank, at in enumerate(sources)]
    elif not in_place and not operation.in_place:
        targets = world.map("output", 8 * len(wanted[root]))
    table = world.code.operations.OPERATIONS
    ends = world.ends
    if made.x is Arrays.SYMMETRIC and random.random() < 0.8:
        # Sometimes one rank's array is not symmetric, or not aligned to 16 bytes.
        refusing = random.choice([None, None, *range(world.size)])
        buts = [0] * world.size
        if made.either:
            # Or only inputs are, on all ranks or on some.
            likely = random.choice([0, 0, 0.5, 1])
            buts = [at * (random.random() < likely) for at in targets]
        ends = [
            end if end.rank == refusing else replace(end, place=anywhere(*about))
            for end, about in zip(ends, ((world.size, at) for at in buts), strict=True)
        ]
    for end, source, target in zip(ends, sources, targets, strict=True):
        mine = 0 if wanted[end.rank] is None else target
        call = world.code.binding.Call(source, mine, count, kind, "sum", root)
        add(table[name].bind(algorithm, end, call), world.streams[end.rank])
        world.expect(target, wanted[end.rank] or [])


def calls_of_pairs(code, *pairs):
    """Calls of operations by algorithms, one after another."""
    names = [algorithm for _, algorithm in pairs] if len(pairs) == 1 else []

    def scenario(machine):
        world = World(machine, code, blocks=a_limit(machine, code, names))
        for _ in range(3):
            add_call(world, *machine.random.choice(pairs), a_count(world))
        world.run()

    return scenario


@worlds
@pytest.mark.parametrize(("name", "algorithm"), PAIRS)
def test_every_algorithm(name, algorithm, ranks):
    holds(calls_of_pairs(device_code(), (name, algorithm)), ranks, 25)


GATHERS = ("all_gather", "direct"), ("all_to_all", "direct")
GATHERS_BROKEN = {
    "the shard stored in another one's place": within(
        "direct", "shard-there", "rank * shard_bytes", "whose * shard_bytes"
    ),
    "loaded though it has been stored": within(
        "direct", "stores", "written != 0", "False"
    ),
    "stored by one rank and loaded by another": replaced(
        "handshake", "differs", "differs = False"
    ),
    "no wait for the others' stores": removed("handshake", "wait"),
}


@by_anything_and_by_result
@pytest.mark.parametrize("what", GATHERS_BROKEN)
def test_gathers_broken_are_found(what, races):
    code = device_code(GATHERS_BROKEN[what])
    breaks(calls_of_pairs(code, *GATHERS), 3, races=races)


@worlds
def test_any_algorithm_after_any_other(ranks):
    holds(calls_of_pairs(device_code(), *PAIRS), ranks, 150)
