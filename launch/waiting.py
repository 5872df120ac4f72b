"""How a rank waits for others, also along trees of ranks.

How a rank waits for others: it polls, and never blocks within MPI.

So Python's signal handlers run during a wait, and MPI progresses with the program's own
messages. A wait can have a deadline, and can name the ranks that it waits for.

Binomial trees of ranks, and what ranks gather along them.

Rank 0 is the root. The children of a rank are the ranks that are 1, 2, 4 … higher, as
long as this number is below the rank's lowest bit. So a rank has at most ⌈log₂ N⌉
children, and the ranks below it follow it.
"""

import copy
import math
import os
import pickle
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import starmap
from typing import Any, TypeVar

from numba_symm import environment
from numba_symm.errors import (
    CollectiveError,
    CollectiveTimeout,
    ExchangeError,
    RankLeft,
    left,
)
from numba_symm.launch import failures, ranks
from numba_symm.launch.ranks import Comm, TaggedComm, living, name_ranks


def parent_of(rank: int) -> int | None:
    """Return a rank's parent; None for the root."""
    return rank & (rank - 1) if rank else None


def children(rank: int, size: int) -> list[int]:
    """Return a rank's children, the nearest one first."""
    found, distance = [], 1
    while rank + distance < size and not rank & distance:
        found.append(rank + distance)
        distance *= 2
    return found


def packed(message: Any) -> bytes:
    """Return the bytes of a message; values that ranks have in common need few."""
    return zlib.compress(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def unpacked(data: bytes) -> Any:
    """Return the message that :func:`packed` has packed."""
    return pickle.loads(zlib.decompress(data))


@dataclass(frozen=True)
class Waiting:
    """What a rank sends that waits for others.

    Attributes:
        absent: for which ranks.
    """

    absent: Sequence[int]


@dataclass(frozen=True)
class Refusal:
    """What a rank sends that does not complete a step.

    Attributes:
        error: what the others raise.
    """

    error: CollectiveError


T = TypeVar("T")
PATIENCE = 60.0
"""Seconds after which a waiting rank warns of the ranks that it waits for."""

_SPIN = 2e-4  # seconds of a wait without sleep
_LONGEST_PAUSE = 1e-3
_LONG = 1.0

Look = Callable[[], object]
_watched: ContextVar[tuple[Look, ...]] = ContextVar("watched", default=())
unfinished: list[Any] = []
"""Requests whose memory MPI may still use."""
_dropping = threading.Lock()


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
        hint: str = failures.OTHER_CALL,
    ):
        self.what, self.hint = what, hint
        self._names, self._nodes = names, nodes
        self.limit = limit or f"set-up timeout: {seconds:g} s"
        self._rank = rank
        self._seconds = seconds
        self._began = time.monotonic()
        self._end = self._began + seconds if seconds else math.inf
        self._warn_at = self._began + PATIENCE

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
        return time.monotonic() - self._began

    @property
    def long(self) -> bool:
        """Whether it has lasted a quarter of its time, or a second."""
        return self.seconds > min(self._seconds / 4 or _LONG, _LONG)

    @property
    def margin(self) -> float:
        """A second, or half of its time."""
        return min(self._seconds / 2 or _LONG, _LONG)

    @property
    def ending(self) -> bool:
        """Whether its deadline passes within :attr:`margin`, or has passed."""
        return time.monotonic() > self._end - self.margin

    @property
    def late(self) -> bool:
        return time.monotonic() > self._end

    def end(self) -> None:
        """Make its deadline pass now, unless it has passed before."""
        self._end = min(self._end, time.monotonic())

    @property
    def overdue(self) -> bool:
        """Whether its deadline has passed a second ago, or a time as long as it."""
        return time.monotonic() > self._end + min(self._seconds or _LONG, _LONG)

    def look(self, absent: Sequence[int]) -> bool:
        """Return whether the deadline has passed. Warn once when the wait is long.

        Args:
            absent: the ranks that it waits for; empty if they are unknown.
        """
        if time.monotonic() > self._warn_at:
            self._warn_at = math.inf
            environment.warn(
                f"rank {self._rank} has {self.text(absent)} for {PATIENCE:g} s; "
                "NUMBA_SYMM_SETUP_TIMEOUT sets the seconds after which it gives up"
            )
        for look in _watched.get():
            look()
        ranks.progress()
        return self.late

    def pause(self, absent: Sequence[int]) -> bool:
        """Let other processes run for a moment, then return :meth:`look`."""
        if (seconds := self.seconds) < _SPIN:
            time.sleep(0)  # releases the interpreter, too
            os.sched_yield()
        else:
            time.sleep(min(seconds / 16, _LONGEST_PAUSE))
        return self.look(absent)

    def until(self, done: Callable[[], object]) -> None:
        """Wait until ``done()``, for ranks that nothing names.

        Raises:
            CollectiveTimeout: the deadline has passed.
        """
        while not done():
            if self.pause(()):
                raise self.error(())

    def text(self, absent: Sequence[int]) -> str:
        """Return "waited for rank 2 on b in zeros"."""
        whom = name_ranks(self._named(absent)) if absent else "other ranks"
        nodes = dict.fromkeys(self._nodes[rank] for rank in absent if self._nodes)
        where = f" on {', '.join(nodes)}" if nodes else ""
        return f"waited for {whom}{where} in {self.what}"

    def _named(self, absent: Sequence[int]) -> Sequence[int]:
        return absent if self._names is None else [self._names[r] for r in absent]

    def error(self, absent: Sequence[int]) -> CollectiveTimeout:
        """Return the error for the deadline without a status board."""
        return CollectiveTimeout(
            f"rank {self._rank} {self.text(absent)} ({self.limit})",
            ranks=(self._rank, *self._named(absent)),
            operation=self.what,
            hint=self.hint,
        )


