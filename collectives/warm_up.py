"""Compiling while a communicator is constructed.

The construction waits for the driver and for other ranks. Meanwhile, a thread imports
Numba's compiler, and compiles device functions that most kernels share. The first call
compiles what is still missing. The construction waits for the thread, which ends after
the imports or the next device function. So it never runs beside the user's code.

If kernels of this version have been compiled before, the first call probably finds its
kernel in the disk cache, and the thread compiles nothing.
"""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from numba_symm import dtypes
from numba_symm.collectives import kernel_set
from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.collectives.protocols.binding import Call
from numba_symm.environment import SIMULATED
from numba_symm.kernels import Kernel, bound, were_compiled, without_collecting
from numba_symm.launch.nodes import MOST_RANKS

_INTERVAL = 1e-4
"""Seconds after which the construction gets Python's lock back from the thread.

The default is 5 ms, and the construction gives the lock away some hundred times.
"""

_alone = threading.Lock()


@contextmanager
def while_constructing(size: int) -> Iterator[None]:
    """Compile device functions in a thread until the block ends.

    Args:
        size: the number of ranks.
    """
    if SIMULATED or size == 1 or not _alone.acquire(blocking=False):
        yield
        return
    stop = threading.Event()
    errors: list[Exception] = []
    thread = threading.Thread(target=_compile, args=(size, stop, errors))
    with ExitStack() as undo:  # run in reverse order
        undo.callback(_alone.release)
        undo.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_INTERVAL)
        with suppress(RuntimeError):  # no thread is left; other ranks need this one
            thread.start()
            undo.callback(thread.join)
            undo.callback(stop.set)
        yield
    for error in errors:
        warnings.warn(
            f"numba_symm: kernels cannot be compiled: {error!r}",
            RuntimeWarning,
            stacklevel=5,
        )


def _compile(size: int, stop: threading.Event, errors: list[Exception]) -> None:
    """Compile the device functions of the first kernel of many programs.

    It runs without the garbage collector. That would call finalizers of the program's
    objects in this thread, which has no CUDA context, and may not use MPI.
    """
    try:
        with without_collecting():
            if not were_compiled():
                first_kernel(min(size, MOST_RANKS)).compile_functions(stop.is_set)
    except Exception as error:  # Numba's error; the first call raises it again
        errors.append(error)


def first_kernel(size: int) -> Kernel:
    """Return the kernel of a small all-reduce of float32 between so many ranks."""
    end = kernel_set.endpoint(size)
    element = dtypes.element(np.float32, "all_reduce")
    call = Call(0, 0, element.lanes, element, "sum")
    name = ALL_REDUCE.chosen(None, call.nbytes, size, element, end.choices)
    with bound() as found:
        ALL_REDUCE.bind(name, end, call)
    return found[0].kernel
