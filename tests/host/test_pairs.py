"""Reductions of pairs compile for a GPU."""

import numpy as np
import pytest

from numba_symm.collectives import operations
from numba_symm.collectives.kernel_set import endpoint
from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.collectives.protocols.binding import Call
from numba_symm.gpu.arrays import ArrayView
from tests.kernels import listed

DOUBLE_INT = np.dtype([("value", "f8"), ("index", "i4")], align=True)


@pytest.mark.parametrize(
    ("dtype", "algorithm"),
    [
        ([("value", "f4"), ("index", "i4")], "one_shot_ll"),
        (DOUBLE_INT, "chunked"),
        ([("value", "u8"), ("index", "i8")], "two_shot_marked"),
    ],
)
def test_kernels_of_pairs_compile(dtype, algorithm):
    x = ArrayView(1 << 40, (1000,), np.dtype(dtype), "C", False)
    element, op, count = operations.reduced(x, "minloc", "test")
    assert count == 1000
    assert not element.floating
    assert operations.reduced(x, "minloc", "test")[1] == op
    assert repr(op) != repr(operations.reduced(x, "maxloc", "test")[1])
    with listed() as bound:
        call = Call(x.address, 1 << 41, count, element, op)
        ALL_REDUCE.bind(algorithm, endpoint(2), call)
    for kernel in bound:
        assert kernel.cubin((9, 0))
