"""The binder: from a checked call to the launches that execute it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from numba_symm.collectives.algorithms import GENERAL
from numba_symm.collectives.kernels import barrier, transfer
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import (
    Call,
    Endpoint,
    Enqueue,
    Place,
    Series,
)
from numba_symm.collectives.protocols.credit import Message

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
        copies (``transfers.py``).
        """
        end = self.end_of_messages
        own = [
            [each for each in messages if each.peer == end.rank]
            for messages in (sends, receives)
        ]
        if not own[0]:
            return transfer.bind(end, sends, receives)
        from numba_symm.collectives.kernels import counted_copy

        launches = [counted_copy.bind(end, *both) for both in zip(*own, strict=True)]
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
