"""The ranks, their names and nodes, and the library's own messages through MPI.

The library's own messages through MPI: tables of ranks, each with its own tags.

One duplicate of the user's communicator serves a communicator, its nodes and islands,
and their watchdog and engine. It also serves all communicators that ``split`` and
``dup`` make of it. So MPI makes only one communicator, in a call that can be polled. To
make a communicator of some ranks, MPI has only calls that block. In these, ranks wait
without a deadline for a rank that has died, and Python's signal handlers do not run.

Who may use a tag: every communicator has a *number*, which each of its ranks uses for
this communicator only. The number has one range of tags for each purpose. A rank that
has sent a message keeps the number until the message was received. The rank releases
the number when all ranks have closed the communicator, or have given up its
construction together. It keeps the number after a failure, or if the communicator was
dropped. Therefore no later communicator receives a message that a failure left in MPI.
If the sender is one of the later communicator's ranks, the numbers differ. If not, the
later communicator does not receive from that sender.
"""

import operator
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, cast

from numba_symm import process
from numba_symm.arguments import shown
from numba_symm.environment import warn_once
from numba_symm.errors import ArgumentError, CollectiveError, RankLeft


class Comm(Protocol):
    """The members that a communicator needs; mpi4py's have them."""

    @property
    def rank(self) -> int:
        """This process' number, from 0."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Return every rank's picklable object, in rank order."""

    def barrier(self) -> None:
        """Return once every rank has called it."""


def checked(comm: object) -> Comm:
    """Return ``comm``. Raise :class:`ArgumentError` if it is not a communicator."""
    if comm is None or (is_mpi(comm) and not comm):  # MPI.COMM_NULL
        raise ArgumentError(
            f"expected a communicator, got {shown(comm)}; pass one that this process "
            "belongs to, such as MPI.COMM_WORLD"
        )
    refuse_unusable(comm)
    members = ("rank", "size", "allgather", "barrier")
    lacking = [name for name in members if not hasattr(comm, name)]
    if lacking:
        raise ArgumentError(
            f"expected a communicator, got {shown(comm)}, which has no "
            f"{', '.join(lacking)}; pass an mpi4py communicator or any object with "
            "rank, size, allgather and barrier"
        )
    found = cast(Any, comm)
    rank, size = found.rank, found.size
    if not (are_integers(rank, size) and 0 <= rank < size):
        raise ArgumentError(
            f"expected a communicator whose rank is an integer from 0 to size - 1, got "
            f"{shown(comm)} with rank {rank!r} of size {size!r}"
        )
    if getattr(comm, "is_inter", False):
        raise ArgumentError(
            "expected an intracommunicator, got an intercommunicator; pass comm.Merge()"
        )
    return cast(Comm, found)


def refuse_unusable(comm: object) -> None:
    """Raise :class:`ArgumentError` if MPI permits no call of its communicators."""
    if not is_mpi(comm):
        return
    mpi = sys.modules["mpi4py.MPI"]
    if _mpi_is_the_parents:
        raise ArgumentError(
            f"{shown(comm)} cannot be used, because this process was forked from one "
            f"that uses MPI; {process.ADVICE}"
        )
    if mpi.Is_finalized():
        raise ArgumentError(
            "MPI has been finalized, so no communicator can be made; make and split "
            "them before MPI.Finalize()"
        )
    if not mpi.Is_initialized():
        raise ArgumentError(
            f"expected MPI to be initialized, got {shown(comm)} before MPI.Init(); "
            "call MPI.Init() first, or leave mpi4py.rc.initialize True"
        )


def are_integers(*numbers: Any) -> bool:
    """Return whether all are integers, of any type."""
    return all(isinstance(number, Integral) for number in numbers)


_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""The variables in which launchers pass the number of ranks, the innermost one first.

Slurm's is that of a step, because programs outside of a step have SLURM_NTASKS, too.
"""


def warn_if_alone(comm: object) -> None:
    """Warn, once in a process, if a launcher has started more ranks than MPI has.

    ``comm`` may be anything; only mpi4py's communicators are checked.
    """
    if not is_mpi(comm):
        return
    mpi = sys.modules["mpi4py.MPI"]
    set_by_launcher = _set_by_launcher()
    usable = mpi.Is_initialized() and not mpi.Is_finalized()
    if not usable or mpi.COMM_WORLD.size > 1 or set_by_launcher is None:
        return
    variable, size = set_by_launcher
    if size > 1:
        warn_once(
            f"MPI.COMM_WORLD has 1 rank, but the launcher set {variable}: the launcher "
            "and mpi4py use different MPI libraries; start the program with the "
            "launcher of the one that `numba-symm info` names"
        )


def _set_by_launcher() -> tuple[str, int] | None:
    """Return a launcher's variable, and the least number of ranks that it implies."""
    for name in _SIZES:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return f"{name}={value}", int(value)
    rank = os.environ.get("PMIX_RANK", "")  # PMIx has no variable for the size
    return (f"PMIX_RANK={rank}", int(rank) + 1) if rank.isdecimal() else None


