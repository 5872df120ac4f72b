import math
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from numba_symm import dtypes
from numba_symm.errors import ArgumentError
from tests.operators import ELEMENTS, NUMPYS, PAIRS, same, special

TABLE = {  # name: bytes, elements in 16 bytes, accumulated in
    "bool": (1, 16, "bool"),
    "int8": (1, 16, "int32"),
    "int16": (2, 8, "int32"),
    "int32": (4, 4, "int64"),
    "int64": (8, 2, "int64"),
    "uint8": (1, 16, "int32"),
    "uint16": (2, 8, "int32"),
    "uint32": (4, 4, "int64"),
    "uint64": (8, 2, "uint64"),
    "float8_e4m3fn": (1, 16, "float32"),
    "float8_e5m2": (1, 16, "float32"),
    "float16": (2, 8, "float32"),
    "bfloat16": (2, 8, "float32"),
    "float32": (4, 4, "float32"),
    "float64": (8, 2, "float64"),
    "complex64": (8, 2, "complex64"),
    "complex128": (16, 1, "complex128"),
}

every_dtype = pytest.mark.parametrize("name", ELEMENTS)


@pytest.mark.parametrize("name", TABLE)
def test_an_element_has_its_size_and_its_accumulation_type(name):
    found = dtypes.element(getattr(ml_dtypes, name, name), "here")
    itemsize, lanes, accumulate = TABLE[name]
    assert (found.name, found.itemsize, found.lanes) == (name, itemsize, lanes)
    assert found.accumulate == accumulate


def test_every_spelling_of_a_dtype_is_the_same_element():
    spellings = ["float32", "f4", "<f4", np.float32, np.dtype(np.float32)]
    assert len({id(dtypes.element(each, "here")) for each in spellings}) == 1


@every_dtype
def test_64_one_bits_are_nan_for_floats_alone_even_without_the_top_bit(name):
    kind = ELEMENTS[name]
    words = np.array([-1, 2**63 - 1] * 2, np.int64).view(kind.dtype)
    assert kind.floating == bool(np.all(words != words))


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (np.longdouble, "float128"),
        (">f4", ">f4"),
        ("M8[s]", r"datetime64\[s\]"),
        (ml_dtypes.float8_e4m3fnuz, "float8_e4m3fnuz"),
        (ml_dtypes.int4, "int4"),
        ([("a", "f4")], r"\[\('a', '<f4'\)\]"),
    ],
)
def test_other_types_are_refused_with_a_list_of_types(dtype, named):
    with pytest.raises(
        ArgumentError,
        match=rf"^here: expected a dtype that has operators, got {named}; convert the "
        "array to one of float16, bfloat16, .*, bool, int8, .*, uint64, "
        "float8_e4m3fn, float8_e5m2$",
    ):
        dtypes.element(dtype, "here")


@pytest.mark.parametrize("nbytes", [*range(1, 17)])
def test_elements_of_any_size_are_moved_as_integers(nbytes):
    found, count = dtypes.moved(np.dtype(f"V{nbytes}"), 3)
    assert found.itemsize * count == 3 * nbytes
    assert found.itemsize == min(8, nbytes & -nbytes)
    assert not found.floating


def test_every_operator_has_a_name():
    assert list(dtypes.REDUCTIONS) == list(NUMPYS)
    for name in dtypes.REDUCTIONS:
        assert dtypes.reduction(name, "here") == name


REFUSED = [(name, op) for name in ELEMENTS for op in NUMPYS if (name, op) not in PAIRS]


def test_dtypes_lack_only_these_operators():
    floats = [name for name in ELEMENTS if TABLE[name][2].startswith("float")]
    without = {(name, op) for name in floats for op in dtypes.BITWISE}
    without |= {
        (name, op)
        for name in ("complex64", "complex128")
        for op in ("min", "max", *dtypes.BITWISE, *dtypes.LOGICAL)
    }
    assert set(REFUSED) == without | {("bool", "avg")}


