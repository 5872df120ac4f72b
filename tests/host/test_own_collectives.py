"""When a call between islands of one rank is the engine's own collective."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.collectives.islands import moves
from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.binding import Call
from numba_symm.engines import nccl
from numba_symm.launch.devices import Places

RANKS = 3


def site(parts=((0,), (1,), (2,)), rank=0, engine=nccl._COLLECTIVES):
    """Return a site of islands, and a list of the collectives that its engine makes."""
    made = []
    each = dict.fromkeys(engine, lambda work, stream, order: made.append(work))
    islands = SimpleNamespace(
        engine=SimpleNamespace(collectives=each),
        parts=parts,
        places=Places(parts),
        world=SimpleNamespace(rank=rank, size=sum(map(len, parts))),
        refuse_finalized=lambda: None,
        sent=0,
    )
    return Site(islands, SimpleNamespace(order=None), 0), made


def work(count, kind="int32", op="sum", root=0):
    element = dtypes.element(np.dtype(kind), "test")
    return Call(100, 200, count, element, op, root)


def is_own(name, given, **options):
    return moves.call(site(**options)[0], OPERATIONS[name], given) is not None


def test_steps_are_for_islands_of_several_ranks_and_other_engines():
    assert is_own("broadcast", work(5))
    assert not is_own("broadcast", work(5), parts=((0, 1), (2,)))
    assert not is_own("broadcast", work(5), engine=())
    assert not is_own("all_to_all", work(5))
    assert not is_own("scan", work(5))
    given, _ = site()
    listing = dataclasses.replace(given, listing=True)
    assert moves.call(listing, OPERATIONS["broadcast"], work(5)) is None


@pytest.mark.parametrize("name", moves.FASTER)
def test_sizes(name):
    small, large = moves.FASTER[name]
    assert is_own(name, work(large // 4 or 1))
    assert is_own(name, work(small // 4 or 1)) == (small > 0 or large == 0)
    if small + 8 < large:
        assert not is_own(name, work(small // 4 + 1))
        assert not is_own(name, work(large // 4 - 1))


@pytest.mark.parametrize(
    ("kind", "op", "of_two", "of_three"),
    [
        ("int32", "sum", True, True),
        ("uint8", "max", True, True),
        ("int16", "sum", False, False),  # NCCL does not have this type
        ("int64", "avg", False, False),
        ("int32", "bor", False, False),
        ("float32", "sum", True, False),
        ("float32", "prod", True, False),
        ("float64", "sum", False, False),  # NaNs with payloads
        ("float32", "min", False, False),  # NaN
        ("float16", "sum", False, False),
        ("float32", lambda a, b: a - b, False, False),
    ],
)
def test_reductions_have_the_same_bits(kind, op, of_two, of_three):
    given = work(8 << 20, kind, dtypes.reduction(op, "test"))
    for name in ("all_reduce", "reduce", "reduce_scatter"):
        assert is_own(name, given, parts=((0,), (1,))) == of_two
        assert is_own(name, given) == of_three


def test_what_is_moved_are_bytes():
    """They have any type. A broadcast is in place on all ranks."""
    for name, source in (("all_gather", 100), ("broadcast", 200)):
        given, made = site()
        moves.call(given, OPERATIONS[name], work(3, "complex64", None, 1))(7)
        assert made == [(name, source, 200, 24, "uint8", "", 1)]
    given, made = site()
    moves.call(given, OPERATIONS["all_reduce"], work(2 << 20, "float32"))
    assert not made
    given, made = site(parts=((0,), (1,)))
    moves.call(given, OPERATIONS["reduce"], work(2 << 20, "float32", "prod", 1))(7)
    assert made == [("reduce", 100, 200, 2 << 20, "float32", "prod", 1)]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("all_gather", RANKS * (RANKS - 1)),  # of a shard
        ("reduce_scatter", RANKS * (RANKS - 1)),
        ("broadcast", RANKS - 1),
        ("reduce", RANKS - 1),
        ("all_reduce", 2 * (RANKS - 1)),
    ],
)
def test_the_bytes_of_all_ranks_are_counted(name, total):
    count, sent = 3 << 20, 0
    for rank in range(RANKS):
        given, _ = site(rank=rank)
        moves.call(given, OPERATIONS[name], work(count, root=1))(7)
        sent += given.islands.sent
    assert sent == total * 4 * count
