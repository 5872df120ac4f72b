"""The environment variables that the library reads, each in one place.

========================================== =================================
``NUMBA_SYMM_BACKEND``                     ``vmm``, ``ipc`` or ``host``
``NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES``   ``1``: ranks may share a GPU
``NUMBA_SYMM_TIMEOUT``                     seconds a kernel waits for a peer
``NUMBA_SYMM_SETUP_TIMEOUT``               seconds a set-up call waits for a peer
``NUMBA_SYMM_MULTIPROCESSORS``             the most that a communicator occupies
``NUMBA_SYMM_ISLAND_SIZE``                 the most ranks of a pretended island
``NUMBA_SYMM_ENGINE``                      ``nccl`` or ``mpi``, between islands
``NUMBA_SYMM_SHOW_ISLANDS``                ``1``: rank 0 prints several islands
``NUMBA_SYMM_LOAD_AHEAD``                  ``0``: calls load their kernels
``NUMBA_SYMM_MESSAGE_LIMIT``               bytes sent ahead, in mpi4py's spelling
``NUMBA_SYMM_RECORD``                      ``0``: no record of the ranks' calls
``NUMBA_ENABLE_CUDASIM``                   ``1``: Numba's CUDA simulator
========================================== =================================

A time of 0 means indefinitely. The library also reads the variable
``CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM`` of cuda-bindings, which determines the
stream of the handle 0.
"""

import functools
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import config

from numba_symm.arguments import is_integer, meant
from numba_symm.errors import ArgumentError

SIMULATED = bool(config.ENABLE_CUDASIM)
"""True where kernels run in Numba's CUDA simulator; fixed when numba is imported."""

NO_TIMES = "times of the simulator mean nothing for GPUs"

VARIABLES = (
    "NUMBA_SYMM_BACKEND",
    "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES",
    "NUMBA_SYMM_TIMEOUT",
    "NUMBA_SYMM_SETUP_TIMEOUT",
    "NUMBA_SYMM_MULTIPROCESSORS",
    "NUMBA_SYMM_ISLAND_SIZE",
    "NUMBA_SYMM_ENGINE",
    "NUMBA_SYMM_SHOW_ISLANDS",
    "NUMBA_SYMM_LOAD_AHEAD",
    "NUMBA_SYMM_MESSAGE_LIMIT",
    "NUMBA_SYMM_RECORD",
)
"""The library's own variables."""

_ENDS = "NUMBA_SYMM_ENDS"  # of command/runner.py
_OTHERS = "NUMBA_SYMM_TEST_", _ENDS  # the first of tests/test_mpirun.py


def unknown() -> list[str]:
    """Return a text for each unknown variable that begins with ``NUMBA_SYMM_``."""
    return [
        f"{name} is not known{meant(name, VARIABLES)}; there are {', '.join(VARIABLES)}"
        for name in sorted(os.environ)
        if name.startswith("NUMBA_SYMM_")
        and not name.startswith(_OTHERS)
        and name not in VARIABLES
    ]


@contextmanager
def changed(name: str, value: str) -> Iterator[None]:
    """Give a variable another value within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def killed(pid: int) -> str:
    """Return by what signal a rank's process was killed; "" if that is unknown.

    Only ``numba-symm run --survive`` knows it, a moment after the process has ended.
    """
    folder, end = os.environ.get(_ENDS), time.monotonic() + _SOON
    while folder is not None and time.monotonic() < end:
        with suppress(OSError):
            number = Path(folder, str(pid)).readlink()
            return f"(pid {pid}) was killed by signal {number}"
        time.sleep(0.005)
    return ""


_SOON = 0.1  # seconds


def warn_of_unknown() -> None:
    """Warn of unknown variables, once in a process."""
    for text in unknown():
        warn_once(text)


@functools.cache
def warn_once(text: str) -> None:
    """Warn once in a process, as :func:`warn`."""
    warn(f"numba_symm: {text}")


def warn(text: str) -> None:
    """Warn at the line of the program that called this library."""
    frame, level, ours = sys._getframe().f_back, 2, 1
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "numba_symm":
            ours = level  # between two of ours may be some of contextlib
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=ours + 1)


def backends_of(*, simulated: bool) -> tuple[str, ...]:
    """Return the backends that a process can use, best first."""
    return ("host",) if simulated else ("vmm", "ipc")


BACKENDS = backends_of(simulated=SIMULATED)
"""The backends this process can use, best first."""


def zero_is_per_thread() -> bool:
    """Return whether the handle 0 is the thread's default stream for cuda-bindings."""
    value = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
    return value not in ("", "0")


def work_queues(*, mps: bool) -> int:
    """Return through how many queues a process launches the kernels of its streams.

    Args:
        mps: whether it runs under MPS.
    """
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(given) if given.isdecimal() else 2 if mps else 8


DEFAULT_TIMEOUT = 300.0


def requested_backend(*, simulated: bool = SIMULATED) -> str | None:
    """Return the backend in ``NUMBA_SYMM_BACKEND``, or None.

    Args:
        simulated: whether kernels will run in the simulator.
    """
    name = os.environ.get("NUMBA_SYMM_BACKEND")
    backends = backends_of(simulated=simulated)
    if name is None or name in backends:
        return name
    where = "Numba's CUDA simulator" if simulated else "a process with GPUs"
    raise ArgumentError(
        f"NUMBA_SYMM_BACKEND={name!r}: expected {' or '.join(backends)} in {where}; "
        "correct it or unset it"
    )


