"""The store of small values, and steps that are undone after a failure."""

import operator
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from numba_symm import environment, process
from numba_symm.errors import (
    ArgumentError,
    CollectiveError,
    ExchangeError,
    SymmError,
    named,
)
from numba_symm.launch import ranks, waiting
from numba_symm.launch.failures import Failure
from numba_symm.launch.ranks import Comm, TaggedComm, grouped, name_ranks, sentence
from numba_symm.launch.waiting import Wait

T = TypeVar("T")


_Contribution = tuple[bytes, Any]
"""The digest of a rank's place, which has the store's name and the step, and its value.

Not a class of its own, whose name would be sent for each rank.
"""

_DIGEST = 8  # bytes


@dataclass
class Outcomes(Generic[T]):
    """The values of the ranks at the end of a block of :meth:`StoreExchange.agreed`.

    Attributes:
        mine: this rank's, which the block may set; anything small that can be pickled.
        all: every rank's, in rank order, after the block.
        usual: another value, which is usually equal on all ranks. Otherwise the end of
            the block takes one more step, because only its digest is sent first.
        usuals: every rank's, in rank order, after the block.
    """

    mine: T | None = None
    all: list[T] = field(default_factory=list)
    usual: Any = None
    usuals: list[Any] = field(default_factory=list)


class Meeting(Protocol):
    """Exchanges values between ranks that see each other's failures.

    Within an island, that is the status board.
    """

    def all_gather(self, value: T, wait: Wait) -> list[T]:
        """Return every rank's value, or raise CollectiveError. Collective."""

    def gate(self, wait: Wait) -> Failure | None:
        """Wait for every rank. Return why none continues; None: all do. Collective."""

    def look(self) -> None:
        """Raise CollectiveError if a rank has failed."""

    def is_ahead(self, rank: int) -> bool:
        """Return whether a rank waits for this one at a later step."""

    def late(self, wait: Wait, absent: Sequence[int]) -> CollectiveError:
        """Report to all ranks that the deadline has passed. Return the error."""

    def abandon(self, cause: BaseException, operation: str) -> None:
        """Report to all ranks that this one leaves a call by an exception."""


