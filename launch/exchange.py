"""The store: small values between ranks, checked to be the same step on all."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from numba_symm.errors import ArgumentError, ExchangeError, SymmError, named
from numba_symm.launch.ranks import Comm, checked, grouped, name_ranks, sentence

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


class StoreExchange:
    """All-gather and barrier of small values, in the same order on every rank.

    Every message says which step of which store it belongs to. Ranks that have
    gone different ways are told apart at once, with what each was doing, instead
    of reading each other's values wrongly. One thread at a time.

    Args:
        comm: the ranks; the store is the only user of its messages.
        prefix: the store's name, the same on all ranks.
    """

    def __init__(self, comm: Comm, prefix: str) -> None:
        self._comm = checked(comm)
        self._step = 0
        self._astray: str | None = None
        self.prefix = prefix
        self.rank = comm.rank
        self.size = comm.size

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every rank's ``value``, in rank order. Collective.

        Args:
            value: anything small that can be pickled.
            what: the step's name, the same on all ranks.

        Raises:
            ExchangeError: on all ranks, if they are not at the same step, now or in
                an earlier call.
        """
        if self._astray:  # others may have given up: do not wait for them
            raise ExchangeError(self._astray)
        mine = _Message(self.prefix, self._step, what, value)
        self._step += 1
        messages = self._comm.allgather(mine)
        places = dict(enumerate(map(_place, messages)))
        if len(set(places.values())) > 1:
            self._astray = (
                f"{sentence(places, 'is at', 'are at')}: "
                "every rank must make the same calls in the same order"
            )
            raise ExchangeError(self._astray)
        return [message.value for message in messages]

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
        facts = dict(enumerate(self.all_gather(fact, what)))
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
        except BaseException as error:
            reports = self.all_gather(_report(error), step)
            if not isinstance(error, Exception):
                raise
            raise _common_error(what, reports) from error
        reports = self.all_gather(None, step)
        if any(reports):
            raise _common_error(what, reports)


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
