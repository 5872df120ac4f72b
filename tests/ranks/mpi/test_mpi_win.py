"""One-sided calls in mpi4py's spelling, on device memory."""

import gc
import weakref

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.errors import ClosedError
from numba_symm.mpi import win as windows
from numba_symm.sharing import open_shared, sent
from tests.ranks.helpers import of_one_island

pytestmark = of_one_island


@pytest.fixture
def win(comm):
    """A window of 12 int32 of every rank, with displacements in elements."""
    made = MPI.Win.Allocate_device(48, 4, comm=comm)
    yield made
    mapped = [each for each in made._memory if each is not None]
    assert len(mapped) == comm.size
    made.Free()
    for each in mapped:
        with pytest.raises(ClosedError):
            each.copy_to_host()


def array(*values):
    return cuda.to_device(np.array(values, np.int32))


def contents(win):
    return win.array.copy_to_host().view(np.int32).tolist()


def test_puts_and_gets_between_fences(comm, win):
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    win.Fence()
    win.Put(array(comm.rank, 7), right, 3)
    win.Fence()
    assert contents(win)[:6] == [0, 0, 0, left, 7, 0]
    out = array(-1, -1, -1)
    win.Get([out, 2], right, [3, 2, MPI.INT])
    win.Fence()
    assert out.copy_to_host().tolist() == [comm.rank, 7, -1]
    win.Put(array(1), MPI.PROC_NULL)
    win.Get(out, MPI.PROC_NULL)
    win.Fence()
    # Host arrays, too.
    host = np.full(2, -1, np.int32)
    win.Get(host, right, 3)
    win.Fence()
    assert host.tolist() == [comm.rank, 7]
    win.Put(np.array([5], np.int32), right)
    win.Fence()
    assert contents(win)[0] == 5
    assert win.attrs[1:] == (48, 4)
    assert win.tomemory() is win.array


def test_accumulates_of_all_ranks_are_atomic(comm, win):
    win.Fence()
    for _ in range(5):
        win.Accumulate(array(1, comm.rank), 0)
        win.Accumulate(array(2), 0, 4, MPI.MAX)
    win.Fence()
    if comm.rank == 0:
        assert contents(win)[:2] == [5 * comm.size, 5 * sum(range(comm.size))]
        assert contents(win)[4] == 2
    win.Fence()
    found = []
    for _ in range(4):
        before = array(-1)
        win.Lock(0, MPI.LOCK_SHARED)
        win.Fetch_and_op(array(1), before, 0, 8)
        win.Unlock(0)
        found.append(int(before.copy_to_host()[0]))
    everyone = [number for each in comm.allgather(found) for number in each]
    assert sorted(everyone) == list(range(4 * comm.size))
    before = array(-1)
    win.Lock_all()
    win.Compare_and_swap(array(comm.rank + 1), array(0), before, 0, 9)
    win.Unlock_all()
    winners = [r for r, first in enumerate(comm.allgather(before[0] == 0)) if first]
    assert len(winners) == 1
    if comm.rank == 0:
        assert contents(win)[9] == winners[0] + 1


def test_elements_with_gaps(comm, win):
    own, pairs = comm.rank, MPI.INT.Create_vector(2, 1, 3).Commit()
    win.Lock(own)
    win.Put([array(1, 2, 3, 4), 1, pairs], own, [0, 2, MPI.INT])
    win.Flush(own)
    assert contents(win)[:3] == [1, 4, 0]
    win.Put(array(5, 6), own, [4, 1, pairs])
    win.Flush(own)
    assert contents(win)[4:8] == [5, 0, 0, 6]
    win.Accumulate([array(1, 0, 0, 2), 1, pairs], own, [4, 1, pairs])
    win.Flush(own)
    assert contents(win)[4:8] == [6, 0, 0, 8]
    out = array(0, 0, 0, 0)
    win.Get([out, 1, pairs], own, [4, 1, pairs])
    win.Unlock(own)
    assert out.copy_to_host().tolist() == [6, 0, 0, 8]
    pairs.Free()
    comm.Barrier()


def test_epochs_wait_for_the_streams_of_the_owner(comm, win, monkeypatch):
    """The program's kernels on the window's memory precede the peers' accesses."""
    waited, everyone = [], win.Get_group()
    streams = {None: 7, id(win.array): 8}
    with monkeypatch.context() as patch:
        patch.setattr(windows.streams, "synchronize", waited.append)
        # The driver knows no streams 7 and 8.
        patch.setattr(windows.streams, "is_capturing", lambda stream: False)
        patch.setattr(
            comm.post, "stream_of", lambda x: streams[x if x is None else id(x)]
        )
        calls = [
            lambda: win.Post(everyone),
            lambda: (win.Start(everyone), win.Complete()),
            lambda: (win.Wait(), win.Lock(comm.rank), win.Sync()),
            lambda: win.Unlock(comm.rank),
            win.Fence,
        ]
        for call in calls:
            call()
            assert sorted(waited) == [7, 8]
            waited.clear()
    everyone.Free()
    comm.Barrier()


