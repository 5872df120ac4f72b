"""Streams and events, in one process and across two."""

import re

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED
from numba_symm.gpu import streams
from tests.sharing.work import copied, error_of, fill, say, to_device
from tests.spawned import run_ranks

SIZE = 1000
LONG = 300  # milliseconds


def uses_events(comm):
    facts = {}
    plain = ns.Event()
    facts["never recorded"] = plain.query()
    plain.synchronize()
    plain.wait()
    stream = ns.Stream()
    begin, end = ns.Event(timing=True), ns.Event(timing=True, blocking=True)
    x = to_device(np.zeros(SIZE, np.float32))
    fill(x, 1, stream)  # compiled
    begin.record(stream)
    fill(x, 2, stream, milliseconds=LONG)
    end.record(stream)
    facts["under way"] = SIMULATED or not (end.query() or stream.query())
    end.synchronize()
    facts["done"] = end.query() and stream.query()
    facts["milliseconds"] = begin.elapsed_time(end)
    facts["no timing"] = error_of(plain.elapsed_time, end)
    facts["no interprocess"] = error_of(plain.ipc_handle)
    facts["both"] = error_of(ns.Event, timing=True, interprocess=True)
    facts["short handle"] = error_of(ns.Event.from_ipc_handle, b"abc")
    handle = ns.Event(interprocess=True).ipc_handle()
    facts["handle"] = (type(handle), len(handle))
    events = ns.Event(), ns.Event(timing=True), ns.Event(blocking=True)
    facts["shown"] = list(map(repr, events))
    return facts


def test_events():
    (facts,) = run_ranks(1, uses_events)
    assert facts["never recorded"]
    assert facts["under way"]
    assert facts["done"]
    assert LONG * 0.9 < facts["milliseconds"] < LONG * 20
    assert "elapsed_time: expected two events with timing" in facts["no timing"]
    assert "make it with Event(interprocess=True)" in facts["no interprocess"]
    assert "Event: expected timing=True or interprocess" in facts["both"]
    assert "from_ipc_handle: expected 64 bytes, got b'abc'" in facts["short handle"]
    assert facts["handle"] == (bytes, 64)
    options = "without timing", "timing=True", "blocking=True"
    assert facts["shown"] == [f"<Event {each}>" for each in options]


def uses_streams(comm):
    facts = {}
    first, second = ns.Stream(), ns.Stream(priority=-1)
    facts["ids"] = first.id != second.id
    facts["priority"] = first.priority, second.priority
    facts["device"] = first.device.ordinal, second.device_index
    facts["empty"] = first.query()
    facts["protocol"] = streams.handle_or_default(first) == first.__cuda_stream__()[1]
    facts["no such device"] = error_of(ns.Stream, device=99)
    facts["no such priority"] = [error_of(ns.Stream, priority=p) for p in (1, -99)]
    right = []
    x = to_device(np.zeros(SIZE, np.float32))
    for value, order in enumerate(["event", "stream", "raw", "mine"], 1):
        fill(x, value, first, milliseconds=LONG // 3)
        if order == "event":
            second.wait_event(first.record_event())
        elif order == "stream":
            second.wait_stream(first)
        elif order == "raw":
            second.wait_stream(first.handle)
        else:
            event = ns.Event()
            facts["same event"] = first.record_event(event) is event
            event.wait(second)
        y = copied(x, second)
        second.synchronize()
        right.append(y.copy_to_host().tolist() == [value] * SIZE)
    facts["ordered"] = right
    fill(x, 9, first, milliseconds=LONG // 3)
    ns.Event().wait(None)
    second.wait_stream(None)
    first.synchronize()
    with ns.Communicator(comm, timeout=60, stream=first) as own:
        z = own.all_reduce(x, stream=second)
        own.synchronize(first)
        own.synchronize(second)
    facts["accepted"] = z.copy_to_host().tolist() == [9] * SIZE
    return facts


def test_streams():
    (facts,) = run_ranks(1, uses_streams)
    assert facts["ids"]
    assert facts["priority"] == (0, -1)
    assert facts["device"] == (0, 0)
    assert facts["empty"]
    assert facts["protocol"]
    assert re.match(
        r"ArgumentError: Stream: expected device .*, got 99", facts["no such device"]
    )
    for text in facts["no such priority"]:
        assert "Stream: expected a priority from -" in text
    assert facts["same event"]
    assert facts["ordered"] == [True] * 4
    assert facts["accepted"]


def refuses_priorities(comm):
    return [error_of(ns.Stream, priority=priority) for priority in (1, -1000)]


@pytest.mark.usefixtures("gpus")
def test_priorities_that_no_gpu_has():
    for error in run_ranks(1, refuses_priorities)[0]:
        assert re.match(r"ArgumentError: Stream: expected a priority", error)


def passes_an_event(comm):
    """Rank 1's stream waits for rank 0's work by an event of rank 0."""
    stream = ns.Stream()
    with ns.Communicator(comm.among([comm.rank]), timeout=60) as own:
        x = own.zeros(SIZE, np.float32)
        fill(x, 0, stream)  # compiled
        stream.synchronize()
        if comm.rank == 0:
            event = ns.Event(interprocess=True)
            handle = ns.share(x)
            fill(x, 6, stream, milliseconds=LONG)
            event.record(stream)
            say(comm, (handle, event.ipc_handle()))
            early = SIMULATED or not event.query()
            comm.barrier()
            return early, ns.sharing.collect()
        handle, name = say(comm)
        y = ns.open_shared(handle, stream=stream)
        event = ns.Event.from_ipc_handle(name)
        again = event.ipc_handle() == name
        stream.wait_event(event)
        z = copied(y, stream)
        stream.synchronize()
        right = z.copy_to_host().tolist() == [6] * SIZE
        y.close()
        comm.barrier()
        return right and event.query(), again


def test_an_event_of_another_process():
    assert run_ranks(2, passes_an_event) == [(True, True)] * 2


def opens_its_own_event(comm):
    cuda.current_context()
    return error_of(ns.Event.from_ipc_handle, bytes(64))


@pytest.mark.usefixtures("gpus")
def test_an_event_that_is_none():
    (error,) = run_ranks(1, opens_its_own_event)
    assert error.startswith("DriverError: cuIpcOpenEventHandle failed")
