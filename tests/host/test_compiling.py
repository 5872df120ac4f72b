"""What Numba compiles once a process, and what again for each kernel."""

import re

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from numba_symm import dtypes
from numba_symm.collectives.kernels import (
    chunked_all_reduce,
    chunked_broadcast,
    chunked_exchange,
    one_shot,
    two_shot,
)
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.device import compiler

FLOAT32 = dtypes.element(np.float32, "test")
INT64 = dtypes.element(np.int64, "test")
ALL, SCAN = OPERATIONS["all_reduce"].exchange, OPERATIONS["scan"].exchange


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
    kernel.compile_functions(is_stopped=lambda: False)


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


def test_kernels_of_two_algorithms_share_what_has_no_constants(compiled):
    compile_functions(reduced_by("max"))
    compile_functions(chunked_broadcast.kernel(5, FLOAT32, False))
    compiled.clear()
    compile_functions(two_shot.kernel(5, FLOAT32, "max", False, "sentinel", 1))
    compile_functions(chunked_all_reduce.kernel(5, FLOAT32, "max", False))
    assert "mailboxes.receive" in compiled
    assert "mailboxes.poll" not in compiled
    assert "workspace.keep" not in compiled  # their regions are constants of calls
    assert "handshake.is_done" not in compiled
    assert "order.total" not in compiled


def test_kernels_of_two_types_and_operations_share_what_moves_data(compiled):
    compile_functions(chunked_all_reduce.kernel(5, FLOAT32, "max", False))
    compile_functions(reduced_by("max", "marked"))
    compiled.clear()
    compile_functions(chunked_all_reduce.kernel(5, INT64, "max", False))
    compile_functions(chunked_exchange.kernel(5, INT64, "max", False, SCAN))
    compile_functions(one_shot.kernel(5, INT64, "max", False, "marked", 1, SCAN))
    assert "order.total" in compiled
    shared = {"flags.raise_flags", "flags.await_flags", "chunks.scatter"}
    shared |= {"chunks.collect", "mailboxes.poll", "mailboxes.receive_of"}
    shared |= {"mailboxes.box", "mailboxes.post_one", "one_shot.post"}
    assert not shared & set(compiled)


def test_operations_with_the_same_output_share_what_stores_it(compiled):
    gather, to_all = (OPERATIONS[n].exchange for n in ("all_gather", "all_to_all"))
    for kind in (gather, to_all):
        compile_functions(chunked_exchange.kernel(5, INT64, "sum", False, kind))
        compile_functions(one_shot.kernel(5, INT64, "sum", False, "marked", 1, kind))
    assert compiled.count("chunked_exchange.use") == 1
    assert compiled.count("one_shot.use") == 1


def test_a_compute_capability_shares_them_with_another(compiled):
    kernel = reduced_by("sum", kind=SCAN)
    first = kernel.ptx((8, 0))
    compiled.clear()
    second = kernel.ptx((9, 0))
    assert not compiled
    assert ".target sm_80" in first
    assert ".target sm_90" in second


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
    """Return PTX with numbers in place of mangled names, which have the options."""
    names = {}

    def number(name):
        return names.setdefault(name[0], f"name{len(names)}")

    return re.sub(r"_Z\w+", number, ptx)
