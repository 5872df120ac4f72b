"""The description of a call, for the record and for debug mode."""

import functools
from collections.abc import Sequence

from numba_symm.arrays import ArrayView
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.transfers import Transfers
from numba_symm.launch.ranks import name_ranks
from numba_symm.record import Description


class Descriptions:
    """The descriptions of a communicator's calls; equal calls have the same one.

    Args:
        most: how many are kept.
        algorithms: whether the table's algorithms make the calls: on one island, of two
            ranks or more.

    Attributes:
        of: returns a description; see its class.
    """

    def __init__(self, most: int, algorithms: bool):
        self.of = functools.lru_cache(most)(Description)
        self._algorithms = algorithms

    def operation(
        self, given: Invocation[Operation], x: ArrayView, algorithm: str
    ) -> Description:
        """Return that of an operation.

        Args:
            given: the call, whose root and operator were checked.
            x: the input.
            algorithm: the name of the chosen algorithm.
        """
        operation = given.operation
        order = f"in {x.order or 'C'} order"
        more = []
        if operation.reduces:
            more.append(f"op {given.op!r}")
        if operation.rooted:
            more.append(f"root {given.root}")
        if given.leaves:
            more.append(f"{given.leaves} leaves")
        elif given.wire is not None:
            more.append(f"wire {given.wire!r}")
        elif self._algorithms:
            more.append(f"algorithm {algorithm!r}")
        if given.epilogue is not None:
            # Of an array, its dtype and shape; of a number, its dtype.
            kinds = "".join(
                f", {each[2].name} {each[1]}"
                if isinstance(each[0], int)
                else f", {each[0]}"
                for each in given.args
            )
            if given.epilogue.row_sum is not None:
                kinds += f", rows of {x.shape[-1] if x.shape else 1}"
            if given.second is not None:
                kinds += f", with a second output of {given.second[2].name}"
            more.append(f"epilogue {given.epilogue!r}{kinds}")
        # Where nothing is reduced, ranks may name the same bytes by different types.
        same = f"{x.size} {x.dtype.name}" if operation.reduces else f"{x.nbytes} bytes"
        words = ", ".join([f"{x.size} {x.dtype.name} {order}", *more])
        return self.of(operation.name, words, ", ".join([f"{same} {order}", *more]))

    def messages(self, what: str, transfers: Transfers) -> Description:
        """Return that of messages, or of a collective made of them."""
        to, since = _sent("to", transfers.sends), _sent("from", transfers.receives)
        return self.of(what, ", ".join(filter(None, (transfers.words, to, since))))


def _sent(where: str, messages: Sequence[Message]) -> str:
    """Return the bytes and the peers of messages in words, "" without messages.

    An example is "96 bytes to ranks 1, 2".
    """
    if not messages:
        return ""
    peers = sorted({each.peer for each in messages})
    return f"{sum(each.nbytes for each in messages)} bytes {where} {name_ranks(peers)}"
