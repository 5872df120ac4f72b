"""Failures between two steps of calls that all ranks of several islands make.

A failure that one rank sees before it has every message must leave no other in MPI.
"""

import contextlib
import itertools
import re
import signal
import time
from types import SimpleNamespace

import pytest

import numba_symm as ns
from numba_symm import engines, islands
from numba_symm.launch import devices, locks, ranks, store, waiting
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait
from tests.patience import meet
from tests.ranks.helpers import needs_peers, refused

pytestmark = needs_peers


@pytest.fixture
def comm(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    comm = ns.Communicator(world)
    world.barrier()  # a rank that still constructs it would see the others' failures
    with contextlib.suppress(ns.CollectiveError), comm:
        yield comm


def receiving(number, received):
    """Replace what an all-gather of this number receives. Returns a context."""
    numbers, all_gather = itertools.count(), waiting.all_gather

    def replaced(*given):
        if next(numbers) != number:
            return all_gather(*given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waiting, "_received", received)
            return all_gather(*given)

    patch = pytest.MonkeyPatch()
    patch.setattr(waiting, "all_gather", replaced)
    stack = contextlib.ExitStack()
    stack.callback(patch.undo)
    return stack


def fail_in(comm, number):
    """Make a rank see a failure in its all-gather of this number, after its sends.

    The other ranks have all messages by then. Returns a context.
    """
    received, island = waiting._received, comm._calls.members

    def fail_once(*given):
        if not island.failed:
            time.sleep(0.02)
            island.fail(ns.CollectiveError("broken"))
            return {}
        return received(*given)

    return receiving(number, fail_once)


@pytest.mark.parametrize("step", [0, 1])
def test_all_ranks_begin_a_call_or_none_does(world, comm, step):
    began, said = False, ""
    last = world.rank == world.size - 1
    failing = fail_in(comm, step) if last else contextlib.nullcontext()
    try:
        with failing, comm._calls.members.set_up("zeros"):
            began = True
    except ns.CollectiveError as error:
        said = str(error)
    assert world.allgather((began, "broken" in said)) == [(False, True)] * world.size


def test_a_rank_that_answers_and_leaves_lets_the_others_begin(world, comm):
    """Its report may arrive before its answer."""
    received, island = waiting._received, comm._calls.members
    began = False

    def after_the_report(*given):
        return received(*given) if island.failed else {}

    late = contextlib.nullcontext()
    if world.rank == world.size - 1:
        late = receiving(2, after_the_report)
    leaving = contextlib.suppress(RuntimeError, ns.RankLeft)
    with leaving, late, comm._calls.members.set_up("zeros"):
        began = True
        while world.rank:
            island.look()
        raise RuntimeError
    assert world.allgather(began) == [True] * world.size


def test_a_rank_that_closes_during_a_call_of_another_is_named(world, comm):
    rank, last = world.rank, world.size - 1
    call = comm.close if rank == last else lambda: comm.zeros(3)
    # An ExchangeError, or that the rank left by it.
    refused(world, ns.SymmError, call, "is at 'close'", "at 'zeros'")
    with contextlib.suppress(ns.SymmError):
        comm.close()  # of this rank alone


def test_a_failure_at_any_step_of_a_split_leaves_no_rank_waiting(world, monkeypatch):
    if world.size > 2:
        pytest.skip("two ranks show it")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    for number in itertools.count():
        comm = ns.Communicator(world)
        failing = fail_in(comm, number) if world.rank else contextlib.nullcontext()
        with failing, contextlib.suppress(ns.SymmError), comm.split(0) as part:
            part.barrier()
        failed = comm._calls.members.board.failure()
        with contextlib.suppress(ns.CollectiveError):
            comm.close()
        if not any(world.allgather(failed is not None)):
            break
    assert number > 10


@pytest.mark.parametrize("call", ["close", "dup"])
def test_a_refusal_before_the_report_of_a_failure_is_that_failure(world, comm, call):
    """A rank may leave the with block by an error while others close."""
    refusal = ns.RankLeft("rank 0 left with SystemExit: 3", ranks=(0,))

    def refuses(*given):
        raise refusal

    with receiving(0, refuses), pytest.raises(ns.RankLeft) as caught:
        getattr(comm, call)()
    assert str(caught.value).startswith(f"{refusal}; results since the last check are")
    assert comm._calls.members.failed
    world.barrier()


def test_a_step_that_all_have_reached_outlives_a_later_failure(world, monkeypatch):
    """Otherwise this rank alone would miss what all ranks raise in that step."""
    comm = ranks.whole(world.Dup(), owned=True)
    received, failing = waiting._received, [1]
    parent = waiting.parent_of(world.rank)
    peers = waiting.children(world.rank, world.size) or [parent]
    monkeypatch.setattr(
        *(waiting, "_received"),
        lambda *given: {} if failing else received(*given),
    )

    def look():
        while failing and not all(comm.mpi.iprobe(rank, comm.tag) for rank in peers):
            time.sleep(0.001)
        if failing:
            failing.clear()
            raise ns.RankLeft("rank 0 left close")
        return False

    with waiting.watching(look):
        found = waiting.all_gather(comm, world.rank, Wait("dup", world.rank))
    assert found == [*range(world.size)]
    assert not failing
    comm.release()


def test_a_wait_for_answers_has_a_deadline_of_its_own(world, monkeypatch):
    """All have arrived in time. A rank that left now would miss what the others do."""
    comm = ranks.whole(world.Dup(), owned=True)
    numbers, all_gather = itertools.count(), waiting.all_gather

    clock = SimpleNamespace(now=0.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(waiting, "time", clock)

    def slowly(*given):
        next(numbers)
        clock.now += 0.6  # twice, so the second wait ends after the first deadline
        if world.rank == 0:
            time.sleep(0.05)  # the others wait
        return all_gather(*given)

    monkeypatch.setattr(waiting, "all_gather", slowly)
    world.barrier()
    waiting.gate(comm, Wait("dup", world.rank, 1.0))
    assert next(numbers) == 2
    comm.release()


def test_a_construction_that_all_give_up_waits_for_no_deadline(world, monkeypatch):
    """It leaves no communicator of MPI's, although it may be tried again."""
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    last, made = world.rank == world.size - 1, []

    def broken(*_):
        raise ns.BackendError("no memory")

    def noting(make):
        def call(*given):
            found = make(*given)
            made.extend(found)
            return found

        return call

    monkeypatch.setattr(locks, "duplicates", noting(locks.duplicates))
    began = time.monotonic()
    for module, name, part in (
        (devices, "visible_gpus", broken),  # before the ranks are divided
        (engines, "_pattern", broken),  # before other ranks wait for its message
        (engines, "_pattern", lambda rank: b"wrong!!!"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if last:
                patch.setattr(module, name, part)
            given = world, ns.SymmError, lambda: ns.Communicator(world, timeout=600)
            refused(*given, "" if part is not broken else "no memory")
        assert not any(made), (name, made)
    assert len(made) == 3
    assert time.monotonic() - began < 300


LONG = 600
"""Seconds for which a rank is late, unless rank 0 has raised before."""
RAISED = 9
"""The tag of the message that it has."""


class Enough(BaseException):
    """An interrupt."""


@pytest.mark.parametrize("error", [Enough(), ns.CollectiveTimeout("late")])
@pytest.mark.parametrize("step", ["choose", "prove"])
def test_a_rank_that_leaves_the_construction_is_named_on_all_islands(
    world, monkeypatch, step, error
):
    """The others would wait for it without limit."""
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "2" if world.size > 2 else "1")
    last = world.size - 1

    def give_up(*_):
        raise error

    if world.rank == last:
        monkeypatch.setattr(engines, step, give_up)
    with pytest.raises((Enough, ns.CollectiveError)) as found:
        ns.Communicator(world)
    said = world.allgather(f"{type(found.value).__name__}: {found.value}")
    told = "CollectiveTimeout: late"
    if isinstance(error, Enough):
        told = f"RankLeft: rank {last} left Communicator with Enough"
    assert all(each.startswith(told) for each in said[:last]), said


@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("construct", "Communicator: outcome"),
        ("construct", "finding GPUs: outcome"),  # of a node, amid a step of all ranks
        ("split", "split: all ranks have arrived"),
        ("split", "Communicator: outcome"),  # of the child, amid the parent's
    ],
)
def test_an_interrupt_ends_the_wait_for_a_late_rank(
    world, comm, monkeypatch, call, step
):
    """It is not held back, as it would be in a call of MPI that blocks."""
    monkeypatch.setattr(store, "_OUTCOMES", 0.1)
    late, all_gather = world.size - 1, StoreExchange.all_gather
    calls = {"construct": lambda: ns.Communicator(world)}
    calls["split"] = lambda: comm.split(0)

    began = None

    def reached(exchange, value, what, *given):
        nonlocal began
        if what == step:
            began = time.monotonic()
            if world.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
            elif world.rank == late:
                while not world.iprobe(0, RAISED) and time.monotonic() < began + LONG:
                    time.sleep(0.01)
        return all_gather(exchange, value, what, *given)

    def interrupt(*_):
        raise Enough

    monkeypatch.setattr(StoreExchange, "all_gather", reached)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises((Enough, ns.SymmError)) as caught:
            calls[call]()
    finally:
        signal.signal(signal.SIGALRM, before)
    seconds = time.monotonic() - began
    if world.rank == 0:
        world.send(None, late, RAISED)
    elif world.rank == late:
        world.recv(source=0, tag=RAISED)
    meet(world)  # before what may fail on this rank only
    assert isinstance(caught.value, Enough) == (world.rank == 0), caught.value
    if world.rank == 0:
        assert seconds < LONG / 2
    else:
        assert re.search("rank 0( left .+ with|:) Enough", str(caught.value))


def test_a_rank_that_does_not_begin_its_island_leaves_nobody_waiting(
    world, monkeypatch
):
    """Its island would wait for the rank, and the rank for all others."""
    if world.size == 2:
        pytest.skip("needs an island of two ranks, and a rank outside")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "2")
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", "600")

    def broken(*_, **__):
        raise RuntimeError("before it")

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(islands, "Island", broken)
        text = "rank 0: RuntimeError: before it"
        refused(world, ns.SymmError, lambda: ns.Communicator(world), text)
    assert time.monotonic() - began < 300


def test_an_error_between_steps_of_an_island_is_every_ranks(world, monkeypatch):
    """Its island would wait for the rank, and the rank for all others."""
    if world.size == 2:
        pytest.skip("needs an island of two ranks, and a rank outside")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "2")
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", "10")

    def interrupted(*_):
        raise RuntimeError("amid it")

    with contextlib.suppress(ns.CollectiveError), ns.Communicator(world) as comm:
        if world.rank == 0:
            exchange = comm._calls.heap.island.exchange
            monkeypatch.setattr(exchange, "all_gather", interrupted)
        text = "rank 0 left zeros with RuntimeError: amid it"
        refused(world, ns.RankLeft, lambda: comm.zeros(9), text)
