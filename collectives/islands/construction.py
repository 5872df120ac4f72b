"""The construction of communicators, and the binder of several islands.

The construction of communicators, of one island or of several.

The modules for several are imported when they are needed, because most jobs need none.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from numba_symm.collectives import lifetime
from numba_symm.collectives.binder import Binder, Placing
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.islands import moves, reductions, site
from numba_symm.collectives.islands.site import ALIGNED, Site, Sizes, padded
from numba_symm.collectives.lifetime import Options, Settings
from numba_symm.collectives.operations import OPERATIONS, Operation
from numba_symm.collectives.protocols.binding import Call, Enqueue, Series
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import layout
from numba_symm.dtypes import UserOperator
from numba_symm.errors import ArgumentError, CollectiveError, PeerAccessError, SymmError
from numba_symm.islands import Islands
from numba_symm.launch import locks, ranks, waiting
from numba_symm.launch.devices import Parts, among, described
from numba_symm.launch.members import Apart, Island, patience
from numba_symm.launch.ranks import NodeKey, TaggedComm
from numba_symm.launch.waiting import Wait
from numba_symm.memory.allocator import Heap

STEPS: dict[str, Callable[[Site, Call], list[Enqueue]]] = {
    "all_reduce": reductions.all_reduce,
    "reduce": reductions.reduce,
    "reduce_scatter_v": reductions.reduce,  # one for each rank's shard
    "reduce_scatter": reductions.reduce_scatter,
    **{
        each.name: partial(reductions.scanned, each)
        for each in OPERATIONS.values()
        if each.exchange.output.scans
    },
    "all_gather": moves.all_gather,
    "all_to_all": moves.all_to_all,
    "broadcast": moves.broadcast,
}
"""By operation, the function that returns the steps of a call."""


class IslandsBinder(Binder):
    """Binds the calls of a communicator of several islands.

    Args:
        site: this rank's site.
    """

    def __init__(self, site: Site):
        super().__init__(site.end, site.beside.end)
        self._site = site

    def placing(self, places: Callable[[int], Placing]) -> "IslandsBinder":
        """Return a binder for listing kernels; see :meth:`Binder.placing`."""
        end = dataclasses.replace(self.end, place=places(self.end.size))
        return IslandsBinder(dataclasses.replace(self._site, end=end, listing=True))

    def operation(self, operation: Operation, algorithm: str, call: Call) -> Enqueue:
        """Bind a call. The steps within islands choose their algorithms themselves.

        Raises:
            ArgumentError: on all ranks: a function would not be applied in rank order.
        """
        if isinstance(call.op, UserOperator) and not call.op.commutative:
            self._refuse_interleaved(operation.name)
        return Series(*STEPS[operation.name](self._site, call))

    def _refuse_interleaved(self, what: str) -> None:
        """Raise ArgumentError if an island's ranks are not consecutive."""
        parts = self._site.parts
        if any(part[-1] - part[0] >= len(part) for part in parts):
            found = "; ".join(map(ranks.name_ranks, parts))
            raise ArgumentError(
                f"{what}: expected islands of consecutive ranks for a function as op, "
                "because each island applies it to its own ranks first, got the "
                f"islands {found}; split the communicator into such islands, or pass "
                "the name of an operator"
            )

    def messages(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Enqueue:
        """Bind messages: those within the island and the others, side by side."""
        return Series(*moves.messages(self._site, sends, receives))

    def barrier(self) -> Enqueue:
        """Bind a barrier of all ranks."""
        return Series(*moves.barrier(self._site))


def begin_several(
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
    _refuse_too_many(len(islands.parts), site.DEFAULT_SIZES)
    if settings.requests:
        raise ArgumentError(
            "Communicator: expected one island for requests=True, got the islands "
            f"{described(islands.parts, islands.nodes)}; pass requests=False, and "
            "use send, recv and group"
        )
    islands.connect(settings.limit)
    nbytes = layout(inner.world.size).nbytes
    start = padded(nbytes)
    more = start - nbytes + ALIGNED + site.DEFAULT_SIZES.staging
    with islands.within("Communicator"):
        order, end, memory = lifetime.joined(heap, settings.limit, undo, more)
    whole = dataclasses.replace(end, rank=world.rank, size=world.size)
    given = settings.stream, settings.debug, memory
    calls = Calls(islands, heap, order, whole, *given)
    here = Site(islands, end, padded(memory.address + start), sizes=site.DEFAULT_SIZES)
    calls.binder = IslandsBinder(here)
    return calls


def _refuse_too_many(islands: int, limits: Sizes) -> None:
    """Raise ArgumentError if the staging memory has no room for so many islands."""
    if islands > limits.islands:
        raise ArgumentError(
            f"Communicator: expected at most {limits.islands} islands, because a part "
            f"of a call for each must fit into {limits.staging >> 10} KiB of staging "
            f"memory, got {islands}; make several communicators (in MPI: comm.Split)"
        )


WHAT = "Communicator"

_UNSURE = 0.05  # seconds after which a wait checks whether processes have ended


def begin(
    comm: ranks.Comm,
    device: int | None,
    timeout: float | None,
    options: Options,
) -> Calls:
    """Return the calls of a new communicator. Collective.

    The ranks try to be one island first; if they are not, they are divided.
    """
    ranks.checked(comm)
    with waiting.watching(_watch_of_open(comm)):
        while True:
            continued = locks.has_begun(comm)
            mine = locks.duplicate(comm, Wait(WHAT, comm.rank, patience()))
            try:
                return made_of(mine, device, timeout, options)
            except CollectiveError:
                # The call that began the duplicate was interrupted on this rank. Others
                # had it by then, and have given it up; they begin another one, too.
                refused = isinstance(mine, TaggedComm) and mine.refused
                if not (continued and refused):
                    raise


def _watch_of_open(comm: ranks.Comm) -> Callable[[], None]:
    """Return what raises if a rank of ``comm`` has left an open communicator.

    That rank may make other calls next, such as ``rebuild``, which wait for this rank.
    MPI cannot tell it before the new communicator has messages of its own. A failure
    that this rank has raised before does not count: the program may have handled it.
    """
    if not ranks.is_mpi(comm):
        return lambda: None
    given = [
        (each, each.comm)
        for each in lifetime.open_members()
        if isinstance(each.comm, TaggedComm)
    ]
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        now = time.monotonic()
        ends, looked = (True, now) if now - looked > _UNSURE else (False, looked)
        for members, there in given:
            if members.closed:
                continue
            # Another thread may close it meanwhile.
            with suppress(TypeError, AssertionError):
                if ends:
                    members.board.report_ended(WHAT)
                failure = members.board.failure()
                if (
                    failure is not None
                    and failure.is_of_rank_that_left
                    and failure != members.known_failure
                    and _have_common(comm, there, failure.ranks)
                ):
                    members.known_failure = failure
                    raise failure.exception(
                        f"; {WHAT} does not wait for a rank that has left a "
                        "communicator that is still open"
                    )

    return look


def _have_common(comm: Any, other: TaggedComm, numbers: Sequence[int]) -> bool:
    """Return whether some ranks of another communicator are ranks of ``comm``."""
    mpi = ranks.mpi_module()
    group, others = comm.Get_group(), other.mpi.Get_group()
    try:
        there = [other.ranks[number] for number in numbers if number < other.size]
        found = mpi.Group.Translate_ranks(others, there, group)
        return any(each != mpi.UNDEFINED for each in found)
    finally:
        group.Free()
        others.Free()


def made_of(
    mine: ranks.Comm | TaggedComm,
    device: int | None,
    timeout: float | None,
    options: Options,
) -> Calls:
    """Return the calls of a communicator of ranks, by messages of its own. Collective.

    Args:
        mine: the ranks; see :func:`locks.duplicate`.
        device: as for the constructor.
        timeout: as for the constructor.
        options: as for the constructor.
    """
    with _claimed(mine):
        try:
            return lifetime.begin(
                lambda undo: Island(mine, undo, device, timeout),
                options,
                lifetime.of_one,
            )
        except Apart as error:
            seen = error.seen
            if not isinstance(mine, TaggedComm):
                raise PeerAccessError(
                    f"{error}; between several islands, expected an mpi4py "
                    f"communicator, got {mine!r}"
                ) from error

        calls, shown = begin_several(mine, device, timeout, options, seen)
        if shown:
            _show(f"numba-symm: islands: {calls.members.described()}")
        return calls


@contextmanager
def _claimed(comm: ranks.Comm | TaggedComm) -> Iterator[None]:
    """Use a duplicate in the block; report an interrupt of the block to all ranks.

    That includes an interrupt while there is neither an island nor several. A rank that
    waits by messages may get two reports; ``comm`` is not used afterwards.
    """
    try:
        locks.claim(comm)
        yield
    except BaseException as error:
        locks.claim(comm)  # if the interrupt came first; the others have used it
        if not isinstance(error, SymmError):
            waiting.leave(comm, error, WHAT)
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

    return join(calls, comm, members, parts)
