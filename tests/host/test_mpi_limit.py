"""Messages above the limit and rooms, with stubs of what they use."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from numba_symm.errors import CollectiveTimeout, ExchangeError
from numba_symm.mpi import rooms
from numba_symm.mpi.p2p import Sending


@pytest.mark.parametrize("matched", [False, True])
def test_only_a_send_that_needs_no_match_has_a_deadline(matched):
    """Another receive may match a synchronous send at any later time."""
    looks, message = iter([False] * 3 + [True] * 2), Sending()
    message.post = SimpleNamespace(
        timeout=1e-9, limit=8, rank=0, unread=[0, 8], check=lambda: None, words=None
    )
    message.outgoing, message.tag = SimpleNamespace(dest=1, nbytes=8, parcel=None), 3
    message._is_matched, message._over = lambda: next(looks), True
    message._matched = matched
    text = "message is sent nevertheless"
    with nullcontext() if matched else pytest.raises(CollectiveTimeout, match=text):
        message._complete(None)
    assert bool(message) != matched  # it may be waited for again


def test_a_failed_allocation_frees_the_rooms_of_one_message(monkeypatch):
    failing, released, removed = [], [], []
    monkeypatch.setattr(rooms, "on_allocation_failure", failing.append)
    monkeypatch.setattr(rooms.loads, "idle", lambda: True)

    def collect():
        raise ExchangeError("a process is stopped")

    monkeypatch.setattr(rooms, "collect", collect)
    blocks = SimpleNamespace(remove=removed.append)
    made = rooms.Rooms(SimpleNamespace(release=released.append), blocks, (), None)
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
