"""Islands of a run: pretended ones, and the bytes that cross between islands."""

import os
from collections.abc import Sequence
from typing import Any

from numba_symm.bench.calls import ROOT
from numba_symm.collectives.communicator import Communicator, inside

NCCL_HOST = "NCCL_HOSTID"
"""NCCL's variable for the name of a node. Ranks of different nodes exchange bytes over
NCCL's network transport, even if their GPUs have peer access."""


def pretend(size: int, ranks: Any) -> None:
    """Divide the ranks of each node into islands, for this library and for NCCL.

    Collective, before either is loaded. A variable that the user has set is kept.

    Args:
        size: the most ranks of an island.
        ranks: the mpi4py communicator.
    """
    from mpi4py import MPI

    here = ranks.Split_type(MPI.COMM_TYPE_SHARED)
    name = f"{here.bcast(ranks.rank)}-{here.rank // size}"
    here.Free()
    os.environ["NUMBA_SYMM_ISLAND_SIZE"] = str(size)
    os.environ.setdefault(NCCL_HOST, name)


def transports() -> dict[str, str]:
    """Return NCCL's settings of this process."""
    found = {name: os.environ[name] for name in os.environ if name.startswith("NCCL_")}
    return dict(sorted(found.items()))


def engine(comm: Communicator) -> str | None:
    """Return the name and version of the engine; None within one island."""
    found = inside(comm).ranks.engine
    return None if found is None else f"{found.name} ({found.version})"


def captures(comm: Communicator) -> bool:
    """Return whether a graph can capture the communicator's calls."""
    found = inside(comm).ranks.engine
    return found is None or found.capturable


def sent(comm: Communicator) -> int:
    """Return the bytes that this rank has sent to other islands so far."""
    return inside(comm).ranks.sent


def needed(operation: str, parts: Sequence[Sequence[int]], nbytes: int) -> int:
    """Return the bytes that a hierarchical algorithm sends between islands.

    All ranks' together: what an island needs of another one crosses once, reduced
    within its island if it is reduced at all. Control messages are not counted.

    Args:
        operation: its name.
        parts: the ranks of each island.
        nbytes: of the larger one of a rank's input and output.
    """
    ranks = sum(map(len, parts))
    home = {rank: index for index, part in enumerate(parts) for rank in part}
    shard, others = nbytes // ranks, len(parts) - 1
    match operation.removesuffix("_v"):
        case "all_reduce":
            return 2 * others * nbytes
        case "all_to_all":
            return shard * sum(len(part) * (ranks - len(part)) for part in parts)
        case "gather" | "scatter":
            return shard * (ranks - len(parts[home[ROOT]]))
        case "sendrecv":
            crossing = (home[rank] != home[(rank + 1) % ranks] for rank in home)
            return nbytes * sum(crossing)
        case "barrier":
            return 0
        case _:
            return others * nbytes
