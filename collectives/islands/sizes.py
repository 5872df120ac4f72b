"""The sizes according to which calls over several islands choose their steps.

Each operation has one way for a few islands, in which every one exchanges with every
other at a time, and one for more, in base 2 along the rails (``rails.py``). Which one a
call takes follows from the number of islands and its size alone, so all ranks agree.
"""

from dataclasses import dataclass

from numba_symm.environment import SIMULATED


@dataclass(frozen=True)
class Sizes:
    """Limits, equal on all ranks. All but ``few`` are bytes.

    Attributes:
        staging: the size of the memory through which reductions pass, on each rank. It
            has two halves, for two chunks that overlap.
        few: up to this number of islands, each exchanges with every other one at a
            time. More are many.
        small: the size of the largest message, as carried, that few islands exchange as
            a whole; many broadcast it along the root's rail.
        one_step: the most that the owner of a shard, as carried, receives from few
            islands in one step. Longer shards are exchanged in two steps: first smaller
            ranges of them, and then the results of these.
        chunk: the smallest size of a chunk's shard.
        one_rail: the most of a broadcast that the root sends to a few other islands.
        whole: the most that a rank receives if many islands exchange whole results,
            which it combines itself.
        kept: the same in a reduce-scatter, where it keeps only a shard.
        part: the least part for each island that many islands send once. Smaller ones
            cross in base 2: in fewer messages, most of them several times.
        summed: the same in an all-reduce, where the parts' results cross as well.
        apart: the least shard of an all-to-all that ranks of many islands send to each
            other themselves.
    """

    staging: int
    few: int
    small: int
    one_step: int
    chunk: int
    one_rail: int
    whole: int
    kept: int
    part: int
    summed: int
    apart: int

    @property
    def half(self) -> int:
        """The bytes of half of the staging memory."""
        return self.staging // 2

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
    # Estimates: no network of many islands has been measured. The starts of five
    # exchanges take about as long as 4 MiB at 400 Gb/s.
    whole=4 << 20,
    kept=1 << 20,
    part=32 << 10,
    summed=64 << 10,
    apart=256 << 10,
)

IN_THE_SIMULATOR = Sizes(
    staging=1 << 17,
    few=3,
    small=256,
    one_step=512,
    chunk=1 << 10,
    one_rail=256,
    whole=1 << 10,
    kept=1 << 9,
    part=128,
    summed=256,
    apart=512,
)

DEFAULT = IN_THE_SIMULATOR if SIMULATED else ON_GPUS
