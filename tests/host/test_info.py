"""``numba-symm info``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from numba_symm.command import cli, compiling, launcher
from numba_symm.launch import info
from tests.host.test_cli import gpu, start

HYDRA = r"HYDRA build details:\n    Version:            4.0.2\n    CC:  gcc\n"
LAUNCHER = {
    "MPI4PY_RC_THREADS": "1",
    "NUMBA_SYMM_TIMEOUT": "12",
    "OMPI_MCA_btl": "self,sm",
    "PMIX_MCA_gds": "hash",
    "SLURM_STEP_ID": "3",
    "UCX_TLS": "cma",
}


@pytest.fixture
def mpi(monkeypatch):
    """Have an MPI library without a process that loads it."""
    monkeypatch.setattr(info, "mpi_library", lambda: ("Some MPI 1.0", True))
    monkeypatch.setattr(launcher, "find_mpirun", lambda: "/not/there/mpirun")


def test_info_prints_what_a_report_needs_as_json(monkeypatch):
    ended = start("info", "--json", **LAUNCHER, PASSWORD="secret")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert LAUNCHER.items() <= found["variables"].items()
    assert "secret" not in ended.stdout
    kernel = os.uname()
    assert found["kernel"] == f"Linux {kernel.release} {kernel.machine}"
    assert found["system"] in Path("/etc/os-release").read_text()
    assert found["packages"].keys() >= {"numba-cuda", "torch", "cupy", "nvidia-nccl"}
    assert found["packages"]["numba-symm"] == "0.1.0"
    assert "nccl" in found["nccl"].lower()  # its version, or how to install it
    assert found["mpi"]["library"] == info.mpi_library()[0]
    assert found["mpi"]["cuda_aware"] in (True, False)
    assert found["mpirun"]["path"] == launcher.find_mpirun()
    assert found["mpirun"]["version"]
    assert found["wrong"] == []
    assert found["cache"]["folder"]


def test_info_prints_the_same_as_text(mpi, monkeypatch, capsys):
    monkeypatch.setattr(info, "visible_gpus", lambda: [])
    monkeypatch.setenv("NUMBA_SYMM_TIMEOUT", "12")
    monkeypatch.setattr(info, "version", {"cupy-cuda13x": "14.1"}.__getitem__)
    monkeypatch.setattr(info, "PackageNotFoundError", KeyError)
    monkeypatch.setattr(info, "_version_of", lambda mpirun: f"1.0 of {mpirun}")
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    words = ["numba-cuda", "Some MPI 1.0; CUDA-aware", "NUMBA_SYMM_TIMEOUT=12"]
    words += ["14.1 (cupy-cuda13x)", "not installed", "NCCL library", "Linux"]
    words += ["/not/there/mpirun, 1.0 of /not/there/mpirun", "simulator"]
    for each in words:
        assert each in shown
    assert "Wrong" not in shown
    assert "NVIDIA driver" not in shown


def test_info_of_a_job_has_no_codes_of_a_terminal(mpi, monkeypatch, capsys):
    monkeypatch.setattr(info, "show", lambda found, console: console.print("[bold]one"))
    monkeypatch.setattr(compiling, "show", lambda *given: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # as Open MPI gives ranks
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out == "\x1b[1mone\x1b[0m\n"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for rank, wanted in (("0", "one\n"), ("1", "")):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        assert cli.main(["info"]) == 0
        assert capsys.readouterr().out == wanted
        assert cli.main(["info", "--json"]) == 0
        text = capsys.readouterr().out
        assert "packages" in json.loads(text) if rank == "0" else text == ""


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("NUMBA_SYMM_TIMEOUT", "abc", "NUMBA_SYMM_TIMEOUT='abc': expected seconds"),
        ("NUMBA_SYMM_TIMEOUT", "-1", "NUMBA_SYMM_TIMEOUT='-1': expected seconds"),
        ("NUMBA_SYMM_MULTIPROCESSORS", "0", "='0': expected an integer of at least 1"),
        ("NUMBA_SYMM_BACKEND", "ipc", "expected host in Numba's CUDA simulator"),
        ("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", "yes", "expected 0 or 1"),
        ("NUMBA_SYMM_ISLAND_SIZE", "0", "='0': expected an integer of at least 1"),
        ("NUMBA_SYMM_SETUP_TIMEOUT", "w", "NUMBA_SYMM_SETUP_TIMEOUT='w': expected"),
        ("NUMBA_SYMM_MESSAGE_LIMIT", "q", "NUMBA_SYMM_MESSAGE_LIMIT='q': expected"),
        ("NUMBA_SYMM_RECORD", "x", "NUMBA_SYMM_RECORD='x': expected 0 or 1"),
        ("NUMBA_SYMM_ENGINE", "pigeon", "NUMBA_SYMM_ENGINE='pigeon': expected nccl or"),
        (
            "NUMBA_SYMM_TIMEOT",
            "3",
            "NUMBA_SYMM_TIMEOT is not known (did you mean 'NUMBA_SYMM_TIMEOUT'?); ",
        ),
    ],
)
def test_info_shows_wrong_settings(monkeypatch, name, value, wanted):
    monkeypatch.setenv(name, value)
    (text,) = info.wrong_settings(0)
    assert wanted in text
    if value == "ipc":
        assert info.wrong_settings(2) == []


def test_info_shows_gpus_and_peer_access(mpi, monkeypatch, capsys):
    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def can_access_peer(self, other):
            return (self.ordinal, other) == (0, 1)

    monkeypatch.setattr("cuda.core.Device", Device)
    monkeypatch.setattr(info, "visible_gpus", lambda: [gpu(0), gpu(1)])
    monkeypatch.setattr(info, "driver", lambda: "580.65.06, CUDA 13.0")
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    for words in ("GPU-1", "9.0", "580.65.06", "vmm", "yes", "no"):
        assert words in shown
    assert shown.count("MPS") == 1
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peer_access"] == [[True, True], [False, True]]
    assert [each["mps"] for each in found["gpus"]] == [False, True]


def test_info_names_the_variable_that_selects_the_backend(monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_BACKEND", "ipc")
    assert info.backend_and_reason(2) == "ipc: NUMBA_SYMM_BACKEND selects it"


def test_a_missing_mpi_library_is_reported_with_its_installation(monkeypatch):
    monkeypatch.setattr(info, "ASK_MPI", "raise RuntimeError('cannot load MPI')")
    text, cuda_aware = info.mpi_library()
    assert "cannot load MPI" in text
    assert "pip install '.[mpi]'" in text
    assert cuda_aware is None


def test_an_mpi_library_that_ends_when_asked_for_cuda_keeps_its_name(monkeypatch):
    monkeypatch.setattr(info, "ASK_MPI", "print('Old MPI', flush=True); 1 / 0")
    assert info.mpi_library() == ("Old MPI", None)


def test_the_version_of_mpi_is_read_without_mpi_init():
    asked = info.ASK_MPI + "print(MPI.Is_initialized())"
    ended = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("script", "version"),
    [
        (f"printf '{HYDRA}'", "Hydra 4.0.2"),
        ("printf '\\nmpirun (Open MPI) 5.0\\nmore\\n'", "mpirun (Open MPI) 5.0"),
        ("exit 3", "unknown (exit code 3)"),
    ],
)
def test_the_version_of_mpirun(script, version, tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n{script}\n")
    mpirun.chmod(0o755)
    assert info._version_of(str(mpirun)) == version
    mpirun.chmod(0o644)
    assert "Permission denied" in info._version_of(str(mpirun))
    assert info._version_of(None) is None
