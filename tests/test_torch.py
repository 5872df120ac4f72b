"""The backend of torch.distributed, compared with gloo, between simulated ranks.

Where torch is not installed, most tests run with a stand-in for it.
"""

import contextlib
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.environment import SIMULATED
from numba_symm.errors import CollectiveTimeout
from numba_symm.gpu import exchange
from tests.spawned import SIMULATED as IN_SIMULATOR
from tests.spawned import Ranks, attempt, outcomes

try:
    import torch
    import torch.distributed as dist
except ImportError:
    from tests import standin_torch as torch
    from tests.standin_torch import distributed as dist

REAL = torch.__name__ == "torch"
of_torch = pytest.mark.skipif(not REAL, reason="torch is not installed")

SECONDS = 40
MANY = 1 << (14 if SIMULATED else 20)
"""Elements of a message that does not fit into memory of the library's own."""

ROOT = Path(__file__).parents[1]


def begin(comm, folder, seconds=SECONDS):
    """Return the backend's group, and a group of gloo; make them in the first call."""
    sys.modules.update({"torch": torch, "torch.distributed": dist})
    import numba_symm.torch  # noqa: F401  # registers the backend

    if dist.group.WORLD is None:
        name = "-".join(comm.allgather(str(os.getpid())))  # new after a failure
        store = dist.FileStore(f"{folder}/{name}", comm.size)
        limit = timedelta(seconds=seconds)
        given = {"rank": comm.rank, "world_size": comm.size, "timeout": limit}
        dist.init_process_group("symm", store=store, **given)
        if REAL:
            dist.new_group(backend="gloo")
    return dist.distributed_c10d._world.pg_map


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("torch"))
    with Ranks(request.param, [IN_SIMULATOR] * request.param) as made:
        yield lambda function, *args: made.run(function, folder, *args)


def on_two(function, folder, *args):
    """Run a function on two new ranks, and return the outcomes."""
    return outcomes(2, function, str(folder), *args, environ=[IN_SIMULATOR] * 2)


# Each case returns pairs: a tensor, and what its elements should be.


def of_ranks(size):
    """Return 1 + 2 + ... + size."""
    return size * (size + 1) // 2


def all_reduce(group, rank, size, op, dtype):
    xs = [torch.arange(1, 12).remainder(r + 3) for r in range(size)]
    x = xs[rank].to(getattr(torch, dtype))
    dist.all_reduce(x, getattr(dist.ReduceOp, op), group)
    return [(x, OPERATORS[op].reduce([each.tolist() for each in xs]))]


def all_reduce_strided(group, rank, size):
    x = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    dist.all_reduce(x.t(), group=group)
    return [(x, np.arange(12).reshape(3, 4) * of_ranks(size))]


def all_reduce_later(group, rank, size):
    x = torch.full((3, 5), rank + 1.0)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait(timedelta(seconds=SECONDS))
    assert work.is_completed()
    (y,) = work.get_future().wait()
    return [(x, of_ranks(size)), (y, of_ranks(size))]


def broadcast_of_a_parameter(group, rank, size):
    x = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    dist.broadcast(x, 1, group=group)
    return [(x.detach(), 2)]


def all_reduce_coalesced(group, rank, size):
    x, y = torch.full((3,), rank + 1.0), torch.full((2, 2), rank - 1.0)
    with dist._coalescing_manager(group):
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group)
    return [(x, of_ranks(size)), (y, of_ranks(size) - 2 * size)]


def broadcast(group, rank, size):
    found = []
    for root in range(size):
        for dtype in (torch.float32, torch.uint8, torch.complex64, torch.bool):
            x, y = (torch.arange(5).mul(r + 1).to(dtype) for r in (rank, root))
            dist.broadcast(x, root, group)
            found.append((x, y.tolist()))
    return found


def reduce(group, rank, size):
    x = torch.arange(5.0) * (rank + 1)
    dist.reduce(x, 1, group=group)
    return [(x, np.arange(5) * of_ranks(size))] if rank == 1 else []


def all_gather(group, rank, size):
    out = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(out, torch.full((2, 3), rank + 0.5), group)
    return [(x, r + 0.5) for r, x in enumerate(out)]


