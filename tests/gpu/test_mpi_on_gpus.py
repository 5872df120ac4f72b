"""mpi4py's spelling on GPUs: other libraries' arrays, streams, captures, windows."""

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.gpu import streams
from tests.gpu.helpers import (
    add,
    capturing,
    fill,
    of_ranks,
    optional,
    to_device,
)

LATE = 100  # milliseconds


@pytest.fixture(scope="module")
def comm(world):
    made = MPI.Comm(world, timeout=60)
    yield made
    made.Free()


@pytest.fixture
def apart(world):
    """A communicator of mpi4py that no other test has wrapped."""
    made = world.Dup()
    yield made
    made.Free()


@pytest.fixture
def torch(comm):
    torch = optional("torch")
    torch.cuda.set_device(comm.communicator.device.ordinal)
    return torch


@pytest.fixture
def cupy(comm):
    return optional("cupy")


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


# Streams.


def test_a_blocking_call_follows_torch_s_stream_and_waits_for_it(comm, torch):
    x, stream = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    for _ in range(2):  # the second one is a shortcut
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE * 2_000_000)
            x.fill_(comm.rank + 1)
            comm.Allreduce(x, y)
            assert stream.query()
        assert (y.cpu() == of_ranks(comm)).all()
        y.zero_()
        torch.cuda.synchronize()


def test_a_blocking_call_follows_cupy_s_stream_and_waits_for_it(comm, cupy):
    x, y = cupy.zeros(1000, cupy.float32), cupy.zeros(1000, cupy.float32)
    view = cuda.as_cuda_array(x, sync=False)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(2):
        with stream:
            fill(view, comm.rank + 1, stream, LATE)
            comm.Allreduce([x, MPI.FLOAT], [y, MPI.FLOAT])
            assert stream.done
        assert (y.get() == of_ranks(comm)).all()
        y.fill(0)
        cupy.cuda.Device().synchronize()


def test_calls_that_do_not_wait_are_ordered_on_the_stream(comm, apart, torch):
    lazy = MPI.Comm(apart, synchronize=False, timeout=60)
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    lazy.Allreduce(x, y)  # compiled
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE * 2_000_000)
        x.fill_(comm.rank + 1)
        lazy.Allreduce(x, y)
        assert not stream.query()
        y.add_(0.5)
    stream.synchronize()
    assert (y.cpu() == of_ranks(comm) + 0.5).all()
    lazy.Free()


def test_a_request_is_done_later(comm, torch):
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    comm.Iallreduce(x, y).Wait()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE * 2_000_000)
        request = comm.Iallreduce(x, y)
    assert not request.Test()
    assert MPI.Request.Waitall([request])
    assert (y.cpu() == comm.size).all()
    comm.Barrier()


def test_a_request_does_not_block_a_later_call(comm):
    """Rank 0 sends after it has started the reduction, the others receive before."""
    x, y, z = (to_device(np.ones(5000, np.float32)) for _ in range(3))
    comm.Iallreduce(x, y).Wait()  # compiled
    comm.Sendrecv(z, (comm.rank + 1) % comm.size, 0, y)  # allocates memory
    if comm.rank == 0:
        request = comm.Iallreduce(x, y)
        fill(z, 7)
        for rank in range(1, comm.size):
            comm.Send(z, rank, 3)
    else:
        comm.Recv(z, 0, 3)
        request = comm.Iallreduce(x, y)
    request.Wait()
    assert (z.copy_to_host() == 7).all()
    assert (y.copy_to_host() == comm.size).all()


def test_a_request_runs_beside_later_kernels(comm):
    x, y = (to_device(np.ones(5000, np.float32)) for _ in range(2))
    late = to_device(np.zeros(1, np.float32))
    fill(late, 0)  # compiled
    comm.Iallreduce(x, y).Wait()
    comm.Barrier()
    request = comm.Iallreduce(x, y)
    fill(late, 1, milliseconds=10 * LATE)
    request.Wait()
    assert not streams.is_done(streams.LEGACY_DEFAULT)
    assert (y.copy_to_host() == comm.size).all()
    comm.Barrier()


# Messages.


def test_a_message_follows_the_streams_of_its_arrays(comm, torch):
    right, left = around(comm)
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE * 2_000_000)
        x.fill_(comm.rank)
        requests = [comm.Irecv(y, left), comm.Isend(x, right)]
        x.fill_(-1)  # the request is done
        MPI.Request.Waitall(requests)
        y.add_(0.5)
    stream.synchronize()
    assert (y.cpu() == left + 0.5).all()


@pytest.mark.parametrize("number", [1, 2])
def test_a_sendrecv_follows_the_streams_of_its_arrays(comm, number):
    right, left = around(comm)
    used = [cuda.stream() for _ in range(number)]
    x = cuda.device_array(1000, np.float32, stream=used[0])
    y = cuda.device_array(1000, np.float32, stream=used[-1])
    for _ in range(2):
        fill(x, comm.rank, used[0], LATE)
        fill(y, -1, used[-1], 2 * LATE)
        comm.Sendrecv(x, right, 6, y, left, 6)
        assert streams.is_done(streams.handle_or_default(used[-1]))
        cuda.synchronize()
        assert (y.copy_to_host() == left).all()


