"""`make two-nodes` collects what each step printed, also of one that fails or hangs."""

import json
import shlex
import zipfile

from numba_symm.command import launcher
from tests import nodes_report
from tests.test_mpirun import environment


def reported(folder, monkeypatch, only, *options):
    """Run some steps on two ranks, each an island; return the code, and all texts."""
    for name, value in environment(2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    monkeypatch.setattr(nodes_report, "SIZES", nodes_report.SIMULATED)
    launch = shlex.join([launcher.find_mpirun(), "-n", "2"])
    place = ["--folder", str(folder / "nodes"), "--only", only]
    code = nodes_report.main([launch, *place, *options])
    (report,) = folder.glob("*.zip")
    with zipfile.ZipFile(report) as files:
        return code, {name: files.read(name).decode() for name in files.namelist()}


def test_a_report_has_tests_and_figures(tmp_path, monkeypatch):
    only = "info,mpi4py,bench-all_reduce,bench-barrier"
    code, texts = reported(tmp_path, monkeypatch, only)
    assert code == 0, texts
    assert texts["summary.txt"].count("passed") == 4
    assert "island" in texts["info.txt"]
    assert json.loads(texts["all_reduce.json"])["operation"] == "all_reduce"


def test_a_step_that_hangs_does_not_keep_the_others_from_running(tmp_path, monkeypatch):
    steps = {"hang": ["sleep", "60"], "fail": ["false"], "end": ["echo", "here"]}
    monkeypatch.setattr(nodes_report, "steps", lambda *_: steps)
    code, texts = reported(tmp_path, monkeypatch, "hang,fail,end", "--seconds", "2")
    assert code == 1
    assert "hang: did not end in 2 s" in texts["summary.txt"]
    assert "fail: failed with exit code" in texts["summary.txt"]
    assert "end: passed" in texts["summary.txt"]
    assert texts["end.txt"].count("here") == 3  # the command, and both ranks
