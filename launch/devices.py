"""The GPUs of ranks, and the division of ranks into islands.

The assignment of GPUs to ranks, by UUID, and the peer access between GPUs.

An ordinal is valid in one process only. If each rank sees one GPU, its ordinal is 0 on
every rank. A UUID names the same GPU in all processes.
"""

import functools
import itertools
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from numba_symm.arguments import index
from numba_symm.environment import (
    SIMULATED,
    allow_overlapping_devices,
    warn_once,
    work_queues,
)
from numba_symm.errors import ArgumentError, DeviceError, PeerAccessError
from numba_symm.gpu import driver
from numba_symm.launch.ranks import name_ranks
from numba_symm.launch.store import StoreExchange

Matrix = list[list[bool | None]]


@dataclass(frozen=True)
class GPU:
    """The properties of a GPU that this process sees.

    Attributes:
        ordinal: its number in this process; other processes may number it differently.
        uuid: its name on the node.
        name: the name of the product.
        pci_bus_id: its address on the bus, as ``nvidia-smi`` prints it.
        compute_capability: major and minor number.
        multicast: whether the GPU supports multicast, which the library does not use.
        mps: whether MPS runs the kernels of several processes simultaneously. None: the
            driver does not report it.
    """

    ordinal: int
    uuid: str
    name: str
    pci_bus_id: str
    compute_capability: tuple[int, int]
    multicast: bool
    mps: bool | None


def bind(
    exchange: StoreExchange, device: int | None = None
) -> tuple[GPU, tuple[GPU, ...], Matrix]:
    """Assign every rank a GPU of its own and make it current. Collective.

    Args:
        exchange: the ranks, all of one node.
        device: the ordinal of this rank's GPU. None: the device of the current CUDA
            context, else the GPU of this rank's number, else any.

    Returns:
        This rank's GPU, current for Numba and cuda.core in the calling thread; by rank,
        its GPU; and which rank's GPU can access which other's memory, a row for each
        rank. ``matrix[r][s]``: whether rank r's GPU can access rank s's. None if rank
        r's process does not see the other GPU, so that the driver cannot answer.

    Raises:
        DeviceError: on all ranks: no GPU, MIG slices only, or too few GPUs although
            sharing is not allowed.
        ArgumentError: on all ranks: a rank does not see its ``device``.
    """
    with exchange.agreed("finding GPUs") as each:
        gpus = visible_gpus()
        # No object, whose class would be sent for each rank.
        visible = tuple(gpu.uuid for gpu in refuse_mig(gpus))
        each.mine = visible, _preferred(gpus, device), allow_overlapping_devices()
    seen, preferred, share = zip(*each.all, strict=True)
    uuids = assign(seen, preferred, share=all(share))
    with exchange.agreed("binding GPUs") as each:
        gpu = next(gpu for gpu in gpus if gpu.uuid == uuids[exchange.rank])
        _make_current(gpu.ordinal)
        ordinals = {seen.uuid: seen.ordinal for seen in gpus}
        peers = [uuid for uuid in uuids if uuid != gpu.uuid]
        access = [_access(gpu.ordinal, ordinals.get(uuid)) for uuid in peers]
        # What is usually equal on all ranks: a process sees all GPUs, or its own one.
        same = access[0] if len(set(access)) == 1 else access
        each.mine = astuple(replace(gpu, uuid="")), same
    found = [
        (replace(GPU(*facts), uuid=uuid), _row(same, uuid, uuids))
        for uuid, (facts, same) in zip(uuids, each.all, strict=True)
    ]
    return gpu, tuple(gpu for gpu, _ in found), [row for _, row in found]


def _row(
    same: bool | list[bool | None] | None, uuid: str, uuids: Sequence[str]
) -> list[bool | None]:
    """Return which ranks' GPUs a GPU can access, from what its rank has sent."""
    peers = iter(same) if isinstance(same, list) else itertools.repeat(same)
    return [True if each == uuid else next(peers) for each in uuids]