def test_packing_follows_the_stream_of_the_array(comm, torch):
    right, left = around(comm)
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    pairs = MPI.FLOAT.Create_vector(500, 1, 2).Commit()
    comm.Sendrecv([x, 1, pairs], right, 0, [y, 1, pairs], left)  # compiled
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE * 2_000_000)
        x.fill_(comm.rank + 1)
        comm.Sendrecv([x, 1, pairs], right, 0, [y, 1, pairs], left)
        comm.Allreduce(MPI.IN_PLACE, [y, 1, pairs])
    found = y.cpu()
    assert (found[::2] == of_ranks(comm)).all()
    assert (found[1::2] == 0).all()
    pairs.Free()


# Captures.


def test_what_can_be_captured_and_what_cannot(comm, apart):
    stream = Device().create_stream()
    made = MPI.Comm(apart, stream=stream, timeout=60)
    right, _ = around(made)
    x = to_device(np.full(1000, made.rank, np.float32))
    y, z = (to_device(np.zeros(1000, np.float32)) for _ in range(2))
    spread = to_device(np.zeros(2 * made.size * 1000, np.float32))
    pairs = MPI.FLOAT.Create_vector(1, 1, 2).Create_resized(0, 8).Commit()
    with_gaps = x, [spread, 1000, pairs]
    prepared, win = (
        made.Allgather_init(*with_gaps),
        MPI.Win.Allocate_device(8, comm=made),
    )
    made.Allreduce(x, y)
    made.Iallreduce(y, z).Wait()
    prepared.Start()
    prepared.Wait()
    add(x, 0, stream)  # all is compiled
    refused = [
        lambda: made.Allgather(*with_gaps),
        lambda: made.Send(x, right),
        lambda: made.Isend(x, right),
        lambda: made.Irecv(y),
        lambda: made.Sendrecv(x, right, 0, y),
        lambda: win.Put([x, 1], right),
        win.Fence,
    ]
    with capturing(stream) as (_, graphs):
        add(x, 1, stream)
        made.Allreduce(x, y)  # returns, and does not wait
        request = made.Iallreduce(y, z)
        assert request.Test()
        prepared.Start()
        prepared.Wait()
        for call in refused:
            with pytest.raises(NotImplementedError, match="captur"):
                call()
    first = of_ranks(made) - made.size
    for replay in range(1, 6):
        graphs[0].launch(stream)
        made.communicator.synchronize()
        total = first + made.size * replay
        assert (y.copy_to_host() == total).all()
        assert (z.copy_to_host() == made.size * total).all()
        everyone = np.arange(made.size).repeat(1000) + replay
        assert (spread.copy_to_host()[::2] == everyone).all()
    win.Free()
    pairs.Free()
    made.Free()


# Windows.


def test_one_sided_calls_are_atomic_between_gpus(comm):
    win, first = MPI.Win.Allocate_device(4 << 20, 4, comm=comm), 0
    numbers, one = [], to_device(np.ones(1, np.int32))
    found = to_device(np.zeros(1, np.int32))
    win.Fence()
    for _ in range(20):
        win.Lock(first, MPI.LOCK_SHARED)
        win.Fetch_and_op(one, found, first, 0)
        win.Unlock(first)
        numbers.append(int(found.copy_to_host()[0]))
    everyone = [number for each in comm.allgather(numbers) for number in each]
    assert sorted(everyone) == list(range(20 * comm.size))
    many = to_device(np.arange(1 << 19, dtype=np.int32))
    win.Fence()
    for _ in range(5):
        win.Accumulate(many, first, 1 << 19)
    win.Fence()
    if comm.rank == first:
        half = win.array.copy_to_host().view(np.int32)[1 << 19 :]
        assert (half == 5 * comm.size * np.arange(1 << 19)).all()
    win.Free()


def test_a_fence_follows_the_owner_s_kernels(comm, torch):
    right, left = around(comm)
    stream = cuda.stream()
    mine = cuda.device_array(5000, np.float32, stream=stream)
    win, out = MPI.Win.Create(mine, 4, comm=comm), to_device(np.zeros(5000, "f4"))
    for step in range(3):
        fill(mine, 10 * step + comm.rank, stream, LATE)
        win.Fence()
        win.Get(out, right)
        win.Fence()
        assert (out.copy_to_host() == 10 * step + right).all()
    win.Free()
    tensor = torch.zeros(5000, device="cuda")  # within a segment of torch's
    torch.cuda.synchronize()
    win = MPI.Win.Create(tensor, 4, comm=comm)
    win.Fence()
    win.Put(to_device(np.full(10, comm.rank, np.float32)), right, 50)
    win.Fence()
    assert (tensor.cpu()[50:60] == left).all()
    assert tensor.cpu().sum() == 10 * left
    win.Free()
