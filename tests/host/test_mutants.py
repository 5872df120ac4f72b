"""Changes of the product, the choice of their tests, and what a run of these tells."""

import ast
import functools
import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants import drawn, host, kernels, results
from tests.mutants.results import Result

ROOT = Path(__file__).parents[2]
EVERY = [mutant for _, mutant in mutants.every_mutant(ROOT)]


@functools.cache
def functions(text):
    """Return the qualified names of all functions of a module."""
    left, found = [compile(text, "module", "exec")], set()
    while left:
        code = left.pop()
        found.add(code.co_qualname)
        left += [each for each in code.co_consts if hasattr(each, "co_qualname")]
    return found


def test_every_mutant_that_is_not_gone_is_another_program():
    assert len(EVERY) > mutants.SAMPLE + 100
    assert max(Counter(mutant.name for mutant in EVERY).values()) == 1
    for mutant in EVERY:
        path = ROOT / mutant.file
        text = path.read_text() if path.exists() else ""
        changed = mutant.applied(text)
        if changed is not None:
            assert changed != text
            ast.parse(changed)
            assert mutant.function(text) in functions(text)


@pytest.mark.parametrize("nearest", [host.NEAREST, kernels.NEAREST])
def test_the_nearest_tests_of_listed_mutants_exist(nearest):
    for test in itertools.chain(*nearest.values()):
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text() or not name


def test_the_baseline_has_results_of_files_that_exist():
    """A report has no place for those of other files."""
    _, before = results.read(ROOT / results.BASELINE)
    assert len(before) > 100
    assert [each for each in before if not (ROOT / each.file).exists()] == []


TEXT = '''
def first(x, y=3):
    """Text."""
    if x and not y:
        x.a = 7
    return x + y - (2 if x < y else 4)
'''
MORE = TEXT + "\n\ndef second(x):\n    return not x\n"


def test_a_change_of_one_function_keeps_the_mutants_of_others():
    """The older ones are the same; only their places may be others."""
    before = {mutant.name: mutant for _, mutant in drawn.places("a.py", TEXT)}
    after = {mutant.name: mutant for _, mutant in drawn.places("a.py", MORE)}
    news = {(each.old, each.new) for each in before.values()}
    expected = {("x and not y", "(x)"), ("x and not y", "False"), (" < ", " <= ")}
    expected |= {
        ("not y", "bool(y)"),
        ("x.a = 7", "pass"),
        ("7", "8"),
        (" - (", " + ("),
    }
    assert expected <= news
    assert all(after[name] == mutant for name, mutant in before.items())
    assert {after[name].new for name in after.keys() - before.keys()} == {"bool(x)"}
    same = drawn.places("a.py", MORE.replace("return x", "x = 1\n    return x"))
    assert sum(mutant.name in before for _, mutant in same) == len(before)


def test_results_are_read_as_they_were_written_and_compared(tmp_path):
    found = [
        Result("drawn", "b", "x.py", "lived", 7, 0, 1.5, "", "a -> b"),
        Result("drawn", "a", "x.py", "killed", 3, 1, 0.5, "a test", "< -> <="),
        Result("host", "c", "y.py", "equivalent", why="a tie", change="< -> <="),
        Result("host", "d", "y.py", "gone", change="< -> <="),
    ]
    path = tmp_path / "latest.tsv"
    results.write(path, "cdeb0b32", "0123", found)
    assert results.read(path) == ("0123", sorted(found))
    before = [found[1], found[0]._replace(outcome="killed")]
    text = results.report(found, before)
    assert "x.py" in text
    assert "1 of   2 killed,  50 %  BELOW the baseline:   2 of   2 killed" in text
    assert "lived: b a -> b" in text
    assert "equivalent: c < -> <=: a tie" in text
    assert "of each killed one 1.0 tests failed, and 3.0 ran" in text
