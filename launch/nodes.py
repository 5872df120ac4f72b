"""The nodes that the ranks run on, and each rank's place there."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from numba_symm.errors import ArgumentError
from numba_symm.launch.ranks import are_integers

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks and among the ranks of its node.

    Attributes:
        rank: this process's number, from 0 to size - 1.
        size: the number of ranks.
        local_rank: its position among the ranks of its node.
        local_size: the number of ranks on that node.
        node: the node's name in messages; equal on all ranks of one node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str

    def __post_init__(self) -> None:
        if not (
            are_integers(self.rank, self.size, self.local_rank, self.local_size)
            and 0 <= self.local_rank <= self.rank < self.size
            and self.local_rank < self.local_size <= self.size
        ):
            raise ArgumentError(
                "World: expected integers with 0 <= local_rank <= rank < size and "
                f"local_rank < local_size <= size, got {self}"
            )


NodeKey = tuple[bytes, str]
"""The first bytes of the boot id of the Linux kernel, and the host name."""


def here() -> NodeKey:
    """Return the node that this process runs on."""
    return _boot_id()[:8], socket.gethostname()


def place(rank: int, seen: Sequence[NodeKey]) -> tuple[World, tuple[str, ...]]:
    """Return a rank's place and, by rank, the name of its node.

    Ranks are on one node if their Linux kernels have the same boot id. Two containers
    of one node share the boot id, but not the host name.

    Args:
        rank: the rank.
        seen: by rank, what :func:`here` returned.
    """
    names: dict[bytes, str] = {}
    for boot_id, host in seen:
        # The first rank's host name, so that containers of one node agree on it.
        names.setdefault(boot_id, f"{host} ({boot_id.hex()[:8]})")
    boot_id = seen[rank][0]
    local = [other for other, each in enumerate(seen) if each[0] == boot_id]
    world = World(
        rank=rank,
        size=len(seen),
        local_rank=local.index(rank),
        local_size=len(local),
        node=names[boot_id],
    )
    return world, tuple(names[each[0]] for each in seen)


MOST_RANKS = 64
"""The most ranks of an island, because kernels use one bit of a word for each."""


def refuse_too_many(size: int) -> None:
    """Raise :class:`ArgumentError` for more than ``MOST_RANKS`` ranks."""
    if size > MOST_RANKS:
        raise ArgumentError(
            f"Communicator: expected at most {MOST_RANKS} ranks, got {size} on one "
            "node; make several communicators (in MPI: comm.Split)"
        )


def _boot_id() -> bytes:
    try:
        return bytes.fromhex(BOOT_ID.read_text().replace("-", ""))
    except OSError:  # in a sandbox that hides /proc
        return blake2b(socket.gethostname().encode()).digest()
