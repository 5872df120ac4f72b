"""Stores into arrays made from addresses are compiled, though nothing reads them."""

from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types
from numba.cuda.typing.typeof import typeof

from numba_symm import device as symm
from numba_symm.device import Context, Guard, array_at, peer_array


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


@pytest.mark.parametrize(
    "kernel", [through_module, through_name, through_address, beside_a_closure]
)
def test_a_store_is_kept(kernel, monkeypatch):
    # Numba asks for the current device, for which it needs a driver.
    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)
    ctx = Context(0, 2, (1 << 40, 2 << 40), (3, 4), Guard(5, 0, 2, 6))
    ctx.owner = object()  # of no concern to Numba
    signature = types.void(typeof(ctx), types.int64)
    ptx, _ = cuda.compile(
        kernel, signature, device=False, abi="numba", cc=(9, 0), output="ptx"
    )
    stores = [line for line in ptx.splitlines() if line.startswith("\tst.")]
    assert len(stores) == 1