def launched_size() -> int:
    """Return the least number of ranks that a launcher has started; 1 without one."""
    return (_set_by_launcher() or ("", 1))[1]


def launched_rank() -> int:
    """Return this process' number among them; 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


_MPI_INTS = 1 << 31  # MPI's are C's


def _checked_int(value: Any, least: int, name: str, what: str) -> int:
    try:
        number = operator.index(value)
    except Exception:  # whatever an object's own method raises
        number = _MPI_INTS
    if not least <= number < _MPI_INTS:
        raise ArgumentError(f"split: {name}={shown(value)}: expected {what}")
    return number


def split(comm: Any, color: int | None, key: int) -> Comm | None:
    """Return a communicator of the ranks that pass this color, None for color None.

    Collective, by the method ``split`` of an object of the user's. The ranks are
    ordered by ``key``, then by their rank in ``comm``.
    """
    made = comm.split(color, key)
    return None if color is None else checked(made)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 0, 1, 3"."""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"


def grouped(texts: dict[int, str]) -> dict[str, list[int]]:
    """Return the ranks that share each text, in order of their lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return groups


def sentence(texts: dict[int, str], one: str, many: str) -> str:
    """Return "rank 0 <one> a, ranks 1, 2 <many> b", grouped by equal texts."""
    return ", ".join(
        f"{name_ranks(ranks)} {one if len(ranks) == 1 else many} {text}"
        for text, ranks in grouped(texts).items()
    )


_mpi_is_the_parents = False  # true in a child forked from a process of MPI


def _leave_mpi_to_the_parent() -> None:
    global _mpi_is_the_parents
    mpi = sys.modules.get("mpi4py.MPI")
    _mpi_is_the_parents = mpi is not None and mpi.Is_initialized()


os.register_at_fork(after_in_child=_leave_mpi_to_the_parent)


def is_mpi(comm: object) -> bool:
    """Return whether ``comm`` is a communicator of mpi4py's."""
    # Do not import mpi4py.MPI, because that calls MPI_Init. Whoever has one of its
    # communicators has imported it.
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(comm, mpi.Comm)


def mpi_module() -> Any:
    """Return mpi4py's module, for a communicator that is mpi4py's."""
    return sys.modules["mpi4py.MPI"]


