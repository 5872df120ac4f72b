"""The binder: from a checked call to the launches, and to its description."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.kernels import barrier, pack, transfer
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import (
    Call,
    Endpoint,
    Enqueue,
    Place,
    Series,
)
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.select import GENERAL
from numba_symm.collectives.staging import Transfers
from numba_symm.gpu.arrays import ArrayView
from numba_symm.launch.call_records import Description
from numba_symm.launch.ranks import name_ranks

Placing = Callable[[int, int], Place | None]
"""``Endpoint.place``."""


class Binder:
    """Binds the calls of a communicator to kernels.

    Attributes:
        end: this rank's end of its island, for kernels.
        end_of_messages: the same for the kernel of messages.
    """

    def __init__(self, end: Endpoint, end_of_messages: Endpoint | None = None):
        self.end = end
        self.end_of_messages = end_of_messages or end

    def placing(self, places: Callable[[int], Placing]) -> "Binder":
        """Return a binder of the same ranks, with other places of symmetric memory.

        Args:
            places: returns ``Endpoint.place`` for a number of ranks.
        """
        return Binder(replace(self.end, place=places(self.end.size)))

    def operation(self, operation: Operation, algorithm: str, call: Call) -> Enqueue:
        """Bind a call of an operation by the algorithm of that name."""
        return operation.bind(algorithm, self.end, call)

    def staged(self, end: Endpoint, operation: Operation, call: Call) -> Enqueue:
        """Bind a call of memory that is not symmetric, by the fastest algorithm.

        ``end`` is this rank's end of the communicator.
        """
        nbytes = call.count * call.element.itemsize
        name = operation.chosen(None, nbytes, end.size, call.element, end.choices)
        if operation.algorithms[name].handshake:
            name = GENERAL
        return self.operation(operation, name, call)

    def messages(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Enqueue:
        """Bind messages, which start together.

        Those of this rank to itself have counts on the GPU. Without counts, they are
        copies (``collectives/staging.py``).
        """
        end = self.end_of_messages
        own = [
            [each for each in messages if each.peer == end.rank]
            for messages in (sends, receives)
        ]
        if not own[0]:
            return transfer.bind(end, sends, receives)
        launches = [
            pack.bind_counted_copy(end, *both) for both in zip(*own, strict=True)
        ]
        if end.size > 1:
            others = [
                [each for each in messages if each.peer != end.rank]
                for messages in (sends, receives)
            ]
            launches.append(transfer.bind(end, *others))
        return Series(*launches)

    def barrier(self) -> Enqueue:
        """Bind a barrier of all ranks."""
        return barrier.bind(self.end)


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
