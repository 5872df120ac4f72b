"""The machine code for every element type and kind of operator, for sm_90."""

import re

import pytest

from numba_symm import dtypes
from numba_symm.collectives.kernels import one_shot
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.workspace import ONE_SHOT
from numba_symm.dtypes import UserOperator
from numba_symm.engines import deadline
from numba_symm.gpu import kernels
from tests.machine_code import machine_code, read_together
from tests.operators import ELEMENTS, PAIRS
from tests.whole import WHOLE

ALL = OPERATIONS["all_reduce"].exchange

# Each type once, and each kind of operator: a kernel takes seconds to compile.
CASES = [("bool", "lxor"), ("int8", "avg"), ("int16", "sum"), ("int32", "min")]
CASES += [("int64", "avg"), ("uint8", "bor"), ("uint16", "land"), ("uint32", "prod")]
CASES += [("uint64", "max"), ("float8_e4m3fn", "sum"), ("float8_e5m2", "min")]
CASES += [("float16", "lor"), ("bfloat16", "sum"), ("float32", "avg")]
CASES += [("float64", "sum"), ("complex64", "prod"), ("complex128", "avg")]
FEW = [("bool", "lxor"), ("complex64", "prod"), ("int8", "avg"), ("bfloat16", "sum")]
FEW += [("float8_e4m3fn", "sum"), ("complex128", "avg")]


def all_reduce(name, op):
    return one_shot.kernel(2, ELEMENTS[name], op, False, "ll", 1, ALL)


def exscan(name, op):
    kind = OPERATIONS["exscan"].exchange
    return one_shot.kernel(3, ELEMENTS[name], op, False, "ll", 1, kind)


@pytest.fixture(scope="module", autouse=True)
def read(request):
    """Read the machine code of the kernels that tests with parameters will need."""
    made = {"elements": all_reduce, "some_ranks_elements": exscan}
    found = []
    for item in request.session.items:
        name = item.name.removeprefix("test_").partition("_are_reduced_in_registers")[0]
        if item.path == request.path and name in made:
            found.append((made[name](**item.callspec.params), (9, 0)))
    read_together(found)


def in_registers(kernel):
    usage, text = machine_code(kernel)
    assert usage["STACK"] == usage["LOCAL"] == "0", usage
    assert int(usage["REG"]) <= kernel.registers
    assert re.search(r"LDG\.E\.128", text)
    assert re.search(r"STG\.E\.128", text)
    assert not re.search(r"\b(LDL|STL)\b", text)
    return text


def test_the_cases_hold_every_type_once():
    assert [name for name, _ in CASES] == list(ELEMENTS)
    assert set(FEW) <= set(CASES) <= set(PAIRS)


@pytest.mark.parametrize(("name", "op"), CASES if WHOLE else FEW)
def test_elements_are_reduced_in_registers(name, op):
    text = in_registers(all_reduce(name, op))
    if (name, op) == ("complex64", "prod"):  # the result has the bits of NumPy's
        assert re.search(r"\bFMUL\b", text)
        assert not re.search(r"\bFFMA\b", text)


MARKS = [deadline.kernel()]


@pytest.mark.parametrize("kernel", MARKS)
def test_a_mark_is_one_store_that_the_host_sees_whole(kernel):
    _, text = machine_code(kernel)
    accesses = re.findall(r"\b(?:STG|LDG|ST|LD|ATOMG?|REDG?)\.[\w.]+", text)
    assert accesses == ["STG.E.64.STRONG.SYS"]


TRUTHS = {
    "exclusive or": ("float32", lambda a, b: (a != 0) ^ (b != 0)),
    "and": ("float32", lambda a, b: a > 0 and b > 0),
    "an integer": ("float32", lambda a, b: 1 if (a != 0) != (b != 0) else 0),
    "a float64": ("float32", lambda a, b: 0.0 + ((a != 0) != (b != 0))),
    "complex": ("complex64", lambda a, b: ((a.real != 0) != (b.real != 0)) + 0j),
    "the library's": ("float32", "lor"),
}


