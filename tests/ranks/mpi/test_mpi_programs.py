"""Programs that are drawn, with device arrays and with host arrays under mpi4py.

``tests/drivers/programs.py`` runs as many as asked.
"""

import os

import pytest

from tests.drivers.programs import PHASES, Programs
from tests.drivers.windows import Windows
from tests.whole import WHOLE

PROGRAMS = 100 if WHOLE else 25


@pytest.mark.parametrize("limit", [None, "3000"], ids=["", "limited"])
def test_programs_that_are_drawn(world, monkeypatch, limit):
    """A limit lets sends wait until the receiver has received other messages."""
    phases = PHASES
    if limit is not None:
        monkeypatch.setenv("NUMBA_SYMM_MESSAGE_LIMIT", limit)
        phases = PHASES[:2]
    if "NUMBA_SYMM_ISLAND_SIZE" in os.environ:
        phases = [each for each in phases if each is not Windows]
    programs = Programs(world, phases)
    first = 1000 if limit else 0
    for seed in range(first, first + PROGRAMS):
        found = programs.run(seed)
        assert found is None, found
    programs.close()
