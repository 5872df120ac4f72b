"""What kernels wait for, and why a communicator failed.

What kernels wait for: one table of numbers and texts.

A kernel that gives up a wait stores a record with a number of this table: see
:func:`numba_symm.device.polling.wait_record`. :func:`describe` makes an error's text
from it. The table of operations adds its lines with :func:`of_operation`. An algorithm
with words of its own has its line here, with an unused number.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from numba_symm import errors
from numba_symm.errors import CallMismatch, CollectiveError, CollectiveTimeout, RankLeft

OTHER_CALL = (
    "If that rank was not late, its call differs from this one: "
    "Communicator(…, debug=True) reports the difference"
)
NO_COUNTERPART = "If that rank was not late, it made no call that matches this one"
NO_ROOM = (
    "If that rank was not late, its grid does not fit on its GPU beside the other "
    "kernels there (comm.launch_limit returns how many blocks may wait), or it made no "
    "call that matches this one"
)
NO_WRITER = "If no rank was late, none stored a value that ends this wait"
LATER_BLOCK = (
    f"{NO_COUNTERPART}, or it makes that call in a later block: the simulator runs at "
    "most 1024 threads of a grid together, so {} of its blocks start only after "
    "others have ended"
)
"""Replaces ``NO_COUNTERPART`` where that many blocks start later."""

SIGNALS: tuple[int, ...]
"""Waits of one thread that a program calls, whose records have no epoch."""

MESSAGE = "a message"
"""The operation of an engine's wait between islands that is not in a collective."""

OTHER_MESSAGE = (
    "If that rank was not late, it sends or receives something else: two ranks that "
    "both send first need sendrecv or a group; for gather, scatter, the v forms and "
    "neighbours, Communicator(…, debug=True) reports the difference"
)


class Waited(NamedTuple):
    """The meaning of one number.

    Attributes:
        words: the operation, as its caller names it. For calls that differ, the whole
            text, with ``{rank}`` and ``{peer}``. "" if the host stores the record.
        place: the unit that the record's place numbers, such as "block"; "" unless a
            kernel waited.
        hint: another possible cause, which follows an error's text.
    """

    words: str
    place: str
    hint: str


TABLE: dict[int, Waited] = {}
"""By number, 1 to 127: bits 56-62 of a record."""


def _wait(number: int, words: str, place: str = "block", hint: str = OTHER_CALL) -> int:
    if number in TABLE:
        raise ValueError(f"waits: {number} means {TABLE[number]}; take another one")
    TABLE[number] = Waited(words, place, hint)
    return number


def of_operation(words: str) -> int:
    """Return the number of what an operation's kernels wait for, added if it is new.

    Only the table of operations adds numbers, in its own order. So they are the same on
    all ranks.
    """
    for number, known in TABLE.items():
        if known.words == words:
            return number
    return _wait(next(n for n in itertools.count(64) if n not in TABLE), words)


def _other(number: int, words: str = "", hint: str = "") -> int:
    return _wait(number, words, "", hint)


PUT_SIGNAL = _wait(1, "put_signal", "channel", NO_COUNTERPART)
WAIT_SIGNAL = _wait(2, "wait_signal", "channel", NO_COUNTERPART)
WAIT_UNTIL = _wait(33, "wait_until", "channel", NO_COUNTERPART)
WAIT_WORD = _wait(34, "wait_until_at", "word", NO_WRITER)
GRID_BARRIER = _wait(35, "grid_barrier", "channel", NO_ROOM)
GET_PACKETS = _wait(46, "get_packets", "block", NO_COUNTERPART)
SIGNALS = PUT_SIGNAL, WAIT_SIGNAL, WAIT_UNTIL, WAIT_WORD, GRID_BARRIER
BARRIER = _wait(3, "barrier")
ONE_SHOT = _wait(5, "all_reduce (one_shot)")
TWO_SHOT = _wait(7, "all_reduce or reduce (two_shot)")
CHUNKED = _wait(9, "all_reduce or reduce (chunked)")
CHUNKED_REDUCE = _wait(13, "reduce (chunked)")
TWO_SHOT_BROADCAST = _wait(12, "broadcast (two_shot)")
TRANSFER = _wait(14, "a message or a collective of messages", "channel", OTHER_MESSAGE)
CHUNKED_BROADCAST = _wait(16, "broadcast (chunked)")
BROADCAST_COPIES = _wait(17, "broadcast (copy_engine)")
BROADCAST_DIRECT = _wait(18, "broadcast (direct)")
REDUCE_DIRECT = _wait(19, "reduce (direct)")
ALL_GATHER = _wait(22, "all_gather")
REDUCE_SCATTER = _wait(24, "reduce_scatter")
ALL_REDUCE_DIRECT = _wait(31, "all_reduce (direct)")

DISPATCH = _wait(41, "dispatch to experts")
COMBINE = _wait(42, "combine of experts' results")