@pytest.mark.parametrize("case", TRUTHS)
def test_a_truth_value_as_a_float_is_one_of_two_floats(case):
    """Converted to float32, it was stored as the integer 1."""
    name, op = TRUTHS[case]
    op = op if isinstance(op, str) else UserOperator(op)
    text = in_registers(all_reduce(name, op))
    floats = re.findall(r"\bFSEL R\d+, RZ, 1(\.875)?, ", text)
    assert len(floats) == 16 // ELEMENTS[name].dtype.itemsize


def test_bytes_of_any_alignment_are_posted_in_vectors():
    in_registers(one_shot.kernel(2, ELEMENTS["uint8"], "sum", True, "ll", 1, ALL))


@pytest.mark.parametrize("ragged", [False, True])
def test_the_most_marked_vectors_of_a_thread_stay_in_registers(ragged):
    tiles, element = ONE_SHOT["marked"].tiles(2), ELEMENTS["int32"]
    in_registers(one_shot.kernel(2, element, "sum", ragged, "marked", tiles, ALL))
    kind = OPERATIONS["all_to_all"].exchange
    in_registers(one_shot.kernel(2, element, "sum", ragged, "marked", tiles, kind))


@pytest.mark.parametrize(
    ("name", "op"), [case for case in CASES if case[1] != "avg"] if WHOLE else FEW[:2]
)
def test_some_ranks_elements_are_reduced_in_registers(name, op):
    in_registers(exscan(name, op))


def clamped_sum(a, b):
    return min(a + b, 100)


def scaled(a, b):
    factor = 0.5
    return a + b * factor


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("int8", clamped_sum),
        ("float16", scaled),
        ("float64", lambda a, b: a * a + b),
        ("bool", lambda a, b: a and not b),
        ("complex64", lambda a, b: a - b),
    ],
)
def test_a_users_function_is_compiled_into_the_kernel(name, function):
    op = UserOperator(function)
    in_registers(all_reduce(name, op))


def test_a_users_kernel_never_meets_the_disk(monkeypatch):
    import cuda.core

    for name in ("compiled_once", "load", "store"):
        monkeypatch.setattr(kernels.loads, name, None)
    monkeypatch.setattr(kernels.Kernel, "cubin", lambda kernel, cc: b".text._Z1f\0")
    monkeypatch.setattr(kernels.driver, "call", lambda name, *args: name)
    code = type("Code", (), {"from_cubin": staticmethod(lambda code: Loaded())})
    monkeypatch.setattr(cuda.core, "ObjectCode", code)
    kernel = all_reduce("int32", UserOperator(max_of))
    assert not kernel.cacheable
    kernels._loaded.cache_clear()
    assert kernels._loaded(kernel, (9, 0), 0) == "cuKernelGetFunction"
    kernels._loaded.cache_clear()


def max_of(a, b):
    return max(a, b)


class Loaded:
    handle = 0

    def get_kernel(self, name):
        return self


def test_a_kernel_is_made_once_for_a_function():
    def made(op):
        return all_reduce("int32", op)

    first = made(dtypes.reduction(max_of, "test"))
    assert made(dtypes.reduction(max_of, "test")) is first
    assert made(dtypes.reduction(lambda a, b: a, "test")) is not first
    assert made("max").cacheable


def test_8_bit_floats_are_converted_by_the_hardware_from_8_9_on():
    kernel = all_reduce("float8_e4m3fn", "max")
    usage, text = machine_code(kernel, (8, 9))
    assert re.search(r"F2FP\S*E4M3", text)
    assert usage["STACK"] == "0"


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_halves_accumulate_in_float32(name, op):
    text = all_reduce(name, op).ptx((9, 0))
    instruction = {"sum": r"\badd\.(rn\.)?f32\b", "max": r"\bsetp\.\w+\.f32\b"}[op]
    assert len(re.findall(instruction, text)) >= 4
    assert not re.search(r"\b(add|mul|fma|min|max|setp)\.\S*\bb?f16(x2)?\b", text)
