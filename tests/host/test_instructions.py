"""The table of PTX instructions, and the modules that follow from it."""

import re

import pytest
from explore import intrinsics

from numba_symm.device import host_atomics, ptx, sim
from numba_symm.device.instructions import (
    CLOCK,
    ENDS,
    LOADS,
    MEETS,
    NONE,
    ORDERS,
    STORES,
    TABLE,
    TYPES,
    UPDATES,
)

SHUFFLE = "of_first_lane"  # only ``ptx.py`` uses it


@pytest.mark.parametrize("modules", [(sim, host_atomics), (intrinsics,)])
def test_the_simulator_and_the_explorer_have_every_instruction(modules):
    assert TABLE.keys() - {name for each in modules for name in vars(each)} == {SHUFFLE}
    assert TABLE.keys() <= set(vars(ptx))


def test_operands_and_effects_are_those_of_the_ptx():
    for name, each in TABLE.items():
        scalars = [*each.result, *(kind for one in each.operands for kind in one)]
        assert set(scalars) <= set(TYPES)
        numbers = {int(number) for number in re.findall(r"\$(\d+)", each.template)}
        assert numbers == set(range(len(scalars))), name
        assert each.effect == wanted_effect(each.template), name


def wanted_effect(template):
    """Return the effect of inline PTX, by its first word with one."""
    effects = {
        "ld": LOADS,
        "st": STORES,
        "atom": UPDATES,
        "fence": ORDERS,
        "griddepcontrol": ORDERS,
    }
    effects |= dict.fromkeys(("bar", "shfl", "vote"), MEETS)
    if template == "exit;":
        return ENDS
    if "timer" in template:
        return CLOCK
    words = re.findall(r"([a-z]+)\.\w", template)
    return next((effects[word] for word in words if word in effects), NONE)
