"""Tests that every kernel is explored, and that its machine code is checked."""

from dataclasses import replace

import numpy as np
import pytest

from explore.coding import sums_by_codes, tokens_by_codes
from explore.finishing import epilogues, fused
from explore.markers import removed
from explore.scenarios import (
    a_count,
    breaks,
    holds,
    messages_with_gaps,
    plain_stores_between_barriers,
    some_blocks,
    words_by_signals_of_the_host,
)
from explore.scheduler import Machine
from explore.source import device_code
from explore.summing import exact_sums
from explore.test_copies import calls_by_copies
from explore.test_expert_calls import calls_of_experts, calls_of_few_tokens
from explore.test_failures import CALLS
from explore.test_message_copies import messages_through_a_room
from explore.test_operations import PAIRS, calls_of_pairs
from explore.world import ALL_ONES, INT64, World, add, an_integer
from numba_symm import dtypes
from tests import kernel_cases
from tests.digests import hashes
from tests.host import test_machine_code_types
from tests.kernels import every_kernel, named

UINT64 = dtypes.element("uint64", "test")


def conversions(code, failed=False, kinds=(INT64, INT64)):
    """Each rank copies an array by the kernel that finishes a reduction, twice.

    If ``failed``, the ranks have failed before, and store nothing.
    """

    def scenario(machine):
        blocks = machine.random.choice([None, some_blocks(machine, code)])
        world = World(machine, code, blocks=blocks)
        for workspace in world.workspaces if failed else ():
            for mark in range(8):
                world.memory.plant(workspace + 128 * mark, 4, 1)
        count = a_count(world)
        inputs, words = world.inputs(count)
        outputs, again = (world.map(name, 8 * count, 0) for name in ("output", "again"))
        for rank, end in enumerate(world.ends):
            end = replace(end, max_blocks=min(end.max_blocks, world.blocks))
            for given, into in ((inputs, outputs), (outputs, again)):
                arrays = kinds, given[rank], into[rank], count
                add(code.pack.bind_convert(end, *arrays), world.streams[rank])
                world.expect(into[rank], [0] * count if failed else words[rank])
        world.run()

    return scenario


@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (removed("pack", "finish-failed"), (INT64, INT64)),
        (removed("pack", "convert-failed"), (INT64, UINT64)),
    ],
    ids=["finish", "convert"],
)
def test_a_rank_that_converts_after_a_failure_is_found(edit, kinds):
    holds(conversions(device_code(), False, kinds), 2, 5)
    holds(conversions(device_code(), True, kinds), 2, 5)
    breaks(conversions(device_code(edit), True, kinds), 2)


def reductions_of_shards(code):
    """Each rank reduces shards of its own memory."""

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        number, vectors = (
            machine.random.choice([2, 3, 10]),
            machine.random.choice([1, 5]),
        )
        shards = world.map("shards", 16 * vectors * number)
        own = machine.random.randrange(number)
        for rank, end in enumerate(world.ends):
            words = [an_integer(machine.random) for _ in range(2 * vectors * number)]
            for i, word in enumerate(words):
                world.memory.plant(shards[rank] + 8 * i, 8, word)
            given = shards[rank], vectors, own, number, INT64, "sum"
            add(code.pack.bind_reduce_shards(end, *given), world.streams[rank])
            total = [sum(words[i :: 2 * vectors]) for i in range(2 * vectors)]
            world.expect(shards[rank] + 16 * vectors * own, total)
        world.run()

    return scenario


def reductions_of_leaves(code):
    """Each rank reduces leaves of its own memory, and leaves them as they are."""

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        number, count = machine.random.choice([2, 4, 16]), a_count(world)
        kernels, binding = code.pack, code.binding
        carried = binding.Carried(binding.Call(0, 0, count, INT64, "sum"))
        inputs, words = world.inputs(number * count)
        results = world.map("output", kernels.leaves_room(carried, number, count))
        for rank, end in enumerate(world.ends):
            given = number, inputs[rank], results[rank], count
            add(kernels.bind_leaves(end, carried, *given), world.streams[rank])
            leaves = [words[rank][i * count :][:count] for i in range(number)]
            total = [sum(column) & ALL_ONES for column in zip(*leaves, strict=True)]
            world.expect(results[rank], total)
            world.expect(inputs[rank], words[rank])
        world.run()

    return scenario


