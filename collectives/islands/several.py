"""The construction of communicators of several islands."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack

from numba_symm.collectives import lifetime
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.islands import sizes
from numba_symm.collectives.islands.binder import IslandsBinder
from numba_symm.collectives.islands.site import ALIGNED, Site, padded
from numba_symm.collectives.islands.sizes import Sizes
from numba_symm.collectives.lifetime import Options, Settings
from numba_symm.collectives.protocols.workspace import layout
from numba_symm.errors import ArgumentError
from numba_symm.islands import Islands
from numba_symm.launch.division import Parts, described
from numba_symm.launch.nodes import NodeKey
from numba_symm.launch.tagged import TaggedComm
from numba_symm.memory.heap import Heap


def begin(
    comm: TaggedComm,
    device: int | None,
    timeout: float | None,
    options: Options,
    seen: Sequence[NodeKey],
) -> tuple[Calls, bool]:
    """Return the calls of a new communicator, and whether to show its islands.

    Collective. ``seen`` is what :class:`Apart` has.
    """
    given = device, timeout
    calls = lifetime.begin(
        lambda undo: Islands(comm, undo, *given, seen=seen), options, _of_several
    )
    assert isinstance(calls.members, Islands)
    return calls, calls.members.shown


def join(calls: Calls, comm: TaggedComm, members: Sequence[int], parts: Parts) -> Calls:
    """Return a new communicator of some ranks of several islands. Collective."""

    def make(undo: ExitStack) -> Islands:
        device, timeout = calls.gpu.ordinal, calls.members.timeout
        parent = calls.members, members
        return Islands(
            comm, undo, device, timeout, part=True, parts=parts, parent=parent
        )

    return lifetime.begin(make, lifetime.options_of(calls), _of_several)


def _of_several(
    islands: Islands, heap: Heap, settings: Settings, undo: ExitStack
) -> Calls:
    """Return the calls of several islands. Collective."""
    inner, world = islands.inner, islands.world
    _refuse_too_many(len(islands.parts), sizes.DEFAULT)
    if settings.requests:
        raise ArgumentError(
            "Communicator: expected one island for requests=True, got the islands "
            f"{described(islands.parts, islands.nodes)}; pass requests=False, and "
            "use send, recv and group"
        )
    islands.connect(settings.limit)
    nbytes = layout(inner.world.size).nbytes
    start = padded(nbytes)
    more = start - nbytes + ALIGNED + sizes.DEFAULT.staging
    with islands.within("Communicator"):
        order, end, memory = lifetime.joined(heap, settings.limit, undo, more)
    whole = dataclasses.replace(end, rank=world.rank, size=world.size)
    given = settings.stream, settings.debug, memory
    calls = Calls(islands, heap, order, whole, *given)
    site = Site(islands, end, padded(memory.address + start), sizes=sizes.DEFAULT)
    calls.binder = IslandsBinder(site)
    return calls


def _refuse_too_many(islands: int, limits: Sizes) -> None:
    """Raise ArgumentError if the staging memory has no room for so many islands."""
    if islands > limits.islands:
        raise ArgumentError(
            f"Communicator: expected at most {limits.islands} islands, because a part "
            f"of a call for each must fit into {limits.staging >> 10} KiB of staging "
            f"memory, got {islands}; make several communicators (in MPI: comm.Split)"
        )
