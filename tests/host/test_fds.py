import errno
import os
import resource
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from numba_symm.errors import (
    ArgumentError,
    ClosedError,
    CollectiveTimeout,
    ExchangeError,
)
from numba_symm.launch import fds, waiting
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.store import StoreExchange
from tests.descriptors import content, gathered, memory, open_channel, open_fds
from tests.threads import outcomes, run_ranks


@pytest.fixture(autouse=True)
def no_leak():
    """Every test, its error paths included, gives back each descriptor."""
    before = open_fds()
    yield
    assert open_fds() == before


def test_one_rank_gathers_its_own_file():
    def play(comm):
        with open_channel(comm) as channel:
            return gathered(channel, "mine"), content(channel.broadcast_fds(0, own))

    own = memory("own")
    assert run_ranks(1, play) == [(["mine"], "own")]
    os.close(own)


def test_many_epochs_need_nothing_between_them():
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
            fds.close_all([fd, *received])
            return inheritable

    assert run_ranks(2, play) == [[False, False]] * 2


@pytest.mark.parametrize("tmpdir", [None, "/nowhere/" + "x" * 200])
def test_no_tmpdir_is_needed(monkeypatch, tmpdir):
    monkeypatch.delenv("TMPDIR", raising=False)
    if tmpdir:
        monkeypatch.setenv("TMPDIR", tmpdir)
    test_one_rank_gathers_its_own_file()


def test_a_descriptor_that_was_lost_raises():
    def play(comm):
        with open_channel(comm) as channel:
            comm.barrier()
            if comm.rank == 1:
                return channel._links.ends[0].send(fds._NUMBER.pack(-1))
            with pytest.raises(ExchangeError, match="that rank 1 sent to rank 0 was"):
                channel.recv_fd(1)
            return None

    run_ranks(2, play)