def all_gather_into_tensor(group, rank, size):
    out = torch.zeros(size * 2, 3, dtype=torch.bfloat16)
    x = torch.full((2, 3), rank + 0.5, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(out, x, group)
    return [(out[2 * r :][:2], r + 0.5) for r in range(size)]


def reduce_scatter(group, rank, size):
    parts = [torch.full((4,), rank + 10.0 * part) for part in range(size)]
    out = torch.zeros(4)
    dist.reduce_scatter(out, parts, group=group)
    return [(out, of_ranks(size) - size + 10 * rank * size)]


def reduce_scatter_tensor(group, rank, size):
    out = torch.zeros(2, 3)
    x = torch.arange(6.0 * size).reshape(2 * size, 3) * (rank + 1)
    dist.reduce_scatter_tensor(out, x, group=group)
    return [(out, (6 * rank + np.arange(6).reshape(2, 3)) * of_ranks(size))]


def all_to_all_single(group, rank, size):
    out = torch.zeros(2 * size, 3, dtype=torch.int32)
    x = torch.arange(6 * size, dtype=torch.int32).reshape(2 * size, 3) + 100 * rank
    dist.all_to_all_single(out, x, group=group)
    rows = np.arange(6 * rank, 6 * rank + 6).reshape(2, 3)
    return [(out[2 * r :][:2], rows + 100 * r) for r in range(size)]


def all_to_all_single_uneven(group, rank, size):
    def rows(senders, receivers):
        return [
            [100.0 * sender + 10 * receiver + row] * 3
            for sender in senders
            for receiver in receivers
            for row in range(2 * sender + receiver)
        ]

    sent, expected = rows([rank], range(size)), rows(range(size), [rank])
    out = torch.zeros(len(expected), 3)
    received = [2 * peer + rank for peer in range(size)]
    parts = [2 * rank + peer for peer in range(size)]  # none of rank 0 to itself
    dist.all_to_all_single(out, torch.tensor(sent), received, parts, group)
    return [(out, expected)]


def gather(group, rank, size):
    out = [torch.zeros(3) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.full((3,), rank + 1.0), out, 1, group)
    return [(x, r + 1) for r, x in enumerate(out or [])]


def scatter(group, rank, size):
    parts = [torch.full((3,), part + 1.0) for part in range(size)]
    out = torch.zeros(3)
    dist.scatter(out, parts if rank == 1 else None, 1, group)
    return [(out, rank + 1)]


def send_and_recv(group, rank, size):
    x = torch.full((3,), rank + 1.0)
    dist.barrier(group)  # all ranks must make the first call
    if rank == 0:
        dist.isend(x, 1, group).wait()
    elif rank == 1:
        dist.irecv(x, 0, group).wait()
    return [(x, max(rank, 1) if rank < 2 else rank + 1)]


def messages_both_ways(group, rank, size):
    """Each rank first sends, more than fits into memory of the library's own."""
    x, y = torch.full((MANY,), rank + 1.0), torch.zeros(MANY)
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = dist.P2POp(dist.isend, x, after, group)
    received = dist.P2POp(dist.irecv, y, before, group)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return [(y, before + 1)]


def objects(group, rank, size):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank}, group)
    assert [each["rank"] for each in found] == list(range(size))
    return [
        (torch.tensor([len(each["text"]) for each in found]), 1000 * np.arange(size))
    ]


