"""Calls between islands of one rank with the engine's own collectives.

Such calls have no steps within an island. The engine's collective replaces an exchange
of parcels where it was faster in measurements, if the result has the same bits: nothing
is reduced, or the order of the operands does not matter.
"""

from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.engines.protocol import Collective

FASTER = {
    "all_gather": (2 << 10, 512 << 10),
    "reduce_scatter": (2 << 10, 512 << 10),
    "all_reduce": (4 << 10, 1 << 20),
    "reduce": (0, 0),
    "broadcast": (0, 0),
}
"""By operation, up to and from how many bytes the engine's collective is faster.

The bytes are those of a shard, if a rank has several. They were measured on two H200,
where NCCL used sockets of the loopback interface: see bench/results/README.md,
"islands of one by NCCL". Over NVLink, the engine's is faster at almost every size.
"""

INTEGERS = {"int8", "uint8", "int32", "uint32", "int64", "uint64"}
OPERATORS = {"sum", "prod", "min", "max"}


def call(site: Site, operation: Operation, work: Call) -> Enqueue | None:
    """Return a call by the engine's own collective, or None if its steps are better.

    All ranks choose the same. Return None to a caller that lists kernels, because other
    sizes need those of the steps.
    """
    name = operation.name
    if site.largest > 1 or site.listing or name not in site.islands.engine.collectives:
        return None
    small, large = FASTER[name]
    if small < work.nbytes < large:
        return None
    kind, op, count = "uint8", "", work.nbytes
    if operation.reduces:
        if not _exact(work, site.size):
            return None
        kind, op, count = work.element.dtype.name, str(work.op), work.count
    source = work.target if operation.in_place else work.source
    given = Collective(name, source, work.target, count, kind, op, work.root)
    return site.collective(given, _sent(name, work, site.size, site.rank))


def _exact(work: Call, ranks: int) -> bool:
    """Return whether a reduction has the same bits in every order of the ranks.

    Integers wrap around. The sum and the product of two numbers are commutative; but
    that of two NaNs of ``float64`` has the payload of one of them.
    """
    kind = work.element.dtype.name
    if work.op not in OPERATORS:
        return False
    two = ranks == 2 and work.op in ("sum", "prod")
    return kind in INTEGERS or (kind == "float32" and two)


def _sent(name: str, work: Call, ranks: int, rank: int) -> int:
    """Return the bytes that a rank sends in a ring, as engines do."""
    others = ranks - 1
    if name in ("all_gather", "reduce_scatter"):
        return others * work.nbytes
    if name == "all_reduce":
        return 2 * others * work.nbytes // ranks
    last = (work.root - 1) % ranks if name == "broadcast" else work.root
    return 0 if rank == last else work.nbytes