def progress() -> None:
    """Let MPI make progress, which it does only within its calls.

    A peer may arrive only after this process has received the peer's message.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main():
        mpi.COMM_SELF.Iprobe()


@contextmanager
def living(rank: int) -> Iterator[None]:
    """Name ``rank`` if MPI raises in the block, which has messages with that rank.

    Raises:
        RankLeft: the rank has ended, as MPI reports.
        CollectiveError: MPI reports another error.
    """
    try:
        yield
    except mpi_module().Exception as error:
        # mpi4py gives a class that the MPI library does not have another one's number.
        names = "ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING"
        found = {getattr(mpi_module(), name, None) for name in names}
        if error.Get_error_class() in found - {mpi_module().ERR_UNKNOWN}:
            text = f"rank {rank} has ended, as MPI reports ({error})"
            raise RankLeft(text, ranks=(rank,)) from error
        text = f"MPI has failed in a message with rank {rank} ({error})"
        raise CollectiveError(text, ranks=(rank,)) from error


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks and among the ranks of its node.

    Attributes:
        rank: this process's number, from 0 to size - 1.
        size: the number of ranks.
        local_rank: its position among the ranks of its node.
        local_size: the number of ranks on that node.
        node: the node's name in messages; equal on all ranks of one node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str


NodeKey = tuple[bytes, str]
"""The first bytes of the boot id of the Linux kernel, and the host name."""


def here() -> NodeKey:
    """Return the node that this process runs on."""
    return _boot_id()[:8], socket.gethostname()


def place(rank: int, seen: Sequence[NodeKey]) -> tuple[World, tuple[str, ...]]:
    """Return a rank's place and, by rank, the name of its node.

    Ranks are on one node if their Linux kernels have the same boot id. Two containers
    of one node share the boot id, but not the host name.

    Args:
        rank: the rank.
        seen: by rank, what :func:`here` returned.
    """
    names: dict[bytes, str] = {}
    for boot_id, host in seen:
        # The first rank's host name, so that containers of one node agree on it.
        names.setdefault(boot_id, f"{host} ({boot_id.hex()[:8]})")
    boot_id = seen[rank][0]
    local = [other for other, each in enumerate(seen) if each[0] == boot_id]
    world = World(
        rank=rank,
        size=len(seen),
        local_rank=local.index(rank),
        local_size=len(local),
        node=names[boot_id],
    )
    return world, tuple(names[each[0]] for each in seen)


MOST_RANKS = 64
"""The most ranks of an island, because kernels use one bit of a word for each."""


def refuse_too_many(size: int) -> None:
    """Raise :class:`ArgumentError` for more than ``MOST_RANKS`` ranks."""
    if size > MOST_RANKS:
        raise ArgumentError(
            f"Communicator: expected at most {MOST_RANKS} ranks, got {size} on one "
            "node; make several communicators (in MPI: comm.Split)"
        )


def _boot_id() -> bytes:
    try:
        return bytes.fromhex(BOOT_ID.read_text().replace("-", ""))
    except OSError:  # in a sandbox that hides /proc
        return blake2b(socket.gethostname().encode()).digest()


TAGS = 256
"""The tags of one number. MPI has at least 32768 tags, so at least 128 numbers."""


class Purpose(IntEnum):
    """The first tag of each kind of messages, among those of a number."""

    STORE = 0
    NODE = 1
    ISLAND = 2
    WATCHDOG = 3
    REBUILD = 4
    PARCELS = 8  # and all tags after it


class TaggedComm:
    """Some ranks of an MPI communicator, with tags that nothing else uses there.

    A message to ``peer`` goes to rank ``ranks[peer]`` of ``mpi``, with ``tag``. Callers
    call ``mpi`` themselves, so that no Python function is between MPI and the request
    that it returns.

    Attributes:
        mpi: mpi4py's communicator.
        ranks: by number here, the rank there.
        rank: this process' number.
        size: the number of ranks.
        tag: the first of its tags.
        released: whether :meth:`release` was called.
        refused: whether another rank has given up a step here, see ``waiting``.
    """

    def __init__(
        self, shared: "_Shared", members: Sequence[int], number: int, purpose: Purpose
    ):
        self.mpi = shared.mpi
        self.ranks = members
        self.rank = members.index(shared.rank)
        self.size = len(members)
        self.tag = number * TAGS + purpose
        self.released = self.refused = False
        self._shared, self._number = shared, number
        shared.use(number)

    def part(self, members: Sequence[int], purpose: Purpose) -> "TaggedComm":
        """Return some of the ranks for another kind of messages. Local.

        Args:
            members: their numbers here, in the order of their numbers there. All of
                them make the part.
            purpose: the kind; a rank is in one part of each kind.
        """
        members = [self.ranks[member] for member in members]
        return TaggedComm(self._shared, members, self._number, purpose)

    def child(
        self,
        members: Sequence[int],
        gather: Callable[[int | None], list[int | None]],
    ) -> "TaggedComm | None":
        """Return the ranks of a new communicator, with a number that none of them uses.

        Collective over all ranks, which have all arrived in this call. Other threads
        may make it for other communicators, in different orders on different ranks.

        Args:
            members: the new communicator's ranks: their numbers here, in the order of
                their numbers there; empty for a rank of none.
            gather: returns every rank's value, in rank order. Collective.

        Raises:
            ArgumentError: on all ranks: MPI has too few tags.
        """
        shared = self._shared
        try:
            # Each rank gives the numbers that it uses, or None while it is another
            # communicator's turn to take one. Of the communicators that wait, the one
            # with the lowest number precedes the others on all of its ranks, so it
            # succeeds.
            while None in (masks := gather(shared.used(by=self._number))):
                pass
            used = 0
            for mask in masks:
                used |= mask or 0
            number = (~used & (used + 1)).bit_length() - 1  # the lowest one not used
            if number > shared.most:
                raise ArgumentError(
                    f"expected at most {shared.most} open communicators that split and "
                    "dup made from one, because MPI has no more tags; close some, or "
                    "make a Communicator from another MPI communicator"
                )
            if not members:
                return None
            members = [self.ranks[member] for member in members]
            return TaggedComm(shared, members, number, Purpose.STORE)
        finally:
            shared.decided(by=self._number)

    def release(self) -> None:
        """Stop using the tags, after all their messages were received. Idempotent.

        The last user of a duplicate on this rank frees it, so not all ranks may free it
        at the same moment. That call is collective, but the standard expects libraries
        to make it local (MPI 4.1, advice to implementors of MPI_COMM_FREE).
        """
        if not self.released:
            self.released = True
            self._shared.release(self._number)

    def own(self) -> None:
        """Let the last user of MPI's communicator free it."""
        self._shared.own()

    def retire(self) -> None:
        """Release everything of this number, and free what no other one uses.

        Messages may be left in MPI. So the number is never given to others.
        """
        self.released = True
        self._shared.retire(self._number)


