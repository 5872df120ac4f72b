"""The store: small values between ranks, checked to be the same step on all."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from numba_symm import environment, forks
from numba_symm.errors import (
    ArgumentError,
    CollectiveError,
    ExchangeError,
    SymmError,
    named,
)
from numba_symm.launch import waiting
from numba_symm.launch.ranks import Comm, checked, grouped, name_ranks, sentence
from numba_symm.launch.waiting import Wait

T = TypeVar("T")


@dataclass(frozen=True)
class _Message:
    prefix: str
    step: int
    what: str
    value: Any

    @property
    def place(self) -> str:
        return f"{self.what!r} ({self.prefix}, step {self.step})"


class Meeting(Protocol):
    """Where the ranks of a host exchange bytes once they have found each other."""

    def all_gather(self, data: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's bytes, or raise CollectiveError. Collective."""

    def look(self) -> None:
        """Raise CollectiveError if a rank has failed."""

    def is_ahead(self, rank: int) -> bool:
        """Return whether a rank waits for this one at a later step."""

    def late(self, wait: Wait, absent: Sequence[int]) -> CollectiveError:
        """Tell all ranks that the deadline has passed; return what to raise."""

    def abandon(self, cause: BaseException, operation: str) -> None:
        """Tell all ranks that this one leaves a call by an exception."""


