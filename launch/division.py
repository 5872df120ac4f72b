"""The division of ranks into islands: ranks of one node whose GPUs reach each other."""

from collections.abc import Sequence

from numba_symm.launch.devices import Matrix
from numba_symm.launch.ranks import name_ranks

Parts = tuple[tuple[int, ...], ...]
"""The ranks of each island, in rank order; islands are in order of their first rank."""


def divide(ranks: Sequence[int], access: Matrix, most: int | None = None) -> Parts:
    """Return a node's islands: each rank joins the first one that it fits into.

    Args:
        ranks: the ranks of the node.
        access: ``access[r][s]``: whether the GPU of the r-th of them can access that of
            the s-th; None if the driver cannot answer.
        most: the most ranks of an island; None: no limit.
    """
    parts: list[list[int]] = []
    for number in range(len(ranks)):

        def fits(part: list[int], number: int = number) -> bool:
            return (most is None or len(part) < most) and all(
                _reach_each_other(access, number, other) for other in part
            )

        for part in parts:
            if fits(part):
                part.append(number)
                break
        else:
            parts.append([number])
    return tuple(tuple(ranks[number] for number in part) for part in parts)


def _reach_each_other(access: Matrix, rank: int, other: int) -> bool:
    return access[rank][other] is not False and access[other][rank] is not False


def among(parts: Parts, members: Sequence[int]) -> Parts:
    """Return the islands of some of the ranks, by their new numbers.

    Args:
        parts: the islands of all ranks.
        members: the ranks, in the order of their new numbers.
    """
    where = {rank: index for index, part in enumerate(parts) for rank in part}
    groups: dict[int, list[int]] = {}
    for number, rank in enumerate(members):
        groups.setdefault(where[rank], []).append(number)
    return tuple(map(tuple, groups.values()))


def consecutive(part: Sequence[int]) -> bool:
    """Return whether ranks in ascending order follow one another."""
    return part[-1] - part[0] < len(part)


class Places:
    """Where ranks are, found once, because there may be many.

    Args:
        parts: the ranks of each island.

    Attributes:
        of: by rank, its island's number, and its own number there.
        largest: the number of ranks of the largest island.
        smallest: that of the smallest one.
        consecutive: whether each island's ranks follow one another.
        even: whether all islands have equally many ranks, which are consecutive.
    """

    def __init__(self, parts: Parts):
        self.of = {
            rank: (index, number)
            for index, part in enumerate(parts)
            for number, rank in enumerate(part)
        }
        self.largest, self.smallest = max(map(len, parts)), min(map(len, parts))
        self.consecutive = all(map(consecutive, parts))
        self.even = self.largest == self.smallest and self.consecutive


def described(parts: Parts, nodes: Sequence[str]) -> str:
    """Return "ranks 0, 1 on a, rank 2 on b", one entry an island."""
    return ", ".join(f"{name_ranks(part)} on {nodes[part[0]]}" for part in parts)
