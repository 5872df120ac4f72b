"""The binder: from a checked call to the launches that do it."""

from collections.abc import Sequence

from numba_symm.collectives.kernels import barrier, transfer
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import Call, Endpoint, Enqueue


class Binder:
    """Binds the calls of a communicator to kernels.

    Args:
        end: this rank's end of the communicator.
    """

    def __init__(self, end: Endpoint):
        self._end = end

    def operation(self, operation: Operation, algorithm: str, call: Call) -> Enqueue:
        """Bind a call of an operation by the algorithm of that name."""
        return operation.bind(algorithm, self._end, call)

    def messages(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Enqueue:
        """Bind messages to and from other ranks, which start together."""
        return transfer.bind(self._end, sends, receives)

    def barrier(self) -> Enqueue:
        """Bind a barrier of all ranks."""
        return barrier.bind(self._end)
