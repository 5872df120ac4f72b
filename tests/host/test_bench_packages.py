"""The comparison of packages with mpi4py's own calls: its arithmetic, its refusals."""

import json

import pytest

from numba_symm.bench.laboratory import packages


def test_tests_count_if_they_pass_both_ways():
    row = packages.compare_tests(
        {
            "device": {
                "a": ("passed", 1.0),
                "b": ("passed", 4.0),
                "c": ("failed", 9.0),
            },
            "host": {"a": ("passed", 3.0), "b": ("crashed", 0.0), "c": ("passed", 1.0)},
        }
    )
    assert (row["device"], row["host"], row["both"]) == (1.0, 3.0, 1)
    assert row["device others"] == {"c": "failed"}
    assert row["host others"] == {"b": "crashed"}
    assert packages.counts(row) == "1 pass both ways; 2 pass (device), 2 pass (host)"


def test_a_program_counts_if_its_results_agree():
    found = {
        "device": {"result": 2.0, "seconds": [3.0, 1.0, 2.0]},
        "host": {"result": 2.0, "seconds": [4.0, 4.0, 9.0]},
    }
    row = packages.compare("fft", found)
    assert (row["device"], row["host"]) == (2.0, 4.0)
    found["host"]["result"] = 2.1
    with pytest.raises(AssertionError, match="results differ"):
        packages.compare("fft", found)


def test_a_test_that_ends_its_job_is_left_out_of_the_next_try(tmp_path, monkeypatch):
    for name in ("pylops_mpi-1", "pylops-1", "mpi4py_fft-1"):
        (tmp_path / name).mkdir()
    jobs = packages.Jobs(packages.options_of([str(tmp_path)]))
    tries = []

    def run(name, way, result, folder, *options):
        tries.append(options)
        lines = [["a", "started", 0], ["a", "passed", 2.0], ["b", "started", 0]]
        if len(tries) == 2:
            lines = lines[:2]
        result.write_text("\n".join(map(json.dumps, lines)))
        if len(tries) == 1:
            raise packages.JobFailed("a signal")

    monkeypatch.setattr(jobs, "run", run)
    assert jobs.tests("host") == {"b": ("crashed", 0.0), "a": ("passed", 2.0)}
    assert tries == [(), ("--deselect=b",)]


def test_what_cannot_be_measured_is_refused(tmp_path, capsys):
    for words, text in (
        ([str(tmp_path)], "has no pylops_mpi-"),
        ([str(tmp_path), "--only", "lapack"], "got 'lapack'"),
    ):
        with pytest.raises(SystemExit):
            packages.main(words)
        assert text in capsys.readouterr().err
