"""Duplicates of the user's communicators, whose messages are this library's only."""

import functools
import sys
from contextlib import suppress
from typing import Any

from numba_symm.errors import RankLeft, left
from numba_symm.launch import tagged, waiting
from numba_symm.launch.ranks import Comm, checked, is_mpi
from numba_symm.launch.tagged import Purpose, TaggedComm
from numba_symm.launch.waiting import Wait, begin

_begun: list[list[tuple[Any, Any]]] = []  # Idup's results, of each communicator


@functools.cache
def _key() -> int:
    """Return the key of a communicator's own list in ``_begun``, its attribute.

    MPI drops the attribute when the communicator is freed. A new one may have the same
    handle, but has no attribute.
    """
    create = sys.modules["mpi4py.MPI"].Comm.Create_keyval
    return int(create(delete_fn=_never_used))


def _never_used(comm: object, key: int, begun: list[tuple[Any, Any]]) -> None:
    """Give up the duplicates of a communicator that is freed before a claim."""
    _begun[:] = [each for each in _begun if each is not begun]
    waiting.unfinished.extend(begun)  # MPI may still store the handles
    begun.clear()


def duplicate(comm: Comm, wait: Wait) -> Comm | TaggedComm:
    """Return a communicator whose messages cannot mix with the user's.

    Collective. An mpi4py communicator is duplicated, see :func:`duplicates`; pass
    the result to :func:`numba_symm.launch.tagged.release` in the end. Any other object
    is returned unchanged.
    """
    comm = checked(comm)
    if not is_mpi(comm):
        return comm
    (made,) = duplicates(comm, 1, wait)
    return tagged.whole(made, owned=True)


def duplicates(comm: Any, number: int, wait: Wait) -> list[Any]:
    """Return duplicates of mpi4py's communicator. Collective.

    MPI cannot cancel this call. So a rank that is interrupted before it calls
    :func:`claim` continues with the same duplicates in its next call. Otherwise it
    might use one for another purpose than the other ranks do. All duplicates of a
    communicator have the same purposes, in the same order.

    Raises:
        CollectiveTimeout: not all ranks have arrived in time; MPI cannot name them.
    """
    begun: list[tuple[Any, Any]] | None = comm.Get_attr(_key())
    if begun is None:
        begun = []
        comm.Set_attr(_key(), begun)
    if not any(each is begun for each in _begun):
        _begun.append(begun)  # first, because an interrupt may follow the start
    for index in range(number):
        if index == len(begun):
            begin(begun, comm.Idup)
        while not begun[index][1].Test():
            if wait.pause(()):
                raise wait.error(())
    return [made for made, _ in begun[:number]]


def has_begun(comm: Comm) -> bool:
    """Return whether an earlier call has begun the next duplicate. Local."""
    return is_mpi(comm) and bool(comm.Get_attr(_key()))  # type: ignore[attr-defined]


def claim(comm: Any) -> None:
    """Note that this rank uses duplicates, so that no later call returns them. Local.

    The other ranks may wait for this rank's messages by then, so whoever calls it
    reports a later interrupt to them.

    Args:
        comm: what :func:`duplicate` returned, or one of :func:`duplicates`.
    """
    used = comm.mpi if isinstance(comm, TaggedComm) else comm
    for each in list(_begun):
        if any(made is used for made, _ in each):
            # Of more duplicates than are used now, MPI may still store the handles.
            waiting.unfinished.extend(each)
            each.clear()
            _begun[:] = [other for other in _begun if other is not each]
    waiting.drop_finished()


@functools.cache
def _given_up_key() -> int:
    """Return the key of a communicator's attribute: what :func:`give_up` notes."""
    return int(sys.modules["mpi4py.MPI"].Comm.Create_keyval())


def give_up(
    comm: Comm, mine: Comm | TaggedComm, error: BaseException | None = None
) -> None:
    """Note how the use of a duplicate has ended. Local.

    After an error, MPI may still have messages for the duplicate, so it is kept. Until
    the next one is used, a rank reports by it that it does not begin that one.

    Args:
        comm: the communicator that was duplicated.
        mine: what :func:`duplicate` returned.
        error: the error; None: nobody gives it up.
    """
    if isinstance(mine, TaggedComm):
        kept = None
        if error is not None and not mine.released:
            kept = mine.part(range(mine.size), Purpose.GIVEN_UP), str(error)
        comm.Set_attr(_given_up_key(), kept)  # type: ignore[attr-defined]


def leave(comm: Comm, cause: BaseException, what: str) -> None:
    """Report to ranks that wait for the next duplicate that this one leaves. Local.

    Args:
        comm: the communicator that is duplicated.
        cause: the exception by which this rank leaves.
        what: the call that it leaves.
    """
    reports, _ = _given_up(comm)
    if reports is None:
        return
    text = f"rank {reports.rank} {left(cause, what)}"
    error = RankLeft(text, ranks=(reports.rank,), operation=what)
    for rank in range(reports.size):
        if rank != reports.rank:
            there = reports.ranks[rank], reports.tag
            with suppress(sys.modules["mpi4py.MPI"].Exception):  # it has ended
                begin(waiting.unfinished, reports.mpi.isend, error, *there)


def look(comm: Comm) -> None:
    """Raise the error of a rank that has left, see :func:`leave`. Local."""
    reports, why = _given_up(comm)
    if reports is None:
        return
    source, tag = sys.modules["mpi4py.MPI"].ANY_SOURCE, reports.tag
    while reports.mpi.iprobe(source, tag):
        receive = functools.partial(reports.mpi.recv, None, source, tag)
        error = waiting.undisturbed(receive)
        # A rank that left the duplicate itself has been named by then.
        if str(error) not in why:
            raise error


def _given_up(comm: Comm) -> tuple[TaggedComm | None, str]:
    """Return the messages of the duplicate that was given up, and the error's text."""
    found = None
    if is_mpi(comm):
        found = comm.Get_attr(_given_up_key())  # type: ignore[attr-defined]
    return found or (None, "")
