"""A signal handler that raises right after a call of MPI loses no request and no lock.

Otherwise MPI would use memory after it was freed, or other ranks would wait.
"""

import ctypes
import signal
import subprocess
import sys
from functools import partial
from threading import RLock
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from numba_symm.engines import mpi as engine_of_mpi
from numba_symm.engines.protocol import Parcel
from numba_symm.launch import locks, ranks, waiting
from numba_symm.launch.waiting import Wait
from numba_symm.mpi import progress
from numba_symm.mpi.posts import Post
from numba_symm.mpi.progress import Channel

SIGNAL = signal.SIGUSR1


class Interrupt(BaseException):
    """What the signal's handler raises."""


class Memory:
    """Converts any memory of a call to the argument of C's ``raise``."""

    @staticmethod
    def from_param(given):
        return ctypes.c_int(SIGNAL)


CALL = ctypes.CDLL(None)["raise"]
CALL.argtypes = [Memory]


class Host:
    """Its calls return 0, as their request. Then Python runs the signal's handler."""

    rank, size = 0, 2
    Irecv = Isend = Issend = isend = Improbe = CALL


@pytest.fixture(autouse=True)
def interrupting():
    def handler(number, frame):
        raise Interrupt

    before = signal.signal(SIGNAL, handler)
    yield
    signal.signal(SIGNAL, before)


def interrupted(call, *args, **options):
    with pytest.raises(Interrupt):
        call(*args, **options)


def test_a_probe_of_a_message():
    """The next look for messages gets this one, and probes for no other."""
    post = object.__new__(Post)
    post.words, post._freed = SimpleNamespace(lock=RLock()), False
    post.coming, post._status = [], None
    post.mpi = Channel(Host(), [0, 0])
    interrupted(post.fetch)
    assert post.coming == [0]


@pytest.mark.parametrize("matched", [False, True])
def test_a_send_is_counted_and_its_data_kept(matched):
    unread, data, lists = [0, 0], np.empty(5, np.uint8), [[], [], []]
    channel = Channel(Host(), unread)
    for dest, requests in zip((1, 0, 1), lists, strict=True):
        interrupted(channel.send, data, dest, 0, matched, requests)
    kept = [([0], data, dest, 5) for dest in (1, 0, 1)]
    assert [*channel._kept.values()] == kept
    for _ in range(2):  # it may be asked again
        assert (channel.sent, unread, lists) == ([1, 2], [5, 10], 3 * [[0]])


@pytest.mark.parametrize("most", [4, 5])
def test_data_is_kept_until_its_request_has_ended(monkeypatch, most):
    monkeypatch.setattr(progress, "_MOST", most)
    comm, unread, requests = MPI.COMM_SELF.Dup(), [0], []
    channel, data = Channel(comm, unread), np.arange(5, dtype=np.uint8)
    channel.send(data, 0, 3, True, requests)
    channel.reap()
    assert (unread, channel.has_ended) == ([5], False)
    out, received = np.empty(5, np.uint8), []
    channel.receive(comm.Mprobe(0, 3), out, received)
    MPI.Request.Waitall(requests + received)
    channel.reap()
    assert (unread, channel.has_ended, out.tolist()) == ([0], True, [*range(5)])
    comm.Free()


def test_the_type_of_very_many_bytes_is_freed(monkeypatch):
    monkeypatch.setattr(progress, "_MOST", 2)
    with progress._spec(np.empty(5, np.uint8)) as (_, number, kind):
        assert (number, kind.size) == (1, 5)
    assert kind == MPI.DATATYPE_NULL


@pytest.mark.parametrize("kind", [engine_of_mpi._Send, engine_of_mpi._Receive])
def test_an_engine_keeps_what_uses_its_buffers(kind):
    room = engine_of_mpi.Direct()
    room.roomy = True  # otherwise a receive first probes for its message
    engine = SimpleNamespace(_comm=ranks.whole(Host(), owned=False), _room=room)
    memory = ctypes.create_string_buffer(8)
    move = kind(engine, 0, Parcel(1, ctypes.addressof(memory), 8), 0, None)
    interrupted(move.advance)
    assert move.requests == [0]


def test_a_value_for_other_ranks():
    step = waiting._Step(ranks.whole(Host(), owned=False), "value", Wait("", 0))
    interrupted(step._send, [1], "value")
    assert step._sends == [0]


def test_a_duplicate(monkeypatch):
    monkeypatch.setattr(locks, "_begun", [])
    monkeypatch.setattr(locks, "_key", int)
    found = {}
    attributes = {"Get_attr": found.get, "Set_attr": found.__setitem__}
    host = SimpleNamespace(Idup=partial(CALL, None), **attributes)
    interrupted(locks.duplicates, host, 2, Wait("Communicator", 0))
    assert locks._begun == [[0]]
    assert found[0] is locks._begun[0]


BEFORE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import numba_symm as ns
from numba_symm import mpi
for call in (ns.Communicator, mpi.Comm):
    try:
        call(MPI.COMM_WORLD)
    except ValueError as error:
        print(error)
"""


def test_communicators_before_mpi_is_initialized_are_refused():
    """MPI would end the process."""
    command = [sys.executable, "-c", BEFORE]
    run = {"capture_output": True, "text": True, "timeout": 100}
    lines = subprocess.run(command, **run, check=True).stdout.splitlines()
    text = "expected MPI to be initialized, got MPI.COMM_WORLD before MPI.Init()"
    starts = [line.partition(text)[0] for line in lines]
    assert starts == ["", "Comm: "]
