"""The comparison of packages with mpi4py's own calls: its arithmetic, its refusals."""

import pytest

from tests.laboratory import packages


def test_a_program_counts_if_its_results_agree():
    found = {
        "device": {"result": 2.0, "seconds": [3.0, 1.0, 2.0]},
        "host": {"result": 2.0, "seconds": [4.0, 4.0, 9.0]},
    }
    row = packages.compare(found)
    assert (row["device"], row["host"]) == (2.0, 4.0)
    found["host"]["result"] = 2.1
    with pytest.raises(AssertionError, match="results differ"):
        packages.compare(found)


def test_what_cannot_be_measured_is_refused(tmp_path, capsys):
    for words, text in (
        ([str(tmp_path)], "has no pylops_mpi-"),
        ([str(tmp_path), "--only", "lapack"], "got 'lapack'"),
    ):
        with pytest.raises(SystemExit):
            packages.main(words)
        assert text in capsys.readouterr().err
