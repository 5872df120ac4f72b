"""``numba-symm doctor``: each finding is provoked."""

import json
import resource
import time
from types import SimpleNamespace

import pytest

from numba_symm.command import cli, doctor, doctor_checks, launcher
from numba_symm.command.doctor_checks import FITS, LOOK, WRONG, Finding
from numba_symm.engines import nccl
from tests.descriptors import open_fds
from tests.host.test_cli import gpu, start

PACKAGES = dict.fromkeys(("numba-symm", "numba-cuda", "numpy", "mpi4py"), "1.0")
FACTS = {
    "peer_access": [],
    "mpi": {"library": "Open MPI v5.0.11", "cuda_aware": False},
    "mpirun": {"path": "/bin/mpirun", "version": "mpirun (Open MPI) 5.0.11"},
    "packages": PACKAGES,
    "gpus": [],
    "driver": None,
    "simulated": True,
    "wrong": [],
    "system": "Linux",
    "python": "3.12",
    "variables": {},
}


def facts_of(*gpus, driver="580.1, CUDA 13.0"):
    held = [vars(each) for each in gpus]
    reached = [[True for _ in gpus] for _ in gpus]
    known = {"gpus": held, "peer_access": reached, "driver": driver}
    return FACTS | known | {"simulated": False}


def states(check, facts=FACTS):
    return [each.state for each in check(facts)]


def only(check, facts=FACTS):
    """Return the one finding, which has advice unless it fits."""
    (found,) = check(facts)
    assert bool(found.advice) == (found.state != FITS)
    return found


@pytest.mark.parametrize(
    ("library", "path", "version", "state", "word"),
    [
        ("Open MPI v5.0.11", "/m", "mpirun (Open MPI) 5.0.11", FITS, "5.0.11"),
        ("MPICH Version: 4.0", "/m", "Intel(R) MPI Library 2021", FITS, "Intel"),
        ("MPICH Version: 4.0", "/m", "Hydra 4.0.2", FITS, "Hydra"),
        ("Open MPI v5.0.11", "/m", "Hydra 4.0.2", WRONG, "rank 0 of 1"),
        ("Open MPI v5.0.11", "/m", "unknown (exit code 1)", FITS, "unknown"),
        ("Open MPI v5.0.11", None, None, WRONG, "no mpirun"),
        ("none (cannot load MPI)", "/m", "Hydra 4.0.2", WRONG, "cannot load"),
    ],
)
def test_the_launcher_fits_the_library(
    library, path, version, state, word, monkeypatch
):
    facts = FACTS | {"mpi": {"library": library}}
    facts |= {"mpirun": {"path": path, "version": version}}
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda _: path)
    found = only(doctor_checks.mpi, facts)
    assert found.state == state
    assert word in found.text


def test_another_launcher_on_the_path_is_named(monkeypatch):
    facts = FACTS | {"mpi": {"library": "Open MPI v5.0.11"}}
    facts |= {"mpirun": {"path": "/own/mpirun", "version": "mpirun (Open MPI) 5.0.11"}}
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda _: "/usr/bin/mpirun")
    own, other = doctor_checks.mpi(facts)
    assert (own.state, other.state) == (FITS, LOOK)
    assert other.text == "the shell's mpirun is /usr/bin/mpirun, and not /own/mpirun"
    assert "numba-symm run" in other.advice


@pytest.mark.parametrize(
    ("access", "units", "wanted"),
    [(False, ["dmar0"], [LOOK]), (False, [], []), (True, ["dmar0"], [])],
)
def test_an_iommu_is_named_where_peer_access_is_missing(
    monkeypatch, tmp_path, access, units, wanted
):
    for name in units:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor_checks, "_IOMMU", tmp_path)
    facts = facts_of(gpu(0), gpu(1)) | {"peer_access": [[True, access], [True, True]]}
    found = list(doctor_checks.iommu(facts))
    assert [each.state for each in found] == wanted
    for each in found:
        assert "GPU 0 has no access to the memory of GPU 1, and an IOMMU" in each.text
        assert "CUDA_DISABLE_IOMMU_ACS_P2P_CAPABILITY_CHECK=1" in each.advice


