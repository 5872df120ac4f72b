"""After a failure: a new communicator of the remaining ranks.

If a rank has died, MPI continues without it only with user-level failure mitigation
(ULFM), which the launcher switches on. Then the ranks repeat these steps as necessary:

1. They agree that all of them have arrived.
2. They make an MPI communicator of the remaining ranks.
3. They construct a communicator of this library from it.
4. They agree whether that has succeeded on all. A rank that dies before it agrees makes
   all others disagree. So all have the same communicator, or all begin again with 2.

They poll for MPI's agreements, so each wait has a deadline, and a signal can end it. An
agreement ends even if ranks have died, or die meanwhile, but MPI cannot cancel it. So a
rank that leaves a rebuild, at a signal or a deadline, keeps its agreement and the
objects that it has made. It reports that to all other ranks, which leave, too. If all
of them call ``rebuild`` again, they continue where they were.

Step 2 can only block, and would wait for a rank that has left. Therefore another
agreement precedes it, in which each rank states whether it has stayed since it began
the previous one. Signals wait for the end of this agreement, which no rank delays.

Without ULFM, all ranks must live. They take a number of tags that none of them uses, as
``split`` does, and construct a communicator with it. A new communicator of MPI's could
wait indefinitely: if an interrupt has left ``MPI_Comm_idup`` begun on some ranks only,
Open MPI makes no later communicator on these.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from numba_symm.collectives import lifetime
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.islands import construction
from numba_symm.errors import (
    ArgumentError,
    ClosedError,
    ExchangeError,
    RankLeft,
    SymmError,
    left,
)
from numba_symm.launch import ranks, waiting
from numba_symm.launch.members import patience
from numba_symm.launch.ranks import Purpose, TaggedComm, name_ranks
from numba_symm.launch.waiting import Wait

WHAT = "rebuild"

SURVIVING = "OMPI_MCA_mpi_ft_enable"
"""The variable by which Open MPI's launcher switches ULFM on in the ranks."""

START = "start the job with `numba-symm run --survive`, or with `mpirun --with-ft ulfm`"

_WELL, _STAYED = 1, 2
"""What a rank passes to an agreement, as bits: its construction has succeeded; it has
not left the rebuild meanwhile. The result has the bits that all ranks have passed."""


def survives() -> bool:
    """Return whether MPI continues after a rank has died."""
    return os.environ.get(SURVIVING, "0") not in ("", "0", "false")


