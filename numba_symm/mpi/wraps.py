"""The object of this package for a communicator of mpi4py, stored as its attribute.

So a second call of ``Comm`` with the same communicator finds the first one's object.
MPI drops the reference when the communicator of mpi4py is freed. The object then stays
open, because closing it is collective.
"""

import functools
from typing import Any

from mpi4py import MPI

from numba_symm.errors import ArgumentError


@functools.cache
def _key() -> int:
    return MPI.Comm.Create_keyval()  # MPI copies no attribute to a duplicate


def find(comm: Any) -> Any:
    """Return the object for a communicator, or None."""
    if not isinstance(comm, MPI.Comm) or not comm or comm.is_inter:
        return None
    return comm.Get_attr(_key())


def note(made: Any) -> None:
    """Make an object the one for its communicator."""
    made.host.Set_attr(_key(), made)


def forget(made: Any) -> None:
    """Let later calls make a new object."""
    if getattr(find(made.host), "_life", None) is made._life:
        made.host.Delete_attr(_key())


def check_equal(first: dict[str, Any], again: dict[str, Any]) -> None:
    """Refuse options that differ from those of the first call."""
    first, again = [
        {name: each for name, each in given.items() if each is not None}
        for given in (first, again)
    ]
    if not _equal(first, again):
        raise ArgumentError(
            "Comm: expected the options of the first MPI.Comm of this communicator, "
            f"{_named(first)}, got {_named(again)}; pass the same, pass comm.Dup(), or "
            "free the first one"
        )


def _equal(first: dict[str, Any], again: dict[str, Any]) -> bool:
    return first.keys() == again.keys() and all(
        each is again[name] or bool(each == again[name]) for name, each in first.items()
    )


def _named(given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={each!r}" for name, each in sorted(given.items()))
