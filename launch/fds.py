"""Channels for file descriptors between the ranks of a node. Uses no CUDA.

Each pair of ranks has a connected socket. The ranks find each other by random names in
Linux' abstract namespace. So they need neither files nor TMPDIR, and no name
remains after a crash. Abstract names belong to a network namespace, which ranks must
share. The names are closed when all ranks are connected. So a process that takes the
name of a rank that has ended receives nothing.
"""

import errno
import functools
import os
import secrets
import select
import socket
import struct
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import NamedTuple, Self

from numba_symm import arguments, process
from numba_symm.errors import ArgumentError, ClosedError, ExchangeError
from numba_symm.launch import waiting
from numba_symm.launch.store import StoreExchange

_UCRED = struct.Struct("=iII")


class Credentials(NamedTuple):
    """The process at the other end of a connection, as the Linux kernel reports it."""

    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    """Return the credentials of the other end of a connected Unix socket.

    Its process id is that of this process' pid namespace; 0 for a process outside it.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Credentials._make(_UCRED.unpack(found))


class Links:
    """Connected sockets to other ranks, and what has arrived, for several channels.

    Attributes:
        ends: by the rank's number in the first channel, until that end closes.
        stash: by channel and rank, what has arrived; None: a descriptor that was lost.
        users: how many channels have not been closed.
        lock: held by a thread that receives, for any channel.
    """

    def __init__(self) -> None:
        self.ends: dict[int, socket.socket] = {}
        self.stash: defaultdict[tuple[int, int], deque[int | None]]
        self.stash = defaultdict(deque)
        self.users = 1
        self.lock = threading.RLock()

    def drop(self, number: int) -> None:
        """Close what has arrived for a channel; with the last channel, the sockets."""
        with self.lock:
            self.users -= 1
            while not self.users and self.ends:
                self.ends.popitem()[1].close()
            kept = [key for key in self.stash if key[0] == number or not self.users]
            for key in kept:
                close_all(self.stash.pop(key))


def descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that were sent with a message."""
    fds = array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_all(fds: Iterable[int | None]) -> None:
    """Close descriptors; None stands for one that was lost."""
    for fd in fds:
        if fd is not None:
            os.close(fd)


_GREETING = struct.Struct("=16sI")  # the listening rank's token, the caller's rank
_NUMBER = struct.Struct("=q")  # of a channel, beside each descriptor
_CONTROL_SPACE = socket.CMSG_SPACE(4)
_BACKLOG = 1024
_STRANGERS = 64  # calls beside those of ranks that are kept until ranks are known

# The receiver's queue is full, or too many descriptors of this user are in transit.
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED)
_RETRY_SECONDS = 0.001
_LOOK_SECONDS = 0.02


def _too_many() -> str:
    return f"this process may have too many open files; {process.advice()}"


