"""The status board of ranks, and the layout of its memory.

The status board: one 8-byte record for each rank, in memory that every GPU reaches.

A kernel that gives up a wait stores into every rank's record what it waited for. The
host reads its own record with a plain load, which costs almost nothing. Kernels that
wait read their rank's record regularly, so all of them end soon after the first.

Only hosts use the rest of the board. It contains the text of a rank that leaves, each
rank's step in calls that all ranks make, the small values that they exchange, which
kernel a rank is loading, and the record of its calls. So a rank that waits in such a
call sees which rank has failed, left or ended, and need not wait in MPI.

The layout of a status board's memory, for its ranks and for their user.

``numba-symm status`` maps the memory of a running job's board. It reads without a lock,
as the ranks do, and writes only a failure.
"""

import ctypes
import itertools
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from numba_symm import environment, process
from numba_symm.environment import SIMULATED
from numba_symm.errors import (
    CallMismatch,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
    RankLeft,
    left,
)
from numba_symm.gpu import driver, entry, loads
from numba_symm.launch import call_records, failures, locks, waiting
from numba_symm.launch.call_records import Record
from numba_symm.launch.failures import REBUILD, UNCLOSED, Failure, describe
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.ranks import MOST_RANKS, name_ranks
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait
from numba_symm.memory.backends import file_of_all, mapped

BOARD = "status board"
"""What the memory's file is named in ``/proc``, after the library."""

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
    return notes, pieces, call_records.place(pieces + 2 * size * PIECE, size)[0]


def nbytes_of(size: int) -> int:
    """Return the bytes of the memory of a board of that many ranks."""
    return call_records.place(_places(size)[2], size)[1]


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
        self.report(writer, failures.AFAR << 56 | writer << 48, words)


T = TypeVar("T")

_LOCKS = 1 << 40  # beyond the file's end: one byte for each rank, locked while it lives
_UNSURE = 0.01  # seconds after which a waiting rank checks whether the others live
_DEVICEMAP = 0x02  # CU_MEMHOSTREGISTER_DEVICEMAP


