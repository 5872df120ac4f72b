"""Processes that are not ranks, and connect to a channel for file descriptors."""

import array
import contextlib
import os
import select
import socket

import pytest

from numba_symm.errors import (
    ExchangeError,
)
from numba_symm.launch import fds
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.waiting import Wait
from tests.descriptors import gathered, name_of, open_channel, open_fds
from tests.threads import ThreadComm, outcomes, run_ranks


@pytest.fixture(autouse=True)
def no_leak():
    """Every test gives back each descriptor."""
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def known_names(monkeypatch):
    """Let channels listen by names that other processes can compute."""
    monkeypatch.setattr(fds, "_name", name_of, raising=False)


def meet_strangers(monkeypatch, call):
    """Have ``call(name, token)`` precede the connection that rank 0 waits for."""
    connect = IpcChannel._connect

    def after_strangers(self, dst, name, token):
        call(name, token)
        connect(self, dst, name, token)

    monkeypatch.setattr(IpcChannel, "_connect", after_strangers)


def says(greeting, files=1):
    """Return a stranger that sends ``greeting(token)`` and the end of some pipes."""

    def call(name, token, calls):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(name)
        pipes = [os.pipe() for _ in range(files)]
        rights = array.array("i", [write for _, write in pipes])
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if files else []
        stranger.sendmsg([greeting(token)], control)
        fds.close_all(rights)
        calls.append((stranger, [read for read, _ in pipes]))

    return call


def is_silent(name, token, calls):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(name)
    calls.append((stranger, []))


def greeting(token, src=1):
    return fds._GREETING.pack(token, src)


STRANGERS = {
    "silent": is_silent,
    "wrong token": says(lambda token: greeting(b"\0" * 16)),
    "no such rank": says(lambda token: greeting(token, 7)),
    "the rank itself": says(lambda token: greeting(token, 0)),
    "longer": says(lambda token: greeting(token) + b"more"),
    "shorter": says(lambda token: greeting(token)[:-1]),
    "empty": says(lambda token: b"", 2),
    "many files": says(lambda token: b"hello", 50),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_ignored_and_its_files_closed(monkeypatch, kind):
    calls = []
    meet_strangers(monkeypatch, lambda *to: STRANGERS[kind](*to, calls))

    def play(comm):
        with open_channel(comm) as channel:
            return gathered(channel, f"{comm.rank}")

    assert run_ranks(2, play) == [["0", "1"]] * 2
    ((stranger, reads),) = calls
    stranger.close()
    assert all_closed(reads)


def all_closed(reads):
    try:
        return all(
            select.select([read], [], [], 0)[0] and os.read(read, 1) == b""
            for read in reads
        )
    finally:
        fds.close_all(reads)


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_who_takes_the_name_of_a_rank_that_ended_receives_nothing(known_names, kind):
    def play(comm):
        with (
            open_channel(comm) as channel,
            socket.socket(socket.AF_UNIX, kind) as thief,
        ):
            if comm.rank == 1:
                channel.close()
                thief.bind(name_of(1))
                if kind == socket.SOCK_SEQPACKET:
                    thief.listen()
            comm.barrier()
            if comm.rank == 0:
                with pytest.raises(ExchangeError, match="channel is closed"):
                    channel.send_fd(1, 0)
            comm.barrier()
            return bool(select.select([thief], [], [], 0)[0])

    assert run_ranks(2, play)[1] is False


@pytest.mark.parametrize("suspect", ["listener", "caller"])
def test_ranks_of_another_user_are_refused(monkeypatch, suspect):
    found = fds.credentials

    def another_user(end):
        who = "listener" if end.getpeername() else "caller"
        return found(end)._replace(uid=12345) if who == suspect else found(end)

    monkeypatch.setattr(fds, "credentials", another_user)
    for error in outcomes(2, open_channel):
        assert isinstance(error, ExchangeError)
        assert "belongs to user 12345" in str(error)


def test_another_users_calls_do_not_keep_a_rank_from_connecting(monkeypatch):
    """They fill the queue of rank 0, which admits and rejects them meanwhile."""
    held, found = [], fds.credentials

    def fill(name, token):
        with contextlib.suppress(BlockingIOError):
            while True:
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                held.append(stranger)
                stranger.setblocking(False)
                stranger.bind(f"\0stranger-{os.getpid()}-{len(held)}")
                stranger.connect(name)

    def user(end):
        is_stranger = (end.getpeername() or b"").startswith(b"\0stranger")
        return found(end)._replace(uid=12345) if is_stranger else found(end)

    def take(comm, src):  # polls, as ranks of mpi4py do
        while comm._boxes[comm.rank][src].empty():
            Wait("test", comm.rank).pause([src])
        return taken(comm, src)

    taken = ThreadComm._take
    monkeypatch.setattr(ThreadComm, "_take", take)
    monkeypatch.setattr(fds, "_BACKLOG", 100)
    monkeypatch.setattr(fds, "credentials", user)
    meet_strangers(monkeypatch, fill)

    def play(comm):
        with open_channel(comm) as channel:
            return gathered(channel, f"{comm.rank}")

    try:
        assert run_ranks(2, play) == [["0", "1"]] * 2
    finally:
        for each in held:
            each.close()
    assert len(held) > 100
