"""The sizes by which calls over several islands choose their steps."""

from dataclasses import dataclass

from numba_symm.collectives.protocols.workspace import VECTOR
from numba_symm.environment import SIMULATED

_ENDS = 2 << 10  # bytes between ranges in the staging memory


@dataclass(frozen=True)
class Sizes:
    """Limits, equal on all ranks. All but ``few`` are bytes.

    Attributes:
        staging: the size of the memory through which reductions pass, on each rank. It
            has two halves, for two chunks that overlap.
        few: up to this number of islands, each sends small messages to every other one.
        small: the size of the largest message, as carried, that few islands exchange as
            a whole.
        one_step: the most that the owner of a shard, as carried, receives in one step.
            Longer shards are exchanged in two steps: first smaller ranges of them, and
            then the results of these.
        chunk: the smallest size of a chunk's shard.
        one_rail: the most of a broadcast that the root sends to all other islands.
        start: what a link carries in the time that an exchange takes to start.
        message: what a link carries in the time that each further message of an
            exchange takes to start.
    """

    staging: int
    few: int
    small: int
    one_step: int
    chunk: int
    one_rail: int
    start: int
    message: int

    @property
    def half(self) -> int:
        """The bytes of half of the staging memory."""
        return self.staging // 2

    def along_rails(self, islands: int, nbytes: int) -> bool:
        """Return whether islands exchange so many bytes of each along the rails.

        They do so if they are more than a few, if that takes less time than to exchange
        parts and their results, and if the slots fit into a half of the memory.
        """
        steps = (islands - 1).bit_length()
        time = steps * self.start + islands * nbytes
        parts = 2 * (self.start + (islands - 1) * self.message + nbytes)
        slots = 2 * (islands + 2) * (nbytes + VECTOR) + _ENDS
        return islands > self.few and time <= parts and slots <= self.half

    def whole_along_rails(self, islands: int, nbytes: int, slot: int) -> bool:
        """Return whether islands exchange whole results, of which each needs a part.

        They do so if they are more than a few, and if that takes less time than to send
        each island its part. The slots' memory is not checked.

        Args:
            islands: the number of islands.
            nbytes: of a part.
            slot: the bytes of a whole result.
        """
        steps = (islands - 1).bit_length()
        time = steps * self.start + islands * slot
        parts = self.start + (islands - 1) * (self.message + nbytes)
        return islands > self.few and time <= parts

    def crossing(self, islands: int, chunks: int, nbytes: int) -> str:
        """Return how shards of one island reach all others in the least time.

        Args:
            islands: the number of islands.
            chunks: the number of chunks.
            nbytes: of each chunk's shard.

        Returns:
            ``chain``: each island sends chunks to the next one. ``tree``: all bytes
            along a binomial tree. ``parts``: a part for each island along such a tree,
            and then each island's part to all others.
        """
        steps, all_bytes = (islands - 1).bit_length(), chunks * nbytes
        parts = (steps + 1) * self.start + (islands - 1) * self.message + 2 * all_bytes
        times = {
            "tree": steps * (self.start + all_bytes),
            "parts": parts,
            "chain": (chunks + islands - 1) * (self.start + nbytes),
        }
        return min(times, key=times.__getitem__)

    @property
    def islands(self) -> int:
        """The most islands whose slots of the smallest chunks fit into a half."""
        return self.half >> 10


ON_GPUS = Sizes(
    staging=64 << 20,
    few=8,
    small=32 << 10,
    one_step=256 << 10,
    # An estimate: they take 40 µs at 400 Gb/s, and an exchange by NCCL at least 20.
    chunk=2 << 20,
    # An estimate: at 400 Gb/s they take 5 µs, and another step within an island 2 to 3.
    one_rail=256 << 10,
    # Assumptions: 11 µs and 3 µs at 400 Gb/s.
    start=512 << 10,
    message=128 << 10,
)

IN_THE_SIMULATOR = Sizes(
    staging=1 << 17,
    few=3,
    small=256,
    one_step=512,
    chunk=1 << 10,
    one_rail=256,
    start=512,
    message=512,
)

DEFAULT = IN_THE_SIMULATOR if SIMULATED else ON_GPUS
