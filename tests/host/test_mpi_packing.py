"""The kernels of mpi4py's spelling compile for a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, from_dtype
from numba.cuda import types

from numba_symm import dtypes
from numba_symm.mpi import buffers

CAPABILITY = (9, 0)


def compiled(dispatcher, *signature):
    text, _ = cuda.compile(
        dispatcher.py_func,
        types.void(*signature),
        device=False,
        abi="numba",
        cc=CAPABILITY,
    )
    return text


def array(dtype):
    return types.Array(from_dtype(np.dtype(dtype)), 1, "C")


@pytest.mark.parametrize("word", buffers._WORDS.values())
def test_copies_of_items_with_gaps(word):
    words, runs, number = array(word), array(np.int64), types.int64
    text = compiled(buffers._pack, words, words, runs, number, number, types.boolean)
    assert f"st.global.b{8 * np.dtype(word).itemsize}" in text.replace(".u", ".b")


@pytest.mark.parametrize("dtype", ["i1", "f8", "c16"])
def test_reductions_of_accumulates(dtype):
    element = dtypes.element(np.dtype(dtype), "test")
    for name in dtypes.operators(element):
        if name == "avg":
            continue
        kernel = buffers._reducing(dtypes.REDUCTIONS[name])
        assert "st." in compiled(kernel, array(dtype), array(dtype)), name


def test_compare_and_swap():
    each = array(np.uint8)
    assert "st.global" in compiled(buffers._swap, each, each, each)


def test_copies_to_the_device_have_ended(monkeypatch):
    """Kernels on other streams read them."""
    log = []
    stream = SimpleNamespace(synchronize=lambda: log.append("synchronized"))
    monkeypatch.setattr(buffers.cuda, "to_device", lambda x: log.append("copied") or x)
    monkeypatch.setattr(buffers.cuda, "default_stream", lambda: stream)
    assert buffers.copied_to_device(3) == 3
    assert buffers._table(b"8 bytes.").size == 1
    assert log == ["copied", "synchronized"] * 2
    buffers._table.cache_clear()
