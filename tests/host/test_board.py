import gc
import mmap
import os
import pickle
import warnings
from pathlib import Path
from threading import Thread

import pytest

from numba_symm.errors import (
    CallMismatch,
    CollectiveError,
    CollectiveTimeout,
    DriverError,
    RankLeft,
    SymmError,
)
from numba_symm.launch import board, failures
from numba_symm.launch.board import Board
from numba_symm.launch.failures import Failure, describe
from numba_symm.launch.waiting import Wait
from tests.boards import on_ranks, record, store
from tests.threads import outcomes

KERNELS = {number: each for number, each in failures.TABLE.items() if each.place}


@pytest.mark.parametrize("operation", KERNELS)
def test_a_record_names_who_waited_for_whom_and_where(operation):
    words, place = KERNELS[operation].words, KERNELS[operation].place
    text, who = f"rank 1 waited for rank 2 in {words}, {place} 5", (1, 2)
    if operation == failures.WAIT_WORD:  # any rank may store it
        text, who = f"rank 1 waited in {words}", (1,)
    error, found, hint, ranks, name, limit = describe(record(operation))
    assert (error, found, limit) == (CollectiveTimeout, text, "")
    assert hint.startswith("If ")
    assert ranks == who
    assert name == words
    other = describe(record(operation, epoch=77))
    if operation in failures.SIGNALS:  # of later blocks
        assert other.text == text
        assert "so 77 of its blocks start only after others" in other.hint
    else:
        assert other.text == f"{text}, epoch 77"


def test_a_record_of_a_larger_communicator_names_the_node():
    place = [4, 5, 6], ["a", "a", "b"]
    text = describe(record(failures.BARRIER), "", *place).text
    assert text == "rank 5 waited for rank 6 on b in barrier, block 5"
    text = describe(record(failures.ENDED), "zeros", *place).text
    assert text.startswith("rank 6 on b has ended without closing the communicator; ")


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (failures.PUT_SIGNAL, "it made no call that matches this one"),
        (failures.WAIT_SIGNAL, "it made no call that matches this one"),
        (failures.TRANSFER, "it sends or receives something else"),
        (failures.BARRIER, "its call differs from this one"),
        (failures.LATE, "its call differs from this one"),
    ],
)
def test_a_hint_names_other_causes(operation, words):
    assert words in describe(record(operation)).hint


def test_who_leaves_is_not_late():
    said = "zeros\nleft zeros with Mistake"
    failure = describe(record(failures.ABANDONED), said)
    text = "rank 1 left zeros with Mistake"
    assert failure == Failure(RankLeft, text, "", (1,), "zeros")
    failure = describe(record(failures.ENDED), "zeros")
    assert failure.text == (
        "rank 2 has ended without closing the communicator; rank 1 waited for it in "
        "zeros"
    )
    assert (failure.error, failure.ranks) == (RankLeft, (2,))


def differing(operation):
    """Return the text of a record of calls that differ."""
    error, text, hint, ranks, *_ = describe(record(operation))
    assert error is CallMismatch
    assert hint == ""
    assert ranks == (1, 2)
    return text


def test_a_mismatch_names_the_ranks_that_differ_and_in_what():
    text = differing(failures.CALL_MISMATCH)
    assert "operation, count, dtype, op or root; " in text
    assert text.endswith("Communicator(…, debug=True) reports the difference")
    assert text.startswith("rank 1's call differs from rank 2's: operation")
    text = differing(failures.TRANSFER_MISMATCH)
    assert text.startswith("rank 1 receives another number of bytes than rank 2 sends")


@pytest.mark.parametrize(("rank", "peer"), [(0, 255), (255, 0), (7, 7)])
@pytest.mark.parametrize("place", [0, 127, 0xFFFF])
@pytest.mark.parametrize("epoch", [1, 0xFFFFFF])
def test_the_parts_of_a_record_do_not_run_into_each_other(rank, peer, place, epoch):
    text = (
        f"rank {rank} waited for rank {peer} in barrier, block {place}, epoch {epoch}"
    )
    assert describe(record(failures.BARRIER, rank, peer, place, epoch)).text == text


@pytest.fixture
def on_the_host(monkeypatch):
    monkeypatch.setattr(board, "SIMULATED", True)


@pytest.fixture(autouse=True)
def no_leak():
    before = left()
    yield
    gc.collect()
    assert left() == before


