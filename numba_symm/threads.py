"""Starting threads of the library's own."""

import threading

from numba_symm.errors import SymmError


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
