"""Engines: libraries that move bytes between the GPUs of different islands."""

from typing import Protocol

from numba_symm import environment, streams
from numba_symm.backends.protocol import Backend
from numba_symm.engines.mpi import (
    Direct,
    MpiEngine,
    Pinned,
    Room,
    reads_gpu_memory,
)
from numba_symm.engines.protocol import Engine, Parcel
from numba_symm.environment import SIMULATED
from numba_symm.errors import BackendError
from numba_symm.launch import ranks
from numba_symm.launch.islands import Parts
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait
from numba_symm.streams import LEGACY_DEFAULT


class Joined(Protocol):
    """Ranks of several islands, such as a :class:`numba_symm.islands.Islands`."""

    comm: ranks.Comm
    exchange: StoreExchange
    backend: Backend
    parts: Parts
    index: int
    local: int

    def look(self) -> None: ...  # noqa: D102

    @property
    def operation(self) -> str: ...  # noqa: D102

    def wait(self, what: str) -> Wait: ...  # noqa: D102


def choose(islands: Joined) -> Engine:
    """Return an engine that works between the islands. Collective.

    Raises:
        SymmError: on all ranks: ``NUMBA_SYMM_ENGINE`` is wrong or differs between
            ranks, or the engine does not work.
    """
    exchange = islands.exchange
    with exchange.agreed("reading NUMBA_SYMM_ENGINE"):
        asked = environment.requested_engine()
    exchange.agree_equal(f"NUMBA_SYMM_ENGINE={asked}", "Communicator")
    made = lambda: ranks.duplicate(islands.comm)  # noqa: E731
    comm = exchange.together("an engine's messages", made)
    with exchange.agreed("starting engine 'mpi'"):
        direct = reads_gpu_memory()
    # Both ends of a message divide it in the same way.
    direct = all(exchange.all_gather(direct, "whether MPI reads the memory of GPUs"))
    with exchange.agreed("starting engine 'mpi'"):
        room: Room = Direct() if direct else Pinned()

        def wait() -> Wait:
            return islands.wait(islands.operation)

        engine = MpiEngine(comm, wait, islands.look, room)
    try:
        prove(islands, engine)
    except BaseException as error:
        if exchange.is_everybodys(error):
            engine.close()
        raise
    return engine


def partners(islands: Joined) -> tuple[list[int], list[int]]:
    """Return whom this rank sends to on its rail, and whom it receives from there.

    A rank sends to one rank of each other island: the one with its own number there,
    or its remainder in an island of fewer ranks.
    """
    parts, own, local = islands.parts, islands.index, islands.local
    others = [part for index, part in enumerate(parts) if index != own]
    targets = [part[local % len(part)] for part in others]
    mine = len(parts[own])
    sources = [
        rank
        for part in others
        for number, rank in enumerate(part)
        if number % mine == local
    ]
    return targets, sources


def prove(islands: Joined, engine: Engine) -> None:
    """Send a message along the rails, and check what arrives. Collective.

    Raises:
        SymmError: on all ranks, if a step failed or a byte is wrong on any.
    """
    exchange, backend = islands.exchange, islands.backend
    rank, what = exchange.rank, f"trying engine {engine.name!r}"
    targets, sources = partners(islands)
    with exchange.agreed(what):
        block = backend.allocate(8 * (1 + len(sources)))
        try:
            backend.write(block.address, _pattern(rank))
            places = [block.address + 8 * (1 + k) for k in range(len(sources))]
            engine.exchange(
                [Parcel(peer, block.address, 8) for peer in targets],
                [Parcel(*each, 8) for each in zip(sources, places, strict=True)],
                LEGACY_DEFAULT,
            )
            if not SIMULATED:
                streams.synchronize(LEGACY_DEFAULT)
            for peer, place in zip(sources, places, strict=True):
                found = backend.read(place, 8)
                if found != _pattern(peer):
                    raise BackendError(
                        f"expected {_pattern(peer).hex()}, which rank {peer} sent, got "
                        f"{found.hex()}"
                    )
        finally:
            backend.free(block)


def _pattern(source: int) -> bytes:
    return f"{source:07d}\n".encode()
