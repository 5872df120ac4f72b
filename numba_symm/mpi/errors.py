"""Errors of numba_symm and of arguments, as exceptions of MPI.

Each is an ``MPI.Exception`` with the fitting error class. Its text is the library's.
"""

from typing import ParamSpec, TypeVar

from mpi4py import MPI

from numba_symm.errors import (
    ArgumentError,
    BackendError,
    ClosedError,
    SymmError,
)

P = ParamSpec("P")
T = TypeVar("T")


FREED = "Free was called on the communicator; make a new one"


class MPIError(MPI.Exception):
    """An ``MPI.Exception`` with a text of this library.

    Args:
        code: the error class, such as ``MPI.ERR_TRUNCATE``.
        text: the text.
    """

    def __init__(self, code: int, text: str):
        super().__init__(code)
        self.text = text

    def __str__(self) -> str:
        return f"{self.text} ({self.Get_error_string()})"

    __repr__ = __str__


class MPIArgumentError(MPIError, ArgumentError):
    """A wrong argument; also a ``ValueError``, as mpi4py raises for buffers."""


class MPITypeError(MPIArgumentError, TypeError):
    """An argument of a wrong type; also a ``TypeError``, as mpi4py raises."""


class MPIUnsupported(MPIError, NotImplementedError):
    """A call that this library does not have; the text has what to use instead."""


def unsupported(text: str) -> MPIUnsupported:
    """Return the error for a call that is not there."""
    return MPIUnsupported(MPI.ERR_UNSUPPORTED_OPERATION, text)


def refusal(code: int, text: str) -> MPIArgumentError:
    """Return the error for a wrong argument."""
    return MPIArgumentError(code, text)


_CODES: tuple[tuple[type[SymmError], int], ...] = (
    (BackendError, MPI.ERR_NO_MEM),
    (ClosedError, MPI.ERR_COMM),
    (SymmError, MPI.ERR_OTHER),
)


def as_mpi(error: SymmError) -> MPIError:
    """Return an error of the library as an exception of MPI."""
    if isinstance(error, ArgumentError):
        return refusal(MPI.ERR_ARG, str(error))
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    made = MPIError(code, str(error))
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made
