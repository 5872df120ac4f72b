import array
import errno
import os
import resource
import select
import socket
import time
from pathlib import Path

import pytest

from numba_symm.errors import ArgumentError, ClosedError, ExchangeError
from numba_symm.launch import fds
from numba_symm.launch.exchange import StoreExchange
from numba_symm.launch.fds import IpcChannel
from tests.threads import outcomes, run_ranks


@pytest.fixture(autouse=True)
def no_leak():
    """Every test, its error paths included, gives back each descriptor."""
    before = open_fds()
    yield
    assert open_fds() == before


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


def open_channel(comm, timeout=10.0, name="test"):
    return IpcChannel(StoreExchange(comm, name), timeout)


def memory(content):
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, content.encode())
    return fd


def content(fd):
    """Return what is in ``fd``'s file, and close it."""
    try:
        return os.pread(fd, 100, 0).decode()
    finally:
        os.close(fd)


def gathered(channel, text):
    fd = memory(text)
    try:
        return [content(received) for received in channel.all_gather_fds(fd)]
    finally:
        os.close(fd)


def test_eight_ranks_gather_each_others_files():
    def play(comm):
        with open_channel(comm) as channel:
            return gathered(channel, f"file of rank {comm.rank}")

    assert run_ranks(8, play) == [[f"file of rank {r}" for r in range(8)]] * 8


def test_one_rank_gathers_its_own_file():
    def play(comm):
        with open_channel(comm) as channel:
            return gathered(channel, "mine"), content(channel.broadcast_fds(0, own))

    own = memory("own")
    assert run_ranks(1, play) == [(["mine"], "own")]
    os.close(own)


def test_many_rounds_need_nothing_between_them():
    def play(comm):
        with open_channel(comm) as channel:
            return [gathered(channel, f"{comm.rank}: {i}") for i in range(50)]

    expected = [[f"{r}: {i}" for r in range(4)] for i in range(50)]
    assert run_ranks(4, play) == [expected] * 4


def test_ranks_that_all_send_first_do_not_block_each_other():
    count = 4 * queue_length()

    def play(comm):
        with open_channel(comm) as channel:
            for i in range(count):
                fd = memory(f"{comm.rank}: {i}")
                channel.send_fd(1 - comm.rank, fd)
                os.close(fd)
            return [content(channel.recv_fd(1 - comm.rank)) for _ in range(count)]

    first, second = run_ranks(2, play)
    assert first == [f"1: {i}" for i in range(count)]
    assert second == [f"0: {i}" for i in range(count)]


def queue_length():
    return int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())


def test_descriptors_are_taken_by_source_whatever_order_they_came_in():
    def play(comm):
        with open_channel(comm) as channel:
            if comm.rank > 0:
                for turn in "ab":
                    fd = memory(f"{comm.rank}{turn}")
                    channel.send_fd(0, fd)
                    os.close(fd)
                comm.barrier()
                return None
            comm.barrier()
            return [content(channel.recv_fd(src)) for src in (2, 2, 1, 1)]

    assert run_ranks(3, play)[0] == ["2a", "2b", "1a", "1b"]


def test_two_channels_at_once_keep_apart():
    def play(comm):
        with open_channel(comm, name="a") as a, open_channel(comm, name="b") as b:
            fd, other = memory(f"a{comm.rank}"), memory(f"b{comm.rank}")
            peer = 1 - comm.rank
            b.send_fd(peer, other)
            a.send_fd(peer, fd)
            os.close(fd)
            os.close(other)
            return content(a.recv_fd(peer)), content(b.recv_fd(peer))

    assert run_ranks(2, play) == [("a1", "b1"), ("a0", "b0")]


@pytest.mark.parametrize("src", [0, 2])
def test_a_broadcast_reaches_every_rank(src):
    def play(comm):
        with open_channel(comm) as channel:
            fd = memory("root's") if comm.rank == src else None
            received = channel.broadcast_fds(src, fd)
            assert received != fd
            if fd is not None:
                os.close(fd)
            return content(received)

    assert run_ranks(3, play) == ["root's"] * 3


