"""The layout: code in top-level folders, one import name, the same in a wheel."""

import importlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ["bench", "collectives", "launch"]

# A program may import numba_symm before it starts MPI and before it picks a GPU.
IMPORT_ALONE = """
import sys

LATER = "sharing", "mpi", "bench", "command"

from cuda.bindings import driver
from numba import cuda

def refuse(*arguments):
    sys.exit("importing numba_symm started CUDA")

driver.cuInit = refuse
opened, before = [], set(sys.modules)
sys.addaudithook(lambda event, given: event == "open" and opened.append(given[0]))
import numba_symm

if "mpi4py.MPI" in sys.modules:
    sys.exit("importing numba_symm started MPI")
if len(opened) > 310:  # a module is one or two files
    sys.exit(f"importing numba_symm opened {len(opened)} files")
for name in sorted(set(sys.modules) - before):
    if name.startswith(tuple(f"numba_symm.{part}" for part in LATER)):
        sys.exit(f"importing numba_symm imported {name}")
if not callable(numba_symm.share) or numba_symm.sharing.share is not numba_symm.share:
    sys.exit("sharing was not imported when it was used")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build an sdist from a copy of this tree, and a wheel from the sdist."""
    folder = tmp_path_factory.mktemp("build")
    junk = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=junk)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    built = subprocess.run(
        [*command, tree], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def modules(folder):
    """Return the modules of a top-level folder, as paths inside the package."""
    files = (ROOT / folder).rglob("*.py")
    return {f"numba_symm/{file.relative_to(ROOT)}" for file in files}


@pytest.mark.parametrize("folder", LINKED)
def test_the_wheel_has_the_linked_folders(built, folder):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert modules(folder) <= set(names)


def test_the_wheel_has_one_top_level_name_and_types(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"numba_symm"}
    assert "numba_symm/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_the_linked_folders(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert set().union(*map(modules, LINKED)) <= names


@pytest.mark.parametrize("folder", LINKED)
def test_the_links_are_relative(folder):
    assert (ROOT / "numba_symm" / folder).readlink() == Path("..", folder)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a git checkout")
@pytest.mark.parametrize("folder", LINKED)
def test_the_links_are_committed_as_links(folder):
    command = ["git", "ls-files", "--stage", f"numba_symm/{folder}"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout.startswith("120000 ")


@pytest.mark.parametrize("folder", LINKED)
def test_a_folder_imported_by_its_own_name_names_the_right_one(folder, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=f"import numba_symm.{folder}, not {folder}"):
        importlib.import_module(folder)


def test_importing_starts_neither_mpi_nor_cuda():
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
