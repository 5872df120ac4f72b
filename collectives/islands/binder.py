"""The binder of several islands: from a checked call to its steps."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from numba_symm.collectives.binder import Binder, Placing
from numba_symm.collectives.islands import (
    exchanges,
    gathers,
    moves,
    own,
    reductions,
    scans,
    scatters,
)
from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.operations import OPERATIONS, Operation
from numba_symm.collectives.protocols.binding import Call, Enqueue, Series
from numba_symm.collectives.protocols.credit import Message
from numba_symm.dtypes import UserOperator
from numba_symm.errors import ArgumentError
from numba_symm.launch import ranks

STEPS: dict[str, Callable[[Site, Call], list[Enqueue]]] = {
    "all_reduce": reductions.all_reduce,
    "reduce": reductions.reduce,
    "reduce_scatter_v": reductions.reduce,  # one for each rank's shard
    "reduce_scatter": scatters.reduce_scatter,
    **{
        each.name: partial(scans.scanned, each)
        for each in OPERATIONS.values()
        if each.exchange.output.scans
    },
    "all_gather": gathers.all_gather,
    "all_to_all": exchanges.all_to_all,
    "broadcast": moves.broadcast,
}
"""By operation, the function that returns the steps of a call."""


class IslandsBinder(Binder):
    """Binds the calls of a communicator of several islands.

    Args:
        site: this rank's site.
    """

    def __init__(self, site: Site):
        super().__init__(site.end, site.beside.end)
        self._site = site

    def placing(self, places: Callable[[int], Placing]) -> "IslandsBinder":
        """Return a binder for listing kernels; see :meth:`Binder.placing`."""
        end = dataclasses.replace(self.end, place=places(self.end.size))
        return IslandsBinder(dataclasses.replace(self._site, end=end, listing=True))

    def operation(self, operation: Operation, algorithm: str, call: Call) -> Enqueue:
        """Bind a call. The steps within islands choose their algorithms themselves.

        Raises:
            ArgumentError: on all ranks: a function would not be applied in rank order.
        """
        if isinstance(call.op, UserOperator) and not call.op.commutative:
            self._refuse_interleaved(operation.name)
        found = own.call(self._site, operation, call)
        return found or Series(*STEPS[operation.name](self._site, call))

    def _refuse_interleaved(self, what: str) -> None:
        """Raise ArgumentError if an island's ranks are not consecutive."""
        parts = self._site.parts
        if any(part[-1] - part[0] >= len(part) for part in parts):
            found = "; ".join(map(ranks.name_ranks, parts))
            raise ArgumentError(
                f"{what}: expected islands of consecutive ranks for a function as op, "
                "because each island applies it to its own ranks first, got the "
                f"islands {found}; split the communicator into such islands, or pass "
                "the name of an operator"
            )

    def messages(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Enqueue:
        """Bind messages: those within the island and the others, side by side."""
        return Series(*moves.messages(self._site, sends, receives))

    def barrier(self) -> Enqueue:
        """Bind a barrier of all ranks."""
        return Series(*moves.barrier(self._site))
