"""When kernels are loaded, and the disk cache and the memory that this needs.

Which kernels a program loads, and when.

To load a kernel, the driver waits until the GPU has no work. Kernels there may wait for
another rank, and that rank's host for this one. So the construction of a communicator,
before any kernel waits, loads the kernels that an earlier run of the program has
loaded. A file in the kernel cache lists these.

A load within a call is counted, logged, and noted on the status boards while it lasts.
So if ranks wait for each other, their errors name the cause.

Memory of outputs that the library makes, which is reused instead of freed.

``cuMemFree`` waits for the GPU. A kernel there may be waiting for another rank, and
that rank's host for this one. So memory of a dropped output is kept, and a later output
of that size gets it, when all work of the context that was enqueued before is done.
That includes work of streams that the library does not know.

The memory is of ``cuMemAlloc``, so that other processes can map it by legacy IPC.

The disk cache of machine code, shared by processes.

An entry is a SHA-256 digest of its key and code, followed by the code. So damage to an
entry is found before a GPU runs the code. Without a usable entry, code is compiled.

Processes that need the same code at the same time, such as the ranks of a node, share
the work. One process locks a byte of a file in the cache's folder, and compiles. The
Linux kernel releases the lock when the process ends. The other processes wait for the
entry. A process compiles without a lock in three cases: it cannot lock, it has waited
for ``LONGEST_WAIT``, or the lock was released without an entry. No process loads code
on a GPU under a lock, because loading may wait for a peer that waits for the lock.

A process that waits tests the lock only, at growing intervals, and reads the disk when
the wait has ended: the folder may be on another node's disk.

Ranks compile the same kernels at the same time, and Numba types device functions once a
process. So a process that has compiled fewer kernels waits longer before it begins.
"""

import functools
import hashlib
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from numba_symm import environment, process
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, DriverError
from numba_symm.gpu import driver
from numba_symm.launch import locks

SHARE = 0.2
"""The most of a GPU's memory that is kept: as much as Numba keeps of its own arrays.
Beyond that, the host waits for the GPU."""

_FINEST = 512  # bytes: what cuMemAlloc aligns to
_LOOKS = 50  # queries of an event, about 1 µs each
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING

Freed = tuple[int, int]
"""An address and a number of bytes."""


class Reserve:
    """The kept memory of one CUDA context.

    A room is *dropped* when its array is, *awaited* from the next :meth:`take` on,
    until the work enqueued before that is done, and then *unused*.
    """

    def __init__(self, context: Any):
        self._context = context
        self._most = int(SHARE * driver.call("cuMemGetInfo")[1])
        # Finalizers append to it, in any thread and during any statement.
        self._dropped: deque[Freed] = deque()
        self._awaited: deque[tuple[Any, list[Freed]]] = deque()  # in order of events
        self._unused: dict[int, list[Freed]] = {}
        self._kept = 0  # bytes that are awaited or unused
        self._events: list[Any] = []
        self._busy: Any = None  # an event that had not passed in the last is_idle
        self._lock = threading.Lock()
        process.watch(self)

    def disown(self) -> None:
        """Use nothing that a forked child has inherited."""
        self._dropped.clear()
        self._awaited.clear()
        self._unused.clear()
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Freed:
        """Return memory of at least ``nbytes``, which is at least 1.

        Raises:
            ArgumentError: a stream of the context is being captured.
            DriverError: there is not enough memory.
        """
        size = _rounded(nbytes)
        with self._lock:
            self._sort()
            if self._kept > self._most and not self._unused.get(size):
                self._wait()
                if not self._unused.get(size):
                    self._free_unused()
            same = self._unused.get(size)
            if same:
                self._kept -= size
                return same.pop()
        try:
            return int(driver.call("cuMemAlloc", size)), size
        except DriverError:
            self.release()
            return int(driver.call("cuMemAlloc", size)), size

    def drop(self, room: Freed) -> None:
        """Take memory back that no array views any more. For finalizers."""
        self._dropped.append(room)

    def release(self) -> None:
        """Free all that is kept; this waits for the GPU."""
        with self._lock:
            self._sort()
            self._wait()
            self._free_unused()

    def is_idle(self) -> bool:
        """Return whether the context has no work; see :func:`idle`."""
        with self._lock:
            query = driver.function("cuEventQuery")
            if self._busy is not None:
                if query(self._busy)[0]:  # the work at the last call is not done
                    return False
                self._events.append(self._busy)
                self._busy = None
            event = self._recorded()
            if event is None:
                return False
            # An idle GPU passes an event within microseconds.
            if any(not query(event)[0] for _ in range(_LOOKS)):
                self._events.append(event)
                return True
            self._busy = event
            return False

    def _sort(self) -> None:
        """Await what was dropped; what need not be awaited any more is unused."""
        number = len(self._dropped)  # others may be dropped after the event
        if number:
            event = self._recorded()
            rooms = [self._dropped.popleft() for _ in range(number)]
            self._kept += sum(size for _, size in rooms)
            self._awaited.append((event, rooms))
        while self._awaited:
            event, _ = self._awaited[0]
            if event is None or driver.function("cuEventQuery")(event)[0]:  # not yet
                return
            self._next_is_unused()

    def _wait(self) -> None:
        """Wait until all that is awaited is unused."""
        if self._awaited:
            driver.call("cuCtxSynchronize")
        while self._awaited:
            self._next_is_unused()

    def _next_is_unused(self) -> None:
        event, rooms = self._awaited.popleft()
        if event is not None:
            self._events.append(event)
        for room in rooms:
            self._unused.setdefault(room[1], []).append(room)

    def _free_unused(self) -> None:
        while self._unused:
            size, rooms = self._unused.popitem()
            for address, _ in rooms:
                self._kept -= size
                driver.call("cuMemFree", address)

    def _recorded(self) -> Any:
        """Return an event after all work of the context so far.

        With a driver before CUDA 12.5, return None; then only :meth:`_wait` shows it.
        """
        if not _records():
            return None
        event = self._events.pop() if self._events else _new_event()
        (status,) = driver.function("cuCtxRecordEvent")(self._context, event)
        if not status:
            return event
        self._events.append(event)
        if "CAPTURE" in status.name:  # which is invalid now
            raise ArgumentError(
                "pass out= while a stream is being captured into a graph; memory "
                "cannot be allocated then"
            )
        raise driver.failure("cuCtxRecordEvent", status)