def assign(
    visible: Sequence[Sequence[str]], preferred: Sequence[str | None], share: bool
) -> list[str]:
    """Return one UUID for each rank: its own GPU, or a shared one if that is needed.

    Args:
        visible: the UUIDs that each rank sees, in its own order.
        preferred: for each rank the UUID that it must get, or None.
        share: whether ranks may share a GPU if there are too few.

    Raises:
        DeviceError: a rank sees none, or there are too few and ``share`` is False.
    """
    blind = [rank for rank, seen in enumerate(visible) if not seen]
    if blind:
        raise DeviceError(
            f"no GPU is visible to {name_ranks(blind)}: check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES there; NUMBA_ENABLE_CUDASIM=1 runs without GPUs"
        )
    choices = [
        [fixed] if fixed is not None else _from(seen, rank)
        for rank, (seen, fixed) in enumerate(zip(visible, preferred, strict=True))
    ]
    owners: dict[str, int] = {}
    for rank in range(len(choices)):
        tried: set[str] = set()
        if not _place(rank, choices, owners, tried):
            if share:
                return _spread(choices)
            raise DeviceError(_too_few(choices, tried))
    assigned = {rank: uuid for uuid, rank in owners.items()}
    return [assigned[rank] for rank in range(len(choices))]


def refuse_missing_access(matrix: Matrix, uuids: Sequence[str]) -> None:
    """Raise :class:`PeerAccessError`, with the pairs of ranks that have no access."""
    pairs = [
        f"  rank {rank} ({uuids[rank]}) to rank {peer} ({uuids[peer]})"
        for rank, row in enumerate(matrix)
        for peer, access in enumerate(row)
        if access is False
    ]
    if pairs:
        raise PeerAccessError(
            "expected peer access between all GPUs; the driver reports no access from\n"
            + "\n".join(pairs)
            + "\nchoose GPUs that `nvidia-smi topo -p2p r` marks OK, with device= or "
            "CUDA_VISIBLE_DEVICES"
        )


_MOST_QUEUES = 32


def sharers(gpus: Sequence[GPU]) -> Counter[str]:
    """Return how many ranks have each GPU, by UUID."""
    return Counter(gpu.uuid for gpu in gpus)


def warn_if_sliced(gpus: Sequence[GPU]) -> None:
    """Warn, once in a process, if ranks take turns on a GPU, which is slow."""
    ranks = sharers(gpus)
    if any(ranks[gpu.uuid] > 1 and gpu.mps is False for gpu in gpus):
        warn_once(
            "ranks share a GPU without MPS, so the GPU runs one of them at a time, and "
            "a call takes milliseconds; start MPS on the node before the job: "
            "nvidia-cuda-mps-control -d"
        )


def warn_if_queues_are_few(gpus: Sequence[GPU]) -> None:
    """Warn, once in a process, if requests to and from all ranks lack work queues.

    Args:
        gpus: those of a communicator with requests, by rank.
    """
    directions = min(2 * (len(gpus) - 1), _MOST_QUEUES)
    queues = work_queues(mps=any(gpu.mps for gpu in gpus))
    if not SIMULATED and directions > queues:
        warn_once(
            f"requests=True: a process has {queues} work queues, with which requests "
            f"to and from {len(gpus) - 1} ranks may wait for each other; set "
            f"CUDA_DEVICE_MAX_CONNECTIONS={directions} on all ranks"
        )


def is_mig(gpu: GPU) -> bool:
    """Return whether ``gpu`` is a slice of a GPU in multi-instance mode."""
    return gpu.uuid.startswith("MIG-") or " MIG " in f"{gpu.name} "


def refuse_mig(gpus: Sequence[GPU]) -> list[GPU]:
    """Return the GPUs that are not MIG slices. Raise DeviceError if all are."""
    whole = [gpu for gpu in gpus if not is_mig(gpu)]
    if gpus and not whole:
        raise DeviceError(
            f"{gpus[0].name} is a MIG slice, and CUDA gives MIG slices no access to "
            "a peer's memory; use whole GPUs"
        )
    return whole


def visible_gpus() -> list[GPU]:
    """Return the GPUs that this process sees; in the simulator, its own one."""
    if SIMULATED:
        return [_simulated_gpu()]
    return [_facts(ordinal) for ordinal in range(_device_count())]


def device_has_multicast_support(ordinal: int) -> bool:
    """Return whether the GPU supports multicast, which the library does not use."""
    gpus = visible_gpus()
    return gpus[_checked_ordinal(gpus, ordinal)].multicast


def _preferred(gpus: Sequence[GPU], device: int | None) -> str | None:
    """Return the UUID that this rank must get: as requested, or of its context."""
    if not gpus:
        return None  # assign() raises on every rank
    ordinal = _current_ordinal() if device is None else _checked_ordinal(gpus, device)
    return None if ordinal is None else refuse_mig([gpus[ordinal]])[0].uuid