def left():
    maps = Path("/proc/self/maps").read_text().count("memfd:numba_symm status board")
    return len(list(Path("/proc/self/fd").iterdir())), maps


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("text", ["a", "several\nlines", 99 * "much too long "])
def test_an_error_of_another_island_keeps_its_class_and_ranks(text):
    def play(made, comm):
        if comm.rank == 0:
            made.fail(CallMismatch(text, ranks=(17, 4), operation="scan", hint="late"))
        comm.barrier()
        return made.failure()

    for failure in on_ranks(2, play):
        assert failure.error is CallMismatch
        assert failure[2:5] == ("late", (17, 4), "scan")
        kept = len(failure.text)
        assert failure.text == text[:kept]
        assert kept == len(text) or kept > 400


@pytest.mark.usefixtures("on_the_host")
def test_an_error_that_names_many_ranks_keeps_its_text():
    def play(made, comm):
        made.fail(CallMismatch("text", ranks=range(149), operation="reduce"))
        return made.failure()

    (failure,) = on_ranks(1, play)
    assert failure.text == "text"
    assert failure.ranks == tuple(range(70))  # whole numbers


class Disturbed:
    """Records of a board at which something happens when one is read."""

    def __init__(self, made, number, happens):
        self.records, self.number, self.happens = made._records, number, happens
        made._memory.failures = self

    def __getitem__(self, rank):
        self.number -= 1
        if self.number == -1:
            self.happens()
        return self.records[rank]

    def __setitem__(self, rank, record):
        self.records[rank] = record


MISMATCH = CallMismatch("text", ranks=(3,), operation="reduce")
READS = [0, 2]  # before the words are stored, and before the record is


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("number", READS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_report_that_another_one_overtakes_keeps_its_text(in_thread, number):
    """A finalizer or the watchdog may report in between."""

    def play(made, comm):
        other = Thread(target=made.abandon, args=("left",))

        def overtake():
            if in_thread:
                other.start()
                other.join(0.1)
            else:
                other.run()

        Disturbed(made, number, overtake)
        made.fail(MISMATCH)
        if in_thread:
            other.join()
        return made.failure()

    (failure,) = on_ranks(1, play)
    assert failure[:2] in [(CallMismatch, "text"), (RankLeft, "rank 0 left")]


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("number", READS)
def test_a_report_that_is_interrupted_is_finished_by_the_next(number):
    def interrupt():
        raise KeyboardInterrupt

    def play(made, comm):
        Disturbed(made, number, interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.fail(MISMATCH)
        made.abandon("left")
        return made.failure()

    (failure,) = on_ranks(1, play)
    assert failure[:2] == (RankLeft, "rank 0 left")


@pytest.mark.usefixtures("on_the_host")
def test_a_kernels_record_is_read_by_the_rank_it_was_stored_for():
    def play(made, comm):
        if comm.rank == 0:
            store(made.address, 1, record(failures.BARRIER, rank=0, peer=2))
        comm.barrier()
        return made.failure()

    first, second, third = on_ranks(3, play)
    assert first is third is None
    assert second.text == "rank 0 waited for rank 2 in barrier, block 5"


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize(
    ("cause", "operation", "text"),
    [
        (SystemExit(0), "", "left with SystemExit: 0"),
        (KeyboardInterrupt(), "", "left with KeyboardInterrupt"),
        (GeneratorExit(), "zeros", "left zeros with an interrupt"),
        (ValueError("first\nsecond"), "zeros", "left zeros with ValueError: first"),
        (ValueError("1" * 1200), "", "left with ValueError: " + "1" * 1000),
        (ValueError("ü" * 1200), "", "left with ValueError: " + "ü" * 500),
        (ValueError("\udcff"), "", "left with ValueError: ?"),
        (Unspeakable(), "dup", "left dup with Unspeakable"),
        ("ended", "", "ended"),
    ],
)
def test_a_rank_that_leaves_is_named_on_every_rank_with_its_cause(
    cause, operation, text
):
    def play(made, comm):
        if comm.rank == 1:
            made.abandon(cause, operation)
            made.abandon("left again")
        comm.barrier()
        return made.failure()

    left = Failure(RankLeft, f"rank 1 {text}", "", (1,), operation)
    assert on_ranks(3, play) == [left] * 3


def test_a_failure_s_facts_are_kept_by_a_copy():
    """An exception crosses processes: concurrent.futures pickles it."""
    for kind in (CollectiveError, CollectiveTimeout, CallMismatch, RankLeft):
        error = kind("text", ranks=(1, 2), operation="zeros", hint="late")
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied)) == (kind, str(error)) == (kind, "text")
        assert vars(copied) == {"ranks": (1, 2), "operation": "zeros", "hint": "late"}
        assert kind().ranks == ()