def _rounded(nbytes: int) -> int:
    """Return a size that arrays of similar sizes share; it is at most 1/8 larger."""
    unit = max(_FINEST, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // unit) * unit


def _new_event() -> Any:
    return driver.call("cuEventCreate", _NO_TIMING)


@functools.cache
def _records() -> bool:
    """Return whether the driver can record an event after all work of a context."""
    if driver.call("cuDriverGetVersion") < 12050:
        return False
    try:
        driver.function("cuCtxRecordEvent")
    except AttributeError:  # bindings of an earlier CUDA
        return False
    return True


def idle() -> bool:
    """Return whether the GPU has no work of the current context. Hardly wait.

    With a driver before CUDA 12.5, return False.
    """
    return SIMULATED or current().is_idle()


_reserves: dict[int, Reserve] = {}


def current() -> Reserve:
    """Return the reserve of the current context."""
    context = driver.call("cuCtxGetCurrent")
    number = int(context)
    found = _reserves.get(number)
    if found is None:  # of two threads, one stores its own
        found = _reserves.setdefault(number, Reserve(context))
    return found


def release() -> bool:
    """Free what is kept of the current context; this waits for the GPU.

    Returns:
        Whether there may have been any.
    """
    if _reserves:
        current().release()
    return bool(_reserves)


LONGEST_WAIT = 30.0
"""Seconds; a kernel takes a few, also where all cores are in use."""

_POLL = 0.02  # seconds at first; later, the wait so far divided by _FINENESS
_FINENESS = 32
_LONGEST_POLL = 0.25  # seconds
_HEAD_START = 0.005  # seconds for others, if this process has compiled nothing
_LOCKS = "numba-symm.locks"

_DIGEST_BYTES = 32

_EVERY_PROCESS = (
    "every process compiles its kernels, for seconds each; set XDG_CACHE_HOME to a "
    "writable folder with free space"
)

_warned = False
_compiled = 0
"""How many entries this process has compiled."""


def folder() -> Path:
    """Return the cache's folder, cuda.core's, which need not exist.

    Raises:
        RuntimeError: the user's home is unknown.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    caches = Path(home) if home else Path.home() / ".cache"
    return caches / "cuda-python" / "program-cache"


def is_writable(place: Path) -> bool:
    """Return whether a folder, which need not exist, can take entries."""
    around = place, *place.parents
    nearest = next(each for each in around if os.access(each, os.F_OK))
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def refusal() -> str:
    """Return the end of an error's text: the cache cannot be written."""
    return (
        f"expected a writable cache, got {folder()}; set XDG_CACHE_HOME to a writable "
        "folder with free space"
    )


def compiled_once(key: bytes, compile_it: Callable[[], bytes]) -> bytes:
    """Return the code of ``key`` from the cache, or compile and store it.

    Of several processes that need it, one compiles it.
    """
    global _compiled
    code = load(key)
    if code is None:
        with _alone(key):
            code = load(key)  # another process may have stored it in between
            if code is None:
                code = compile_it()
                _compiled += 1
                store(key, code)
    return code


def load(key: bytes) -> bytes | None:
    """Return the code stored under ``key``, or None if no entry is usable."""
    try:
        entry = _files().get(key)
    except (OSError, RuntimeError) as error:
        _warn(f"the kernel cache cannot be read ({error}): {_EVERY_PROCESS}")
        return None
    if entry is None:
        return None
    code = bytes(entry[_DIGEST_BYTES:])
    if entry[:_DIGEST_BYTES] != _digest(key, code):
        _warn("a damaged entry of the kernel cache is compiled again and replaced")
        return None
    return code


def store(key: bytes, code: bytes) -> None:
    """Store ``code`` under ``key``, or warn if that fails."""
    try:
        _files()[key] = _digest(key, code) + code
    except (OSError, RuntimeError) as error:
        _warn(f"the kernel cache cannot be written ({error}): {_EVERY_PROCESS}")


def _digest(key: bytes, code: bytes) -> bytes:
    return sha256(key + code).digest()


@functools.cache
def _files() -> Any:
    """Return the cache's files by key.

    Raises:
        OSError: their folder cannot be made.
        RuntimeError: the user's home is unknown.
    """
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(folder())


@contextmanager
def _alone(key: bytes) -> Iterator[None]:
    """Let other processes with the same key wait; or wait for the one that does so.

    If neither is possible, do nothing.
    """
    descriptor, byte = None, _byte(key)
    time.sleep(_HEAD_START / (1 + _compiled))
    try:
        try:
            descriptor = _opened()
            if not locks.try_lock(descriptor, byte):
                _await_entry(descriptor, byte)
        except OSError as error:
            if os.access(folder(), os.W_OK):  # otherwise ``store`` warns of the reason
                _warn(
                    f"the kernel cache cannot be locked ({error}): ranks compile the "
                    "same kernels at the same time; set XDG_CACHE_HOME to a folder on "
                    "a disk of this node"
                )
        except RuntimeError:  # no home, of which ``store`` warns, too
            pass
        yield
    finally:
        _close(descriptor, byte)


def _opened() -> int:
    """Return a descriptor of the file of locks.

    Raises:
        OSError: the file cannot be opened.
        RuntimeError: the user's home is unknown.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return os.open(folder() / _LOCKS, flags, 0o666)


def _close(descriptor: int | None, byte: int) -> None:
    """Close the file of locks, and release the one that this process may hold.

    Closing is not enough, because a child that was forked meanwhile has the
    description, too.
    """
    if descriptor is not None:
        with suppress(OSError):  # no locks here
            locks.unlock(descriptor, byte)
        os.close(descriptor)


def _await_entry(descriptor: int, byte: int) -> None:
    """Wait until no process compiles an entry, or it took too long.

    Args:
        descriptor: of the file of locks.
        byte: the entry's byte.
    """
    began = time.monotonic()
    while locks.is_locked(descriptor, byte):
        waited = time.monotonic() - began
        if waited > LONGEST_WAIT:
            _warn(
                f"a kernel is compiled here, because the process that compiles it for "
                f"others has taken more than {LONGEST_WAIT:.0f} s; was it stopped?"
            )
            return
        time.sleep(min(max(_POLL, waited / _FINENESS), _LONGEST_POLL))


def _byte(key: bytes) -> int:
    """Return the byte of the file that is the key's; it is beyond the file's end."""
    return int.from_bytes(key[:7])  # a file has 2**63


def _warn(text: str) -> None:
    """Warn, once in a process."""
    global _warned
    if not _warned:
        _warned = True
        environment.warn(f"numba_symm: {text}")


log = logging.getLogger("numba_symm")

MOST = 4096
"""The most kernels in the list of a program."""

_LINE = re.compile(r"[0-9a-f]{64}\n")
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
        keys: of the kernels in it.
    """

    place: Path | None = None
    keys: set[str]

    def __init__(self) -> None:
        self.keys = set()
        process.watch(self)

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
        _listed.place = folder() / f"{_PREFIX}{name}{_SUFFIX}"
    except RuntimeError:  # no home; the cache has warned
        return ()
    found = _read(_listed.place)
    _listed.keys = set(found)
    return found


def _read(place: Path) -> list[str]:
    """Return the keys of a list, each once; warn if it cannot be used."""
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
        _warn_of_list(place, error)
        return []
    return list(dict.fromkeys(line.rstrip("\n") for line in lines))


def remember(key: str) -> None:
    """Add a kernel to the list, by its key in the disk cache."""
    place, known = _listed.place, _listed.keys
    if place is None or key in known or len(known) >= MOST:
        return
    known.add(key)
    try:
        # Lines of several ranks do not mix, because each is one append.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(place, flags, 0o600)
        try:
            os.write(file, f"{key}\n".encode())
        finally:
            os.close(file)
    except OSError as error:
        _listed.place = None
        _warn_of_list(place, error)


def _warn_of_list(place: Path, error: Exception) -> None:
    environment.warn_once(
        f"the list of kernels {place} is ignored ({error}): calls load kernels, which "
        "waits for the GPU"
    )
