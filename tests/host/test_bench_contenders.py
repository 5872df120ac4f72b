import importlib
import types

import numpy as np
import pytest

from numba_symm.bench import contenders
from numba_symm.bench.contenders import CONTENDERS, Missing, load
from numba_symm.bench.contenders import nccl as nccl_module
from numba_symm.bench.contenders import torch as torch_module
from numba_symm.bench.contenders.mpi import Mpi
from numba_symm.bench.contenders.nccl_symm import NcclSymm
from numba_symm.bench.contenders.ours import Ours
from numba_symm.errors import ArgumentError


class Ranks:
    """Rank 0 of two; the test sets the answers of the other one."""

    rank, size = 0, 2

    def __init__(self, *others):
        self.others = list(others)

    def allgather(self, value):
        return [value, self.others.pop(0) if self.others else None]

    def bcast(self, value):
        return value

    def Dup(self):
        return self

    def Free(self):
        self.freed = True


def library(check=lambda: None, make=lambda comm, ranks: "made"):
    return types.SimpleNamespace(check=check, make=make)


def raising(error):
    def step(*arguments):
        raise error

    return step


def test_every_contender_has_its_module():
    for name, module in CONTENDERS.items():
        found = importlib.import_module(f"numba_symm.bench.contenders.{module}")
        assert callable(found.check), name
        assert callable(found.make), name


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (library(check=raising(Missing("pip install it"))), "pip install it"),
        (library(check=raising(OSError("no library"))), "OSError: no library"),
        (library(make=raising(RuntimeError("no GPU"))), "RuntimeError: no GPU"),
    ],
)
def test_a_missing_contender_is_reported_with_the_reason(module, reason):
    assert load(["a"], None, Ranks(), lambda name: module) == ([], {"a": reason})


def test_a_contender_missing_on_one_rank_is_made_on_none():
    made = []
    module = library(make=lambda comm, ranks: made.append(ranks))
    found = load(["a"], None, Ranks("not on this node"), lambda name: module)
    assert found == ([], {"a": "not on this node"})
    assert made == []


def test_a_missing_module_is_reported_with_its_installation():
    with pytest.raises(Missing, match=r"no_such_module.*; pip install it"):
        contenders.imported("no_such_module", "pip install it")


def test_a_failure_on_rank_0_is_raised_on_every_rank():
    assert contenders.from_first_rank(Ranks(), lambda: 5) == 5
    with pytest.raises(Missing, match="OSError: no port"):
        contenders.from_first_rank(Ranks(), raising(OSError("no port")))


@pytest.fixture
def core(monkeypatch):
    """A stand-in for nccl.core."""
    versions = types.SimpleNamespace(
        nccl4py="0.6.0", libnccl=types.SimpleNamespace(version="2.28.9")
    )
    core = types.SimpleNamespace(
        Communicator=types.SimpleNamespace(init=lambda *words: types.SimpleNamespace()),
        NcclRedOp=types.SimpleNamespace(
            SUM="sum!", PROD="prod!", MIN="min!", MAX="max!", AVG="avg!"
        ),
        get_unique_id=lambda: "unique",
        get_version=lambda: versions,
    )
    monkeypatch.setattr(nccl_module, "imported", lambda name, cure: core)
    monkeypatch.setattr(nccl_module, "need_gpus", lambda: None)
    monkeypatch.setattr(nccl_module, "_named", lambda array: array)
    return core


def test_nccl_without_its_library_is_missing(core):
    nccl_module.check()
    core.get_version().libnccl = None
    with pytest.raises(Missing, match="nvidia-nccl-cu13"):
        nccl_module.check()


@pytest.fixture
def torch(monkeypatch):
    calls = []

    def noting(name):
        return lambda *words: calls.append((name, *words))

    names = ("two_shot_all_reduce_", "one_shot_all_reduce_out")
    symm_mem = types.SimpleNamespace(**{name: noting(name) for name in names})
    torch = types.SimpleNamespace(
        __version__="2.11.0",
        calls=calls,
        float32="float32",
        ops=types.SimpleNamespace(symm_mem=symm_mem),
        cuda=types.SimpleNamespace(
            is_available=lambda: True, set_device=noting("set_device")
        ),
        device=lambda kind, ordinal: f"{kind}:{ordinal}",
        distributed=types.SimpleNamespace(
            init_process_group=lambda *words, **more: calls.append(("group", more)),
            destroy_process_group=noting("destroyed"),
            group=types.SimpleNamespace(WORLD=types.SimpleNamespace(group_name="0")),
            TCPStore=lambda *words, **more: types.SimpleNamespace(port=1234),
        ),
    )
    monkeypatch.setattr(torch_module, "imported", lambda name, cure: torch)
    monkeypatch.setattr(torch_module, "need_gpus", lambda: None)
    return torch


@pytest.mark.parametrize("version", ["2.9.8", "2.28.9", "2.32.3", "3.0.0"])
def test_a_broadcast_on_windows_needs_an_nccl_that_ends_it(core, version):
    x, sent = np.zeros(4, np.float32), []
    core.get_version().libnccl.version = version
    contender = NcclSymm(Ranks())
    contender._comm.broadcast = lambda *words, stream: sent.append(stream)
    (way,) = contender.broadcast(x, x, "none").values()
    if version in ("2.9.8", "2.28.9"):
        assert way.startswith(f"NCCL {version} may never end a broadcast on windows (")
    else:
        way.call(7)
        assert sent == [7]


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "reduce"])
def test_mpi_has_no_16_bit_floats_and_no_average(name):
    pytest.importorskip("mpi4py.MPI")
    ranks = Ranks()
    mpi = Mpi(ranks)
    reduction = getattr(mpi, name)
    half, single = np.zeros(4, np.float16), np.zeros(4, np.float32)
    assert reduction(half, half, "sum") == {"": "MPI has no float16"}
    assert reduction(single, single, "avg") == {"": "MPI has no avg"}
    assert not mpi.captures
    mpi.close()
    assert ranks.freed


class Comm:
    """A communicator that records its plans; one algorithm refuses integers."""

    backend = "vmm"

    def __init__(self):
        self.plans = []

    def all_reduce_init(self, x, op, out, algorithm):
        if algorithm == "floats" and x.dtype.kind == "i":
            raise ArgumentError("floats: only floats")
        self.plans.append(algorithm)
        return lambda stream: ("plan", stream)

    def all_reduce(self, x, op, out, stream, algorithm):
        return (x, op, out, stream, algorithm)


def ways(algorithms, dtype=np.float32, in_place=False):
    x = np.zeros(4, dtype)
    out = x if in_place else np.zeros(4, dtype)
    return Ours(Comm(), algorithms).all_reduce(x, out, "sum"), x, out


def test_ours_is_a_plan_and_a_plain_call():
    found, x, out = ways(())
    assert list(found) == ["plan", "call"]
    assert found["plan"].call(5) == ("plan", 5)
    assert found["call"].eager
    called = found["call"].call(5)
    assert called[0] is x
    assert called[2] is out
    assert called[1::2] == ("sum", 5)
    assert list(ways((), in_place=True)[0]) == ["plan"]


def test_several_algorithms_are_measured_in_addition_to_the_chosen_one():
    found, _, _ = ways(("ring", "floats"), np.int32)
    assert list(found) == ["plan", "call", "ring", "floats"]
    assert found["floats"] == "floats: only floats"
    assert not isinstance(found["ring"], str)
