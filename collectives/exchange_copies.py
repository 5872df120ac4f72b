"""All-gather, all-to-all and broadcast by the GPUs' copy engines, for the largest.

Copy engines fill the links better than kernels do, and leave the multiprocessors free.
Each rank copies straight into the others' outputs, which must be symmetric, from the
next rank on, one copy after another: side by side they share the links badly. Its own
part it copies meanwhile on a side stream.

Memory order. All ranks agree before the first copy, so nobody's output is written
before that rank's stream has come here; a digest of the call tells whether all mean
the same array. (Where that fails, the copies, already enqueued, follow all the same:
what lay there on any rank is lost then, as the error says.) A barrier follows the
copies: what all ranks have copied is there.

Where the output is not symmetric, for an all-to-all in place, whose input would be
overwritten, and for a broadcast to more than one rank, which would send the message
several times from its root, the agreement is followed by the kernel with signals.
"""

from typing import Any, NamedTuple

from numba_symm import streams
from numba_symm.collectives import (
    agreement,
    barrier,
    broadcast_signalled,
    exchange_signalled,
)
from numba_symm.collectives.exchange import EXCHANGES
from numba_symm.collectives.launches import Enqueue, InTurn
from numba_symm.device import signals
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Launch

_OPERATIONS = {
    "all_gather": signals.ALL_GATHER_COPIES,
    "all_to_all": signals.ALL_TO_ALL_COPIES,
    "broadcast": signals.BROADCAST_COPIES,
}


class Copy(NamedTuple):
    """One copy: addresses in this process, and bytes."""

    target: int
    source: int
    nbytes: int


class Copies:
    """The steps of one exchange, enqueued as often as one likes.

    Args:
        comm: the communicator.
        agree: the agreement.
        here: the copies within this GPU.
        there: those to the others, in their order.
    """

    def __init__(self, comm: Any, agree: Launch, here: list[Copy], there: list[Copy]):
        self._agree = agree
        self._here = here
        self._there = there
        self._barrier = barrier.bind(comm)
        self._order = comm.order

    def __call__(self, stream: int) -> None:
        """Enqueue all steps; ``stream`` has the last one."""
        side = self._order.side
        if self._here:
            side.follow(stream, 0)
            for copy in self._here:
                streams.copy(*copy, side.stream)
            side.mark(1)
        self._agree(stream)
        for copy in self._there:
            streams.copy(*copy, stream)
        if self._here:
            side.lead(stream, 1)
        self._barrier(stream)


def bind(
    name: str,
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int = 0,
) -> Enqueue:
    """Return what enqueues it; see ``Bind`` in ``select.py``, ``operations.py``.

    ``name`` is ``"all_gather"``, ``"all_to_all"`` or ``"broadcast"``.
    """
    part = count * element.itemsize
    found = comm.heap.everywhere(
        target, part if name == "broadcast" else part * comm.size
    )
    call = f"{name} of {count} {element.name} from {root}"
    one_way = name == "broadcast" and comm.size > 2
    overwritten = name == "all_to_all" and source == target
    if found is None or one_way or overwritten or comm.size == 1:
        agree = agreement.bind(comm, _OPERATIONS[name], f"{call}, output staged")
        args = (comm, source, target, count, element, op)
        if name == "broadcast":
            return InTurn(agree, broadcast_signalled.bind(*args, root))
        return InTurn(agree, exchange_signalled.bind(EXCHANGES[name], *args))
    number, offset, outputs = found
    agree = agreement.bind(
        comm, _OPERATIONS[name], f"{call}, output in block {number} at {offset}"
    )
    if name == "broadcast":
        others = outputs[:root] + outputs[root + 1 :]
        there = [Copy(output, source, part) for output in others]
        return Copies(comm, agree, [], there if comm.rank == root else [])

    def to(rank: int) -> Copy:
        first = source + (rank * part if name == "all_to_all" else 0)
        return Copy(outputs[rank] + comm.rank * part, first, part)

    there = [to((comm.rank + 1 + k) % comm.size) for k in range(comm.size - 1)]
    here = to(comm.rank)
    return Copies(comm, agree, [here] if here.source != here.target else [], there)
