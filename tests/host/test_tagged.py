"""Who may use a tag: numbers of communicators, their release, and threads that race."""

import sys
import threading
import types

import pytest

from numba_symm.errors import ArgumentError, CollectiveError, RankLeft
from numba_symm.launch import ranks
from numba_symm.launch.ranks import TAGS, Purpose
from tests.threads import ThreadComm, run_ranks


class Duplicate:
    """mpi4py's communicator of some ranks, as one of them sees it."""

    def __init__(self, rank, size):
        self.rank, self.size, self.freed = rank, size, 0

    def Free(self):
        self.freed += 1


@pytest.fixture(autouse=True)
def mpi(monkeypatch):
    """The least of MPI: the fewest tags that it permits."""
    world = types.SimpleNamespace(Get_attr=lambda key: 32767)
    found = types.SimpleNamespace(COMM_WORLD=world, TAG_UB=1, finalized=False)
    found.Is_finalized = lambda: found.finalized
    monkeypatch.setattr(ranks, "mpi_module", lambda: found)
    return found


class Failed(Exception):
    """What mpi4py raises, with an error class."""

    def Get_error_class(self):
        return self.args[0]


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (75, RankLeft, r"rank 3 has ended, as MPI reports \(75\)"),
        (15, CollectiveError, r"MPI has failed in a message with rank 3 \(15\)"),
        (14, CollectiveError, r"MPI has failed in a message with rank 3 \(14\)"),
    ],
)
def test_an_error_of_mpi_names_the_rank_and_how_mpi_has_failed(mpi, code, kind, text):
    mpi.Exception, mpi.ERR_UNKNOWN, mpi.ERR_PROC_FAILED = Failed, 14, 75
    mpi.ERR_PROC_FAILED_PENDING = 14  # in an MPI library without this class
    with pytest.raises(CollectiveError, match=text) as error, ranks.living(3):
        raise Failed(code)
    assert type(error.value) is kind
    assert error.value.ranks == (3,)


def alone(mask):
    return [mask]


def number(comm):
    return comm.tag // TAGS


def test_no_two_kinds_of_messages_have_a_common_tag():
    whole = ranks.whole(Duplicate(0, 1), owned=True)
    child = whole.child([0], alone)
    parts = [comm.part([0], kind) for comm in (whole, child) for kind in Purpose]
    tags = [part.tag for part in parts]
    assert len({*tags}) == 2 * len(Purpose)
    # Parcels have all tags after theirs, up to the next number's.
    assert max(Purpose) == Purpose.PARCELS
    assert max(tags[: len(Purpose)]) < child.tag == min(tags[len(Purpose) :])


def test_a_part_sends_to_the_ranks_of_the_duplicate():
    whole = ranks.whole(Duplicate(4, 6), owned=True)
    half = whole.part([0, 2, 4], Purpose.ISLAND)
    assert (half.ranks, half.rank, half.size) == ([0, 2, 4], 2, 3)
    turned = half.child([2, 1], lambda mask: [mask, 0, 0])
    assert (turned.ranks, turned.rank, turned.size) == ([4, 2], 0, 2)
    assert turned.mpi is whole.mpi


def test_a_number_is_used_again_when_no_rank_uses_it():
    whole = ranks.whole(Duplicate(0, 2), owned=True)
    here = [whole.child([0], lambda mask: [mask, 0]) for _ in range(3)]
    assert [number(each) for each in here] == [1, 2, 3]
    part = here[0].part([0], Purpose.ISLAND)
    here[0].release()
    here[0].release()
    assert number(whole.child([0], lambda mask: [mask, 0])) == 4  # the part has 1
    part.release()
    assert number(whole.child([0], lambda mask: [mask, 0b10])) == 5  # the other rank
    assert number(whole.child([0], lambda mask: [mask, 0])) == 1
    # What a failure has left is not released, so messages of 2 and 3 reach nobody.
    assert number(whole.child([0], lambda mask: [mask, 0])) == 6


def test_a_rank_of_no_child_uses_no_number():
    whole = ranks.whole(Duplicate(0, 2), owned=True)
    assert whole.child([], lambda mask: [mask, 0]) is None
    assert number(whole.child([0], lambda mask: [mask, 0])) == 1


def test_the_last_user_frees_the_duplicate(mpi):
    duplicate = Duplicate(0, 1)
    whole = ranks.whole(duplicate, owned=True)
    child = whole.child([0], alone)
    part = child.part([0], Purpose.WATCHDOG)
    for each in (whole, child):
        each.release()
        each.release()
    assert not duplicate.freed
    part.release()
    assert duplicate.freed == 1
    late, own = Duplicate(0, 1), Duplicate(0, 1)
    ranks.whole(own, owned=False).release()
    whole = ranks.whole(late, owned=True)
    mpi.finalized = True
    whole.release()
    assert not late.freed + own.freed


def test_a_number_with_messages_left_is_retired_and_holds_nothing():
    duplicate = Duplicate(0, 2)
    whole = ranks.whole(duplicate, owned=True)
    part = whole.part([0, 1], Purpose.REBUILD)
    rebuilt = whole.child([0, 1], lambda mask: [mask, 0])
    whole.retire()
    part.release()  # in vain, because the number is retired
    assert whole.released
    assert not duplicate.freed
    again = rebuilt.child([0, 1], lambda mask: [mask, 0])
    assert number(again) == 2  # not 0, although nothing uses it
    rebuilt.retire()
    again.release()
    assert duplicate.freed == 1


def test_more_communicators_than_mpi_has_tags_for_are_refused():
    whole = ranks.whole(Duplicate(0, 1), owned=True)
    made = [whole.child([0], alone) for _ in range(127)]
    assert made[-1].tag + TAGS - 1 == 32767
    with pytest.raises(ArgumentError, match="at most 127 open communicators that spl"):
        whole.child([0], alone)
    made[6].release()
    assert number(whole.child([0], alone)) == 7


def test_threads_that_make_children_in_different_orders_get_different_numbers():
    """Rank 0 has two parents with each of the others, which all use one duplicate."""
    size, turns = 3, 20
    parents = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
    shared = [ranks.whole(Duplicate(rank, size), owned=True) for rank in range(size)]
    given = {}

    def make(world):
        whole, found = shared[world.rank], []
        for members in parents:
            mine = members if world.rank in members else []
            found.append(whole.child(mine, world.allgather))
        given[world.rank] = found

    run_ranks(size, make)
    failures, children = [], [[] for _ in range(size)]

    def race(which):
        """Make children of one parent, in a thread of each of its ranks."""

        def play(comm: ThreadComm):
            own = given[parents[which][comm.rank]][which]
            for _ in range(turns):
                made = own.child(range(comm.size), comm.allgather)
                children[parents[which][comm.rank]].append(number(made))

        try:
            run_ranks(len(parents[which]), play)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=race, args=[k]) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    for rank, found in enumerate(children):
        assert len(found) == turns * sum(rank in members for members in parents)
        assert len({*found}) == len(found), f"rank {rank} uses a number twice"
