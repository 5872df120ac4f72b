import os
from pathlib import Path

import pytest

from numba_symm.bench import cold, options
from tests.host.test_bench_measure import Alone


class Ranks(Alone):
    def bcast(self, value):
        return value


def made(line="-b 1K -e 64M", ranks=4):
    asked = options.parse(["all_reduce", "--cold", *line.split()])
    return cold.cases(asked, ranks)


def test_there_are_400_different_calls_from_the_first_size_to_the_last():
    found = made()
    kinds = {(operation.name, row.type) for operation, row in found}
    assert len(kinds) == 20
    assert len({(operation.name, row) for operation, row in found}) == 400
    assert len(found) == 400
    sizes = [row.nbytes for _, row in found]
    assert (min(sizes), max(sizes)) == (1 << 10, 64 << 20)
    assert sizes == sorted(sizes)


def test_more_types_have_fewer_sizes():
    found = made("-d all")
    assert len(found) == 360
    assert len({row.nbytes for _, row in found}) >= 6


def call(operation, milliseconds, wrong=0):
    facts = {"operation": operation, "bytes": 4096, "type": "float", "op": "sum"}
    return facts | {"milliseconds": milliseconds, "wrong": wrong}


def test_the_report_counts_slow_calls_and_names_the_slowest():
    calls = [call("reduce", 50.0), call("scan", 50.1), call("reduce", 900.0, wrong=2)]
    lines = cold.report("all_reduce", cold.First(200.0, 34.5, 1150.0, 50.1), calls)
    assert lines[0].endswith(
        "to the end of the first all_reduce: 1234.6 ms (construction 200.0, "
        "arrays 34.5, call 1150.0, kernel 50.1)"
    )
    assert [line.split() for line in lines[2:4]] == [
        ["reduce", "2", "950.0", "1", "900.0"],
        ["scan", "1", "50.1", "1", "50.1"],
    ]
    assert lines[4:] == [
        "# 3 calls: 1000.1 ms, over 50 ms: 2",
        "# The slowest: 900.0 ms, reduce of 4096 bytes, float sum",
        "# Out of bounds values : 2 FAILED",
    ]


@pytest.mark.parametrize("before", [None, "/some/where"])
def test_a_new_cache_is_deleted_and_a_named_one_is_kept(before, monkeypatch, tmp_path):
    monkeypatch.delenv(cold.VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(cold.VARIABLE, before)
    with cold.kernel_cache(None, Ranks()) as text:
        new = Path(os.environ[cold.VARIABLE])
        assert list(new.iterdir()) == []
        (new / "kernel").touch()
    assert text == "files at the start: 0"
    assert not new.exists()
    assert os.environ.get(cold.VARIABLE) == before
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel").touch()
    with cold.kernel_cache(tmp_path, Ranks()) as text:
        assert os.environ[cold.VARIABLE] == str(tmp_path)
    assert text == "files at the start: 1"
    assert (tmp_path / "deep" / "kernel").exists()