# Collectives within kernels of a program.
BLOCK_ALL_REDUCE = _wait(50, "all_reduce in a kernel", hint=NO_COUNTERPART)
BLOCK_REDUCE_SCATTER = _wait(51, "reduce_scatter in a kernel", hint=NO_COUNTERPART)
BLOCK_ALL_GATHER = _wait(52, "all_gather in a kernel", hint=NO_COUNTERPART)
BLOCK_BROADCAST = _wait(53, "broadcast in a kernel", hint=NO_COUNTERPART)
BLOCK_ALL_TO_ALL = _wait(54, "all_to_all in a kernel", hint=NO_COUNTERPART)
BLOCK_EXSCAN = _wait(60, "exscan in a kernel", hint=NO_COUNTERPART)

# Calls that differ: the rank that stores this record has received other data than its
# call needs.
TRANSFER_MISMATCH = _other(
    15,
    "rank {rank} receives another number of bytes than rank {peer} sends it: "
    "the counts or dtypes of the two calls differ, or the order of their messages",
)
TRANSFER_TOO_LONG = _other(
    32,
    "rank {peer} sends rank {rank} more bytes than it has room for, or not a multiple "
    "of its elements: the counts or dtypes of the two calls differ, or their order",
)
COUNT_TOO_LARGE = _other(
    61,
    "rank {rank} has {epoch} elements for rank {peer}: expected at most the capacity, "
    "{place}, and a range within x",
    "16777215 elements stand for any larger or negative number, and a capacity of "
    "65535 for any larger one",
)
TOKENS_ABOVE = _other(
    43,
    "rank {rank} has {epoch} tokens for experts of rank {peer}: expected at most the "
    "capacity, {place}",
)
NO_EXPERT = _other(
    44,
    "rank {rank}'s token {place} has expert {epoch}: expected less than the number of "
    "experts, or -1 for none",
)
CALL_MISMATCH = _other(
    30,
    "rank {rank}'s call differs from rank {peer}'s: operation, count, dtype, op or "
    "root; Communicator(…, debug=True) reports the difference",
)
ROOT_MISMATCH = _other(
    55,
    "rank {rank} expects rank {epoch} to be the root of a broadcast in a kernel, block "
    "{place}, and rank {peer} expects another one, or makes another call",
)

SIZE_MISMATCH = _other(
    11,
    "rank {rank} expects {epoch} bytes of rank {peer} in a collective in a kernel, "
    "block {place}, and rank {peer} sends another number, or makes another call",
)

OVERWRITTEN = _other(
    48,
    "rank {rank} waited for packets of rank {peer} of epoch {epoch}, which a later one "
    "has overwritten: before a sender uses a mailbox again, it must wait until the "
    "receiver has read it",
)

# Mistakes that a thread finds in debug mode. The numbers are cut to 16 and 24 bits.
_IN_KERNEL = "rank {rank}'s kernel asked for "
BAD_SLOT = _other(
    36,
    f"{_IN_KERNEL}channel {{place}} to or from rank {{epoch}}: expected a rank of the "
    "context and a channel of its signal pad",
)
BAD_RANK = _other(
    37, f"{_IN_KERNEL}rank {{epoch}}'s buffer: expected a rank of the context"
)
BAD_BUFFER = _other(
    38,
    f"{_IN_KERNEL}an array of {{epoch}} bytes: expected at most the buffer's",
)
BAD_TEAM = _other(39, f"{_IN_KERNEL}a barrier of a team: expected a team of this rank")
BAD_COMPARISON = _other(
    40, f"{_IN_KERNEL}comparison {{place}}: expected symm.EQ, NE, GT, GE, LT or LE"
)
BAD_COPY = _other(
    47,
    f"{_IN_KERNEL}a copy of {{epoch}} elements: expected arrays of the same shape",
)
BAD_MAILBOX = _other(
    49,
    f"{_IN_KERNEL}packets in a mailbox: expected at least {{epoch}} elements, aligned "
    "to 16 bytes; see mailbox_size",
)
BAD_GRID = _other(
    56,
    f"{_IN_KERNEL}a collective in block {{place}} of {{epoch}} threads: expected at "
    "most the workspace's blocks and threads",
)
BAD_BYTES = _other(
    57,
    f"{_IN_KERNEL}a collective in which a thread has {{epoch}} vectors of 16 bytes for "
    "a rank: expected at most the workspace's; pass more bytes to "
    "comm.device_workspace",
)
BAD_ROOT = _other(
    58, f"{_IN_KERNEL}a broadcast from rank {{epoch}}: expected a rank of the workspace"
)
BAD_SHARDS = _other(
    59,
    f"{_IN_KERNEL}a collective of {{epoch}} elements with an output of {{place}}: "
    "expected shards as the counts say, or equal ones",
)
BAD_COUNT = _other(
    63,
    f"{_IN_KERNEL}a collective with {{epoch}} as a count, or as the number of counts: "
    "expected one for each rank, of at least 0",
)
BAD_DEPTH = _other(
    62,
    f"{_IN_KERNEL}one more start or wait in block {{place}}, in which {{epoch}} "
    "collectives are started and not awaited: expected at most as many as the "
    "workspace's depth, and a start for each wait",
)
MISTAKES = (
    *(COUNT_TOO_LARGE, TOKENS_ABOVE, NO_EXPERT),
    *(BAD_SLOT, BAD_RANK, BAD_BUFFER, BAD_TEAM, BAD_COMPARISON),
    *(BAD_COPY, BAD_MAILBOX, OVERWRITTEN),
    *(BAD_GRID, BAD_BYTES, BAD_ROOT, BAD_SHARDS, BAD_COUNT, BAD_DEPTH),
)

