"""The disk cache of machine code, shared by processes.

An entry is a SHA-256 digest of its key and code, followed by the code. So damage to an
entry is found before a GPU runs the code. Without a usable entry, code is compiled.

Processes that need the same code at the same time, such as the ranks of a node, share
the work. One process locks a byte of a file in the cache's folder, and compiles. The
Linux kernel releases the lock when the process ends. The other processes wait for the
entry. If the lock is released and there is none, or after ``LONGEST_WAIT``, each of
them compiles, without a lock. So does a process that cannot lock. No process loads code
on a GPU under a lock, because loading may wait for a peer that waits for the lock.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba_symm import environment
from numba_symm.launch import locks

LONGEST_WAIT = 30.0
"""Seconds; a kernel takes a few, also where all cores are in use."""

_POLL = 0.02  # seconds
_LOCKS = "numba-symm.locks"

_DIGEST_BYTES = 32

_EVERY_PROCESS = (
    "every process compiles its kernels, for seconds each; set XDG_CACHE_HOME to a "
    "writable folder with free space"
)

_warned = False


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
    code = load(key)
    if code is None:
        with _alone(key):
            code = load(key)  # another process may have stored it in between
            if code is None:
                code = compile_it()
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
    descriptor = None
    try:
        try:
            descriptor = _opened()
            if not locks.try_lock(descriptor, _byte(key)):
                _await_entry(key, descriptor)
        except (OSError, RuntimeError) as error:
            _say_why(error)
        yield
    finally:
        _close(descriptor, _byte(key))


def _say_why(error: Exception) -> None:
    """Warn that kernels cannot be locked."""
    if _may_write():  # otherwise ``store`` warns of the reason
        _warn(
            f"the kernel cache cannot be locked ({error}): ranks compile the same "
            "kernels at the same time; set XDG_CACHE_HOME to a folder on a disk of "
            "this node"
        )


def _opened() -> int:
    """Return a descriptor of the file of locks.

    Raises:
        OSError: the file cannot be opened.
        RuntimeError: the user's home is unknown.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return os.open(folder() / _LOCKS, flags, 0o666)


def _close(descriptor: int | None, byte: int) -> None:
    """Close the file of locks, and release the lock if this process holds it.

    Closing is not enough, because a child that was forked meanwhile has the
    description, too.
    """
    if descriptor is not None:
        with suppress(OSError):  # no locks here
            locks.unlock(descriptor, byte)
        os.close(descriptor)


def _await_entry(key: bytes, descriptor: int) -> None:
    """Wait until the key has an entry, no process compiles it, or it took too long."""
    byte = _byte(key)
    last = time.monotonic() + LONGEST_WAIT
    while load(key) is None and locks.is_locked(descriptor, byte):
        if time.monotonic() > last:
            _warn(
                f"a kernel is compiled here, because the process that compiles it for "
                f"others has taken more than {LONGEST_WAIT:.0f} s; was it stopped?"
            )
            return
        time.sleep(_POLL)


def _byte(key: bytes) -> int:
    """Return the byte of the file that is the key's; it is beyond the file's end."""
    return int.from_bytes(key[:7])  # a file has 2**63


def _may_write() -> bool:
    try:
        return os.access(folder(), os.W_OK)
    except RuntimeError:
        return False


def _warn(text: str) -> None:
    """Warn, once in a process."""
    global _warned
    if not _warned:
        _warned = True
        environment.warn(f"numba_symm: {text}")
