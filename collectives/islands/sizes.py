"""The sizes according to which calls over several islands choose their steps."""

from collections.abc import Callable
from dataclasses import dataclass

from numba_symm.collectives.protocols.workspace import VECTOR
from numba_symm.environment import SIMULATED

_ENDS = 2 << 10  # bytes between ranges in the staging memory


def log2(islands: int) -> int:
    """Return ⌈log₂ islands⌉."""
    return (islands - 1).bit_length()


def bases(islands: int) -> list[int]:
    """Return the least base in which the islands have one digit, two, … ⌈log₂⌉."""
    found = list[int]()
    for digits in range(1, log2(islands) + 1):
        base = max(2, round(islands ** (1 / digits)) - 1)
        while base**digits < islands:
            base += 1
        found.append(base)
    return found


def sent_by_digit(islands: int, base: int) -> list[tuple[int, int]]:
    """Return for each digit the messages of a rank, and the parts in them.

    A rank has a part for each island. The part for the island that is d after its own
    is sent once for each digit of d that is not 0.
    """
    found, weight = list[tuple[int, int]](), 1
    while weight < islands:
        whole, rest = divmod(islands, weight * base)
        zeros = whole * weight + min(rest, weight)
        messages = min(base, -(-islands // weight)) - 1
        found.append((messages, islands - zeros))
        weight *= base
    return found


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
        launch: what a link carries while a kernel starts.
    """

    staging: int
    few: int
    small: int
    one_step: int
    chunk: int
    one_rail: int
    start: int
    message: int
    launch: int

    @property
    def half(self) -> int:
        """The bytes of half of the staging memory."""
        return self.staging // 2

    def by_rails(self, islands: int) -> bool:
        """Return whether small messages cross in steps along the rails.

        They do so if the islands are more than a few, and if that takes less time than
        to exchange messages with all islands at a time.
        """
        steps = log2(islands) * self.start
        return islands > self.few and steps <= self.exchange(islands, islands, 0)

    def scans_by_rails(self, islands: int, users: int) -> bool:
        """Return whether the results of islands cross along the rails in a scan.

        Args:
            islands: the number of islands.
            users: the ranks of other islands, to which one rank may send otherwise.
        """
        apart = self.start + (users - 1) * self.message
        return islands > self.few and log2(islands) * self.start <= apart

    def along_rails(self, islands: int, nbytes: int, shards: int) -> bool:
        """Return whether islands exchange so many bytes of each along the rails.

        They do so if they are more than a few, if that takes less time than to exchange
        shards, and if the slots fit into a half of the memory.
        """
        time = log2(islands) * self.start + islands * nbytes
        shard = nbytes if nbytes <= self.small else -(-nbytes // shards)
        part = -(-shard // islands)
        base = self.base(islands, part, lambda base: 1, results=True)
        faster = time <= self.exchange(islands, base, part, results=True)
        if self.in_one_step(islands, shard):
            faster &= time <= self.exchange(islands, islands, shard)
        return self.by_rails(islands) and faster and self.slots_fit(islands, nbytes)

    def in_one_step(self, islands: int, shard: int) -> bool:
        """Return whether islands may exchange shards, and not parts of them."""
        return islands <= 2 or islands * shard <= self.one_step

    def slots_fit(self, islands: int, nbytes: int) -> bool:
        """Return whether a half of the memory has all slots of Bruck's all-gather."""
        return 2 * (islands + 2) * (nbytes + VECTOR) + _ENDS <= self.half

    def gathered_along_rails(self, islands: int, nbytes: int) -> bool:
        """Return whether islands gather so many bytes of each along the rails."""
        return self.by_rails(islands) and self.slots_fit(islands, nbytes)

    def whole_along_rails(
        self, islands: int, nbytes: int, slot: int, direct: bool = False
    ) -> bool:
        """Return whether islands exchange whole results, of which each needs a part.

        They do so if they are more than a few, and if that takes less time than to send
        each island its part. The slots' memory is not checked.

        Args:
            islands: the number of islands.
            nbytes: of a part.
            slot: the bytes of a whole result.
            direct: whether parts could only be sent to each island directly.
        """
        time = log2(islands) * self.start + islands * slot
        parts = self.exchange(islands, islands, nbytes)
        if not direct:
            parts = self._parts(islands, nbytes)
        return self.by_rails(islands) and time <= parts

    def base(
        self,
        islands: int,
        nbytes: int,
        chunks: Callable[[int], int],
        results: bool = False,
    ) -> int:
        """Return the base of the digits by which islands exchange parts.

        It is the number of islands if they exchange parts directly. It is 2 for small
        calls, if that takes at most two thirds more than the least time: no other base
        needs as few messages, which also occupy hosts and NICs that ranks may share.

        Args:
            islands: the number of islands.
            nbytes: of a part, in all chunks together.
            chunks: returns by base the number of chunks; 0: none fits.
            results: whether each part's result is then gathered.

        Returns:
            The base; the number of islands if no chunk fits.
        """
        if islands <= self.few:
            return islands
        times = {
            base: self.exchange(islands, base, nbytes, number, results)
            for base in bases(islands)
            if (number := chunks(base))
        }
        if not times:
            return islands
        least = min(times, key=times.__getitem__)
        small = self.by_rails(islands) and islands * nbytes <= self.message
        if small and 2 in times and 3 * times[2] <= 5 * times[least]:
            return 2
        return least

    def exchange(
        self,
        islands: int,
        base: int,
        nbytes: int,
        chunks: int = 1,
        results: bool = False,
    ) -> int:
        """Return the time of an exchange of parts, as what a link carries in it.

        The arguments are as in :meth:`base`.
        """
        each = [messages for messages, _ in sent_by_digit(islands, base)]
        starts = len(each) * self.start + (sum(each) - len(each)) * self.message
        if base < islands:  # parts are copied before each exchange, and after it
            starts += 2 * len(each) * self.launch
        if results and base < islands:
            starts += log2(islands) * self.start
        elif results:
            starts *= 2
        # By digits, fewer of the kernels within the islands are beside an exchange.
        crossing = parts_sent(islands, base) + (islands if base < islands else 0)
        crossing += islands - 1 if results else 0
        return chunks * starts + crossing * nbytes

    def _parts(self, islands: int, nbytes: int) -> int:
        """Return the time of an exchange of parts of so many bytes, in one chunk."""
        base = self.base(islands, nbytes, lambda base: 1)
        return self.exchange(islands, base, nbytes)

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
        steps, all_bytes = log2(islands), chunks * nbytes
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


def parts_sent(islands: int, base: int) -> int:
    """Return how many parts a rank sends, those that it passes on included."""
    return sum(parts for _, parts in sent_by_digit(islands, base))


ON_GPUS = Sizes(
    staging=64 << 20,
    few=8,
    small=32 << 10,
    one_step=256 << 10,
    # An estimate: they take 40 µs at 400 Gb/s, and an exchange by NCCL at least 20.
    chunk=2 << 20,
    # An estimate: at 400 Gb/s they take 5 µs, and another step within an island 2 to 3.
    one_rail=256 << 10,
    # Assumptions, as in bench/laboratory/model.py: 15, 2.8 and 2.5 µs at 400 Gb/s.
    start=672 << 10,
    message=128 << 10,
    launch=112 << 10,
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
    launch=128,
)

DEFAULT = IN_THE_SIMULATOR if SIMULATED else ON_GPUS
