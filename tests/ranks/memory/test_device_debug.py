"""Wrong arguments in a user's own kernels in debug mode, on GPUs, too."""

import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island

pytestmark = of_one_island


@cuda.jit
def misuse(ctx, team, what, out):
    """Make one mistake in one thread, or none."""
    channel, rank, count, comparison = 127, ctx.rank, 2, symm.LE
    if what == 1:
        channel = 128
    elif what == 2:
        rank = ctx.size
    elif what == 3:
        count = 3
    elif what == 4:
        comparison = 6
    if cuda.threadIdx.x == 0:
        symm.signal_set(ctx, rank, channel, 1)
        words = symm.peer_array(ctx, rank, count, np.int64)
        words[count - 1] = 5
        symm.put(ctx, words[:1], words[(0 if what == 6 else 1) :])
        out[0] = symm.test(ctx, rank, channel, comparison, 1)
    cuda.syncthreads()
    if what == 5:
        symm.barrier(ctx, 3, team)
    out[1] = 1


MISTAKES = [
    "channel 128 to or from rank 0: expected a rank of the context and a channel",
    "channel 127 to or from rank 1: expected a rank of the context and a channel",
    "an array of 24 bytes: expected at most the buffer's",
    "comparison 6: expected symm.EQ, NE",
    "a barrier of a team: expected a team of this rank",
    "a copy of 2 elements: expected arrays of the same shape",
]


@pytest.mark.parametrize("what", range(7))
def test_mistakes_are_found(world, what):
    if what > 0 and world.rank > 0:
        world.barrier()
        return
    with ns.Communicator(MPI.COMM_SELF, timeout=5, debug=True) as comm:
        ctx = comm.rendezvous(comm.zeros(2, np.int64)).ctx
        out = cuda.to_device(np.zeros(2, np.int64))
        args = ctx, symm.Team(-1 if what == 5 else 0, 1, (0,)), what, out
        if what == 0:
            misuse[1, 2](*args)
            comm.synchronize()
            assert get(out).tolist() == [1, 1]
        elif SIMULATED:
            with pytest.raises(ns.ArgumentError, match=MISTAKES[what - 1]):
                misuse[1, 2](*args)
        else:
            misuse[1, 2](*args)
            with pytest.raises(ns.CollectiveError, match=MISTAKES[what - 1]):
                comm.synchronize()
            # The other thread went on, unless it made the mistake, too.
            assert get(out).tolist() == [int(what == 5), int(what != 5)]
    world.barrier()