def test_gpus_and_their_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_checks, "_INSTALLED", tmp_path)
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = only(doctor_checks.gpus, FACTS | {"simulated": False})
    assert (found.state, "CUDA_VISIBLE_DEVICES=7" in found.text) == (LOOK, True)
    good = facts_of(gpu(0), gpu(2))
    assert "2 of 3: " in only(doctor_checks.gpus, good).text
    with monkeypatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES")
        assert "2 of 3 (a cgroup or a" in only(doctor_checks.gpus, good).text
    sliced = SimpleNamespace(**vars(gpu(0)) | {"uuid": "MIG-1"})
    assert only(doctor_checks.gpus, facts_of(sliced)).state == WRONG
    monkeypatch.setattr(doctor_checks, "_toolkits", lambda: {"cuda-bindings": "13.5.0"})
    old = facts_of(gpu(0), driver="535.1, CUDA 12.2")
    assert states(doctor_checks.gpus, old) == [FITS, WRONG]
    assert states(doctor_checks.gpus, good) == [FITS]
    shared = gpu(1)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert states(doctor_checks.gpus, facts_of(shared)) == [FITS, LOOK]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert states(doctor_checks.gpus, facts_of(shared)) == [FITS]


def test_a_sandbox_without_memory_files(monkeypatch):
    before = open_fds()
    assert only(doctor_checks.sockets).state == FITS
    assert open_fds() == before

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(doctor_checks.os, "memfd_create", refused)
    found = only(doctor_checks.sockets)
    assert found.state == WRONG
    assert "seccomp" in found.advice


def test_limits(monkeypatch, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert "256 files" in only(doctor_checks.limits).text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(doctor_checks, "_INFINIBAND", tmp_path)
    few = {resource.RLIMIT_MEMLOCK: 64 << 10}
    monkeypatch.setattr(
        doctor_checks.resource, "getrlimit", lambda each: (few.get(each, -1),) * 2
    )
    assert only(doctor_checks.limits).state == FITS  # no InfiniBand
    (tmp_path / "mlx5_0").mkdir()
    assert "64 KiB" in only(doctor_checks.limits).text
    few[resource.RLIMIT_AS] = 1 << 30
    assert states(doctor_checks.limits) == [WRONG, LOOK]


def test_files_of_the_system(monkeypatch, tmp_path):
    file = tmp_path / "file"
    monkeypatch.setattr(doctor_checks, "_PTRACE", file)
    assert states(doctor_checks.ptrace) == []  # no file
    file.write_text("1\n")
    assert states(doctor_checks.ptrace) == []
    file.write_text("3\n")
    assert only(doctor_checks.ptrace).state == LOOK
    monkeypatch.setattr(doctor_checks, "_SHM", tmp_path / "none")
    assert only(doctor_checks.shared_memory).state == LOOK
    monkeypatch.setattr(doctor_checks, "_SHM", tmp_path)
    assert only(doctor_checks.shared_memory).state == FITS
    monkeypatch.setattr(doctor_checks, "_LITTLE_SHM", 1 << 62)
    assert only(doctor_checks.shared_memory).state == LOOK
    monkeypatch.delenv(launcher.SESSIONS, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 70)))
    found = only(doctor_checks.temporary)
    assert (found.state, "60 bytes" in found.text) == (LOOK, True)


def test_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert only(doctor_checks.cache).state == FITS
    assert list(tmp_path.iterdir()) == []  # nothing was left
    with monkeypatch.context() as patch:
        patch.setattr(doctor_checks.locks, "lock", lambda *_: None)
        assert "cannot be locked" in only(doctor_checks.cache).text
    with monkeypatch.context() as patch:
        patch.setattr(doctor_checks, "_LITTLE_CACHE", 1 << 62)
        assert only(doctor_checks.cache).state == LOOK
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert "cannot be written" in only(doctor_checks.cache).text


def test_variables_and_the_engine(monkeypatch):
    assert states(doctor_checks.settings) == []
    wrong = FACTS | {"wrong": ["NUMBA_SYMM_TIMEOUT=x: expected seconds"]}
    assert only(doctor_checks.settings, wrong).state == WRONG
    assert states(doctor_checks.engine) == []  # without GPUs
    monkeypatch.setattr(doctor_checks, "SIMULATED", False)
    for installed, state in (("NCCL 2.28.9", ""), FITS), (("", "none"), LOOK):
        monkeypatch.setattr(nccl, "found", lambda i=installed: nccl.Installation(*i))
        assert only(doctor_checks.engine, facts_of(gpu(0))).state == state


