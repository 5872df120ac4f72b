"""MPI's operators, as the library's."""

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import dtypes
from numba_symm.mpi.errors import refusal, unsupported

_NAMES = {
    getattr(MPI, name.upper()).handle: name
    for name in dtypes.REDUCTIONS
    if hasattr(MPI, name.upper())  # MPI has no AVG
}


def operator(op: Any, what: str) -> Any:
    """Return what the communicator's methods take as ``op``.

    Names, such as ``"avg"``, and functions of two scalars are the library's own.
    """
    if not isinstance(op, MPI.Op):
        return op
    name = _NAMES.get(op.handle)
    if name is not None:
        return name
    if op == MPI.OP_NULL:
        raise refusal(MPI.ERR_OP, f"{what}: expected an operator, got MPI.OP_NULL")
    if op in (MPI.REPLACE, MPI.NO_OP):
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.REPLACE and MPI.NO_OP are operators of one-sided calls only;"
            " pass another one",
        )
    if op.is_predefined:
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.MINLOC and MPI.MAXLOC need pairs, such as of MPI.FLOAT_INT; "
            "pass [x, MPI.FLOAT_INT]",
        )
    raise unsupported(
        f"{what}: an operator of MPI.Op.Create works on host buffers; pass its "
        "function of two scalars as op, which is compiled for the GPU"
    )


def of_pairs(op: Any) -> Callable[..., bool] | None:
    """Return for MINLOC and MAXLOC whether a second pair replaces the first one.

    None for another operator.
    """
    if not isinstance(op, MPI.Op):
        return None
    return {MPI.MINLOC.handle: _lower, MPI.MAXLOC.handle: _higher}.get(op.handle)


def _lower(value: Any, index: Any, other: Any, at: Any) -> bool:
    return bool(other < value or (other == value and at < index))


def _higher(value: Any, index: Any, other: Any, at: Any) -> bool:
    return bool(other > value or (other == value and at < index))


def are_pairs(dtype: np.dtype[Any]) -> bool:
    """Return whether elements are pairs of a value and an index."""
    return dtype.names == ("f0", "f1")
