"""Messages that several threads advance, with stubs of what they use."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from mpi4py import MPI

from numba_symm import streams
from numba_symm.errors import ArgumentError, CollectiveTimeout, ExchangeError
from numba_symm.mpi import progress, rooms
from numba_symm.mpi.crossings import Crossing, Data
from numba_symm.mpi.envelopes import Envelope
from numba_symm.mpi.flow import Flow
from numba_symm.mpi.postponed import Postponed


@pytest.fixture
def message():
    """A message to rank 1, whose envelope was sent."""
    made = object.__new__(Postponed)
    made.post = MagicMock(_lock=threading.RLock(), flow=Flow(2), timeout=0)
    made.post._freed, made.post._by_mpi = False, {}
    made._requests, made._number, made._dest, made._nbytes = [MagicMock()], 7, 1, 8
    made._hurries, made.ended, made._tag = False, False, 3
    made._done = made._room = made._found = made._error = None
    made._placing = []
    return made


def done_in_a_thread(call):
    """Return what the call returns in another thread, which must not wait."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(300)
    return found


def test_a_message_of_a_busy_communicator_is_not_waited_for(message):
    """The thread that has its lock may wait for a lock of this one."""
    with message.post._lock:
        assert done_in_a_thread(message.advance) == [False]
    message._requests[0].Test.return_value = False
    message.post.flow.unreceived[1] = 1
    message.post.flow.limit = 1
    assert done_in_a_thread(message.advance) == [False]
    assert message._requests[0].Test.called


def test_a_thread_with_another_gpu_fails_no_message_of_others(message):
    message.post._check_open.side_effect = ArgumentError("Send: expected GPU 0")
    assert not message.advance()
    assert not message.ended
    assert message._error is None
    for call in (lambda: message.wait("Wait"), message.hurry):
        with pytest.raises(ArgumentError, match="expected GPU 0"):
            call()
    assert not message.ended
    message.post._freed = True
    assert message.advance()


def test_a_failed_message_to_another_island_ends_on_both_sides(message):
    """The sender's parts are empty, and the receiver raises."""
    sent = []
    data = object.__new__(Data)
    data._tags, data.send = 100, lambda *given: sent.append(given)
    message.post._data = data
    message.post.is_apart.return_value = True
    message.post.outgoing = None  # so that nothing can be copied
    message._found, message._done = MagicMock(), MagicMock()
    message._nbytes, message.post.flow.limit = (1 << 30) + 1, 0
    message.post.flow.sent(7, 1, message._nbytes)
    assert message.advance()
    assert [(part[0].size, dest, tag) for part, dest, tag in sent] == [(0, 1, 7)] * 2
    assert message.post.flow.unreceived == [0, 0]
    with pytest.raises(AttributeError):
        message.raise_error()


def test_a_dropped_message_gives_its_room_back_when_no_copy_writes_it(message):
    calls = []
    message.post.outgoing.settle = lambda: calls.append("settle")
    message.post._give_back = calls.append
    message.post._receipts.unread = {}
    message._room = "room"
    message.drop(ValueError("7"))
    message.drop(ValueError("8"))
    assert calls == ["settle", "room"]
    with pytest.raises(ValueError, match="7"):
        message.raise_error()


def test_a_failed_allocation_frees_the_rooms_of_one_message(monkeypatch):
    failing, released = [], []
    monkeypatch.setattr(rooms, "on_allocation_failure", failing.append)
    monkeypatch.setattr(rooms.reserve, "idle", lambda: True)

    def collect():
        raise ExchangeError("a process is stopped")

    monkeypatch.setattr(rooms, "collect", collect)
    made = rooms.Rooms(SimpleNamespace(release=released.append))
    for block in ("first", "second"):
        made.give_back(rooms.Room(None, b"", 0, 8, once=MagicMock()))
        made._freeable.append(block)
    (callback,) = failing
    callback()
    assert released == ["first", "second"]
    assert not made._leaving


def test_only_a_send_that_needs_no_match_has_a_deadline(message):
    """Another receive may match a synchronous send at any later time."""
    message.post.timeout = 1e-9
    for matched, error in ((True, None), (False, CollectiveTimeout)):
        looks = iter([False] * 3 + [True])
        message.advance = lambda looks=looks: next(looks)
        with nullcontext() if error is None else pytest.raises(error):
            message.wait("Wait", matched)


def test_a_receiver_raises_for_an_empty_part():
    comm = MPI.COMM_SELF.Dup()
    begun = []

    def start():
        begun.append(1)
        return SimpleNamespace(query=lambda: True)

    for nbytes in (8, 0):
        data = np.empty(8, np.uint8)
        requests = [comm.Irecv([data, MPI.BYTE], 0, 7)]
        lock, envelope = threading.RLock(), Envelope(0, 3, 7, 8, 0, b"")
        found = Crossing(requests, envelope, start, lambda: None, lock)
        assert not found.query()
        comm.Send([np.zeros(nbytes, np.uint8), MPI.BYTE], 0, 7)
        found.synchronize()
        assert len(begun) == 1
        assert (found.error is None) == bool(nbytes)
        if found.error is not None:
            assert "rank 0 could not send its message with tag 3" in str(found.error)
    comm.Free()


def test_a_thread_that_has_ended_is_replaced(monkeypatch):
    """A new one makes the GPU current before it advances messages."""
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    calls, started = [], []

    def advance():
        calls.append("advance")
        return True

    def start(thread, what):
        thread.start()
        started.append(thread)

    monkeypatch.setattr(streams, "SIMULATED", True)
    monkeypatch.setattr(progress, "_pending", [SimpleNamespace(advance=advance)])
    monkeypatch.setattr(progress, "_thread", ended)
    monkeypatch.setattr(progress.threads, "start", start)
    levels = {"Query_thread": lambda: 3, "THREAD_MULTIPLE": 3}
    stub = SimpleNamespace(**levels, Is_finalized=lambda: False)
    monkeypatch.setattr(progress, "MPI", stub)
    progress.in_background(calls.append)
    (thread,) = started
    thread.join(300)
    assert calls == ["Isend", "advance"]
    progress.remove(stub)  # another thread has removed it before
