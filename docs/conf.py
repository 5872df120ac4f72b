"""How Sphinx builds these pages; `make docs` calls it."""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

# Before numba is imported: in the simulator, device functions are plain Python with
# docstrings, and the pages' examples need no GPU.
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
os.environ["COLUMNS"] = "80"  # of the command lines' help

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "numba_symm"
copyright = "the numba_symm authors"
version = release = version_of("numba-symm")
nitpick_ignore = [("py:mod", "numba_symm.sharing.kinds")]  # internal, as its text says

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "generated",  # docs/_ext
]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # arguments are of many libraries' types; texts say which
autodoc_preserve_defaults = True
autosummary_generate = False
doctest_global_setup = """
import numpy as np
import numba_symm as ns

class Alone:
    rank, size = 0, 1
    def allgather(self, value): return [value]
    def barrier(self): pass
    def split(self, color, key): return self

comm = ns.Communicator(Alone())
x = comm.zeros(4)
"""
doctest_global_cleanup = "comm.close()"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

html_theme = "furo"
html_title = "numba_symm"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False


def setup(app):
    """Leave the examples of device functions to ``tests/simulated``.

    It runs each with memory of its own; here, all examples of a page share theirs.
    """

    def skip(app, what, name, found, options, lines):
        if name.startswith("numba_symm.device."):
            lines[:] = [
                f"{line}  # doctest: +SKIP" if ">>> " in line else line
                for line in lines
            ]

    app.connect("autodoc-process-docstring", skip)
