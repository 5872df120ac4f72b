"""Contenders of eager calls: NCCL through CuPy, and ours on others' arrays."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numba_symm.bench.contenders import Missing, nccl_cupy, no_context
from numba_symm.bench.contenders.on_arrays import OnArrays
from tests.host.test_bench_contenders import Comm, Ranks


class Elements(np.ndarray):
    """A host array in the place of Numba's device array."""

    @property
    def device_ctypes_pointer(self):
        return self.ctypes.data_as(ctypes.c_void_p)


def test_cupys_nccl_gets_addresses_and_counts(monkeypatch):
    """Of every operation, in the order of the arguments of NcclCommunicator."""
    calls = []

    class Communicator:
        def __init__(self, *given):
            calls.append(given)

        def __getattr__(self, name):
            return lambda *given: calls.append((name, *given))

    def note(name):
        return lambda: calls.append((name,))

    nccl = SimpleNamespace(
        **{"available": True, "get_version": lambda: 22809, "get_unique_id": lambda: 5},
        **{"NCCL_FLOAT32": "f32", "NCCL_SUM": "sum"},
        **{name: note(name) for name in ("groupStart", "groupEnd")},
        NcclCommunicator=Communicator,
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(nccl=nccl), __version__="14.1")
    monkeypatch.setattr(nccl_cupy, "imported", lambda name, cure: cupy)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    made = nccl_cupy.NcclCupy(Ranks())
    assert calls.pop() == (2, 5, 0)
    assert made.version == "NCCL 2.28.9, CuPy 14.1"
    x, out = (np.zeros(4, np.float32).view(Elements) for _ in range(2))
    at = x.ctypes.data, out.ctypes.data
    group, end = ("groupStart",), ("groupEnd",)
    wanted = {
        "all_reduce": [("allReduce", *at, 4, "f32", "sum", 9)],
        "all_gather": [("allGather", *at, 4, "f32", 9)],
        "reduce_scatter": [("reduceScatter", *at, 4, "f32", "sum", 9)],
        "broadcast": [("broadcast", *at, 4, "f32", 0, 9)],
        "reduce": [("reduce", *at, 4, "f32", "sum", 0, 9)],
        "sendrecv": [
            group,
            ("send", at[0], 4, "f32", 1, 9),
            ("recv", at[1], 4, "f32", 1, 9),
            end,
        ],
        "all_to_all": [
            group,
            *(("send", at[0] + 8 * peer, 2, "f32", peer, 9) for peer in range(2)),
            *(("recv", at[1] + 8 * peer, 2, "f32", peer, 9) for peer in range(2)),
            end,
        ],
    }
    for name, seen in wanted.items():
        getattr(made, name)(x, out, "sum")[""].call(9)
        assert calls == seen
        calls.clear()
    with pytest.raises(Missing, match="no avg"):
        made.all_reduce(x, out, "avg")
    with pytest.raises(Missing, match="no int32"):
        made.all_gather(x.view(np.int32), out, "sum")
    nccl.available = False
    monkeypatch.setattr(nccl_cupy, "need_gpus", lambda: None)
    with pytest.raises(Missing, match="CuPy finds no NCCL"):
        nccl_cupy.check()


def test_ours_on_other_arrays_finds_the_stream_by_them():
    made = OnArrays(
        *("on-np", Comm(), "1"),
        empty=lambda nbytes: np.empty(nbytes, np.uint8),
        shown=lambda array, dtype: array.view(dtype).view(Elements),
        current=no_context,
    )
    x, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    way = made.all_reduce(x, out, "sum")[""]
    seen, op, given, stream, algorithm = way.call(7)
    assert (type(seen), type(given), op) == (Elements, Elements, "sum")
    assert stream is algorithm is None
    assert np.shares_memory(seen, x)
    assert np.shares_memory(given, out)
    assert not hasattr(made, "all_reduced")
