"""Postponed messages: what their copies follow, and who knows of them."""

from threading import RLock
from types import SimpleNamespace

import pytest

from numba_symm.mpi import postponed
from numba_symm.mpi.postponed import Postponed

NUMBER, DEST, NBYTES, COPIES = 3, 1, 64, 0xC0


@pytest.fixture
def steps():
    """The steps of a message, in their order."""
    return []


@pytest.fixture
def send(steps, monkeypatch):
    """A message that was announced, and has a room."""
    made = object.__new__(Postponed)

    def noting(name, answer=None):
        def step(*args):
            steps.append((name, *args))
            return answer

        return step

    made._number, made._dest, made._nbytes = NUMBER, DEST, NBYTES
    made._found = SimpleNamespace(address=0xA000)
    made._room = SimpleNamespace(address=0xB000)
    made._done, made._after = None, SimpleNamespace(wait=noting("wait"))
    made._placing, made.ended = [], False
    made.post = SimpleNamespace(
        _lock=RLock(),
        _give_back=noting("give back"),
        _receipts=SimpleNamespace(unread={NUMBER: None}),
        flow=SimpleNamespace(sent=noting("sent")),
        is_apart=lambda dest: False,
        outgoing=SimpleNamespace(
            stream=COPIES, event=noting("event", 7), settle=noting("settle")
        ),
    )
    monkeypatch.setattr(postponed.streams, "copy", noting("copy"))
    return made


def test_a_copy_is_counted_and_follows_what_wrote_the_array(send, steps):
    """Whoever looks at the flow of messages meanwhile knows of it."""
    send._start()
    assert steps == [
        ("sent", NUMBER, DEST, NBYTES),
        ("wait", COPIES),
        ("copy", 0xB000, 0xA000, NBYTES, COPIES),
        ("event", COPIES),
    ]
    assert send._done == 7


@pytest.mark.parametrize("placed", [False, True])
def test_a_message_that_is_dropped_expects_no_receipt_of_an_unknown_room(
    send, steps, placed
):
    room = send._room
    send._placing += [object()] * placed
    send.drop(ZeroDivisionError())
    assert (NUMBER in send.post._receipts.unread) == placed
    assert steps == ([] if placed else [("settle",), ("give back", room)])


def test_a_message_that_fails_on_its_way_to_another_island_is_received_by_nobody(
    send, steps
):
    """Its receiver sends no receipt, so this rank counts it no longer."""
    post = send.post
    post._freed, post._by_mpi, post.is_apart = False, {}, lambda dest: True
    post.flow.received = lambda number: steps.append(("received", number))
    post._data = SimpleNamespace(refuse_parts=lambda *args: steps.append(args))
    send._fail(ZeroDivisionError())
    assert steps == [("received", NUMBER), (NBYTES, DEST, NUMBER)]
    assert send.ended
