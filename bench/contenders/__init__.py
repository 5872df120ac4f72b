"""The libraries that are measured: numba_symm ("ours") and its contenders.

A contender has a method for each operation that it supports, with the operation's
name. The method returns the ways of running the operation for (input, output,
reduction), by name. In place, input and output are the same object. The benchmark
reports the fastest way of a contender. A way named after one of our algorithms has its
own column.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from numba_symm.bench.bench_operations import OPERATIONS, BenchOperation, EnqueueOn
from numba_symm.collectives.communicator import Communicator
from numba_symm.environment import SIMULATED

CONTENDERS = {
    "nccl": "nccl",
    "nccl-cupy": "nccl_cupy",
    "nccl-symm": "nccl_symm",
    "torch": "torch",
    "mpi": "mpi",
    "as-mpi4py": "as_mpi4py",
    "on-torch": "on_torch",
    "on-cupy": "on_cupy",
    "launch": "launch",
}
"""The modules of this package, by their names in ``--against``."""

PARTS = ("on-torch", "on-cupy", "launch")
"""Those that show what a part of our calls costs; no ratio compares us with them."""

EAGER = "nccl-cupy,nccl,torch,on-torch,on-cupy,launch"
"""The default of ``--against`` with ``--eager``, on GPUs."""


Launched = dict[str, Any]
"""A launch of ours: its kernel, logical blocks, the most multiprocessors that these
occupy, and whether it is early."""


class Missing(Exception):
    """A contender cannot run here; the text has the reason and the remedy."""


@dataclass(frozen=True)
class Way:
    """One way of running an operation.

    Attributes:
        call: enqueues it.
        in_place: whether it works on its output array alone, which holds the input.
        eager: whether it is left out of graphs.
        launches: how kernels are launched, if that is known: as in the JSON file.
        checked: whether it has results, which the benchmark checks.
    """

    call: EnqueueOn
    in_place: bool = False
    eager: bool = False
    launches: Sequence[Launched] = ()
    checked: bool = True


Ways = dict[str, Way | str]
"""Ways by name, or the reason why a way does not support the arguments."""


def no_context(stream: int) -> AbstractContextManager[Any]:
    """Return an empty context, for contenders whose calls take a stream argument."""
    return nullcontext()


class Contender:
    """A contender; one on ordinary device memory whose calls take a stream argument.

    Attributes:
        name: its name in ``--against``.
        version: for the header.
        current: returns a context that makes a stream current, for libraries that
            need it.
    """

    name: str
    version: str
    current: Callable[[int], AbstractContextManager[Any]] = staticmethod(no_context)

    @property
    def captures(self) -> bool:
        """Whether graphs can capture the calls; false where they use host arrays."""
        return True

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes in the memory that suits this contender best."""
        return cuda.device_array(nbytes, np.uint8)

    def close(self) -> None:
        """Free everything. Collective; all graphs of its calls are closed before."""


class OfEveryOperation(Contender):
    """A contender that has one method for all operations."""

    def __getattr__(self, name: str) -> Callable[[Any, Any, str], Ways]:
        if name not in OPERATIONS:
            raise AttributeError(name)
        return functools.partial(self.ways, OPERATIONS[name])

    def ways(self, operation: BenchOperation, x: Any, out: Any, op: str) -> Ways:
        """Return the ways of an operation."""
        raise NotImplementedError


def load(
    names: Sequence[str],
    comm: Communicator,
    ranks: Any,
    module: Callable[[str], Any] = lambda name: importlib.import_module(
        f"{__name__}.{CONTENDERS[name]}"
    ),
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that all ranks can run, and the others with the reasons.

    Collective.

    Args:
        names: of contenders.
        comm: our communicator, which has bound this rank to its GPU.
        ranks: the mpi4py communicator.
        module: returns the contender's module for a name. The module has ``check()``,
            which is local and raises Missing, and ``make(comm, ranks)``, which is
            collective.
    """
    found: list[Contender] = []
    missing: dict[str, str] = {}
    for name in names:
        made, reason = attempt(ranks, functools.partial(_check, module, name))
        if reason is None:
            step = functools.partial(_make, module, name, comm, ranks)
            made, reason = attempt(ranks, step)
        if reason is None:
            found.append(made)
        else:
            missing[name] = reason
    return found, missing


def _check(module: Callable[[str], Any], name: str) -> None:
    module(name).check()


def _make(module: Callable[[str], Any], name: str, comm: Any, ranks: Any) -> Any:
    return module(name).make(comm, ranks)


def attempt(ranks: Any, step: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the value of ``step``, and the reason if it failed on any rank.

    Collective.
    """
    done, reason = _attempt(step)
    return done, next(filter(None, ranks.allgather(reason)), None)


def _attempt(step: Callable[[], Any]) -> tuple[Any, str | None]:
    # Other libraries may raise anything; the benchmark continues without them.
    try:
        return step(), None
    except Missing as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def from_first_rank(ranks: Any, make: Callable[[], Any]) -> Any:
    """Return rank 0's value of ``make``, or raise on all ranks. Collective."""
    made, reason = _attempt(make) if ranks.rank == 0 else (None, None)
    made, reason = ranks.bcast((made, reason))
    if reason is not None:
        raise Missing(reason)
    return made


def need_gpus() -> None:
    """Raise Missing in Numba's simulator."""
    if SIMULATED:
        raise Missing("needs GPUs, and this run is in Numba's simulator")


def need_a_gpu_each(comm: Any, ranks: Any) -> None:
    """Raise Missing on all ranks if two of them share a GPU. Collective."""
    if len(set(ranks.allgather(comm.device.uuid))) < ranks.size:
        raise Missing("needs a GPU for each rank, and ranks share one")


def imported(name: str, cure: str) -> Any:
    """Return a module, or raise Missing with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{error}; {cure}") from error