@contextmanager
def watching(look: Callable[[], object]) -> Iterator[None]:
    """Make every wait within the block call ``look`` regularly, which may raise."""
    token = _watched.set((*_watched.get(), look))
    try:
        yield
    finally:
        _watched.reset(token)


def drop_finished() -> None:
    """Drop the requests that MPI has ended, unless another thread is doing so."""
    if not _dropping.acquire(blocking=False):  # both would free the same requests
        return
    try:
        for each in list(unfinished):
            with suppress(ranks.mpi_module().Exception):  # a failed request has ended
                if not (each[1] if isinstance(each, tuple) else each).Test():
                    continue
            unfinished.remove(each)
    finally:
        _dropping.release()


def all_gather(
    comm: Comm | TaggedComm,
    value: T,
    wait: Wait,
    error_for: Callable[[BaseException], CollectiveError] | None = None,
) -> list[T]:
    """Return every rank's ``value``, in rank order. Collective.

    Only MPI's messages can be polled for. Other communicators wait in their own way.
    A rank that raises makes all others raise, in this call or in the next one.

    Args:
        comm: the ranks.
        value: anything that can be pickled. zlib shortens what is repeated.
        wait: the wait.
        error_for: returns what the others raise for this rank's error; None: that it
            left.

    Raises:
        CollectiveTimeout: a rank has not arrived in time.
        RankLeft: a rank has left, see :func:`leave`.
        CollectiveError: a rank has refused, see :func:`gate`.
    """
    if not isinstance(comm, TaggedComm):
        return comm.allgather(value)
    step = _Step(comm, value, wait)
    try:
        return step.run()
    except BaseException as error:
        step.give_up()
        if not ranks.mpi_module().Is_finalized():
            _refuse(comm, _error_of_others(comm, error, wait.what, error_for))
        raise


