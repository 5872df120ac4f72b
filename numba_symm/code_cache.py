"""The disk cache of machine code, shared by processes.

An entry is a SHA-256 digest of its key and code, followed by the code. So damage to an
entry is found before a GPU runs the code. Without a usable entry, code is compiled.

Processes that need the same code at the same time, such as the ranks of a node, share
the work. One process locks a byte of a file in the cache's folder, and compiles. The
Linux kernel releases the lock when the process ends. The other processes wait for the
entry. A process compiles without a lock in three cases: it cannot lock, it has waited
for ``LONGEST_WAIT``, or the lock was released without an entry. No process loads code
on a GPU under a lock, because loading may wait for a peer that waits for the lock.

A process that waits tests locks only, at growing intervals, and reads the disk when the
wait has ended. The folder may be on another node's disk. So each node has a byte of its
own for each key. The process that compiles locks the key's byte and that of its node;
on another node, the first process that waits locks that of its node. The node's other
processes test only this byte. For locks of its own node, the Linux kernel sends no
request to the node of the disk.

Ranks compile the same kernels at the same time, and Numba types device functions once a
process. So a process that has compiled fewer kernels waits longer before it begins.
"""

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba_symm import environment
from numba_symm.launch import locks

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
    descriptor, bytes_ = None, (_byte(key), _byte(_on_this_node(key)))
    time.sleep(_HEAD_START / (1 + _compiled))
    try:
        try:
            descriptor = _opened()
            if locks.try_lock(descriptor, bytes_[0]):
                locks.try_lock(descriptor, bytes_[1])
            else:
                _await_entry(descriptor, *bytes_)
        except (OSError, RuntimeError) as error:
            _say_why(error)
        yield
    finally:
        _close(descriptor, bytes_)


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


def _close(descriptor: int | None, bytes_: Iterable[int]) -> None:
    """Close the file of locks, and release those that this process holds.

    Closing is not enough, because a child that was forked meanwhile has the
    description, too.
    """
    if descriptor is not None:
        with suppress(OSError):  # no locks here
            for byte in bytes_:
                locks.unlock(descriptor, byte)
        os.close(descriptor)


def _await_entry(descriptor: int, byte: int, of_node: int) -> None:
    """Wait until no process compiles an entry, or it took too long.

    Args:
        descriptor: of the file of locks.
        byte: the entry's byte.
        of_node: the byte of the entry and this node.
    """
    began = time.monotonic()
    while True:
        if not locks.is_locked(descriptor, of_node):  # or this process holds it
            if not locks.is_locked(descriptor, byte):
                return
            locks.try_lock(descriptor, of_node)
        waited = time.monotonic() - began
        if waited > LONGEST_WAIT:
            _warn(
                f"a kernel is compiled here, because the process that compiles it for "
                f"others has taken more than {LONGEST_WAIT:.0f} s; was it stopped?"
            )
            return
        time.sleep(min(max(_POLL, waited / _FINENESS), _LONGEST_POLL))


def _on_this_node(key: bytes) -> bytes:
    return sha256(key + os.uname().nodename.encode()).digest()


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
