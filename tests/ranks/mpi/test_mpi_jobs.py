"""The temporary arrays of collectives in mpi4py's spelling."""

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
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
        patch.setattr(jobs, "_captures", lambda stream: True)
        for call in (comm.Allgather, comm.Iallgather, comm.Allgather_init):
            with pytest.raises(NotImplementedError, match="Allgather_init before"):
                call(*given)
        prepared.Start()
        patch.setattr(jobs, "SIMULATED", False)
        assert prepared.Test()  # no query of the stream
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
    ended.append(True)
    comm.Allgather(x, [out, 1, pairs])
    assert len(jobs._lingering) == 1
    pairs.Free()
    comm.Barrier()
