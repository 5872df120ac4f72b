"""The layout of a status board's memory, for its ranks and for their user.

``numba-symm status`` maps the memory of a running job's board. It reads without a lock,
as the ranks do, and writes only a failure.
"""

import ctypes
import mmap
import time
from collections.abc import Sequence
from contextlib import suppress

from numba_symm import loads, record, waits
from numba_symm.errors import CollectiveError, CollectiveTimeout
from numba_symm.failures import Failure, describe
from numba_symm.launch.nodes import MOST_RANKS

FILE = "numba_symm board"
"""The name of the memory's file in ``/proc``."""

TEXT = 1024
"""Bytes of the text with which a rank reports a failure."""

PIECE = 2048
"""Bytes that a rank passes at a time, with the total number first."""

NOTE = 112
"""Bytes of the text about what a rank loads."""

_NAMES = 200  # of a text, bytes for the numbers of ranks, as many as fit


class LoadNote(ctypes.Structure):
    """A kernel that a rank loads, or was loading when the communicator failed.

    Attributes:
        began: nanoseconds of the clock that all processes of a node share; 0: nothing.
        ended: the same; 0: it is still being loaded.
        what: the call and the kernel, for :func:`loads.words`.
    """

    _fields_ = (
        ("began", ctypes.c_uint64),
        ("ended", ctypes.c_uint64),
        ("what", ctypes.c_char * NOTE),
    )


_TEXTS_AT = mmap.PAGESIZE  # the first page is also for GPUs


def _places(size: int) -> tuple[int, int, int]:
    """Return where notes, pieces and the records of calls begin."""
    notes = _TEXTS_AT + (size + 1) * TEXT
    pieces = notes + size * ctypes.sizeof(LoadNote)
    return notes, pieces, record.place(pieces + 2 * size * PIECE, size)[0]


def nbytes_of(size: int) -> int:
    """Return the bytes of the memory of a board of that many ranks."""
    return record.place(_places(size)[2], size)[1]


def size_of(nbytes: int) -> int:
    """Return the number of ranks of a board of that many bytes; 0: it is none."""
    sizes = range(1, MOST_RANKS + 1)
    return next((size for size in sizes if nbytes_of(size) == nbytes), 0)


class BoardMemory:
    """The memory of a board.

    Args:
        memory: all of it.
        size: the number of ranks.

    Attributes:
        size: the same.
        failures: by rank, its record of a failure, or 0. Kernels read these.
        steps: by rank, its step in calls that all ranks make.
        closed: by rank, whether it has closed the board.
        texts: by rank, the text of its report. The last one is that of the user.
        notes: by rank, what it loads.
        pieces: the values that the ranks exchange.
        calls: where the records of calls begin.
    """

    def __init__(self, memory: memoryview, size: int):
        self.size = size
        notes, pieces, calls = _places(size)
        numbers = ctypes.c_uint64 * size
        self.failures = numbers.from_buffer(memory)
        self.steps = numbers.from_buffer(memory, 8 * size)
        self.closed = numbers.from_buffer(memory, 16 * size)
        texts = ctypes.c_char * TEXT * (size + 1)
        self.texts = texts.from_buffer(memory, _TEXTS_AT)
        self.notes = (LoadNote * size).from_buffer(memory, notes)
        self.pieces = memory[pieces : pieces + 2 * size * PIECE]
        self.calls = memory[calls:]

    def close(self) -> None:
        """Drop the memory."""
        del self.failures, self.steps, self.closed, self.texts, self.notes
        for each in (self.pieces, self.calls):
            with suppress(BufferError):  # an exception's traceback may use it
                each.release()

    def failure_of(
        self, rank: int, names: Sequence[int], nodes: Sequence[str] = ()
    ) -> Failure | None:
        """Return the failure in a rank's record, or None.

        Args:
            rank: the rank.
            names: by rank, its number in texts.
            nodes: by rank, the name of its node; empty: texts name no nodes.
        """
        found = int(self.failures[rank])
        if not found:
            return None
        words = self.texts[found >> 48 & 0xFF].value
        failure = describe(found, words.decode(errors="ignore"), names, nodes)
        loading = failure.error is CollectiveTimeout and self.loading(names)
        if not loading:
            return failure
        return failure._replace(text=f"{failure.text}; {loading}", hint="")

    def loading(self, names: Sequence[int]) -> str:
        """Return which ranks load kernels, or did when the communicator failed."""
        now, found = time.monotonic_ns(), []
        for rank, load in enumerate(self.notes):
            if load.began:
                seconds = ((load.ended or now) - load.began) / 1e9
                what = load.what.decode(errors="ignore")
                found.append(loads.words(what, f"rank {names[rank]}", seconds))
        return "; ".join(found)

    def report(self, writer: int, failure: int, words: str) -> None:
        """Store a failure in the records of all ranks that have none.

        Args:
            writer: the rank that reports it; ``size``: the user.
            failure: the record.
            words: its text.
        """
        # A report that was interrupted, or that this one has overtaken, stays.
        begun = [each for each in self.failures if each and each >> 48 & 0xFF == writer]
        if begun:
            failure = begun[0]
        else:  # first, because a record will refer to it
            self.texts[writer].value = words.encode(errors="replace")[: TEXT - 1]
        for rank in range(self.size):
            if not self.failures[rank]:
                self.failures[rank] = failure

    def fail(self, writer: int, error: CollectiveError) -> None:
        """Store an error that is known, as :meth:`report`."""
        named = " ".join(map(str, error.ranks))
        if len(named) > _NAMES:
            named = named[: named.rindex(" ", 0, _NAMES + 1)]
        # The text is last, because it may be cut off, or have several lines.
        kind = type(error).__name__
        words = "\n".join([error.operation, kind, named, error.hint, str(error)])
        self.report(writer, waits.AFAR << 56 | writer << 48, words)
