"""Every page reads complete where it lies, and shows what the code and the runs say."""

import ast
import re
import runpy
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns

ROOT = Path(__file__).parents[2]
MAKER = runpy.run_path(str(ROOT / "docs/pages.py"))
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in MAKER["PAGES"]}
PROSE = {
    name: re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    for name, text in PAGES.items()
}
"""The pages without blocks of code."""
WHERE = "run `make pages`"


@pytest.mark.parametrize("page", PAGES)
def test_what_is_made_is_current(page):
    made, text = MAKER["BLOCK"], PAGES[page]
    assert len(made.findall(text)) == text.count("\n<!-- made:"), "a mark has no end"
    for block in made.finditer(text):
        assert block[0] == MAKER["current"](block), WHERE


def test_every_program_and_its_output_are_on_a_page():
    made = [m["made"] for text in PAGES.values() for m in MAKER["BLOCK"].finditer(text)]
    files = (ROOT / "docs/programs").glob("*.*")
    assert {f"program {file.name}" for file in files} <= set(made)


def test_every_public_name_is_in_the_reference():
    text = "".join(text for name, text in PAGES.items() if "docs/api/" in name)
    names = {*ns.__all__, *(f"device.{name}" for name in ns.device.__all__)}
    names -= {"device", "sharing", "mpi", "Context"}
    names -= {f"device.{name}" for name in ("EQ", "NE", "GT", "GE", "LT", "LE")}
    assert {name for name in names if f'<a id="{name}"></a>' not in text} == set()


def test_every_page_is_in_the_contents():
    for folder in "docs", "docs/api":
        links = re.findall(r"\]\(([\w-]+)\.md\)", PAGES[f"{folder}/index.md"])
        files = {page.stem for page in (ROOT / folder).glob("*.md")} - {"index"}
        assert files - set(links) == set(), f"{folder}/index.md lacks these"


def test_the_site_has_whole_docstrings_by_group_and_each_variable_in_its_index(
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "pages", SimpleNamespace(**MAKER))
    site = runpy.run_path(str(ROOT / "docs/_ext/sphinx_pages.py"))
    read = {}
    for name in "commands", "communicator":
        read[name] = source = [PAGES[f"docs/api/{name}.md"]]
        site["read"](None, f"docs/api/{name}", source)
    assert "```{index} ! timeout, ! setup timeout, " in read["commands"][0]
    for group, names in MAKER["grouped"]().items():
        shown = read["communicator"][0].partition(f"\n## {group}\n")[2]
        shown = shown.partition("\n## ")[0]
        found = re.findall(r"^\.\. auto\w+:: numba_symm\.(\S+)", shown, re.M)
        assert found == names


def test_a_page_has_one_name():
    for folder in "docs", "docs/api":
        contents = PAGES[f"{folder}/index.md"].partition("<!-- contents -->")[2]
        for name, link in re.findall(r"\[([^]]+)\]\(([^)#]+\.md)\)", contents):
            page = (ROOT / folder / link).read_text()
            assert page.startswith(f"# {name}\n"), f"{link}: another name in the index"


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_sphinx(page):
    directives, roles = r"^\s*[`:]{3,}\{.*", r"\{[\w:-]+\}`[^\s`].*"
    assert re.findall(f"{directives}|{roles}", PAGES[page], re.M) == []
    comments, definitions, targets = r"^\s*%.*", r"^: .*", r"^\([\w-]+\)="
    others = "|".join((comments, definitions, targets, r"\[\]\(.*"))  # no text
    assert re.findall(others, PROSE[page], re.M) == []


def anchors(page):
    """Return where links to a page may lead: its headings, and the names in it."""
    heads = re.findall(r"^#+ (.+)$", page, re.M)
    words = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    names = re.findall(r'<a id="([^"]+)"', page)
    return {word.replace(" ", "-") for word in words} | set(names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub("`[^`]+`", "", PROSE[page])):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        there = PROSE.get(str(target.resolve().relative_to(ROOT)), "")
        if not target.exists() or (anchor and anchor not in anchors(there)):
            lost.append(link)
    assert lost == []


MARKED = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]+) -->\n\n)?```python\n(?P<code>.*?)^```$"
    r"|^<!-- hidden\n(?P<hidden>.*?)^-->$",
    re.M | re.S,
)
"""A block of code with its mark, or code that readers do not see."""
OTHERS = {page: MAKER["BLOCK"].sub("", text) for page, text in PAGES.items()}
"""What the pages have beside what is made."""


@pytest.mark.parametrize("page", [page for page in OTHERS if "```py" in OTHERS[page]])
def test_code_runs_or_has_a_reason_not_to(page, comm, world):
    names = {"np": np, "ns": ns, "symm": ns.device, "cuda": cuda, "x": comm.zeros(4)}
    names["MPI"] = SimpleNamespace(COMM_WORLD=world)
    blocks = list(MARKED.finditer(OTHERS[page]))
    assert sum(each["hidden"] is None for each in blocks) == OTHERS[page].count("```py")
    hidden = [each["hidden"] for each in blocks if each["hidden"] is not None]
    assert len(hidden) == OTHERS[page].count("<!-- hidden")  # all are closed
    assert all("<!-- " not in each for each in hidden)  # one with the next one's end
    for block in blocks:
        code = block["code"] or block["hidden"]
        mark = "run" if block["hidden"] else block["mark"] or ""
        kind, _, of = mark.partition(" ")
        names["comm"] = comm  # another block may have closed its own
        if kind == "kernel":  # its body
            code = f"@cuda.jit\ndef {of}:\n{textwrap.indent(code, '    ')}"
        if kind in ("run", "kernel"):
            exec(compile(code, page, "exec"), names)
        elif kind == "refused:":  # on one rank
            with pytest.raises(ns.SymmError, match=of):
                exec(compile(code, page, "exec"), names)
        elif kind == "needs":
            assert f"={of}" in code or f"{of}." in code
        elif kind == "from":
            assert lines(code) <= lines((ROOT / of).read_text())
        elif kind == "signatures":
            files = of.removeprefix("of ").split()
            there = set().union(*(signatures((ROOT / f).read_text()) for f in files))
            assert signatures(code) <= there
        else:
            assert kind == "for", f"give it a mark (CONTRIBUTING.md, Pages):\n{code}"
            assert page in (ROOT / of).read_text()
    comm.check()


def lines(code):
    """Return the lines of code, without indentation, comments and order."""
    return {line.partition("#")[0].strip() for line in code.splitlines()} | {""}


def signatures(code):
    """Return the names of the functions and of their parameters, with defaults."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            every = [*ast.walk(node.args)]
            for each in every:
                each.annotation = None
            found.add((node.name, ast.unparse(node.args)))
    return found
