"""Whether a call may be made: by this rank's checks, in debug mode by all ranks'."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba_symm.collectives.enqueueing import Enqueuer
from numba_symm.island import Island

T = TypeVar("T")


class Agreement:
    """Prepares calls; in debug mode, the ranks then compare them.

    Args:
        island: the ranks.
        enqueuer: makes the communicator fail after an error that is not a refusal.
        debug: whether the ranks compare their calls.

    Attributes:
        debug: the same.
    """

    def __init__(self, island: Island, enqueuer: Enqueuer, debug: bool):
        self.debug = debug
        self._island = island
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
        self._island.check_open()
        try:
            made = prepare(*args)
        except BaseException as error:
            self._enqueuer.give_up_unless_refused(error, what)
            raise
        self._island.check()
        return made

    def checked(
        self,
        what: str,
        words: Callable[..., str],
        prepare: Callable[..., T],
        *args: Any,
        then: Callable[[T], None] | None = None,
    ) -> T:
        """Do as :meth:`made`; in debug mode, raise an error of one rank on all.

        Args:
            what: the operation.
            words: ``words(made, *args)`` returns a text of the prepared call, which
                must be equal on all ranks.
            prepare: as for :meth:`made`.
            *args: these arguments.
            then: compares more, if the texts are equal. Collective.

        Raises:
            SymmError: in debug mode, on all ranks: ``prepare`` failed on one, or they
                differ.
        """
        self._island.check_open()
        try:
            made = prepare(*args)
        except BaseException as error:
            if self.debug and isinstance(error, Exception) and not self._island.failed:
                self._raise_on_all(error, what)
            self._enqueuer.give_up_unless_refused(error, what)
            raise
        self._island.check()
        if self.debug:
            exchange = self._island.exchange
            with self._island.set_up(what):
                with exchange.agreed(what):
                    text = words(made, *args)
                exchange.agree_equal(text, what)
                if then is not None:
                    then(made)
        return made

    def _raise_on_all(self, error: Exception, what: str) -> None:
        """Raise an error of this rank on all ranks, which make the same call."""
        with self._island.set_up(what), self._island.exchange.agreed(what):
            raise error
