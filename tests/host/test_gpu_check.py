"""What `make gpu` says of the runs of the benchmark."""

import json

import pytest

from tests import gpu_check
from tests.gpu_check import Figure, better, check, fallen, figures


def record(column, way="", **times):
    known = {"column": column, "way": way, "in_place": False, "bytes": 1 << 20}
    return known | {name: {"median": time} for name, time in times.items()}


def test_a_graphs_time_is_compared_with_that_of_nccl():
    records = [
        *(record("numba_symm", "plan", graph=2.0), record("numba_symm", "call")),
        *(record("nccl", graph=6.0), record("launch", graph=1.0)),
    ]
    run = {"operation": "reduce", "rows": [records]}
    assert figures(run) == {"reduce 1M in a graph": Figure(2.0, 6.0)}
    del records[2]
    assert figures(run)["reduce 1M in a graph"].quotient == 0.5


def test_only_more_than_5_percent_has_fallen():
    recorded = {name: [1.0, 2.0] for name in "abc"}
    found = {"a": Figure(1.04, 2.0), "b": Figure(1.06, 2.0), "new": Figure(9.0, 1.0)}
    assert fallen(found, recorded) == {"b": pytest.approx(1 / 1.06 - 1)}
    assert better(found, {"b": Figure(1.0, 2.0)}) == found | {"b": (1.0, 2.0)}


class Machine:
    """Measures what the test says, and tests nothing."""

    name, left, logs = "2 x GPU", 100, "logs"

    def __init__(self, jobs, *times):
        self.jobs, self.times = jobs, list(times)

    class ready:
        def __enter__(self):
            return {}

        def __exit__(self, *error):
            pass

    def measure(self, name, environ):
        time, code = self.times.pop(0), 0
        if time is None:
            return None, 1
        records = [record("numba_symm", "plan", graph=time), record("nccl", graph=4.0)]
        return {"operation": "scan", "missing": {}, "rows": [records]}, code

    def test(self, environ):
        return self.jobs


@pytest.mark.parametrize(
    ("machine", "code", "said"),
    [
        (Machine(0, 2.0), 0, "0 of 1 figures fell"),
        (Machine(0, 3.0, 2.0), 0, "0 of 1 figures fell"),
        (Machine(0, 3.0, 2.5), 2, "# FELL by 20 %: scan 1M in a graph"),
        (Machine(1, 2.0), 1, "0 runs and 1 jobs of tests failed"),
        (Machine(0, None), 1, "1 runs and 0 jobs of tests failed"),
    ],
)
def test_what_fell_twice_is_named(machine, code, said, tmp_path, monkeypatch, capsys):
    file = tmp_path / "r.json"
    file.write_text(
        json.dumps({"2 x GPU": {"figures": {"scan 1M in a graph": [2, 4]}}})
    )
    monkeypatch.setattr(gpu_check, "RECORDED", file)
    assert check(machine, ["all_reduce"], record=False) == code
    assert said in capsys.readouterr().out
    assert machine.times == []
