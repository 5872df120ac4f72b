"""Why a communicator failed: the meaning of records on the status board."""

from collections.abc import Sequence
from typing import NamedTuple

from numba_symm import errors, waits
from numba_symm.errors import CollectiveError, CollectiveTimeout, RankLeft

DROPPED = "dropped the communicator without closing it"
"""The cause of a rank that goes on, but cannot use the communicator."""

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
    if number == waits.AFAR:
        operation, kind, named, hint, text = words.split("\n", 4)
        error = errors.named(kind)
        found = error if issubclass(error, CollectiveError) else CollectiveError
        return Failure(found, text, hint, tuple(map(int, named.split())), operation)
    place, epoch = record >> 24 & 0xFFFF, record & 0xFFFFFF
    if number == waits.NO_EXPERT:  # signed, of 32 bits
        epoch, peer = ((peer << 24 | epoch) ^ 1 << 31) - (1 << 31), rank
    where = f" on {nodes[peer]}" if nodes else ""
    if names is not None:
        rank, peer = names[rank], names[peer]
    two: tuple[int, ...] = (rank, peer)
    operation, cause, limit = [*words.split("\n"), "", ""][:3]
    if number == waits.ABANDONED:
        return Failure(RankLeft, f"rank {rank} {cause}", "", (rank,), operation)
    if number == waits.ENDED:
        text = (
            f"rank {peer}{where} has ended without closing the communicator; "
            f"rank {rank} waited for it in {operation}"
        )
        return Failure(RankLeft, text, REBUILD, (peer,), operation)
    _, name, kind, hint = waits.TABLE[number]
    if number == waits.LATE:
        text = f"rank {rank} {cause}"
        return Failure(CollectiveTimeout, text, hint, two, operation, limit)
    if not kind:
        text = name.format(rank=rank, peer=peer, place=place, epoch=epoch)
        return Failure(waits.error_of(number), text, hint, two)
    if number in waits.SIGNALS and epoch:
        epoch, hint = 0, waits.LATER_BLOCK.format(epoch)
    at = f"{kind} {place}" + f", epoch {epoch}" * (epoch > 0)
    text = f"rank {rank} waited for rank {peer}{where} in {name}, {at}"
    if number == waits.WAIT_WORD:  # any rank may store the word
        text, two = f"rank {rank} waited in {name}", (rank,)
    return Failure(CollectiveTimeout, text, hint, two, name)
