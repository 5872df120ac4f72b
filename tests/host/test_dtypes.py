import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.errors import ArgumentError

TABLE = {  # name: bytes, elements in 8 bytes, accumulated in
    "float16": (2, 4, "float32"),
    "bfloat16": (2, 4, "float32"),
    "float32": (4, 2, "float32"),
    "float64": (8, 1, "float64"),
    "int32": (4, 2, "int64"),
    "int64": (8, 1, "int64"),
}


@pytest.mark.parametrize("name", TABLE)
def test_an_element_knows_its_size_and_what_it_accumulates_in(name):
    found = dtypes.element(getattr(ml_dtypes, name, name), "here")
    itemsize, lanes, accumulate = TABLE[name]
    assert (found.name, found.itemsize, found.lanes) == (name, itemsize, lanes)
    assert found.accumulate == accumulate


def test_an_element_is_found_by_any_spelling_and_is_one_object():
    spellings = ["float32", "f4", "<f4", np.float32, np.dtype(np.float32)]
    assert len({id(dtypes.element(each, "here")) for each in spellings}) == 1


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (np.int8, "int8"),
        (np.uint32, "uint32"),
        (np.bool_, "bool"),
        (np.complex64, "complex64"),
        (">f4", ">f4"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        ([("a", "f4")], r"\[\('a', '<f4'\)\]"),
    ],
)
def test_other_types_are_refused_with_those_there_are(dtype, named):
    with pytest.raises(
        ArgumentError,
        match=rf"^here: cannot reduce {named}; convert the array to one of float16, "
        r"bfloat16, float32, float64, int32, int64$",
    ):
        dtypes.element(dtype, "here")


def test_reductions_have_the_names_of_numpys_functions_or_mpis():
    assert list(dtypes.REDUCTIONS) == ["sum", "prod", "min", "max"]
    for name in dtypes.REDUCTIONS:
        assert dtypes.reduction(name, "here") == name


@pytest.mark.parametrize("a", [1.5, -2.0, np.nan, np.inf])
@pytest.mark.parametrize("b", [1.5, -3.0, np.nan, -np.inf])
def test_reductions_treat_nan_as_numpy_does(a, b):
    with np.errstate(invalid="ignore"):
        for name, function in [("min", np.minimum), ("max", np.maximum)]:
            found = dtypes.REDUCTIONS[name](np.float64(a), np.float64(b))
            np.testing.assert_equal(found, function(a, b))


class Op:
    """Stands for MPI.Op, which compares by value: a name has several handles."""

    def __init__(self, kind):
        self.kind = kind

    def __eq__(self, other):
        return isinstance(other, Op) and self.kind == other.kind

    __hash__ = None


@pytest.fixture
def mpi(monkeypatch):
    """A module like mpi4py.MPI, whose import would start MPI."""
    names = ["SUM", "PROD", "MIN", "MAX", "BAND"]
    module = SimpleNamespace(Op=Op, **{name: Op(name) for name in names})
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    return module


@pytest.mark.parametrize("name", dtypes.REDUCTIONS)
def test_an_mpi_op_has_its_reductions_name(mpi, name):
    assert dtypes.reduction(Op(name.upper()), "here") == name


def test_an_mpi_op_without_a_reduction_is_refused(mpi):
    with pytest.raises(ArgumentError, match=r"^here: op=<.*Op object.* is not known"):
        dtypes.reduction(mpi.BAND, "here")


@pytest.mark.parametrize("op", ["SUM", "mean", "", None, 0, np.add, ["sum"]])
def test_what_is_no_reduction_is_refused_with_those_there_are(op):
    with pytest.raises(ArgumentError) as raised:
        dtypes.reduction(op, "here")
    assert str(raised.value) == (
        f"here: op={op!r} is not known; use 'sum', 'prod', 'min', 'max' or the MPI.Op "
        "of that name"
    )


def test_naming_a_reduction_never_imports_mpi(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ArgumentError):
        dtypes.reduction(Op("SUM"), "here")
    assert "mpi4py.MPI" not in sys.modules
