"""The copies of a reduction, and what orders them, in place of launches."""

from types import SimpleNamespace

from numba_symm.collectives.kernels.copied_reductions import Moves, _Move


def test_a_rank_without_copies_has_no_side_stream():
    """In a capture, it would collect dependencies, so that 500 calls took 15 s."""
    enqueued = []
    moves = [_Move([], lambda stream, i=i: enqueued.append((i, stream))) for i in "abc"]
    end = SimpleNamespace(order=None)
    Moves(end, lambda stream: enqueued.append(("barrier", stream)), moves)(7)
    around = [("barrier", 7), ("a", 7), ("barrier", 7)]
    assert enqueued[:3] == around
    assert [what for what, _ in enqueued[1::3]] == ["a", "b", "c"]
    assert len(enqueued) == 9
