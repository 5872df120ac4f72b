"""MPI's operators, as the library's."""

from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import dtypes
from numba_symm.mpi.errors import refusal, unsupported

_NAMES = {
    getattr(MPI, name.upper()).handle: name
    for name in (*dtypes.REDUCTIONS, *dtypes.LOCATED)
    if hasattr(MPI, name.upper())  # MPI has no AVG
}


def operator(op: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Return what the communicator's methods take as ``op``, for items of a dtype.

    Names, such as ``"avg"``, and functions of two scalars are the library's own.
    """
    if not isinstance(op, MPI.Op):
        dtypes.reduction(op, what)  # refuses it, also for a later start
        return op
    name = _NAMES.get(op.handle)
    if name in dtypes.LOCATED and dtype.names is None:
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.MINLOC and MPI.MAXLOC need pairs, such as of MPI.FLOAT_INT; "
            "pass [x, MPI.FLOAT_INT]",
        )
    if name is not None:
        return name
    if op == MPI.OP_NULL:
        raise refusal(
            MPI.ERR_OP, f"{what}: expected an operator, got MPI.OP_NULL; pass MPI.SUM"
        )
    if op in (MPI.REPLACE, MPI.NO_OP):
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.REPLACE and MPI.NO_OP are operators of one-sided calls only;"
            " pass another one",
        )
    raise unsupported(
        f"{what}: an operator of MPI.Op.Create works on host buffers; pass its "
        "function of two scalars as op, which is compiled for the GPU"
    )
