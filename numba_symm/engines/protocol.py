"""What an engine does: it moves bytes between ranks, in the order of a stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from numba_symm.errors import CollectiveError
from numba_symm.gpu.streams import StreamOrder


class Parcel(NamedTuple):
    """What one rank sends to, or receives from, another.

    Attributes:
        peer: the other rank.
        address: where it is read, or written, in the memory of this rank's GPU.
        nbytes: how much, equal at both ends.
    """

    peer: int
    address: int
    nbytes: int


class Collective(NamedTuple):
    """A collective between all ranks by the engine itself.

    Attributes:
        name: the operation, as the communicator names it.
        source: address of the input.
        target: address of the output, which may be in place; 0: this rank has none.
        number: of elements, those of one shard if a rank has several.
        kind: their type; bytes if nothing is reduced.
        op: the operator; "" if nothing is reduced.
        root: the root, if the operation has one.
    """

    name: str
    source: int
    target: int
    number: int
    kind: str
    op: str
    root: int


EnqueueCollective = Callable[[Collective, StreamOrder | None, int], None]
"""Enqueues a collective in an order and on a stream; see :meth:`Engine.exchange`."""


class Engine(Protocol):
    """Moves bytes between the ranks of a communicator.

    Attributes:
        name: its name in ``NUMBA_SYMM_ENGINE``.
        version: the library and its version.
        capturable: whether CUDA graphs can capture :meth:`exchange`. If so, it returns
            before the bytes have been moved.
        multiprocessors: how many multiprocessors its kernels occupy.
        collectives: by operation, what enqueues one of its own.
    """

    name: str
    version: str
    capturable: bool
    multiprocessors: int
    collectives: Mapping[str, EnqueueCollective]

    def exchange(
        self,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        stream: int,
        beside: Callable[[int], None] | None = None,
        order: StreamOrder | None = None,
    ) -> None:
        """Send and receive, after all earlier work of a stream and before later work.

        The k-th parcel to a rank matches the k-th that the rank receives from this one
        in its corresponding exchange. All of them progress side by side.

        Args:
            sends: to other ranks.
            receives: from other ranks.
            stream: the handle of the stream.
            beside: enqueues other work of the call on the stream of a handle. That work
                and the parcels progress side by side: neither waits for the other.
            order: the order of the communicator's calls; ``beside`` needs its second
                side stream, because that work may use the first one.

        Raises:
            CollectiveError: the communicator has failed, or a rank is late.
        """

    def status(self) -> CollectiveError | None:
        """Return why exchanges cannot be finished, or None. Called by any thread."""

    def abort(self) -> None:
        """End exchanges that the GPU waits in; no other may follow. Local, idempotent.

        Called by any thread. Never waits.
        """

    def keep(self, *objects: Any) -> None:
        """Keep objects of an exchange that failed if their memory is still in use."""

    def settle(self) -> None:
        """Wait for threads that run kernels, after the communicator has failed."""

    def close(self) -> None:
        """Release the engine. Collective."""
