import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from numba_symm.collectives import tuned
from numba_symm.command import cli, doctor, launcher
from numba_symm.errors import DeviceError, SymmError
from numba_symm.launch.devices import GPU

REPORT = """
import json, os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
if rank == 0:
    print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))
sys.exit(5 if rank == 1 and "fail" in sys.argv else 0)
"""


def gpu(ordinal):
    facts = "A GPU", "0000:01:00.0", (9, 0), True
    return GPU(ordinal, f"GPU-{ordinal}", *facts, mps=ordinal == 1)


def start(*arguments, **environ):
    """Run the command in another process, as its console script does."""
    main = "import sys; from numba_symm.command.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", main, *map(str, arguments)],
        env=os.environ | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def fake_mpirun(folder):
    mpirun = folder / "mpirun"
    mpirun.write_text("#!/bin/sh\n")
    mpirun.chmod(0o755)
    return str(mpirun)


def test_the_command_ends_with_the_program_and_its_arguments(tmp_path):
    command = launcher.mpirun_command(3, ["-m", "tool", "-n", "7"], "mpi/run")
    assert command == ["mpi/run", "-n", "3", sys.executable, "-m", "tool", "-n", "7"]


@pytest.mark.parametrize(
    ("line", "words", "flags"),
    [
        ("run -n 2 a.py -x --", "run -n 2 a.py -x --", ""),
        ("run -n2 -m a --mca b", "run -n2 -m a --mca b", ""),
        (
            "run --mca a b -n 3 -- -n 2 -m c -- d",
            "run -n 2 -m c -- d",
            "--mca a b -n 3",
        ),
        ("run -n 2 --simulate -x A -- a.py", "run -n 2 --simulate a.py", "-x A"),
        ("run --as-mpi4py -x A -- -m a", "run --as-mpi4py -m a", "-x A"),
        ("run -h", "run -h", ""),
        ("info --x --", "info --x --", ""),
    ],
)
def test_unknown_flags_before_two_hyphens_are_mpiruns(line, words, flags):
    assert cli.split_flags(line.split()) == (words.split(), flags.split())


def test_mpirun_beside_python_precedes_the_one_on_path(tmp_path, monkeypatch):
    beside, on_path = tmp_path / "beside", tmp_path / "path"
    for folder in (beside, on_path):
        folder.mkdir()
        fake_mpirun(folder)
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert launcher.find_mpirun() == str(beside / "mpirun")
    (beside / "mpirun").unlink()
    assert launcher.find_mpirun() == str(on_path / "mpirun")


def test_a_missing_mpirun_is_reported_with_its_installation(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SymmError, match=r"pip install '\.\[mpi\]'"):
        launcher.find_mpirun()
    assert cli.main(["run", "-n", "2", "--simulate", "script.py"]) == 1
    assert "pip install '.[mpi]'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "ask", "simulate"),
    [(0, False, True), (4, False, False), (4, True, True), (8, False, False)],
)
def test_ranks_are_simulated_without_a_gpu_or_on_request(
    monkeypatch, gpus, ask, simulate
):
    monkeypatch.setattr(cli, "visible_gpus", lambda: [gpu(i) for i in range(gpus)])
    assert cli.simulation_needed(4, ask=ask) is simulate


