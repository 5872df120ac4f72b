import signal
import socket
import sys
import warnings
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from numba_symm import environment
from numba_symm.errors import ArgumentError, CollectiveError, CollectiveTimeout
from numba_symm.launch import locks, ranks, waiting
from numba_symm.launch.devices import among, divide
from numba_symm.launch.ranks import Purpose, World
from numba_symm.launch.store import StoreExchange, Undo
from numba_symm.launch.waiting import Wait
from tests.threads import run_ranks


def test_ranks_of_one_host_are_numbered_in_order():
    assert run_ranks(3, found) == [
        World(r, 3, r, 3, found(Alone()).node) for r in range(3)
    ]


def found(comm):
    seen = StoreExchange(comm, "test").all_gather(ranks.here(), "nodes")
    return ranks.place(comm.rank, seen)[0]


class Alone:
    rank, size = 0, 1

    def allgather(self, obj):
        return [obj]

    def barrier(self):
        pass


class Elsewhere(Alone):
    """Rank 2 of four on two nodes; on its own node the containers have two names."""

    rank, size = 2, 4

    def allgather(self, obj):
        *place, (boot_id, _) = obj
        seen = [(boot_id, "a"), (b"f" * 8, "far"), (boot_id, "b"), (b"f" * 8, "far")]
        return [(*place, value) for value in seen]


def test_containers_of_one_node_are_one_node():
    world = found(Elsewhere())
    assert (world.local_rank, world.local_size) == (1, 2)
    assert world.node.startswith("a (")


def test_without_a_boot_id_nodes_are_distinguished_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "BOOT_ID", tmp_path / "missing")
    assert found(Alone()).node.startswith(f"{socket.gethostname()} (")


def test_ranks_join_the_first_island_of_their_host_that_they_fit_into():
    reach = [[True] * 5 for _ in range(5)]
    assert divide(range(5), reach) == ((0, 1, 2, 3, 4),)
    assert divide(range(5), reach, 2) == ((0, 1), (2, 3), (4,))
    assert divide([1, 3, 5, 7, 9], reach, 3) == ((1, 3, 5), (7, 9))
    reach[0][1] = False  # one way suffices
    reach[4][2] = None  # the driver cannot answer
    assert divide(range(5), reach) == ((0, 2, 3, 4), (1,))


def test_parts_of_islands_are_numbered_anew():
    assert among(((0, 1), (2, 3)), [3, 1, 0]) == ((0,), (1, 2))
    assert among(((0, 1), (2, 3)), [2, 3]) == ((0, 1),)


def test_more_ranks_than_a_word_has_bits_are_refused():
    ranks.refuse_too_many(64)
    with pytest.raises(ArgumentError, match="expected at most 64 ranks, got 65"):
        ranks.refuse_too_many(65)


@pytest.fixture
def launched(monkeypatch):
    """Return what is warned of for an environment and a number of ranks."""

    def warned(environ, size):
        with monkeypatch.context() as patch:
            for name in (*ranks._SIZES, "PMIX_RANK", "SLURM_NTASKS"):
                patch.delenv(name, raising=False)
            for name, value in environ.items():
                patch.setenv(name, value)
            runs = {"Is_initialized": lambda: True, "Is_finalized": lambda: False}
            mpi = SimpleNamespace(Comm=Alone, COMM_WORLD=Alone(), **runs)
            patch.setattr(mpi.COMM_WORLD, "size", size)
            patch.setitem(sys.modules, "mpi4py.MPI", mpi)
            environment.warn_once.cache_clear()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for _ in "12":
                    ranks.warn_if_alone(mpi.COMM_WORLD)
                    ranks.warn_if_alone("no communicator of mpi4py's")
        environment.warn_once.cache_clear()
        return [str(each.message) for each in found]

    return warned


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_SIZE": "2", "PMIX_RANK": "0"}, "PMI_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, "STEP_NUM_TASKS=8"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3"),
        ({"PMIX_RANK": "0"}, None),
        ({"SLURM_NTASKS": "8"}, None),  # an allocation, and no step of it
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "8"}, None),
        ({"PMI_SIZE": "many"}, None),
        ({}, None),
    ],
)
def test_one_rank_where_a_launcher_started_more_is_warned_of(launched, environ, said):
    texts = launched(environ, 1)
    assert len(texts) == (said is not None)
    assert all(said in text and "has 1 rank" in text for text in texts)
    assert launched(environ, 2) == []


