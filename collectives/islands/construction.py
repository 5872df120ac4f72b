"""The construction of communicators, of one island or of several."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

from numba_symm.collectives import lifetime, warm_up
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.islands.binder import IslandsBinder
from numba_symm.collectives.islands.site import ALIGNED, STAGING, Site, padded
from numba_symm.collectives.lifetime import Options
from numba_symm.collectives.protocols.workspace import layout
from numba_symm.errors import ArgumentError, PeerAccessError
from numba_symm.island import Apart, Island
from numba_symm.islands import Islands
from numba_symm.launch import ranks, waiting
from numba_symm.launch.division import among, described
from numba_symm.launch.tagged import TaggedComm
from numba_symm.launch.waiting import Wait
from numba_symm.members import patience
from numba_symm.memory.heap import Heap


def begin(
    comm: ranks.Comm,
    device: int | None,
    timeout: float | None,
    options: Options,
) -> Calls:
    """Return the calls of a new communicator. Collective.

    The ranks try to be one island first; if they are not, they are divided.
    """
    with warm_up.while_constructing(ranks.checked(comm).size):
        return _made(comm, device, timeout, options)


def _made(
    comm: ranks.Comm, device: int | None, timeout: float | None, options: Options
) -> Calls:
    mine = waiting.duplicate(comm, Wait("Communicator", comm.rank, patience()))
    try:
        island = Island(mine, device, timeout)
    except Apart as error:
        if not isinstance(mine, TaggedComm):
            raise PeerAccessError(
                f"{error}; between several islands, expected a communicator of "
                f"mpi4py's, got {comm!r}"
            ) from error
    else:
        return lifetime.begin(island, options)
    islands = Islands(mine, device, timeout)
    calls = _begin(islands, options)
    if islands.shown:
        _show(f"numba-symm: islands: {islands.described()}")
    return calls


@functools.cache  # once in a process
def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def child(
    calls: Calls,
    what: str,
    divided: Callable[[], ranks.Comm | TaggedComm | None],
    members: Sequence[int],
) -> Calls | None:
    """Return the calls of a new communicator; see :func:`lifetime.child`."""
    return lifetime.child(calls, what, divided, members, _join)


def _join(calls: Calls, comm: ranks.Comm | TaggedComm, members: Sequence[int]) -> Calls:
    """Return a new communicator of some ranks, which are one island or several."""
    parts = among(calls.members.parts, members)
    if len(parts) == 1:
        return lifetime.join(calls, comm, members)
    assert isinstance(comm, TaggedComm)  # only MPI's ranks are several islands
    timeout, ordinal = calls.members.timeout, calls.gpu.ordinal
    islands = Islands(comm, ordinal, timeout, part=True, parts=parts)
    return _begin(islands, lifetime.options_of(calls))


def _begin(islands: Islands, options: Options) -> Calls:
    """Return the calls of a new communicator of several islands. Collective."""
    inner = islands.inner
    with lifetime.undone(islands) as undo:
        settings = lifetime.agreed_settings(islands, options)
        if settings.requests:
            raise ArgumentError(
                "Communicator: expected one island for requests=True, got the islands "
                f"{described(islands.parts, islands.nodes)}; pass requests=False, and "
                "use send, recv and group"
            )
        islands.connect(settings.limit)
        heap = Heap(islands)
        undo.callback(heap.close_locally)
        start = padded(layout(inner.world.size).nbytes)
        with islands.within("Communicator"):
            more = start - layout(inner.world.size).nbytes + ALIGNED + STAGING
            order, end, memory = lifetime.joined(heap, settings.limit, more)
        staging = padded(memory.address + start)
        world = islands.world
        whole = dataclasses.replace(end, rank=world.rank, size=world.size)
        stream, debug = options.stream, settings.debug
        calls = Calls(islands, heap, order, whole, stream, debug, memory)
        calls.binder = IslandsBinder(Site(islands, end, staging))
        return lifetime.opened(calls)