def _checked_ordinal(gpus: Sequence[GPU], device: int) -> int:
    try:
        ordinal = index(device)
    except Exception:  # whatever an object's own method raises
        raise ArgumentError(f"device={device!r}: expected a GPU's ordinal") from None
    if not 0 <= ordinal < len(gpus):
        raise ArgumentError(
            f"device={device}: expected 0 to {len(gpus) - 1}, because this process "
            f"sees {len(gpus)} GPU(s); see CUDA_VISIBLE_DEVICES"
        )
    return ordinal


def _from(seen: Sequence[str], rank: int) -> list[str]:
    start = rank % len(seen)
    return [*seen[start:], *seen[:start]]


def _place(
    rank: int,
    choices: Sequence[Sequence[str]],
    owners: dict[str, int],
    tried: set[str],
) -> bool:
    """Find a GPU for ``rank``. Move earlier ranks to other GPUs if that helps."""
    for uuid in choices[rank]:
        if uuid not in tried:
            tried.add(uuid)
            if uuid not in owners or _place(owners[uuid], choices, owners, tried):
                owners[uuid] = rank
                return True
    return False


def _spread(choices: Sequence[Sequence[str]]) -> list[str]:
    """Assign shared GPUs: to each rank the one with the fewest ranks that it sees.

    Ranks with the fewest choices are first.
    """
    load: Counter[str] = Counter()
    assigned: dict[int, str] = {}
    for rank in sorted(range(len(choices)), key=lambda rank: len(choices[rank])):
        assigned[rank] = min(choices[rank], key=load.__getitem__)
        load[assigned[rank]] += 1
    return [assigned[rank] for rank in range(len(choices))]


def _too_few(choices: Sequence[Sequence[str]], tried: set[str]) -> str:
    contenders = [rank for rank, seen in enumerate(choices) if tried.issuperset(seen)]
    return (
        f"{len(choices)} ranks cannot have a GPU each: {name_ranks(contenders)} can "
        f"only have {len(tried)} GPU(s), {', '.join(sorted(tried))} (from "
        "CUDA_VISIBLE_DEVICES, device= or a CUDA context in use); start fewer ranks, "
        "or let ranks share GPUs under MPS: NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES=1 on "
        "all ranks, and nvidia-cuda-mps-control -d before the job"
    )


@functools.cache
def _simulated_gpu() -> GPU:
    # Random, because each process simulates a device of its own.
    return GPU(
        0,
        f"simulator-{secrets.token_hex(6)}",
        "Numba CUDA simulator",
        "",
        (0, 0),
        multicast=False,
        mps=None,
    )


def _device_count() -> int:
    """Start the driver and return the number of GPUs; 0 without a driver."""
    from cuda.bindings import driver

    try:
        (code,) = driver.cuInit(0)
    except RuntimeError:  # libcuda is not installed
        return 0
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return 0
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver did not start: cuInit returned {code.name}")
    _, count = driver.cuDeviceGetCount()
    return int(count)


def _facts(ordinal: int) -> GPU:
    from cuda.core import Device

    device = Device(ordinal)
    major, minor = device.compute_capability
    return GPU(
        ordinal=ordinal,
        uuid=device.uuid,
        name=device.name,
        pci_bus_id=device.pci_bus_id,
        compute_capability=(major, minor),
        multicast=device.properties.multicast_supported,
        mps=_mps(ordinal),
    )


def _mps(ordinal: int) -> bool | None:
    from cuda.bindings import driver

    mps = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    _, device = driver.cuDeviceGet(ordinal)
    code, value = driver.cuDeviceGetAttribute(mps, device)
    if code != driver.CUresult.CUDA_SUCCESS:  # an old driver
        return None
    return bool(value)


def _current_ordinal() -> int | None:
    """Return the device of this thread's current CUDA context, or None."""
    if SIMULATED:
        return None
    from cuda.bindings import driver

    _, context = driver.cuCtxGetCurrent()
    if not int(context):
        return None
    _, device = driver.cuCtxGetDevice()
    return int(device)


def _access(ordinal: int, peer: int | None) -> bool | None:
    return None if peer is None else _can_access(ordinal, peer)


def _can_access(ordinal: int, peer: int) -> bool:
    from cuda.core import Device

    return bool(Device(ordinal).can_access_peer(peer))


