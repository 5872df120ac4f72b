"""What kernels wait for: one table of numbers and words.

A kernel that gives up a wait stores a record with a number of this table, see
:func:`numba_symm.device.polling.wait_record`. :func:`numba_symm.board.describe` makes
an error's text from it. A new algorithm adds its line here, with an unused number.
"""

from typing import NamedTuple

DIFFERED = (
    "If that rank was not late, their calls differed: Communicator(…, debug=True) says "
    "where"
)
UNANSWERED = "If that rank was not late, it has no call that answers this one"
ONE_BY_ONE = (
    f"{UNANSWERED}, or a later block has it: the simulator runs a kernel's blocks one "
    "after another, {} of them after this one"
)
"""In the place of ``UNANSWERED`` where the simulator runs that many blocks later."""

UNMATCHED = (
    "If that rank was not late, it sends or receives something else: two ranks that "
    "both send first do so by sendrecv or in a group; of gather, scatter and the v "
    "forms Communicator(…, debug=True) says where"
)


class Waited(NamedTuple):
    """What one number means.

    Attributes:
        number: 1 to 127, bits 56-62 of a record.
        words: the operation as its caller names it. Of calls that differ, the whole
            text, with ``{rank}`` and ``{peer}``. Of the host's numbers "".
        place: what the record's place is the number of; "" unless a kernel waited.
        hint: what else may have happened, behind an error's text.
    """

    number: int
    words: str = ""
    place: str = ""
    hint: str = ""


TABLE: dict[int, Waited] = {}
"""By number."""


def _wait(number: int, words: str, place: str = "block", hint: str = DIFFERED) -> int:
    return _add(Waited(number, words, place, hint))


def _other(number: int, words: str = "", hint: str = "") -> int:
    return _add(Waited(number, words, "", hint))


def _add(waited: Waited) -> int:
    number = waited.number
    if number in TABLE:
        raise ValueError(f"waits: {number} means {TABLE[number]}; take another one")
    TABLE[number] = waited
    return number


PUT_SIGNAL = _wait(1, "put_signal", "channel", UNANSWERED)
WAIT_SIGNAL = _wait(2, "wait_signal", "channel", UNANSWERED)
BARRIER = _wait(3, "barrier")
ONE_SHOT = _wait(5, "all_reduce (one_shot)")
TWO_SHOT = _wait(7, "all_reduce or reduce (two_shot)")
CHUNKED = _wait(9, "all_reduce or reduce (chunked)")
ALL_REDUCE_COPIES = _wait(10, "all_reduce (copy_engine)")
BROADCAST = _wait(12, "broadcast")
CHUNKED_REDUCE = _wait(13, "reduce (chunked)")
TRANSFER = _wait(14, "a message or a collective made of them", "channel", UNMATCHED)
CHUNKED_BROADCAST = _wait(16, "broadcast (chunked)")
BROADCAST_COPIES = _wait(17, "broadcast (copy_engine)")
BROADCAST_DIRECT = _wait(18, "broadcast (direct)")
REDUCE_DIRECT = _wait(19, "reduce (direct)")
ALL_GATHER = _wait(22, "all_gather")
ALL_TO_ALL = _wait(23, "all_to_all")
REDUCE_SCATTER = _wait(24, "reduce_scatter")
SCAN = _wait(25, "scan")
EXSCAN = _wait(26, "exscan")
REDUCE = _wait(27, "reduce")
ALL_GATHER_COPIES = _wait(28, "all_gather (copy_engine)")
ALL_TO_ALL_COPIES = _wait(29, "all_to_all (copy_engine)")

# Calls that differ: the rank that finds it did not wait in vain.
TRANSFER_MISMATCH = _other(
    15,
    "rank {rank} receives another number of bytes than rank {peer} sends it: the "
    "two calls' counts or dtypes differ, or their order does",
)
CALL_MISMATCH = _other(
    30,
    "rank {rank}'s call differs from rank {peer}'s: operation, count, dtype, op or "
    "root; Communicator(…, debug=True) says in what",
)

# The host's: the record's words on the board say more.
LATE = _other(125, hint=DIFFERED)
ENDED = _other(126)
ABANDONED = _other(127)