OPERATORS = {
    **{"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum},
    **{"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor},
}
CASES = [
    *((all_reduce, op, "float32") for op in ("SUM", "PRODUCT", "MIN", "MAX")),
    *((all_reduce, op, "int32") for op in ("SUM", "BAND", "BOR", "BXOR")),
    *((all_reduce, "SUM", dtype) for dtype in ("bfloat16", "float16", "complex64")),
    (all_reduce_strided,),
    (all_reduce_later,),
    (broadcast_of_a_parameter,),
    (all_reduce_coalesced,),
    (broadcast,),
    (reduce,),
    (all_gather,),
    (all_gather_into_tensor,),
    (reduce_scatter,),
    (reduce_scatter_tensor,),
    (all_to_all_single,),
    (all_to_all_single_uneven,),
    (gather,),
    (scatter,),
    (send_and_recv,),
    (messages_both_ways,),
    *([(objects,)] if REAL else []),
]
IDS = ["-".join([case[0].__name__, *case[1:]]) for case in CASES]


def compare(comm, folder, index):
    case, *args = CASES[index]
    ours, *gloos = (case(g, comm.rank, comm.size, *args) for g in begin(comm, folder))
    for x, expected in ours:
        assert np.array_equal(x.tolist(), np.broadcast_to(expected, x.shape)), x
    for found in gloos:
        for (mine, _), (other, _) in zip(ours, found, strict=True):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other), (mine, other)


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_a_call_has_numpy_s_and_gloo_s_result(ranks, index):
    ranks(compare, index)


def of_any_sizes(comm, folder):
    """Do what gloo does not."""
    rank, size = comm.rank, comm.size
    group = next(iter(begin(comm, folder)))
    mean = torch.full((3,), 3.0 * rank)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group)
    assert mean.tolist() == [3.0 * (size - 1) / 2] * 3
    out = [torch.zeros(peer + 1) for peer in range(size)]
    dist.all_gather(out, torch.full((rank + 1,), float(rank)), group)
    assert [x.tolist() for x in out] == [[float(r)] * (r + 1) for r in range(size)]
    parts = [torch.full((part + 1,), rank + 1.0) for part in range(size)]
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, parts, group=group)
    assert out.tolist() == [size * (size + 1) / 2] * (rank + 1)
    sent = [torch.full((rank + peer,), 10.0 * rank + peer) for peer in range(size)]
    got = [torch.zeros(rank + peer) for peer in range(size)]
    dist.all_to_all(got, sent, group)
    for peer, x in enumerate(got):
        assert x.tolist() == [10.0 * peer + rank] * (rank + peer)
    moved = torch.tensor([rank + 1.0] * 3).to(torch.float8_e4m3fnuz)  # has no operators
    dist.broadcast(moved, 1, group)
    assert moved.to(torch.float32).tolist() == [2.0] * 3
    gaps = torch.ones(3, 4)
    dist.all_reduce(gaps[:, 1:3], group=group)
    assert gaps.tolist() == [[1.0, size, size, 1.0]] * 3
    none = torch.zeros(0)
    dist.all_reduce(none, group=group)
    alone = torch.ones(2)
    group.allreduce(alone).wait()  # as DistributedDataParallel.join calls it
    assert alone.tolist() == [size] * 2
    work = dist.barrier(group, async_op=True)
    work.wait()
    group.barrier().wait()  # as torch's RPC calls it


def test_lists_and_types_that_gloo_refuses(ranks):
    ranks(of_any_sizes)