@pytest.mark.parametrize(("name", "op"), REFUSED)
def test_an_operator_that_a_dtype_lacks_is_refused_with_a_list(name, op):
    with pytest.raises(ArgumentError) as raised:
        dtypes.check(op, ELEMENTS[name], "here")
    text = str(raised.value)
    wanted = f"here: expected an operator of {name}, got op={op!r}; pass one of 'sum', "
    assert text.startswith(wanted)
    known = text.partition(";")[2]
    assert all((repr(each) in known) == ((name, each) in PAIRS) for each in NUMPYS)


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_an_operator_of_a_dtype_has_an_identity(name, op):
    kind = ELEMENTS[name]
    dtypes.check(op, kind, "here")
    neutral = dtypes.identity(op, kind.dtype)
    assert neutral.dtype == kind.dtype
    if op == "avg" or (op == "prod" and kind.complex):
        return  # avg divides; inf * 0 is NaN
    values = special(name)
    found = np.array([neutral] * len(values), kind.dtype)
    with np.errstate(all="ignore"):
        for pair in ((found, values), (values, found)):
            wide = [each.astype(kind.accumulate) for each in pair]
            result = NUMPYS[op](*wide).astype(kind.dtype)
            expected = values
            if op in dtypes.LOGICAL:
                expected = (values != 0).astype(kind.dtype)
            if op in ("min", "max"):  # NumPy may return 0.0 for -0.0
                expected, result = expected + kind.dtype.type(0), result + 0
                result = result.astype(kind.dtype)
            assert same(result, expected).all()


def test_8_bit_floats_need_a_gpu_that_converts_them():
    for name in ELEMENTS:
        for capability in [(8, 9), (9, 0), (10, 0)]:
            dtypes.check_capability(ELEMENTS[name], capability, "a GPU", "here")
        if not name.startswith("float8"):
            dtypes.check_capability(ELEMENTS[name], (8, 0), "a GPU", "here")
            continue
        with pytest.raises(ArgumentError) as raised:
            dtypes.check_capability(ELEMENTS[name], (8, 6), "NVIDIA A40", "here")
        assert str(raised.value) == (
            f"here: expected compute capability 8.9 or higher for {name}, got 8.6 of "
            "NVIDIA A40; convert the array to float16 or bfloat16"
        )


def larger(a, b):
    return a if a > b else b


def test_a_function_is_an_operator_that_equals_only_itself():
    found = dtypes.reduction(larger, "here")
    assert found == dtypes.reduction(larger, "there")
    assert found.function is larger
    other = dtypes.reduction(lambda a, b: a, "here")
    assert found != other
    assert len({found, other, dtypes.reduction(larger, "here")}) == 2
    for name in ELEMENTS:
        dtypes.check(found, ELEMENTS[name], "here")


@pytest.mark.parametrize(
    ("function", "kinds", "why"),
    [
        # What Numba compiles.
        (lambda a: a > 0, [np.float32], ""),
        (lambda a: 1, [np.complex64], ""),
        (lambda a: a * 2.0, [np.int32], ""),
        (lambda a: math.log(a - 1), [np.float32], ""),  # fails for some numbers only
        (lambda a: (a, 1), [np.float32, np.float64], ""),
        # What it does not.
        (lambda a: None, [np.float32], "expected a number as the result, to be con"),
        (lambda a: 1j, [np.float32], "converted to float32, got 1j"),
        (lambda a: "1", [np.float32], "converted to float32, got '1'"),
        (lambda a: [a], [np.float32], "converted to float32, got ["),
        (
            lambda a: np.ones(3),
            [np.float32],
            "a number as the result, got arr",
        ),
        (lambda a: 1 << 70, [np.int64], "converted to int64, got 1180591620717411"),
        (lambda a: (a, a), [np.float32], "converted to float32, got ("),
        (lambda a: a, [np.float32] * 2, "expected 2 numbers as the result, got "),
        (
            lambda a: (a, a, a),
            [np.float32] * 2,
            "expected 2 numbers as the result, got",
        ),
        (lambda a: (a, None), [np.float32] * 2, "converted to float32, got None"),
        (lambda a: a.absent, [np.float32], "AttributeError: "),
        (lambda a: absent, [np.float32], "NameError: name 'absent'"),  # noqa: F821
        (lambda a: a + "1", [np.float32], "TypeError: "),
    ],
)
def test_the_simulator_finds_what_numba_does_not_compile(function, kinds, why):
    found = dtypes.unfit(function, [np.float32(1)], kinds)
    assert why in found if why else not found, found


def test_a_function_is_shown_by_its_name_without_an_address():
    assert str(dtypes.reduction(larger, "here")) == f"{__name__}.larger"
    inner = dtypes.reduction(lambda a, b: a, "here")
    assert str(inner).endswith("without_an_address.<locals>.<lambda>")


def function_of(source, scale=3, **around):
    """Return a new function ``op`` of that source, with a closure."""
    names = {"np": np, "helper": larger, **around}
    exec(f"def outer(scale):\n    {source}\n    return op", names)
    return names["outer"](scale)


