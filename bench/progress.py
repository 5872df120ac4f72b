"""A progress bar, where somebody sees a terminal."""

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


def bar(*, shown: bool) -> Progress:
    """Return a progress bar, to be entered; it is drawn when it is told to.

    Args:
        shown: false on all ranks but one.
    """
    stream = terminal() if shown else None
    console = Console(file=stream or sys.stderr, force_terminal=stream is not None)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=stream is None or console.is_dumb_terminal,
        redirect_stdout=False,  # it would wrap rows that are wider than the terminal
        redirect_stderr=False,
        auto_refresh=False,  # its thread would disturb what is timed
    )


@contextmanager
def hidden(progress: Progress) -> Iterator[None]:
    """Take the bar away, for text to be printed."""
    progress.stop()
    yield
    progress.start()


def terminal() -> TextIO | None:
    """Return the stream of this process that a terminal shows, or None.

    Standard output if both do: the bar and the rows then come in the right order, for
    which mpirun does not care between two streams.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if _at_terminal(number, stream):
            return stream
    return None


def _at_terminal(number: int, stream: TextIO) -> bool:
    if STARTED_BY_MPI[0] not in os.environ and STARTED_BY_MPI[1] not in os.environ:
        return stream.isatty()
    # Whatever mpirun gives its ranks, its own stream is where the text ends up.
    try:
        behind = Path(f"/proc/{os.getppid()}/fd/{number}").readlink()
    except OSError:  # mpirun is another user's, or far away
        return False
    return str(behind).startswith(("/dev/pts/", "/dev/tty"))