@pytest.mark.usefixtures("on_the_host")
def test_a_rank_that_does_not_arrive_is_named_at_the_deadline():
    def play(made, comm):
        failure = None
        if comm.rank != 1:
            failure = made.gate(Wait("zeros", comm.rank, 0.1, "as asked"))
        comm.barrier()
        return failure or made.failure()

    named = {f"rank {rank} waited for rank 1 in zeros" for rank in (0, 2)}
    for failure in on_ranks(3, play):
        assert failure.text in named
        assert str(failure.exception()) == f"{failure.text} (as asked)"
        assert (failure.ranks[1], failure.operation) == (1, "zeros")


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize(
    "exchange", [Board.gate, lambda *args: Board.all_gather(*args)]
)
def test_a_rank_whose_process_has_ended_is_named(exchange):
    def play(made, comm):
        wait = Wait("zeros", comm.rank, 10)
        if comm.rank == 1:
            made._let_go_of_lock()  # as the process' end does
        elif exchange is Board.gate:
            made.gate(wait)
        else:
            with pytest.raises(RankLeft):
                made.all_gather(b"", wait)
        comm.barrier()
        return made.failure()

    for failure in on_ranks(3, play):
        assert failure.text.startswith("rank 1 has ended without closing the comm")
        assert (failure.error, failure.ranks) == (RankLeft, (1,))


@pytest.mark.usefixtures("on_the_host")
def test_an_interrupted_rank_reports_why_it_votes_to_stop(monkeypatch):
    """It also does so if it arrives again, or if another record is in transit."""

    def play(made, comm):
        wait = Wait("zeros", comm.rank, 10)
        if comm.rank == 1:
            made._reached = interrupted
            with pytest.raises(KeyboardInterrupt):
                made.gate(wait)
        else:
            assert "rank 1 left zeros with Keyb" in made.gate(wait).text
        return made.gate(wait).text

    def interrupted(step, wait):
        raise KeyboardInterrupt

    assert on_ranks(3, play) == ["rank 1 left zeros with KeyboardInterrupt"] * 3


@pytest.mark.usefixtures("on_the_host")
def test_a_child_of_a_fork_does_not_keep_its_parent_alive():
    def play(made, comm):
        child = os.fork()
        if child == 0:
            os._exit(made.alive is not None)
        _, status = os.waitpid(child, 0)
        assert made.alive is not None
        return os.waitstatus_to_exitcode(status)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads beside a fork
        assert on_ranks(1, play) == [0]


class Driver:
    """Pins pages, and fails in one call on some ranks."""

    def __init__(self, failing=None):
        self.failing = failing
        self.pinned = []
        self.released = []

    def call(self, name, address, *args):
        if name == self.failing:
            raise DriverError(f"{name} failed: as asked")
        if name == "cuMemHostRegister":
            assert address % mmap.PAGESIZE == 0
            assert args[0] == mmap.PAGESIZE
            self.pinned.append(address)
        if name == "cuMemHostUnregister":
            self.released.append(address)
        return address + (1 << 40) if name == "cuMemHostGetDevicePointer" else None


@pytest.mark.parametrize("ranks", [1, 3])
def test_gpus_reach_the_board_until_it_is_closed(ranks, monkeypatch):
    fake = Driver()
    monkeypatch.setattr(board.driver, "call", fake.call)

    def play(made, comm):
        assert made.address - (1 << 40) in fake.pinned
        assert made.failure() is None
        made.close()  # and once more by on_ranks
        comm.barrier()

    on_ranks(ranks, play)
    assert len(fake.pinned) == ranks
    assert sorted(fake.released) == sorted(fake.pinned)


@pytest.mark.parametrize("failing", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_a_page_that_no_gpu_reaches_fails_all_ranks(failing, monkeypatch):
    fake = Driver(failing)
    monkeypatch.setattr(board.driver, "call", fake.call)
    for error in on_ranks(2, lambda made, comm: None, outcomes):
        assert isinstance(error, SymmError)
        assert f"{failing} failed: as asked" in str(error)
        error.__traceback__ = None  # it holds the maps
    assert sorted(fake.released) == sorted(fake.pinned)
