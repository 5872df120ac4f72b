"""Which kernels a program loads, and when.

To load a kernel, the driver waits until the GPU has no work. Kernels there may wait for
another rank, and that rank's host for this one. So the construction of a communicator,
before any kernel waits, loads the kernels that an earlier run of the program has
loaded. A file in the kernel cache lists these.

A load within a call is counted, logged, and noted on the status boards while it lasts.
So if ranks wait for each other, their errors name the cause.
"""

import hashlib
import logging
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from numba_symm import code_cache, environment, forks

log = logging.getLogger("numba_symm")

MOST = 4096
"""The most kernels in the list of a program."""

_LINE = re.compile(r"([0-9a-f]{64}|-|#) \S.*\n")  # a key, no key, or the program
_PREFIX, _SUFFIX = "numba-symm-", ".loads"


class LoadBoard(Protocol):
    """A status board, on which a load is noted while it lasts."""

    def note_load(self, what: str) -> None:
        """Note that this rank is loading something. Local."""

    def end_load(self) -> None:
        """Clear the note, unless the communicator has failed meanwhile. Local."""


_boards: "weakref.WeakSet[LoadBoard]" = weakref.WeakSet()
_call: ContextVar[str | None] = ContextVar("_call", default="")


class Count:
    """The loads of this process within calls.

    Attributes:
        within_calls: how many.
    """

    within_calls = 0


def watch(board: LoadBoard) -> None:
    """Note loads on this board, too."""
    _boards.add(board)


def ahead() -> AbstractContextManager[None]:
    """Count no load within the block, because no call waits for it."""
    return _within(None)


def of(call: str) -> AbstractContextManager[None]:
    """Name the call that needs what is loaded within the block."""
    return _within(call if _call.get() is not None else None)


@contextmanager
def _within(call: str | None) -> Iterator[None]:
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


@contextmanager
def noted(kernel: str) -> Iterator[None]:
    """Count and note a load, unless it is ahead of calls.

    Args:
        kernel: the kernel's name.
    """
    call = _call.get()
    if call is None:
        yield
        return
    Count.within_calls += 1
    boards = list(_boards)
    for board in boards:
        board.note_load(f"{call}\n{kernel}")
    began = time.monotonic()
    try:
        yield
    finally:
        for board in boards:
            board.end_load()
        seconds = time.monotonic() - began
        log.info("loaded the kernel %s within %s, %.3f s", kernel, call, seconds)


def words(noted: str, rank: str, seconds: float) -> str:
    """Return what an error says of a load.

    Args:
        noted: the text on the board.
        rank: the rank that loads, as a text.
        seconds: how long it has taken.
    """
    call, kernel = noted.split("\n", 1)
    what = f"{call}'s kernel" if call else f"the kernel {kernel}"
    first = (
        f"comm.prepare({call!r})" if call else "comm.prepare with the program's calls"
    )
    return (
        f"{rank} has been loading {what} for {seconds:.1f} s, which waits for its GPU; "
        f"call {first} before other calls"
    )


# The list of a program.


class Listed:
    """The list of the running program, empty until :func:`begin`.

    Attributes:
        place: its file; None: none is kept.
        keys: what is in it, see :func:`_read`.
    """

    place: Path | None = None
    keys: set[str]

    def __init__(self) -> None:
        self.keys = set()
        forks.watch(self)

    def disown(self) -> None:
        """Write nothing more in a forked child, which may run something else."""
        self.place = None


_listed = Listed()


def program() -> str:
    """Return the path of the running script, or the name of its module."""
    name = sys.argv[0] if sys.argv else ""
    return str(Path(name).resolve()) if Path(name).is_file() else name


def begin(generation: str, ranks: int) -> Sequence[str]:
    """Return the keys of the kernels that an earlier start has loaded.

    From now on, what is loaded is added to the list. Later calls return none.

    Args:
        generation: the sources, compilers and kind of GPU; others have other lists.
        ranks: the number of ranks of the job.
    """
    if _listed.place is not None or not environment.loads_ahead():
        return ()
    about = f"{program()}\n{ranks}\n{generation}"
    name = hashlib.sha256(about.encode(errors="replace")).hexdigest()[:32]
    try:
        _listed.place = code_cache.folder() / f"{_PREFIX}{name}{_SUFFIX}"
    except RuntimeError:  # no home; the cache has warned
        return ()
    found = _read(_listed.place)
    _listed.keys = set(found)
    return [key for key in found if key[0] != "-"]


def _read(place: Path) -> list[str]:
    """Return the entries of a list, each once; warn if it cannot be used.

    That is a key, or "-" and the name of a kernel that the cache does not keep.
    """
    try:
        if place.stat().st_uid != os.geteuid():
            raise PermissionError("it belongs to another user")
        lines = place.read_text(errors="replace").splitlines(keepends=True)
        if not all(map(_LINE.fullmatch, lines)) or len(lines) > 2 * MOST:
            with suppress(OSError):
                place.unlink()
            raise ValueError("it is damaged")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _warn(place, error)
        return []
    entries = (line.rstrip("\n") if line[0] == "-" else line[:64] for line in lines)
    return list(dict.fromkeys(entry for entry in entries if entry[0] != "#"))


def remember(key: str, kernel: str) -> None:
    """Add a kernel to the list.

    Args:
        key: its key in the disk cache; "-": the cache does not keep it.
        kernel: its name.
    """
    place, known = _listed.place, _listed.keys
    entry = key if key != "-" else f"- {kernel}"
    if place is None or entry in known or len(known) >= MOST:
        return
    known.add(entry)
    try:
        # Lines of several ranks do not mix, because each is one append.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(place, flags, 0o600)
        try:
            head = f"# {program()}\n" if not os.fstat(file).st_size else ""
            os.write(file, f"{head}{key} {kernel}\n".encode(errors="replace"))
        finally:
            os.close(file)
    except OSError as error:
        _listed.place = None
        _warn(place, error)


def _warn(place: Path, error: Exception) -> None:
    environment.warn_once(
        f"the list of kernels {place} is ignored ({error}): calls load kernels, which "
        "waits for the GPU"
    )


def described() -> list[str]:
    """Return a line for each program that loads what the cache does not keep."""
    found = []
    with suppress(OSError, RuntimeError):
        for file in sorted(code_cache.folder().glob(f"{_PREFIX}*{_SUFFIX}")):
            lines = dict.fromkeys(file.read_text(errors="replace").splitlines())
            names, heads = (
                [line[2:] for line in lines if line.startswith(sign)]
                for sign in ("- ", "# ")
            )
            if names and heads:  # otherwise it is damaged
                found.append(f"{heads[0]} loads within calls: {', '.join(names)}")
    return found
