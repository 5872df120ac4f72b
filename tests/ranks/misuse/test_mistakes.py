"""Likely mistakes, whose errors have what to write instead."""

from functools import partial

import numpy as np
import pytest

import numba_symm as ns
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
