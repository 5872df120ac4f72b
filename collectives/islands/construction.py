"""The construction of communicators, of one island or of several."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from numba_symm.collectives import lifetime, warm_up
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.islands import sizes
from numba_symm.collectives.islands.binder import IslandsBinder
from numba_symm.collectives.islands.site import ALIGNED, Site, padded
from numba_symm.collectives.islands.sizes import Sizes
from numba_symm.collectives.lifetime import Options
from numba_symm.collectives.protocols.workspace import layout
from numba_symm.errors import ArgumentError, PeerAccessError, SymmError
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
    with _claimed(mine):
        try:
            return lifetime.begin(
                lambda undo: Island(mine, undo, device, timeout), options
            )
        except Apart as error:
            if not isinstance(mine, TaggedComm):
                raise PeerAccessError(
                    f"{error}; between several islands, expected a communicator of "
                    f"mpi4py's, got {comm!r}"
                ) from error
        calls = _begin(lambda undo: Islands(mine, undo, device, timeout), options)
        islands = calls.members
        assert isinstance(islands, Islands)
        if islands.shown:
            _show(f"numba-symm: islands: {islands.described()}")
        return calls


@contextmanager
def _claimed(comm: ranks.Comm | TaggedComm) -> Iterator[None]:
    """Use a duplicate in the block; report an interrupt of the block to all ranks.

    That includes an interrupt while there is neither an island nor several. A rank that
    waits by messages may get two reports; ``comm`` is not used afterwards.
    """
    try:
        waiting.claim(comm)
        yield
    except BaseException as error:
        waiting.claim(comm)  # if the interrupt came first; the others have used it
        if not isinstance(error, SymmError):
            waiting.leave(comm, error, "Communicator")
        raise


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

    def make(undo: ExitStack) -> Islands:
        device, timeout = calls.gpu.ordinal, calls.members.timeout
        parent = calls.members, members
        return Islands(
            comm, undo, device, timeout, part=True, parts=parts, parent=parent
        )

    return _begin(make, lifetime.options_of(calls))


def _begin(make: Callable[[ExitStack], Islands], options: Options) -> Calls:
    """Return the calls of a new communicator of several islands. Collective."""
    with waiting.Undo() as undo:
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
        site = Site(islands, end, staging, sizes=sizes.DEFAULT)
        calls.binder = IslandsBinder(site)
        lifetime.opened(calls)
        undo.pop_all()
    return calls


def _refuse_too_many(islands: int, limits: Sizes) -> None:
    """Raise ArgumentError if the staging memory has no room for so many islands."""
    if islands > limits.islands:
        raise ArgumentError(
            f"Communicator: expected at most {limits.islands} islands, whose parts of "
            f"a call fit into {limits.staging >> 10} KiB of staging memory, got "
            f"{islands}; make several communicators (in MPI: comm.Split)"
        )