class Board:
    """The board of one communicator. Collective.

    Args:
        exchange: the ranks, with their numbers and nodes in texts.
        channel: sends file descriptors between them.
        undo: closes the board, in any case.
        presence: returns locks that this board shares; None: it has its own.

    Attributes:
        address: the address of rank 0's record for this process' kernels, after
            :meth:`register`.
        alive: the locks that show which ranks' processes run, until it is closed.
        record: the ranks' calls, until it is closed; None: they are not recorded.
    """

    alive: Any = None
    record: Record | None = None
    _memory: BoardMemory | None = None
    _records: Any = None
    _gate: Any = None
    _steps: Any = None
    _pieces = memoryview(b"")
    _reopened: int | None = None

    def __init__(
        self,
        exchange: StoreExchange,
        channel: IpcChannel,
        undo: ExitStack,
        presence: Callable[[], locks.Presence] | None = None,
    ):
        # Before others rely on it, because its close shows that this rank has left.
        undo.callback(self.close)
        self._undo = ExitStack()
        self._rank = exchange.rank
        self._size = exchange.size
        self._exchange = exchange
        # Reentrant, because a finalizer may report, too.
        self._reporting = threading.RLock()
        self._step = 0
        self._turn = 0
        self.address = 0
        nbytes = nbytes_of(self._size)
        with (
            file_of_all(exchange, channel, BOARD, nbytes) as fd,
            ExitStack() as undo_map,
        ):
            with exchange.agreed(f"mapping the {BOARD}"):
                undo_map.callback(self._let_go_of_lock)
                own = fd, _LOCKS, self._size, self._rank
                self.alive = presence() if presence else locks.Presence(*own)
                if presence is not None and self._rank == 0:
                    self._reopened = locks.reopened(fd)  # for numba-symm status
                memory = mapped(fd, nbytes)
                undo_map.callback(_unmap, memory)
                undo_map.callback(self._let_go)
                made = self._memory = BoardMemory(memoryview(memory), self._size)
                self._records, self._steps = made.failures, made.steps
                self._pieces = made.pieces
                if environment.records_calls():
                    self.record = Record(
                        self._memory.calls,
                        self._rank,
                        self._exchange.names[self._rank],
                        "".join(self._exchange.nodes[self._rank :][:1]),
                        self._size,
                    )
            self._undo = undo_map.pop_all()
        process.watch(self)
        loads.watch(self)

    def register(self) -> None:
        """Map the records for this process' kernels. Local, on the current GPU."""
        self.address = ctypes.addressof(self._records)
        if not SIMULATED:
            # A page that stays mapped could not be mapped for the next board.
            self.address = waiting.undisturbed(
                lambda: _register(self.address, self._undo)
            )

    def open(self, gate: Any) -> None:
        """Let calls pass through a gate until this board is closed, or fails."""
        self._gate = gate
        gate.failure = ctypes.addressof(self._records) + 8 * self._rank
        if self.record is not None:
            gate.book = ctypes.addressof(self.record.book)
        gate.slow &= ~entry.CLOSED

    def failure(self) -> Failure | None:
        """Return why the communicator has failed, or None if it has not."""
        return self._failure_of(self._rank) if self._records[self._rank] else None

    def _failure_of(self, rank: int) -> Failure | None:
        """Return the failure in a rank's record, or None."""
        assert self._memory is not None  # otherwise it is closed
        exchange = self._exchange
        return self._memory.failure_of(rank, exchange.names, exchange.nodes)

    def note_load(self, what: str) -> None:
        """Note that this rank is loading something. Local."""
        if self._memory is not None and not self._records[self._rank]:
            mine = self._memory.notes[self._rank]
            mine.what = what.encode(errors="replace")[: NOTE - 1]
            mine.ended = 0
            mine.began = time.monotonic_ns()  # last, because it makes the note valid

    def end_load(self) -> None:
        """Clear the note, unless the communicator has failed meanwhile. Local."""
        if self._memory is not None:
            mine = self._memory.notes[self._rank]
            if not self._records[self._rank]:
                mine.began = 0
            elif not mine.ended:
                mine.ended = time.monotonic_ns()

    def explained(self, failure: Failure) -> tuple[Failure, str]:
        """Return a failure with what the island knows of its cause, and the calls.

        The second part is a table of all ranks' calls; "" if there is none. All ranks
        of the island return the same.
        """
        why, calls = self._whose_processes_ended(), ""
        if self.record is not None:
            why, calls = call_records.agreed(self.record, why)
        if why is None or failure.error is not CollectiveTimeout:
            return failure, calls
        return failure._replace(
            error=CallMismatch if why.differ else RankLeft,
            text=f"{why.text}; {failure.text}",
            ranks=tuple(why.ranks) or failure.ranks,
            hint="" if why.differ else REBUILD,
        ), calls

    def _whose_processes_ended(self) -> call_records.Cause | None:
        ends: dict[str, list[int]] = {}
        for rank in self.ended():
            name = self._exchange.names[rank]
            ends.setdefault(self._killed(rank) or UNCLOSED, []).append(name)
        if not ends:
            return None
        texts = [
            f"{name_ranks(names)} {how.replace('has', 'have') if names[1:] else how}"
            for how, names in ends.items()
        ]
        named = sorted(itertools.chain(*ends.values()))
        return call_records.Cause(False, named, "; ".join(texts))

    def _killed(self, rank: int) -> str:
        pid = 0 if self.record is None else int(self.record.heads[rank].pid)
        return environment.killed(pid) if pid else ""

    def compare(self) -> None:
        """Make the communicator fail if the calls of another rank differ. Local.

        It waits for no rank. Later calls of all ranks raise.
        """
        record = self.record
        found = None if record is None else record.difference()
        if record is None or found is None:
            return
        why = call_records.mismatch(record, self._rank, *found)
        self.fail(CallMismatch(why.text, ranks=tuple(why.ranks)))

    def look(self) -> None:
        """Raise CollectiveError if the communicator has failed."""
        failure = self.failure()
        if failure is not None:
            raise failure.exception()

    def is_ahead(self, rank: int) -> bool:
        """Return whether a rank is at a later step than this rank."""
        return int(self._steps[rank]) > self._step

    def gate(self, wait: Wait) -> Failure | None:
        """Wait for every rank. Return the failure if there is one, else None.

        Collective. A rank votes to continue when all ranks have arrived, and to stop if
        it sees a failure first. All continue if all have voted to continue. So all
        ranks make the call that follows, or none does.
        """
        failure = self.failure()
        if failure is not None:
            return failure
        arrived = self._step + 1
        go, stop = arrived + 1, arrived + 2
        self._step = stop
        vote = stop
        try:
            self._steps[self._rank] = arrived
            if self._reached(arrived, wait) and not self._records[self._rank]:
                vote = go
        except BaseException as error:
            self.abandon(error, wait.what)  # before the others see the vote
            raise
        finally:
            self._steps[self._rank] = vote
        # Who votes to stop does not wait, because a rank that has left never votes.
        voted = vote == go and self._reached(go, wait, records=False)
        if voted and stop not in list(self._steps):
            return None
        # A rank that votes to stop has seen a record, which may not be here yet.
        failures = [self.failure(), *map(self._failure_of, range(self._size))]
        return next(failure for failure in failures if failure is not None)

    def all_gather(self, value: T, wait: Wait) -> list[T]:
        """Return every rank's value, in rank order. Collective.

        Args:
            value: anything that can be pickled.
            wait: the wait.

        Raises:
            CollectiveError: a rank did not arrive in time, has left, or has ended.
        """
        data = pickle.dumps(value)
        room = PIECE - 8
        gathered = [b""] * self._size
        longest, start = 1, 0
        while start < longest:
            # Pieces alternate between two places. When this one is stored, all ranks
            # have reached the step of the last one, so they have read the one before.
            piece = data[start : start + room]
            at = self._place(self._rank)
            self._pieces[at : at + 8] = len(data).to_bytes(8, "little")
            self._pieces[at + 8 : at + 8 + len(piece)] = piece
            self._meet(wait)
            for rank in range(self._size):
                at = self._place(rank)
                total = int.from_bytes(self._pieces[at : at + 8], "little")
                end = at + 8 + max(0, min(room, total - start))
                gathered[rank] += bytes(self._pieces[at + 8 : end])
                longest = max(longest, total)
            self._turn ^= 1
            start += room
        return [pickle.loads(each) for each in gathered]

    def _place(self, rank: int) -> int:
        return (self._turn * self._size + rank) * PIECE

    def _meet(self, wait: Wait) -> None:
        """Wait until every rank has reached the next step, or raise the failure."""
        if self._records is None:
            raise ClosedError("the status board was closed")
        self._step += 1
        self._steps[self._rank] = self._step
        if not self._reached(self._step, wait):
            self.look()

    def _reached(self, step: int, wait: Wait, *, records: bool = True) -> bool:
        """Wait for all ranks. Return whether they reached a step before a failure.

        Args:
            step: the number of the step.
            wait: this wait.
            records: whether a record on the board ends the wait. A rank that is late or
                has ended ends it in any case.
        """
        while True:
            absent = self._absent(step)
            if not absent:
                return True
            if records and self._records[self._rank]:
                return False
            if wait.seconds > _UNSURE and self._reports_ended(absent, step, wait):
                return False
            if wait.pause(absent):
                self._report_late(wait, absent)
                return False

    def _absent(self, step: int) -> list[int]:
        return [rank for rank, at in enumerate(self._steps) if at < step]

    def _reports_ended(self, absent: Sequence[int], step: int, wait: Wait) -> bool:
        """Report a rank whose process has ended. Return whether there is one."""
        for rank in absent:
            # It may have arrived, and closed its board, since the step was read.
            if not self.alive.runs(rank) and rank in self._absent(step):
                self._report_end(rank, wait.what)
                return True
        return False

    def report_ended(self, what: str) -> None:
        """Make the communicator fail if a rank's process has ended without a close.

        It is for waits that are not at this board. It does not matter where the ranks
        are.
        """
        for rank in self.ended():
            self._report_end(rank, what)

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended without a close."""
        alive, memory = self.alive, self._memory
        if alive is None or memory is None:  # the board was closed
            return []
        return [
            rank
            for rank in range(self._size)
            if rank != self._rank
            and not alive.runs(rank)
            and not memory.closed[rank]  # a rank stores it before it drops its lock
        ]

    def _report_end(self, rank: int, what: str) -> None:
        record = failures.ENDED << 56 | self._rank << 48 | rank << 40
        self._report(record, f"{what}\n{self._killed(rank)}")

    def _report_late(self, wait: Wait, absent: Sequence[int]) -> None:
        record = failures.LATE << 56 | self._rank << 48 | absent[0] << 40
        self._report(record, f"{wait.what}\n{wait.text(absent)}\n{wait.limit}")

    def late(self, wait: Wait, absent: Sequence[int]) -> CollectiveError:
        """Make the communicator fail because ranks are late. Return the error.

        Args:
            wait: the wait that has reached its deadline.
            absent: the ranks that did not arrive.
        """
        self._report_late(wait, absent)
        failure = self._failure_of(self._rank)
        assert failure is not None
        return failure.exception()

    def abandon(self, cause: BaseException | str, operation: str = "") -> None:
        """Make the communicator fail on every rank: waiting kernels end, calls raise.

        Does nothing if the communicator has failed before, or the board was closed.

        Args:
            cause: why this rank leaves: an exception, or the text after "rank 3".
            operation: the call that it leaves, such as ``"all_reduce"``; "" if it
                leaves the program.
        """
        if isinstance(cause, BaseException):
            cause = left(cause, operation)
        record = failures.ABANDONED << 56 | self._rank << 48
        self._report(record, f"{operation}\n{cause}")

    def fail(self, error: CollectiveError) -> None:
        """Make the communicator fail on every rank by an error that is known.

        Does nothing if the communicator has failed before, or the board was closed.
        """
        with self._reporting:
            if self._memory is not None:
                self._memory.fail(self._rank, error)

    def _report(self, record: int, words: str = "") -> None:
        with self._reporting:
            if self._memory is not None:  # otherwise it is closed
                self._memory.report(self._rank, record, words)

    def close(self) -> None:
        """Unmap the board, which no kernel may use any more. Local and idempotent."""
        if self._memory is not None:
            self._memory.closed[self._rank] = 1
        self._undo.close()

    def disown(self) -> None:
        """Write nothing more, in a forked child, because its parent owns the board.

        Close the lock file, too. Otherwise the child would keep the lock of a parent
        that has ended.
        """
        self._reporting = threading.RLock()  # another thread may have held it
        self._let_go()
        self._let_go_of_lock()

    def _let_go(self) -> None:
        """Drop the objects that prevent the mapping from being closed."""
        if self._gate is not None:  # no call may read what is unmapped
            self._gate.slow |= entry.CLOSED
            self._gate.failure, self._gate.book = ctypes.addressof(self._gate), 0
        record, self.record = self.record, None
        if record is not None:
            record.close()
        memory, self._memory = self._memory, None
        self._records = self._steps = None
        if memory is not None:
            memory.close()

    def _let_go_of_lock(self) -> None:
        alive, self.alive = self.alive, None
        if alive is not None:
            alive.close()
        reopened, self._reopened = self._reopened, None
        if reopened is not None:
            os.close(reopened)


def _unmap(memory: mmap.mmap) -> None:
    # If an exception's traceback keeps the records, it keeps the memory, too.
    with suppress(BufferError):
        memory.close()


def _register(address: int, undo: ExitStack) -> int:
    """Map a page of host memory for the GPUs. Return its address there."""
    driver.call("cuMemHostRegister", address, mmap.PAGESIZE, _DEVICEMAP)
    undo.callback(driver.call, "cuMemHostUnregister", address)
    return int(driver.call("cuMemHostGetDevicePointer", address, 0))
