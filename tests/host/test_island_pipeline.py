"""The order of the stages of chunks that overlap."""

from types import SimpleNamespace

import pytest

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.rails import CHUNKS, Stages, overlapped
from numba_symm.collectives.islands.site import DEFAULT_SIZES
from numba_symm.collectives.protocols.workspace import VECTOR


def ticks(exchanges):
    """Return what is exchanged and what is done at each tick.

    Args:
        exchanges: of each chunk, how many.
    """
    found = []
    site = SimpleNamespace(between=lambda what, *given: found.append(given) or [])
    overlapped(
        site,
        "all_reduce",
        [
            Stages(
                [[(chunk, n)] for n in range(number + 1)],
                [([(chunk, n)], [(chunk, n)]) for n in range(number)],
            )
            for chunk, number in enumerate(exchanges)
        ],
    )
    assert all(sends == receives for sends, receives, _ in found)
    return [(sends, beside) for sends, _, beside in found]


def test_the_work_of_two_chunks_is_beside_the_exchange_of_a_third():
    assert ticks([1, 1, 1, 1]) == [
        ([], [(0, 0)]),
        ([(0, 0)], [(1, 0)]),
        ([(1, 0)], [(0, 1), (2, 0)]),
        ([(2, 0)], [(1, 1), (3, 0)]),
        ([(3, 0)], [(2, 1)]),
        ([], [(3, 1)]),
    ]


def test_a_chunk_without_an_exchange_is_beside_that_of_the_one_before():
    assert ticks([1, 0]) == [([], [(0, 0)]), ([(0, 0)], [(1, 0)]), ([], [(0, 1)])]


@pytest.mark.parametrize("exchanges", [[1], [2], [2] * 5, [2, 2, 2, 1], [1] * 4])
def test_stages_are_in_order_and_two_halves_of_the_staging_memory_suffice(exchanges):
    order = []  # (chunk, stage): work has even stages
    for tick, (exchanged, beside) in enumerate(ticks(exchanges)):
        order += [(tick, c, 2 * n + 1) for c, n in exchanged]
        order += [(tick + place / 99, c, 2 * n) for place, (c, n) in enumerate(beside)]
    when = {(c, stage): at for at, c, stage in order}
    assert len(when) == len(order)
    for (c, stage), at in when.items():
        if stage:  # a later tick: an exchange and its own chunk's work do not overlap
            assert int(at) > int(when[c, stage - 1])
        if stage == 0 and c >= 2:  # the half has been read
            assert at > when[c - 2, 2]
            assert int(at) > int(when[c - 2, 1])


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_message_has_several_chunks_but_not_small_ones(shards):
    width, most, least = 4, shards * DEFAULT_SIZES.chunk * VECTOR, DEFAULT_SIZES.chunk
    few = rails.several(shards * least // width, shards, width, most, least)
    assert few == shards * least // width  # one chunk
    large = CHUNKS * shards * least
    assert CHUNKS * rails.several(large, shards, width, most, least) >= large
    assert rails.several(100 * large, shards, width, most, least) == most
