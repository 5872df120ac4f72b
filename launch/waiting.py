"""How a rank waits for others: it polls, and never blocks within MPI.

So Python's signal handlers run during a wait, and MPI progresses with the program's own
messages. A wait can have a deadline, and can name the ranks that it waits for.
"""

import copy
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import starmap
from typing import Any, TypeVar

from numba_symm import environment, waits
from numba_symm.errors import (
    CollectiveError,
    CollectiveTimeout,
    ExchangeError,
    RankLeft,
    left,
)
from numba_symm.launch import tagged
from numba_symm.launch.ranks import Comm, checked, is_mpi, name_ranks
from numba_symm.launch.tagged import TaggedComm

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a waiting rank warns of the ranks that it waits for."""

_SPIN = 2e-4  # seconds of a wait without sleep
_LONGEST_PAUSE = 1e-3

_watched: ContextVar[tuple[Callable[[], bool], ...]] = ContextVar("watched", default=())
_begun: list[list[tuple[Any, Any]]] = []  # Idup's results, of each communicator
_unfinished: list[Any] = []  # requests, whose memory MPI may still use


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
    _unfinished.extend(begun)  # MPI may still store the handles
    begun.clear()


class Wait:
    """One wait, in a call that all ranks make.

    Args:
        what: the call, as the user names it.
        rank: the rank that waits.
        seconds: how long it waits at most; 0: indefinitely.
        limit: the setting that gives these seconds, as a text.
        names: by rank, its number in texts; None: the same.
        nodes: by rank, the name of its node; empty: texts name no nodes.
        hint: another possible cause of a deadline, for the error.
    """

    def __init__(
        self,
        what: str,
        rank: int,
        seconds: float = 0,
        limit: str = "",
        names: Sequence[int] | None = None,
        nodes: Sequence[str] = (),
        hint: str = waits.OTHER_CALL,
    ):
        self.what, self.hint = what, hint
        self._names, self._nodes = names, nodes
        self.limit = limit or f"set-up timeout: {seconds:g} s"
        self._rank = rank
        self._seconds = seconds
        self._began = time.monotonic()
        self._end = self._began + seconds if seconds else math.inf
        self._warn_at = self._began + PATIENCE
        self._left = False

    def for_answers(self, seconds: float) -> "Wait":
        """Return a new wait, for ranks that have all arrived in the same call.

        Args:
            seconds: how long it waits at most if this one waits indefinitely.
        """
        found = copy.copy(self)
        if not self._seconds:
            found._seconds, found.limit = seconds, f"timeout: {seconds:g} s"
        found._began = time.monotonic()
        found._end = found._began + found._seconds if found._seconds else math.inf
        return found

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self._began

    def look(self, absent: Sequence[int]) -> bool:
        """Return whether the deadline has passed. Warn once when the wait is long.

        Args:
            absent: the ranks that it waits for; empty if they are unknown.
        """
        now = time.monotonic()
        if now > self._warn_at:
            self._warn_at = math.inf
            environment.warn(
                f"rank {self._rank} has {self.text(absent)} for {PATIENCE:g} s; "
                "NUMBA_SYMM_SETUP_TIMEOUT sets the seconds after which it gives up"
            )
        # A rank may be past it because all had arrived, which this one may see later.
        before, self._left = self._left, any(look() for look in _watched.get())
        if before and self._left:
            raise ExchangeError(
                f"rank {self._rank} {self.text(absent)}, and one of its ranks has left"
            )
        _progress()
        return now > self._end

    def pause(self, absent: Sequence[int]) -> bool:
        """Let other processes run for a moment, then return :meth:`look`."""
        seconds = self.seconds
        if seconds < _SPIN:
            time.sleep(0)  # releases the interpreter, too
            os.sched_yield()
        else:
            time.sleep(min(seconds / 16, _LONGEST_PAUSE))
        return self.look(absent)

    def text(self, absent: Sequence[int]) -> str:
        """Return "waited for rank 2 on b in zeros"."""
        whom = name_ranks(self._named(absent)) if absent else "other ranks"
        nodes = dict.fromkeys(self._nodes[rank] for rank in absent if self._nodes)
        where = f" on {', '.join(nodes)}" if nodes else ""
        return f"waited for {whom}{where} in {self.what}"

    def _named(self, absent: Sequence[int]) -> Sequence[int]:
        """Return the numbers of ranks in texts."""
        return absent if self._names is None else [self._names[r] for r in absent]

    def error(self, absent: Sequence[int]) -> CollectiveTimeout:
        """Return the error for the deadline if there is no status board."""
        return CollectiveTimeout(
            f"rank {self._rank} {self.text(absent)} ({self.limit})",
            ranks=(self._rank, *self._named(absent)),
            operation=self.what,
            hint=self.hint,
        )


@contextmanager
def watching(look: Callable[[], bool]) -> Iterator[None]:
    """Make every wait within the block call ``look`` regularly.

    It may raise, or return whether a rank that takes part in the block is past it.
    """
    token = _watched.set((*_watched.get(), look))
    try:
        yield
    finally:
        _watched.reset(token)


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
            _unfinished.extend(each)
            each.clear()
            _begun[:] = [other for other in _begun if other is not each]
    _drop_finished()


def _drop_finished() -> None:
    """Drop the requests that MPI has ended."""
    for each in list(_unfinished):
        request = each[1] if isinstance(each, tuple) else each
        try:
            ended = request.Test()
        except sys.modules["mpi4py.MPI"].Exception:  # it has failed
            ended = True
        if ended:
            with suppress(ValueError):  # another thread has dropped it
                _unfinished.remove(each)


def all_gather(comm: Comm | TaggedComm, value: T, wait: Wait) -> list[T]:
    """Return every rank's ``value``, in rank order. Collective.

    Only MPI's messages can be polled for. Other communicators wait in their own way.

    Raises:
        CollectiveTimeout: a rank has not arrived in time.
        RankLeft: a rank has left, see :func:`leave`.
        CollectiveError: a rank has refused, see :func:`gate`.
    """
    if not isinstance(comm, TaggedComm):
        return comm.allgather(value)
    mpi = sys.modules["mpi4py.MPI"]
    gathered: dict[int, Any] = {comm.rank: value}
    sends: list[Any] = []
    receives: dict[int, list[Any]] = {}

    def receive() -> list[int]:
        """Return the ranks whose messages have not arrived yet."""
        for rank in range(comm.size):
            if rank not in gathered:
                gathered.update(_received(comm, rank, receives))
        return [rank for rank in range(comm.size) if rank not in gathered]

    try:
        _send_to_others(comm, value, sends)
        while absent := receive():
            try:
                if wait.pause(absent):
                    raise wait.error(absent)
            except CollectiveError:  # also of a rank that left after this step
                if receive():
                    raise
        # This rank has all values, so the step has succeeded. A rank that has received
        # this one's value may be past the step, and may have failed since.
        with suppress(CollectiveError, ExchangeError):
            while not mpi.Request.testall(sends)[0]:
                if wait.pause(()):
                    break
        if not mpi.Request.testall(sends)[0]:
            _unfinished.extend(sends)
    except BaseException:
        _unfinished.extend(sends)
        for requests in receives.values():
            _unfinished.extend(requests)
        raise
    return [gathered[rank] for rank in range(comm.size)]


def undisturbed(call: Callable[[], T]) -> T:
    """Return ``call()``. Python's signal handlers run after it, not during it.

    It is for calls that block in MPI until every rank makes them, if all ranks are
    about to do so. It is also for what cannot be undone if it is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()  # no handler runs here
    received: list[int] = []
    handlers: dict[int, Any] = {}
    done = False

    def later(number: int, frame: Any) -> None:
        if done:  # a handler raised before this one's was restored
            handlers[number](number, frame)
        else:
            received.append(number)

    try:
        for number in map(int, signal.valid_signals()):
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, later)
        return call()
    finally:
        done = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