@pytest.mark.parametrize("comm", [None, 0, 3, "world"])
def test_what_is_no_communicator_is_refused(comm):
    with pytest.raises(ArgumentError, match="expected a communicator"):
        ranks.checked(comm)
    with pytest.raises(ArgumentError, match="expected a communicator"):
        duplicate(comm)


def test_a_refusal_names_the_missing_members():
    class Half:
        rank, size = 0, 1

    with pytest.raises(ArgumentError, match="which has no allgather, barrier;"):
        ranks.checked(Half())


class FakeMPI:
    """The little of mpi4py.MPI that the module looks at."""

    UNDEFINED = -7
    TAG_UB = 5
    ERR_UNKNOWN, ERR_PROC_FAILED = 14, 75
    Exception = type("Exception", (RuntimeError,), {"Get_error_class": lambda _: 75})
    finalized = False
    THREAD_MULTIPLE, Query_thread = 3, staticmethod(lambda: 3)
    COMM_SELF = SimpleNamespace(Iprobe=lambda: False)
    Status = staticmethod(lambda: SimpleNamespace(Get_count=lambda: 0))

    class Comm(Alone):
        begun = None

        def __init__(self, name):
            self.name = name

        def __bool__(self):
            return self.name != "null"

        def __eq__(self, other):
            return self.name == other.name

        __hash__ = None

        def Set_attr(self, key, value):
            assert key == "key of duplicates"
            self.begun = value

        def Idup(self):
            return FakeMPI.Comm("duplicate"), FakeMPI.Request()

        def Get_attr(self, key):
            if key == "key of duplicates":
                return self.begun
            assert key == FakeMPI.TAG_UB
            return 32767  # the least that MPI permits

        def Free(self):
            assert self.name == "duplicate"
            assert not FakeMPI.finalized
            self.name = "null"

    class Request:
        """The request of a duplicate, which is done from the third test on."""

        asked = 0

        def Test(self):
            self.asked += 1
            return self.asked >= 3

    Is_initialized = staticmethod(lambda: True)

    @staticmethod
    def Is_finalized():
        return FakeMPI.finalized


FakeMPI.COMM_WORLD = FakeMPI.Comm("world")


def duplicate(comm):
    return locks.duplicate(comm, Wait("Communicator", 0))


@pytest.fixture
def mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeMPI)
    monkeypatch.setattr(FakeMPI, "finalized", False)
    monkeypatch.setattr(locks, "_begun", [])
    monkeypatch.setattr(waiting, "unfinished", [])
    monkeypatch.setattr(locks, "_key", lambda: "key of duplicates")
    return FakeMPI


def test_an_mpi_communicator_is_duplicated_and_freed_once(mpi):
    comm = duplicate(mpi.Comm("world"))
    part = comm.part([0], Purpose.NODE)
    for each in (comm, comm, part):
        assert comm.mpi.name == "duplicate"
        ranks.release(each)
    ranks.release(part)
    assert comm.mpi.name == "null"


