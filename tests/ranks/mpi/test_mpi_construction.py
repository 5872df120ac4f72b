"""What ``Comm`` waits for: it polls, so a rank that is late or has died is an error."""

import gc
import time

import numpy as np
import pytest
from numba import cuda

from numba_symm import environment
from numba_symm import mpi as MPI
from numba_symm.environment import SIMULATED
from numba_symm.launch import locks, waiting
from numba_symm.launch.waiting import Wait
from numba_symm.mpi import posts
from tests.ranks.helpers import needs_peers
from tests.ranks.watched import WatchedComm, blocking, called


def test_comm_makes_no_call_of_mpi_that_blocks(apart, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(MPI.Intracomm, "_plain", WatchedComm)
        called.clear()
        made = MPI.Comm(apart, timeout=20)
        assert called["Idup"] == 3  # messages, set-up calls, the library's own
        assert not blocking()
        made.Free()


def test_duplicates_that_nothing_uses_are_given_up_with_their_origin(world):
    begun, kept = len(locks._begun), len(waiting.unfinished)
    comm = world.Dup()
    (made,) = locks.duplicates(comm, 1, Wait("Comm", comm.rank, 20))
    assert len(locks._begun) == begun + 1
    comm.Free()
    assert len(locks._begun) == begun
    locks.claim(comm)  # of another one: it drops what MPI has ended
    assert len(waiting.unfinished) <= kept
    made.Free()


def test_what_an_interrupted_call_has_left_reaches_no_new_communicator(apart):
    """MPI gives the number of a freed communicator to a new one."""
    comm = MPI.Comm(apart, timeout=20)
    with pytest.raises(KeyboardInterrupt), comm.post.set_up("Win.Create"):
        raise KeyboardInterrupt  # on all ranks, after which no step follows
    channel = comm.post._own
    comm.Free()
    assert channel
    for _ in range(3):
        MPI.Comm(apart, timeout=20).Free()
    channel.Free()


@needs_peers
@pytest.mark.filterwarnings("ignore:.* was not closed:ResourceWarning")
def test_a_late_rank_is_an_error_and_all_may_call_again(world, apart, monkeypatch):
    make, late = posts.apart, world.size - 1

    def sleep(*given):
        time.sleep(0.8)
        return make(*given)

    with monkeypatch.context() as patch:
        if world.rank == late:
            patch.setattr(posts, "apart", sleep)
        patch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", "0.3")
        text = rf"rank {world.rank} waited for other ranks in Comm \(set-up timeout: 0"
        with pytest.raises(MPI.Exception, match=text):
            MPI.Comm(apart, timeout=20)
    gc.collect()  # drops the communicators of the ranks that were in time
    world.barrier()
    comm = MPI.Comm(apart, timeout=20)
    # Each kind of message has the same duplicate on all ranks.
    out, right = np.zeros(1, "i4"), (world.rank + 1) % world.size
    comm.Send(cuda.to_device(np.full(1, world.rank, "i4")), right)
    given = cuda.to_device(out)
    comm.Recv(given, (world.rank - 1) % world.size)
    assert given.copy_to_host()[0] == (world.rank - 1) % world.size
    comm.Free()


@pytest.mark.skipif(not SIMULATED, reason="on GPUs, mpi4py reads another interface")
def test_the_simulator_tells_of_calls_of_mpi4py_itself(comm, world):
    x = cuda.to_device(np.ones(4, np.float32))
    environment.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="mpi4py's own communicator got a dev") as w:
        world.Bcast(x)
    assert [each.filename for each in w] == [__file__]
    environment.warn_once.cache_clear()
    comm.Bcast(x)  # neither of these calls warns
    assert np.from_dlpack(x).tolist() == x.copy_to_host().tolist()
