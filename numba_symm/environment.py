"""The environment variables the library reads, each in one place.

========================================== =================================
``NUMBA_SYMM_BACKEND``                     ``vmm``, ``ipc`` or ``host``
``NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES``   ``1``: ranks may share a GPU
``NUMBA_SYMM_TIMEOUT``                     seconds a kernel waits; 0: for ever
``NUMBA_ENABLE_CUDASIM``                   ``1``: Numba's CUDA simulator
========================================== =================================
"""

import os
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
)
"""The library's own."""


def backends_of(*, simulated: bool) -> tuple[str, ...]:
    """Return the backends that a process can use, best first."""
    return ("host",) if simulated else ("vmm", "ipc")


BACKENDS = backends_of(simulated=SIMULATED)
"""The backends this process can use, best first."""

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
    value = os.environ.get("NUMBA_SYMM_TIMEOUT")
    if value is None:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    return checked_timeout(seconds, f"NUMBA_SYMM_TIMEOUT={value!r}")


def chosen_timeout(asked: float | None) -> float:
    """Return the seconds that a caller ``asked`` for, or the environment's for None."""
    return timeout() if asked is None else checked_timeout(asked, f"timeout={asked!r}")


def checked_timeout(seconds: Any, asked: str) -> float:
    """Return ``seconds``, or raise :class:`ArgumentError` naming what was ``asked``."""
    number = isinstance(seconds, int | float | np.number)
    if not number or not 0 <= seconds < 1e9:  # also refuses NaN
        raise ArgumentError(f"{asked}: give seconds from 0 (wait for ever) to 1e9")
    return float(seconds)