class Undo(ExitStack):
    """Undoes steps, also those that a signal handler interrupts between two of them.

    ``ExitStack`` catches what a step raises, and continues. But a handler may raise
    while no step runs.
    """

    def __exit__(self, *error: Any) -> bool:
        """Undo the steps in reverse order."""
        try:
            return bool(super().__exit__(*error))
        except BaseException as later:
            super().__exit__(type(later), later, later.__traceback__)
            raise


def begin(into: list[Any], call: Callable[..., Any], *args: Any) -> None:
    """Make a call of MPI, and append its result, such as a request, to a list.

    No Python function is between MPI and the list, because a signal handler could raise
    there. The result would be lost, and MPI would use a request's memory later.
    """
    into.extend(starmap(call, (args,)))


def leave(comm: Comm | TaggedComm, cause: BaseException, what: str) -> None:
    """Report to ranks that wait in :func:`all_gather` that this rank leaves. Local.

    Args:
        comm: this library's own communicator, which is not used afterwards.
        cause: the exception by which this rank leaves.
        what: the call that it leaves.
    """
    if isinstance(comm, TaggedComm) and not comm.released:
        _refuse(comm, _error_of_others(comm, cause, what))


def gate(
    comm: TaggedComm,
    wait: Wait,
    error_for: Callable[[BaseException], CollectiveError] | None = None,
    lost: Callable[[], bool] | None = None,
    answered: float | None = None,
) -> None:
    """Return on all ranks after all have arrived, or raise on all. Collective.

    A rank that raises before all have arrived refuses, and the others raise its error.
    The others wait for the answer of each rank, whatever fails meanwhile. Otherwise
    some might continue, and others not. If a rank dies or stops before its answer, this
    wait ends at its deadline. Then ranks that have all answers continue, and this
    rank's refusal ends their next step.

    Args:
        comm: the ranks.
        wait: the wait.
        error_for: returns what the others raise for this rank's error; None: that it
            left.
        lost: called while this rank waits for answers; raises if a rank gives none.
        answered: seconds in which ranks that have arrived answer, if ``wait`` lasts
            indefinitely; None: ``NUMBA_SYMM_TIMEOUT``.
    """
    try:
        all_gather(comm, None, wait)
        wait.look(())  # refuse after a failure that is known, although all have arrived
        seconds = environment.timeout() if answered is None else answered
        token = _watched.set((lost,) if lost else ())
        try:
            all_gather(comm, None, wait.for_answers(seconds))
        finally:
            _watched.reset(token)
    except BaseException as error:
        if not sys.modules["mpi4py.MPI"].Is_finalized():
            reason = (
                error_for(error)
                if error_for
                else _error_of_others(comm, error, wait.what)
            )
            _refuse(comm, reason)
        raise


