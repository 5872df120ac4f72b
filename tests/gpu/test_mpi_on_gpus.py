"""mpi4py's spelling on GPUs: other libraries' arrays, streams, captures, windows."""

from concurrent.futures import ThreadPoolExecutor

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
    pattern,
    to_device,
    write_pattern,
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


def test_messages_of_a_new_thread_are_on_the_ranks_gpu(comm, world):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    x = to_device(np.full(4, comm.rank + 1, np.int32))
    out = to_device(np.zeros(4, np.int32))
    with ThreadPoolExecutor(1) as threads:  # in a new thread, no GPU is current
        threads.submit(comm.Sendrecv, x, right, 0, out, left).result()
    assert (out.copy_to_host() == left + 1).all()


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


def test_a_numba_array_names_its_stream(comm):
    stream = cuda.stream()
    x = cuda.device_array(1000, np.float32, stream=stream)
    fill(x, comm.rank + 1, stream, LATE)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x.copy_to_host(stream=stream) == of_ranks(comm)).all()


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


@pytest.mark.parametrize("count", [0, 1, 1023, 1025, 300_001, 20_000_000])
def test_messages_of_all_sizes(comm, count):
    right, left = around(comm)
    x = cuda.device_array(count, np.int32)
    write_pattern(x, comm.rank)
    out, status = to_device(np.full(count + 7, -1, np.int32)), MPI.Status()
    comm.Sendrecv(x, right, 5, out, left, 5, status)
    assert (status.source, status.Get_count(MPI.INT)) == (left, count)
    found = out.copy_to_host()
    assert (found[:count] == pattern(np.arange(count), left)).all()
    assert (found[count:] == -1).all()


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


def test_many_messages_and_calls_between_them(comm):
    """No message waits for a collective, and no collective for a message."""
    right, left = around(comm)
    x = to_device(np.zeros(5000, np.float32))
    rooms = [to_device(np.zeros(5000, np.float32)) for _ in range(20)]
    total = to_device(np.zeros(5000, np.float32))
    requests = [comm.Irecv(room, left, tag) for tag, room in enumerate(rooms)]
    for tag in reversed(range(len(rooms))):
        fill(x, 10 * comm.rank + tag)
        comm.Isend(x, right, tag)
        comm.Allreduce(x, total)
    MPI.Request.Waitall(requests)
    for tag, room in enumerate(rooms):
        assert (room.copy_to_host() == 10 * left + tag).all()
    assert (total.copy_to_host() == 10 * (of_ranks(comm) - comm.size)).all()


def test_derived_datatypes_are_packed_on_the_gpu(comm):
    rows, columns = 300, 400
    right, left = around(comm)
    host = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    flat = to_device((host + 1000 * comm.rank).ravel())
    column = MPI.FLOAT.Create_vector(rows, 1, columns).Commit()
    block = MPI.FLOAT.Create_subarray([rows, columns], [100, 50], [20, 30]).Commit()
    comm.Sendrecv([flat[7:], 1, column], right, 0, [flat, 1, column], left)
    comm.Allreduce(MPI.IN_PLACE, [flat[3:], 1, column])
    gathered = to_device(np.zeros(comm.size * 5000, np.float32))
    comm.Allgather([flat, 1, block], gathered)
    found = flat.copy_to_host().reshape(rows, columns)
    assert (found[:, 0] == host[:, 7] + 1000 * left).all()
    more = 1000 * (of_ranks(comm) - comm.size)
    assert (found[:, 3] == comm.size * host[:, 3] + more).all()
    rest = [index for index in range(columns) if index not in (0, 3)]
    assert (found[:, rest] == host[:, rest] + 1000 * comm.rank).all()
    blocks = gathered.copy_to_host().reshape(comm.size, 100, 50)
    for rank, each in enumerate(blocks):
        assert (each == host[20:120, 30:80] + 1000 * rank).all()
    column.Free()
    block.Free()


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


def test_neighbours_of_a_grid(comm, torch):
    ring = comm.Create_cart([comm.size], periods=[True])
    below, above = ring.Shift(0, 1)
    x = torch.full((2, 5000), float(comm.rank), device="cuda")
    x[1] += 0.5
    y = torch.zeros_like(x)
    ring.Neighbor_alltoall(x, y)
    # What a rank sends downwards, its neighbour there receives from above.
    assert (y[0].cpu() == below + 0.5).all()
    assert (y[1].cpu() == above).all()
    ring.Free()


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


def test_torch_captures_a_call(comm, torch):
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    comm.Allreduce(x, y)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        comm.Allreduce(x, y)
        y.add_(0.5)
    for number in range(1, 4):
        x.fill_(number * (comm.rank + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert (y.cpu() == number * of_ranks(comm) + 0.5).all()


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


def test_a_lock_made_of_compare_and_swap(comm):
    """What a rank puts before it gives the lock up, the next one gets."""
    win = MPI.Win.Allocate_device(8, 4, comm=comm)
    zero, one = (to_device(np.full(1, n, np.int32)) for n in (0, 1))
    before, count = (to_device(np.zeros(1, np.int32)) for _ in range(2))
    win.Lock_all()
    for _ in range(10):
        while True:
            win.Compare_and_swap(one, zero, before, 0, 0)
            win.Flush(0)
            if before.copy_to_host()[0] == 0:
                break
        win.Get(count, 0, 1)
        win.Flush(0)
        add(count, 1)
        win.Put(count, 0, 1)
        win.Flush(0)
        win.Fetch_and_op(zero, before, 0, 0, MPI.REPLACE)
        win.Flush(0)
    win.Unlock_all()
    comm.Barrier()
    if comm.rank == 0:
        held, total = win.array.copy_to_host().view(np.int32)
        assert (held, total) == (0, 10 * comm.size)
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