def test_nodes_that_differ():
    near = ("a", FACTS, [Finding("cache", LOOK, "is slow", "do")], 0.0)
    assert doctor.of_nodes([near, ("b", *near[1:])]) == near[2]
    new = FACTS | {"packages": PACKAGES | {"numpy": "2.0"}}
    found = doctor.of_nodes([near, ("b", new, [], -7.0)])
    assert [each.state for each in found] == [LOOK, WRONG, LOOK]
    assert found[0].text == "on a: is slow"
    assert "packages differ" in found[1].text
    assert "b by -7.0 s" in found[2].text


def test_slow_links(monkeypatch):
    monkeypatch.setattr(doctor_checks, "SIMULATED", False)
    speeds = [[None if i == j else 100.0 for j in range(3)] for i in range(3)]
    assert doctor_checks.slow_links(speeds) == []
    assert doctor_checks.slow_links([[None, 9.9], [24.0, None]])[0].state == LOOK
    assert doctor_checks.slow_links([[None, 12.0], [400.0, None]]) == []  # of two
    speeds[2][0] = 60.0
    (found,) = doctor_checks.slow_links(speeds)
    assert "1 of 6 pairs" in found.text
    assert "from rank 2 to 0 it is 60.0" in found.text
    monkeypatch.setattr(doctor_checks, "SIMULATED", True)
    (found,) = doctor_checks.slow_links(speeds)
    assert found == ("links", FITS, "times of the simulator mean nothing for GPUs", "")


def test_ranks_of_one_machine_in_several_containers():
    one = doctor.Surroundings(
        b"machine", {"net": "net:[1]", "ipc": "ipc:[1]"}, ("GPU-0",)
    )
    assert doctor.of_places([one, one, one._replace(machine=b"other", gpus=())]) == []
    apart = one._replace(namespaces={"net": "net:[2]", "ipc": "ipc:[1]"})
    (found,) = doctor.of_places([one, apart])
    assert found.text.endswith(
        "0 and 1 are on one machine, in different namespaces (net)"
    )
    assert "--network=host" in found.advice
    (found,) = doctor.of_places([one, one, one._replace(gpus=("GPU-1",))])
    assert "ranks 0 and 2 are on one machine, and see different GPUs" in found.text
    assert "--gpus-per-node" in found.advice


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("echo no such host >&2; exit 3", "ended with code 3: no such host"),
        ("sleep 600", "has not ended after 0.3 s"),
        ("echo '{}'", "ended with code 0"),
    ],
)
def test_a_launcher_that_starts_no_job(monkeypatch, tmp_path, capsys, script, word):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n{script}\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(launcher, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(doctor.info, "facts", lambda mpirun: FACTS)
    monkeypatch.setattr(doctor, "PATIENCE", 0.3 if "sleep" in script else 20.0)
    began = time.monotonic()
    assert cli.main(["doctor", "--json"]) == 1
    assert time.monotonic() - began < 300
    found = json.loads(capsys.readouterr().out)
    wrong = [each for each in found["findings"] if each["state"] == WRONG]
    assert [each["check"] for each in wrong] == ["job"]
    assert word in wrong[0]["text"]


def test_no_job_is_started_where_it_cannot_work(monkeypatch, capsys):
    facts = FACTS | {"mpi": {"library": "none (no libmpi)"}}
    monkeypatch.setattr(doctor.info, "facts", lambda mpirun: facts)
    monkeypatch.setattr(launcher, "find_mpirun", lambda: "/not/there")
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "This machine does not fit: 1 wrong" in shown
    assert "pip install '.[mpi]'" in shown


def test_the_command_on_this_machine(tmp_path):
    """It measures two simulated ranks, and leaves nothing behind."""
    ended = start("doctor", "--json", "--simulate", TMPDIR=str(tmp_path))
    found = json.loads(ended.stdout)
    wrong = [each for each in found["findings"] if each["state"] == WRONG]
    assert (ended.returncode, wrong) == (0, []), ended.stderr
    checks = {each["check"] for each in found["findings"]}
    assert checks >= {"MPI", "descriptors", "cache", "job", "peer access"}
    assert [[x is None for x in row] for row in found["bandwidth"]] == [
        [True, False],
        [False, True],
    ]
    assert list(tmp_path.iterdir()) == []
