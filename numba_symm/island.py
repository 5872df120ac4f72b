"""One island: ranks whose GPUs access each other's memory."""

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from numba_symm.backends.peers import choose_backend
from numba_symm.board import Board
from numba_symm.device import links
from numba_symm.device.polling import Guard
from numba_symm.errors import PeerAccessError
from numba_symm.failures import Failure
from numba_symm.launch import devices, nodes, ranks, tagged
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.nodes import NodeKey
from numba_symm.launch.tagged import TaggedComm
from numba_symm.launch.waiting import Wait
from numba_symm.members import Members


class Apart(PeerAccessError):
    """The ranks are not one island. Raised on all of them.

    ``comm`` is then not released, because the ranks use its messages to make several
    islands. It is released only if they are a part of a communicator.

    Attributes:
        seen: by rank, the node that it runs on.
    """

    def __init__(self, text: str, seen: Sequence[NodeKey]):
        super().__init__(text)
        self.seen = seen


class Island(Members):
    """The ranks of one node, which access each other's memory."""

    def _make(self, device: int | None) -> None:
        exchange = self.exchange
        self.parts = (tuple(range(self.world.size)),)
        self._refuse_several()
        nodes.refuse_too_many(self.world.size)
        parent, self._parent = self._parent, None  # which may end first
        presence = None
        if parent is not None and isinstance(self.comm, TaggedComm):
            other, members = parent
            presence = functools.partial(other.board.alive.part, members)
            channel = other.channel.beside(exchange, members, self.comm.tag)
        else:
            channel = IpcChannel(exchange)
        self.channel = self._undo.enter_context(channel)
        try:
            self.board = Board(exchange, self.channel, self._undo, presence)
        except BaseException as error:
            if exchange.is_everybodys(error):
                # A sibling made later uses the same sockets, and gets this number.
                self.channel.discard()
            raise
        exchange.meet_at(self.board)
        self.gpu, self.gpus, self.peer_access = devices.bind(exchange, device)
        try:
            devices.refuse_missing_access(
                self.peer_access, [each.uuid for each in self.gpus]
            )
        except PeerAccessError as error:
            raise Apart(str(error), self.seen) from error
        links.note_missing(devices.without_atomics(self.gpu, self.gpus))
        with exchange.agreed("letting the GPU reach the status board"):
            self.board.register()
        self.backend, self.refused = choose_backend(self, self.gpu.ordinal)
        self.guard = Guard(
            self.board.address,
            self.world.rank,
            self.world.size,
            math.ceil(self.timeout * 1e9),
        )

    def _refuse_several(self) -> None:
        """Raise :class:`Apart` if the ranks are on several nodes, or pretend to be."""
        if self.world.local_size < self.world.size:
            found = dict(enumerate(self.nodes))
            raise Apart(
                f"expected the ranks of an island on one node, and "
                f"{ranks.sentence(found, 'is on', 'are on')}",
                self.seen,
            )
        if self._most is not None and self._most < self.world.size:
            text = f"NUMBA_SYMM_ISLAND_SIZE={self._most} divides the ranks"
            raise Apart(text, self.seen)

    @property
    def island(self) -> "Island":
        """The island itself."""
        return self

    def within(self, what: str) -> AbstractContextManager[None]:
        """Do nothing more: the steps within an island fail on all its ranks."""
        return nullcontext()

    def _gate(self, wait: Wait) -> Failure | None:
        return self.board.gate(wait)

    def described(self) -> str:
        """Return "one, ranks 0, 1"."""
        return f"one, {ranks.name_ranks(range(self.world.size))}"

    def _release(self, error: BaseException) -> None:
        if self._part or not isinstance(error, Apart):
            super()._release(error)

    def close(self) -> None:
        """Close the board and the channel, and release ``comm``. Collective."""
        self.close_locally()
        tagged.release(self.comm)
