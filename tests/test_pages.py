"""The documentation's programs print what its pages show, and its error texts exist.

``tests/simulated/test_pages_are_current.py`` checks that the pages show these programs.
"""

import ast
import re
import runpy

import pytest

from numba_symm.command import launcher
from tests.test_mpirun import ROOT, environment, run

PAGES = ROOT / "docs"
PROGRAMS = sorted(PAGES.glob("programs/*.py"))
EXAMPLES = [
    ROOT / f"examples/{name}.py"
    for name in (
        "conjugate_gradient",
        "histogram",
        "jacobi",
        "mixture",
        "radix_exchange",
        "ring_attention",
        "rms_norm",
        "row_parallel",
    )
]
"""Programs that check their results."""
ON_GPUS = {"graph"}  # nothing is captured in the simulator
RANKS = 4
SOURCES = [
    file
    for folder in ("collectives", "launch", "numba_symm")
    for file in (ROOT / folder).rglob("*.py")
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run all programs in one job; return where each rank's output is."""
    return outputs(RANKS, tmp_path_factory.mktemp("pages"))


def outputs(ranks, folder):
    """Run all programs in one job; return the folder, where each rank's output is."""
    environ = environment(ranks)
    simulated = environ.get("NUMBA_ENABLE_CUDASIM") == "1"
    left_out = ON_GPUS if simulated else set()
    every = [*PROGRAMS, *EXAMPLES]
    programs = [str(each) for each in every if each.stem not in left_out]
    runner = ["-m", "mpi4py", str(ROOT / "tests/page_programs.py"), str(folder)]
    command = launcher.mpirun_command(
        ranks, [*runner, *programs], launcher.find_mpirun()
    )
    log = folder / "mpirun.txt"
    assert run(command, environ, log) == 0, log.read_text()
    return folder


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_prints_what_its_page_shows(job, program):
    files = [job / f"{program.stem}.{rank}" for rank in range(RANKS)]
    if program.stem in ON_GPUS and not files[0].exists():
        pytest.skip("no NVIDIA GPU")
    printed = [line for file in files for line in file.read_text().splitlines()]
    assert printed == program.with_suffix(".txt").read_text().splitlines()


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda program: program.stem)
def test_an_example_ends_on_every_rank(job, program):
    for rank in range(RANKS):
        assert f"rank {rank} " in (job / f"{program.stem}.{rank}").read_text()


def test_exact_sums_give_the_same_residuals_on_any_number_of_ranks(tmp_path):
    program = ROOT / "examples/conjugate_gradient.py"
    found = {}
    for ranks in (1, 3):
        runner = ["-m", "mpi4py", str(program), "--residuals"]
        command = launcher.mpirun_command(ranks, runner, launcher.find_mpirun())
        log = tmp_path / f"{ranks}.txt"
        assert run(command, environment(ranks), log) == 0, log.read_text()
        for line in log.read_text().splitlines():
            name, _, values = line.partition(": ")
            if name.startswith("residuals"):
                found.setdefault(name, []).append(values)
    exact, summed = found["residuals with comm.dot"], found.popitem()[1]
    assert len(exact) == len(summed) == 2
    assert len(set(exact)) == 1
    assert exact[0].count("0x1.") == 9
    assert len(set(summed)) > 1


def test_an_example_draws_its_field(tmp_path):
    pytest.importorskip("matplotlib")
    draw = runpy.run_path(str(ROOT / "examples/jacobi.py"))["draw"]
    draw([[0, 1], [2, 3]], tmp_path / "field.png")
    assert (tmp_path / "field.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_trace_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw = runpy.run_path(str(PAGES / "drawings/trace.py"))["draw"]
    about = {"ph": "X", "pid": 0, "ts": 3e3, "dur": 9e3}
    names = enumerate(("step 1", "all_reduce of 64 float32"))
    events = [about | {"tid": tid, "name": name} for tid, name in names]
    draw([{"ph": "M", "pid": 0}, *events], tmp_path / "trace.svg")
    text = (tmp_path / "trace.svg").read_text()
    assert all(f">{each}<" in text for each in ("rank 0: tags", "all_reduce", "step 1"))


def test_every_program_runs_on_one_rank(tmp_path):
    outputs(1, tmp_path)
    assert (tmp_path / "messages.0").read_text() == "0 [0 0] [0 0]\n"
    assert (tmp_path / "put.0").read_text() == "0 [0 0 0 0]\n"


def test_every_text_that_troubleshooting_explains_is_in_the_code():
    page = (PAGES / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| text \|.*\n\|[-|]*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert len(tables) == page.count("\n| text |")
    cells = re.findall(r"^\| `(.+?)` \|", "".join(tables), re.MULTILINE)
    assert len(cells) == sum(table.count("\n") for table in tables)
    known = [text for file in SOURCES for text in texts(file)]
    for cell in cells:
        pattern = re.compile(".+?".join(map(re.escape, cell.split("…"))))
        assert any(map(pattern.search, known)), f"no error says {cell!r}"


def test_every_test_that_reliability_names_exists():
    page = (PAGES / "reliability.md").read_text().partition("## Figures")[0]
    named = {
        each
        for row in re.findall(r"^\| [^|]+ \| (`.+) \|$", page, re.MULTILINE)
        for each in re.findall(r"`(.+?)`", row)
    }
    assert len(named) >= page.count("\n| ") - 2
    for each in named:
        assert (ROOT / "tests" / each).exists(), each


def texts(file):
    """Yield the strings of a source file, with dots for inserted values."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", None) for part in node.values)
            yield "".join(part if isinstance(part, str) else "…" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
