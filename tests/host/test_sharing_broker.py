"""The thread that sends descriptors on request, and the processes it serves."""

import os
import resource
import socket
import time

import pytest

from numba_symm.errors import ClosedError, ExchangeError
from numba_symm.sharing import broker
from numba_symm.sharing.broker import Address, Broker

SILENCE = 600  # seconds that a caller may be silent, unless a test says otherwise
SOON = SILENCE / 2


@pytest.fixture(scope="module")
def address():
    """Return the address of a broker that sends files with the requested contents."""

    def answer(what, file, slot, serial):
        if what == 7:
            raise ClosedError("it is over")
        if what == 8:
            raise OSError("no file")
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.write(fd, f"{what} {file} {slot} {serial}".encode())
        return fd, slot + serial

    return Broker(answer).address


def asked(address, what=0):
    """Return what is in the file that the broker gives, and the number."""
    with broker.asked(address, what, 1, 2, 3) as (fd, number):
        return os.pread(fd, 100, 0).decode(), number


def caller(address):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(SOON)
    made.connect(address.name)
    return made


def test_a_caller_gets_an_answer(address):
    assert asked(address) == ("0 1 2 3", 5)


def test_silent_callers_keep_nobody_out(address, monkeypatch):
    monkeypatch.setattr(broker, "_SILENCE", SILENCE)
    silent = [caller(address) for _ in range(broker._CALLERS + 20)]
    started = time.monotonic()
    assert asked(address) == ("0 1 2 3", 5)
    assert silent[0].recv(1) == b""  # the broker admits no more at a time
    assert time.monotonic() - started < SOON
    silent[-1].settimeout(0.1)
    with pytest.raises(TimeoutError):
        silent[-1].recv(1)
    for one in silent:
        one.close()


def test_a_caller_that_stays_silent_is_closed(address, monkeypatch):
    monkeypatch.setattr(broker, "_SILENCE", 0.2)
    with caller(address) as silent:
        started = time.monotonic()
        assert silent.recv(1) == b""
        assert time.monotonic() - started > 0.15


@pytest.mark.parametrize("request_", [b"x", b"x" * 1000])
def test_what_is_not_a_request_is_not_answered(address, request_):
    with caller(address) as stranger:
        stranger.send(request_)
        assert stranger.recv(1) == b""
    assert asked(address) == ("0 1 2 3", 5)


def test_refusals_and_failures_are_distinguished(address):
    with pytest.raises(
        ClosedError, match=r"refuses .*: it was not shared by this process"
    ):
        asked(Address(address.name, bytes(16)))
    with pytest.raises(ClosedError, match=r"refuses .*: it is over"):
        asked(address, 7)
    with pytest.raises(ExchangeError, match=r"cannot .*: OSError: no file"):
        asked(address, 8)
    with pytest.raises(ClosedError, match="has ended"):
        asked(Address(b"\0numba_symm-nobody", address.token))


@pytest.mark.parametrize(
    ("suspect", "text"),
    [("producer", "belongs to another user"), ("caller", "has ended")],
)
def test_other_users_are_refused(address, monkeypatch, suspect, text):
    found = broker.credentials

    def another_user(end):
        who = "producer" if end.getpeername() else "caller"
        return found(end)._replace(uid=12345) if who == suspect else found(end)

    monkeypatch.setattr(broker, "credentials", another_user)
    with pytest.raises(ClosedError, match=text):
        asked(address)


def test_too_many_open_files_raise(address):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # every descriptor below it is in use
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(ExchangeError, match="open files"):
            asked(address)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert asked(address) == ("0 1 2 3", 5)
