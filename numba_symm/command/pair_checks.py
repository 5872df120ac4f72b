"""What ``numba-symm doctor`` checks between the ranks of a job. Collective.

The two ranks of every pair in an island store to each other's memory, with kernels and
copy engines, and compare the received data. One pair at a time is measured.
"""

import itertools
import math
import os
import statistics
import time
from typing import Any

import numpy as np
from numba import cuda

from numba_symm import device as symm
from numba_symm import environment
from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.command.node_checks import FITS, LOOK, WRONG, Finding
from numba_symm.environment import SIMULATED
from numba_symm.errors import SymmError
from numba_symm.launch import devices, ranks

COUNT = 1 << 10 if SIMULATED else 4 << 20
"""Elements of 8 bytes that a rank has for each sender."""

ROUNDS = 3 if SIMULATED else 200
"""Signals there and back in a measurement."""

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


@cuda.jit  # type: ignore[untyped-decorator]
def _ping(ctx: Any, peer: int, begins: int, rounds: int, took: Any) -> None:
    """Send signals there and back, and store the nanoseconds."""
    started = symm.globaltimer()
    for _ in range(rounds):
        if begins:
            symm.put_signal(ctx, peer, 0)
            symm.wait_signal(ctx, peer, 0)
        else:
            symm.wait_signal(ctx, peer, 0)
            symm.put_signal(ctx, peer, 0)
    took[0] = symm.globaltimer() - started


def all_of(
    comm: Any, make_by: float = math.inf, measure_by: float = math.inf
) -> tuple[list[Finding], dict[str, Any]]:
    """Return the findings about a job's ranks, and what was measured. Collective.

    Args:
        comm: mpi4py's communicator.
        make_by: the moment of ``monotonic`` until which the ranks construct a
            communicator.
        measure_by: that until which they begin to measure a pair.

    Returns:
        The findings and a dict: ``islands`` in words, and of each pair of ranks
        ``latency`` in µs and ``bandwidth`` in GB/s, by sender and receiver. None: this
        pair has no peer access.
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
    before = os.environ.get(_SET_UP)
    seconds = min(environment.chosen_setup_timeout() or math.inf, by - time.monotonic())
    try:
        if seconds < math.inf:
            os.environ[_SET_UP] = f"{max(0.1, seconds):.1f}"
        return Communicator(comm, timeout=DEADLINE)
    finally:
        if before is None:
            os.environ.pop(_SET_UP, None)
        else:
            os.environ[_SET_UP] = before


def _measured(comm: Communicator, by: float) -> tuple[list[Finding], dict[str, Any]]:
    members = inside(comm).ranks
    islands = members.described()
    findings = [Finding("islands", FITS, islands)]
    if max(devices.sharers(members.gpus).values()) > 1:
        findings.append(
            Finding("islands", LOOK, "ranks share a GPU", "start a rank for each GPU")
        )
    latency, bandwidth, broken, left = _pairs(comm, by)
    measured = {"islands": islands, "latency": latency, "bandwidth": bandwidth}
    if broken:
        texts = [f"{one} to {other}: {how}" for one, other, how in broken]
        findings.append(
            Finding(
                CHECK,
                WRONG,
                f"what arrived differs from what was stored, from rank {texts[0]}"
                + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""),
                "update the driver; in a virtual machine, disable ACS and check the "
                "IOMMU; NUMBA_SYMM_ISLAND_SIZE=1 avoids peer access",
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
    if not pairs or SIMULATED:  # where copies take the processor's time
        return []
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
) -> tuple[Any, Any, list[tuple[int, int, str]], int]:
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
    took = cuda.to_device(np.zeros(1, np.int64))
    mine_latency: list[float | None] = [None] * size
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
        if sends or receives:
            peer = other if sends else one
            for rounds in (1, ROUNDS):  # the first one compiles
                _ping[1, 1](mem.ctx, peer, int(sends), rounds, took)
                comm.synchronize()
            if sends:
                nanoseconds = int(took.copy_to_host()[0])
                mine_latency[ours[other]] = nanoseconds / ROUNDS / 2000
        left -= 1
        step = f"doctor: signals of {one} and {other}"
        if any(exchange.all_gather(time.monotonic() > by, step)):
            break
    everyone = exchange.all_gather((mine_latency, mine_bandwidth, broken), "doctor")
    return (
        [latency for latency, _, _ in everyone],
        [bandwidth for _, bandwidth, _ in everyone],
        [each for _, _, found in everyone for each in found],
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
