"""The objects that use file descriptors, for errors about too many of them."""

import errno
import weakref
from collections import Counter

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
