"""The launch of an empty kernel, which no call of a library can undercut.

It has no results. Its times are the unit in which calls on one GPU are compared.
"""

import ctypes
from typing import Any

from numba_symm.bench.bench_operations import BenchOperation
from numba_symm.bench.contenders import OfEveryOperation, Way, Ways, need_gpus
from numba_symm.gpu import driver

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


class EmptyKernel(OfEveryOperation):
    """The driver's cuLaunchKernel, through ctypes."""

    name = "launch"
    version = "an empty kernel of one thread"

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

    def ways(self, operation: BenchOperation, x: Any, out: Any, op: str) -> Ways:
        """Return the launch."""
        return {"": self._way}
