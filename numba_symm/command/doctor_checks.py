"""What ``numba-symm doctor`` checks: on one node, and between the ranks of a job.

What ``numba-symm doctor`` checks on one node, without other ranks.

A check returns findings. It changes nothing, and takes less than a second.

What ``numba-symm doctor`` checks between the ranks of a job. Collective.

The two ranks of every pair in an island store to each other's memory, with kernels and
copy engines, and compare the received data. One pair at a time is measured.
"""

import importlib.metadata
import itertools
import math
import os
import re
import resource
import secrets
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from numba_symm import device as symm
from numba_symm import environment
from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.command import launcher
from numba_symm.engines import nccl
from numba_symm.environment import NO_TIMES, SIMULATED
from numba_symm.errors import DeviceError, SymmError
from numba_symm.gpu import loads
from numba_symm.launch import devices, locks, ranks
from numba_symm.launch.info import INSTALL_MPI

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


def node_findings(facts: Mapping[str, Any]) -> list[Finding]:
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
            f"{INSTALL_MPI}, or load the module of your site's MPI; if both Open "
            "MPI and MPICH are installed, set MPI4PY_MPIABI",
        )
    elif mpirun["path"] is None:
        yield Finding(
            check,
            WRONG,
            f"there is {library}, and no mpirun",
            f"{INSTALL_MPI}, or put your MPI's mpirun on PATH; with Slurm, use "
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
        on_path, used = shutil.which("mpirun"), Path(mpirun["path"])
        # In a job, the path of its launcher is not known.
        if on_path and used.is_absolute() and used.resolve() != Path(on_path).resolve():
            yield Finding(
                check,
                LOOK,
                f"the shell's mpirun is {on_path}, and not {used}",
                f"start programs with `numba-symm run`, or with {used}",
            )


def family(text: str) -> str | None:
    """Return the MPI that a library's or a launcher's version names, or None."""
    lower = text.lower()
    for name, words in _FAMILIES.items():
        if any(re.search(rf"\b{word}\b", lower) for word in words):
            return name
    return None


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
            "install the extra of the driver's CUDA: pip install 'numba-cuda[cu12]'; "
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


def iommu(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that no IOMMU keeps GPUs from each other's memory."""
    pairs = [
        (one["ordinal"], other["ordinal"])
        for one, row in zip(facts["gpus"], facts["peer_access"], strict=True)
        for other, can in zip(facts["gpus"], row, strict=True)
        if not can
    ]
    if pairs and any(_entries(_IOMMU)):
        yield Finding(
            "IOMMU",
            LOOK,
            "GPU {} has no access to the memory of GPU {}, and an IOMMU is on: from "
            "13.5 on, CUDA then refuses access over PCIe".format(*pairs[0]),
            f"turn the IOMMU and ACS off; or set {IOMMU_UNCHECKED}=1, and call "
            "numba-symm doctor again, which checks what arrives",
        )


_IOMMU = Path("/sys/class/iommu")
IOMMU_UNCHECKED = "CUDA_DISABLE_IOMMU_ACS_P2P_CAPABILITY_CHECK"


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


def cache(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the cache of kernels, its file system and its locks."""
    check = "cache"
    advice = "set XDG_CACHE_HOME to a writable folder with free space, on all ranks"
    try:
        folder = loads.folder()
    except RuntimeError as error:
        yield Finding(check, WRONG, f"its folder is unknown: {error}", advice)
        return
    if not loads.is_writable(folder):
        yield Finding(
            check,
            LOOK,
            f"{folder} cannot be written, so every process compiles its kernels",
            advice,
        )
        return
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(nearest).free
    text = f"{folder} ({free >> 20} MiB free)"
    if free < _LITTLE_CACHE:
        yield Finding(check, LOOK, text, advice)
    elif not _locks_work(nearest):
        yield Finding(
            check,
            LOOK,
            f"{text}: files cannot be locked, so every rank compiles its kernels",
            "mount it with locks, or " + advice,
        )
    else:
        yield Finding(check, FITS, text)


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
    gpus,
    iommu,
    sockets,
    limits,
    ptrace,
    shared_memory,
    temporary,
    cache,
    settings,
    engine,
)


COUNT = 1 << 10 if SIMULATED else 4 << 20
"""Elements of 8 bytes that a rank has for each sender."""

COPIES = 1 if SIMULATED else 4
SLOW = 0.7
"""A bandwidth below this part of the median is reported."""

SLOWEST = 10.0
"""GB/s that a copy reaches over every link, PCIe 3.0 with 16 lanes included."""

DEADLINE = 5.0
"""Seconds that a kernel waits for its peer."""

CHECK = "peer access"

_SET_UP = "NUMBA_SYMM_SETUP_TIMEOUT"
_STEP = 0x9E3779B97F4A7C15 >> 1  # between the numbers that a rank stores
_BLOCKS, _THREADS = (1, 8) if SIMULATED else (32, 256)


@cuda.jit  # type: ignore[untyped-decorator]
def _store(ctx: Any, peer: int, count: int, seed: int) -> None:
    """Store numbers into this rank's part of a peer's memory."""
    there = symm.peer_array(ctx, peer, (ctx.size, count), np.int64)
    i = cuda.grid(1)
    while i < count:
        there[ctx.rank, i] = seed + i
        i += cuda.gridsize(1)


def pair_findings(
    comm: Any, make_by: float = math.inf, measure_by: float = math.inf
) -> tuple[list[Finding], dict[str, Any]]:
    """Return the findings about a job's ranks, and what was measured. Collective.

    Args:
        comm: mpi4py's communicator.
        make_by: the moment of ``monotonic`` until which the ranks construct a
            communicator.
        measure_by: that until which they begin to measure a pair.

    Returns:
        The findings and a dict: ``islands`` in words, and ``bandwidth`` of each pair of
        ranks in GB/s, by sender and receiver. None: this pair has no peer access.
    """
    if ranks.launched_size() != comm.size:
        text = f"the launcher has {ranks.launched_size()} ranks, and MPI {comm.size}"
        advice = "use the mpirun of mpi4py's MPI library"
        return [Finding("MPI", WRONG, text, advice)], {}
    try:
        with _made(comm, make_by) as communicator:
            return _measured(communicator, measure_by)
    except SymmError as error:
        # Every rank raises it, so every rank returns here.
        return [Finding(CHECK, WRONG, str(error), "see docs/troubleshooting.md")], {}


def _made(comm: Any, by: float) -> Communicator:
    """Return a communicator, whose set-up calls wait until a moment at most."""
    seconds = min(environment.chosen_setup_timeout() or math.inf, by - time.monotonic())
    if seconds == math.inf:
        return Communicator(comm, timeout=DEADLINE)
    with environment.changed(_SET_UP, f"{max(0.1, seconds):.1f}"):
        return Communicator(comm, timeout=DEADLINE)


def _measured(comm: Communicator, by: float) -> tuple[list[Finding], dict[str, Any]]:
    members = inside(comm).ranks
    islands = members.described()
    findings = [Finding("islands", FITS, islands)]
    if max(devices.sharers(members.gpus).values()) > 1:
        findings.append(
            Finding("islands", LOOK, "ranks share a GPU", "start a rank for each GPU")
        )
    bandwidth, broken, left = _pairs(comm, by)
    measured = {"islands": islands, "bandwidth": bandwidth}
    if broken:
        texts = [f"{one} to {other}: {how}" for one, other, how in broken]
        findings.append(
            Finding(
                CHECK,
                WRONG,
                f"what arrived differs from what was stored, from rank {texts[0]}"
                + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""),
                "update the driver; in a virtual machine, disable ACS and check the "
                f"IOMMU; unset {IOMMU_UNCHECKED}; NUMBA_SYMM_ISLAND_SIZE=1 avoids peer "
                "access",
            )
        )
    elif comm.size > 1:
        checked = "every pair that was checked" if left else "every pair"
        findings.append(
            Finding(CHECK, FITS, f"{checked} stores to each other's memory correctly")
        )
    if left:
        text = f"{left} pairs of an island were not checked, because time was over"
        advice = "start 2 ranks on a node, with different GPUs in each run"
        findings.append(Finding("skipped", LOOK, text, advice))
    findings += slow_links(bandwidth)
    return findings, measured


def slow_links(bandwidth: list[list[float | None]]) -> list[Finding]:
    """Return a finding for the pairs that are slower than a link should be."""
    pairs = {
        (one, other): speed
        for one, row in enumerate(bandwidth)
        for other, speed in enumerate(row)
        if speed
    }
    if not pairs:
        return []
    if SIMULATED:
        return [Finding("links", FITS, NO_TIMES)]
    least, what = SLOWEST, f"{SLOWEST:g} GB/s, which every link should reach"
    usual = statistics.median(pairs.values())
    if len(pairs) >= 4 and SLOW * usual > least:  # of two, no pair is slower than most
        least = SLOW * usual
        what = f"{SLOW:.0%} of the median bandwidth of {usual:.1f} GB/s"
    slow = {pair: speed for pair, speed in pairs.items() if speed < least}
    if not slow:
        return []
    (one, other), speed = min(slow.items(), key=lambda item: item[1])
    return [
        Finding(
            "links",
            LOOK,
            f"{len(slow)} of {len(pairs)} pairs have less than {what}; from rank {one} "
            f"to {other} it is {speed:.1f} GB/s",
            "compare nvidia-smi topo -m and nvidia-smi nvlink -s on that node",
        )
    ]


def _pairs(
    comm: Communicator, by: float
) -> tuple[Any, list[tuple[int, int, str]], int]:
    """Measure the pairs of each island, one after another, until a moment. Collective.

    The last result is the number of pairs for which no time was left.

    A barrier of all ranks follows each step. So a receiver compares what has arrived,
    and nothing else uses the island's links while a pair is measured.
    """
    size = comm.size
    exchange = inside(comm).ranks.exchange
    ours = next(island for island in comm.islands if comm.rank in island)
    longest = max(map(len, comm.islands))
    me = ours.index(comm.rank)  # memory has the numbers within the island
    inbox = comm.zeros((longest, COUNT), np.int64)
    mem = comm.rendezvous(inbox)
    mine = cuda.to_device(np.arange(COUNT) + _seed(me, by_kernel=False))
    mine_bandwidth: list[float | None] = [None] * size
    broken: list[tuple[int, int, str]] = []
    pairs = list(itertools.permutations(range(longest), 2))
    left = len(pairs)
    for one, other in pairs:
        # In all islands simultaneously, but those that have not so many ranks.
        here = max(one, other) < len(ours)
        sends, receives = here and me == one, here and me == other
        if sends:
            seed = _seed(me, by_kernel=True)
            _store[_BLOCKS, _THREADS](mem.ctx, other, COUNT, seed)
        comm.synchronize()
        exchange.barrier(f"doctor: stores of {one} to {other}")
        if receives and not _arrived(inbox, one, by_kernel=True):
            broken.append((ours[one], ours[other], "a kernel's stores"))
        exchange.barrier(f"doctor: {other} has read")
        if sends:
            mine_bandwidth[ours[other]] = _copied(comm, mem, mine, other, me)
        exchange.barrier(f"doctor: copies of {one} to {other}")
        if receives and not _arrived(inbox, one, by_kernel=False):
            broken.append((ours[one], ours[other], "a copy"))
        left -= 1
        step = f"doctor: {one} and {other}"
        if any(exchange.all_gather(time.monotonic() > by, step)):
            break
    everyone = exchange.all_gather((mine_bandwidth, broken), "doctor")
    return (
        [bandwidth for bandwidth, _ in everyone],
        [each for _, found in everyone for each in found],
        left,
    )


def _seed(rank: int, *, by_kernel: bool) -> int:
    return _STEP // (2 * rank + 1 + by_kernel)


def _arrived(inbox: Any, sender: int, *, by_kernel: bool) -> bool:
    """Return whether this rank has what a sender has stored."""
    wanted = np.arange(COUNT) + _seed(sender, by_kernel=by_kernel)
    return bool(np.array_equal(inbox[sender].copy_to_host(), wanted))


def _copied(comm: Communicator, mem: Any, mine: Any, peer: int, me: int) -> float:
    """Copy to a peer, and return the bandwidth in GB/s."""
    mem.put(mine, peer, me * COUNT)
    comm.synchronize()
    started = time.perf_counter()
    for _ in range(COPIES):
        mem.put(mine, peer, me * COUNT)
    comm.synchronize()
    return COPIES * 8 * COUNT / (time.perf_counter() - started) / 1e9
