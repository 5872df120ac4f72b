"""Engines: libraries that move bytes between the GPUs of different islands."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from numba_symm import environment
from numba_symm.engines import nccl
from numba_symm.engines.deadline import Deadline
from numba_symm.engines.mpi import (
    Direct,
    MpiEngine,
    ParcelMemory,
    Pinned,
    reads_gpu_memory,
)
from numba_symm.engines.protocol import Engine, Parcel
from numba_symm.errors import BackendError, CollectiveError
from numba_symm.gpu import streams
from numba_symm.gpu.streams import LEGACY_DEFAULT
from numba_symm.launch import ranks
from numba_symm.launch.devices import GPU, Parts
from numba_symm.launch.ranks import Purpose, TaggedComm
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait
from numba_symm.launch.watchdog import Questions
from numba_symm.memory.backends import Backend


class Joined(Protocol):
    """Ranks of several islands, such as a :class:`numba_symm.islands.Islands`."""

    comm: TaggedComm
    exchange: StoreExchange
    backend: Backend
    gpus: tuple[GPU, ...]
    nodes: tuple[str, ...]
    parts: Parts
    index: int
    local: int
    timeout: float

    def look(self) -> None: ...

    def abandon(self, cause: BaseException, operation: str) -> None: ...

    @property
    def operation(self) -> str: ...

    @property
    def questions(self) -> Questions: ...

    def wait(self, what: str) -> Wait: ...


def choose(islands: Joined, multiprocessors: int) -> Engine:
    """Return the engine between the islands, which :func:`prove` tries. Collective.

    Args:
        islands: the ranks.
        multiprocessors: how many the kernels of the communicator may occupy.

    Raises:
        SymmError: on all ranks: ``NUMBA_SYMM_ENGINE`` is wrong or differs between
            ranks, or not all ranks have the same engine.
    """
    exchange = islands.exchange
    with exchange.agreed("reading NUMBA_SYMM_ENGINE") as each:
        asked = environment.requested_engine()
        installed = nccl.found() if asked != "mpi" else nccl.Installation("", "")
        uuids = [gpu.uuid for gpu in islands.gpus]
        shared = len(set(uuids)) < len(uuids)
        fact = f"NUMBA_SYMM_ENGINE={asked}"
        each.usual = fact, installed, shared, reads_gpu_memory()
    facts, founds, sharing, direct = zip(*each.usuals, strict=True)
    exchange.refuse_different(facts, "Communicator")
    if asked != "mpi" and uses_nccl(asked, founds, any(sharing)):
        return _start_nccl(islands, multiprocessors)
    # Both ends of a message divide it in the same way.
    return _start_mpi(islands, all(direct))


def uses_nccl(
    asked: str | None, founds: Sequence[nccl.Installation], shared: bool
) -> bool:
    """Return whether the engine is NCCL; otherwise it is MPI.

    Args:
        asked: the engine in ``NUMBA_SYMM_ENGINE``, or None.
        founds: by rank, what it has of NCCL.
        shared: whether ranks share a GPU, which NCCL refuses.

    Raises:
        BackendError: some ranks cannot use NCCL, or their versions differ.
    """
    versions = {each.version for each in founds}
    if versions == {""} and asked is None:
        return False
    if len(versions) == 1 and "" not in versions:
        return asked is not None or not shared
    texts = {
        rank: each.version or f"no NCCL ({each.missing})"
        for rank, each in enumerate(founds)
    }
    found = ranks.sentence(texts, "has", "have")
    if asked is None:
        raise BackendError(
            f"Communicator: expected the same engine on all ranks, but {found}; "
            "install the same version everywhere, or set NUMBA_SYMM_ENGINE=mpi"
        )
    raise BackendError(
        "Communicator: expected NCCL on all ranks, of one version, because of "
        f"NUMBA_SYMM_ENGINE=nccl, but {found}"
    )


def _start_nccl(islands: Joined, multiprocessors: int) -> Engine:
    exchange = islands.exchange
    what = "starting engine 'nccl'"
    with ExitStack() as undo:
        with exchange.agreed(what) as each:
            # Here, because its kernel may be compiled, for which NCCL must not wait.
            deadline = Deadline(islands.wait)
            undo.callback(deadline.close)
            each.mine = nccl.unique_id() if exchange.rank == 0 else b""
        unique = each.all[0]
        with _tried(islands, what):
            engine = nccl.NcclEngine(
                unique,
                exchange.rank,
                exchange.size,
                nccl.share(multiprocessors),
                islands.wait,
                islands.look,
                lambda: islands.operation,
                deadline,
                islands.questions,
            )
            undo.callback(engine.abort)
        exchange.barrier(what)  # raises on all ranks if one has failed
        undo.pop_all()
    return engine


def _start_mpi(islands: Joined, direct: bool) -> Engine:
    exchange = islands.exchange
    with exchange.agreed("starting engine 'mpi'"):
        room: ParcelMemory = Direct() if direct else Pinned()

        def wait() -> Wait:
            return islands.wait(islands.operation)

        comm = islands.comm.part(range(exchange.size), Purpose.PARCELS)
        return MpiEngine(comm, wait, islands.look, room, islands.questions)


MOST_TRIED = 8
"""The most islands of which each tries to exchange with all others."""


def partners(islands: Joined) -> tuple[list[int], list[int]]:
    """Return the ranks that this one sends to on its rail, and those it receives from.

    A rank sends to one rank of each other island, which has the same number there,
    modulo the number of the island's ranks. If there are more than ``MOST_TRIED``
    islands, it sends to those that are 1, 2, 4 … after its own or before it.
    """
    parts, own, local = islands.parts, islands.index, islands.local
    m, mine = len(parts), len(parts[own])
    distances: Sequence[int] = range(1, m)
    if m > MOST_TRIED:
        powers = [1 << step for step in range((m - 1).bit_length())]
        distances = sorted({each % m for n in powers for each in (n, -n)})
    after = [parts[(own + distance) % m] for distance in distances]
    before = [parts[(own - distance) % m] for distance in distances]
    targets = [part[local % len(part)] for part in after]
    sources = [
        rank
        for part in before
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
    with ExitStack() as undo:
        with exchange.agreed(what):  # before other ranks wait for this one's message
            block = backend.allocate(8 * (1 + len(sources)))
            undo.callback(backend.free, block)
            backend.write(block.address, _pattern(rank))
        places = [block.address + 8 * (1 + k) for k in range(len(sources))]
        try:
            with _tried(islands, what):
                engine.exchange(
                    [Parcel(peer, block.address, 8) for peer in targets],
                    [Parcel(*each, 8) for each in zip(sources, places, strict=True)],
                    LEGACY_DEFAULT,
                )
            with exchange.agreed(what):
                for peer, place in zip(sources, places, strict=True):
                    found = backend.read(place, 8)
                    if found != _pattern(peer):
                        raise BackendError(
                            f"expected {_pattern(peer).hex()}, which rank {peer} sent, "
                            f"got {found.hex()}"
                        )
        except BaseException:
            undo.pop_all()
            engine.keep(block)  # the engine may still access the memory
            raise


@contextmanager
def _tried(islands: Joined, what: str) -> Iterator[None]:
    """Use the engine in the block, and wait for what that enqueues. Collective.

    If it fails on a rank, it ends on all ranks, because their engines may wait for that
    rank.
    """
    try:
        yield
        streams.synchronize(LEGACY_DEFAULT)
        islands.look()  # the watchdog may have ended it
    except CollectiveError:
        raise
    except BaseException as error:
        islands.abandon(error, what)
        raise


def _pattern(source: int) -> bytes:
    return f"{source:07d}\n".encode()
