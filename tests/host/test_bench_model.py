"""The model of many nodes: its tables in the docs, and the runs that check it."""

from pathlib import Path

import pytest

from numba_symm.bench.laboratory import model, scale
from numba_symm.bench.laboratory.model import (
    BOUNDS,
    LAUNCH,
    MEMORY,
    MESSAGE,
    Link,
    Nodes,
)
from numba_symm.bench.laboratory.schedules import CopyStep, ExchangeStep
from numba_symm.engines.protocol import Parcel

DOCS = Path(__file__).parents[2] / "docs"
PAGE, LIMITS = ((DOCS / f"{n}.md").read_text() for n in ("several-nodes", "limits"))


def test_the_docs_have_the_models_tables():
    for lines in (model.table("all_reduce", model.of_eight()), model.check_table()):
        assert "\n".join(lines) in PAGE


def test_what_it_is_checked_against_is_what_was_recorded():
    """These are the means of two runs over sockets, and none of NVLink's."""
    steps, bare = model.recorded("steps"), model.recorded("bare")
    assert steps["all_gather"][1 << 10] == pytest.approx((40.2 + 36.1) / 2)
    assert steps["broadcast"][1 << 28] == pytest.approx((77012.4 + 71244.7) / 2)
    assert bare["all_reduce"][1 << 26] == pytest.approx((30408.0 + 30851.8) / 2)
    assert {len(times) for times in steps.values()} == {10}


def test_it_is_near_what_was_measured():
    for operation, ratios in model.checks().items():
        for nbytes, ratio in ratios.items():
            assert 0.9 < ratio < 1.2, (operation, nbytes)


@pytest.mark.parametrize("operation", BOUNDS)
def test_no_call_is_faster_than_its_bound(operation):
    for nodes in model.of_eight():
        for nbytes in model.SIZES:
            time = nodes.time(operation, nbytes)
            assert time >= 0.999 * model.bound(operation, nodes, nbytes)


def test_an_exchange_and_the_work_beside_it_overlap():
    """Two messages of 10 µs and their start, beside a copy; or a longer copy."""
    nodes, parcel = Nodes(2, 1, {}, Link(10.0, 1e9)), Parcel(1, 0, 0)
    for nbytes, taken in ((0, 10 + MESSAGE), (60e6, LAUNCH + 2 * 60e6 / MEMORY)):
        beside = CopyStep(0, 0, nbytes)
        step = ExchangeStep((parcel, parcel), (parcel,), (beside,))
        assert nodes.step(step) == pytest.approx(taken)


def test_the_docs_have_the_table_of_many_nodes():
    assert "\n".join(scale.table(scale.nodes(1000))) in PAGE


@pytest.mark.parametrize("number", [9, 16, 24, 100, 1000])
def test_no_call_takes_longer_than_from_one_island_to_all(number):
    """A fifth is allowed: a limit knows fewer times than the model."""
    nodes = scale.nodes(number)
    for name in scale.CROSSING:
        for power in range(10, 18 if name == "scan" else 31, 5):
            time = nodes.time(name, 1 << power)
            flat = scale.flat(name, nodes, 1 << power)
            assert flat is None or time <= 1.2 * flat.time, (name, power)


def test_the_steps_of_a_construction_take_less_than_two_seconds():
    """At 1000 nodes. That there are 13 is checked by tests/test_many_islands.py."""
    seconds = scale.construction(scale.nodes(1000)) / 1e6
    assert seconds < 2
    assert sum(scale.STEPS) == 13
    assert "| steps of a construction | 13 |" in LIMITS
    row = next(line for line in LIMITS.splitlines() if "of these 13 steps" in line)
    assert "for 1000 nodes of 8" in row
    assert f"| {seconds:.1f} s according to a model" in row


def test_a_chain_is_as_long_as_the_islands_are_many():
    """The last island gets the first chunk after as many ticks."""
    few, many = (scale.nodes(number).time("broadcast", 1 << 30) for number in (32, 64))
    assert many > 1.3 * few


def test_times_between_measured_ones_are_interpolated():
    curve = model.interpolated({100: 1.0, 400: 4.0, 1600: 8.0})
    assert [curve(n) for n in (1, 100, 200, 400, 800)] == pytest.approx(
        [1.0, 1.0, 2.0, 4.0, 4 * 2**0.5]
    )
    assert curve(3200) == 16.0


def test_the_simulator_is_refused(monkeypatch, capsys):
    """Its chunks are of a few KiB, so the tables would be wrong by tens of times."""
    monkeypatch.setattr(model, "SIMULATED", True)
    with pytest.raises(SystemExit):
        model.main([])
    streams = capsys.readouterr()
    assert "unset NUMBA_ENABLE_CUDASIM" in streams.err
    assert not streams.out
