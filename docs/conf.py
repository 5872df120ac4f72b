"""How Sphinx builds these pages; `make docs` calls it."""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

# Before numba is imported: in the simulator, device functions are plain Python with
# docstrings.
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "_ext")]

project = "numba_symm"
copyright = "the numba_symm contributors"
version = release = version_of("numba-symm")
nitpick_ignore = [("py:mod", "numba_symm.sharing.kinds")]  # internal, as its text says

# The pages are read where they lie: the sources are the whole repository.
root_doc = "docs/index"
include_patterns = [
    *("docs/**", "examples/**", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md"),
    *("SECURITY.md", "CODE_OF_CONDUCT.md"),
    *("tests/README.md", "bench/README.md", "bench/results/README.md"),
]
exclude_patterns = [".*", "build", "dist", "collectives", "launch", "numba_symm"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_pages",  # docs/_ext
]

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # arguments are of many libraries' types; texts say which
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

html_theme = "furo"
html_title = "numba_symm"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
