"""Arguments, read as mpi4py reads them."""

from typing import Any

from numba_symm.arguments import shown
from numba_symm.mpi.errors import MPITypeError


def integer(value: Any, call: str, name: str, code: int) -> int:
    """Return a rank, a root, a tag or the like, or refuse what is none.

    mpi4py converts these to integers of C, and therefore takes floats such as
    ``size / 2`` and integers of NumPy, but no text and no None.

    Args:
        value: the argument.
        call: the call.
        name: the argument's name.
        code: the error class.
    """
    if type(value) is int:
        return value
    try:
        return int(type(value).__int__(value))
    except Exception as error:  # an object's own method may raise anything
        raise MPITypeError(
            code,
            f"{call}: expected an integer as {name}, got {shown(value)}; pass an int",
        ) from error
