"""CUDA driver calls that raise a readable error."""

import functools
from typing import Any

from numba_symm.errors import DriverError


def call(name: str, *args: Any) -> Any:
    """Call the driver function ``name`` and return its results, or None.

    Raises:
        DriverError: with the call and the driver's own explanation.
    """
    status, *results = function(name)(*args)
    if status:
        raise failure(name, status)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def function(name: str) -> Any:
    """Return a driver function, which returns its status before its results.

    For calls that must cost the host little; whoever calls it looks at the status.
    """
    from cuda.bindings import driver  # looks for the driver when first used

    return getattr(driver, name)


def failure(name: str, status: Any) -> DriverError:
    """Return the error of a driver function that returned ``status``."""
    return DriverError(f"{name} failed: {_explanation(status)}")


def _explanation(status: Any) -> str:
    _, reason = function("cuGetErrorString")(status)
    text = reason.decode() if reason else "unknown error"
    if "CAPTURE" in status.name:
        text += "; this cannot be done while a stream is being captured into a graph"
    return f"{status.name}: {text}"