class _Shared:
    """An MPI communicator, and what uses it on this rank.

    Args:
        mpi: mpi4py's communicator.
        owned: whether the last user frees it.

    Attributes:
        mpi: the same.
        rank: this process' rank there.
        most: the highest number for which MPI has tags.
    """

    def __init__(self, mpi: Any, owned: bool):
        self.mpi, self._owned = mpi, owned
        self.rank: int = mpi.rank
        # Not every communicator has this attribute in Open MPI.
        highest = mpi_module().COMM_WORLD.Get_attr(mpi_module().TAG_UB)
        self.most: int = (highest + 1) // TAGS - 1
        self._lock = threading.RLock()  # a signal handler may close a communicator
        self._uses: Counter[int] = Counter()  # by number, the tables that have it
        self._retired = 0  # numbers that are not used again, as bits
        self._deciding: set[int] = set()  # the communicators in ``child``, by number
        self._holder: int | None = None  # the one that may take a number

    def own(self) -> None:
        """Let the last user free the communicator."""
        self._owned = True

    def retire(self, number: int) -> None:
        """Note that a number is used no longer, and may never be used again."""
        with self._lock:
            self._retired |= 1 << number
            self._uses.pop(number, None)
            unused = not self._uses
        if unused and self._owned and not mpi_module().Is_finalized():
            self.mpi.Free()

    def use(self, number: int) -> None:
        """Note that one more object uses a number."""
        with self._lock:
            self._uses[number] += 1

    def used(self, by: int) -> int | None:
        """Return the numbers in use, as bits; None while another one takes a number."""
        with self._lock:
            self._deciding.add(by)
            if self._holder in (None, by):
                self._holder = by if by == min(self._deciding) else None
            if self._holder != by:
                return None
            return self._retired | sum(1 << number for number in self._uses)

    def decided(self, by: int) -> None:
        """Let other communicators take a number."""
        with self._lock:
            self._deciding.discard(by)
            if self._holder == by:
                self._holder = None

    def release(self, number: int) -> None:
        """Note that an object uses a number no longer; free what nothing uses."""
        with self._lock:
            if number not in self._uses:  # retired after a failure
                return
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._uses[number]
            unused = not self._uses
        if unused and self._owned and not mpi_module().Is_finalized():
            self.mpi.Free()


_UNUSUAL = 110  # the number in a communicator that was not made for these messages


def whole(mpi: Any, owned: bool) -> TaggedComm:
    """Return all ranks of mpi4py's communicator. Local.

    Args:
        mpi: the communicator, whose messages are this library's only.
        owned: whether the last object that uses it frees it.
    """
    number = 0 if owned else _UNUSUAL
    return TaggedComm(_Shared(mpi, owned), range(mpi.size), number, Purpose.STORE)


def checked_tagged(comm: object) -> Comm | TaggedComm:
    """Return what to send messages by, for a communicator that nothing else uses.

    Raises:
        ArgumentError: it is not a communicator, or MPI has been finalized.
    """
    if isinstance(comm, TaggedComm):
        checked(comm.mpi)
        return comm
    found = checked(comm)
    return whole(found, owned=False) if is_mpi(found) else found


def checked_split(
    comm: Comm | TaggedComm, color: Any, key: Any
) -> tuple[int | None, int]:
    """Return a split's color, None for no group, and its key. Not collective.

    Raises:
        ArgumentError: MPI would not accept them, or ``comm`` cannot be divided.
    """
    if not isinstance(checked_tagged(comm), TaggedComm) and not hasattr(comm, "split"):
        raise ArgumentError(
            f"split: {comm!r} has no method split; give it split(color, key), "
            "collective, which returns an object of its kind between the ranks of "
            "equal color, ordered by key and then rank, and None where color is None"
        )
    number = _checked_int(key, -_MPI_INTS, "key", "an int of 32 bits")
    undefined = getattr(sys.modules.get("mpi4py.MPI"), "UNDEFINED", None)
    if color is None or (isinstance(color, int) and color == undefined):
        return None, number
    what = "an int of 0 to 2**31 - 1, or None for no group"
    return _checked_int(color, 0, "color", what), number


def release(comm: Comm | TaggedComm) -> None:
    """Release a table of ranks; do nothing with communicators of other kinds."""
    if isinstance(comm, TaggedComm):
        comm.release()


def of_job(comm: Comm | TaggedComm) -> int:
    """Return the number of ranks of the job; without MPI, of the communicator."""
    if isinstance(comm, TaggedComm):
        return max(comm.size, int(mpi_module().COMM_WORLD.size))
    return comm.size