BODIES = [
    function_of("op = lambda a, b: a + b"),
    function_of("op = lambda a, b: a * b"),
    function_of("op = lambda a, b: a + 2 * b"),
    function_of("op = lambda a, b: a + scale * b"),
    function_of("op = lambda a, b: a + scale * b", scale=4),
    function_of("op = lambda a, b: helper(a, b)"),
    function_of("op = lambda a, b: helper(a, b)", helper=function_of("op = max")),
    function_of("op = lambda a, b: helper[0]", helper=np.arange(3)),
    function_of("op = lambda a, b: helper[0]", helper=np.arange(4)),
    function_of("op = lambda a, b: helper * a", helper=np.float32(2)),
    function_of("op = lambda a, b, c=1: a + b"),
]


def test_functions_of_other_bodies_are_shown_as_such():
    """They have one name, but ranks that compare these texts find that they differ."""
    shown = {repr(dtypes.reduction(function, "here")) for function in BODIES}
    assert len(shown) == len(BODIES)
    again = function_of("op = lambda a, b: a + scale * b", scale=3)
    assert repr(dtypes.reduction(again, "here")) in shown


def test_a_function_decorated_by_numba_is_its_plain_function():
    compiled = cuda.jit(device=True)(larger)
    assert dtypes.reduction(compiled, "here") == dtypes.UserOperator(larger)


@pytest.mark.parametrize("function", [lambda: 0, lambda a: a, lambda a, b, c: a])
def test_a_function_that_does_not_take_two_scalars_is_refused(function):
    op = dtypes.reduction(function, "here")
    with pytest.raises(ArgumentError, match=r"^here: expected a function of two scal"):
        dtypes.check(op, ELEMENTS["float32"], "here")


def test_a_functions_identity_is_unknown():
    with pytest.raises(ArgumentError, match=r"^identity: .*the function .*larger;"):
        dtypes.identity(dtypes.UserOperator(larger), np.float32)
    with pytest.raises(ArgumentError, match=r"^identity: .* got op='min'"):
        dtypes.identity("min", np.complex64)


class Op:
    """A stand-in for MPI.Op, which compares by value: a name has several handles."""

    def __init__(self, kind):
        self.kind = kind

    def __eq__(self, other):
        return isinstance(other, Op) and self.kind == other.kind

    __hash__ = None


@pytest.fixture
def mpi(monkeypatch):
    """A stand-in for mpi4py.MPI, whose import would initialize MPI."""
    names = ["SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    names += ["LAND", "LOR", "LXOR", "MINLOC", "MAXLOC", "REPLACE"]
    module = SimpleNamespace(Op=Op, **{name: Op(name) for name in names})
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    return module


@pytest.mark.parametrize(
    "name", [each for each in (*dtypes.REDUCTIONS, *dtypes.LOCATED) if each != "avg"]
)
def test_an_mpi_op_has_its_reductions_name(mpi, name):
    assert dtypes.reduction(Op(name.upper()), "here") == name


def test_an_mpi_op_without_a_reduction_is_refused(mpi):
    with pytest.raises(ArgumentError, match=r"^here: .*, got op=<.*Op object>;"):
        dtypes.reduction(mpi.REPLACE, "here")


@pytest.mark.parametrize(
    ("op", "meant"),
    [
        *((wrong, "") for wrong in ("", None, 0, [1])),
        *((wrong, " (did you mean 'sum'?)") for wrong in ("SUM", "add", "smu", np.add)),
        *((wrong, " (did you mean 'max'?)") for wrong in ("maximum", np.maximum)),
        ("mean", " (did you mean 'avg'?)"),
        (np.logical_or, " (did you mean 'lor'?)"),
    ],
)
def test_an_unknown_operator_is_refused_with_a_list(op, meant):
    with pytest.raises(ArgumentError) as raised:
        dtypes.reduction(op, "here")
    assert str(raised.value) == (
        f"here: expected an operator, got op={op!r}{meant}; pass one of 'sum', 'prod', "
        "'min', 'max', 'avg', 'band', 'bor', 'bxor', 'land', 'lor', 'lxor', 'minloc', "
        "'maxloc', the MPI.Op of that name, or a function of two scalars"
    )


def test_the_error_for_an_array_as_operator_names_out():
    text = r"got the array op=ndarray; write all_reduce\(x, out=y\) for an output"
    with pytest.raises(ArgumentError, match=text):
        dtypes.reduction(np.zeros(3), "all_reduce")


def test_looking_up_an_operator_does_not_import_mpi(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ArgumentError):
        dtypes.reduction(Op("SUM"), "here")
    assert "mpi4py.MPI" not in sys.modules