def allow_overlapping_devices() -> bool:
    """Return whether several ranks may share one GPU (0 or unset: no)."""
    return _flag("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES")


def show_islands() -> bool:
    """Return whether rank 0 prints the islands, if there are several."""
    return _flag("NUMBA_SYMM_SHOW_ISLANDS")


def loads_ahead() -> bool:
    """Return whether the construction loads kernels that were loaded before."""
    return _flag("NUMBA_SYMM_LOAD_AHEAD", "1")


def records_calls() -> bool:
    """Return whether ranks record their calls on the status board."""
    return _flag("NUMBA_SYMM_RECORD", "1")


DEFAULT_MESSAGE_LIMIT = 256 << 20


def message_limit() -> int:
    """Return the bytes that a rank sends to another one ahead; 0: any number.

    It is for messages of mpi4py's spelling, and for each pair of a communicator.
    """
    value = os.environ.get("NUMBA_SYMM_MESSAGE_LIMIT")
    if value is None:
        return DEFAULT_MESSAGE_LIMIT
    if not value.strip().isdecimal():
        raise ArgumentError(
            f"NUMBA_SYMM_MESSAGE_LIMIT={value!r}: expected a number of bytes, or 0 for "
            "no limit; correct it or unset it"
        )
    return int(value)


def _flag(name: str, default: str = "0") -> bool:
    value = os.environ.get(name, default)
    if value not in ("", "0", "1"):
        raise ArgumentError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


def timeout() -> float:
    """Return the seconds that a kernel waits for a peer; 0: indefinitely."""
    return _seconds("NUMBA_SYMM_TIMEOUT", DEFAULT_TIMEOUT)


def chosen_setup_timeout(asked: float | None = None) -> float:
    """Return the seconds that a set-up call waits for a peer; 0: indefinitely.

    Args:
        asked: the caller's argument; None: the environment's value is used.
    """
    if asked is not None:
        return checked_timeout(asked, f"timeout={asked!r}")
    return _seconds("NUMBA_SYMM_SETUP_TIMEOUT", 0.0)


def _seconds(variable: str, default: float) -> float:
    value = os.environ.get(variable)
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    return checked_timeout(seconds, f"{variable}={value!r}")


def chosen_timeout(asked: float | None) -> float:
    """Return the seconds in the caller's argument; for None, the environment's."""
    return timeout() if asked is None else checked_timeout(asked, f"timeout={asked!r}")


def checked_timeout(seconds: Any, asked: str) -> float:
    """Return ``seconds``. Raise :class:`ArgumentError` if they are wrong.

    Args:
        seconds: the number.
        asked: the argument or variable, for the error's text.
    """
    number = isinstance(seconds, int | float | np.number)
    if not number or not 0 <= seconds < 1e9:  # also refuses NaN
        raise ArgumentError(
            f"{asked}: expected seconds from 0 (wait indefinitely) to 1e9"
        )
    return float(seconds)


def multiprocessors() -> int | None:
    """Return the most multiprocessors of a communicator; None: its default."""
    value = os.environ.get("NUMBA_SYMM_MULTIPROCESSORS")
    if value is None:
        return None
    number = int(value) if value.strip().isdecimal() else None
    return checked_multiprocessors(number, f"NUMBA_SYMM_MULTIPROCESSORS={value!r}")


def chosen_multiprocessors(asked: Any) -> int | None:
    """Return the number in the caller's argument; for None, the environment's."""
    if asked is None:
        return multiprocessors()
    return checked_multiprocessors(asked, f"multiprocessors={asked!r}")


def checked_multiprocessors(number: Any, asked: str) -> int:
    """Return ``number``. Raise :class:`ArgumentError` if it is wrong.

    Args:
        number: the number.
        asked: the argument or variable, for the error's text.
    """
    if not is_integer(number) or number < 1:
        raise ArgumentError(f"{asked}: expected an integer of at least 1")
    return int(number)


def island_size(ranks: int | None = None) -> int | None:
    """Return the most ranks of a pretended island; None: islands are found.

    Args:
        ranks: the number of ranks of the job, which it must not exceed; None: unknown.

    Raises:
        ArgumentError: the variable is not such a number.
    """
    value = os.environ.get("NUMBA_SYMM_ISLAND_SIZE")
    if value is None:
        return None
    number = int(value) if value.strip().isdecimal() else 0
    if number < 1 or (ranks is not None and number > ranks):
        most = "" if ranks is None else f" to {ranks}, the number of ranks of the job"
        least = "at least 1" if ranks is None else "1"
        raise ArgumentError(
            f"NUMBA_SYMM_ISLAND_SIZE={value!r}: expected an integer of {least}{most}; "
            "correct it or unset it"
        )
    return number


ENGINES = ("nccl", "mpi")
"""The engines between islands, best first."""


def requested_engine() -> str | None:
    """Return the engine in ``NUMBA_SYMM_ENGINE``, or None."""
    name = os.environ.get("NUMBA_SYMM_ENGINE")
    if name is None or name in ENGINES:
        return name
    raise ArgumentError(
        f"NUMBA_SYMM_ENGINE={name!r}: expected {' or '.join(ENGINES)}; correct it or "
        "unset it"
    )
