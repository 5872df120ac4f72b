"""The layout of the workspace, as GPUs have it."""

import itertools

import pytest

from numba_symm.collectives.kernel_set import endpoint
from numba_symm.collectives.protocols import partition, workspace
from numba_symm.collectives.protocols.binding import EARLY_VECTORS
from numba_symm.collectives.protocols.mailboxes import TRANSPORTS, mailed_grid


@pytest.mark.parametrize("size", range(1, 65))
def test_every_number_of_ranks_has_room(size):
    at = workspace.layout(size)
    regions = [region for region in vars(at).values() if hasattr(region, "slots")]
    assert all(one.end <= two.epochs for one, two in itertools.pairwise(regions))
    assert regions[-1].end == at.nbytes
    assert at.nbytes <= workspace.LIMIT
    if size > 1:
        assert workspace.transfer_tiles(size) in (1, 2, 4, 8, 16)


def test_a_thin_message_is_spread_over_all_blocks():
    most = workspace.CHUNKED.blocks
    end = endpoint(2, 2 * most // workspace.HELD)  # all blocks fit in half of them
    grid, tiles, number = partition.chunks_of(most * workspace.THREADS, end)
    assert (grid, tiles, number) == (most, 1, 1)
    grid, tiles, number = partition.chunks_of(10**6, end)
    assert tiles == workspace.CHUNKED.tiles(2)
    assert grid * tiles * number * workspace.THREADS >= 10**6


@pytest.mark.parametrize("multiprocessors", [1, 2, 8, 15, 31, 32, 62, 132])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_calls_are_early_while_a_thread_sends_few_vectors(size, multiprocessors):
    """One multiprocessor more never makes a call late that was early."""
    end = endpoint(size, multiprocessors)
    tables = workspace.ONE_SHOT, workspace.TWO_SHOT
    for transport, protocol in (pair for table in tables for pair in table.items()):
        held = workspace.HELD // TRANSPORTS[transport].weight
        most = min(protocol.most(size), held * multiprocessors)
        early = min(most, held * (multiprocessors // 2))
        for tiles in range(1, 4 * most):
            vectors = tiles * workspace.THREADS
            grid, of_a_thread = mailed_grid(end, transport, protocol, vectors)
            assert grid <= most
            if tiles * (size - 1) <= EARLY_VECTORS * early:
                assert grid <= early
                assert of_a_thread <= EARLY_VECTORS
            if tiles > EARLY_VECTORS * early and tiles % most == 0:
                assert grid == most  # it takes all multiprocessors
