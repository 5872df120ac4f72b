"""Runs a module of mpi4py's own tests on each rank, as they are, with host arrays.

    numba-symm run -n 3 --simulate --as-mpi4py tests/host_suite.py FOLDER test_rma.py

FOLDER has the tests of mpi4py's source distribution. They must not find Numba, which
the library itself needs, because they would make arrays of the device.
"""

import importlib
import re
import runpy
import sys

import numba


def main(folder, module):
    sys.path.insert(0, folder)
    version, numba.__version__ = numba.__version__, "0.1.0"  # too old for them
    importlib.import_module("arrayimpl")
    numba.__version__ = version
    main = f"{folder}/main.py"
    sys.argv[:] = [main, "--numba", "-v", "-i", f"^{re.escape(module)}"]
    runpy.run_path(main, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
