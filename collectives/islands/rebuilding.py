"""After a failure: a new communicator of the ranks that are left.

If a rank has died, MPI continues without it only with user-level failure mitigation
(ULFM), which the launcher switches on. Then the ranks proceed so, as often as needed:

1. They agree that all of them have arrived, by a call of MPI that can be polled, so it
   can have a deadline. It ends although ranks have died, or die meanwhile.
2. They make a communicator of MPI's of those who are left. This call blocks, but all of
   them are about to make it.
3. They construct a communicator of it.
4. They agree whether that has succeeded on all. A rank that dies before it agrees makes
   all others disagree. So all have the same communicator, or all begin again.

Without ULFM, all ranks must live. They make a duplicate of MPI's communicator, and
construct a communicator of it.
"""

import os
import sys
from typing import Any

import numpy as np

from numba_symm.collectives import lifetime
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.islands import construction
from numba_symm.errors import ArgumentError, ClosedError, ExchangeError, SymmError
from numba_symm.launch import duplicates, ranks, tagged, waiting
from numba_symm.launch.ranks import name_ranks
from numba_symm.launch.tagged import TaggedComm
from numba_symm.launch.waiting import Wait
from numba_symm.members import patience

WHAT = "rebuild"

SURVIVING = "OMPI_MCA_mpi_ft_enable"
"""The variable by which Open MPI's launcher switches ULFM on in the ranks."""

START = "start the job by `numba-symm run --survive`, or by `mpirun --with-ft ulfm`"

_pending: list[Any] = []  # requests that an interrupt has left, whose memory MPI uses


def survives() -> bool:
    """Return whether MPI continues after a rank has died."""
    return os.environ.get(SURVIVING, "0") not in ("", "0", "false")


def rebuilt(calls: Calls) -> Calls:
    """Return the calls of a new communicator of the ranks that are left.

    Collective over these.
    """
    comm = _checked(calls)
    mpi = comm.mpi
    mpi.Set_errhandler(ranks.mpi().ERRORS_RETURN)
    made = _of_survivors(calls, mpi) if survives() else _of_all(calls, mpi)
    comm.free_if_alone()  # its messages are those of the communicator that has failed
    return made


def _checked(calls: Calls) -> TaggedComm:
    """Return the ranks of a communicator that can be rebuilt, or refuse it."""
    members = calls.members
    comm = members.comm
    if not members.failed:
        raise ArgumentError(
            f"{WHAT}: expected a communicator that has failed, got one that works; "
            "call dup() for another one"
        )
    if not isinstance(comm, TaggedComm):
        raise ArgumentError(
            f"{WHAT}: expected a communicator that was made of mpi4py's, got one of "
            "another object; make a new Communicator of it"
        )
    if comm.released:
        raise ClosedError(f"{WHAT}: the communicator was rebuilt before, or closed")
    if comm.size < comm.mpi.size:
        raise ArgumentError(
            f"{WHAT}: expected a communicator of all ranks that it was made of, got "
            f"one of {comm.size} of {comm.mpi.size}; rebuild the one that it was split "
            "from, and split that again"
        )
    if survives() and not hasattr(comm.mpi, "Shrink"):
        raise ExchangeError(
            f"{WHAT}: expected mpi4py 4.1 or newer, which has Comm.Shrink, got an "
            "older one; install a newer one"
        )
    return comm


def _closed(calls: Calls) -> None:
    members = calls.members
    if not members.closed:
        with calls.thread.alone(WHAT):
            lifetime.close_locally(calls, RuntimeError(WHAT), WHAT)


def _construct(calls: Calls, mine: TaggedComm) -> Calls:
    given = calls.gpu.ordinal, calls.members.timeout, lifetime.options_of(calls)
    return construction.made_of(mine, *given)


def _of_all(calls: Calls, mpi: Any) -> Calls:
    """Return a communicator of the same ranks, without ULFM."""
    members = calls.members

    def look() -> bool:
        ended = [] if members.closed else members.board.ended()
        if ended:
            names = [members.exchange.names[rank] for rank in ended]
            raise ExchangeError(
                f"{WHAT}: expected an MPI that continues after a rank has died, got "
                f"one that does not, and {name_ranks(names)} ended; {START}"
            )
        return False

    wait = Wait(WHAT, members.world.rank, patience())
    look()
    with waiting.watching(look):
        (made,) = duplicates.duplicates(mpi, 1, wait)
    _closed(calls)
    mine = tagged.whole(made, owned=True)
    return _construct(calls, mine)


def _of_survivors(calls: Calls, mpi: Any) -> Calls:
    """Return a communicator of the ranks that are left, by ULFM."""
    _closed(calls)
    _agreed(mpi, True, calls)
    left = waiting.undisturbed(mpi.Shrink)
    while True:
        left.Set_errhandler(ranks.mpi().ERRORS_RETURN)
        mine = tagged.whole(left, owned=False)
        made, failure = None, None
        try:
            made = _construct(calls, mine)
        except (SymmError, ranks.mpi().Exception) as error:
            failure = error
        if _agreed(left, made is not None, calls) and made is not None:
            mine.own()
            return made
        if made is not None:
            lifetime.close_locally(made, RuntimeError("a rank has died"), WHAT)
        before = left
        left = waiting.undisturbed(before.Shrink)
        died = left.size < before.size
        before.Free()
        if not died:  # it would fail again
            left.Free()
            raise failure or ExchangeError(
                f"{WHAT}: the construction failed on another rank; look at its error"
            )


def _agreed(mpi: Any, well: bool, calls: Calls) -> bool:
    """Return whether all ranks pass True, and none has died since the last shrink.

    Collective. The result is the same on all ranks that are left.
    """
    wait = Wait(WHAT, calls.members.world.rank, patience())
    flag = np.array([well], np.int32)
    requests: list[Any] = []
    try:
        waiting.begin(requests, mpi.Iagree, flag)
        while not requests[0].Test():
            if wait.pause(()):
                raise wait.error(())
    except sys.modules["mpi4py.MPI"].Exception:  # on all ranks: one has died
        return False
    except BaseException:
        _pending.append((requests, flag))
        raise
    return bool(flag[0])
