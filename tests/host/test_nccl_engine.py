"""The engine of NCCL without GPUs: a stand-in records what NCCL is asked to do."""

import contextlib
import ctypes
import importlib
import threading
import time
import types

import pytest

import numba_symm as ns
from numba_symm import engines
from numba_symm.engines import nccl
from numba_symm.engines.deadline import Deadline
from numba_symm.engines.nccl import CURE, Installation
from numba_symm.engines.protocol import Collective, Parcel
from numba_symm.gpu import streams
from numba_symm.launch.waiting import Wait

STREAM, SIDE = 77, 88
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7


class NCCLError(Exception):
    pass


class Nccl:
    """A stand-in for nccl.bindings.nccl."""

    NCCLError = NCCLError

    def __init__(self):
        self.calls = []
        self.states = []  # the next ones; then success
        self.fails = ""
        self.config = types.SimpleNamespace(ptr=5)

    def Config(self):
        return self.config

    def get_version(self):
        return 22809

    def comm_init_rank_scalable(self, *given):
        self.calls.append(("init", *given))
        return "comm"

    def comm_get_async_error(self, comm):
        assert comm == "comm"
        return self.states.pop(0) if self.states else SUCCESS

    def get_error_string(self, state):
        return f"state {state}"

    def __getattr__(self, name):
        def call(*given):
            self.calls.append((name, *given))
            if name == self.fails:
                raise NCCLError("invalid usage")

        return call


@pytest.fixture
def fake(monkeypatch):
    fake = Nccl()
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    nccl.found.cache_clear()
    yield fake
    nccl.found.cache_clear()


class Ranks:
    """What the engine needs of a communicator."""

    def __init__(self):
        self.failure, self.ends = None, ()

    def wait(self, what):
        return Wait(what, 0, 0.02, "timeout: 0.02 s")

    def look(self):
        if self.failure is not None:
            raise self.failure

    def late(self, wait):
        return self.ends if wait.late else ()


@pytest.fixture
def ranks():
    return Ranks()


def start(ranks):
    given = ranks.wait, ranks.look, lambda: "all_reduce", Deadline(ranks.wait), ranks
    return nccl.NcclEngine(b"identifier", 0, 4, 16, *given)


@pytest.fixture
def engine(gpu, fake, ranks):
    made = start(ranks)
    fake.calls.clear()
    return made


def test_the_communicator_does_not_block(gpu, fake, ranks):
    engine = start(ranks)
    assert (fake.config.blocking, fake.config.max_ctas) == (0, 16)
    assert fake.calls == [("init", 4, 0, 1, bytearray(b"identifier"), 5)]
    assert (engine.version, engine.multiprocessors) == ("NCCL 2.28.9", 16)


def test_a_rank_that_is_late_in_the_construction(gpu, fake, ranks):
    fake.states = [IN_PROGRESS] * 10**6
    with pytest.raises(ns.CollectiveTimeout, match="waited for other ranks in Commun"):
        start(ranks)
    assert ("comm_abort", "comm") in ended(fake)


def ended(fake):
    """Return all calls once the threads that abort have ended."""
    for thread in threading.enumerate():
        if thread.daemon and thread.name.endswith("(_end)"):
            thread.join()
    return fake.calls


def test_messages_are_one_group_between_two_marks(engine, fake, gpu):
    engine.exchange(
        [Parcel(1, 10, 8), Parcel(2, 20, 0), Parcel(3, 30, 4)],
        [Parcel(3, 40, 16), Parcel(1, 50, 0)],
        STREAM,
    )
    assert fake.calls == [
        ("group_start",),
        ("recv", 40, 16, 1, 3, "comm", STREAM),
        ("send", 10, 8, 1, 1, "comm", STREAM),
        ("send", 30, 4, 1, 3, "comm", STREAM),
        ("group_end",),
    ]
    assert gpu.stored == [(STREAM, 1), (STREAM, 0)]


def test_a_graph_has_one_mark_between_two_exchanges(engine, gpu):
    gpu.captured = {STREAM: 7}
    for peer in (1, 2):
        engine.exchange([Parcel(peer, 10, 8)], [], STREAM)
    assert gpu.nodes == [1, 2, 0]


def test_no_bytes_are_no_group(engine, fake, gpu):
    engine.exchange([Parcel(1, 10, 0)], [], STREAM)
    assert not fake.calls
    assert not gpu.stored


class Order:
    """A communicator's order, whose side stream writes down what it does."""

    def __init__(self, calls):
        self.stream, self.across, self.calls = SIDE, self, calls

    def __getattr__(self, name):
        return lambda *given: self.calls.append((name, *given))

    def joined(self, stream):
        return streams.SideStream.joined(self, stream)


@pytest.mark.parametrize("stream", [STREAM, streams.PER_THREAD])
def test_other_work_of_the_call_runs_beside_it(engine, fake, stream):
    """It is enqueued before NCCL, whose host may wait for a rank that needs it."""

    def work(handle):
        fake.calls.append(("work", handle))

    engine.exchange([Parcel(1, 10, 8)], [], stream, work, Order(fake.calls))
    assert fake.calls == [
        ("follow", stream, 0),
        ("work", stream),
        ("group_start",),
        ("send", 10, 8, 1, 1, "comm", SIDE),
        ("group_end",),
        ("mark", 0),
        ("lead", stream, 0),
    ]


