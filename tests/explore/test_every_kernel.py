"""Tests that every kernel is explored, and that its machine code is checked."""

from functools import partial

from explore.scenarios import (
    a_count,
    messages_with_gaps,
    plain_stores_between_barriers,
    search,
    some_blocks,
    words_by_signals_of_the_host,
)
from explore.source import device_code
from explore.test_copies import calls_by_copies
from explore.test_failures import CALLS
from explore.test_operations import PAIRS, calls_of_pairs
from explore.world import INT64, World, add
from tests.host import test_machine_code
from tests.kernels import every_kernel, named


def calls_of(name, code):
    """Calls of an operation between the ranks' own arrays."""
    return calls_of_pairs(code, (name, "direct"))


def conversions(code):
    """Each rank copies an array by the kernel that finishes a reduction."""

    def scenario(machine):
        world = World(machine, code, blocks=some_blocks(machine, code))
        count = a_count(world)
        inputs, words = world.inputs(count)
        outputs = world.map("output", 8 * count)
        for rank, end in enumerate(world.ends):
            given = (INT64, INT64), inputs[rank], outputs[rank], count
            add(code.convert.bind(end, *given), world.streams[rank])
            world.expect(outputs[rank], words[rank])
        world.run()

    return scenario


SCENARIOS = [
    conversions,
    *CALLS.values(),
    calls_by_copies,
    messages_with_gaps,
    plain_stores_between_barriers,
    lambda code: plain_stores_between_barriers(code, World.pad_barrier),
    words_by_signals_of_the_host,
    *(partial(calls_of, name) for name, way in PAIRS if way == "direct"),
]
ENOUGH = 5  # schedules of a scenario, in which it launches all its kernels


def test_the_source_names_kernels():
    assert len(every_kernel()) > 10
    assert "numba_symm.pads.make_fence" in every_kernel()


def test_every_kernel_is_explored(monkeypatch):
    launched = set()
    run = World.run

    def noting(world):
        launched.update(
            named(each.kernel) for stream in world.streams for each in stream
        )
        run(world)

    monkeypatch.setattr(World, "run", noting)
    for scenario in SCENARIOS:
        for ranks in (2, 3):
            search(scenario(device_code()), ranks, ENOUGH)
    missing = every_kernel() - launched
    assert not missing, f"no scenario launches {missing}: add one"


def test_every_kernels_machine_code_is_looked_at():
    looked_at = {
        named(test_machine_code.kernel(*case).factory)
        for case in test_machine_code.EVERY + test_machine_code.FENCE
    }
    missing = every_kernel() - looked_at
    assert not missing, f"tests/host/test_machine_code.py has no case of {missing}"
