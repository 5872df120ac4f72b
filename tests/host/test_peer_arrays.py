"""Arrays made from addresses: stores are kept, wrong arguments are named."""

from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.typing.typeof import typeof

from numba_symm import device as symm
from numba_symm.device import Context, Guard, array_at, peer_array
from numba_symm.errors import ArgumentError
from numba_symm.memory.symmetric import SymmetricMemory


def through_module(ctx, n):
    there = symm.peer_array(ctx, 1, (cuda.gridDim.x, n), np.float32)
    there[cuda.blockIdx.x, n - 1] = 7


def through_name(ctx, n):
    there = peer_array(ctx, n, n, np.int16)
    there[n - 1] = 7


def through_address(ctx, n):
    there = array_at(ctx.buffers[0], (n, n, n), np.float64)
    there[n - 1, 0, n] = 7


def beside_a_closure(ctx, n):
    # Numba removes dead code after it has inlined a closure.
    add = lambda i: i + 1  # noqa: E731
    there = symm.peer_array(ctx, 1, n, np.float32)
    total = 0
    for i in (1, 2):
        total += add(i)
    there[n - 1] = total


def with_a_list(ctx, n):
    symm.peer_array(ctx, 1, [n], np.float32)[0] = 7


def with_a_float(ctx, n):
    symm.peer_array(ctx, 1, (n, 0.5 * n), np.float32)[0, 0] = 7


def with_a_name(ctx, n):
    symm.peer_array(ctx, 1, n, "float32")[0] = 7


def with_pythons_type(ctx, n):
    symm.peer_array(ctx, 1, n, float)[0] = 7


@pytest.fixture(autouse=True)
def compute_capability(monkeypatch):
    """Answer Numba's question for the current device, for which it needs a driver."""
    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)


def compiled(kernel):
    ctx = Context(0, 2, (1 << 40, 2 << 40), (3, 4), Guard(5, 0, 2, 6))
    ctx.owner = object()  # of no concern to Numba
    signature = types.void(typeof(ctx), types.int64)
    return cuda.compile(
        kernel, signature, device=False, abi="numba", cc=(9, 0), output="ptx"
    )[0]


@pytest.mark.parametrize(
    "kernel", [through_module, through_name, through_address, beside_a_closure]
)
def test_a_store_is_kept(kernel):
    ptx = compiled(kernel)
    stores = [line for line in ptx.splitlines() if line.startswith("\tst.")]
    assert len(stores) == 1


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (with_a_list, "shape to be an int or a tuple of ints, got list"),
        (with_a_float, "shape to be an int or a tuple of ints, got Tuple"),
        (with_a_name, "dtype to be a NumPy scalar type such as np.float32, got"),
        (with_pythons_type, "dtype to be a NumPy scalar type such as np.float32, got"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(kernel, text):
    with pytest.raises(TypingError, match=text):
        compiled(kernel)


def test_numba_refuses_a_memory_in_place_of_its_context():
    memory = SymmetricMemory.__new__(SymmetricMemory)
    kernel = cuda.jit(lambda ctx: None)  # is never compiled
    with pytest.raises(ArgumentError, match=r"got SymmetricMemory; pass mem\.ctx"):
        kernel.typeof_pyval(memory)
