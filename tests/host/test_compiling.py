"""What Numba compiles once a process, and what again for each kernel."""

import operator
import re

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types
from numba.cuda.utils import numba_target_override

from numba_symm import dtypes
from numba_symm.collectives.kernels import (
    chunked,
    one_shot,
)
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.device import compiler, models, ptx

FLOAT32 = dtypes.element(np.float32, "test")
INT64 = dtypes.element(np.int64, "test")
ALL, SCAN, BROADCAST = (
    OPERATIONS[name].exchange for name in ("all_reduce", "scan", "broadcast")
)


@pytest.fixture
def compiled(monkeypatch):
    """Return the names of the device functions that are compiled from now on."""
    found = []
    compile_it = compiler.compiled

    def noting(function, *args):
        module = function.__module__.rpartition(".")[2]
        found.append(f"{module}.{function.__qualname__.rpartition('.')[2]}")
        return compile_it(function, *args)

    monkeypatch.setattr(compiler, "compiled", noting)
    return found


def compile_functions(kernel):
    ptx.device_function(kernel.function).compile_device(kernel.signature)


def reduced_by(op, transport="sentinel", kind=ALL):
    return one_shot.kernel(5, FLOAT32, op, False, transport, 1, kind)


def test_kernels_of_two_operators_share_all_but_the_operator(compiled):
    compile_functions(reduced_by("prod"))
    assert "mailboxes.receive" in compiled
    instructions = {name for name in compiled if name.startswith("ptx.")}
    assert not instructions  # each function takes milliseconds, intrinsics do not
    compiled.clear()
    compile_functions(reduced_by("min"))
    apart = {name.partition(".")[0] for name in compiled}
    assert "dtypes._min" in compiled
    assert apart <= {"dtypes", "arithmetic", "lanes", "order", "exchanges", "one_shot"}
    assert "order.in_rank_order" not in compiled


def test_kernels_of_two_types_and_operations_share_what_moves_data(compiled):
    compile_functions(chunked.kernel(5, FLOAT32, "max", False, ALL, True))
    compile_functions(chunked.kernel(5, FLOAT32, "max", False, SCAN, False))
    compile_functions(reduced_by("max", "marked"))
    compiled.clear()
    compile_functions(chunked.kernel(5, INT64, "max", False, ALL, True))
    compile_functions(chunked.kernel(5, INT64, "max", False, SCAN, False))
    compile_functions(one_shot.kernel(5, INT64, "max", False, "marked", 1, SCAN))
    assert "order.of_ring" in compiled
    shared = {"flags.raise_flags", "flags.await_flags", "chunked.send"}
    shared |= {"chunked.collect", "mailboxes.poll", "mailboxes.receive_of"}
    shared |= {"mailboxes.box", "mailboxes.post_one", "one_shot.post"}
    assert not shared & set(compiled)


def test_the_code_is_numbas_own():
    """Numba compiles the kernel with all its passes, options and look-ups."""
    kernel = one_shot.kernel(12, FLOAT32, "sum", True, "marked", 2, ALL)
    bounds = kernel.threads * kernel.held, 1
    given = kernel.function, kernel.signature
    mine = compiler.kernel_ptx(*given, (9, 0), bounds)
    numbas, _ = cuda.compile(
        kernel.function,
        types.void(*kernel.signature),
        device=False,
        abi="numba",
        cc=(9, 0),
        output="ptx",
        launch_bounds=bounds,
    )
    assert len(mine) > 10_000
    assert renamed(mine) == renamed(numbas)


def renamed(ptx):
    """Return PTX with numbers in place of mangled names, which have the options.

    Variables that Numba adds for functions are dropped.
    """
    names = {}

    def number(name):
        return names.setdefault(name[0], f"name{len(names)}")

    ptx = re.sub(r"\.common \.global .*NumbaEnv.*\n", "", ptx)
    return re.sub(r"_Z\w+", number, ptx)


@pytest.fixture
def anew(monkeypatch):
    """Return the names of the functions that Numba compiles from now on."""
    found = []
    compile_it = compiler._compiled_anew

    def noting(function, *args):
        found.append(function.__name__)
        return compile_it(function, *args)

    monkeypatch.setattr(compiler, "_compiled_anew", noting)
    return found


