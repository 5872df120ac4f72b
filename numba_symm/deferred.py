"""What finalizers give back later.

The garbage collector runs finalizers at any moment and in any thread: while a stream is
being captured, which waiting for the GPU would spoil; amid another call, which peers
wait for; or between two steps of the code that looks memory up.
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
        """Give nothing back in a forked child."""
        self.steps.clear()


_queue = _Queue()


def defer(step: Callable[..., object], *args: object) -> None:
    """Have ``step(*args)`` run at the next :func:`give_back`; for finalizers."""
    _queue.steps.append(lambda: step(*args))


def give_back() -> None:
    """Run what finalizers have deferred, unless the GPU cannot be waited for now.

    For calls that may wait for the GPU. What cannot be unmapped safely stays mapped.
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
