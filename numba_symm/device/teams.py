"""Teams: some of a communicator's ranks, for barriers and collectives in kernels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from numba_symm.errors import ArgumentError


class Team(NamedTuple):
    """Some ranks of a communicator, in an agreed order, for barriers and collectives.

    The host makes a team with one of the methods, without waiting for other ranks, and
    passes it to kernels as an ordinary argument. All ranks of a team must make it with
    equal arguments.

    Attributes:
        place: this rank's index in the team; -1 if the rank does not belong to the
            team.
        size: the number of ranks in the team.
        ranks: the team's ranks, as numbers in the communicator, by place.

    Example:
        >>> team = symm.Team.of(ctx, [0])
        >>> @cuda.jit
        ... def kernel(ctx, team, old):
        ...     symm.barrier(ctx, 3, team)
        ...     old[0] = team.size
        >>> kernel[1, 2](ctx, team, old)
        >>> int(old[0])
        1
    """

    place: int
    size: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, ctx: Any, ranks: Sequence[int]) -> "Team":
        """Return the team of ``ranks``, in that order.

        Raises:
            ArgumentError: the list is empty, contains a number twice, or contains a
                number that is not a rank.
        """
        found = tuple(ranks)
        known = range(ctx.size)
        valid = all(type(rank) is int and rank in known for rank in found)
        if not found or not valid or len(set(found)) < len(found):
            raise ArgumentError(
                f"Team: expected different ranks from 0 to {known[-1]}, got {found}"
            )
        index = found.index(ctx.rank) if ctx.rank in found else -1
        return cls(index, len(found), found)

    @classmethod
    def strided(cls, ctx: Any, start: int, stride: int, size: int) -> "Team":
        """Return the team of ``size`` ranks from ``start`` on, ``stride`` apart."""
        return cls.of(ctx, [start + stride * k for k in range(size)])

    @classmethod
    def masked(cls, ctx: Any, mask: int) -> "Team":
        """Return the team of the ranks whose bits are set in ``mask``."""
        return cls.of(ctx, [bit for bit in range(mask.bit_length()) if mask >> bit & 1])

    @classmethod
    def row(cls, ctx: Any, columns: int) -> "Team":
        """Return this rank's row of a mesh in which a row has ``columns`` ranks.

        Raises:
            ArgumentError: the number of ranks is not a multiple of ``columns``.
        """
        _check_mesh(ctx, columns)
        return cls.strided(ctx, ctx.rank // columns * columns, 1, columns)

    @classmethod
    def column(cls, ctx: Any, columns: int) -> "Team":
        """Return this rank's column of the mesh that :meth:`row` describes."""
        _check_mesh(ctx, columns)
        rows = ctx.size // columns
        return cls.strided(ctx, ctx.rank % columns, columns, rows)


def _check_mesh(ctx: Any, columns: int) -> None:
    if type(columns) is not int or columns < 1 or ctx.size % columns:
        raise ArgumentError(
            f"Team: expected a number of columns that divides {ctx.size} ranks, "
            f"got {columns!r}"
        )
