"""The libraries that are measured: ours, and those it is measured against.

A contender has a method for each operation that it knows, of the operation's name:
from (input, output, reduction) to its ways of running it, by name. The benchmark takes
the fastest of a contender's ways; a way with the name of an algorithm of ours has a
column of its own.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from numba_symm.bench.operations import Call
from numba_symm.collectives.communicator import Communicator
from numba_symm.environment import SIMULATED

CONTENDERS = {
    "nccl": "nccl",
    "nccl-symm": "nccl_symm",
    "torch": "torch",
    "mpi": "mpi",
}
"""The modules of this package by the names that ``--against`` takes."""


class Missing(Exception):
    """A contender cannot run here; the text says why, and what would help."""


@dataclass(frozen=True)
class Way:
    """One way of running an operation.

    Attributes:
        call: enqueues it.
        in_place: it works on its output array alone, which holds the input.
        eager: it is not captured into graphs.
    """

    call: Call
    in_place: bool = False
    eager: bool = False


Ways = dict[str, Way | str]
"""Ways by name; of one that the arguments do not suit, why."""


class Contender(Protocol):
    """What the benchmark asks of a contender, besides the operations.

    Attributes:
        name: as ``--against`` takes it.
        version: for the header.
        captures: whether its calls can be captured into CUDA graphs; those of one
            that works on host arrays cannot.
    """

    name: str
    version: str
    captures: bool

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes, of the kind this contender likes best."""

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context in which calls go to a stream, if it needs one."""

    def close(self) -> None:
        """Free everything. Collective; no graph of its calls is left."""


def no_context(stream: int) -> AbstractContextManager[Any]:
    """Return the context of contenders that need none: calls name the stream."""
    return nullcontext()


def load(
    names: Sequence[str],
    comm: Communicator,
    ranks: Any,
    module: Callable[[str], Any] = lambda name: importlib.import_module(
        f"{__name__}.{CONTENDERS[name]}"
    ),
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that all ranks can run, and why not the others.

    Collective.

    Args:
        names: of contenders.
        comm: our communicator, which has bound this rank to its GPU.
        ranks: the mpi4py communicator.
        module: from a name to the module of the contender: it has ``check()``, which
            raises Missing and is local, and ``make(comm, ranks)``, which is collective.
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
    """Return what ``step`` returns, and why it failed if it did on any rank.

    Collective.
    """
    done, reason = _attempt(step)
    return done, next(filter(None, ranks.allgather(reason)), None)


def _attempt(step: Callable[[], Any]) -> tuple[Any, str | None]:
    # Whatever another library raises: the benchmark goes on without it.
    try:
        return step(), None
    except Missing as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def from_first_rank(ranks: Any, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns on rank 0, or raise on all ranks. Collective."""
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
    """Return a module, or raise Missing with the command that would bring it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{error}; {cure}") from error