class _Step:
    """One all-gather: values go up the tree of ranks to its root, and down again.

    A rank that has waited for a while sends to its neighbours in the tree for which
    ranks it waits. So errors name a rank that has not arrived, although most ranks
    exchange nothing with it. Messages between two ranks stay in order, so none of these
    is left when the step has ended.
    """

    def __init__(self, comm: TaggedComm, value: Any, wait: Wait):
        self._comm, self._wait = comm, wait
        self._parent = parent_of(comm.rank)
        self._children = children(comm.rank, comm.size)
        # The values of ranks that follow one another, by the first of these.
        self._parts: dict[int, list[Any]] = {comm.rank: [value]}
        self._data = b""  # the message by which all values have arrived
        self._waiting: dict[int, Sequence[int]] = {}  # by neighbour, for which ranks
        self._sent: Sequence[int] = ()  # the ranks of the latest such message
        self._sends: list[Any] = []
        self._receives: dict[int, list[Any]] = {}

    def run(self) -> list[Any]:
        mpi, parent = ranks.mpi_module(), self._parent
        up = [] if parent is None else [parent]
        self._await(self._children, beside=up)
        whole = [value for rank in sorted(self._parts) for value in self._parts[rank]]
        data = packed(whole)
        if parent is not None:
            self._send([parent], data)
            self._await([parent])
            whole, data = self._parts[parent], self._data
        self._send(self._children, data)
        # This rank has all values, so the step has succeeded. A rank that has received
        # this one's value may be past the step, and may have failed since.
        sent = False
        with suppress(CollectiveError, ExchangeError, mpi.Exception):
            while not (sent := mpi.Request.Testall(self._sends)):
                if self._wait.pause(()):
                    break
        if not sent:
            unfinished.extend(self._sends)
        return whole

    def give_up(self) -> None:
        unfinished.extend(self._sends)
        unfinished.extend(one for each in self._receives.values() for one in each[1:])

    def _await(self, peers: Sequence[int], beside: Sequence[int] = ()) -> None:
        """Wait for the values of neighbours.

        Args:
            peers: the neighbours.
            beside: others, which may refuse, or report for whom they wait.
        """
        while missing := self._receive(peers, beside):
            absent = sorted(
                {rank for peer in missing for rank in self._waiting.get(peer, [peer])}
            )
            try:
                late = self._wait.pause(absent)
                if late and self._reported(missing):
                    raise self._wait.error(absent)
            except CollectiveError:  # also of a rank that left after this step
                if self._receive(peers, beside):
                    raise
                return
            if self._wait.long and absent != self._sent:
                self._sent = absent
                others = [*beside, *self._children]
                others = [peer for peer in others if peer not in missing]
                self._send(others, packed(Waiting(absent)))

    def _reported(self, missing: Sequence[int]) -> bool:
        """Return whether neighbors have sent for whom they wait, or will not do so."""
        return self._wait.overdue or all(peer in self._waiting for peer in missing)

    def _receive(self, peers: Sequence[int], beside: Sequence[int]) -> list[int]:
        """Return the neighbours whose values have not arrived yet."""
        for peer in (*beside, *peers):
            while peer not in self._parts:
                found = _received(self._comm, peer, self._receives)
                if peer not in found:
                    break
                self._take(peer, *found[peer])
        return [peer for peer in peers if peer not in self._parts]

    def _take(self, peer: int, message: Any, data: bytes) -> None:
        if isinstance(message, Waiting):
            self._waiting[peer] = message.absent
        else:
            self._parts[peer], self._data = message, data

    def _send(self, peers: Sequence[int], data: bytes) -> None:
        comm = self._comm
        for peer in peers:
            with living(peer):
                begin(self._sends, comm.mpi.Isend, data, comm.ranks[peer], comm.tag)


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
        with ExitStack() as each:  # although a handler may raise
            for number in reversed(received):
                each.callback(signal.raise_signal, number)


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
    lost: Callable[[], object] | None = None,
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
    all_gather(comm, None, wait, error_for)
    try:
        wait.look(())  # refuse after a failure that is known, although all have arrived
    except BaseException as error:
        _refuse(comm, _error_of_others(comm, error, wait.what, error_for))
        raise
    seconds = environment.timeout() if answered is None else answered
    token = _watched.set((lost,) if lost else ())
    try:
        all_gather(comm, None, wait.for_answers(seconds), error_for)
    finally:
        _watched.reset(token)


def _error_of_others(
    comm: TaggedComm,
    error: BaseException,
    what: str,
    error_for: Callable[[BaseException], CollectiveError] | None = None,
) -> CollectiveError:
    if error_for is not None:
        return error_for(error)
    if isinstance(error, CollectiveError):
        return error
    if isinstance(error, GivenUp):
        error = error.cause
    text = f"rank {comm.rank} {left(error, what)}"
    return RankLeft(text, ranks=(comm.rank,), operation=what)


def _refuse(comm: TaggedComm, error: CollectiveError) -> None:
    """Make the other ranks raise an error in :func:`all_gather`. Local.

    Each rank that raises passes it on to its neighbours in the tree of ranks.
    """
    parent = parent_of(comm.rank)
    peers = children(comm.rank, comm.size)
    data = packed(Refusal(error))
    for peer in peers if parent is None else [parent, *peers]:
        with suppress(ranks.mpi_module().Exception):  # it has ended
            begin(unfinished, comm.mpi.Isend, data, comm.ranks[peer], comm.tag)


class GivenUp(ExchangeError):
    """A rank that is interrupted by ``cause`` does not wait for others any longer."""

    def __init__(self, text: str, cause: BaseException):
        super().__init__(text)
        self.cause = cause


def _received(
    comm: TaggedComm, rank: int, receives: dict[int, list[Any]]
) -> dict[int, tuple[Any, bytes]]:
    """Return a rank's message and its bytes, by rank; empty if it has not arrived.

    The receive of a long message only begins here, because its sender may die before
    MPI has all of it. Its bytes and request are in ``receives`` meanwhile.
    """
    with living(rank):
        if rank not in receives:
            status = ranks.mpi_module().Status()
            message = comm.mpi.Improbe(comm.ranks[rank], comm.tag, status)
            if message is None:
                return {}
            receives[rank] = [bytearray(status.Get_count())]
            begin(receives[rank], message.Irecv, receives[rank][0])
        if not receives[rank][1].Test():
            return {}
    data = bytes(receives.pop(rank)[0])
    found = unpacked(data)
    if isinstance(found, Refusal):
        comm.refused = True
        raise found.error
    return {rank: (found, data)}