def _error_of_others(
    comm: TaggedComm, error: BaseException, what: str
) -> CollectiveError:
    if isinstance(error, CollectiveError):
        return error
    text = f"rank {comm.rank} {left(error, what)}"
    return RankLeft(text, ranks=(comm.rank,), operation=what)


def _refuse(comm: TaggedComm, error: CollectiveError) -> None:
    """Make the other ranks raise an error in :func:`all_gather`. Local."""
    _send_to_others(comm, _Refusal(error), _unfinished)


@dataclass(frozen=True)
class _Refusal:
    error: CollectiveError


def _send_to_others(comm: TaggedComm, value: object, sends: list[Any]) -> None:
    """Start to send a value; append the requests to a list."""
    for rank, there in enumerate(comm.ranks):
        if rank != comm.rank:
            begin(sends, comm.mpi.isend, value, there, comm.tag)


def has_sent(comm: Comm | TaggedComm, rank: int) -> bool:
    """Return whether a rank's message of the next :func:`all_gather` has arrived."""
    if not isinstance(comm, TaggedComm):
        return False
    return bool(comm.mpi.iprobe(comm.ranks[rank], comm.tag))


def _received(
    comm: TaggedComm, rank: int, receives: dict[int, list[Any]]
) -> dict[int, Any]:
    """Return a rank's message, by rank; empty if it has not arrived.

    The receive of a long message only begins here, because its sender may die before
    MPI has all of it. Its request is in ``receives`` meanwhile.
    """
    requests = receives.setdefault(rank, [])
    try:
        if not requests:
            message = comm.mpi.improbe(comm.ranks[rank], comm.tag)
            if message is None:
                return {}
            begin(requests, message.irecv)
        arrived, found = requests[0].test()
    except sys.modules["mpi4py.MPI"].Exception as error:
        raise RankLeft(
            f"rank {rank} has ended, as MPI reports ({error})", ranks=(rank,)
        ) from error
    if not arrived:
        return {}
    del receives[rank]
    if isinstance(found, _Refusal):
        raise found.error
    return {rank: found}


def _progress() -> None:
    """Let MPI make progress, which it does only within its calls.

    A peer may arrive only after this process has received the peer's message.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main():
        mpi.COMM_SELF.Iprobe()