def coalesced(comm, folder):
    rank, size = comm.rank, comm.size
    group = next(iter(begin(comm, folder)))
    outs = [torch.zeros(size * n) for n in (2, 3)]
    with dist._coalescing_manager(group, async_ops=True) as calls:
        for out in outs:
            x = torch.full((len(out) // size,), rank + 1.0)
            dist.all_gather_into_tensor(out, x, group)
    calls.wait()
    for n, out in zip((2, 3), outs, strict=True):
        assert out.tolist() == [r + 1.0 for r in range(size) for _ in range(n)]
    with dist._coalescing_manager(group):
        for out in outs:
            shard = out.chunk(size)[rank]  # in place
            dist.reduce_scatter_tensor(shard, out, group=group)
    assert outs[0][2 * rank :][:2].tolist() == [size * (rank + 1.0)] * 2
    x, y = torch.ones(2), torch.full((3,), float(rank))
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as calls:
        dist.all_reduce(x, group=group, async_op=True)
        dist.broadcast(y, 1, group, async_op=True)
        assert x.tolist() == [1.0, 1.0]  # it has not begun
    calls.wait()
    assert x.tolist() == [size] * 2
    assert y.tolist() == [1.0] * 3
    before, after = (rank - 1) % size, (rank + 1) % size
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as calls:
        work = dist.broadcast(x, 0, group, async_op=True)
        dist.irecv(y, before, group)
        assert not work.is_completed()
        time.sleep(0.2 * rank)
        dist.isend(torch.full((3,), 10.0 + rank), after, group)
    calls.wait()
    assert y.tolist() == [10.0 + before] * 3
    assert work.wait()
    block = dist._coalescing_manager(group, torch.device("cpu"))
    with contextlib.suppress(ZeroDivisionError), block:
        dist.broadcast(y, 0, group)
        work = dist.broadcast(y, 0, group, async_op=True)
        raise ZeroDivisionError
    for early in (work.wait, work.get_future):
        with pytest.raises(Exception, match="block of this call has not ended"):
            early()
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch leaves it
    with dist._coalescing_manager(group, torch.device("cpu")):
        pass  # the calls of the other block are forgotten
    assert y.tolist() == [10.0 + before] * 3
    dist.all_reduce(x, group=group)
    assert x.tolist() == [size * size] * 2


def test_calls_start_together(ranks):
    ranks(coalesced)


def counted(comm, folder):
    """Make calls whose functions of the backend are few, because each takes time."""
    group = next(iter(begin(comm, folder)))
    import numba_symm.torch as backend

    x, out = torch.ones(8), torch.ones(8 * comm.size)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def messages():
        sent = dist.P2POp(dist.isend, x, after, group)
        received = dist.P2POp(dist.irecv, out[:8], before, group)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    for most, call in (
        (15, lambda: dist.all_reduce(x, group=group)),
        (15, lambda: dist.all_reduce(x, group=group, async_op=True).wait()),
        (15, lambda: dist.all_gather_into_tensor(out, x, group=group)),
        (23, messages),
    ):
        found = []

        def note(frame, event, argument):
            if event == "call" and frame.f_code.co_filename == backend.__file__:
                found.append(frame.f_code.co_qualname)  # noqa: B023

        for _ in range(3):
            call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        assert 1 <= len(found) <= most, found


def test_a_repeated_call_passes_few_functions(ranks):
    ranks(counted)


def crossing(comm, folder):
    """No call waits for a message that the program has not waited for."""
    group = next(iter(begin(comm, folder)))
    x, y = torch.full((MANY,), comm.rank + 1.0), torch.zeros(MANY)
    if comm.rank == 0:
        work = dist.irecv(y, 1, group)
    dist.all_reduce(torch.ones(2), group=group)
    if comm.rank == 1:
        work = dist.isend(x, 0, group)
    if comm.rank < 2:
        work.wait(timedelta(seconds=SECONDS))
        assert work.is_completed()
    if comm.rank == 0:
        assert set(y.tolist()) == {2.0}
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = [torch.zeros(5) for _ in range(100)]
    works = [dist.isend(torch.full((5,), float(i)), after, group) for i in range(100)]
    works += [dist.irecv(each, before, group) for each in received]
    (moved,) = works[-1].get_future().wait()
    assert moved.tolist() == [99.0] * 5
    for work in reversed(works):
        work.wait()
    assert [each.tolist() for each in received] == [[i] * 5 for i in range(100)]


def test_messages_run_beside_other_calls(ranks):
    ranks(crossing)


def trained(group, rank):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for _ in range(4):
        x = torch.randn(4, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([x.detach().flatten() for x in model.parameters()])


def train(comm, folder):
    ours, gloos = (trained(group, comm.rank) for group in begin(comm, folder))
    if comm.size == 2:  # the sum of two has one order
        assert torch.equal(ours, gloos)
    assert torch.allclose(ours, gloos, rtol=1e-5, atol=1e-6)
    return ours.tolist()


@of_torch
def test_a_model_learns_as_with_gloo(ranks):
    first, *others = ranks(train)
    assert all(each == first for each in others)


def shard(comm, folder):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    found = {}
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for group in begin(comm, folder):
        mesh = DeviceMesh.from_group(group, "cpu")
        for name in ("fully_shard", "tensor_parallel"):
            torch.manual_seed(7)
            layers = torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6)
            model = torch.nn.Sequential(*layers)
            if name == "fully_shard":
                fully_shard(model, mesh=mesh)
            else:
                parallelize_module(model, mesh, plan)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            losses = found.setdefault(name, [])
            for _ in range(3):
                loss = (model(torch.ones(4, 6)) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    for losses in found.values():
        assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
        assert losses[2] < losses[0]


@of_torch
def test_models_are_divided_as_with_gloo(ranks):
    ranks(shard)


def compiled(comm, folder):
    from torch.distributed import _functional_collectives as functional

    group = next(iter(begin(comm, folder)))

    def step(x):
        return functional.all_reduce(2 * x, "sum", group) + 1

    x = torch.full((3,), comm.rank + 1.0)
    y = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    assert y.tolist() == [comm.size * (comm.size + 1) + 1.0] * 3


@of_torch
def test_a_compiled_function_calls_it(ranks):
    ranks(compiled)


def refused(comm, folder):
    group = next(iter(begin(comm, folder)))
    x, parts = torch.ones(2), [torch.ones(2)]
    limit = timedelta(seconds=1)
    premul, of_8_bits = dist._make_nccl_premul_sum(2.0), x.to(torch.float8_e4m3fnuz)
    for call, text in (
        (lambda: dist.all_reduce(x, premul, group), "got RedOpType.PREMUL_SUM"),
        (lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group), "op='band'"),
        (lambda: dist.all_reduce(of_8_bits, group=group), "has operators"),
        (lambda: dist.all_reduce(x.to_sparse(), group=group), "layout torch.sparse"),
        (lambda: dist.all_reduce(torch._neg_view(x), group=group), "negative bit"),
        (lambda: dist.broadcast(torch.ones(2, device="meta"), 0, group), "['meta']"),
        (lambda: dist.all_gather(parts, x, group), "a list of"),
        (lambda: dist.all_to_all_single(x, x, [2], [2], group), "a part for each"),
        (lambda: dist.isend(x, 1, group, tag=3), "expected tag=0"),
        (lambda: dist.irecv(torch.ones(2, 2).t(), 1, group), "a contiguous tensor"),
        (lambda: dist.irecv(x, group=group), "recv_anysource: the backend symm does"),
        (lambda: dist.barrier(group, timeout=limit), "the timeout of the group"),
        (lambda: dist.new_group(backend="symm", pg_options=3), "no pg_options"),
    ):
        error, _ = attempt(call)
        assert error.startswith("ArgumentError: "), (text, error)
        assert text in error, error


def test_what_it_lacks_is_refused(ranks):
    ranks(refused)


def divided(comm, folder):
    """Groups of some ranks, of which some are destroyed, and made again."""
    world = next(iter(begin(comm, folder)))
    import numba_symm.torch as backend

    for members in ([0, 1], [1, 0], [0, comm.size - 1], [0, 1]):
        group = dist.new_group(members, backend="symm")
        if comm.rank in members:
            x = torch.full((3,), comm.rank + 1.0)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [sum(members) + 2.0] * 3
            y = torch.full((2,), float(comm.rank))
            dist.broadcast(y, members[0], group)
            assert y.tolist() == [members[0]] * 2
            dist.destroy_process_group(group)
            error, _ = attempt(group.allreduce, [x], dist.AllreduceOptions())
            assert "the process group was destroyed" in error
    meeting = backend.StoreComm(world.get_group_store(), comm.rank, comm.size, SECONDS)
    time.sleep(0.2 * comm.rank)  # meanwhile, the store has what an earlier one gave
    assert meeting.allgather(comm.rank) == list(range(comm.size))


def test_groups_of_some_ranks(ranks):
    ranks(divided)


def elsewhere(comm, folder):
    """On a GPU, tensors of the CPU go to gloo."""
    begin(comm, folder)
    import numba_symm.torch as backend

    kind, backend.DEVICE = backend.DEVICE, "cuda"
    try:
        group = dist.new_group(backend="symm")
        x, out = torch.full((3,), comm.rank + 1.0), torch.zeros(3 * comm.size)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [comm.size * (comm.size + 1) / 2] * 3
        dist.all_gather_into_tensor(out, x, group)
        assert out.tolist() == x.tolist() * comm.size
        assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"
    finally:
        backend.DEVICE = kind


@of_torch
def test_gloo_reduces_what_is_not_on_the_device(ranks):
    ranks(elsewhere)


def absent(comm, folder, calls):
    begin(comm, folder, seconds=3)
    for _ in range(calls):
        dist.all_reduce(torch.ones(3))
    if comm.rank == 1:
        time.sleep(6)
        os._exit(0)
    return attempt(dist.all_reduce, torch.ones(3)), attempt(learn)


def learn():
    if REAL:
        model = torch.nn.Linear(2, 2)
        torch.nn.parallel.DistributedDataParallel(model)(torch.ones(2)).sum().backward()
    else:
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("calls", [0, 1])
def test_a_missing_rank_is_named_within_the_timeout(tmp_path, calls):
    first, _ = on_two(absent, tmp_path, calls)
    (error, seconds), (later, _) = first.value
    assert error.startswith("CollectiveTimeout: ")
    assert "rank 1" in error
    assert 3 <= seconds < 6
    if calls:
        assert later == error


def aborted(comm, folder):
    group = next(iter(begin(comm, folder)))
    dist.all_reduce(torch.ones(3))
    comm.barrier()
    if comm.rank == 1:
        group.abort()
    found = [attempt(dist.all_reduce, torch.ones(3))[0], attempt(group.check)[0]]
    dist.destroy_process_group()
    return found


def test_an_aborted_group_fails_on_all_ranks_and_is_destroyed(tmp_path):
    for one in on_two(aborted, tmp_path):
        for error in one.value:
            assert error.startswith("Aborted: rank 1 aborted the communicator: ")
        assert one.code == 0


def left_open(comm, folder):
    dist.all_reduce(torch.ones(3), group=next(iter(begin(comm, folder))))
    return attempt(print, "done")


def test_a_program_may_end_without_destroying_its_groups(tmp_path):
    for one in on_two(left_open, tmp_path):
        assert one.error == ""
        assert one.code == 0
        assert one.output == "done\n"


def leaves(comm, folder):
    begin(comm, folder)
    import numba_symm.torch as backend

    dist.all_reduce(torch.ones(3))
    backend.PARTING = 1.0
    if comm.rank == 1:
        sys.exit(3)
    return attempt(dist.all_reduce, torch.ones(3))


def test_a_rank_that_leaves_is_not_awaited(tmp_path):
    first, second = on_two(leaves, tmp_path)
    error, seconds = first.value
    assert error.startswith("Aborted: rank 1 aborted the communicator: "), error
    assert "it has left the group" in error
    assert seconds < SECONDS / 2
    assert second.code == 3


LOG, NAMES = [], {1: "default", 2: "own"}


class Stream:
    """A stand-in for the stream of a group."""

    name, cuda_stream = "own", 2
    stream_id, device_index, device_type = 5, 0, 1


class Point:
    """A stand-in for a point in a stream's work, which logs its calls."""

    ended = True

    def __init__(self, idle, stream):
        self.name = f"event {len(LOG)}"
        self.move(stream)

    def move(self, stream):
        LOG.append(f"{NAMES[stream]} records {self.name}")

    def wait(self, stream):
        LOG.append(f"{NAMES[stream]} waits for {self.name}")

    def query(self):
        return Point.ended


def in_order(comm, folder):
    """Make calls as on a GPU, whose streams are stand-ins."""
    group = next(iter(begin(comm, folder)))
    import numba_symm.torch as backend

    x, log, of = torch.ones(3), LOG, backend.SymmWork.of

    def array_of(self, tensor, written=False):
        log.append(f"{NAMES[self.stream or 1]} runs")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "SIMULATED", True)
            return of(self, tensor, written=written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "SIMULATED", False)
        patch.setattr(backend.SymmWork, "of", array_of)
        for place, name, function in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "current_stream", lambda: None),
            (torch._C, "_cuda_getDevice", lambda: 0),
            (torch._C, "_cuda_getCurrentStream", lambda number: (0, 0, 1)),
            (torch._C, "_cuda_setStream", lambda *stream: log.append(f"to {stream}")),
        ):
            patch.setattr(place, name, function, raising=False)
        patch.setattr(backend, "current_stream", lambda: 1)
        patch.setattr(backend, "Point", Point)
        ends = lambda group: log.append("the host waits")  # noqa: E731
        patch.setattr(backend.SymmGroup, "synchronize", ends)
        used = lambda tensor, stream: log.append(f"{stream.name} uses it")  # noqa: E731
        patch.setattr(torch.Tensor, "record_stream", used)
        dist.all_reduce(x, group=group)
        assert log == ["default runs"]
        log.clear()
        work = dist.all_reduce(x, group=group, async_op=True)
        log.append("between")
        assert work.wait()
        assert work.wait(timedelta(seconds=1))
        dist.barrier(group)
        assert log == [
            "own records event 0",
            "default records event 0",
            "own waits for event 0",
            "own uses it",
            "own runs",
            "own records event 5",
            "between",
            "default waits for event 5",
            "default waits for event 5",
            "the host waits",
        ]
        log.clear()
        assert work.get_future().wait()[0] is x
        assert log == ["to (5, 0, 1)", "to (0, 0, 1)"]
        patch.setattr(Point, "ended", False)
        with pytest.raises(CollectiveTimeout, match="the call still runs after"):
            work.wait(timedelta(seconds=0.01))
        log.clear()
        block = dist._coalescing_manager(group, torch.device("cpu"), async_ops=True)
        with block as calls:
            dist.broadcast(x, 0, group, async_op=True)
            log.append("between")
        calls.wait()
        number = int(log[-1][-1])
        assert log[-4:] == [
            "between",
            "own runs",
            f"own records event {number}",
            f"default waits for event {number}",
        ]
        log.clear()
        y = torch.zeros(3)
        peers = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        works = [dist.isend(x, peers[0], group), dist.irecv(y, peers[1], group)]
        for work in works:
            work.wait()
        assert log == ["default runs"] * 2
        log.clear()
    assert x.tolist() == y.tolist() == [comm.size**2] * 3