@contextmanager
def files_left(count):
    """Limit how many files this process may open; undone at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # every descriptor below it is in use
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_raise_and_are_undone():
    def play(comm):
        with open_channel(comm) as channel:
            fd = memory("mine")
            channel.send_fd(1 - comm.rank, fd)
            comm.barrier()
            if comm.rank == 0:
                calls = {
                    "lost": lambda: channel.recv_fd(1),
                    "all_gather_fds": lambda: channel.all_gather_fds(fd),
                    "broadcast_fds": lambda: channel.broadcast_fds(0, fd),
                    "send_fd": lambda: channel.send_fd(0, fd),
                }
                with files_left(0):
                    for call in calls.values():
                        with pytest.raises(ExchangeError, match="too many open files"):
                            call()
            comm.barrier()  # a file that rank 1 closes is one that rank 0 may open
            os.close(fd)

    run_ranks(2, play)


def test_too_many_open_files_while_connecting_raise(monkeypatch):
    accept = IpcChannel._accept

    def without_files(self, *args):
        with files_left(0):
            accept(self, *args)

    monkeypatch.setattr(IpcChannel, "_accept", without_files)
    for error in outcomes(2, open_channel):
        assert isinstance(error, ExchangeError)
        assert "too many open files" in str(error)


def test_a_silent_peer_is_named_at_the_deadline():
    def play(comm):
        with open_channel(comm, 600) as channel:
            channel._exchange.timeout = 0.2
            if comm.rank == 1:
                channel.recv_fd(0)
            comm.barrier()

    _, error = outcomes(2, play)
    assert isinstance(error, CollectiveTimeout)
    text = "rank 1 waited for rank 0 in recv_fd (set-up timeout: 0.2 s)"
    assert str(error) == text
    assert (error.ranks, error.operation) == ((1, 0), "recv_fd")


def test_a_late_peer_is_waited_for_and_named_after_a_minute(monkeypatch):
    """The wait has no deadline unless the environment sets one. It warns once."""
    monkeypatch.delenv("NUMBA_SYMM_SETUP_TIMEOUT", raising=False)
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)

    def play(comm):
        with open_channel(comm, timeout=None) as channel:
            comm.barrier()
            if comm.rank == 0:
                time.sleep(0.4)
                channel.send_fd(1, 0)
                return None
            with pytest.warns(RuntimeWarning) as warned:
                os.close(channel.recv_fd(0))
            return [str(each.message) for each in warned]

    _, texts = run_ranks(2, play)
    (text,) = texts
    assert text.startswith("rank 1 has waited for rank 0 in recv_fd for 0.1 s; NUMBA")
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", "7")
    (timeout,) = run_ranks(1, lambda comm: StoreExchange(comm, "test").timeout)
    assert timeout == 7


def test_a_gather_that_fails_closes_what_it_has_received():
    def play(comm):
        with open_channel(comm, 600) as channel:
            channel._exchange.timeout = 0.2
            try:
                if comm.rank == 0:
                    channel.all_gather_fds(0)
                elif comm.rank == 1:
                    channel.send_fd(0, 0)
            finally:
                comm.barrier()

    error, *_ = outcomes(3, play)
    assert isinstance(error, CollectiveTimeout)
    assert "for rank 2" in str(error)


def test_a_peer_that_never_receives_is_named_at_the_deadline():
    def play(comm):
        with open_channel(comm, 600) as channel:
            channel._exchange.timeout = 0.2
            try:
                if comm.rank == 0:
                    for _ in range(10_000):
                        channel.send_fd(1, 0)
            finally:
                comm.barrier()

    error, _ = outcomes(2, play)
    assert isinstance(error, CollectiveTimeout)
    assert "rank 0 waited for rank 1 in send_fd" in str(error)


def test_a_peer_that_has_ended_raises_after_what_it_sent():
    def play(comm):
        with open_channel(comm) as channel:
            if comm.rank == 0:
                channel.send_fd(1, 0)  # rank 1 never receives it
                comm.barrier()
            else:
                fd = memory("rank 1's")
                channel.send_fd(0, fd)
                os.close(fd)
                comm.barrier()
                channel.close()
            comm.barrier()
            if comm.rank == 1:
                return
            with pytest.raises(
                ExchangeError, match="to rank 1, whose channel is closed"
            ):
                channel.send_fd(1, 0)
            assert content(channel.recv_fd(1)) == "rank 1's"
            for call in (lambda: channel.recv_fd(1), lambda: channel.send_fd(1, 0)):
                with pytest.raises(ExchangeError, match="rank 1, whose channel is"):
                    call()

    run_ranks(2, play)


def test_what_is_not_a_descriptor_raises():
    def play(comm):
        with open_channel(comm) as channel:
            for dst in range(comm.size):
                with pytest.raises(ExchangeError, match="Bad file descriptor"):
                    channel.send_fd(dst, 999_999)
                for fd in ("x", None, 1.5, 1 << 40):
                    with pytest.raises(
                        ArgumentError, match="expected a file descriptor"
                    ):
                        channel.send_fd(dst, fd)

    run_ranks(2, play)


@pytest.mark.parametrize("peer", [-1, 2, "x", None])
def test_ranks_that_do_not_exist_are_refused(peer):
    def play(comm):
        text = f"expected a rank from 0 to 1, got {peer!r}"
        with open_channel(comm) as channel:
            for call in (
                lambda: channel.send_fd(peer, 0),
                lambda: channel.recv_fd(peer),
                lambda: channel.broadcast_fds(peer, 0),
            ):
                with pytest.raises(ArgumentError, match=text):
                    call()

    run_ranks(2, play)


def test_closing_twice_is_fine_and_using_it_then_is_refused():
    def play(comm):
        channel = open_channel(comm)
        channel.send_fd(1 - comm.rank, 0)
        comm.barrier()
        channel.close()
        channel.close()
        channel.discard()  # there is nothing left
        for call in (lambda: channel.recv_fd(0), lambda: channel.send_fd(0, 0)):
            with pytest.raises(ClosedError, match="was closed"):
                call()

    run_ranks(2, play)


class Part:
    """Some of the ranks, which exchange nothing but descriptors."""

    allgather = barrier = None

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def beside(channel, members, rank, number):
    part = Part(members.index(rank), len(members))
    return channel.beside(StoreExchange(part, "part", 10.0), members, number)


def test_channels_share_sockets_and_keep_their_descriptors_apart():
    """Ranks 2 and 0 of three have more channels; the first one is closed first."""

    def play(comm):
        first = open_channel(comm)
        sockets = list(first._links.ends.values())
        assert len(sockets) == 2
        if comm.rank == 1:
            comm.barrier()
            first.close()
            return None
        second = beside(first, (2, 0), comm.rank, 5)
        third = beside(second, (1, 0), second.rank, 6)  # of ranks 0 and 2
        for channel in (third, first, second):
            fd = memory(f"{channel._number} of {comm.rank}")
            channel.send_fd(2 - comm.rank if channel is first else 1 - channel.rank, fd)
            os.close(fd)
        found = [content(second.recv_fd(1 - second.rank))]  # the last of three
        comm.barrier()
        first.close()  # with what has arrived for it
        found.append(content(third.recv_fd(1 - third.rank)))
        second.close()
        assert all(end.fileno() >= 0 for end in sockets)
        third.close()
        assert all(end.fileno() < 0 for end in sockets)
        return found

    found = run_ranks(3, play)
    assert found == [["5 of 2", "6 of 2"], None, ["5 of 0", "6 of 0"]]


def test_a_rank_without_a_socket_fails_all(monkeypatch):
    made = fds._socket
    turns = iter(["refused", "made", "made"])

    def refused_socket():
        if next(turns) == "refused":
            raise OSError(errno.EPERM, "Operation not permitted")
        return made()

    monkeypatch.setattr(fds, "_socket", refused_socket)
    for error in outcomes(3, open_channel):
        assert "failed on 1 of 3 ranks" in str(error)
        assert "Operation not permitted" in str(error)
