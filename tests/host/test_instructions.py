"""The table of PTX instructions, and the modules that follow from it."""

import ast
import re
from pathlib import Path

import numba_symm.device
from numba_symm.device.instructions import (
    LOADS,
    MEETS,
    NONE,
    ORDERS,
    STORES,
    TABLE,
    TYPES,
)

FOLDERS = Path(numba_symm.device.__file__).parent, Path(__file__).parents[1] / "explore"
SHUFFLE = "of_first_lane"  # only ``ptx.py`` uses it


def assigned(path):
    """Return the names that a module defines, imports or assigns at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.Assign):
            every = (each for target in node.targets for each in ast.walk(target))
            names.update(each.id for each in every if isinstance(each, ast.Name))
    return names


def test_the_simulator_and_the_explorer_have_every_instruction():
    device, explore = FOLDERS
    for path in (device / "sim.py", explore / "intrinsics.py"):
        assert TABLE.keys() - assigned(path) == {SHUFFLE}, path


def test_operands_and_effects_are_those_of_the_ptx():
    for name, each in TABLE.items():
        scalars = [*each.result, *(kind for one in each.operands for kind in one)]
        assert set(scalars) <= set(TYPES)
        numbers = {int(number) for number in re.findall(r"\$(\d+)", each.template)}
        assert numbers == set(range(len(scalars))), name
        assert each.effect == wanted_effect(each.template), name


def wanted_effect(template):
    """Return the effect of inline PTX, by its first word with one."""
    effects = {"ld": LOADS, "st": STORES, "fence": ORDERS, "griddepcontrol": ORDERS}
    effects |= {"bar": MEETS, "shfl": MEETS}
    words = re.findall(r"([a-z]+)\.\w", template)
    return next((effects[word] for word in words if word in effects), NONE)
