"""Releases that finalizers defer.

The garbage collector runs finalizers at any moment and in any thread. At that moment, a
stream may be in a capture, which a wait for the GPU would invalidate. Peers may wait
for the call during which the finalizer runs. Or that call may be in the middle of a
look-up of memory.
"""

import warnings
from collections import deque
from collections.abc import Callable

from numba_symm import forks, streams
from numba_symm.environment import SIMULATED
from numba_symm.errors import DriverError, SymmError


class _Queue:
    def __init__(self) -> None:
        self.steps: deque[Callable[[], object]] = deque()
        forks.watch(self)

    def disown(self) -> None:
        """Release nothing in a forked child."""
        self.steps.clear()


_queue = _Queue()


def defer(step: Callable[..., object], *args: object) -> None:
    """Run ``step(*args)`` in the next :func:`give_back`. For finalizers."""
    _queue.steps.append(lambda: step(*args))


def give_back() -> None:
    """Run the steps that finalizers have deferred.

    For calls that may wait for the GPU. If that is impossible now, nothing is run, so
    memory that cannot be unmapped safely stays mapped.
    """
    steps = _queue.steps
    if not steps:
        return
    if not SIMULATED:
        try:
            streams.synchronize_device()
        except DriverError:  # in a capture, or after a fault
            return
    while steps:
        try:
            step = steps.popleft()
        except IndexError:  # another thread took it
            return
        try:
            step()
        except SymmError as error:
            text = f"memory of a dropped object stays until the process ends: {error}"
            warnings.warn(text, ResourceWarning, stacklevel=2)
