"""Likely mistakes, whose errors have what to write instead."""

import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import numba_symm as ns
from numba_symm import mpi as MPI
from tests.ranks.helpers import check_works, ordinary


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("far", [10**30, 1 << 61, np.uint64(2**64 - 1), -1, 0.5])
def test_impossible_displacements_are_refused_before_anything_else(
    world, everywhere, far, debug
):
    """On a rank that is not a root, scatter_v and gather_v ignore them."""
    with ns.Communicator(world, timeout=60, debug=debug) as comm:
        x, ones = ordinary(comm.size, np.float32), [1] * comm.size
        places = [*range(comm.size - 1), far]
        both = {"send_counts": ones, "recv_counts": ones}
        for made in ("", "_init"):
            for name, given in (
                ("all_gather_v", {"x": x[:1], "counts": ones, "displs": places}),
                ("all_to_all_v", {"x": x, **both, "recv_displs": places}),
                ("all_to_all_v", {"x": x, **both, "send_displs": places}),
            ):
                call = partial(getattr(comm, name + made), **given)
                everywhere(ns.ArgumentError, call, f"{name}: ", "expected ")
            if comm.size == 1 or debug:
                for name in ("gather_v", "scatter_v"):
                    given = {"x": x[:1], "counts": ones, "displs": places, "out": None}
                    if name == "scatter_v" and comm.rank:
                        given["out"] = x[:1]
                    call = partial(getattr(comm, name + made), **given)
                    everywhere(ns.ArgumentError, call, f"{name}: ", "expected ")
        check_works(comm)


def frames_of(kind, call):
    """Return how many frames of the library an error's traceback has, and its cause's.

    Notebooks show every frame, with lines of its source.
    """
    with pytest.raises(kind) as raised:
        call()
    errors = [raised.value, raised.value.__cause__]
    traces = [traceback.extract_tb(each and each.__traceback__) for each in errors]
    ours = str(Path(ns.__file__).parent)
    return [sum(frame.filename.startswith(ours) for frame in trace) for trace in traces]


def test_errors_of_arguments_have_few_frames_of_the_library(world):
    comm = ns.Communicator(world, timeout=60)
    x = ordinary(4, np.float32)
    for call in (
        lambda: comm.all_reduce(x, op="add"),
        lambda: comm.all_reduce_init(x, out=x[:2]),
        lambda: comm.send(x, dst=comm.size),
        lambda: comm.gather(x, root=-1),
        lambda: comm.all_gather_v(x, counts="few"),
        lambda: comm.zeros("a"),
        lambda: comm.split("a"),
        lambda: comm.prepare("all_redcue"),
        lambda: ns.Communicator(world, timeout="long"),
    ):
        own, cause = frames_of(ns.ArgumentError, call)
        assert own <= 2
        assert cause == 0
    spelled = MPI.Comm(world, timeout=60)
    for call in (
        lambda: spelled.Send(x, dest=comm.size),
        lambda: spelled.Allreduce(x, x[:2]),
    ):
        assert frames_of(ns.ArgumentError, call) == [1, 0]
    spelled.Free()
    check_works(comm)
    comm.close()
    assert frames_of(ns.ClosedError, lambda: comm.all_reduce(x))[0] <= 2
    assert repr(comm).startswith(f"<closed Communicator rank {comm.rank} of ")
