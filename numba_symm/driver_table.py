"""The driver's functions that packed calls call, by address.

In the simulator, they are Python functions, which do at once what the driver enqueues.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from numba_symm import driver, environment
from numba_symm.environment import SIMULATED

WHERE = (
    *("cuStreamIsCapturing", "cuStreamGetId", "cuStreamWaitEvent", "cuLaunchKernelEx"),
    *("cuMemcpyDtoDAsync", "cuMemsetD32Async", "cuGraphLaunch", "cuEventRecord"),
)
"""The functions of the driver that are called, in the order of ``Gate.driver``."""

WORD = ctypes.c_int64


def struct(name: str, **fields: Any) -> Any:
    """Return a class of C structures."""
    members = list(fields.items())
    return type(name, (ctypes.Structure,), {"_fields_": members})


Config = struct(
    "Config",
    grid=ctypes.c_uint * 3,
    block=ctypes.c_uint * 3,
    shared=ctypes.c_uint,  # bytes
    stream=ctypes.c_void_p,
    attributes=ctypes.c_void_p,
    count=ctypes.c_uint,
    attribute=ctypes.c_uint64,  # the first one: its identifier, its value
    value=ctypes.c_int * 16,
)
"""The driver's ``CUlaunchConfig``, and one ``CUlaunchAttribute`` after it."""


def launch_config(blocks: int, threads: int, held: int, early: bool) -> Any:
    """Return the driver's description of a launch, without its stream.

    Args:
        blocks: the number of thread blocks.
        threads: of a logical block.
        held: logical blocks of a thread block.
        early: whether it may start while the kernel before it runs.
    """
    config = Config(grid=(blocks, 1, 1), block=(threads, held, 1))
    if early:
        config.attribute = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        config.value[0], config.count = 1, 1
        config.attributes = ctypes.addressof(config) + Config.attribute.offset
    return config


def address_of(function: Any) -> int:
    """Return the address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Raised(threading.local):
    error: BaseException | None = None


_raised = _Raised()


def raised() -> BaseException | None:
    """Return what a step in the simulator has raised in this thread, and forget it."""
    error, _raised.error = _raised.error, None
    return error


_launches: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def stand_in(launch: Any) -> int:
    """Return a number that the simulator takes for a kernel: ``launch.simulate()``."""
    _launches[id(launch)] = launch
    return id(launch)


def _simulate_launch(config: int, number: int, parameters: int, more: int) -> None:
    _launches[number].simulate()


def _simulate_copy(target: int, source: int, nbytes: int, stream: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _simulate_fill(address: int, word: int, count: int, stream: int) -> None:
    ctypes.c_uint32.from_address(address).value = word


def _simulate_nothing(*args: int) -> None:
    pass


ARGUMENTS = (2, 2, 3, 4, 4, 4, 2, 2)  # of the functions in WHERE

_SIMULATED = {
    "cuLaunchKernelEx": _simulate_launch,
    "cuMemcpyDtoDAsync": _simulate_copy,
    "cuMemsetD32Async": _simulate_fill,
}


def callback(function: Callable[..., None], arguments: int) -> Any:
    """Return a C function, whose status is 1 if ``function`` raises."""

    def call(*args: int) -> int:
        try:
            function(*args)
        except BaseException as error:
            _raised.error = error
            return 1
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int, *[WORD] * arguments)(call)


@functools.cache
def _simulated_driver() -> list[Any]:
    return [
        callback(_SIMULATED.get(name, _simulate_nothing), arguments)
        for name, arguments in zip(WHERE, ARGUMENTS, strict=True)
    ]


@functools.cache
def addresses() -> list[int]:
    """Return the addresses of the functions in ``WHERE``."""
    if SIMULATED:
        return [address_of(each) for each in _simulated_driver()]
    own = environment.zero_is_per_thread()
    flags = 2 if own else 1  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, LEGACY
    return [
        int(driver.call("cuGetProcAddress", name.encode(), 12000, flags)[0])
        for name in WHERE
    ]


def address(name: str) -> int:
    """Return the address of one of the functions in ``WHERE``."""
    return addresses()[WHERE.index(name)]


@functools.cache
def launch() -> Callable[..., int]:
    """Return the driver's launch, for steps of Python."""
    kinds = [ctypes.c_int, *[WORD] * 4]
    return ctypes.CFUNCTYPE(*kinds)(address("cuLaunchKernelEx"))
