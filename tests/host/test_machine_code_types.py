"""What the compilers make of every element type and kind of operator, for sm_90."""

import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import nvidia
import pytest
from numba import cuda

from numba_symm import dtypes, kernels
from numba_symm.collectives import one_shot, one_shot_pull
from numba_symm.dtypes import UserOperator
from tests.operators import ELEMENTS, PAIRS

TOOLS = Path(next(iter(nvidia.__path__))) / "cu13" / "bin"

# Each type once, each operator on some type; those of bool and bits share one way.
CASES = [(name, "sum") for name in ELEMENTS if name != "bool"]
CASES += [("bool", "lxor"), ("int8", "avg"), ("uint64", "max"), ("int64", "avg")]
CASES += [("float32", "avg"), ("complex64", "prod"), ("complex128", "avg")]
CASES += [("float16", "lor"), ("float8_e5m2", "min"), ("uint16", "band")]


def machine_code(kernel, cc=(9, 0)):
    """Return the resources of a kernel's cubin, and its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin(cc))
        file.flush()
        usage = run("cuobjdump", "-res-usage", file.name)
        return dict(re.findall(r"(\w+):(\d+)", usage)), run("nvdisasm", "-c", file.name)


def run(tool, *arguments):
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def in_registers(kernel):
    usage, text = machine_code(kernel)
    assert usage["STACK"] == usage["LOCAL"] == "0", usage
    assert int(usage["REG"]) <= kernel.registers
    assert re.search(r"LDG\.E\.128", text)
    assert re.search(r"STG\.E\.128", text)
    assert not re.search(r"\b(LDL|STL)\b", text)
    return text


def test_the_cases_hold_every_type_and_operators_that_there_are():
    assert {name for name, _ in CASES} == set(ELEMENTS)
    assert set(CASES) <= set(PAIRS)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_elements_are_reduced_in_registers(name, op):
    text = in_registers(one_shot_pull.kernel(2, ELEMENTS[name], op, False))
    if (name, op) == ("complex64", "prod"):  # whose bits are NumPy's
        assert re.search(r"\bFMUL\b", text)
        assert not re.search(r"\bFFMA\b", text)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_bytes_are_posted_in_vectors(name):
    transport = "sentinel" if ELEMENTS[name].floating else "ll"
    in_registers(one_shot.kernel(2, ELEMENTS[name], "sum", True, transport, 1))


def clamped_sum(a, b):
    return min(a + b, 100)


@cuda.jit(device=True)
def decorated(a, b):
    return clamped_sum(a, b) if a > b else b


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
    in_registers(one_shot_pull.kernel(2, ELEMENTS[name], op, False))


def test_a_users_kernel_never_meets_the_disk(monkeypatch):
    import cuda.core

    monkeypatch.setattr(kernels, "_disk_cache", lambda: pytest.fail("asked"))
    monkeypatch.setattr(kernels.Kernel, "cubin", lambda kernel, cc: b".text._Z1f\0")
    monkeypatch.setattr(kernels.driver, "call", lambda name, *args: name)
    code = type("Code", (), {"from_cubin": staticmethod(lambda code: Loaded())})
    monkeypatch.setattr(cuda.core, "ObjectCode", code)
    kernel = one_shot_pull.kernel(2, ELEMENTS["int32"], UserOperator(max_of), False)
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
        return one_shot_pull.kernel(2, ELEMENTS["int32"], op, False)

    first = made(dtypes.reduction(max_of, "test"))
    assert made(dtypes.reduction(max_of, "test")) is first
    assert made(dtypes.reduction(lambda a, b: a, "test")) is not first
    assert made("max").cacheable


@pytest.mark.parametrize("cc", [(8, 9), (9, 0)])
def test_8_bit_floats_are_converted_by_the_hardware(cc):
    kernel = one_shot_pull.kernel(2, ELEMENTS["float8_e4m3fn"], "sum", False)
    usage, text = machine_code(kernel, cc)
    assert re.search(r"F2FP\S*E4M3", text)
    assert np.int64(usage["STACK"]) == 0