def test_received_descriptors_are_not_inherited():
    def play(comm):
        with open_channel(comm) as channel:
            fd = memory("mine")
            received = channel.all_gather_fds(fd)
            inheritable = [os.get_inheritable(each) for each in received]
            fds._close_all([fd, *received])
            return inheritable

    assert run_ranks(2, play) == [[False, False]] * 2


@pytest.mark.parametrize("tmpdir", [None, "/nowhere/" + "x" * 200])
def test_no_tmpdir_is_needed(monkeypatch, tmpdir):
    monkeypatch.delenv("TMPDIR", raising=False)
    if tmpdir:
        monkeypatch.setenv("TMPDIR", tmpdir)
    test_one_rank_gathers_its_own_file()


def message(channel, token=None, src=0):
    return fds._HEADER.pack(channel._token if token is None else token, src)


def strangers_call(channel, data, count=1):
    """Send ``data`` and the end of ``count`` pipes from another socket.

    Returns the read ends: they are at their end once the receiver has closed its own.
    """
    pipes = [os.pipe() for _ in range(count)]
    rights = array.array("i", [write for _, write in pipes])
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendmsg([data], control, 0, channel._socket.getsockname())
    fds._close_all(rights)
    return [read for read, _ in pipes]


def all_closed(reads):
    try:
        return all(
            select.select([read], [], [], 0)[0] and os.read(read, 1) == b""
            for read in reads
        )
    finally:
        fds._close_all(reads)


