"""The layout of the workspace, as GPUs have it."""

import itertools

import pytest

from numba_symm.collectives.protocols import partition, workspace


@pytest.mark.parametrize("size", range(1, 65))
def test_every_number_of_ranks_has_room(size):
    at = workspace.layout(size)
    regions = [region for region in vars(at).values() if hasattr(region, "slots")]
    assert all(one.end <= two.epochs for one, two in itertools.pairwise(regions))
    assert regions[-1].end == at.nbytes
    copied = workspace.COPIED if 1 < size <= workspace.COPYING else 0
    assert at.copied.end - at.copied.slots == copied
    assert at.nbytes - copied <= workspace.LIMIT
    if size > 1:
        assert workspace.transfer_tiles(size) in (1, 2, 4, 8, 16)


def test_a_thin_message_is_spread_over_all_blocks():
    most = workspace.CHUNKED.blocks
    grid, tiles, number = partition.chunks_of(most * workspace.THREADS, 2, most)
    assert (grid, tiles, number) == (most, 1, 1)
    grid, tiles, number = partition.chunks_of(10**6, 2, most)
    assert tiles == workspace.CHUNKED.tiles(2)
    assert grid * tiles * number * workspace.THREADS >= 10**6
