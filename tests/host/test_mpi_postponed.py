"""Postponed messages and rooms, with stubs of what they use: order, threads, ends."""

import threading
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from numba_symm.errors import ArgumentError, CollectiveTimeout, ExchangeError
from numba_symm.gpu import streams
from numba_symm.mpi import progress, rooms
from numba_symm.mpi.messages import Post as Whole
from numba_symm.mpi.p2p import Sending
from numba_symm.mpi.progress import Data
from numba_symm.mpi.rooms import LINE, MATCHED, NO_SLOT, READ, READY

NUMBER, DEST, NBYTES, SLOT, COPIES = 7, 1, 64, 2, 0xC0


class Post(Whole):
    """What sends need of a communicator, whose steps are noted."""

    def __init__(self, steps):
        self.limit, self.timeout, self._freed, self.rank = NBYTES, 0, False, 0
        self.unread, self._unread, self._looks = [0, NBYTES], {}, 99
        self._lock, self._data = threading.RLock(), object.__new__(Data)
        self._data.tags = 100
        self._data.reap = lambda: None
        self._reclaim = lambda port: None
        self._data.send = lambda data, *given: steps.append((data[0].size, *given))
        self.check_open = self.check = lambda *_: None
        self.steps, self.matched = steps, True
        self.outgoing = SimpleNamespace(
            stream=COPIES, settle=lambda: steps.append("settle")
        )
        stored = defaultdict(int)

        def store(slot, word, number):
            stored[LINE * slot + word] = number

        self.words = SimpleNamespace(
            values=stored,
            holds=lambda slot, word, number: stored[LINE * slot + word] >= number,
            end=lambda slot, number: store(slot, READY, number),
            store=store,
            port_at=0,
            rooms=SimpleNamespace(give_back=steps.append, shrink=lambda: None),
            give_back=lambda slot: steps.append(("slot", slot)),
        )

    def idle(self, stream):
        return True

    def room_for(self, size):
        return "room"


@pytest.fixture
def steps():
    """The steps of a message, in their order."""
    return []


class Message(Sending):
    """A message whose copies are noted."""

    def _fill(self, room, stream):
        # Whoever looks meanwhile knows of it.
        assert self.post.unread[DEST] == 2 * NBYTES
        self.post.steps.append((room, stream, self.slot, self.number))


@pytest.fixture
def message(steps):
    """A message to rank 1, whose envelope was sent, and that a receive has matched."""
    made = Message()
    made.post, made.tag, made.slot, made.number = Post(steps), 3, SLOT, NUMBER
    made.outgoing = SimpleNamespace(dest=DEST, nbytes=NBYTES, size=NBYTES)
    made._array, made._asked, made._requests = "array", [], []
    made._begun = made._matched = False
    made._after = SimpleNamespace(query=lambda: True)
    made.post.words.store(SLOT, MATCHED, NUMBER)
    return made


