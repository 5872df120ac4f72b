"""Two threads with a communicator each, and two threads with one communicator."""

import threading

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.enqueueing import Enqueuer
from tests.ranks.helpers import check_works, get, put, refused

WAIT = 30  # seconds


class Caller(threading.Thread):
    """A thread that makes calls, and raises their errors in ``finish``."""

    def __init__(self, *calls):
        super().__init__(daemon=True)
        self.calls = calls
        self.error = None
        self.start()

    def run(self):
        try:
            for call in self.calls:
                call()
        except BaseException as error:
            self.error = error

    def finish(self):
        self.join(WAIT)
        assert not self.is_alive()
        assert self.error is None, repr(self.error)


@pytest.fixture
def held(comm, monkeypatch):
    """Return a function that stops the next call of another thread halfway."""
    inside, go = threading.Event(), threading.Event()

    def hold(holder, name):
        real = getattr(holder, name)

        def held(*args):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go.wait(WAIT)
            return real(*args)

        monkeypatch.setattr(holder, name, held)

    yield hold, inside, go
    go.set()


def test_communicators_work_in_threads_of_their_own(comm):
    """Threads are not synchronized, so each rank has its own order of calls."""
    algorithms, n = (None, "two_shot_marked", "chunked", None) * 3, comm.size
    x = [cuda.to_device(np.full(500, comm.rank + k, np.int64)) for k in range(2)]
    y = [[cuda.device_array_like(x[k]) for _ in algorithms] for k in range(2)]
    cuda.synchronize()

    def work(each, k, stream):
        for algorithm, out in zip(algorithms, y[k], strict=True):
            each.all_reduce(x[k], out=out, stream=stream, algorithm=algorithm)
            each.barrier(stream)
        each.synchronize(stream)

    with comm.dup() as other:
        # Later loads and allocations would wait for all work of the GPU.
        given = [(comm, 0, ns.Stream()), (other, 1, ns.Stream())]
        for each in given:
            work(*each)
        for caller in [Caller(lambda each=each: work(*each)) for each in given]:
            caller.finish()
    for k in range(2):
        assert all((get(out) == n * k + n * (n - 1) // 2).all() for out in y[k])


BUSY = [
    *("a call", "its preparation", "a compared call", "a set-up call"),
    *("a group", "its start"),
]


@pytest.mark.parametrize("busy", BUSY)
def test_a_call_beside_another_threads_is_refused(comm, world, held, monkeypatch, busy):
    hold, inside, go = held
    x, kept = cuda.to_device(np.ones(6, np.float32)), []
    y, z = cuda.device_array_like(x), cuda.device_array_like(x)
    plan, right = comm.all_reduce_init(x, out=z), (comm.rank + 1) % comm.size
    memory, others = comm.zeros(6), comm.size - 1
    cuda.synchronize()

    def group():
        with comm.group():
            inside.set()
            assert go.wait(WAIT)
            comm.all_reduce(x, out=y)

    def group_of_two():
        with comm.group():
            comm.all_reduce(x, out=z)
            comm.all_reduce(x, out=y)
            hold(Enqueuer, "run")

    def call():
        return comm.all_reduce(x, out=y)

    # What the other thread does, and where it is held.
    calls = {
        "a call": (call, Enqueuer, "run"),
        "its preparation": (call, Calls, "packed"),
        "a compared call": (call, Calls, "packed"),
        "a set-up call": (
            lambda: kept.append(comm.zeros(3)),
            comm._calls.heap,
            "allocate",
        ),
        "a group": (group,),
        "its start": (group_of_two,),
    }
    if busy == "a compared call":
        monkeypatch.setattr(comm._calls.agreement, "debug", True)
    busily, *place = calls[busy]
    if place:
        hold(*place)
    caller = Caller(busily)
    assert inside.wait(WAIT)
    mine = {
        "all_reduce": lambda: comm.all_reduce(x),
        "barrier": comm.barrier,
        "reduce_scatter_v": lambda: comm.reduce_scatter_v(x, counts=[6] + [0] * others),
        "gather": lambda: comm.gather(x),
        "group": lambda: comm.group().__enter__(),
        "empty": lambda: comm.empty(3),
        "rendezvous": lambda: comm.rendezvous(memory),
        "split": lambda: comm.split(0),
        "dup": comm.dup,
        "close": comm.close,
    }
    if comm.size > 1:
        mine["send"] = lambda: comm.send(x, dst=right)
    for name, call in mine.items():
        text = f"{name}: expected one thread at a time in a communicator's calls"
        refused(world, ns.ArgumentError, call, text, "dup()")
    for again in (plan, lambda: comm.all_reduce_init(x)):
        text = "all_reduce: expected one thread at a time"
        refused(world, ns.ArgumentError, again, text)
    comm.check()
    go.set()
    caller.finish()
    comm.synchronize()
    if busy != "a set-up call":
        assert get(y).tolist() == [comm.size] * 6
    check_works(comm)


def test_a_call_that_another_threads_group_outlived_is_not_remembered_in_it(comm, held):
    hold, inside, go = held
    x, y = comm.zeros(4, np.int32), comm.zeros(4, np.int32)
    put(x, np.full(4, comm.rank + 1, np.int32))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.all_reduce(y, out=y)  # from now on, arrays of this class are read at once
    comm.synchronize()

    def call():
        comm.sendrecv(x, dst=right, out=y, src=left)

    hold(Calls, "call")
    with comm.group():
        caller = Caller(call)
        assert inside.wait(WAIT)
    go.set()
    caller.finish()
    for _ in range(2):
        put(y, np.zeros(4, np.int32))
        with comm.group():
            call()
        assert get(y).tolist() == [left + 1] * 4


def test_an_interrupt_between_calls_leaves_no_mark(comm):
    """An interrupt may arrive right after a call has marked its thread."""
    comm._calls.thread.claim()
    check_works(comm)
    Caller(lambda: check_works(comm)).finish()