def test_streams_follow_each_other(ranks):
    ranks(in_order)


def tensors():
    """Return tensors that are read at once, with NumPy's types, and others."""
    known = [each for each in dtypes.DTYPES if hasattr(torch, each.name)]
    by_torch = {getattr(torch, each.name): each for each in known if each.kind != "c"}
    x = torch.arange(24.0).reshape(4, 6)
    plain = [torch.zeros(3).to(kind) for kind in by_torch]
    plain += [x, x[1:], x.view(-1)[3:], x[:, :1][:1], torch.tensor(3.0)]
    plain += [torch.empty(0, 3), torch.ones(3, 1, 4).expand(3, 1, 4)]
    others = [x.t(), x[:, 1:], torch.ones(3, 1).expand(3, 5), torch.ones(1).to("meta")]
    others += [torch._neg_view(x), torch.ones(3, requires_grad=True), x.to_sparse()]
    others += [torch.ones(3, dtype=torch.complex64).conj()]
    return [(each, by_torch[each.dtype]) for each in plain], others


@of_torch
def test_a_tensor_is_read_at_once():
    plain, others = tensors()
    samples, left = [(dtype, x) for x, dtype in plain], []

    def otherwise(tensor, what):
        left.append((tensor, what))
        return len(left)

    read = exchange.reader(torch.Tensor, samples, otherwise, exchange.CPU)
    for x, dtype in plain:
        assert read(x, "") == (x.data_ptr(), tuple(x.shape), dtype, "C", False)
    assert not left
    for number, x in enumerate(others, 1):
        assert read(x, "call") == number
        assert left[-1][0] is x
        assert left[-1][1] == "call"
    torch.func.vmap(lambda x: (read(x, ""), x)[1])(torch.ones(2, 3))
    assert len(left) == len(others) + 1  # it has no address
    on_a_gpu = exchange.reader(torch.Tensor, samples, otherwise)
    assert all(on_a_gpu(x, "") == len(left) for x, _ in plain)
    assert exchange.reader(object, samples, otherwise) is otherwise


