"""The facts recorded with a measurement: versions, devices, settings, commit."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numba_symm as ns
from numba_symm.bench import traffic
from numba_symm.environment import SIMULATED
from numba_symm.launch import info

NVLS_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment variables that disable NVLink multicast in contenders. numba_symm does
not use it."""

PACKAGES = (
    "numba",
    "numba-cuda",
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "mpi4py",
)


def facts(comm: ns.Communicator, ranks: Any) -> dict[str, Any]:
    """Return the facts of a run. Collective."""
    device = f"{comm.device.name}, PCI {comm.device.pci_bus_id}"
    versions = {"numba-symm": ns.__version__, "Python": platform.python_version()}
    versions |= {name: _installed(name) for name in PACKAGES}
    return {
        "ranks": comm.size,
        "devices": ranks.allgather("simulated" if SIMULATED else device),
        "driver": "none" if SIMULATED else info.driver(),
        "memory": comm.backend,
        "multiprocessors": comm.multiprocessors,
        "islands": comm.islands,
        "engine": traffic.engine(comm),
        "nccl": ranks.allgather(traffic.transports()),
        "nvls": "off",
        "commit": commit(Path(__file__).resolve().parent),
        "versions": versions,
    }


def commit(folder: Path) -> str:
    """Return the checked-out commit of a folder, or ``unknown``."""
    found = _git(folder, "rev-parse", "--short", "HEAD")
    if found is None:
        return "unknown"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{found} with changes" if changed else found


def _git(folder: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
