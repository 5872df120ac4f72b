"""A progress bar, if the output is a terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

STARTED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class _Screen(Console):
    """A terminal whose cursor stays visible.

    After Ctrl-C, mpirun ends the ranks, none of which could show it again.
    """

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is."""
        return False


def bar(*, shown: bool) -> Progress:
    """Return a progress bar, a context manager; it is drawn only by ``update``.

    Args:
        shown: true on one rank only.
    """
    stream = terminal() if shown else None
    console = _Screen(file=stream or sys.stderr, force_terminal=stream is not None)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=stream is None or console.is_dumb_terminal,
        redirect_stdout=False,  # rich would wrap rows wider than the terminal
        redirect_stderr=False,
        auto_refresh=False,  # its thread would disturb the timing
    )


@contextmanager
def hidden(progress: Progress) -> Iterator[None]:
    """Hide the bar while text is printed."""
    progress.stop()
    yield
    progress.start()


def terminal() -> TextIO | None:
    """Return the standard stream of this process that is a terminal, or None.

    Standard output is preferred, because the rows go there, and mpirun does not keep
    the order between two streams.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if _at_terminal(number, stream):
            return stream
    return None


def _at_terminal(number: int, stream: TextIO) -> bool:
    if STARTED_BY_MPI[0] not in os.environ and STARTED_BY_MPI[1] not in os.environ:
        return stream.isatty()
    # mpirun gives its ranks pipes, and writes their text to its own stream.
    try:
        behind = Path(f"/proc/{os.getppid()}/fd/{number}").readlink()
    except OSError:  # mpirun runs as another user or on another node
        return False
    return str(behind).startswith(("/dev/pts/", "/dev/tty"))