@of_torch
def test_reading_a_tensor_keeps_no_reference():
    def pick(tensor, what):
        return what

    x, dtype = torch.ones(2, 300), np.dtype("float32")
    read = exchange.reader(torch.Tensor, [(dtype, x)], print, exchange.CPU)
    kept = read(x, "")

    def counts():
        return [sys.getrefcount(each) for each in (x, dtype, kept[3], kept[4], read)]

    before = counts()
    for _ in range(1000):
        read(x, "")
    assert np.abs(np.subtract(counts(), before)).max() < 100  # others may use them
    read = exchange.reader(torch.Tensor, [(dtype, x)], pick, exchange.CPU)
    for other in (x.t(), torch.ones(2, 300, requires_grad=True)):
        blocks = sys.getallocatedblocks()
        for _ in range(1000):
            assert read(other, other) is other
        assert sys.getallocatedblocks() - blocks < 500  # also none of the lengths


@of_torch
def test_the_example_learns_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc-per-node", "2", str(ROOT / "examples/torch_ddp.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "1"},
        **{"capture_output": True, "text": True, "check": False},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("loss 0.05"), ended.stdout


def parting(comm, folder, orders):
    begin(comm, folder)
    made = [dist.new_group(backend="symm") for _ in range(2)]
    for group in made:
        dist.all_reduce(torch.ones(3), group=group)
    import numba_symm.torch as backend

    backend.PARTING = 2.0
    began = time.monotonic()
    for index in orders[comm.rank]:
        dist.destroy_process_group(made[index])
    return time.monotonic() - began


@pytest.mark.parametrize("orders", [[(0, 1), (1, 0)], [(0, 1), ()], [(), (1, 0)]])
def test_groups_are_destroyed_in_any_order(tmp_path, orders):
    for one in on_two(parting, tmp_path, orders):
        assert one.error == ""
        assert one.code == 0
        assert one.output == ""
        assert one.value < SECONDS / 2