def rebuilt(calls: Calls) -> Calls:
    """Return the calls of a new communicator of the remaining ranks.

    Collective over these.
    """
    comm = _checked(calls)
    comm.mpi.Set_errhandler(ranks.mpi_module().ERRORS_RETURN)
    steps = _begun.get(calls)
    if steps is None:
        steps = _begun[calls] = _Steps(calls, comm)
    made = steps.of_survivors() if survives() else steps.of_all()
    del _begun[calls]
    comm.retire()  # its messages are those of the communicator that has failed
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
            f"{WHAT}: expected a communicator that was made from mpi4py's, got one "
            "from another object; make a new Communicator from that object"
        )
    if comm.released:
        raise ClosedError(f"{WHAT}: the communicator was rebuilt before, or closed")
    if comm.size < comm.mpi.size:
        raise ArgumentError(
            f"{WHAT}: expected a communicator with all ranks of MPI's, got one with "
            f"{comm.size} of {comm.mpi.size}; rebuild the one that it was split "
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


_PROMPT = 10.0
"""Seconds in which every rank begins the second agreement after the first one."""


class _Agreement:
    """Bits that all ranks agree on. Collective.

    Args:
        mpi: the ranks.
        mine: the bits of this rank.

    Attributes:
        result: the bits that all ranks have passed, the same on all that are left.
    """

    def __init__(self, mpi: Any, mine: int):
        self._mpi, self.result = mpi, 0
        self._bits = np.array([mine], np.int32)
        self._requests: list[Any] = []
        self._ended = False

    def ended(self) -> bool:
        """Begin it, if need be, and return whether it has ended. Local."""
        if not self._requests:
            waiting.begin(self._requests, self._mpi.Iagree, self._bits)
        if not self._ended:
            well = _WELL
            try:
                if not self._requests[0].Test():
                    return False
            except ranks.mpi_module().Exception:  # on all ranks: one has died
                well = 0
            # The bits are those of all that live, also after such an error.
            self.result = int(self._bits[0]) & (_STAYED | well)
            self._ended = True
        return True


class _Steps:
    """The steps of one communicator's rebuild on this rank, which can be continued.

    Args:
        calls: the calls of the communicator.
        comm: its ranks.
    """

    def __init__(self, calls: Calls, comm: TaggedComm):
        self._calls, self._comm = calls, comm
        self._reports = comm.part(range(comm.size), Purpose.REBUILD)
        # Of which call, from which rank, and its error or its value.
        self._heard: list[tuple[int, int, Any]] = []
        self._number = 0  # of the call of rebuild; all ranks leave it, or none does
        self._first: _Agreement | None = None
        self._begun_in = 0  # the call in which the first agreement began
        self._second: _Agreement | None = None
        self._left: Any = None
        self._from(None)

    def _from(self, mine: TaggedComm | None) -> None:
        """Set the next step: 3, the construction, or 1 if ``mine`` is None."""
        self._mine, self._constructs = mine, False
        self._made: Calls | None = None
        self._failure: Exception | None = None
        self._failed_in = 0  # the call in which the construction failed

    def of_all(self) -> Calls:
        """Return a communicator of the same ranks, without ULFM."""
        members = self._calls.members

        def look() -> None:
            ended = [] if members.closed else members.board.ended()
            if ended:
                names = [members.exchange.names[rank] for rank in ended]
                raise ExchangeError(
                    f"{WHAT}: expected an MPI that continues after a rank has died, "
                    f"got one that does not, and {name_ranks(names)} ended; {START}"
                )

        self._number += 1
        look()
        with self._reported():
            with waiting.watching(look):
                mine = self._comm.child(range(self._comm.size), self._gathered)
            assert mine is not None
            _closed(self._calls)
            try:
                return _construct(self._calls, mine)
            except SymmError as error:  # of all ranks, or of one that has reported it
                failure = error
        raise failure

    def _gathered(self, mine: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective.

        The values go to rank 0 and back, with the number of this call of rebuild. So
        what an earlier call has left is not taken for a value of this one.
        """
        comm, wait = self._comm, self._wait()
        if comm.rank:
            self._send(0, mine)
            found: list[Any] = self._value_of(0, wait)
            return found
        values = [mine, *(self._value_of(rank, wait) for rank in range(1, comm.size))]
        for rank in range(1, comm.size):
            self._send(rank, values)
        return values

    def _value_of(self, rank: int, wait: Wait) -> Any:
        """Return the next value of a rank in this call of rebuild."""
        while True:
            for index, (number, source, found) in enumerate(self._heard):
                if (number, source) == (self._number, rank):
                    del self._heard[index]
                    return found
            if wait.pause([rank]):
                raise wait.error([rank])

    def of_survivors(self) -> Calls:
        """Return a communicator of the ranks that are left, by ULFM."""
        self._number += 1
        while True:
            with self._reported():
                made = self._turn()
            if made is not None:
                return made
            if self._failure is not None:  # it would fail again
                failure, self._failure = self._failure, None
                raise failure

    def _turn(self) -> Calls | None:
        """Make the steps; return None if they have failed.

        Then ``_failure`` is None if they shall be made again.
        """
        _closed(self._calls)
        if self._mine is None:
            self._meet(self._comm.mpi, _STAYED)
            self._from(ranks.whole(self._taken(), owned=False))
        assert self._mine is not None
        if not self._constructs:
            self._constructs = True
            try:
                self._made = _construct(self._calls, self._mine)
            except (SymmError, ranks.mpi_module().Exception) as error:
                self._failure, self._failed_in = error, self._number
        # Without a result, this rank has left the construction. One that failed in an
        # earlier call may have failed because another rank left.
        stayed = self._made is not None or self._failed_in == self._number
        well = self._made is not None
        result = self._meet(self._mine.mpi, stayed * _STAYED | well * _WELL)
        if result == _WELL | _STAYED and self._made is not None:
            self._mine.own()
            return self._made
        if self._made is not None:
            lifetime.close_locally(self._made, RuntimeError("a rank has died"), WHAT)
        waiting.undisturbed(lambda: self._end_turn(bool(result & _STAYED)))
        return None

    def _end_turn(self, stayed: bool) -> None:
        """Prepare the next turn, or the end of the rebuild."""
        assert self._mine is not None
        before, left, failure = self._mine.mpi, self._taken(), self._failure
        died = left.size < before.size
        before.Free()
        self._from(ranks.whole(left, owned=False))
        if stayed and not died:
            left.Free()
            self._from(None)
            self._failure = failure or ExchangeError(
                f"{WHAT}: the construction failed on another rank; look at its error"
            )

    def _meet(self, mpi: Any, mine: int) -> int:
        """Agree on bits. Unless all are well, make a communicator of who is left."""
        while True:
            if self._first is None:
                self._begun_in = self._number
                self._first = _Agreement(mpi, mine)
            self._await(self._first)
            result = self._first.result
            if result == _WELL | _STAYED or self._left is not None:
                return result
            if self._second is None:
                stayed = self._begun_in == self._number
                self._second = _Agreement(mpi, stayed * _STAYED)
            waiting.undisturbed(lambda: self._shrink(mpi))

    def _shrink(self, mpi: Any) -> None:
        assert self._second is not None
        # No rank that takes part leaves. So only a rank that has left before, which
        # reports that, or that is stopped makes this wait long.
        Wait(WHAT, self._comm.rank, _PROMPT).until(self._second.ended)
        if self._second.result & _STAYED:
            self._left = mpi.Shrink()
            self._left.Set_errhandler(ranks.mpi_module().ERRORS_RETURN)
        else:  # all ranks meet again
            self._first = self._second = None

    def _taken(self) -> Any:
        """Return the communicator that was made, and forget how."""
        left, self._left = self._left, None
        self._first = self._second = None
        return left

    def _wait(self) -> Wait:
        return Wait(WHAT, self._comm.rank, patience())

    def _await(self, agreement: _Agreement) -> None:
        # A signal between its end and the note of its result would lose the result.
        self._wait().until(partial(waiting.undisturbed, agreement.ended))

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Report to all ranks that this one leaves the block, and leave with them."""
        try:
            with waiting.watching(self._listen):
                yield
        except BaseException as error:
            if not self._leavers():
                waiting.undisturbed(partial(self._report, error))
            raise

    def _leavers(self) -> list[RankLeft]:
        """Return the errors of the ranks that have left this call of rebuild."""
        return [
            found
            for number, _, found in self._heard
            if number >= self._number and isinstance(found, RankLeft)
        ]

    def _listen(self) -> None:
        """Raise if another rank has left."""
        comm = self._reports
        for there in comm.ranks:
            with suppress(ranks.mpi_module().Exception):  # it has died
                while comm.mpi.iprobe(there, comm.tag):
                    waiting.begin(self._heard, comm.mpi.recv, None, there, comm.tag)
        for error in self._leavers():
            raise error

    def _report(self, error: BaseException) -> None:
        comm = self._reports
        names = self._calls.members.exchange.names
        text = f"rank {names[comm.rank]} {left(error, WHAT)}"
        found = RankLeft(text, ranks=(names[comm.rank],), operation=WHAT)
        for rank in range(comm.size):
            if rank != comm.rank:
                self._send(rank, found)

    def _send(self, rank: int, found: Any) -> None:
        comm = self._reports
        message = self._number, comm.rank, found
        with suppress(ranks.mpi_module().Exception):  # it has died
            waiting.begin(
                waiting.unfinished, comm.mpi.isend, message, comm.ranks[rank], comm.tag
            )


_begun: dict[Calls, _Steps] = {}
"""The rebuilds that have not ended, with memory that MPI uses."""
