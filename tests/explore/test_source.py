"""The explorer steps through every device function, however its names are spelled."""

import ast
import re
import textwrap

import pytest

from explore import intrinsics
from explore.launches import Launch
from explore.scheduler import Machine
from explore.source import compiled, device_code, executed, paths
from numba_symm.gpu.kernels import _device_files

DECORATED = re.compile(
    r"^ *@.*\b(?:(?:device|array)_function|sliced\(\w+\))$", re.MULTILINE
)
NOT_EXPLORED = {"ptx", "sim", "checks", "buffers", "block_collectives"}
"""Instructions, and checks of their arguments; kernels on one rank's arrays; plain
arithmetic; functions that only call what ``block_exchange`` makes."""


def decorated(path):
    """Return the lines of a file that begin a device function, by their text."""
    text = path.read_text()
    return [text.count("\n", 0, at.start()) + 1 for at in DECORATED.finditer(text)]


def of_factories(path):
    """Return the first lines of the functions within ``make_…``, without decorators."""
    lines = []

    def look(node, outer):
        for inner in ast.iter_child_nodes(node):
            name = getattr(inner, "name", outer)
            made = isinstance(inner, ast.FunctionDef) and outer.startswith("make_")
            if made and not inner.decorator_list:
                lines.append(inner.lineno)
            look(inner, name)

    look(ast.parse(path.read_text()), "")
    return lines


def test_every_device_function_stops():
    device_code()
    here, found = {str(path) for path in paths().values()}, 0
    stepped = {place for place in intrinsics.stepped if place[0] in here}
    for path in paths().values():
        lines = {*decorated(path), *of_factories(path)}
        found += len(lines)
        assert lines == {line for file, line in stepped if file == str(path)}, path
    assert found == len(stepped) > 150


def test_every_module_with_device_functions_is_explored():
    having = {path.stem for path in _device_files() if decorated(path)}
    assert having - paths().keys() <= NOT_EXPLORED
    assert len(having & paths().keys()) > 15


def ran(text):
    """Return what a kernel of a module finally has in its word, after a run."""
    code = device_code()
    # Its text is the name of its file, too, because decorators know functions by that.
    module = executed("written", compiled(textwrap.dedent(text), text), code.find)
    machine = Machine(1, 1, 1, 0)
    word = machine.memory.map("word", 8, fill=0)
    machine.run([[Launch(module.make_kernel(), 1, (word,))]])
    return machine.memory.final(word, 8)


BARE = """
    from numba_symm.device.intrinsics import device_function, ld_u64, st_u64

    @device_function
    def add(word):
        st_u64(word, ld_u64(word) + 3)

    def make_kernel():
        def kernel(word):
            add(word)
            add(word)
        return kernel
    """
MODULES = [
    "from numba_symm.device import intrinsics",
    "import numba_symm.device.intrinsics as intrinsics",
    "from numba_symm import device\nintrinsics = device.intrinsics",
    "import numba_symm.device.intrinsics\nintrinsics = numba_symm.device.intrinsics",
]


def test_functions_by_their_names():
    assert ran(BARE) == 6


@pytest.mark.parametrize("importing", MODULES)
def test_functions_and_decorators_as_attributes_of_modules(importing):
    text = textwrap.dedent(BARE)
    for name in ("device_function\n", "ld_u64(", "st_u64("):
        text = re.sub(rf"(?<=[@ (]){re.escape(name)}", f"intrinsics.{name}", text)
    first = "from numba_symm.device.intrinsics import device_function, ld_u64, st_u64"
    assert text.count("intrinsics.") == 3
    assert ran(text.replace(first, importing)) == 6


def test_functions_of_explored_modules_as_attributes():
    assert (
        ran(
            """
        from numba_symm.collectives.protocols import workspace
        from numba_symm import dtypes
        from numba_symm.device import intrinsics as instructions, lanes

        def make_kernel():
            element = dtypes.element("int64", "test")
            access = lanes.make_lanes(element, "sum", True, 2)

            def kernel(word):
                access.store(word, 0, 1, 5, 0)
                workspace.keep_failure(word, False)
                instructions.st_u64(word, access.load(word, 0, 1)[0])

            return kernel
        """
        )
        == 5
    )


@pytest.mark.parametrize("spelling", ["device", "intrinsics.device_function or None"])
def test_a_device_function_that_would_not_stop_is_refused(spelling):
    text = BARE.replace("device_function, ld", "device_function as device, ld")
    importing = "from numba_symm.device import intrinsics\n"
    text = importing + textwrap.dedent(text.replace("@device_function", f"@{spelling}"))
    with pytest.raises(AssertionError, match=r"add: expected a function that source"):
        ran(text)
