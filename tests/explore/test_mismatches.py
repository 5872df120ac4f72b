"""Calls that differ between the ranks: all ranks fail, and store nothing wrong.

Waits have no deadline here. So a difference that no rank finds leaves ranks waiting, or
without a record, or one of them with a result that is not that of its own call.
"""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import ANY

import pytest

from explore.markers import within
from explore.scenarios import (
    a_count,
    a_length,
    a_limit,
    blocks_of_messages,
    breaks,
    channels,
    holds,
    worlds,
)
from explore.source import device_code
from explore.test_failures import IMPATIENT
from explore.test_operations import PAIRS, add_call, anywhere
from explore.world import DRAW, FLOAT64, INT64, World, add, wanted_of
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.select import Arrays
from tests.algorithms import ONE_SHOTS, entry
from tests.algorithms import TWO_SHOTS as TWO


def sharing(holds):
    """Return the operations by algorithms for whose entries it holds."""
    return [(name, each) for name, each in PAIRS if holds(name, entry(name, each))]


def is_mailed(region):
    """Return whether an entry is of a rooted operation, through this region."""
    return lambda name, made: OPERATIONS[name].rooted and made.region == region


SHARED = {
    **{region: sharing(is_mailed(region)) for region in ONE_SHOTS},
    "relayed": sharing(lambda name, made: name == "broadcast" and made.region in TWO),
    "arrays": sharing(lambda name, made: made.x is Arrays.SYMMETRIC),
}
"""Operations by algorithms whose ranks compare digests, by what they share."""

UNCHANGED = -1  # no word is so


@dataclass(frozen=True)
class View:
    """What a rank takes for the call of all ranks."""

    name: str
    algorithm: str
    count: int
    root: int


def another(world, view, pairs):
    """Return a view that differs in one thing."""
    random = world.random
    others = [pair for pair in pairs if pair[0] != view.name]
    rooted = OPERATIONS[view.name].rooted
    what = random.choice(["count"] + ["root"] * rooted + ["name"] * bool(others))
    if what == "root":
        return replace(view, root=(view.root + 1) % world.size)
    if what == "name":
        name, algorithm = random.choice(others)
        return replace(view, name=name, algorithm=algorithm)
    return replace(view, count=view.count + random.choice([1, 2, 7]))


def add_differing(world, pairs):
    """Add a call that one rank takes for another one."""
    most = View(*world.random.choice(pairs), a_count(world), 0)
    most = replace(most, root=world.random.randrange(world.size))
    one, odd = another(world, most, pairs), world.random.randrange(world.size)
    made = entry(most.name, most.algorithm)
    direct, kind = made.x is Arrays.SYMMETRIC, FLOAT64 if made.floats else INT64
    words_each = max(most.count, one.count) * world.size
    sources, words = world.inputs(words_each, DRAW[kind])
    targets = world.map("output", 8 * words_each)
    world.shared |= world.regions(*sources, *targets) if direct else set()
    for end, source, target in zip(world.ends, sources, targets, strict=True):
        view = one if end.rank == odd else most
        operation = world.code.operations.OPERATIONS[view.name]
        given = [mine[: view.count * operation.shards(world.size)] for mine in words]
        wanted = wanted_of(operation, given, end.rank, view.root, kind)
        mine = source if operation.in_place else target
        there = replace(end, place=anywhere(world.size)) if direct else end
        call: Any = (source, mine if wanted is not None else 0, view.count, kind)
        call = world.code.binding.Call(*call, "sum", view.root)
        add(operation.bind(view.algorithm, there, call), world.streams[end.rank])
        if direct:
            world.expect(source, [UNCHANGED] * words_each)
            world.expect(target, [UNCHANGED] * words_each)
        elif one.count == most.count:
            world.expect(mine, wanted or [])
        else:  # a root reduces what the other ranks' shorter arrays have
            world.expect(mine, [ANY] * len(wanted or []))


def differing(code, shared):
    """A call that differs, between others on which the ranks agree."""

    def scenario(machine):
        pairs = [
            (name, algorithm)
            for name, algorithm in SHARED[shared]
            if entry(name, algorithm).suits(machine.ranks)
        ]
        world = World(machine, code, blocks=a_limit(machine, code, [pairs[0][1]]))
        for _ in range(machine.random.randrange(2)):
            add_call(world, *machine.random.choice(pairs), a_count(world))
        add_differing(world, pairs)
        add_call(world, *machine.random.choice(pairs), a_count(world))
        world.run(mismatch=True)

    return scenario


def lengths(code, _):
    """A message of which the ranks expect different lengths."""

    def scenario(machine):
        world = World(machine, code, blocks=channels(machine, code))
        count = a_length(world)
        world.messages(a_length(world))
        more = machine.random.choice([1, 2, 4 * count + 1])
        world.differing(count, count + more)
        world.run(mismatch=True)

    scenario.blocks = blocks_of_messages
    return scenario


CASES = [
    *((differing, shared, n) for shared in SHARED for n in (2, 3)),
    *((lengths, "messages", n) for n in (2, 3)),
]
CASES.remove((differing, "relayed", 2))  # it has one phase, of another algorithm
each_case = pytest.mark.parametrize(("calls", "shared", "ranks"), CASES)


@each_case
def test_calls_that_differ(calls, shared, ranks):
    holds(calls(device_code(IMPATIENT), shared), ranks, 60 // ranks)


COMPARED = "due != is_one or (due and low[k + 1] != digest)"
BROKEN = {
    "a digest's kind": within(
        "exchanges", "digest", COMPARED, "due and low[k + 1] != digest"
    ),
    "a digest": within("exchanges", "digest", COMPARED, "due != is_one"),
}
OF_ARRAYS = within("handshake", "digest", "call != digest", "False")
OF_MESSAGES = within("credit", "word", "ld_relaxed_sys_u64(flag) != word", "False")


@worlds
@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("shared", ONE_SHOTS)
def test_digests_that_are_not_compared_are_found(shared, what, ranks):
    breaks(differing(device_code(IMPATIENT, BROKEN[what]), shared), ranks)


@pytest.mark.parametrize("what", BROKEN)
def test_digests_that_are_not_compared_in_two_phases_are_found(what):
    breaks(differing(device_code(IMPATIENT, BROKEN[what]), "relayed"), 3)


@worlds
def test_a_handshake_that_does_not_compare_digests_is_found(ranks):
    breaks(differing(device_code(IMPATIENT, OF_ARRAYS), "arrays"), ranks)


@worlds
def test_lengths_of_messages_that_are_not_compared_are_found(ranks):
    breaks(lengths(device_code(IMPATIENT, OF_MESSAGES), "messages"), ranks)