def without_atomics(gpu: GPU, gpus: Sequence[GPU]) -> list[str]:
    """Return the peers' GPUs to which a GPU's link has no atomic operations. Local.

    Of a GPU that this process does not see, the driver knows nothing.
    """
    if SIMULATED:
        return []
    ordinals = {seen.uuid: seen.ordinal for seen in visible_gpus()}
    peers = {peer.uuid for peer in gpus} & ordinals.keys() - {gpu.uuid}
    pairs = {peer: _have_atomics(gpu.ordinal, ordinals[peer]) for peer in sorted(peers)}
    return [f"{gpu.uuid} and {peer}" for peer, have in pairs.items() if not have]


def _have_atomics(ordinal: int, peer: int) -> bool:
    from cuda.bindings import driver as binding

    kinds = binding.CUdevice_P2PAttribute
    native = kinds.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    devices = (driver.call("cuDeviceGet", each) for each in (ordinal, peer))
    return bool(driver.call("cuDeviceGetP2PAttribute", native, *devices))


def enter_thread(ordinal: int, what: str) -> None:
    """Make a rank's GPU current in this thread, which has none if it is new.

    Raises:
        ArgumentError: another GPU is current in this thread.
    """
    current = _current_ordinal()
    if current is None:
        _make_current(ordinal)
    elif current != ordinal:
        raise ArgumentError(
            f"{what}: expected GPU {ordinal}, to which this rank is bound, to be "
            f"current in this thread, got GPU {current}; call "
            f"numba.cuda.select_device({ordinal}) in it before"
        )


def _make_current(ordinal: int) -> None:
    """Make the GPU's primary context current, which Numba and cuda.core share."""
    if SIMULATED:
        return
    from cuda.core import Device
    from numba import cuda

    cuda.select_device(ordinal)
    Device(ordinal).set_current()


Parts = tuple[tuple[int, ...], ...]
"""The ranks of each island, in rank order; islands are in order of their first rank."""


def divide(ranks: Sequence[int], access: Matrix, most: int | None = None) -> Parts:
    """Return a node's islands: each rank joins the first one that it fits into.

    Args:
        ranks: the ranks of the node.
        access: ``access[r][s]``: whether the GPU of the r-th of them can access that of
            the s-th; None if the driver cannot answer.
        most: the most ranks of an island; None: no limit.
    """
    parts: list[list[int]] = []
    for number in range(len(ranks)):
        fitting = (
            part
            for part in parts
            if (most is None or len(part) < most)
            and all(_reach_each_other(access, number, other) for other in part)
        )
        part = next(fitting, None)
        if part is None:
            parts.append([number])
        else:
            part.append(number)
    return tuple(tuple(ranks[number] for number in part) for part in parts)


def _reach_each_other(access: Matrix, rank: int, other: int) -> bool:
    return access[rank][other] is not False and access[other][rank] is not False


def among(parts: Parts, members: Sequence[int]) -> Parts:
    """Return the islands of some of the ranks, by their new numbers.

    Args:
        parts: the islands of all ranks.
        members: the ranks, in the order of their new numbers.
    """
    where = {rank: index for index, part in enumerate(parts) for rank in part}
    groups: dict[int, list[int]] = {}
    for number, rank in enumerate(members):
        groups.setdefault(where[rank], []).append(number)
    return tuple(map(tuple, groups.values()))


def consecutive(part: Sequence[int]) -> bool:
    """Return whether ranks in ascending order follow one another."""
    return part[-1] - part[0] < len(part)


class Places:
    """Where ranks are, found once, because there may be many.

    Args:
        parts: the ranks of each island.

    Attributes:
        of: by rank, its island's number, and its own number there.
        largest: the number of ranks of the largest island.
        smallest: that of the smallest one.
        consecutive: whether each island's ranks follow one another.
        even: whether all islands have equally many ranks, which are consecutive.
    """

    def __init__(self, parts: Parts):
        self.of = {
            rank: (index, number)
            for index, part in enumerate(parts)
            for number, rank in enumerate(part)
        }
        self.largest, self.smallest = max(map(len, parts)), min(map(len, parts))
        self.consecutive = all(map(consecutive, parts))
        self.even = self.largest == self.smallest and self.consecutive


def described(parts: Parts, nodes: Sequence[str]) -> str:
    """Return "ranks 0, 1 on a, rank 2 on b", one entry an island."""
    return ", ".join(f"{name_ranks(part)} on {nodes[part[0]]}" for part in parts)
