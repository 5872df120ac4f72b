"""Calls of the CUDA driver that raise errors with its explanation."""

import functools
from typing import Any

from numba_symm.errors import DriverError


def call(name: str, *args: Any) -> Any:
    """Call the driver function ``name`` and return its results, or None.

    Raises:
        DriverError: the call failed; the text states its name and the driver's reason.
    """
    found = function(name)(*args)
    if found[0]:
        raise failure(name, found[0])
    if len(found) == 1:
        return None
    return found[1] if len(found) == 2 else found[1:]


@functools.cache
def function(name: str) -> Any:
    """Return a driver function, which returns its status and then its results.

    It is for frequent calls; the caller checks the status.
    """
    from cuda.bindings import driver  # searches for the driver at its first use

    return getattr(driver, name)


def failure(name: str, status: Any) -> DriverError:
    """Return the error for a driver function that returned ``status``, also an int."""
    return DriverError(f"{name} failed: {_explanation(_result(status))}")


def _result(status: Any) -> Any:
    from cuda.bindings import driver

    return driver.CUresult(status)


def _explanation(status: Any) -> str:
    _, reason = function("cuGetErrorString")(status)
    text = reason.decode() if reason else "unknown error"
    if "CAPTURE" in status.name:
        text += (
            "; make this call before or after the capture of a stream, and end a "
            "capture that raised"
        )
    return f"{status.name}: {text}"
