"""The backend of torch.distributed on GPUs, compared with gloo on the host."""

import os
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest

import numba_symm as ns
from tests.gpu.helpers import optional

torch = optional("torch")
dist = optional("torch.distributed")

from tests import test_torch as of_cpu  # noqa: E402  # it needs torch

SECONDS = 60
SLOW = 200  # milliseconds


@pytest.fixture(scope="module")
def groups(world, tmp_path_factory):
    """Return a group of ours, and one of gloo."""
    import numba_symm.torch  # noqa: F401  # registers the backend

    torch.cuda.set_device(world.rank % torch.cuda.device_count())
    folder = world.bcast(str(tmp_path_factory.mktemp("torch")))
    store = dist.FileStore(f"{folder}/store", world.size)
    given = {"rank": world.rank, "world_size": world.size}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may be unknown
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("cpu:gloo,cuda:symm", store=store, timeout=limit, **given)
    yield dist.group.WORLD, dist.new_group(backend="gloo")
    dist.destroy_process_group()


@pytest.fixture
def group(groups):
    return groups[0]


def on_cuda():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("index", range(len(of_cpu.CASES)), ids=of_cpu.IDS)
def test_a_call_has_gloo_s_result(world, groups, index):
    ours, gloo = groups
    case, *args = of_cpu.CASES[index]
    others = case(gloo, world.rank, world.size, *args)
    with on_cuda():
        found = case(ours, world.rank, world.size, *args)
    for (mine, _), (other, _) in zip(found, others, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine.cpu(), other), (mine, other)


def late(tensor, value):
    """Fill a tensor on torch's current stream, after a while."""
    torch.cuda._sleep(SLOW * 1_500_000)
    tensor.fill_(value)


def test_a_call_follows_the_current_stream_and_wait_follows_the_call(world, group):
    x = torch.zeros(1 << 20, device="cuda")
    sum_of_ranks = world.size * (world.size + 1) / 2
    stream = torch.cuda.Stream()
    for own in (False, True):
        with torch.cuda.stream(stream):
            late(x, world.rank + 1.0)
            work = dist.all_reduce(x, group=group, async_op=own)
            if own:
                assert not work.is_completed()
                work.wait()
            y = x + 1
        stream.synchronize()
        assert y.unique().tolist() == [sum_of_ranks + 1]


def test_the_host_goes_on(world, group):
    x = torch.zeros(1 << 10, device="cuda")
    late(x, 1.0)  # torch loads its own kernels, and waits
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    world.barrier()
    took = [time.monotonic()]
    late(x, 1.0)
    works = []
    for _ in range(10):
        works.append(dist.all_reduce(x, group=group, async_op=True))
        took.append(time.monotonic())
    for work in works:
        work.wait()
    took.append(time.monotonic())
    assert took[-1] - took[0] < SLOW / 2e3, [each - took[0] for each in took]
    assert not works[0].is_completed()
    torch.cuda.synchronize()
    assert works[-1].is_completed()
    assert x.unique().tolist() == [float(world.size) ** 10]


def test_dropped_tensors_stay_until_the_call_has_read_them(world, group):
    """A tensor that the program drops may be overwritten, but only after the call."""
    for _ in range(5):
        out = torch.zeros(1 << 18, device="cuda")
        torch.cuda._sleep(20_000_000)
        x = torch.full((1 << 18,), world.rank + 1.0, device="cuda")
        parts = [torch.full((1 << 17,), world.rank + 1.0, device="cuda")] * world.size
        first = dist.all_reduce(x, group=group, async_op=True)
        second = dist.reduce_scatter(out[: 1 << 17], parts, group=group, async_op=True)
        del x, parts
        junk = [torch.full((1 << 18,), 99.0, device="cuda") for _ in range(4)]
        second.wait()
        first.wait()
        torch.cuda.synchronize()
        total = world.size * (world.size + 1) / 2
        assert out[: 1 << 17].unique().tolist() == [total]
        del junk


def test_captured_into_a_graph(world, group):
    x, out = (torch.zeros(n, device="cuda") for n in (1 << 14, (1 << 14) * world.size))

    def calls():
        dist.all_reduce(x, group=group)
        later = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
        later.wait()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()  # torch asks for it: what a first call loads cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        calls()
    for turn in range(4):
        x.fill_(world.rank + 1.0 + turn)
        graph.replay()
        torch.cuda.synchronize()
        total = world.size * (world.size + 1) / 2 + turn * world.size
        for each in (x, out):
            assert each.unique().tolist() == [total]


def learned(device, group, kind, mesh=None):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(7)
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
    model = torch.nn.Sequential(*layers).to(device)
    if kind == "data_parallel":
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    elif kind == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    torch.manual_seed(0 if kind == "tensor_parallel" else dist.get_rank())
    x = torch.randn(16, 32).to(device)
    for _ in range(5):
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["data_parallel", "fully_shard", "tensor_parallel"])
def test_models_learn_as_with_nccl(world, group, kind):
    from torch.distributed.device_mesh import DeviceMesh

    if torch.cuda.device_count() < world.size:
        pytest.skip("NCCL needs a GPU for each rank of a node")
    found = []
    for each in (group, dist.new_group(backend="nccl")):
        mesh = None
        if kind != "data_parallel":
            mesh = DeviceMesh.from_group(each, "cuda")
        found.append(learned(on_cuda(), each, kind, mesh))
    ours, nccls = found
    assert ours[-1] < ours[0]
    if world.size == 2:  # the sum of two has one order
        assert ours == nccls
    assert ours == pytest.approx(nccls, rel=1e-5)


@contextmanager
def raises(text):
    with pytest.raises(ns.SymmError) as error:
        yield
    assert text in str(error.value)


def test_a_missing_rank_is_named(world, groups):
    group = dist.new_group(backend="symm", timeout=timedelta(seconds=3))
    x = torch.ones(8, device="cuda")
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    if world.rank == 0:
        began = time.monotonic()
        with raises("rank 1"):
            work = dist.all_reduce(x, group=group, async_op=True)
            while not work.is_completed():
                time.sleep(1e-3)
            work.wait()
        assert 2 < time.monotonic() - began < 10
    world.barrier()
    dist.destroy_process_group(group)
