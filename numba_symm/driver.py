"""CUDA driver calls that raise a readable error."""

from typing import Any

from numba_symm.errors import DriverError


def call(name: str, *args: Any) -> Any:
    """Call the driver function ``name`` and return its results, or None.

    Raises:
        DriverError: with the call and the driver's own explanation.
    """
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, reason = driver.cuGetErrorString(status)
        text = reason.decode() if reason else "unknown error"
        raise DriverError(f"{name} failed: {status.name}: {text}")
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)
