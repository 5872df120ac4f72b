"""The communicator of these tests: mpi4py's spelling."""

import ctypes
from contextlib import contextmanager

import pytest

from numba_symm import mpi
from numba_symm.environment import SIMULATED
from numba_symm.gpu import compiled
from numba_symm.mpi import posts
from numba_symm.mpi.rooms import BEGUN, FOUND, NO_ORDER, READY, Order


@pytest.fixture(scope="module")
def comm(world):
    made = mpi.Comm(world, timeout=20)
    yield made
    made.Free()


@pytest.fixture
def apart(world):
    """A communicator of mpi4py that no other test has wrapped."""
    made = world.Dup()
    yield made
    made.Free()


@pytest.fixture
def captured(monkeypatch):
    """What makes a communicator find that each stream is being captured, in a block."""
    if not SIMULATED:  # there, the stream of the arrays is none that is asked
        pytest.skip("captures of GPUs are in tests/gpu/test_mpi_on_gpus.py")

    def answer(stream, at):
        ctypes.c_int.from_address(at).value = 1

    function = compiled.callback(answer, 2)

    @contextmanager
    def of(post):
        with monkeypatch.context() as patch:
            patch.setattr(posts, "SIMULATED", False)
            patch.setattr(posts.streams, "is_capturing", lambda stream: True)
            port = post.words.port
            patch.setattr(port, "capturing", compiled.address_of(function))
            patch.setattr(port, "legacy", 1)  # and 0 is another stream
            yield

    return of


@pytest.fixture
def copying_late(monkeypatch):
    """What lets a communicator's receives start no copy, until they all begin.

    It returns the list of these copies, and what begins them.
    """

    def of(post):
        late, receive, send = [], post.receive, post._send

        def receive_later(order, stage, looks, alone):
            receive(order, FOUND, looks, alone)
            copied = Order.from_buffer_copy(order)
            there = post.words.holds(copied.slot, READY, copied.number)
            if copied.stage == FOUND < stage and there:
                order[0] = BEGUN
                late.append(order)
            return order[0]

        def begin():
            monkeypatch.setattr(post, "receive", receive)
            while late:
                late[0][0] = FOUND
                receive(late.pop(0), BEGUN, 1, 0)

        monkeypatch.setattr(post, "receive", receive_later)
        monkeypatch.setattr(post, "_send", lambda _, *given: send(NO_ORDER, *given))
        return late, begin

    return of
