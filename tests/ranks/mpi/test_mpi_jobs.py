"""The temporary arrays of collectives in mpi4py's spelling."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.environment import SIMULATED
from numba_symm.gpu import streams
from numba_symm.mpi import jobs


def test_captures_with_temporary_arrays(comm, monkeypatch):
    """A graph would use them after they are freed; a persistent request keeps them."""
    pairs = MPI.INT.Create_vector(1, 1, 2).Create_resized(0, 8).Commit()
    x, out = (
        cuda.to_device(np.full(1, comm.rank, "i4")),
        cuda.to_device(np.zeros(2 * comm.size, "i4")),
    )
    given = x, [out, 1, pairs]
    prepared = comm.Allgather_init(*given)
    with monkeypatch.context() as patch:
        patch.setattr(jobs.streams, "is_capturing", lambda stream: True)
        patch.setattr(comm._life, "side", None)
        for call in (comm.Allgather, comm.Iallgather, comm.Allgather_init):
            with pytest.raises(NotImplementedError, match="Allgather_init before"):
                call(*given)
        prepared.Start()
        assert prepared.Test()
        assert comm._life.side is None  # nothing is made within a capture
    assert out.copy_to_host()[::2].tolist() == list(range(comm.size))
    pairs.Free()


def test_temporary_arrays_outlive_their_request(comm, monkeypatch):
    """The request may be dropped before the work has ended."""
    ended = []

    class Event:
        def record(self, stream):
            pass

        def query(self):
            return bool(ended)

    monkeypatch.setattr(jobs, "Event", Event)
    monkeypatch.setattr(jobs, "_lingering", [])
    pairs = MPI.INT.Create_vector(1, 1, 2).Create_resized(0, 8).Commit()
    x, out = (
        cuda.to_device(np.full(1, comm.rank, "i4")),
        cuda.to_device(np.zeros(2 * comm.size, "i4")),
    )
    for number in (1, 2):
        comm.Iallgather(x, [out, 1, pairs])
        assert len(jobs._lingering) == number
    monkeypatch.setattr(comm, "synchronizes", False)
    comm.Allgather(x, [out, 1, pairs])
    assert len(jobs._lingering) == 3
    comm.Allgather(x, out[: comm.size])  # has no temporary array
    assert len(jobs._lingering) == 3
    y = cuda.to_device(np.ones(1, "i4"))
    kept = weakref.ref(y)
    comm.Iallreduce(MPI.IN_PLACE, y)  # neither has this one
    del y
    gc.collect()
    assert kept() is not None
    ended.append(True)
    comm.Allgather(x, [out, 1, pairs])
    gc.collect()
    assert kept() is None
    assert len(jobs._lingering) == 1
    pairs.Free()
    comm.Barrier()


def test_nonblocking_calls_run_beside_later_ones(comm, monkeypatch):
    """They follow the earlier work of the array's stream, on another one."""
    log, reduce = [], comm.communicator.all_reduce
    own, beside = 7, 5
    if not SIMULATED:
        made = [cuda.stream() for _ in range(2)]
        own, beside = (streams.handle_or_default(each) for each in made)

    class Side:
        stream = beside

        def follow(self, stream, event):
            log.append(stream)

        def joined(self, stream):
            return contextlib.nullcontext()

    def all_reduce(*args, stream, **options):
        log.append(stream)
        reduce(*args, **options)

    all_reduce.__name__ = "all_reduce"
    monkeypatch.setattr(comm._life, "side", Side())
    monkeypatch.setattr(comm.communicator, "all_reduce", all_reduce)
    comm.communicator._calls.memory.clear()
    monkeypatch.setattr(jobs, "stream_for", lambda communicator, array: own)
    x = cuda.to_device(np.ones(1, "i4"))
    comm.Iallreduce(MPI.IN_PLACE, x).Wait()
    comm.Allreduce(MPI.IN_PLACE, x)
    prepared = comm.Allreduce_init(MPI.IN_PLACE, x)
    prepared.Start()
    prepared.Wait()
    assert log == [own, beside, own, own, beside]
    assert x.copy_to_host()[0] == comm.size**3
    comm.Barrier()