class IpcChannel:
    """Sends file descriptors between ranks. Several channels may exist.

    Construction is collective. If a later call fails on one rank, it raises on that
    rank only: wrap calls in ``exchange.agreed`` to raise on every rank. Descriptors
    from one sender arrive in the order in which they were sent. The caller closes every
    descriptor that it receives. Child processes inherit none of these. Only one thread
    at a time may use a channel.

    A send or a receive waits as long as a step of ``exchange`` does.

    Args:
        exchange: the ranks; it sends the sockets' names.

    Raises:
        ArgumentError: ``exchange`` is not a StoreExchange.
        SymmError: on all ranks, if two ranks could not be connected, or belong to
            different users.
    """

    def __init__(self, exchange: StoreExchange) -> None:
        if not isinstance(exchange, StoreExchange):
            raise ArgumentError(
                f"IpcChannel: expected a StoreExchange, got {exchange!r}; pass "
                "StoreExchange(comm, name)"
            )
        self._begin(exchange, Links(), range(exchange.size), -1)
        token = secrets.token_bytes(16)
        with ExitStack() as undo, ExitStack() as listening:
            undo.callback(self.close)
            with exchange.agreed("opening a channel for file descriptors"):
                listener = listening.enter_context(_socket())
                listener.bind(_name(self.rank))
                listener.listen(_BACKLOG)
            # After this, every socket listens.
            names = exchange.all_gather(
                (listener.getsockname(), token),
                "names of the channels for file descriptors",
            )
            # Other processes may call, too, and fill the queue of those who wait.
            admit = functools.partial(self._admit, listener)
            with (
                waiting.watching(admit),
                exchange.agreed("connecting channels for file descriptors"),
            ):
                for dst in range(self.rank):
                    self._connect(dst, *names[dst])
            # After that agreement, every caller has connected and sent its greeting.
            with exchange.agreed("accepting channels for file descriptors"):
                self._accept(listener, token)
            undo.pop_all()
        process.watch(self)

    def _begin(
        self,
        exchange: StoreExchange,
        links: Links,
        members: Sequence[int],
        number: int,
    ) -> None:
        """Set the attributes: which sockets it uses, and for which of their ranks."""
        self.rank = exchange.rank
        self.size = exchange.size
        self._exchange = exchange
        self._links = links
        self._members = members
        self._number = number
        self._closed = False
        self._callers: list[socket.socket] = []  # accepted, and not known to be ranks
        process.note(self, exchange.call or exchange.prefix)

    def beside(
        self, exchange: StoreExchange, members: Sequence[int], number: int
    ) -> "IpcChannel":
        """Return a channel between some of the ranks, over the same sockets. Local.

        Either channel may be closed first, and threads may use both simultaneously.

        Args:
            exchange: the ranks.
            members: their numbers in this channel.
            number: the same on all of them; from 0, and of no other open channel of
                these sockets.
        """
        made = IpcChannel.__new__(IpcChannel)
        with self._links.lock:
            self._links.users += 1
        members = [self._members[member] for member in members]
        made._begin(exchange, self._links, members, number)
        process.watch(made)
        return made

    def _stashed(self, rank: int) -> "deque[int | None]":
        """Return what has arrived from a rank for this channel."""
        return self._links.stash[self._number, self._members[rank]]

    def send_fd(self, dst: int, fd: int) -> None:
        """Send a descriptor of ``fd``'s file to rank ``dst``; ``fd`` stays open.

        Raises:
            ArgumentError: ``dst`` is not a rank, or ``fd`` not a descriptor.
            ExchangeError: ``dst`` has ended or closed its channel.
            CollectiveTimeout: ``dst`` did not receive in time.
            CollectiveError: a rank has failed.
        """
        dst = self._checked_rank(dst, "send_fd: dst")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _checked(fd))]
        if dst == self.rank:
            self._stashed(dst).append(_duplicate(fd))
            return
        wait = self._exchange.wait("send_fd")
        while True:
            end = self._links.ends.get(self._members[dst])
            if end is None:
                raise ExchangeError(f"{self._unsent(dst)}, {_ENDED}")
            try:
                end.sendmsg([_NUMBER.pack(self._number)], rights, socket.MSG_NOSIGNAL)
                return
            except OSError as error:
                if error.errno in _GONE:
                    raise ExchangeError(f"{self._unsent(dst)}, {_ENDED}") from error
                if error.errno not in _FULL:
                    text = f"{self._unsent(dst)}: {error.strerror}"
                    raise ExchangeError(text) from error
            self._exchange.look(wait, [dst])
            if self._exchange.is_ahead(dst):
                raise ExchangeError(f"{self._unsent(dst)}, which is at a later step")
            # Make room, because the peer may also be waiting to send to this rank.
            self._receive(_RETRY_SECONDS)

    def recv_fd(self, src: int) -> int:
        """Return the next descriptor from rank ``src``.

        Raises:
            ArgumentError: ``src`` is not a rank.
            ExchangeError: ``src`` has ended or closed its channel, or the descriptor
                was lost because this process has too many open files.
            CollectiveTimeout: none arrived in time.
            CollectiveError: a rank has failed.
        """
        src = self._checked_rank(src, "recv_fd: src")
        wait = self._exchange.wait("recv_fd")
        stashed = self._stashed(src)
        while not stashed:
            if src != self.rank and self._members[src] not in self._links.ends:
                raise ExchangeError(
                    f"rank {self.rank} waits for a file descriptor from rank {src}, "
                    f"{_ENDED}"
                )
            self._exchange.look(wait, [src])
            ahead = self._exchange.is_ahead(src)
            arrived = self._receive(0 if ahead else _LOOK_SECONDS)
            with self._links.lock:  # another thread may have received it
                arrived = arrived or bool(stashed)
            if ahead and not arrived:
                raise ExchangeError(
                    f"rank {self.rank} waits for a file descriptor from rank {src}, "
                    "which has sent none"
                )
        found = stashed.popleft()
        if found is None:
            raise ExchangeError(
                f"the file descriptor that rank {src} sent to rank {self.rank} was "
                f"lost: {_too_many()}"
            )
        return found

    def all_gather_fds(self, fd: int) -> list[int]:
        """Return a descriptor of every rank's file, in rank order. Collective.

        This rank's entry is a duplicate of ``fd``, so that every entry may be closed.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        for dst in others:
            self.send_fd(dst, fd)
        with ExitStack() as undo:
            gathered = {self.rank: _duplicate(fd)}
            undo.callback(os.close, gathered[self.rank])
            for src in others:
                gathered[src] = self.recv_fd(src)
                undo.callback(os.close, gathered[src])
            undo.pop_all()
        return [gathered[rank] for rank in range(self.size)]

    def broadcast_fds(self, src: int, fd: int | None = None) -> int:
        """Return a descriptor of rank ``src``'s file ``fd``. Collective.

        Args:
            src: the rank that sends; the same on all ranks.
            fd: the descriptor that ``src`` sends; unused on other ranks. ``src`` gets a
                duplicate of it.
        """
        src = self._checked_rank(src, "broadcast_fds: src")
        if self.rank != src:
            return self.recv_fd(src)
        if fd is None:
            raise ArgumentError(
                f"broadcast_fds: expected fd on rank {src}, which sends, got None"
            )
        for dst in range(self.size):
            if dst != src:
                self.send_fd(dst, fd)
        return _duplicate(fd)

    def discard(self) -> None:
        """Close all descriptors that have arrived and that no call has returned. Local.

        Call it after a failed collective that every rank has left, because then none is
        in transit. After ``close`` there are none.
        """
        while self._receive(0):
            pass
        self._close_stashed()

    def close(self) -> None:
        """Close the channel, and all descriptors that no call has returned. Idempotent.

        The sockets stay open until the last channel that uses them is closed.
        """
        if self._closed:
            return
        self._closed = True
        process.forget(self)
        self._reject(self._callers)
        self._links.drop(self._number)

    def disown(self) -> None:
        """Close a forked child's copies of the sockets, which its parent owns."""
        self._links.lock = threading.RLock()  # another thread may have held it
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _checked_rank(self, peer: int, what: str) -> int:
        last = self.size - 1
        rank = arguments.integer(
            peer, what, f"a rank from 0 to {last}", 0, last, "pass one of these"
        )
        if self._closed:
            raise ClosedError("the channel for file descriptors was closed")
        return rank

    def _connect(self, dst: int, name: bytes, token: bytes) -> None:
        """Connect to a rank that listens, and send this rank's number."""
        wait = self._exchange.wait("connecting")
        with ExitStack() as undo:
            end = undo.enter_context(_socket())
            while True:
                try:
                    end.connect(name)
                    break
                except OSError as error:
                    text = f"rank {self.rank} cannot connect to rank {dst}"
                    if error.errno in _GONE:
                        raise ExchangeError(f"{text}, {_ENDED}") from error
                    if error.errno not in _FULL:
                        raise ExchangeError(f"{text}: {error.strerror}") from error
                self._exchange.look(wait, [dst])
                time.sleep(_RETRY_SECONDS)  # the queue of callers is full
            self._check_user(end, dst)
            end.send(_GREETING.pack(token, self.rank))
            self._links.ends[dst] = end
            undo.pop_all()

    def _admit(self, listener: socket.socket) -> bool:
        """Accept those who call now. Reject other users' calls if there are many.

        Returns:
            False: it keeps no wait from continuing, see :func:`waiting.watching`.
        """
        with suppress(OSError):  # none is waiting, or ``_accept`` raises the error
            while True:
                self._callers.append(listener.accept()[0])
                if len(self._callers) > self.size + _STRANGERS:
                    mine = os.geteuid()
                    uids = {end: credentials(end).uid for end in self._callers}
                    self._reject([end for end in uids if uids[end] != mine])
        return False

    def _reject(self, callers: Iterable[socket.socket]) -> None:
        for end in list(callers):
            self._callers.remove(end)
            end.close()

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        """Accept the higher ranks, which have connected. Reject other processes."""
        missing = set(range(self.rank + 1, self.size))
        while missing:
            try:
                end = self._callers.pop() if self._callers else listener.accept()[0]
            except BlockingIOError:
                raise ExchangeError(
                    f"rank {self.rank}: expected connections from ranks "
                    f"{sorted(missing)}, got none"
                ) from None
            except OSError as error:
                raise ExchangeError(
                    f"rank {self.rank} cannot accept a channel for file descriptors: "
                    f"{error.strerror}; {_too_many()}"
                ) from error
            src = _caller(end, token)
            if src not in missing:
                end.close()
                continue
            missing.remove(src)
            self._links.ends[src] = end
            self._check_user(end, src)
        self._reject(self._callers)

    def _check_user(self, end: socket.socket, peer: int) -> None:
        uid = credentials(end).uid
        if uid != os.geteuid():
            raise ExchangeError(
                f"the process connected to rank {self.rank} as rank {peer} belongs to "
                f"user {uid}, not {os.geteuid()}: run all ranks as one user"
            )

    def _receive(self, seconds: float) -> bool:
        """Wait for messages from these ranks, and stash their descriptors.

        Returns:
            Whether any arrived, for this channel or another one.
        """
        poll = select.poll()  # select.select fails for descriptors above 1023
        ends = [
            (rank, end)
            for rank, member in enumerate(self._members)
            if (end := self._links.ends.get(member)) is not None
        ]
        for _, end in ends:
            if end.fileno() >= 0:  # not closed by another thread
                poll.register(end, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(seconds * 1000)}
        with self._links.lock:
            for rank, end in ends:
                if end.fileno() in ready:
                    self._receive_from(rank, end)
        return bool(ready)

    def _receive_from(self, src: int, end: socket.socket) -> None:
        try:
            data, control, flags, _ = end.recvmsg(
                _NUMBER.size, _CONTROL_SPACE, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            if error.errno in (errno.ECONNRESET, *_FULL):
                return  # raised once, before earlier messages and the end
            raise ExchangeError(
                f"rank {self.rank} cannot receive a file descriptor from rank {src}: "
                f"{error.strerror}"
            ) from error
        member = self._members[src]
        if not data:
            del self._links.ends[member]
            end.close()
            return
        fds: list[int | None] = list(descriptors(control))
        if len(fds) != 1 or flags & socket.MSG_CTRUNC:
            close_all(fds)
            fds = [None]
        (number,) = _NUMBER.unpack(data)
        self._links.stash[number, member].append(fds[0])

    def _close_stashed(self) -> None:
        for rank in range(self.size):
            stashed = self._stashed(rank)
            while stashed:
                close_all([stashed.popleft()])

    def _unsent(self, dst: int) -> str:
        return f"rank {self.rank} could not send a file descriptor to rank {dst}"


_ENDED = (
    "whose channel is closed: that rank has ended or closed it, or runs in another "
    "network namespace (containers of one job must share one)"
)


def _name(rank: int) -> bytes:
    return f"\0numba_symm-{rank}-{secrets.token_hex(16)}".encode()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _caller(end: socket.socket, token: bytes) -> int | None:
    """Return a caller's rank, or None if the caller is not a rank."""
    end.setblocking(False)
    try:
        greeting = end.recv(_GREETING.size + 1)
    except OSError:  # it has sent none, or has ended
        return None
    if len(greeting) != _GREETING.size:
        return None
    found, src = _GREETING.unpack(greeting)
    return int(src) if secrets.compare_digest(found, token) else None


def _checked(fd: int) -> "array[int]":
    try:
        return array("i", [fd])
    except Exception:  # whatever an object's own method raises
        raise ArgumentError(f"expected a file descriptor, got {fd!r}") from None


def _duplicate(fd: int) -> int:
    _checked(fd)
    try:
        return os.dup(fd)
    except OSError as error:
        raise ExchangeError(
            f"file descriptor {fd} cannot be duplicated: {error.strerror}"
            + (f"; {_too_many()}" if error.errno == errno.EMFILE else "")
        ) from error
