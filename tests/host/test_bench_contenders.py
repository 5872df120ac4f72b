import contextlib
import importlib
import types
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.core.utils import StridedMemoryView

from numba_symm.bench import contenders
from numba_symm.bench.bench_operations import OPERATIONS, REDUCTIONS, TYPES
from numba_symm.bench.contenders import CONTENDERS, Missing, load
from numba_symm.bench.contenders import nccl as nccl_module
from numba_symm.bench.contenders import torch as torch_module
from numba_symm.bench.contenders.mpi import Mpi
from numba_symm.bench.contenders.nccl import Nccl
from numba_symm.bench.contenders.nccl_symm import NcclSymm
from numba_symm.bench.contenders.ours import Ours
from numba_symm.bench.contenders.torch import Torch
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


def test_an_available_contender_is_made():
    assert load(["a"], None, Ranks(), lambda name: library()) == (["made"], {})


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
    """A stand-in for nccl.core that records its calls."""
    calls = []
    comm = types.SimpleNamespace(
        allreduce=lambda *words, **more: calls.append((words, more)),
        send=lambda array, peer, stream: calls.append(("send", list(array), peer)),
        recv=lambda array, peer, stream: calls.append(("recv", list(array), peer)),
        reduce=lambda x, out, op, root, stream: calls.append((list(x), op, root)),
        destroy=lambda: calls.append("destroyed"),
    )

    @contextlib.contextmanager
    def group():
        calls.append("group")
        yield
        calls.append("end")

    versions = types.SimpleNamespace(
        nccl4py="0.6.0", libnccl=types.SimpleNamespace(version="2.28.9")
    )
    core = types.SimpleNamespace(
        calls=calls,
        Communicator=types.SimpleNamespace(init=lambda *words: comm),
        NcclRedOp=types.SimpleNamespace(
            SUM="sum!", PROD="prod!", MIN="min!", MAX="max!", AVG="avg!"
        ),
        get_unique_id=lambda: "unique",
        group=group,
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


@pytest.mark.parametrize("op", REDUCTIONS)
def test_nccl_reduces_on_the_stream_of_the_call(core, op):
    nccl = Nccl(Ranks())
    assert nccl.version == "NCCL 2.28.9, nccl4py 0.6.0"
    x, out = np.zeros(4, np.float32), np.zeros(4, np.float32)
    way = nccl.all_reduce(x, out, op)[""]
    way.call(99)
    assert not way.in_place
    (((source, target, reduction), more),) = core.calls
    assert (source is x, target is out) == (True, True)
    assert (reduction, more) == (f"{op}!", {"stream": 99})
    nccl.close()
    assert core.calls[-1] == "destroyed"


class HostView:
    """A stand-in for cuda.core's views of device memory, over NumPy's memory."""

    @staticmethod
    def from_buffer(memory, shape, *, dtype):
        if dtype.name == "bfloat16":  # cuda.core makes such a view, too
            return SimpleNamespace(__dlpack__=raising(BufferError("bfloat16")))
        return StridedMemoryView.from_dlpack(memory.owner.view(dtype), stream_ptr=-1)


@pytest.mark.parametrize("name", TYPES)
def test_nccl_gets_the_address_and_type_of_an_array_by_dlpack(name, monkeypatch):
    monkeypatch.setattr("cuda.core.utils.StridedMemoryView", HostView)
    monkeypatch.setattr(
        "cuda.core.Buffer",
        SimpleNamespace(from_handle=lambda *words, owner: SimpleNamespace(owner=owner)),
    )
    array = np.arange(6).astype(TYPES[name]).view(Owned)
    named = nccl_module._named(array)
    for _ in range(2):  # a capsule is consumed once, a view may be exported often
        found = StridedMemoryView.from_any_interface(named, stream_ptr=-1)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.ptr == array.ctypes.data
        del found
    assert (array == np.arange(6)).all()


class Tensor:
    """A stand-in for a torch tensor: a storage, an offset and a type."""

    def __init__(self, base, first, count, dtype="uint8"):
        self.base, self.first, self.count, self.dtype = base, first, count, dtype

    def data_ptr(self):
        return self.base + self.first

    def numel(self):
        return self.count

    def __getitem__(self, part):
        return Tensor(self.base, self.first + part.start, part.stop - part.start)

    def view(self, dtype):
        return Tensor(self.base, self.first, self.count, dtype)

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


class DeviceArray:
    """A stand-in for a Numba array."""

    def __init__(self, address, nbytes, dtype):
        self.device_ctypes_pointer = types.SimpleNamespace(value=address)
        self.nbytes, self.dtype = nbytes, np.dtype(dtype)


class Owned(np.ndarray):
    """A NumPy array with its address in Numba's attribute."""

    @property
    def device_ctypes_pointer(self):
        return types.SimpleNamespace(value=self.ctypes.data)


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


def test_torch_without_the_kernels_is_missing(torch):
    torch_module.check()
    del torch.ops.symm_mem.one_shot_all_reduce_out
    with pytest.raises(Missing, match="has no symm_mem::one_shot_all_reduce_out"):
        torch_module.check()
    torch.cuda.is_available = lambda: False
    with pytest.raises(Missing, match="finds no GPU"):
        torch_module.check()


def test_torch_reduces_views_of_its_own_tensors(torch):
    contender = Torch(3, Ranks())
    assert ("set_device", "cuda:3") in torch.calls
    contender._tensors += [Tensor(1000, 0, 512), Tensor(9000, 0, 512)]
    x, out = DeviceArray(1128, 64, "float32"), DeviceArray(9256, 64, "float32")
    ways = contender.all_reduce(x, out, "sum")
    source = Tensor(1000, 128, 64, "float32")
    target = Tensor(9000, 256, 64, "float32")
    torch.calls.clear()
    ways["two_shot"].call(99)
    ways["one_shot"].call(99)
    assert torch.calls == [
        ("two_shot_all_reduce_", target, "sum", "0"),
        ("one_shot_all_reduce_out", source, "sum", "0", target),
    ]
    assert ways["two_shot"].in_place
    assert not ways["one_shot"].in_place


def test_torch_one_shot_is_left_out_for_large_messages(torch):
    contender = Torch(0, Ranks())
    contender._tensors += [Tensor(0, 0, 1 << 30)]
    x, out = (
        DeviceArray(0, nbytes, "float32")
        for nbytes in [torch_module.ONE_SHOT_LIMIT + 16] * 2
    )
    assert list(contender.all_reduce(x, out, "sum")) == ["two_shot"]


def test_torch_in_place_is_two_shot_alone(torch):
    contender = Torch(0, Ranks())
    contender._tensors += [Tensor(0, 0, 512)]
    x = DeviceArray(0, 64, "float32")
    assert list(contender.all_reduce(x, x, "sum")) == ["two_shot"]


IN, ALL = np.arange(2), np.arange(10, 14)  # of rank 0 of two, and of both ranks


@pytest.mark.parametrize(
    ("name", "x", "out", "wanted"),
    [
        (
            *("sendrecv", IN.reshape(2, 1), ALL[:2].reshape(2, 1)),
            [("send", [0], 1), ("send", [1], 1), ("recv", [10], 1), ("recv", [11], 1)],
        ),
        (
            *("all_gather_v", IN, ALL),
            [
                *(("send", [0, 1], 0), ("send", [0, 1], 1)),
                *(("recv", [10, 11], 0), ("recv", [12, 13], 1)),
            ],
        ),
        (
            *("all_to_all_v", ALL, ALL[::-1]),
            [
                *(("send", [10, 11], 0), ("send", [12, 13], 1)),
                *(("recv", [13, 12], 0), ("recv", [11, 10], 1)),
            ],
        ),
        (
            *("gather_v", IN, ALL),
            [("send", [0, 1], 0), ("recv", [10, 11], 0), ("recv", [12, 13], 1)],
        ),
        (
            *("scatter_v", ALL, IN),
            [("send", [10, 11], 0), ("send", [12, 13], 1), ("recv", [0, 1], 0)],
        ),
        (
            *("reduce_scatter_v", ALL, IN),
            [([10, 11], "sum!", 0), ([12, 13], "sum!", 1)],
        ),
    ],
)
def test_nccl_exchanges_ranges_by_grouped_calls(core, name, x, out, wanted):
    getattr(Nccl(Ranks()), name)(x, out, "sum")[""].call(7)
    assert core.calls == ["group", *wanted, "end"]


def test_torch_has_a_barrier(torch, monkeypatch):
    called = []
    monkeypatch.setattr(torch_module.cuda, "as_cuda_array", lambda tensor: tensor)
    torch.uint8 = "uint8"
    torch.empty = lambda nbytes, **more: Tensor(0, 0, nbytes)
    handle = SimpleNamespace(barrier=lambda channel: called.append(channel))
    torch.rendezvous = lambda tensor, group: handle
    contender = Torch(0, Ranks())
    contender.allocate(64)
    contender.barrier(None, None, "none")[""].call(7)
    assert called == [0]


def test_nccl_has_no_all_to_all_in_place(core):
    x = np.zeros(4, np.float32)
    found = Nccl(Ranks()).all_to_all(x, x, "none")
    assert found == {"": "NCCL has no all-to-all in place"}


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


@pytest.mark.parametrize(("dtype", "op"), [("int32", "sum"), ("float32", "max")])
def test_torch_refuses_types_and_operators_without_a_kernel(torch, dtype, op):
    x = DeviceArray(0, 64, dtype)
    (reason,) = Torch(0, Ranks()).all_reduce(x, x, op).values()
    assert "sum float32 and bfloat16 only" in reason


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


def test_one_algorithm_replaces_the_chosen_one():
    comm = Comm()
    x = np.zeros(4, np.float32)
    found = Ours(comm, ("ring",)).all_reduce(x, x, "sum")
    assert list(found) == ["plan"]
    assert comm.plans == ["ring"]


def test_several_algorithms_are_measured_in_addition_to_the_chosen_one():
    found, _, _ = ways(("ring", "floats"), np.int32)
    assert list(found) == ["plan", "call", "ring", "floats"]
    assert found["floats"] == "floats: only floats"
    assert not isinstance(found["ring"], str)


def test_every_operation_makes_our_call():
    ours = Ours(SimpleNamespace(backend="host"))
    for name, operation in OPERATIONS.items():
        assert operation.name == name
        assert callable(getattr(ours, name))


def test_ours_has_no_other_operations():
    assert not hasattr(Ours(SimpleNamespace(backend="host")), "all_reduced")


def test_no_context_is_an_empty_context():
    assert isinstance(contenders.no_context(7), contextlib.nullcontext)
