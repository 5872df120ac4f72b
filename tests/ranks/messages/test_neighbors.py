"""Collectives between neighbours."""

import numba_symm as ns
from numba_symm.collectives.protocols.workspace import most_messages
from tests.ranks.helpers import needs_peers, ordinary, refused
from tests.ranks.messages.contents import right_and_left


@needs_peers
def test_wrong_neighbours_are_refused(comm, world):
    right, left = right_and_left(comm)
    x = comm.zeros(3)
    many = [right] * (most_messages(comm.size) + 1)
    for given, texts in [
        ({"sources": 3}, ("sources: expected a sequence of ranks", "got 3")),
        ({"sources": [comm.size]}, ("sources: expected a rank",)),
        ({"sources": [left], "destinations": ["x"]}, ("destinations: expected a ra",)),
        ({"sources": many}, ("sources: expected each rank at most",)),
        (
            {"sources": [comm.rank], "destinations": [right]},
            ("as often in sources as in destinations", "got 1 and 0 times"),
        ),
        ({"sources": [left] * 2}, ("expected x with a multiple of 2",)),
        ({"sources": [left], "out": x}, ("arrays that overlap",)),
        ({"sources": [left], "out": comm.zeros(4)}, ("expected out of 3 elements",)),
    ]:
        wrong = lambda g=given: comm.neighbor_all_to_all(x, **g)  # noqa: E731
        refused(world, ns.ArgumentError, wrong, "neighbor_all_to_all: ", *texts)
    comm.barrier()
    comm.synchronize()


@needs_peers
def test_debug_mode_compares_the_lists_of_neighbours(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        right, left = right_and_left(comm)
        x, last = comm.zeros(4), comm.rank == comm.size - 1
        sides = {"sources": [left], "destinations": [right]}
        fewer = {"sources": [left], "destinations": [None if last else right]}
        longer = ordinary(5 if last else 4, "f4")
        for wrong, sent in (
            (lambda: comm.neighbor_all_gather(x, **fewer), "nothing"),
            (lambda: comm.neighbor_all_to_all(longer, **sides), "5 elements"),
        ):
            words = f"rank {comm.size - 1} sends {sent} (destinations) to rank 0, which"
            text = f"{words} expects 4 (sources)"
            refused(world, ns.ArgumentError, wrong, text, "; pass counts that agree")
        comm.neighbor_all_gather(x, **sides)
        comm.synchronize()
