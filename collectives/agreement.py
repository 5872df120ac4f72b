"""Decides whether a call may run: this rank, and in debug mode all ranks, check it."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba_symm.collectives.enqueueing import Enqueuer
from numba_symm.members import Members

T = TypeVar("T")
A = TypeVar("A")


class Agreement:
    """Prepares calls; in debug mode, the ranks then compare them.

    Args:
        members: the ranks.
        enqueuer: makes the communicator fail after an error that is not a refusal.
        debug: whether the ranks compare their calls.

    Attributes:
        debug: the same.
    """

    def __init__(self, members: Members, enqueuer: Enqueuer, debug: bool):
        self.debug = debug
        self._members = members
        self._enqueuer = enqueuer

    def made(self, what: str, prepare: Callable[..., T], *args: Any) -> T:
        """Return ``prepare(*args)``, or raise why this rank may not make the call.

        Args:
            what: the call.
            prepare: checks the arguments of this rank, and binds the call to kernels.
            *args: these arguments.

        Raises:
            ClosedError: the communicator was closed.
            CollectiveError: it has failed. Argument errors are raised before that.
        """
        self._members.check_open()
        try:
            made = prepare(*args)
        except BaseException as error:
            self._enqueuer.give_up_unless_refused(error, what)
            raise
        self._members.check()
        return made

    def checked(
        self,
        what: str,
        words: Callable[[T, A], str],
        prepare: Callable[[A], T],
        given: A,
        then: Callable[[T], None] | None = None,
    ) -> T:
        """Do as :meth:`made`; in debug mode, raise an error of one rank on all.

        Args:
            what: the operation.
            words: ``words(made, given)`` returns a text of the prepared call, which
                must be equal on all ranks.
            prepare: as for :meth:`made`.
            given: its argument.
            then: compares more, if the texts are equal. Collective.

        Raises:
            SymmError: in debug mode, on all ranks: ``prepare`` failed on one, or they
                differ.
        """
        if self._members.closed:
            self._members.check_open()
        try:
            made = prepare(given)
        except BaseException as error:
            if self.debug and isinstance(error, Exception) and not self._members.failed:
                self._raise_on_all(error, what)
            self._enqueuer.give_up_unless_refused(error, what)
            raise
        self._members.check()
        if self.debug:
            exchange = self._members.exchange
            with self._members.set_up(what, recorded=False):
                with exchange.agreed(what):
                    text = words(made, given)
                exchange.agree_equal(text, what)
                if then is not None:
                    then(made)
        return made

    def _raise_on_all(self, error: Exception, what: str) -> None:
        """Raise this rank's error on all ranks, which are in the same call."""
        recorded = self._members.set_up(what, recorded=False)
        with recorded, self._members.exchange.agreed(what):
            raise error
