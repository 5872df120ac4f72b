"""What `make gpu` says of the runs of the benchmark."""

import json
import subprocess

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


def test_each_way_of_an_eager_call_is_compared_with_the_fastest_nccl():
    columns = {"numba_symm": 4.0, "on-torch": 5.0, "nccl": 9.0, "nccl-cupy": 8.0}
    records = [
        record(name, "call" * name.startswith("numba"), issue=time, alone=2 * time)
        for name, time in columns.items()
    ]
    records.append({"column": "torch", "skipped": "no kernel"})
    assert figures({"operation": "scan", "rows": [records]}) == {
        "scan 1M to enqueue, call": (4.0, 8.0),
        "scan 1M one at a time, call": (8.0, 16.0),
        "scan 1M to enqueue, on-torch": (5.0, 8.0),
        "scan 1M one at a time, on-torch": (10.0, 16.0),
    }


def test_an_overlap_without_a_rival_is_compared_with_a_perfect_one():
    records = [record("numba_symm", "plan") | {"by_products": 1.25}]
    (figure,) = figures({"operation": "scan", "rows": [records]}).values()
    assert figure.quotient == 0.8
    records.append(record("nccl") | {"by_products": 1.5})
    (figure,) = figures({"operation": "scan", "rows": [records]}).values()
    assert figure.quotient == 1.2


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


def test_a_record_replaces_the_figures_of_its_machine(tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    before = {"a": {"figures": {"x": [1, 2], "y": [3, 4]}}, "b": {"figures": {}}}
    file.write_text(json.dumps(before))
    monkeypatch.setattr(gpu_check, "RECORDED", file)
    gpu_check.write(before, "a", {"x": Figure(5.0, 6.0)})
    written = json.loads(file.read_text())
    assert written["a"]["figures"] == {"x": [5.0, 6.0], "y": [3, 4]}
    assert written["b"] == {"figures": {}}


def test_only_gpus_that_cuda_may_use_count(monkeypatch):
    listed = "".join(
        f"GPU {number}: NVIDIA H200 (UUID: GPU-x)\n" for number in range(4)
    )
    answer = subprocess.CompletedProcess([], 0, stdout=listed)
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *words, **more: answer)
    for allowed, count in ((None, 4), ("1,3", 2), ("", 0)):
        if allowed is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
        assert gpu_check.visible_gpus() == ["NVIDIA H200"] * count
