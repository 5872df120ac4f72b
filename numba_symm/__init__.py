"""Collectives between GPUs, written as Numba CUDA kernels over symmetric memory.

Every rank allocates the same memory, and maps that of every peer into its own address
space. Kernels then access peers' memory directly, over NVLink or PCIe::

    from mpi4py import MPI
    import numpy as np
    import numba_symm as ns

    with ns.Communicator(MPI.COMM_WORLD) as comm:
        x = comm.zeros(1 << 20, np.float32)
        y = comm.all_reduce(x, op="sum")
        comm.synchronize()

The names in ``__all__`` are the public interface; all others may change. Importing
starts neither MPI nor CUDA. Modules that few programs use are imported at their first
use.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from numba_symm import device
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.lifetime import backend
from numba_symm.collectives.plans import Plan
from numba_symm.collectives.requests import Request
from numba_symm.device import Context
from numba_symm.environment import allow_overlapping_devices
from numba_symm.errors import (
    Aborted,
    ArgumentError,
    ArraysDiffer,
    BackendError,
    CallMismatch,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
    DeviceError,
    DriverError,
    ExchangeError,
    PeerAccessError,
    RankLeft,
    SymmError,
)
from numba_symm.gpu.arrays import DeviceArray
from numba_symm.gpu.events import Event, Stream
from numba_symm.launch.devices import GPU, device_has_multicast_support
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.ranks import World
from numba_symm.launch.store import StoreExchange
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.memory.symmetric import SymmetricMemory

if TYPE_CHECKING:
    from numba_symm import sharing
    from numba_symm.sharing import open_shared, share

try:
    __version__ = version("numba-symm")
except PackageNotFoundError:  # run from a checkout
    __version__ = "0+unknown"

__all__ = [
    "GPU",
    "Aborted",
    "ArgumentError",
    "ArraysDiffer",
    "BackendError",
    "CallMismatch",
    "ClosedError",
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "Context",
    "DeviceArray",
    "DeviceError",
    "DriverError",
    "Event",
    "ExchangeError",
    "IpcChannel",
    "PeerAccessError",
    "Plan",
    "RankLeft",
    "Request",
    "StoreExchange",
    "Stream",
    "SymmError",
    "SymmetricMemory",
    "SymmetricMemoryAllocator",
    "World",
    "allow_overlapping_devices",
    "backend",
    "device",
    "device_has_multicast_support",
    "open_shared",
    "share",
    "sharing",
]


def __getattr__(name: str) -> Any:
    """Import the sharing of arrays when a program first names a part of it."""
    if name not in ("open_shared", "share", "sharing"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numba_symm.sharing as module

    found = module if name == "sharing" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
