"""The environment variables the library reads, each in one place.

========================================== =================================
``NUMBA_SYMM_BACKEND``                     ``vmm``, ``ipc`` or ``host``
``NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES``   ``1``: ranks may share a GPU
``NUMBA_SYMM_TIMEOUT``                     seconds a kernel waits; 0: for ever
``NUMBA_SYMM_SETUP_TIMEOUT``               seconds set-up calls wait
``NUMBA_SYMM_MULTIPROCESSORS``             how many a communicator may take
``NUMBA_ENABLE_CUDASIM``                   ``1``: Numba's CUDA simulator
========================================== =================================

And cuda-bindings' ``CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM``, which says what
stream the handle 0 names.
"""

import functools
import os
import warnings
from typing import Any

import numpy as np
from numba.core import config

from numba_symm.errors import ArgumentError

SIMULATED = bool(config.ENABLE_CUDASIM)
"""True where kernels run in Numba's CUDA simulator; fixed when numba is imported."""

VARIABLES = (
    "NUMBA_SYMM_BACKEND",
    "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES",
    "NUMBA_SYMM_TIMEOUT",
    "NUMBA_SYMM_SETUP_TIMEOUT",
    "NUMBA_SYMM_MULTIPROCESSORS",
)
"""The library's own."""

_OF_TESTS = "NUMBA_SYMM_TEST_"  # of tests/test_mpirun.py


def unknown() -> list[str]:
    """Return what is to be said of variables that only look like the library's."""
    return [
        f"{name} is not known; there are {', '.join(VARIABLES)}"
        for name in sorted(os.environ)
        if name.startswith("NUMBA_SYMM_")
        and not name.startswith(_OF_TESTS)
        and name not in VARIABLES
    ]


def warn_of_unknown() -> None:
    """Warn of such variables, once in a process."""
    for text in unknown():
        warn_once(text)


@functools.cache
def warn_once(text: str) -> None:
    """Warn the caller of the function that calls this one's caller."""
    warnings.warn(f"numba_symm: {text}", RuntimeWarning, stacklevel=4)


def backends_of(*, simulated: bool) -> tuple[str, ...]:
    """Return the backends that a process can use, best first."""
    return ("host",) if simulated else ("vmm", "ipc")


BACKENDS = backends_of(simulated=SIMULATED)
"""The backends this process can use, best first."""


def zero_is_per_thread() -> bool:
    """Return whether cuda-bindings take handle 0 for the thread's default stream."""
    value = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
    return value not in ("", "0")


DEFAULT_TIMEOUT = 300.0


def requested_backend(*, simulated: bool = SIMULATED) -> str | None:
    """Return the backend that ``NUMBA_SYMM_BACKEND`` asks for, or None.

    Args:
        simulated: kernels run in the simulator, as they do in this process or not.
    """
    name = os.environ.get("NUMBA_SYMM_BACKEND")
    backends = backends_of(simulated=simulated)
    if name is None or name in backends:
        return name
    where = "Numba's CUDA simulator" if simulated else "a process with GPUs"
    raise ArgumentError(
        f"NUMBA_SYMM_BACKEND={name!r} cannot be used: in {where} it may be "
        f"{' or '.join(backends)}; correct it or unset it"
    )


def allow_overlapping_devices() -> bool:
    """Return whether several ranks may share one GPU (0 or unset: no)."""
    value = os.environ.get("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", "0")
    if value not in ("", "0", "1"):
        raise ArgumentError(
            f"NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES={value!r}: set it to 0 or 1"
        )
    return value == "1"


def timeout() -> float:
    """Return the seconds a kernel may wait for a peer; 0 means for ever."""
    return _seconds("NUMBA_SYMM_TIMEOUT", DEFAULT_TIMEOUT)


def chosen_setup_timeout(asked: float | None = None) -> float:
    """Return the seconds a set-up call may wait for a peer; 0 means for ever.

    Those that a caller ``asked`` for, or the environment's for None.
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
    """Return the seconds that a caller ``asked`` for, or the environment's for None."""
    return timeout() if asked is None else checked_timeout(asked, f"timeout={asked!r}")


def checked_timeout(seconds: Any, asked: str) -> float:
    """Return ``seconds``, or raise :class:`ArgumentError` naming what was ``asked``."""
    number = isinstance(seconds, int | float | np.number)
    if not number or not 0 <= seconds < 1e9:  # also refuses NaN
        raise ArgumentError(f"{asked}: give seconds from 0 (wait for ever) to 1e9")
    return float(seconds)


def multiprocessors() -> int | None:
    """Return how many multiprocessors a communicator may take; None: its default."""
    value = os.environ.get("NUMBA_SYMM_MULTIPROCESSORS")
    if value is None:
        return None
    number = int(value) if value.strip().isdecimal() else None
    return checked_multiprocessors(number, f"NUMBA_SYMM_MULTIPROCESSORS={value!r}")


def chosen_multiprocessors(asked: Any) -> int | None:
    """Return how many a caller ``asked`` for, or the environment's for None."""
    if asked is None:
        return multiprocessors()
    return checked_multiprocessors(asked, f"multiprocessors={asked!r}")


def checked_multiprocessors(number: Any, asked: str) -> int:
    """Return ``number``, or raise :class:`ArgumentError` naming what was ``asked``."""
    integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not integer or number < 1:
        raise ArgumentError(f"{asked}: expected an integer from 1")
    return int(number)