def test_requests_of_a_window(comm, win):
    own, out = comm.rank, array(0, 0)
    win.Lock(own)
    requests = [win.Rput(array(1, 2), own), win.Raccumulate(array(1, 1), own)]
    MPI.Request.Waitall(requests)
    win.Rget(out, own).Wait()
    assert out.copy_to_host().tolist() == [2, 3]
    win.Rget_accumulate(array(1, 1), out, own).Wait()
    win.Unlock(own)
    assert contents(win)[:2] == [3, 4]
    comm.Barrier()


def test_windows_over_given_arrays(comm, world):
    mine = comm.communicator.zeros(4, np.float32)
    win = MPI.Win.Create(mine, 4, comm=comm)
    win.Fence()
    win.Put(cuda.to_device(np.full(1, 2.0, np.float32)), 0, comm.rank % 4)
    win.Fence()
    if comm.rank == 0:
        assert mine.copy_to_host()[0] == 2
    win.Free()
    # Only rank 0 has memory.
    memory = comm.communicator.zeros(1, np.int32)
    win = MPI.Win.Create(memory if comm.rank == 0 else None, 4, comm=comm)
    win.Fence()
    win.Accumulate(array(1), 0)
    win.Fence()
    if comm.rank == 0:
        assert memory.copy_to_host()[0] == comm.size
    win.Free()
    win = MPI.Win.Allocate_shared(8, 8, comm=comm)  # those on the host are mpi4py's
    win.Fence()
    memory, unit = win.Shared_query(0)
    assert (len(memory), unit) == (8, 8)
    win.Fence()
    win.Free()
    MPI.Win.Create_dynamic(comm=comm).Free()
    for kind in (comm, world):
        host = np.zeros(2)
        win = MPI.Win.Create(host, 8, comm=kind)
        win.Fence()
        win.Put(np.ones(1), comm.rank, 1)
        win.Fence()
        assert host.tolist() == [0, 1]
        win.Free()


def test_a_window_that_one_rank_cannot_map(comm, monkeypatch):
    """All ranks raise, and the memory may have a window afterwards."""
    last, opened = comm.size - 1, []

    def fails(handle):
        if len(opened) == last:
            raise RuntimeError("no room left")
        opened.append(open_shared(handle))
        return opened[-1]

    memory = comm.communicator.zeros(1, np.int32)
    with monkeypatch.context() as patch:
        if comm.rank == last:
            patch.setattr(windows, "open_shared", fails)
        text = f"Win.Create: mapping memory failed on 1 of .*\n.*rank {last}: .*no room"
        with pytest.raises(MPI.Exception, match=text):
            MPI.Win.Create(memory, 4, comm=comm)
    win = MPI.Win.Create(memory, 4, comm=comm)
    win.Fence()
    win.Accumulate(array(1), 0)
    win.Fence()
    assert comm.rank or memory.copy_to_host()[0] == comm.size
    win.Free()


def test_a_window_that_one_rank_cannot_allocate(comm):
    """Its size may differ from that of the other ranks."""
    last = comm.size - 1
    nbytes = 1 << 55 if comm.rank == last else 4
    text = "Win.Allocate_device: sharing memory failed on 1 of"
    with pytest.raises(MPI.Exception, match=text):
        MPI.Win.Allocate_device(nbytes, 4, comm=comm)
    win = MPI.Win.Allocate_device(4, 4, comm=comm)
    win.Free()


@pytest.mark.parametrize("unit", [-1, 0, 0.5, "x", None, int])
def test_a_window_with_a_wrong_displacement_unit(comm, unit, monkeypatch):
    """All ranks refuse it before one allocates anything."""
    monkeypatch.setattr(windows, "WindowLocks", None)
    last, memory = comm.size - 1, comm.communicator.zeros(1, np.int32)
    given = unit if comm.rank == last else np.int64(4)
    for make, of in (("Create", memory), ("Allocate_device", 4)):
        text = f"Win.{make}: .* 1 byte or more, got {unit!r} on rank {last}; pass"
        with pytest.raises(MPI.Exception, match=text) as found:
            getattr(MPI.Win, make)(of, given, comm=comm)
        assert found.value.Get_error_class() == MPI.ERR_DISP
        assert isinstance(found.value, ValueError)