STRANGERS = {
    "wrong token": lambda channel: (message(channel, token=b"\0" * 16), 1),
    "no such rank": lambda channel: (message(channel, src=7), 1),
    "longer": lambda channel: (message(channel) + b"more", 1),
    "shorter": lambda channel: (message(channel)[:-1], 1),
    "empty": lambda channel: (b"", 2),
    "many": lambda channel: (b"hello", 50),
    "none": lambda channel: (b"hello", 0),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_strangers_message_is_ignored_and_its_files_closed(kind):
    def play(comm):
        with open_channel(comm) as channel:
            reads = strangers_call(channel, *STRANGERS[kind](channel))
            comm.barrier()  # the stranger comes first
            received = gathered(channel, f"{comm.rank}")
            return received, all_closed(reads)

    assert run_ranks(2, play) == [(["0", "1"], True)] * 2


def test_another_users_message_is_ignored(monkeypatch):
    def play(comm):
        with open_channel(comm, timeout=0.1) as channel:
            reads = strangers_call(channel, message(channel))
            monkeypatch.setattr(os, "getuid", lambda: 12345)
            with pytest.raises(ExchangeError, match=r"waited 0\.1 s"):
                channel.recv_fd(0)
            return all_closed(reads)

    assert run_ranks(1, play) == [True]


def test_strangers_do_not_put_off_the_deadline():
    def play(comm):
        with open_channel(comm, timeout=0.3) as channel:
            receive = channel._receive

            def chatter(seconds):
                strangers_call(channel, b"hello", 0)
                receive(seconds)

            channel._receive = chatter
            started = time.monotonic()
            with pytest.raises(ExchangeError):
                channel.recv_fd(0)
            return time.monotonic() - started

    (seconds,) = run_ranks(1, play)
    assert 0.3 <= seconds < 3


@pytest.mark.parametrize("count", [0, 2, 50])
def test_a_ranks_message_without_one_descriptor_is_an_error(count):
    def play(comm):
        with open_channel(comm) as channel:
            reads = strangers_call(channel, message(channel), count)
            with pytest.raises(ExchangeError, match="that rank 0 sent to rank 0 was"):
                channel.recv_fd(0)
            return all_closed(reads)

    assert run_ranks(1, play) == [True]


@pytest.mark.parametrize(("sent", "free"), [(1, 0), (2, 1)])
def test_a_receiver_with_too_many_open_files_is_told(sent, free):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def play(comm):
        with open_channel(comm) as channel:
            reads = strangers_call(channel, message(channel), sent)
            lowest = os.dup(0)  # every descriptor below it is in use
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
            try:
                with pytest.raises(ExchangeError, match="too many open files"):
                    channel.recv_fd(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            return all_closed(reads)

    assert run_ranks(1, play) == [True]


def test_a_silent_peer_is_named_at_the_deadline():
    def play(comm):
        with open_channel(comm, timeout=0.2) as channel:
            if comm.rank == 1:
                channel.recv_fd(0)
            comm.barrier()

    _, error = outcomes(2, play)
    assert isinstance(error, ExchangeError)
    assert "rank 1 waited 0.2 s for a file descriptor from rank 0" in str(error)


def test_a_gather_that_fails_closes_what_it_has_received():
    def play(comm):
        with open_channel(comm, timeout=0.2) as channel:
            try:
                if comm.rank == 0:
                    channel.all_gather_fds(0)
                elif comm.rank == 1:
                    channel.send_fd(0, 0)
            finally:
                comm.barrier()

    error, *_ = outcomes(3, play)
    assert isinstance(error, ExchangeError)
    assert "from rank 2" in str(error)


def test_a_peer_that_never_receives_is_named_at_the_deadline():
    def play(comm):
        with open_channel(comm, timeout=0.2) as channel:
            try:
                if comm.rank == 0:
                    for _ in range(10_000):
                        channel.send_fd(1, 0)
            finally:
                comm.barrier()

    error, _ = outcomes(2, play)
    assert isinstance(error, ExchangeError)
    assert "rank 0 waited 0.2 s to send a file descriptor to rank 1" in str(error)


def test_a_peer_that_is_gone_is_told():
    def play(comm):
        with open_channel(comm) as channel:
            if comm.rank == 1:
                channel.close()
            comm.barrier()
            if comm.rank == 0:
                channel.send_fd(1, 0)

    error, _ = outcomes(2, play)
    assert isinstance(error, ExchangeError)
    assert "rank 0 could not send a file descriptor to rank 1, whose" in str(error)
    assert "network namespace" in str(error)


def test_what_is_no_descriptor_is_told():
    def play(comm):
        with open_channel(comm) as channel:
            channel.send_fd(0, 999_999)

    (error,) = outcomes(1, play)
    assert isinstance(error, ExchangeError)
    assert "Bad file descriptor" in str(error)


@pytest.mark.parametrize("peer", [-1, 2])
def test_ranks_that_do_not_exist_are_refused(peer):
    def play(comm):
        with open_channel(comm) as channel:
            for call in (
                lambda: channel.send_fd(peer, 0),
                lambda: channel.recv_fd(peer),
                lambda: channel.broadcast_fds(peer, 0),
            ):
                with pytest.raises(ArgumentError, match=f"rank {peer}: there are"):
                    call()

    run_ranks(2, play)


def test_a_broadcast_without_a_file_is_refused():
    def play(comm):
        with open_channel(comm) as channel:
            channel.broadcast_fds(0)

    (error,) = outcomes(1, play)
    assert isinstance(error, ArgumentError)


def test_closing_twice_is_fine_and_using_it_then_is_refused():
    def play(comm):
        channel = open_channel(comm)
        channel.close()
        channel.close()
        channel.recv_fd(0)

    (error,) = outcomes(1, play)
    assert isinstance(error, ClosedError)


def test_closing_closes_descriptors_that_nobody_took():
    def play(comm):
        with open_channel(comm) as channel:
            for fd in (memory("first"), memory("second")):
                channel.send_fd(1 - comm.rank, fd)
                os.close(fd)
            comm.barrier()
            os.close(channel.recv_fd(1 - comm.rank))
            channel._receive(1)
            return len(channel._stash[1 - comm.rank])

    assert run_ranks(2, play) == [1, 1]


def test_a_rank_without_a_socket_fails_all(monkeypatch):
    bind = fds._bind
    turns = iter(["refused", "bound", "bound"])

    def refusing_bind(sock):
        bind(sock)
        if next(turns) == "refused":
            raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(fds, "_bind", refusing_bind)
    for error in outcomes(3, open_channel):
        assert "failed on 1 of 3 ranks" in str(error)
        assert "Operation not permitted" in str(error)