def test_the_default_stream_of_a_thread_is_not_nccls(engine, fake):
    engine.exchange([Parcel(1, 10, 8)], [], streams.PER_THREAD, None, Order(fake.calls))
    assert ("send", 10, 8, 1, 1, "comm", SIDE) in fake.calls


@pytest.mark.parametrize(
    ("name", "more", "wanted"),
    [
        ("all_gather", (12, "uint8", "", 0), (12, 1)),
        ("broadcast", (12, "uint8", "", 3), (12, 1, 3)),
        ("all_reduce", (3, "float32", "sum", 0), (3, 7, 0)),
        ("reduce", (3, "int64", "max", 2), (3, 4, 2, 2)),
        ("reduce_scatter", (3, "uint32", "prod", 0), (3, 3, 1)),
    ],
)
def test_collectives_of_nccl(engine, fake, gpu, name, more, wanted):
    engine.collectives[name](Collective(name, 10, 20, *more), None, STREAM)
    calls = [("group_start",), (name, 10, 20, *wanted, "comm", STREAM), ("group_end",)]
    assert fake.calls == calls
    assert engine._deadline._exchanges[1].peers == (1, 2, 3)
    assert gpu.stored == [(STREAM, 1), (STREAM, 0)]


def test_an_enqueuing_that_takes_longer_looks_for_failures(engine, fake, ranks):
    fake.states = [IN_PROGRESS] * (nccl._POLLS + 2)
    engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    fake.states = [IN_PROGRESS] * 10**6
    ranks.failure = ns.RankLeft("rank 2 left")
    with pytest.raises(ns.RankLeft, match="rank 2 left"):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)


def test_a_deadline_on_the_host_is_for_connecting_only(engine, fake, ranks):
    """Sending to a rank and receiving from it need two connections."""
    engine.exchange([Parcel(3, 10, 8)], [], STREAM)
    fake.states = [IN_PROGRESS] * 10**6
    with pytest.raises(ns.CollectiveTimeout, match="waited for rank 3 in all_reduce"):
        engine.exchange([Parcel(3, 10, 8)], [Parcel(3, 10, 8)], STREAM)
    fake.states = [IN_PROGRESS] * (nccl._POLLS + 1)
    slow = iter([0.1])

    def look():
        time.sleep(next(slow, 0))  # beyond the deadline

    engine._look = look
    engine.exchange([Parcel(3, 10, 8)], [], STREAM)
    assert not [*slow]


def test_a_call_that_nccl_refuses_closes_its_group(engine, fake):
    fake.fails = "send"
    said = "all_reduce: NCCL failed: invalid usage; NCCL_DEBUG=WARN shows more"
    with pytest.raises(ns.BackendError, match=said):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    assert fake.calls[-1] == ("group_end",)


def test_a_state_that_nccl_does_not_report_is_an_error_of_this_library(engine, fake):
    def refuse(comm):
        raise NCCLError("invalid argument")

    fake.comm_get_async_error = refuse
    said = "all_reduce: NCCL failed: invalid argument"
    with pytest.raises(ns.BackendError, match=said):
        engine.status()
    with pytest.raises(ns.BackendError, match=said):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)


def test_errors_of_the_network_name_the_rank_in_the_end(engine, fake, gpu, ranks):
    engine.exchange([Parcel(1, 10, 8)], [Parcel(2, 10, 8)], STREAM)
    assert (engine.status(), ranks.absent) == (None, ())
    gpu.bind(1, ctypes.addressof(gpu.memory), 1)(STREAM)
    fake.states = [REMOTE_ERROR] * 3
    assert engine.status() is None  # its cause may be on its way
    assert ranks.absent == (1, 2)
    time.sleep(nccl._GRACE)
    assert engine.status() is None  # no rank has answered yet
    ranks.ends = (3,)
    error = engine.status()
    assert type(error) is ns.RankLeft
    said = "rank 0 waited for rank 3 in all_reduce, and NCCL reports: state 6"
    assert str(error) == said
    assert (error.ranks, error.operation) == ((0, 3), "all_reduce")
    ranks.ends = ()
    fake.states = [IN_PROGRESS, 1]
    assert engine.status() is None
    error = engine.status()
    assert (type(error), error.ranks) == (ns.CollectiveError, (0, 1, 2))


def test_a_call_waits_for_the_rank_that_an_error_is_about(engine, fake, gpu, ranks):
    def look():
        if (error := engine.status()) is not None:
            raise error

    engine._look, fake.states = look, [REMOTE_ERROR] * 10**6
    late, ranks.late = [(), (), (3,)], lambda wait: late.pop(0)
    with pytest.raises(ns.RankLeft, match="rank 0 waited for rank 3 in all_reduce"):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    assert not late


