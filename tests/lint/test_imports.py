"""The layers of docs/architecture.md: which module may import which."""

import ast
import os
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "numba_symm"
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

LAZY = {
    ("", "sharing"): "few programs share arrays",
    ("collectives.calls", "collectives.epilogues"): "few have an epilogue",
    ("collectives.calls", "collectives.composed"): "few quantize or have leaves",
    ("collectives.communicator", "collectives.equality"): "few compare their arrays",
    ("collectives.communicator", "collectives.composed"): "few sum divided arrays",
    ("collectives.communicator", "collectives.experts"): "few have experts",
    ("collectives.communicator", "collectives.islands.rebuilding"): "few rebuild",
    ("collectives.kernel_set", "collectives.kernels.coded_sum"): "few quantize",
    ("collectives.kernel_set", "collectives.composed"): "few make such calls",
    (
        "collectives.kernel_set",
        "collectives.kernels.expert_combine",
    ): "few have experts",
    ("collectives.kernel_set", "collectives.kernels.expert_dispatch"): (
        "few have experts"
    ),
    ("collectives.kernel_set", "collectives.kernels.mailed_combine"): (
        "few have experts"
    ),
    ("collectives.kernel_set", "collectives.kernels.mailed_dispatch"): (
        "few have experts"
    ),
    ("collectives.kernel_set", "collectives.protocols.few_tokens"): "few have experts",
    ("collectives.kernel_set", "collectives.protocols.tokens"): "few have experts",
    ("collectives.lifetime", "collectives.tuned"): "needs a communicator",
    ("command.cli", "bench.__main__"): "`run` and `info` need none of its libraries",
    ("command.cli", "bench.tune"): "`run` and `info` need none of its libraries",
    ("command.cli", "command.compiling"): "`run` needs none of its libraries",
    ("command.cli", "command.doctor"): "`run` needs none of its libraries",
    ("command.cli", "command.runner"): "only `run` needs mpi4py for its variable",
    ("command.cli", "command.soak"): "`run` needs none of its libraries",
    ("command.cli", "engines.nccl"): "only `info` looks for NCCL",
    ("explore", "explore.exploration"): "needs greenlet, which few programs have",
    ("command.runner", "mpi"): "a program may first set variables that Numba reads",
}
"""Imports of our own modules within functions, each with its reason."""


def layers():
    """Return the number of each module's layer, by its path in the package.

    A package's own file is in the first layer with modules of its folder.
    """
    text = ARCHITECTURE.read_text().partition("\nlayer folder ")[2]
    found, number, folder = {}, 0, ""
    for line in text.partition("\n```")[0].splitlines()[1:]:
        head, names = line[:30], line[30:].split()
        if head.strip():
            starts, folder = re.fullmatch(r" *(\d+)?  ([a-z_/]*) *", head).groups()
            number += starts is not None
            assert starts in (None, str(number))
            found.setdefault(f"{folder}__init__.py", number)
        for name in names:
            assert f"{folder}{name}.py" not in found or name == "__init__", name
            found[f"{folder}{name}.py"] = number
    return found


def files():
    """Return every module's file by the module's name in the package."""
    found = {}
    for folder, folders, names in os.walk(PACKAGE, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            found[name] = path
    return found


FILES = files()

SEAM = ("device.compiler", "device.float8", "device.models", "device.ptx")
SEAM += ("device.ptx", "gpu.kernels", "simulator")
"""The modules that know the insides of numba-cuda; no others would change with it."""

PUBLIC = ("numba", "numba.cuda", "numba.cuda.types")
INSIDES = {
    ("collectives.epilogues", "numba.core.errors"): "a user's function cannot compile",
    ("collectives.operations", "numba.core.errors"): "a user's operator cannot compile",
    ("environment", "numba.core.config"): "whether this is the simulator",
    ("gpu.arrays", "numba.cuda.cudadrv.devicearray"): "arrays, not the compiler",
}
"""Other imports of what Numba does not document, each with its reason."""


def imported(node):
    """Yield the modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{each.name}" for each in node.names]
    else:
        return
    for name in names:
        top, _, rest = name.partition(".")
        if top == PACKAGE.name:
            yield rest if rest in FILES else rest.rpartition(".")[0]


def graph():
    """Return what each module imports, (at its top level, in functions)."""
    found = {}
    for name, path in FILES.items():
        tree = ast.parse(path.read_text())
        everywhere = {id(node): node for node in ast.walk(tree)}
        lazy = {
            id(inner)
            for node in everywhere.values()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for inner in ast.walk(node)
        }
        at_top, within = set(), set()
        for key, node in everywhere.items():
            (within if key in lazy else at_top).update(imported(node))
        found[name] = at_top, within
    return found


GRAPH = graph()


def test_the_picture_names_every_module():
    paths = {str(path.relative_to(PACKAGE)) for path in FILES.values()}
    assert set(layers()) == paths, "docs/architecture.md: name the module in its layer"


def test_the_page_names_only_files_that_exist_and_fits_its_width():
    text = ARCHITECTURE.read_text()
    way = text.partition("## The life of one all_reduce")[2].partition("```\n\n")[0]
    for name in re.findall(r"[a-z_/]+\.py|[a-z_/]+/(?=,|\n)", way):
        assert (PACKAGE / name).exists(), name
    assert [line for line in text.splitlines() if len(line) > 120] == []


def test_modules_import_only_from_layers_above_and_their_own():
    by_path = layers()
    rows = {
        name: by_path[str(path.relative_to(PACKAGE))] for name, path in FILES.items()
    }
    wrong = [
        f"{name} imports {other}"
        for name, (at_top, _) in GRAPH.items()
        for other in at_top
        if rows[other] > rows[name]
    ]
    assert wrong == []


def test_imports_within_functions_have_a_reason():
    lazy = {(name, other) for name, (_, within) in GRAPH.items() for other in within}
    assert lazy == set(LAZY)


def test_no_module_imports_itself_by_way_of_others():
    """All imports count, also those in functions and those for type checkers."""
    left = {name: at_top | within for name, (at_top, within) in GRAPH.items()}
    before = None
    while left != before:  # without those that import none of them, or no other imports
        before = left
        used = set().union(*left.values())
        left = {name: others & set(left) for name, others in left.items()}
        left = {
            name: others for name, others in left.items() if others and name in used
        }
    assert left == {}


def of_numba(node):
    """Yield the modules of Numba that a statement imports or imports from."""
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module]
        if node.module in ("numba", "numba.core"):
            names = [f"{node.module}.{each.name}" for each in node.names]
    else:
        return
    yield from (name for name in names if name.partition(".")[0] == "numba")


def test_numbas_insides_are_known_to_few_modules():
    inside = {
        (name, other)
        for name, path in FILES.items()
        if name not in SEAM
        for node in ast.walk(ast.parse(path.read_text()))
        for other in of_numba(node)
        if other not in PUBLIC
    }
    assert inside == set(INSIDES)


def test_a_name_that_two_classes_have_is_in_the_glossary():
    defined = Counter(
        node.name
        for folder, _, files in os.walk(PACKAGE, followlinks=True)
        for path in (Path(folder, file) for file in files if file.endswith(".py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    table = (
        (ARCHITECTURE.parent / "glossary.md")
        .read_text()
        .partition("two classes have")[2]
    )
    listed = re.findall(r"^\| `(\w+)` ", table, re.M)
    assert listed == [name for name, number in sorted(defined.items()) if number > 1]