def test_a_window_frees_the_memory_that_it_allocated(comm):
    """When the library next allocates memory, or the second time."""
    blocks, numbers = comm.post.words.allocator._blocks._found, []
    for _ in range(6):
        MPI.Win.Allocate_device(8, 4, comm=comm).Free()
        numbers.append(len(blocks))
    assert numbers[-1] <= numbers[2]


def test_an_open_window_is_not_reported(comm, monkeypatch):
    """The library itself has shared its memory, so the program is not warned of it."""
    reports = []
    monkeypatch.setattr(sent.log, "warning", lambda *given: reports.append(given))

    def told():
        reports.clear()
        gc.collect()  # what earlier tests have shared
        sent._tell_what_is_shared()
        return [*reports]

    before = told()
    win = MPI.Win.Allocate_device(48, 4, comm=comm)
    assert told() == before
    win.Free()


def test_refused_calls_on_a_window(comm, win):
    own, x = comm.rank, array(1, 2)
    win.Lock(own)
    calls = [
        (lambda: win.Put(x, own, 11), MPI.ERR_RMA_RANGE, "within the 48 bytes"),
        (lambda: win.Get(x, own, -1), MPI.ERR_RMA_RANGE, "within the 48 bytes"),
        (lambda: win.Put(x, comm.size), MPI.ERR_RANK, f"{comm.size - 1} or MPI.PROC"),
        (lambda: win.Get(x, -9), MPI.ERR_RANK, "a rank from 0 to .*, got -9"),
        (lambda: win.Put(x, own, [0, 1]), MPI.ERR_COUNT, "as many bytes"),
        (lambda: win.Put(x, own, [0, 1, MPI.INT, 1]), MPI.ERR_ARG, "3 items"),
        (lambda: win.Accumulate(x, own, op=MPI.MINLOC), MPI.ERR_OP, "pairs"),
        (
            lambda: win.Accumulate(
                [x, MPI.TWOINT], own, [0, 1, MPI.TWOINT], MPI.MINLOC
            ),
            MPI.ERR_OP,
            "for collectives",
        ),
        (
            lambda: win.Accumulate(x, own, [0, 4, MPI.SHORT]),
            MPI.ERR_TYPE,
            "one type",
        ),
        (lambda: win.Fetch_and_op(x, x, own), MPI.ERR_COUNT, "as many bytes"),
        (
            lambda: win.Fetch_and_op([x, 2], [x, 1], own, op=MPI.NO_OP),
            MPI.ERR_COUNT,
            "as many bytes",
        ),
        (
            lambda: win.Compare_and_swap([x, 1], [x, 1, MPI.SHORT], [x, 1], own),
            MPI.ERR_TYPE,
            "expected items of 4 bytes, got 2",
        ),
    ]
    for call, code, words in calls:
        with pytest.raises(MPI.Exception, match=words) as found:
            call()
        assert found.value.Get_error_class() == code
    win.Unlock(own)
    with pytest.raises(MPI.Exception, match=r"of numba_symm\.mpi, such as comm="):
        MPI.Win.Create(x)  # of COMM_SELF of mpi4py
    memory = array(1) if comm.rank else np.zeros(1)
    if comm.size > 1:
        with pytest.raises(MPI.Exception, match="on all, got both"):
            MPI.Win.Create(memory, 1, comm=comm)
    comm.Barrier()


def test_a_window_outlives_its_communicator(comm):
    made = comm.Dup()
    win = MPI.Win.Allocate_device(8, 4, comm=made)
    made.Free()
    win.Fence()
    win.Put(array(3, 4), (win.group_rank + 1) % win.group_size)
    win.Fence()
    assert contents(win) == [3, 4]
    assert win.attrs[1:] == (8, 4)
    win.Free()
    with pytest.raises(MPI.Exception, match="Put: Free was called on the win") as found:
        win.Put(array(1), 0)
    assert found.value.Get_error_class() == MPI.ERR_WIN


def test_temporary_arrays_live_until_the_epoch_ends(comm, win, monkeypatch):
    made, first = [], windows.copied

    def watched(of, into):
        steps = first(of, into)
        made.append(weakref.ref(steps[0]))
        return steps

    monkeypatch.setattr(windows, "copied", watched)
    pairs = MPI.INT.Create_vector(2, 1, 3).Commit()
    x = array(1, 2, 3, 4)
    win.Lock(comm.rank)
    win.Put([x, 1, pairs], comm.rank, [4, 1, pairs])
    assert made[0]() is not None
    win.Unlock(comm.rank)
    gc.collect()
    assert made[0]() is None
    assert contents(win)[4:8] == [1, 0, 0, 4]
    pairs.Free()
    comm.Barrier()
