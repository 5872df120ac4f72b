"""Blocking calls in mpi4py's spelling that repeat, and the driver's part of them."""

import gc
import weakref

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.gpu import streams
from numba_symm.gpu.events import Event
from numba_symm.mpi.rooms import LEAST
from tests.ranks.helpers import of_one_island


def test_calls_that_repeat(comm):
    """They take a shortcut, and still see what differs: arrays, types, operators."""
    size, memory = comm.size, comm.communicator._calls.memory
    before = len(memory.young)
    for step in range(3):
        x = cuda.to_device(np.full(6, step + 1.0, np.float32))
        y = cuda.to_device(np.zeros(6, np.float32))
        for _ in range(2):
            comm.Allreduce(x, y)
            assert set(y.copy_to_host()) == {(step + 1) * size}
            comm.Allreduce([x, MPI.FLOAT], [y, MPI.FLOAT], op=MPI.MAX)
            assert set(y.copy_to_host()) == {step + 1}
            comm.Allreduce([x, 2, MPI.FLOAT], [y, 2, MPI.FLOAT])
            assert y.copy_to_host().tolist()[1:3] == [(step + 1) * size, step + 1]
            comm.Allreduce(x, y, MPI.MIN)
            assert set(y.copy_to_host()) == {step + 1}
            comm.Bcast(y, root=size - 1)
            comm.Allreduce(MPI.IN_PLACE, y)
            assert set(y.copy_to_host()) == {(step + 1) * size}
    assert len(memory.young) > before
    with pytest.raises(MPI.Exception, match="mismatch"):
        comm.Allreduce(x, y[:5])
    with pytest.raises(MPI.Exception, match="expected a root"):
        comm.Bcast(y, root=size)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None
    # Without counts, the ranks exchange them in every call.
    whole = cuda.to_device(np.arange(2 * size, dtype=np.int32))
    parts = {n: cuda.to_device(np.zeros(n, np.int32)) for n in (1, 2, 3)}
    for step in range(3):
        many = size > 1 and step == 2
        count = 2 + (comm.rank == 0) - (comm.rank == 1) if many else 2
        part = parts[count]
        comm.Reduce_scatter(whole, part)
        first = sum(comm.allgather(count)[: comm.rank])
        wanted = size * np.arange(first, first + count)
        assert part.copy_to_host().tolist() == wanted.tolist()


def test_calls_that_repeat_follow_the_memory(comm, monkeypatch):
    """Addresses of symmetric memory may mean other memory of the peers later."""
    heap, changes = comm.communicator._calls.heap, []
    forget = heap.changed
    monkeypatch.setattr(heap, "changed", lambda: changes.append(forget()))
    for step in range(4):
        x, y = (comm.communicator.empty((60,), np.float32) for _ in range(2))
        x.copy_to_device(np.full(60, step + 1.0, np.float32))
        for _ in range(2):
            comm.Allreduce(x, y)
            comm.Gather(y[: 60 // comm.size], x)
            assert set(y.copy_to_host()) == {(step + 1) * comm.size}
            assert comm.rank or x[0] == (step + 1) * comm.size
            x.copy_to_device(np.full(60, step + 1.0, np.float32))
        del x, y
    assert changes


def test_calls_that_repeat_are_compared_in_debug_mode(apart):
    made = MPI.Comm(apart, timeout=20, debug=True)
    x = cuda.to_device(np.ones(6, np.float32))
    for _ in range(2):
        made.Allreduce(MPI.IN_PLACE, x if made.rank else [x, 6, MPI.FLOAT])
    assert set(x.copy_to_host()) == {made.size**2}
    if made.size > 1:
        with pytest.raises(MPI.Exception, match="max"):
            made.Allreduce(MPI.IN_PLACE, x, MPI.MAX if made.rank else MPI.SUM)
    made.Free()


@pytest.mark.parametrize("own", [True, False])
def test_calls_of_a_communicator_that_was_freed(comm, apart, own):
    """They raise, and make nothing anew."""
    freed = comm.Dup() if own else MPI.Comm(apart, timeout=20)
    x, host = cuda.to_device(np.ones(2)), np.ones(2)
    freed.Allreduce(MPI.IN_PLACE, x)
    freed.Free()
    calls = [
        *(
            lambda do=do: do(MPI.IN_PLACE, x)
            for do in (freed.Allreduce, freed.Iallreduce, freed.Allreduce_init)
        ),
        lambda: freed.Send(x, 0),
        lambda: freed.Irecv(x, 0),
        freed.Probe,
        freed.Improbe,
    ]
    for call in calls:
        with pytest.raises(MPI.Exception, match="Free was called") as found:
            call()
        assert found.value.Get_error_class() == MPI.ERR_COMM
    if not own:  # the communicator that was passed is not freed
        freed.Allreduce(MPI.IN_PLACE, host)
        assert set(host) == {comm.size}


@of_one_island
@pytest.mark.parametrize("number", [1, LEAST])
def test_the_copies_of_messages_wait_for_no_stream(comm, monkeypatch, number):
    """Words tell when its copies have ended."""
    calls, post = [], comm.post

    def noting(owner, name):
        plain = getattr(owner, name)

        def noted(*args):
            calls.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, noted)

    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = cuda.to_device(np.full(number, comm.rank))
    out = cuda.to_device(np.zeros(number, int))
    comm.Sendrecv(x, right, 0, out, left)  # makes what later messages use again
    comm.Barrier()
    post.take_back()
    for name in ("_send", "receive"):
        noting(post, name)
    for name in ("record", "wait", "synchronize", "query"):
        noting(Event, name)
    for name in ("copy", "copy_to_host", "copy_from_host", "synchronize"):
        noting(streams, name)
    comm.Send(x, right)
    comm.Recv(out, left)
    found = calls.copy()  # what follows is not the message's
    monkeypatch.undo()
    assert set(out.copy_to_host()) == {left}
    steps = [each for each in found if each != "receive"]
    assert steps == ["_send"]
    assert "receive" in found
    comm.Barrier()
