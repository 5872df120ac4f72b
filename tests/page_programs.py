"""Run programs one after another on this rank; started by test_pages.py under mpirun.

    python tests/page_programs.py FOLDER PROGRAM...

What a program prints goes to FOLDER/<program>.<rank>.
"""

import contextlib
import runpy
import sys
from pathlib import Path

from mpi4py import MPI

from numba_symm.command import runner


def main(folder, *programs):
    for program in map(Path, programs):
        file = Path(folder, f"{program.stem}.{MPI.COMM_WORLD.rank}")
        sys.argv = [str(program)]
        with file.open("w") as printed, contextlib.redirect_stdout(printed):
            try:
                runpy.run_path(str(program), run_name="__main__")
            except SystemExit as end:
                if end.code:  # otherwise the next programs follow
                    raise


if __name__ == "__main__":
    runner.show_errors_whole()
    main(*sys.argv[1:])
