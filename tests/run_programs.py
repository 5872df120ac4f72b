"""Runs all programs of a folder, one after another, on each rank of a job.

python tests/run_programs.py FOLDER
"""

import runpy
import sys
from pathlib import Path

for program in sorted(Path(sys.argv[1]).glob("*.py")):
    runpy.run_path(str(program), run_name="__main__")
    sys.stdout.flush()