class StoreExchange:
    """All-gather and barrier of small values, in the same order on every rank.

    Every message says which step of which store it belongs to. Ranks that have
    gone different ways are told apart at once, with what each was doing, instead
    of reading each other's values wrongly. One thread at a time.

    A rank waits for the others until ``timeout``, looking at them now and then: after
    a minute it warns of whom it waits for. Only communicators that are not mpi4py's
    wait as they do, until the store has a meeting place.

    Args:
        comm: the ranks; the store is the only user of its messages.
        prefix: the store's name, the same on all ranks.
        timeout: seconds that a step waits for other ranks, 0 indefinitely. None:
            ``NUMBA_SYMM_SETUP_TIMEOUT``, else indefinitely.

    Attributes:
        timeout: the seconds.
        call: the call of the user's that steps are made for; "": a step is one.
    """

    def __init__(self, comm: Comm, prefix: str, timeout: float | None = None) -> None:
        self._comm = checked(comm)
        self._step = 0
        self._astray: str | None = None
        self._meeting: Meeting | None = None
        self.timeout = environment.chosen_setup_timeout(timeout)
        self.call = ""
        self.prefix = prefix
        self.rank = comm.rank
        self.size = comm.size
        forks.watch(self)

    def disown(self) -> None:
        """Refuse a forked child's steps: the ranks know its parent."""
        self._astray = (
            f"this process was forked from rank {self.rank} and cannot exchange values "
            f"with the other ranks; {forks.ADVICE}"
        )

    def meet_at(self, meeting: Meeting) -> None:
        """Exchange all that follows there. Collective, and involves no other rank."""
        self._meeting = meeting

    def wait(self, what: str) -> Wait:
        """Return a wait that begins now."""
        return Wait(self.call or what, self.rank, self.timeout)

    def look(self, wait: Wait, absent: Sequence[int]) -> None:
        """Raise if the wait for ``absent`` has lasted too long, or a rank has failed.

        Raises:
            CollectiveTimeout: on all ranks, if the store has a meeting place.
            CollectiveError: a rank has failed.
        """
        if self._meeting is not None:
            self._meeting.look()
        if wait.look(absent):
            late = self._meeting.late if self._meeting is not None else Wait.error
            raise late(wait, absent)

    def is_ahead(self, rank: int) -> bool:
        """Return whether a rank is known to wait for this one at a later step."""
        return self._meeting is not None and self._meeting.is_ahead(rank)

    def leave(self, cause: BaseException) -> None:
        """Tell the other ranks that this one leaves the call by an exception. Local."""
        if self._meeting is not None:
            self._meeting.abandon(cause, self.call)
        else:
            waiting.leave(self._comm, cause, self.call)

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every rank's ``value``, in rank order. Collective.

        Args:
            value: anything small that can be pickled.
            what: the step's name, the same on all ranks.

        Raises:
            ExchangeError: on all ranks, if they are not at the same step, now or in
                an earlier call.
            CollectiveError: a rank did not come in time, has left, or has ended.
        """
        if self._astray:  # others may have given up: do not wait for them
            raise ExchangeError(self._astray)
        mine = _Message(self.prefix, self._step, what, value)
        self._step += 1
        try:
            messages = self._gathered(mine, self.wait(what))
        except BaseException as error:
            if not isinstance(error, SymmError):  # this rank's alone, amid the step
                self.leave(error)
            raise
        places = dict(enumerate(map(_place, messages)))
        if len(set(places.values())) > 1:
            self._astray = (
                f"{sentence(places, 'is at', 'are at')}: "
                "every rank must make the same calls in the same order"
            )
            raise ExchangeError(self._astray)
        return [message.value for message in messages]

    def _gathered(self, mine: _Message, wait: Wait) -> list[Any]:
        if self._meeting is None:
            return waiting.all_gather(self._comm, mine, wait)
        packed = self._meeting.all_gather(pickle.dumps(mine), wait)
        return [pickle.loads(each) for each in packed]

    def barrier(self, what: str) -> None:
        """Return once every rank has come to this step. Collective."""
        self.all_gather(None, what)

    def agree_equal(self, fact: str, what: str) -> None:
        """Check that every rank holds the same ``fact``. Collective.

        Args:
            fact: the value in words, such as ``"2048 float32"``; equal text is
                equal value.
            what: the operation it is an argument of.

        Raises:
            ArgumentError: on all ranks, with each rank's fact, if they differ.
        """
        facts = dict(enumerate(self.all_gather(str(fact), what)))
        if len(set(facts.values())) > 1:
            raise ArgumentError(
                f"{what}: {sentence(facts, 'has', 'have')}; "
                "every rank must pass the same"
            )

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Agree at the end of the block whether it succeeded on every rank.

        Collective. The block does local work only: a rank that fails leaves it
        early and would miss an exchange in it.

        Raises:
            SymmError: on all ranks, with each failed rank's own text, if the block
                failed on any. The class is the lowest failed rank's, SymmError for
                an error from elsewhere. On a failed rank its own error is the
                cause, except that KeyboardInterrupt and SystemExit pass unchanged.
        """
        step = f"{what}: outcome"
        try:
            yield
        except Exception as error:
            if isinstance(error, CollectiveError) and self._meeting is not None:
                raise  # all are told of it there
            reports = self.all_gather(_report(error), step)
            raise _common_error(what, reports) from error
        except BaseException as error:
            with suppress(CollectiveError):  # this one is the first to see
                self.all_gather(_report(error), step)
                error.__dict__[_MET_BY] = self._comm
            raise
        reports = self.all_gather(None, step)
        if any(reports):
            raise _common_error(what, reports)

    def is_everybodys(self, error: BaseException | None) -> bool:
        """Return whether every rank meets ``error`` at this step, or none an error.

        Then the ranks are still in step: they may undo what they did together. If it
        is this rank's alone, the others do not come.
        """
        if isinstance(error, SymmError):
            return not isinstance(error, CollectiveError)
        return error is None or error.__dict__.get(_MET_BY) is self._comm


_MET_BY = "_met_by_all_of"  # an exception's attribute


def _place(message: object) -> str:
    if isinstance(message, _Message):
        return message.place
    return f"a call that is not numba_symm's ({type(message).__name__})"


def _report(error: BaseException) -> tuple[str, str] | None:
    """Return the class name and text that the other ranks raise it with."""
    kind = type(error).__name__
    if isinstance(error, SymmError):
        return kind, str(error)
    return kind, f"{kind}: {error}" if str(error) else kind


def _common_error(what: str, reports: list[tuple[str, str] | None]) -> SymmError:
    failures = {rank: report for rank, report in enumerate(reports) if report}
    lines = [f"{what} failed on {len(failures)} of {len(reports)} ranks:"]
    texts = {rank: text for rank, (_, text) in failures.items()}
    for text, ranks in grouped(texts).items():
        lines.append(f"  {name_ranks(ranks)}: {text}".replace("\n", "\n    "))
    kind = named(failures[min(failures)][0])
    return kind("\n".join(lines))
