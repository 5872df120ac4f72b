"""Measured limits: from times to a table, to its file, and back."""

import json
import re

import pytest

from numba_symm.bench import tune
from numba_symm.collectives import select, tuned
from numba_symm.collectives.select import ALL, Choice, Step
from numba_symm.dtypes import element

GPU = "NVIDIA H200"
SIZES = [1 << k for k in range(10, 21)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def step(algorithm, most=ALL):
    return Step(algorithm, (most, most, most))


MEASURED = {
    "all_reduce": Choice(
        floats=(step("one_shot_sentinel", 4096), step("direct")),
        others=(step("one_shot_ll", 128), step("chunked")),
    )
}


def test_limits_lie_where_the_times_are_equal():
    times = {
        "one_shot_ll": [1 + nbytes / 4000 for nbytes in SIZES],
        "direct": [5 + nbytes / 100_000 for nbytes in SIZES],
        "chunked": [9 + nbytes / 100_000 for nbytes in SIZES],
    }
    first, last = tune.fastest(SIZES, times)
    assert (first.algorithm, last) == ("one_shot_ll", step("direct"))
    assert first.most[0] == pytest.approx(16_667, rel=0.05)


def test_an_algorithm_is_left_out_while_it_cannot_be_the_fastest():
    times = {"one_shot_ll": [2.0], "chunked": [9.0], "copy_engine": [24.0]}
    found = []
    for fastest in (2.0, 3.9, 7.9, 8.1):
        times["one_shot_ll"].append(fastest)
        found.append([name for name in times if tune.is_out(times, name)])
    assert found == [["chunked", "copy_engine"], *2 * [["copy_engine"]], []]
    assert not tune.is_out({"chunked": []}, "chunked")


def test_every_operation_with_limits_is_measured_by_what_suits():
    for ranks in (2, 4):
        found = tune.cases(ranks)
        assert {case.operation.name for case in found} == set(select.CHOICES)
        for case in found:
            made = [case.operation.algorithms[each] for each in case.algorithms]
            assert any(each.floats for each in made) <= (case.kinds == ("floats",))
            assert all(each.suits(ranks) for each in made)


def test_what_is_written_is_read():
    assert tuned.read(GPU, 2) == (None, "")
    tuned.write(GPU, 2, MEASURED)
    found = tuned.read(GPU, 2).choices
    assert found["all_reduce"] == MEASURED["all_reduce"]
    assert found["broadcast"] == select.CHOICES["broadcast"]  # was not measured
    kind = element("float32", "test")
    given = "all_reduce", 4097, 2, kind
    assert select.fastest(*given, found) == "direct"
    assert select.limits("all_reduce", 2, kind, found) == [4096]


def test_those_of_another_gpu_or_version_are_not_used(monkeypatch):
    tuned.write(GPU, 2, MEASURED)
    assert tuned.read("NVIDIA A100", 2) == (
        None,
        "it is of GPU NVIDIA H200, not of NVIDIA A100; run `numba-symm tune` again",
    )
    monkeypatch.setattr(tuned, "version_of_library", lambda: "99.0")
    found = tuned.read(GPU, 2)
    assert found.choices is None
    assert "not of 99.0" in found.why
    assert tuned.described(GPU).endswith(f"; ignored: {found.why}")


def test_info_shows_whether_the_limits_are_used():
    tuned.write(GPU, 2, MEASURED)
    for gpu in (GPU, None):
        assert "2 ranks, NVIDIA H200, version" in tuned.described(gpu)
        assert "ignored" not in tuned.described(gpu)
    of = "it is of GPU NVIDIA H200, not of NVIDIA A100"
    assert f"; ignored: {of}; run `numba-symm tune`" in tuned.described("NVIDIA A100")


@pytest.mark.parametrize(
    "steps",
    [
        [["fast", None]],  # no algorithm
        [["one_shot_sentinel", None]],  # not for these types
        [["one_shot_ll", 10]],  # nothing for larger messages
        [["one_shot_ll", 10], ["chunked", 10], ["direct", None]],  # not rising
        [["one_shot_ll"]],
        [["one_shot_ll", 10**20], ["chunked", None]],  # prepare would bind such calls
        [["one_shot_ll", 10**400], ["chunked", None]],
        "one_shot_ll",
        None,
    ],
)
def test_a_damaged_table_is_not_used(steps):
    tuned.write(GPU, 2, MEASURED)
    content = json.loads(tuned.file().read_text())
    content["ranks"]["2"]["all_reduce"]["others"] = steps
    tuned.file().write_text(json.dumps(content))
    found = tuned.read(GPU, 2)
    assert found.choices is None
    assert "it is damaged" in found.why
    assert tuned.described(GPU).endswith(f"; ignored: {found.why}")
    tuned.write(GPU, 2, MEASURED)
    assert tuned.read(GPU, 2).choices is not None


@pytest.mark.parametrize("content", ["[" * 200_000, "{}", "[]", "1" + 5000 * "0"])
def test_another_content_is_replaced(content):
    tuned.file().parent.mkdir(parents=True, exist_ok=True)
    tuned.file().write_text(content)
    found = tuned.read(GPU, 2)
    assert found.choices is None
    assert re.match("it (cannot be read|is damaged) ", found.why)
    assert " is ignored: it " in tuned.described(GPU)
    tuned.write(GPU, 2, MEASURED)
    assert tuned.read(GPU, 2).choices is not None


def test_one_rank_needs_no_limits():
    """An island may have one rank: nothing could be measured for it."""
    tuned.write(GPU, 2, MEASURED)
    assert tuned.read(GPU, 1) == (None, "")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"gpu": 3}', b"\xff" * 500])
def test_a_file_of_something_else_is_not_used(text):
    tuned.file().parent.mkdir()
    tuned.file().write_bytes(text)
    found = tuned.read(GPU, 2)
    assert found.choices is None
    assert found.why
    assert f"{tuned.file()} is ignored: it " in tuned.described(None)
    assert len(tuned.described(None)) < 300