def test_a_cause_that_comes_after_a_connection_has_ended_is_raised(engine, fake):
    looks = iter([None, None, ns.CollectiveTimeout("rank 2 is late")])

    def look():
        if (failure := next(looks)) is not None:
            raise failure

    engine._look = look
    fake.states = [REMOTE_ERROR]
    with pytest.raises(ns.CollectiveTimeout, match="rank 2 is late"):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    engine._look = lambda: None
    fake.states = [REMOTE_ERROR]
    with pytest.raises(ns.RankLeft, match="and NCCL reports: state 6"):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)


def test_an_exchange_that_lasts_too_long_is_a_timeout(engine, gpu, clock, ranks):
    engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    gpu.bind(1, ctypes.addressof(gpu.memory), 1)(STREAM)
    assert engine.status() is None
    clock.now += 3
    assert engine.status() is None
    ranks.ends = (2,)
    error = engine.status()
    assert type(error) is ns.CollectiveTimeout
    assert str(error) == "rank 0 waited for rank 2 in all_reduce (timeout: 0.02 s)"


def test_after_an_abort_nothing_is_asked_of_nccl(engine, fake, ranks):
    engine.abort()
    engine.abort()
    assert ended(fake) == [("comm_abort", "comm")]
    assert engine.status() is None
    with pytest.raises(ns.BackendError, match="NCCL was aborted"):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    ranks.failure = ns.CollectiveTimeout("rank 1 is late")
    with pytest.raises(ns.CollectiveTimeout, match="rank 1 is late"):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)


def test_nobody_looks_for_failures_while_nccl_is_locked(engine):
    """The watchdog asks the engine while it holds the lock that a look takes."""
    engine.abort()

    def look():
        other = threading.Thread(target=lambda: held.append(is_locked(engine)))
        other.start()
        other.join()

    held, engine._look = [], look
    with pytest.raises(ns.BackendError, match="NCCL was aborted"):
        engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    assert held == [False]


def is_locked(engine):
    """Return whether another thread has the engine's lock."""
    if engine._lock.acquire(blocking=False):
        engine._lock.release()
        return False
    return True


def test_an_abort_at_the_exit_of_python_starts_no_thread(engine, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    engine.close()
    assert engine.status() is None


@pytest.mark.parametrize("captured", [False, True])
def test_a_close_waits_for_nccl_unless_a_graph_may_have_its_kernels(
    engine, fake, gpu, captured, monkeypatch
):
    """The end of the program waits then, but not for a graph that is never dropped."""
    gpu.captured = {STREAM: 7} if captured else {}
    engine.exchange([Parcel(1, 10, 8)], [], STREAM)
    graph_is_dropped = threading.Event()

    def comm_abort(comm):
        graph_is_dropped.wait(0.1 if not captured else 60)
        fake.calls.append("aborted")

    fake.comm_abort = comm_abort
    engine.close()
    assert ("aborted" in fake.calls) == (not captured)
    with monkeypatch.context() as patch:
        patch.setattr(nccl, "_EXIT", 0.05)
        nccl.wait_for_aborts()
    assert ("aborted" in fake.calls) == (not captured)
    threading.Timer(0.05, graph_is_dropped.set).start()
    nccl.wait_for_aborts()
    assert "aborted" in fake.calls


def test_what_is_missing_is_named(fake, monkeypatch):
    def missing(name):
        raise ImportError("No module named 'nccl'")

    def without_library():
        raise RuntimeError("libnccl.so.2 not found")

    assert nccl.found() == Installation("NCCL 2.28.9", "")
    nccl.found.cache_clear()
    fake.get_version = without_library
    assert nccl.found() == Installation("", f"nccl4py finds no NCCL library: {CURE}")
    nccl.found.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    assert "cannot be imported (No module named 'nccl')" in nccl.found().missing


@pytest.mark.parametrize(
    ("all_of_them", "wanted"), [(1, 1), (2, 1), (4, 2), (8, 4), (25, 16), (31, 16)]
)
def test_a_kernel_beside_nccls_has_multiprocessors_left(all_of_them, wanted):
    assert nccl.share(all_of_them) == wanted


@pytest.mark.parametrize("number", [0, 1])
def test_a_start_that_fails_on_another_rank_leaves_nothing(
    gpu, fake, ranks, monkeypatch, number
):
    """Both the word of the marks and NCCL's communicator are freed."""
    freed = []

    def step(failing):
        if number == failing:
            raise ns.BackendError("rank 1 failed")

    @contextlib.contextmanager
    def agreed(what):
        each = types.SimpleNamespace()
        yield each
        step(0)
        each.all = [each.mine]

    monkeypatch.setattr(Deadline, "close", lambda self: freed.append(self))
    exchange = types.SimpleNamespace(
        rank=0,
        size=4,
        agreed=agreed,
        barrier=lambda what: step(1),
    )
    fake.get_unique_id = lambda: b"identifier"
    given = {"exchange": exchange, "operation": "", "questions": ranks}
    islands = types.SimpleNamespace(wait=ranks.wait, look=ranks.look, **given)
    with pytest.raises(ns.BackendError, match="rank 1 failed"):
        engines._start_nccl(islands, 31)
    assert len(freed) == 1
    assert (("comm_abort", "comm") in ended(fake)) == (number == 1)
