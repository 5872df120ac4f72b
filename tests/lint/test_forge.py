"""The version has one place, and a public forge runs what .ci/run runs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def made(text):
    """Return the targets that the commands of a text make."""
    return set(re.findall(r"^(?:\s*- run: )?make (\w+)", text, re.M))


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heads = re.findall(r"^## (\S+), (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert heads[0][0] == cited[1] == project["version"]
    assert all(date == "unreleased" for _, date in heads[:1]) or re.fullmatch(
        r"\d{4}-\d\d-\d\d", heads[0][1]
    )


def test_workflows_make_what_ci_makes():
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    found = set().union(*(made(file.read_text()) for file in workflows))
    assert made((ROOT / ".ci/run").read_text()) <= found
    assert "nightly" in found
    for target in found:
        assert re.search(rf"^{target}:", MAKEFILE, re.M), f"no target {target}"


def test_workflows_test_each_python_that_the_project_names():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    words = "Programming Language :: Python :: "
    named = [c.removeprefix(words) for c in project["classifiers"] if words in c]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    tested = re.search(r"python: \[(.+)\]", workflow)[1]
    assert [each.strip('" ') for each in tested.split(",")] == named[1:]
    assert project["requires-python"] == f">={named[1]}"
    environments = settings["tool"]["tox"]["env_list"]
    assert environments == ["oldest", *named[1:]]
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert set(re.findall(r"^ +(3\.\d+)$", nightly, re.M)) == set(named[1:])


def test_a_report_of_a_bug_has_the_nodes_facts():
    form = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    assert "numba-symm info" in form