class StoreExchange:
    """All-gathers of small values, and barriers, in the same order on every rank.

    Every message has a digest of its store and step. If the ranks are at different
    steps, they exchange the names of both, and raise an error that names each rank's
    step; no rank ever reads a value of another step. Only one thread at a time may use
    a store.

    A rank polls for the other ranks until ``timeout``. After a minute, it logs a
    warning that names the ranks for which it waits. With a communicator that is not
    mpi4py's, a rank waits in that communicator's ``allgather`` until the store uses the
    status board.

    Args:
        comm: the communicator of the ranks; no other code may send messages in it.
        prefix: the store's name, the same on all ranks.
        timeout: seconds that a step waits for other ranks; 0: indefinitely. None:
            ``NUMBA_SYMM_SETUP_TIMEOUT``, else indefinitely.
        names: for each rank, its number in error texts, if the ranks belong to a larger
            communicator; None: the rank itself.

    Attributes:
        timeout: the seconds.
        names: by rank, its number in texts.
        nodes: by rank, the name of its node, for texts; empty: texts name no nodes.
        call: the user's call to which the steps belong; "" if each step is a call.

    Raises:
        ArgumentError: ``names`` is not one integer for each rank.
    """

    def __init__(
        self,
        comm: Comm | TaggedComm,
        prefix: str,
        timeout: float | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self._comm = ranks.checked_tagged(comm)
        self._step = 0
        self._refusal: str | None = None
        self._reported: BaseException | None = None  # before there is a board
        self.meeting: Meeting | None = None
        self.timeout = environment.chosen_setup_timeout(timeout)
        self.call = ""
        self.prefix = prefix
        self.rank = comm.rank
        self.size = comm.size
        self.names = range(self.size) if names is None else _checked(names, self.size)
        self.nodes: Sequence[str] = ()
        process.watch(self)

    def disown(self) -> None:
        """Refuse steps of a forked child, because the rank is its parent."""
        self._refusal = (
            f"this process was forked from rank {self.rank} and cannot exchange values "
            f"with the other ranks; {process.ADVICE}"
        )

    def wait(self, what: str, seconds: float | None = None, limit: str = "") -> Wait:
        """Start a wait, and return it.

        Args:
            what: the call, where each step is a call.
            seconds: how long it waits at most; None: ``timeout``.
            limit: the setting that gives these seconds, as a text.
        """
        return Wait(
            self.call or what,
            rank=self.names[self.rank],
            seconds=self.timeout if seconds is None else seconds,
            limit=limit,
            names=self.names,
            nodes=self.nodes,
        )

    def look(self, wait: Wait, absent: Sequence[int]) -> None:
        """Raise if the wait for ``absent`` has lasted too long, or a rank has failed.

        Raises:
            CollectiveTimeout: on all ranks, if the store uses the status board.
            CollectiveError: a rank has failed.
        """
        if self.meeting is not None:
            self.meeting.look()
        if wait.look(absent):
            late = self.meeting.late if self.meeting is not None else Wait.error
            raise late(wait, absent)

    def is_ahead(self, rank: int) -> bool:
        """Return whether a rank is known to wait for this one at a later step."""
        return self.meeting is not None and self.meeting.is_ahead(rank)

    def leave(self, cause: BaseException) -> None:
        """Report to the others that this rank leaves with an exception. Local."""
        if self.meeting is not None:
            self.meeting.abandon(cause, self.call)
        elif cause is not self._reported:  # otherwise they raise when they read that
            self._reported = cause
            waiting.leave(self._comm, cause, self.call)

    def all_gather(self, value: T, what: str, wait: Wait | None = None) -> list[T]:
        """Return every rank's ``value``, in rank order. Collective.

        Args:
            value: anything small that can be pickled.
            what: the step's name, the same on all ranks.
            wait: the wait; None: a new one.

        Raises:
            ExchangeError: on all ranks, if they are not at the same step, now or in
                an earlier call.
            CollectiveError: a rank did not arrive in time, has left, or has ended.
        """
        if self._refusal:  # do not wait for others, which may have given up
            raise ExchangeError(self._refusal)
        mine = f"{what!r} ({self.prefix}, step {self._step})"
        place = _digest(mine)
        self._step += 1
        wait = wait or self.wait(what)
        try:
            messages = self._gathered((place, value), wait)
            if not all(_is_ours(each) and each[0] == place for each in messages):
                self._refuse_astray(messages, mine, wait)
        except BaseException as error:
            if not isinstance(error, SymmError):  # only this rank raises it
                self.leave(error)
            raise
        return [value for _, value in messages]

    def _refuse_astray(self, messages: list[Any], mine: str, wait: Wait) -> None:
        """Raise ExchangeError, now and in later steps, with each rank's place.

        Collective, unless a rank runs other code. Then the others' texts are unknown.
        """
        if all(map(_is_ours, messages)):
            found = self._gathered(mine, wait)
        else:
            found = [_place(each, mine) for each in messages]
        places = dict(zip(self.names, found, strict=True))
        self._refusal = (
            f"{sentence(places, 'is at', 'are at')}: "
            "every rank must make the same calls in the same order"
        )
        raise ExchangeError(self._refusal)

    def _gathered(self, mine: T, wait: Wait) -> list[T]:
        if self.meeting is None:
            return waiting.all_gather(self._comm, mine, wait)
        return self.meeting.all_gather(mine, wait)

    def barrier(self, what: str) -> None:
        """Return when every rank has reached this step. Collective."""
        self.all_gather(None, what)

    def together(self, what: str, call: Callable[[], T]) -> T:
        """Return ``call()``, which may block until every rank makes this call.

        Collective, once the store uses the status board. All ranks make it, or none
        does. Python's signal handlers run afterwards.

        Raises:
            CollectiveError: on all ranks: a rank has failed before.
        """
        return waiting.undisturbed(lambda: self._made_together(what, call))

    def _made_together(self, what: str, call: Callable[[], T]) -> T:
        assert self.meeting is not None
        self.barrier(what)
        # A failure may have ended the barrier on some ranks only.
        if (failure := self.meeting.gate(self.wait(what))) is not None:
            raise failure.exception()
        return call()

    def agree_equal(self, fact: str, what: str) -> None:
        """Check that every rank passes the same ``fact``. Collective.

        Args:
            fact: the value as a text, such as ``"2048 float32"``. Equal texts mean
                equal values.
            what: the operation to which it belongs.

        Raises:
            ArgumentError: on all ranks, with each rank's fact, if they differ.
        """
        text = str(fact)
        digests = self.all_gather(_digest(text), what)
        self.refuse_different(self._usuals(text, digests, what), what)

    def _usuals(self, mine: T, digests: Sequence[Any], step: str) -> list[T]:
        """Return every rank's value, whose digests all ranks have. Collective."""
        if len(set(digests)) == 1:
            return [mine] * self.size
        return self.all_gather(mine, f"{step}: values")

    def refuse_different(self, found: Sequence[str], what: str) -> None:
        """Raise ArgumentError, with each rank's fact, if the facts differ. Local.

        Args:
            found: the facts of :meth:`agree_equal`, which all ranks have gathered.
            what: the operation to which they belong.
        """
        facts = dict(zip(self.names, found, strict=True))
        if len(set(facts.values())) > 1:
            raise ArgumentError(
                f"{what}: {sentence(facts, 'has', 'have')}; "
                "every rank must pass the same"
            )

    @contextmanager
    def agreed(self, what: str) -> Iterator[Outcomes[Any]]:
        """Agree on whether a ``with`` block has succeeded on every rank.

        Collective. The block must contain local work only, because a rank that fails
        leaves it early, and would miss an exchange in the block. Each rank may set
        values, which all ranks have afterwards.

        Raises:
            SymmError: on all ranks, if the block failed on any, with the text of each
                rank that failed. The class is that of the lowest failed rank's error;
                for other errors it is SymmError. On a failed rank, its own error is
                the cause. KeyboardInterrupt and SystemExit pass unchanged there, after
                a second at most, even if other ranks have not reached this step.
        """
        step = f"{what}: outcome"
        outcomes: Outcomes[Any] = Outcomes()
        try:
            yield outcomes
        except Exception as error:
            if isinstance(error, CollectiveError) and self.meeting is not None:
                raise  # the status board reports it to all
            reports, *_ = self._outcomes((_report(error), None, None), step)
            # Frames of the library tell a caller nothing about a wrong argument.
            trace = None if isinstance(error, ArgumentError) else error.__traceback__
            own = error.with_traceback(trace)
            raise _common_error(what, reports, self.names) from own
        except BaseException as error:
            self._reported = error
            # Raise the first error even if other ranks do not reach this step.
            look = _for_others(_OUTCOMES, error)
            with suppress(SymmError), waiting.watching(look):
                self._outcomes((_report(error), None, None), step)
                error.__dict__[_MET_BY] = self._comm
            raise
        usual = None if outcomes.usual is None else _digest(outcomes.usual)
        mine = None, outcomes.mine, usual
        reports, outcomes.all, digests = self._outcomes(mine, step)
        if any(reports):
            raise _common_error(what, reports, self.names)
        outcomes.usuals = self._usuals(outcomes.usual, digests, what)

    def _outcomes(self, mine: tuple[Any, Any, Any], step: str) -> Iterator[list[Any]]:
        """Return every rank's report of an error, or None, its value, and a digest."""
        return map(list, zip(*self.all_gather(mine, step), strict=True))

    def is_everybodys(self, error: BaseException | None) -> bool:
        """Return whether every rank raises ``error`` at this step, or none an error.

        If so, the ranks are still in step, and may undo together what they did. If
        only this rank raises it, the others will not take part.
        """
        if isinstance(error, SymmError):
            return not isinstance(error, CollectiveError)
        return error is None or error.__dict__.get(_MET_BY) is self._comm


_MET_BY = "_met_by_all_of"  # an exception's attribute
_OUTCOMES = 1.0  # seconds in which an interrupted rank waits for the others


def _for_others(seconds: float, cause: BaseException) -> Callable[[], None]:
    """Return what ends an interrupted rank's wait after some seconds."""
    end = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > end:
            text = f"other ranks did not arrive within {seconds:g} s"
            raise waiting.GivenUp(text, cause)

    return look


def _digest(value: object) -> bytes:
    return blake2b(pickle.dumps(value), digest_size=_DIGEST).digest()


def _is_ours(message: object) -> TypeGuard[_Contribution]:
    match message:
        case (bytes(place), _) if len(place) == _DIGEST:
            return isinstance(message, tuple)
    return False


def _place(message: object, mine: str) -> str:
    """Return where a rank is, beside others that run other code; ``mine``: this one."""
    if _is_ours(message):
        return mine if message[0] == _digest(mine) else "another call of numba_symm's"
    return f"a call that is not numba_symm's ({type(message).__name__})"


def _report(error: BaseException) -> tuple[str, str] | None:
    """Return the class name and the text of the error that the other ranks raise."""
    kind = type(error).__name__
    advice = process.advice_for(error)
    if isinstance(error, SymmError):
        return kind, f"{error}{advice}"
    return kind, f"{kind}: {error}{advice}" if str(error) else kind


def _common_error(
    what: str, reports: list[tuple[str, str] | None], names: Sequence[int]
) -> SymmError:
    found = zip(names, reports, strict=True)
    failures = {rank: report for rank, report in found if report}
    lines = [f"{what} failed on {len(failures)} of {len(reports)} ranks:"]
    texts = {rank: text for rank, (_, text) in failures.items()}
    for text, failed in grouped(texts).items():
        lines.append(f"  {name_ranks(failed)}: {text}".replace("\n", "\n    "))
    kind = named(failures[min(failures)][0])
    return kind("\n".join(lines))


def _checked(names: Any, size: int) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, names))
    except Exception:  # an object's own method may raise anything
        found = ()
    if len(found) != size:
        raise ArgumentError(
            f"StoreExchange: names: expected {size} integers, one for each rank, got "
            f"{names!r:.100}; pass None for the ranks of comm"
        )
    return found


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