def done_in_a_thread(call):
    """Return what the call returns in another thread, which must not wait."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(300)
    return found


def test_a_copy_follows_what_wrote_the_array(message, steps):
    done = []
    message._after.query = lambda: bool(done)
    assert not message.advance()
    assert not steps
    done.append(True)
    assert not message.advance()
    assert steps == [("room", COPIES, SLOT, NUMBER)]
    assert not message.advance()  # the array is in use
    assert message._array
    message.post.words.end(SLOT, NUMBER)
    assert message.advance()
    assert len(steps) == 1
    assert message._array is None


def test_a_request_keeps_no_room_that_was_given_back(message, steps):
    post = message.post
    message.advance()
    post.take_back()
    assert message.room == "room"
    for word in (READ, READY):
        post.words.store(SLOT, word, NUMBER + 1)  # a later message has used the slot
    post.take_back()
    assert steps[1:] == ["room", ("slot", SLOT)]
    assert message.room is None
    assert message.advance()
    assert post.unread[DEST] == NBYTES
    post.take_back()
    assert len(steps) == 3


def test_a_message_waits_for_its_match_or_for_the_limit(message, steps):
    post = message.post
    post.words.store(SLOT, MATCHED, NUMBER - 1)
    assert not message.advance()
    assert not steps
    post.unread[DEST] = 0
    message._fill = lambda *given: steps.append("copy")
    message.advance()
    assert steps == ["copy"]


def test_a_message_of_a_busy_communicator_is_not_waited_for(message, steps):
    """The thread that has its lock may wait for a lock of this one."""
    with message.post._lock:
        assert done_in_a_thread(message.advance) == [False]
    assert not steps
    assert done_in_a_thread(message.advance) == [False]
    assert steps


def test_a_thread_with_another_gpu_fails_no_message_of_others(message):
    def check_open(what):
        raise ArgumentError("Send: expected GPU 0")

    message.post.check_open = check_open
    assert not message.advance()
    assert message._array
    assert message._error is None
    for call in (message.Wait, message.hurry):
        with pytest.raises(ArgumentError, match="expected GPU 0"):
            call()
    assert message._array
    assert message


def test_a_failed_message_keeps_only_its_slot_until_it_is_refused(message, steps):
    """Its receiver learns that the message is nowhere. No copy writes the room then."""
    post = message.post

    def failing(*_):
        raise MemoryError

    message._fill = failing
    assert message.advance()
    assert steps == ["settle", "room"]
    assert post.words.holds(SLOT, READY, NUMBER)
    post.take_back()
    assert post.unread[DEST] == 2 * NBYTES  # until the receiver has answered
    post.words.store(SLOT, READ, NUMBER)
    post.take_back()
    assert steps[2:] == [("slot", SLOT)]
    assert post.unread[DEST] == NBYTES
    with pytest.raises(MemoryError):
        message.Wait()


def test_a_failed_message_to_another_island_ends_on_both_sides(message, steps):
    """The sender's parts are empty, so the receiver raises."""
    message.slot, message._hurries = NO_SLOT, True
    message.outgoing.nbytes = (1 << 30) + 1
    assert message.advance()  # there are no items that could be copied
    assert steps == [(0, DEST, NUMBER)] * 2
    assert message.post.unread[DEST] == NBYTES
    with pytest.raises(AttributeError):
        message.Wait()


def test_a_dropped_message_raises_its_first_error(message):
    for text in "78":
        message.drop(ValueError(text))
    with pytest.raises(ValueError, match="7"):
        message.Wait()
    assert not message


def test_only_a_send_that_needs_no_match_has_a_deadline(message):
    """Another receive may match a synchronous send at any later time."""
    message.post.timeout = 1e-9
    message.post.words.end(SLOT, NUMBER)
    for matched, error in ((True, None), (False, CollectiveTimeout)):
        looks = iter([False] * 3 + [True] * 2)
        message.advance = lambda looks=looks: next(looks)
        message._matched = matched
        with nullcontext() if error is None else pytest.raises(error):
            message._complete(None)
        message._active, message._array = True, "array"


def test_a_failed_allocation_frees_the_rooms_of_one_message(monkeypatch):
    failing, released, removed = [], [], []
    monkeypatch.setattr(rooms, "on_allocation_failure", failing.append)
    monkeypatch.setattr(rooms.loads, "idle", lambda: True)

    def collect():
        raise ExchangeError("a process is stopped")

    monkeypatch.setattr(rooms, "collect", collect)
    blocks = SimpleNamespace(remove=removed.append)
    made = rooms.Rooms(SimpleNamespace(release=released.append), blocks, None)
    for number, block in enumerate(("first", "second")):
        made.give_back(rooms.Room(None, number, 0, 8, -1, once=MagicMock()))
        made._freeable.append((block, number))
    (callback,) = failing
    callback()
    assert released == ["first", "second"]
    assert removed == [0, 1]
    assert not made._leaving


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
    monkeypatch.setattr(progress, "_pending", {})
    monkeypatch.setattr(progress, "_thread", ended)
    monkeypatch.setattr(progress.process, "start", start)
    levels = {"Query_thread": lambda: 3, "THREAD_MULTIPLE": 3}
    stub = SimpleNamespace(**levels, Is_finalized=lambda: False)
    monkeypatch.setattr(progress, "MPI", stub)
    progress.add(MagicMock(advance=advance), calls.append)
    (thread,) = started
    thread.join(300)
    assert calls == ["Isend", "advance"]
    progress.remove(stub)  # another thread has removed it before
