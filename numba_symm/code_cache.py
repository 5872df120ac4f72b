"""The disk cache of machine code, shared by processes.

An entry is a SHA-256 digest of its key and code, followed by the code. So damage to an
entry is found before a GPU runs the code. Without a usable entry, code is compiled.

Processes that need the same code at the same time, such as the ranks of a host, share
the work: one compiles, the others wait for it and read its entry. It holds a lock on a
byte of a file in the cache's folder, which ends with the process in whatever way. A
process that has waited for ``LONGEST_WAIT``, because the other one was stopped, say,
compiles itself; so does one that cannot lock. Nothing is loaded on a GPU under a lock:
that may wait for a peer, which may be waiting for the lock.
"""

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

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
    """Return the code stored under ``key``, or None if there is no usable entry."""
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
    """Keep other processes out that have the same key; not if that is impossible."""
    try:
        descriptor = _locked(key)
    except (OSError, RuntimeError) as error:
        descriptor = None
        if _may_write():  # otherwise ``store`` says why
            _warn(
                f"the kernel cache cannot be locked ({error}): ranks compile the same "
                "kernels at the same time; set XDG_CACHE_HOME to a folder on a disk of "
                "this host"
            )
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _locked(key: bytes) -> int:
    """Return a descriptor that locks the key until it is closed, or waited too long.

    Raises:
        OSError: the file cannot be opened or locked.
        RuntimeError: the user's home is unknown.
    """
    byte = _byte(key)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(folder() / _LOCKS, flags, 0o666)
    try:
        last = time.monotonic() + LONGEST_WAIT
        while not locks.try_lock(descriptor, byte):
            if time.monotonic() > last:
                _warn(
                    f"a kernel is compiled here, because the process that compiles it "
                    f"for others has taken more than {LONGEST_WAIT:.0f} s; was it "
                    "stopped?"
                )
                break
            time.sleep(_POLL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _byte(key: bytes) -> int:
    """Return the byte of the file that is the key's; it lies beyond the file's end."""
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
        warnings.warn(f"numba_symm: {text}", RuntimeWarning, stacklevel=2)
