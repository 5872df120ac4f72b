"""The construction of communicators, of one island or of several.

The modules for several are imported when they are needed, because most jobs need none.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from numba_symm.collectives import lifetime
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.lifetime import Options
from numba_symm.errors import CollectiveError, PeerAccessError, SymmError
from numba_symm.island import Apart, Island
from numba_symm.launch import duplicates, ranks, waiting
from numba_symm.launch.division import among
from numba_symm.launch.tagged import TaggedComm
from numba_symm.launch.waiting import Wait
from numba_symm.members import patience

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
    from numba_symm.collectives import warm_up

    with warm_up.while_constructing(ranks.checked(comm).size):
        return _made(comm, device, timeout, options)


def _made(
    comm: ranks.Comm, device: int | None, timeout: float | None, options: Options
) -> Calls:
    duplicates.enter(comm)
    look = functools.partial(duplicates.look, comm)
    with waiting.watching(_watch_of_open(comm)), waiting.watching(look):
        while True:
            continued = duplicates.has_begun(comm)
            wait = Wait(WHAT, comm.rank, patience())
            try:
                mine = duplicates.duplicate(comm, wait)
            except BaseException as error:
                if not isinstance(error, SymmError):
                    duplicates.leave(comm, error, WHAT)
                raise
            try:
                made = made_of(mine, device, timeout, options)
            except BaseException as error:
                duplicates.give_up(comm, mine, error)
                # The call that began the duplicate was interrupted on this rank. Others
                # had it by then, and have given it up; they begin another one, too.
                refused = isinstance(mine, TaggedComm) and mine.refused
                if continued and refused and isinstance(error, CollectiveError):
                    continue
                if continued and not isinstance(error, SymmError):
                    duplicates.leave(comm, error, WHAT)  # they wait for that one
                raise
            duplicates.give_up(comm, mine)
            return made


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
    mpi = ranks.mpi()
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
        mine: the ranks; see :func:`duplicates.duplicate`.
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
        from numba_symm.collectives.islands import several

        calls, shown = several.begin(mine, device, timeout, options, seen)
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
        duplicates.claim(comm)
        yield
    except BaseException as error:
        duplicates.claim(comm)  # if the interrupt came first; the others have used it
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

    from numba_symm.collectives.islands import several

    return several.join(calls, comm, members, parts)