def messages_to_itself(code):
    """Each rank sends itself elements, whose count is in its memory, twice."""

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        for _ in range(2):
            one(world, a_count(world), machine.random.choice([0, 2]))
        world.run()

    def one(world, count, first):
        inputs, words = world.inputs(first + count)
        outputs, stored = world.map("output", 8 * count), world.map("stored", 8)
        Message = code.credit.Message
        for rank, end in enumerate(world.ends):
            sent = Message(rank, inputs[rank] + 8 * first, 8 * count)
            sent = world.counting(rank, sent, first, count)
            taken = Message(rank, outputs[rank], 8 * count, stored[rank], 8)
            add(code.pack.bind_counted_copy(end, sent, taken), world.streams[rank])
            world.expect(outputs[rank], words[rank][first:])
            world.expect(stored[rank], [count])

    return scenario


def digests(code):
    """Each rank adds the hashes of ranges of its own memory, the last one shorter."""

    def scenario(machine):
        world = World(machine, code)
        inputs = world.map("input", 8 * 7)
        words = [[an_integer(machine.random) for _ in range(7)] for _ in inputs]
        threads = code.shape.threads
        sums = world.map("sums", 8 * 2 * threads)
        for rank in range(len(world.ends)):
            for i, word in enumerate(words[rank][:6]):
                world.memory.plant(inputs[rank] + 8 * i, 8, word)
            for i, byte in enumerate(words[rank][6].to_bytes(8, "little")):
                world.memory.plant(inputs[rank] + 8 * 6 + i, 1, byte)
            given = inputs[rank], 8 * 7, 0, 4, 3, sums[rank]
            add(code.pack.bind_digest(*given), world.streams[rank])
            padded = np.array([*words[rank], 0], np.int64)
            vectors = hashes(padded).reshape(4, 2).sum(axis=1, dtype=np.uint64)
            found = np.zeros((2, threads), np.uint64)
            for i, vector in enumerate(vectors):
                found[i // 3, i % 3 % threads] += vector
            world.expect(sums[rank], found.ravel().tolist())
        world.run()

    return scenario


def marks(code):
    """Each rank stores numbers into its own word, one after another."""

    def scenario(machine):
        world = World(machine, code)
        for rank, word in enumerate(world.map("word", 8)):
            for number in (3, 0, 7):
                add(code.deadline.kernel().bind(1, word, number), world.streams[rank])
            world.expect(word, [7])
        world.run()

    return scenario


SCENARIOS = [
    conversions,
    digests,
    messages_to_itself,
    reductions_of_leaves,
    marks,
    reductions_of_shards,
    sums_by_codes,
    epilogues,
    exact_sums,
    tokens_by_codes,
    fused,
    *CALLS.values(),
    calls_by_copies,
    calls_of_experts,
    calls_of_few_tokens,
    messages_through_a_room,
    messages_with_gaps,
    plain_stores_between_barriers,
    lambda code: plain_stores_between_barriers(code, World.pad_barrier),
    words_by_signals_of_the_host,
    *(lambda code, pair=pair: calls_of_pairs(code, pair) for pair in PAIRS),
]
ENOUGH = 5  # schedules of a scenario, in which it launches all its kernels


def test_the_source_names_kernels():
    assert len(every_kernel()) > 10
    assert "numba_symm.memory.pads.make_fence" in every_kernel()


OF_ONE_BLOCK = {"make_barrier", "make_handshake", "make_round"}


def test_every_kernel_is_explored(monkeypatch):
    """Those of the workspace also start early, and share a thread block with others."""
    launched, early, sharing = set(), set(), set()
    start = Machine._start

    def noting(machine, launch, lane):
        name = named(launch.kernel)
        launched.add(name)
        early.update([name] if machine._running[lane] else [])
        sharing.update([name] if launch.held > 1 and launch.grid > 1 else [])
        start(machine, launch, lane)

    monkeypatch.setattr(Machine, "_start", noting)
    for scenario in SCENARIOS:
        for ranks in (2, 3):
            holds(scenario(device_code()), ranks, ENOUGH)
    missing = every_kernel() - launched
    assert not missing, f"no scenario launches {missing}: add one"
    of_workspace = every_kernel("make_kernel", "kernels_of")
    assert len(of_workspace) > 10
    missing = of_workspace - early
    assert not missing, f"no scenario launches {missing} early: add one"
    missing = {name.rpartition(".")[2] for name in of_workspace - sharing}
    assert missing == OF_ONE_BLOCK, f"{missing} never share a thread block: add one"


def test_every_kernels_machine_code_is_looked_at():
    looked_at = {
        named(kernel_cases.kernel(*case).factory)
        for case in kernel_cases.EVERY + kernel_cases.FENCE
    }
    looked_at |= {named(each.factory) for each in test_machine_code_types.MARKS}
    missing = every_kernel() - looked_at
    assert not missing, f"tests/kernel_cases.py has no case of {missing}"
