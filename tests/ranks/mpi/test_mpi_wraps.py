"""Several calls of ``Comm`` with one communicator of mpi4py."""

import gc
import os
import resource
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm import process
from numba_symm.mpi import waited
from tests.ranks.helpers import needs_peers


def files():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def array(*values):
    return cuda.to_device(np.array(values, "i4"))


def exchanged(comm):
    out = array(-1)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Sendrecv(array(comm.rank), right, 1, out, left, 1)
    return out.copy_to_host()[0] == left


def test_a_dropped_communicator_is_found_again(apart):
    stream = cuda.stream()
    options = {"timeout": 20, "stream": stream}
    first = MPI.Comm(apart, **options)
    before = files()
    for _ in range(5):
        assert MPI.Comm(apart, device=None, **options) is first
    assert MPI.Comm(first, **options) is first
    assert files() == before
    other = apart.Dup()  # has no attribute of it
    second = MPI.Comm(other, **options)
    assert second is not first
    for each in range(6):  # one fewer than calls
        first.Free()
        assert exchanged(first), each
    first.Free()
    with pytest.raises(MPI.Exception, match="Free was called"):
        first.Free()
    with pytest.raises(MPI.Exception, match="Free was called"):
        exchanged(first)
    assert exchanged(second)
    third = MPI.Comm(apart, timeout=19)  # with other options, since it was freed
    assert third is not first
    assert exchanged(third)
    third.Free()
    second.Free()
    other.Free()


def test_what_is_made_of_a_communicator_is_found_too(comm):
    grid = comm.Create_cart([comm.size], [True])
    assert MPI.Comm(grid, timeout=20) is grid
    grid.Free()
    assert exchanged(grid)
    grid.Free()
    with pytest.raises(MPI.Exception, match="Free was called"):
        grid.Free()


@needs_peers
def test_other_options_on_one_rank_raise_on_all(apart):
    made = MPI.Comm(apart, timeout=20)
    for options in ({}, {"timeout": 20, "synchronize": False}, {"timeout": 19}):
        given = options if made.rank == 0 else {"timeout": 20}
        with pytest.raises(MPI.Exception) as found:
            MPI.Comm(apart, **given)
        assert "Comm failed on 1 of" in str(found.value)
        assert "expected the options of the first MPI.Comm of this communicator, "
        assert "synchronize=True, timeout=20, got synchronize=" in str(found.value)
        assert found.value.Get_error_class() == MPI.ERR_ARG
    assert exchanged(made)
    made.Free()


def test_a_failed_one_is_replaced(apart):
    """On all ranks, although some do not know of its failure."""
    failed = MPI.Comm(apart, timeout=20)
    if failed.rank == 0:
        failed.communicator._calls.members.abandon(ValueError("7"), "Recv")
    made = MPI.Comm(apart, timeout=20)
    assert made is not failed
    assert exchanged(made)
    with suppress(MPI.Exception):  # it raises on ranks that did not know the failure
        failed.Free()
    assert MPI.Comm(apart, timeout=20) is made
    for _ in range(2):
        made.Free()
    assert waited.find(apart) is None


def test_mpi_drops_the_reference_when_its_communicator_is_freed(world):
    class Made:
        host = world.Dup()

    made = Made()
    waited.note(made)
    assert waited.find(made.host) is made
    alive = weakref.ref(made)
    host = made.host
    del made
    assert alive() is not None
    host.Free()
    assert alive() is None


def test_too_many_open_files_name_what_was_not_freed(apart):
    made = MPI.Comm(apart, timeout=20)
    window = (
        MPI.Win.Allocate_device(8, 8, comm=made) if made.post.islands == [0] else None
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other = apart.Dup()
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(MPI.Exception) as found:
            MPI.Comm(other, timeout=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in str(found.value)
    assert "that were neither closed nor freed (made: " in str(found.value)
    assert " by Communicator" in str(found.value)
    if window is not None:
        assert "by Win.Allocate_device" in str(found.value)
        window.Free()
        assert "Win.Allocate_device" not in process.advice()
    made.Free()
    other.Free()
