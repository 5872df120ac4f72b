"""numba_symm itself: plans, and plain calls for comparison."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_symm.bench import measure
from numba_symm.bench.bench_operations import BenchOperation, EnqueueOn
from numba_symm.bench.contenders import Launched, OfEveryOperation, Way, Ways
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.protocols.mailboxes import TRANSPORTS
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu.kernels import Bound, bound

NAME = "numba_symm"


def _launched(each: Bound) -> Launched:
    """Return how a kernel is launched; its transport is a part of its name."""
    words = [word for word in each.kernel.constants if isinstance(word, str)]
    transport = [word for word in words if word in TRANSPORTS]
    return {
        "kernel": "_".join([each.kernel.name, *transport]),
        "blocks": each.grid,
        "multiprocessors": each.blocks,
        "early": each.early,
    }


class Ours(OfEveryOperation):
    """Our collectives.

    Args:
        comm: the communicator.
        algorithms: one is measured instead of the algorithm chosen by size; several
            are measured in addition to it.
        plain: whether arrays are ordinary device memory instead of symmetric.

    Attributes:
        comm: our communicator.
    """

    name = NAME

    def __init__(
        self, comm: Communicator, algorithms: tuple[str, ...] = (), plain: bool = False
    ):
        self.version = f"{comm.backend} memory"
        self.comm = comm
        self._main = algorithms[0] if len(algorithms) == 1 else None
        self._others = algorithms if len(algorithms) > 1 else ()
        self._plain = plain

    @property
    def captures(self) -> bool:
        """Whether graphs can capture the calls."""
        return not SIMULATED and measure.captures(self.comm)

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes: symmetric memory, unless ``plain``."""
        if self._plain:
            return super().allocate(nbytes)
        return self.comm.empty(nbytes, np.uint8)

    def ways(self, operation: BenchOperation, x: Any, out: Any, op: str) -> Ways:
        """Return the ways of an operation: plans, and the plain call."""
        alone = operation.in_place

        def way(
            make: Callable[..., EnqueueOn], algorithm: str | None, **more: Any
        ) -> Any:
            try:
                with bound(loading=True) as found:
                    call = make(self.comm, x, out, op, algorithm)
            except ArgumentError as error:  # not every algorithm takes every dtype
                return str(error)
            launches = [_launched(each) for each in found]
            return Way(call, in_place=alone, launches=launches, **more)

        ways: Ways = {"plan": way(operation.plan, self._main)}
        if x is not out:
            ways["call"] = way(operation.call, self._main, eager=True)
        for name in self._others:
            ways[name] = way(operation.plan, name)
        return ways