def ptx_of_each(monkeypatch, *functions, signature):
    """Return the PTX of functions, and then what each is if compiled by itself."""
    called = []
    note = models.note_call

    def noting(function, args):
        called.append(function)
        note(function, args)

    monkeypatch.setattr(models, "note_call", noting)
    monkeypatch.setattr(models, "_models", {})
    given = signature, (9, 0), (128, 4)
    shared = [renamed(compiler.kernel_ptx(each, *given)) for each in functions]
    for function in called:  # forget them
        function.overloads.clear()
        function._templates.clear()
    monkeypatch.setattr(models, "_shape", lambda function: None)
    return shared, [renamed(compiler.kernel_ptx(each, *given)) for each in functions]


def test_a_kernel_that_differs_in_what_it_calls_is_not_compiled_again(
    anew, monkeypatch
):
    first, second = (
        one_shot.kernel(14, element, "sum", False, "marked", 1, kind)
        for element, kind in ((FLOAT32, ALL), (INT64, ALL))
    )
    shared, alone = ptx_of_each(
        monkeypatch, first.function, second.function, signature=first.signature
    )
    assert anew.count("one_shot") == 3  # the first, and each by itself
    assert anew.count("use") == 3
    assert shared == alone
    assert shared[0] != shared[1]


@ptx.device_function
def plus(a, b):
    return a + b


@ptx.device_function
def minus(a, b):
    return a - b


@ptx.device_function
def both(a, b):
    return a & b


@ptx.device_function
def last(a, b):
    return b


@ptx.device_function
def ratio(a, b):
    return a / b  # of another type


@ptx.array_function
def with_plus(a, b):
    return plus(a, b)


@ptx.device_function
def applied(function, a, b):
    return function(a, b)


def make_storing(first, constant):
    def caller(out, a, b):
        out[0] = first(a, b)
        out[1] = constant

    caller.__module__ = "numba_symm.test"
    return caller


def make_passing(first):
    def caller(out, a, b):
        out[0] = first(a, b)
        out[1] = applied(first, a, b)

    caller.__module__ = "numba_symm.test"
    return caller


def make_caller(first, second, third=last):
    def caller(out, a, b):
        out[0] = first(a, b) * second(b, a)
        out[1] = plus(a, second(a, b))
        out[2] = third(a, b)

    caller.__module__ = "numba_symm.test"  # as one of the library's
    return caller


@pytest.mark.parametrize(
    ("make", "model", "other", "compiled_again"),
    [
        (make_caller, (minus, minus), (both, both), False),
        (make_caller, (minus, minus), (ratio, ratio), True),  # other types of results
        (make_caller, (minus, minus), (minus, both), True),  # two in place of one
        (
            make_caller,
            (plus, minus),
            (both, minus),
            True,
        ),  # plus is global, too
        (
            make_caller,
            (minus, minus, with_plus),
            (both, both, with_plus),
            True,
        ),  # inlined
        (make_passing, (minus,), (both,), True),
        (make_storing, (minus, 0.0), (both, -0.0), True),
    ],
)
def test_functions_are_compiled_again_if_more_differs(
    anew, monkeypatch, make, model, other, compiled_again
):
    out = types.Array(types.float64, 1, "C")
    shared, alone = ptx_of_each(
        monkeypatch,
        make(*model),
        make(*other),
        signature=(out, types.int64, types.int64),
    )
    assert shared == alone
    assert anew.count("caller") == 3 + compiled_again


def test_the_types_of_operators_do_not_depend_on_values():
    context = compiler._typing()
    numbas = super(type(context), context)
    for named in (operator.add, operator.floordiv, operator.lt, bool):
        for kind in (types.int8, types.uint32, types.int64, types.float32):
            for value in (1, -1, 255, 1 << 31, 1 << 40):
                args = kind, types.literal(value)
                args = args[-1:] if named is bool else args
                with numba_target_override():
                    expected = numbas.resolve_function_type(named, args, {})
                    found = context.resolve_function_type(named, args, {})
                assert found == expected
