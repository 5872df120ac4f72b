"""The markers in the device code, and the edits that use them."""

import ast
import importlib
import textwrap
from pathlib import Path

import pytest

import numba_symm
from explore import markers
from explore.markers import marked, moved, removed, replaced, within
from explore.source import paths
from tests import added

for path in Path(__file__).parent.glob("test_*.py"):
    importlib.import_module(f"{__package__}.{path.stem}")
EDITS = list(dict.fromkeys(markers.EDITS))  # those of all tests

each_module = pytest.mark.parametrize("module", paths())


@each_module
def test_every_marker_is_used_and_every_edit_has_its_markers(module):
    text = paths()[module].read_text()
    used = {name for edit in EDITS if edit.module == module for name in edit.markers}
    assert used == marked(text, ast.parse(text)).keys()


def test_no_edit_and_no_marker_is_in_a_module_that_is_not_explored():
    package = Path(numba_symm.__file__).parent
    roots = [package, *(folder for folder in package.iterdir() if folder.is_dir())]
    files = {file.resolve() for root in roots for file in root.rglob("*.py")}
    having = {file for file in files if "# explore:" in file.read_text()}
    assert {edit.module for edit in EDITS} <= paths().keys() | {added.NAME}
    assert having <= {file.resolve() for file in paths().values()}
    assert {file.stem for file in having} >= {"flags", "signals"}


def is_text(node):
    """Return whether a node is a string that is a statement, such as a docstring."""
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)


def edited(text, edit):
    """Return a module's code after an edit, without comments and docstrings."""
    tree = ast.parse(text)
    edit.apply(tree, marked(text, tree))
    for node in ast.walk(tree):
        if is_text(node):
            node.value.value = ""
    return ast.unparse(tree)


CODE = """
    @device_function
    def kernel(size):  # explore: kernel
        if size > 1:  # explore: outer
            first(size)  # explore: first
            # A comment without a marker.
            second(size)  # explore: second
        elif size == 1:  # explore: inner
            pass
        # explore: result
        # Another one.
        result = (
            4 * (size + 1)
        )
        return result
    """
WHOLE = textwrap.dedent(CODE)


def after(old, new):
    """Return the code with a text replaced by another one."""
    assert WHOLE.count(old) == 1
    return ast.unparse(ast.parse(WHOLE.replace(old, new)))


def test_edits():
    assert edited(WHOLE, removed("m", "first")) == after("first(size)", "pass")
    assert edited(WHOLE, replaced("m", "second", "a()\nb()")) == after(
        "second(size)", "a(); b()"
    )
    assert edited(WHOLE, within("m", "outer", "size > 1", "True")) == after(
        "size > 1", "True"
    )
    assert edited(WHOLE, within("m", "outer", "second(size)", "pass")) == after(
        "second(size)", "pass"
    )
    assert edited(WHOLE, within("m", "result", "4*(size + 1)", "0")) == after(
        "4 * (size + 1)", "0"
    )
    swapped = after("(size)  # explore: first", "(size)").replace("first", "third")
    swapped = swapped.replace("second", "first").replace("third", "second")
    assert edited(WHOLE, moved("m", "first", after="second")) == swapped
    assert edited(WHOLE, moved("m", "second", before="first")) == swapped


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: removed("m", "third"), "expected markers {'third'}"),
        (lambda: moved("m", "first", after="third"), "expected markers {'third'}"),
        (lambda: within("m", "first", "second", "third"), "expected 1 such part"),
        (lambda: within("m", "outer", "size", "0"), "expected 1 such part, got 4"),
        (lambda: within("m", "first", "size", "size"), "expected a change"),
        (lambda: replaced("m", "first", "first( size )"), "expected a change"),
        (lambda: moved("m", "first", before="second"), "expected a change"),
    ],
)
def test_edits_that_change_nothing_are_refused(make, error):
    with pytest.raises(AssertionError) as caught:
        edited(WHOLE, make())
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("result()  # explore: first", "once, got twice"),
        ("result()  # explore: first one", "expected '# explore: NAME'"),
        ("result()  # It explore: first", "expected '# explore: NAME'"),
        ("result(\n)  # explore: third", "a statement's first line"),
        ("# explore: third", "a statement's first line"),
    ],
)
def test_markers_that_mark_nothing_are_refused(line, error):
    text = f"{WHOLE}\n{line}\n"
    with pytest.raises(AssertionError, match=error):
        marked(text, ast.parse(text))
