"""This process: its forked children, open files and the library's threads."""

import errno
import os
import threading
import weakref
from collections import Counter
from typing import Protocol

from numba_symm.errors import SymmError

ADVICE = "start processes with spawn, and construct what they need there"


class Inherited(Protocol):
    """An object that a forked child must neither use nor release."""

    def disown(self) -> None:
        """Give it up, in a child. Nothing of the parent may change."""


_watched: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def watch(thing: Inherited) -> None:
    """Have ``thing.disown()`` run in every child that this process forks."""
    _watched.add(thing)


def _disown() -> None:
    for thing in list(_watched):
        thing.disown()


os.register_at_fork(after_in_child=_disown)


_users: "weakref.WeakKeyDictionary[object, str]" = weakref.WeakKeyDictionary()
_LIMIT = "raise the limit (ulimit -n)"


def note(user: object, made_by: str) -> None:
    """Note that an object has descriptors open.

    Args:
        user: the object.
        made_by: the call that made it, or its communicator, as the user names it.
    """
    _users[user] = made_by


def forget(user: object) -> None:
    """Note that it has closed them. Idempotent."""
    _users.pop(user, None)


def advice() -> str:
    """Return what to do about too many open files."""
    made = Counter(_users.values())
    if not made:
        return _LIMIT
    named = ", ".join(f"{number} by {call}" for call, number in made.most_common())
    return (
        "it has communicators or windows that were neither closed nor freed (made: "
        f"{named}); close or Free those that it does not need, or {_LIMIT}"
    )


def advice_for(error: BaseException) -> str:
    """Return "; " and the advice if a limit of files caused an error, else ""."""
    if _LIMIT in str(error):
        return ""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            return f"; {advice()}"
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            return "; raise the limit of a file's size (ulimit -f), also of memory's"
        cause = cause.__cause__ or cause.__context__
    return ""


def start(thread: threading.Thread, what: str) -> None:
    """Start a thread.

    Args:
        thread: the thread.
        what: what needs it, for the error.

    Raises:
        SymmError: the limits of this process, or of the user, allow none.
    """
    try:
        thread.start()
    except RuntimeError as error:
        cause = error.__context__  # a signal's handler may raise within Python's locks
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None
        raise SymmError(
            f"{what}: expected a new thread, got none ({error}); raise the limits of "
            "memory and of processes (ulimit -v, ulimit -u)"
        ) from error
