"""The launch of an empty kernel, which no call of a library can undercut.

It has no results. Its times are the unit in which calls on one GPU are compared.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numba_symm import driver
from numba_symm.bench.contenders import Way, Ways, need_gpus, no_context
from numba_symm.bench.operations import OPERATIONS

PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry empty() { ret; }
"""

check = need_gpus


def make(comm: Any, ranks: Any) -> "EmptyKernel":
    """Return the contender."""
    return EmptyKernel()


class EmptyKernel:
    """The driver's cuLaunchKernel, through ctypes."""

    name = "launch"
    version = "an empty kernel of one thread"
    captures = True

    def __init__(self) -> None:
        module = driver.call("cuModuleLoadData", PTX.encode() + b"\0")
        kernel = int(driver.call("cuModuleGetFunction", module, b"empty"))
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        launch.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            *[ctypes.c_void_p] * 3,
        ]
        self._way = Way(
            lambda stream: launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None),
            checked=False,
        )

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes, which the kernel does not use."""
        return cuda.device_array(nbytes, np.uint8)

    current = staticmethod(no_context)

    def __getattr__(self, name: str) -> Callable[[Any, Any, str], Ways]:
        if name not in OPERATIONS:
            raise AttributeError(name)
        return self._launched

    def _launched(self, x: Any, out: Any, op: str) -> Ways:
        return {"": self._way}

    def close(self) -> None:
        """Do nothing: the kernel is unloaded with the process."""
