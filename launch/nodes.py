"""The nodes that the ranks run on, and each rank's place there."""

import socket
from dataclasses import dataclass
from pathlib import Path

from numba_symm.errors import ArgumentError
from numba_symm.launch.ranks import are_integers
from numba_symm.launch.store import StoreExchange

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks and among those of its node.

    Attributes:
        rank: this process' number, 0 to size - 1.
        size: the number of ranks.
        local_rank: its position among the ranks of its node.
        local_size: the number of ranks on that node.
        node: the node's name in texts; equal on all ranks of one node.
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


def discover(exchange: StoreExchange) -> World:
    """Return this rank's place. Collective.

    Ranks are on one node if their Linux kernels have the same boot id. Two containers
    of one node share the boot id, but not the host name.
    """
    seen = exchange.all_gather((_boot_id(), socket.gethostname()), "nodes")
    boot_id = seen[exchange.rank][0]
    local = [rank for rank, (other, _) in enumerate(seen) if other == boot_id]
    return World(
        rank=exchange.rank,
        size=exchange.size,
        local_rank=local.index(exchange.rank),
        local_size=len(local),
        # The first local rank's name, so that containers of one node agree on it.
        node=f"{seen[local[0]][1]} ({boot_id[:8]})",
    )


MOST_RANKS = 64
"""The most ranks of an island, because kernels use one bit of a word for each."""


def refuse_too_many(size: int) -> None:
    """Raise :class:`ArgumentError` for more than ``MOST_RANKS`` ranks."""
    if size > MOST_RANKS:
        raise ArgumentError(
            f"Communicator: expected at most {MOST_RANKS} ranks, got {size} on one "
            "node; make several communicators (in MPI: comm.Split)"
        )


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # in a sandbox that hides /proc
        return socket.gethostname()