def test_too_few_gpus_are_refused_unless_ranks_may_share_them(monkeypatch):
    monkeypatch.setattr(cli, "visible_gpus", lambda: [gpu(0)])
    monkeypatch.delenv("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    with pytest.raises(DeviceError, match="expected 2 GPUs for 2 ranks, got 1; start"):
        cli.simulation_needed(2)
    monkeypatch.setenv("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert cli.simulation_needed(2) is False


def test_the_job_keeps_the_environment(tmp_path):
    environ = {"TMPDIR": "/tmp", "NUMBA_SYMM_TIMEOUT": "5"}
    assert (
        launcher.job_environment(environ, simulate=False) == launcher.OPEN_MPI | environ
    )
    own = {"NUMBA_ENABLE_CUDASIM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    assert (
        launcher.job_environment(environ, simulate=True)
        == launcher.OPEN_MPI | environ | own
    )
    users = environ | dict.fromkeys(launcher.OPEN_MPI, "the user's")
    users["OMPI_MCA_mpi_yield_when_idle"] = "0"
    assert launcher.job_environment(users, simulate=True) == own | users


@pytest.mark.parametrize("folder", ["/tmp/" + "x" * 99, "/not/there", "/proc"])
def test_open_mpi_does_not_use_an_unsuitable_tmpdir(folder):
    job = launcher.job_environment({"TMPDIR": folder}, simulate=False)
    assert job["TMPDIR"] == folder
    assert job["PRTE_MCA_prte_tmpdir_base"] == "/tmp"
    assert job["OMPI_MCA_orte_tmpdir_base"] == "/tmp"


def test_open_mpi_does_not_use_a_full_file_system(tmp_path, monkeypatch):
    """Folders can still be made there, but nothing can be written."""

    def write_bytes(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(launcher, "LONGEST_TMPDIR", 1000)
    assert launcher.unfit(str(tmp_path)) == ""
    monkeypatch.setattr(cli.Path, "write_bytes", write_bytes)
    assert launcher.unfit(str(tmp_path)) == "No space left on device"
    assert not list(tmp_path.iterdir())


def test_open_mpi_without_a_folder_for_its_files_is_an_error(
    tmp_path, monkeypatch, capfd
):
    """In /proc no user can make a folder, not even root."""
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setenv(launcher.SESSIONS, "/proc")
    assert cli.main(["run", "-n", "2", "--simulate", str(script)]) == 1
    told = capfd.readouterr().err
    assert "Open MPI cannot keep a job's files in '/proc': " in told
    assert "set TMPDIR to a folder that you can write" in told


ENDS = """
import sys
from mpi4py import MPI
import numba_symm as ns

world = MPI.COMM_WORLD
one, other = ns.Communicator(world), ns.Communicator(world)
MPI.Finalize()
other.zeros(10)
other.close()
for refused in (lambda: ns.Communicator(world), one.dup):
    try:
        refused()
    except ns.ArgumentError as error:
        assert "MPI has been finalized" in str(error)
if one.rank == 0:
    try:
        one.zeros(10)
    except ns.RankLeft as error:
        print(error)
    one.close()
"""


def test_communicators_outlive_mpi_and_name_a_rank_that_has_ended(tmp_path):
    """The other ranks detect the end of the process."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    ended = start("run", "-n", 2, "--simulate", script)
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 ended without closing the communicator" in ended.stdout
    assert "rank 1 of 2, host memory" in ended.stderr  # was still open at exit


def test_run_passes_arguments_environment_flags_and_exit_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REPORT)
    folder = tmp_path / ("a long folder's name " * 5)
    folder.mkdir()
    environ = {"TMPDIR": str(folder), "NUMBA_SYMM_TIMEOUT": "7"}
    words = ["-n", "3", "--simulate", "-m", "a b", "--", "*"]

    flags = ["--wdir", tmp_path, "--"]
    ended = start("run", "-n", 2, "--simulate", *flags, script, *words, **environ)
    assert ended.returncode == 0, ended.stderr
    arguments, folder, seen = json.loads(ended.stdout)
    assert arguments == words
    assert folder == str(tmp_path)
    assert seen["NUMBA_ENABLE_CUDASIM"] == "1"
    assert environ.items() <= seen.items()

    ended = start("run", "-n", 2, "--simulate", script, "fail", **environ)
    assert ended.returncode == 5
    assert ended.stderr.startswith("rank 1: exit code 5\n")


def test_a_missing_script_is_reported_before_ranks_start(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "find_mpirun", lambda: fake_mpirun(tmp_path))
    assert cli.main(["run", "-n", "2", "--simulate", "python", "script.py"]) == 1
    shown = capfd.readouterr().err
    assert "got 'python', which is not a file" in shown
    assert "omit `python` before the script" in shown


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["run"],
        ["run", "-n", "0", "a.py"],
        ["run", "a.py"],
        ["run", "-n", "2", "-x", "A=1", "a.py"],
    ],
)
def test_wrong_usage_exits_with_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert ("expected `--` after" if "-x" in words else "usage: numba-symm") in shown


def test_tune_starts_the_measurement_on_all_gpus(monkeypatch):
    started = []
    monkeypatch.setattr(cli, "visible_gpus", lambda: [gpu(0), gpu(1)])
    monkeypatch.setattr(
        launcher, "code_of", lambda words, environ: started.append(words)
    )
    cli.main(["tune", "--largest", "1M"])
    (words,) = started
    assert words[words.index("-n") + 1] == "2"
    assert words[-3:] == ["-m", "numba_symm.bench.tune", "--largest=1M"]


def test_run_passes_its_own_flags_to_the_runner(monkeypatch):
    started = []

    monkeypatch.setattr(
        launcher, "code_of", lambda words, environ: started.append(words)
    )
    for flags in ("", "--as-mpi4py"):
        cli.main(["run", "-n", "3", "--simulate", *flags.split(), "-m", "a", "--b"])
        number = str(os.getpid())
        given = started[-1][started[-1].index(number) :]
        assert given == [number, "3", *flags.split(), "-m", "a", "--b"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--largest 1", "--largest: expected 1K or more, got '1'"),
        ("--largest much", "--largest: expected bytes such as 512, 64K"),
        ("--largest 6X", "--largest: expected bytes such as 512, 64K"),
        ("--largest 1M", "got /dev/null/numba-symm/limits"),
    ],
)
def test_what_tune_cannot_measure_or_write_is_refused_before_ranks_start(
    words, text, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null")
    monkeypatch.setattr(launcher, "code_of", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "-n", "2", "--simulate", *words.split()])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_stored_limits_are_removed_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    tuned.write("a GPU", 2, {})
    for _ in range(2):
        assert cli.main(["tune", "--reset"]) == 0
        assert not tuned.file().exists()
        assert f"There is no {tuned.file()} any more" in capsys.readouterr().out


def test_a_job_that_is_waited_for_leaves_the_signals_as_they_were():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    program = [sys.executable, "-c", "raise SystemExit(3)"]
    assert launcher.code_of(program, os.environ) == 3
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_job_ends_with_a_command_that_is_killed():
    job = "import time; print('begun', flush=True); time.sleep(9); print('not ended')"
    program = (
        "import os, sys; from numba_symm.command import launcher; "
        f"launcher.code_of([sys.executable, '-c', {job!r}], os.environ)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout.readline() == "begun\n"
        command.kill()
        assert command.stdout.read() == ""  # to the end of the job, which has the pipe


def test_without_a_job_status_prints_an_empty_list(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "found", lambda _: [])
    assert cli.main(["status", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
    assert cli.main(["status"]) == 1
    assert "expected a job of this user" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "found", lambda _: [])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["status", "--json"]) == 1
    assert capsys.readouterr().err == (
        "numba-symm: cannot write the output: No space left on device\n"
    )
