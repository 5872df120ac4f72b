"""The library's own messages through MPI: tables of ranks, each with its own tags.

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

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from numba_symm.errors import ArgumentError
from numba_symm.launch import ranks
from numba_symm.launch.ranks import Comm

TAGS = 256
"""The tags of one number. MPI has at least 32768 tags, so at least 128 numbers."""


class Purpose(IntEnum):
    """The first tag of each kind of messages, among those of a number."""

    STORE = 0
    NODE = 1
    ISLAND = 2
    WATCHDOG = 3
    REBUILD = 4
    GIVEN_UP = 5
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
        highest = ranks.mpi().COMM_WORLD.Get_attr(ranks.mpi().TAG_UB)
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
        if unused and self._owned and not ranks.mpi().Is_finalized():
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
        if unused and self._owned and not ranks.mpi().Is_finalized():
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


def checked(comm: object) -> Comm | TaggedComm:
    """Return what to send messages by, for a communicator that nothing else uses.

    Raises:
        ArgumentError: it is not a communicator, or MPI has been finalized.
    """
    if isinstance(comm, TaggedComm):
        ranks.checked(comm.mpi)
        return comm
    found = ranks.checked(comm)
    return whole(found, owned=False) if ranks.is_mpi(found) else found


def checked_split(
    comm: Comm | TaggedComm, color: Any, key: Any
) -> tuple[int | None, int]:
    """Return a split's color, None for no group, and its key. Not collective.

    Raises:
        ArgumentError: MPI would not accept them, or ``comm`` cannot be divided.
    """
    if not isinstance(checked(comm), TaggedComm):
        ranks.refuse_undivided(comm)
    return ranks.color_and_key(color, key)


def release(comm: Comm | TaggedComm) -> None:
    """Release a table of ranks; do nothing with communicators of other kinds."""
    if isinstance(comm, TaggedComm):
        comm.release()


def of_job(comm: Comm | TaggedComm) -> int:
    """Return the number of ranks of the job; without MPI, of the communicator."""
    if isinstance(comm, TaggedComm):
        return max(comm.size, int(ranks.mpi().COMM_WORLD.size))
    return comm.size