def test_an_interrupted_rank_continues_with_the_same_duplicate(mpi, monkeypatch):
    """MPI cannot cancel the call, and the other ranks wait for this one."""

    def interrupted(self, absent):
        raise KeyboardInterrupt

    world, other = mpi.Comm("world"), mpi.Comm("other")
    with monkeypatch.context() as patch:
        patch.setattr(Wait, "pause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            duplicate(world)
    [(begun, _)] = locks._begun[-1]
    assert duplicate(other).mpi is not begun
    # It may be interrupted again, until it is about to report that to the others.
    found = [duplicate(world) for _ in range(2)]
    assert found[0].mpi is found[1].mpi is begun
    locks.claim(found[1])
    later = duplicate(world)
    assert later.mpi is not begun
    locks.claim(later)
    assert locks._begun == [other.begun]


def test_a_new_communicator_with_the_handle_of_an_old_one_has_its_own(mpi):
    old, new = mpi.Comm("world"), mpi.Comm("world")  # which are equal
    first = duplicate(old)
    assert duplicate(old).mpi is first.mpi
    assert duplicate(new).mpi is not first.mpi


def test_duplicates_have_the_same_purpose_on_an_interrupted_rank(mpi, monkeypatch):
    """The other ranks may have begun the second one, or later ones."""
    world, pauses = mpi.Comm("world"), iter([False] * 3)
    monkeypatch.setattr(Wait, "pause", lambda *_: next(pauses))
    wait = Wait("Comm", 0)
    with pytest.raises(StopIteration):  # amid the second
        locks.duplicates(world, 3, wait)
    ((first, second),) = locks._begun
    pauses = iter([False] * 9)
    monkeypatch.setattr(Wait, "pause", lambda *_: next(pauses))
    found = locks.duplicates(world, 3, wait)
    assert found[:2] == [first[0], second[0]]
    assert len({*map(id, found)}) == 3
    locks.claim(found[2])
    assert not locks._begun


def test_a_duplicate_that_is_not_used_is_kept_until_mpi_has_made_it(mpi, monkeypatch):
    """MPI stores its handle later, and mpi4py's object must live until then."""
    monkeypatch.setattr(Wait, "pause", lambda *_: locks._begun[0][1:])
    world, wait = mpi.Comm("world"), Wait("Comm", 0)
    with pytest.raises(CollectiveTimeout, match="rank 0 waited for other ranks in C"):
        locks.duplicates(world, 2, wait)
    ((first, second),) = locks._begun
    assert locks.duplicates(world, 1, wait) == [first[0]]
    locks.claim(first[0])
    assert waiting.unfinished == [second]
    later = locks.duplicates(world, 1, Wait("Comm", 0, 9))
    locks.claim(later[0])
    assert not waiting.unfinished


@pytest.mark.parametrize("ends", ["report", "deadline"])
def test_a_step_succeeds_once_a_rank_has_all_values(mpi, monkeypatch, ends):
    """Others may be past it, and may have failed since, while MPI still sends."""

    def failed():
        raise CollectiveError("a later call")

    class Peers(FakeMPI.Comm):
        size, arrived = 2, False

        def Isend(self, *_):
            return "send"

        def Improbe(self, *_):
            return self

        def Irecv(self, data):
            data[:] = waiting.packed(["its value"])
            return self

        def Test(self):
            return self.arrived

    comm = ranks.whole(Peers("world"), owned=False)
    monkeypatch.setattr(mpi, "Request", SimpleNamespace(Testall=lambda _: False))
    wait = Wait("a call", 0, 0.01)
    with waiting.watching(failed if ends == "report" else lambda: False):
        with pytest.raises(CollectiveError):
            waiting.all_gather(comm, "mine", wait)
        assert waiting.unfinished == [comm.mpi, "send"]  # a refusal
        monkeypatch.setattr(comm.mpi, "arrived", True)
        assert waiting.all_gather(comm, "mine", wait) == ["mine", "its value"]
    assert waiting.unfinished == [comm.mpi, "send", "send"]


def test_a_send_to_a_rank_that_mpi_knows_to_have_died_raises_our_error(mpi):
    class Peers(FakeMPI.Comm):
        rank, size = 1, 2

        def Isend(self, *_):
            raise mpi.Exception("Process Failure")

        def Improbe(self, *_):
            return None

    comm = ranks.whole(Peers("world"), owned=False)
    with pytest.raises(CollectiveError, match=r"rank 0 has ended, as MPI r") as error:
        waiting.all_gather(comm, "mine", Wait("a call", 1, 1))
    assert error.value.ranks == (0,)


def test_nothing_is_made_once_mpi_has_finalized(mpi):
    mpi.finalized = True
    for call in (duplicate, lambda comm: ranks.checked_split(comm, 0, 0)):
        with pytest.raises(ArgumentError, match="MPI has been finalized, so no comm"):
            call(mpi.Comm("world"))
    with pytest.raises(ArgumentError, match="MPI has been finalized, so no comm"):
        ranks.checked_tagged(ranks.whole(mpi.Comm("world"), owned=True))


def test_nothing_is_freed_once_mpi_has_finalized(mpi):
    comm = duplicate(mpi.Comm("world"))
    mpi.finalized = True
    ranks.release(comm)
    assert comm.mpi.name == "duplicate"


def test_null_and_intercommunicators_are_refused(mpi):
    with pytest.raises(ArgumentError, match="expected a communicator"):
        ranks.checked(mpi.Comm("null"))
    inter = mpi.Comm("inter")
    inter.is_inter = True
    with pytest.raises(ArgumentError, match="intercommunicator"):
        duplicate(inter)


class Divisible(Alone):
    """What a user may make: its parts' color and key are looked at here."""

    def split(self, color, key):
        part = Alone()
        part.asked = color, key
        return part


def test_another_communicator_is_split_by_its_own_method():
    assert ranks.split(Divisible(), 3, -2).asked == (3, -2)
    assert ranks.split(Divisible(), None, 5) is None


def test_colors_and_keys_are_those_of_mpi(mpi):
    for comm in (mpi.Comm("world"), Divisible()):
        for color in (None, mpi.UNDEFINED):
            assert ranks.checked_split(comm, color, 4) == (None, 4)
        for color in (0, 2**31 - 1, True):
            for key in (-(2**31), 2**31 - 1):
                assert ranks.checked_split(comm, color, key) == (color, key)
        for color in (-1, 2**31, 0.0, "0"):
            with pytest.raises(
                ArgumentError, match=r"color=.*: expected an int of 0 to"
            ):
                ranks.checked_split(comm, color, 0)
        for key in (-(2**31) - 1, 2**31, 0.0, None):
            with pytest.raises(
                ArgumentError, match=r"key=.*: expected an int of 32 bits"
            ):
                ranks.checked_split(comm, 0, key)


def test_without_mpi_there_is_no_undefined_color(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert ranks.checked_split(Divisible(), None, 0) == (None, 0)
    with pytest.raises(ArgumentError, match="color=-32766"):
        ranks.checked_split(Divisible(), -32766, 0)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ArgumentError, match="has no method split; give it split"):
        ranks.checked_split(Alone(), 0, 0)


def test_no_signal_is_lost_after_a_handler_that_raises(monkeypatch):
    """The signal may arrive at any moment, also while the handlers are restored."""
    heard, replace = [], signal.signal
    numbers = signal.SIGUSR1, signal.SIGUSR2

    def handler(number, frame):
        heard.append(number)
        raise KeyboardInterrupt

    def interrupted(number, handler):
        replace(number, handler)
        if waits_over and number == numbers[0]:
            signal.raise_signal(number)

    waits_over = []
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(KeyboardInterrupt):
                waiting.undisturbed(lambda: waits_over.append(1))
        assert heard == [numbers[0]]
        with pytest.raises(KeyboardInterrupt):
            waiting.undisturbed(lambda: list(map(signal.raise_signal, numbers)))
        assert heard == [numbers[0], *numbers]
    finally:
        for number, each in zip(numbers, before, strict=True):
            signal.signal(number, each)


class Line:
    """Interrupts a line of ``ExitStack.__exit__``, by its number."""

    def __init__(self, number):
        self.number, self.count, self.raised = number, 0, False

    def __call__(self, frame, event, arg):
        if frame.f_code is not ExitStack.__exit__.__code__:
            return None
        self.count += event == "line"
        if self.count == self.number and not self.raised:
            sys.settrace(None)
            self.raised = True
            raise KeyboardInterrupt
        return self


def test_steps_are_undone_although_a_second_interrupt_follows():
    """It may be between two steps, where no step raises."""

    def fail(undone, line):
        with Undo() as undo:
            for step in (1, 1, 2, 2, 3, 3):  # an interrupt may end one of each
                undo.callback(undone.append, step)
            sys.settrace(line)
            raise ValueError

    for number in range(1, 100):
        undone, line = [], Line(number)
        with pytest.raises((ValueError, KeyboardInterrupt)):
            fail(undone, line)
        sys.settrace(None)
        assert {*undone} == {1, 2, 3}, number
        if not line.raised:
            break
    assert 10 < number < 99
