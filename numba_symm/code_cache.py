"""The disk cache of machine code, shared by processes.

An entry is a SHA-256 digest of its key and code, followed by the code. So damage to an
entry is found before a GPU runs the code. Without a usable entry, code is compiled.
"""

import functools
import hashlib
import warnings
from typing import Any

_DIGEST_BYTES = 32

_EVERY_PROCESS = (
    "every process compiles its kernels, for seconds each; set XDG_CACHE_HOME to a "
    "writable folder with free space"
)

_warned = False


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
    return hashlib.sha256(key + code).digest()


@functools.cache
def _files() -> Any:
    """Return the cache's files by key.

    Raises:
        OSError: their folder cannot be made.
        RuntimeError: the user's home is unknown.
    """
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache()


def _warn(text: str) -> None:
    """Warn, once in a process."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"numba_symm: {text}", RuntimeWarning, stacklevel=2)
