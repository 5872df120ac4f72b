"""The construction of communicators of several islands."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from numba_symm.collectives import lifetime
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.islands import measured, sizes
from numba_symm.collectives.islands.binder import IslandsBinder
from numba_symm.collectives.islands.site import ALIGNED, Site, padded
from numba_symm.collectives.islands.sizes import Sizes
from numba_symm.collectives.lifetime import Options
from numba_symm.collectives.protocols.workspace import layout
from numba_symm.errors import ArgumentError
from numba_symm.islands import Islands
from numba_symm.launch.division import Parts, described
from numba_symm.launch.nodes import NodeKey
from numba_symm.launch.tagged import TaggedComm
from numba_symm.launch.undo import Undo
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
    calls = _begin(lambda undo: Islands(comm, undo, *given, seen=seen), options)
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

    return _begin(make, lifetime.options_of(calls))


def _begin(make: Callable[[ExitStack], Islands], options: Options) -> Calls:
    """Return the calls of a new communicator of several islands. Collective."""
    with Undo() as undo:
        islands = make(undo)
        inner = islands.inner
        settings = lifetime.agreed_settings(islands, options)
        _refuse_too_many(len(islands.parts), sizes.DEFAULT)
        if settings.requests:
            raise ArgumentError(
                "Communicator: expected one island for requests=True, got the islands "
                f"{described(islands.parts, islands.nodes)}; pass requests=False, and "
                "use send, recv and group"
            )
        islands.connect(settings.limit)
        limits = measured.agreed(
            islands.exchange, islands.gpu.name, islands.engine.name, sizes.DEFAULT
        )
        heap = Heap(islands)
        undo.callback(heap.close_locally)
        start = padded(layout(inner.world.size).nbytes)
        with islands.within("Communicator"):
            more = (
                start
                - layout(inner.world.size).nbytes
                + ALIGNED
                + sizes.DEFAULT.staging
            )
            order, end, memory = lifetime.joined(heap, settings.limit, more)
        staging = padded(memory.address + start)
        world = islands.world
        whole = dataclasses.replace(end, rank=world.rank, size=world.size)
        stream, debug = options.stream, settings.debug
        calls = Calls(islands, heap, order, whole, stream, debug, memory)
        site = Site(islands, end, staging, sizes=limits)
        calls.binder = IslandsBinder(site)
        lifetime.opened(calls)
        undo.pop_all()
    return calls


def _refuse_too_many(islands: int, limits: Sizes) -> None:
    """Raise ArgumentError if the staging memory has no room for so many islands."""
    if islands > limits.islands:
        raise ArgumentError(
            f"Communicator: expected at most {limits.islands} islands, because a part "
            f"of a call for each must fit into {limits.staging >> 10} KiB of staging "
            f"memory, got {islands}; make several communicators (in MPI: comm.Split)"
        )
