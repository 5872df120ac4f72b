"""Postponed messages and rooms, with stubs of what they use: order, threads, ends."""

import threading
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from numba_symm.errors import ArgumentError, CollectiveTimeout, ExchangeError
from numba_symm.gpu import streams
from numba_symm.mpi import p2p, progress, rooms
from numba_symm.mpi.buffers import Items
from numba_symm.mpi.messages import Post as Whole
from numba_symm.mpi.p2p import Sending
from numba_symm.mpi.rooms import LINE, MATCHED, READY
from numba_symm.mpi.words import BY_MPI, NOWHERE

NUMBER, DEST, NBYTES, SLOT, COPIES, ROOM = 7, 1, 64, 2, 0xC0, 0x2000


class Post(Whole):
    """What sends need of a communicator, whose steps are noted."""

    def __init__(self, steps):
        self.limit, self.timeout, self._freed, self.rank = NBYTES, 0, False, 0
        self.unread, self._lock, self.tags = [0, NBYTES], threading.RLock(), 100
        self.mpi = SimpleNamespace(reap=lambda: None)
        self.check_open = self.check = lambda *_: None
        self.steps = steps
        self.outgoing = SimpleNamespace(stream=COPIES)
        stored = defaultdict(int)

        def store(slot, word, number):
            stored[LINE * slot + word] = number

        def house(port, slot, stack, nbytes):
            self.unread[DEST] += nbytes
            return ROOM

        self.words = SimpleNamespace(
            values=stored,
            holds=lambda slot, word, number: stored[LINE * slot + word] >= number,
            end=lambda slot, number, why: (
                steps.append(why),
                store(slot, READY, number),
            ),
            store=store,
            port_at=0,
            port=SimpleNamespace(loans=defaultdict(lambda: -1)),
            loan=lambda slot: 4 * slot,
            house=house,
            reclaim=lambda port: None,
            lock=self._lock,
        )

    def idle(self, stream):
        return True

    def room_for(self, size):
        return self.steps != ["full"]


@pytest.fixture
def steps():
    """The steps of a message, in their order."""
    return []


class Message(Sending):
    """A message whose copies are noted."""

    def _fill(self, room, stream):
        # Whoever looks meanwhile knows of it.
        assert self.post.unread[DEST] == 2 * NBYTES
        self.post.steps.append((room, stream))


@pytest.fixture
def message(steps):
    """A message to rank 1, whose envelope was sent, and that a receive has matched."""
    made = Message()
    made.post, made.tag, made.slot, made.number = Post(steps), 3, SLOT, NUMBER
    made.outgoing = SimpleNamespace(dest=DEST, nbytes=NBYTES, size=NBYTES)
    made.outgoing.parcel = SimpleNamespace(stack=0)
    made._array, made._later = "array", True
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
    assert steps == [(ROOM, COPIES)]
    assert not message.advance()  # the array is in use
    assert message._array
    message.post.words.store(SLOT, READY, NUMBER)
    assert message.advance()
    assert len(steps) == 1
    assert message._array is None


def test_a_message_without_a_room_passes_through_mpi(message, steps, monkeypatch):
    """Its word tells so."""
    message.post.mpi.send = lambda *given: steps.append(given[1:4])
    message.outgoing.items = Items(None, None, 0, 0, None)
    monkeypatch.setattr(p2p, "on_host", lambda items, stream: items.array)
    steps.append("full")
    assert message.advance()
    assert steps[1:] == [(DEST, NUMBER, False), BY_MPI]
    assert message.post.unread[DEST] == NBYTES


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


def test_a_failed_message_is_reported_when_no_copy_writes_its_room(
    message, steps, monkeypatch
):
    """Its receiver learns that the message is nowhere."""

    def failing(*_):
        raise MemoryError

    message._fill = failing
    monkeypatch.setattr(p2p, "SIMULATED", False)
    monkeypatch.setattr(p2p.streams, "synchronize", steps.append)
    assert message.advance()
    assert steps == [COPIES, NOWHERE]
    with pytest.raises(MemoryError):
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
    message.post.words.store(SLOT, READY, NUMBER)
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
        made._rooms[number] = None, MagicMock()
        made._used.rooms[number] = number
        made._freeable.append((block, number))
    made._used.free = 2
    monkeypatch.setattr(rooms.loads, "idle", lambda: False)
    made.shrink()
    assert not released
    monkeypatch.setattr(rooms.loads, "idle", lambda: True)
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
