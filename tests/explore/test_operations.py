"""Every algorithm of every operation in the library's table.

Where a kernel works on the ranks' own arrays, these are symmetric in most of the calls;
in the others the ranks refuse. ``test_copies.py`` has copies between symmetric arrays.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from explore.scenarios import a_count, a_limit, holds, worlds
from explore.source import device_code
from explore.world import DRAW, INT64, World, add, wanted_of
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.select import Arrays

PAIRS = [
    (name, algorithm)
    for name, operation in OPERATIONS.items()
    for algorithm in operation.algorithms
]


def anywhere(size):
    """Return an endpoint's ``place`` by which all ranks see an array at its address."""
    return lambda address, nbytes: SimpleNamespace(seen=(address,) * size)


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
        ends = [
            end if end.rank == refusing else replace(end, place=anywhere(world.size))
            for end in ends
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


@worlds
def test_any_algorithm_after_any_other(ranks):
    holds(calls_of_pairs(device_code(), *PAIRS), ranks, 150)
