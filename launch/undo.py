"""Steps that are undone after a failure."""

from contextlib import ExitStack
from typing import Any


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