# Stored by a host, with a text on the board.
AFAR = _other(124)
LATE = _other(125, hint=OTHER_CALL)
ENDED = _other(126)
ABANDONED = _other(127)


DROPPED = "dropped the communicator without closing it"
"""The cause of a rank that goes on, but cannot use the communicator."""

UNCLOSED = "has ended without closing the communicator"
"""How a rank's process has ended, if no signal is known that has killed it."""

REBUILD = (
    "rebuild() returns a communicator of the remaining ranks, if `numba-symm run "
    "--survive` has started the job"
)
"""What to do after a rank's process has ended."""


class Failure(NamedTuple):
    """Why a communicator failed.

    Attributes:
        error: the class of the exception.
        text: which rank failed, and how.
        hint: another possible cause; "" if there is none.
        ranks: the ranks that the text names.
        operation: the operation that the text names; "" if it is unknown.
        limit: the setting that gave a host's wait its deadline; "" for a kernel's wait,
            whose deadline is the timeout.
    """

    error: type[CollectiveError]
    text: str
    hint: str = ""
    ranks: tuple[int, ...] = ()
    operation: str = ""
    limit: str = ""

    @property
    def is_of_rank_that_left(self) -> bool:
        """Whether a rank has ended or raised, so it may make none of the next calls."""
        return self.error is RankLeft and not self.text.endswith(DROPPED)

    def exception(self, advice: str = "") -> CollectiveError:
        """Return the exception to raise, with ``advice`` at the end of its text."""
        limit = f" ({self.limit})" if self.limit else ""
        text = f"{self.text}{limit}{advice}"
        about = {"operation": self.operation, "hint": self.hint}
        return self.error(text, ranks=self.ranks, **about)


def describe(
    record: int,
    words: str = "",
    names: Sequence[int] | None = None,
    nodes: Sequence[str] = (),
) -> Failure:
    """Return the failure in a record, whose bits ``polling.wait_record`` describes.

    Args:
        record: the record of any rank.
        words: the text of the rank that stored it, see :meth:`Board.abandon`.
        names: by rank, its number in texts; None: the same.
        nodes: by rank, the name of its node; empty: texts name no nodes.
    """
    number, rank, peer = record >> 56, record >> 48 & 0xFF, record >> 40 & 0xFF
    if number == AFAR:
        operation, kind, named, hint, text = words.split("\n", 4)
        error = errors.named(kind)
        found = error if issubclass(error, CollectiveError) else CollectiveError
        return Failure(found, text, hint, tuple(map(int, named.split())), operation)
    place, epoch = record >> 24 & 0xFFFF, record & 0xFFFFFF
    if number == NO_EXPERT:  # signed, of 32 bits
        epoch, peer = ((peer << 24 | epoch) ^ 1 << 31) - (1 << 31), rank
    where = f" on {nodes[peer]}" if nodes else ""
    if names is not None:
        rank, peer = names[rank], names[peer]
    two: tuple[int, ...] = (rank, peer)
    operation, cause, limit = [*words.split("\n"), "", ""][:3]
    if number == ABANDONED:
        return Failure(RankLeft, f"rank {rank} {cause}", "", (rank,), operation)
    if number == ENDED:
        text = (
            f"rank {peer}{where} {cause or UNCLOSED}; "
            f"rank {rank} waited for it in {operation}"
        )
        return Failure(RankLeft, text, REBUILD, (peer,), operation)
    name, kind, hint = TABLE[number]
    if number == LATE:
        text = f"rank {rank} {cause}"
        return Failure(CollectiveTimeout, text, hint, two, operation, limit)
    if not kind:
        text = name.format(rank=rank, peer=peer, place=place, epoch=epoch)
        error = CollectiveError if number in MISTAKES else CallMismatch
        return Failure(error, text, hint, two)
    if number in SIGNALS and epoch:
        epoch, hint = 0, LATER_BLOCK.format(epoch)
    at = f"{kind} {place}" + f", epoch {epoch}" * (epoch > 0)
    text = f"rank {rank} waited for rank {peer}{where} in {name}, {at}"
    if number == WAIT_WORD:  # any rank may store the word
        text, two = f"rank {rank} waited in {name}", (rank,)
    return Failure(CollectiveTimeout, text, hint, two, name)
