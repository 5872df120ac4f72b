"""The bytes that a rank has sent to other ranks, which have not received them."""

from numba_symm.environment import message_limit


class Flow:
    """The bytes that each rank has not received of this rank's messages.

    Args:
        ranks: the number of ranks.
    """

    def __init__(self, ranks: int):
        self.limit = message_limit()
        self.unreceived = [0] * ranks
        self._messages: dict[int, tuple[int, int]] = {}

    def admits(self, dest: int, nbytes: int) -> bool:
        """Return whether a message may be sent now; above the limit, only alone."""
        before = self.unreceived[dest]
        return not (self.limit and before) or before + nbytes <= self.limit

    def sent(self, number: int, dest: int, nbytes: int) -> None:
        """Note that a message is being sent. Idempotent."""
        if number not in self._messages:
            self._messages[number] = dest, nbytes
            self.unreceived[dest] += nbytes

    def received(self, number: int) -> None:
        """Note that a message was received, or is not sent."""
        if number in self._messages:
            dest, nbytes = self._messages.pop(number)
            self.unreceived[dest] -= nbytes
