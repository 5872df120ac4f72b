"""What PyLops-MPI, mpi4py-fft and a program of CuPy gain over mpi4py.

    python -m tests.laboratory.packages build/packages --json r.json

Each program of ``workloads.py`` runs with device arrays, with ``numba_symm.mpi`` in
mpi4py's place, and then with mpi4py through the host. The first round compiles kernels,
so the table has the last one. A factor above 1 means that this library takes less time.

The folder has the packages, as ``pytest tests/test_packages.py`` downloads them. With
``--simulate``, the same programs run on small arrays of NumPy; the times mean nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from numba_symm.bench.report import commit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMMAND, WORKLOADS = "numba_symm.command.cli", "tests.laboratory.workloads"
WAYS = "device", "host"
OTHERS = "pylops-*", "mpi4py_fft-*"
PROGRAMS = (
    "cgls-shared",
    "cgls-divided",
    "fft-256",
    "jacobi-1024",
    "jacobi-1024-no-wait",
    "jacobi-4096",
)


class JobFailed(Exception):
    """A job that ended badly; its text is the end of the job's output."""


class Jobs:
    """Starts programs on ranks.

    Args:
        options: the command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pylops = next(options.packages.glob("pylops_mpi-*"))
        others = (
            options.packages.glob("pylops-*"),
            options.packages.glob("mpi4py_fft-*"),
        )
        folders = [self.pylops, *(folder for found in others for folder in found), ROOT]
        path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "NCCL_PYLOPS_MPI": "0",
            "TEST_CUPY_PYLOPS": str(int(not options.simulate)),
        }

    def run(self, name: str, way: str, result: Path) -> None:
        """Run a program on all ranks; raise ``JobFailed`` if that fails."""
        device = way == "device"
        program = [str(HERE / "workloads.py"), name, way, str(result)]
        if device and self.options.simulate:
            program[:1] = [str(ROOT / "tests/on_devices.py"), "-m", WORKLOADS]
        simulate = ["--simulate"] * self.options.simulate
        in_place = ["--as-mpi4py"] * (device and not self.options.simulate)
        run = [sys.executable, "-m", COMMAND, "run", "-n", str(self.options.ranks)]
        command = [*run, *simulate, *in_place, *program]
        environ = self.environ | {"PYLOPS_MPI_CUDA_AWARE": str(int(device))}
        try:
            ended = subprocess.run(
                command,
                env=environ,
                cwd=self.pylops,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self.options.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            text = str(late.output)[-3000:]
            raise JobFailed(f"not ended after {late.timeout} s: {text}") from late
        if ended.returncode:
            raise JobFailed(f"exit code {ended.returncode}: {ended.stdout[-3000:]}")

    def workload(self, name: str, way: str) -> dict[str, Any]:
        """Return the seconds and the result of a program."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            self.run(name, way, result)
            found: dict[str, Any] = json.loads(result.read_text())
            return found


def compare(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the median seconds of a program, both ways, if the results agree."""
    device, host = (found[way]["result"] for way in WAYS)
    np.testing.assert_allclose(device, host, rtol=1e-9, err_msg="results differ")
    row: dict[str, Any] = {}
    for way, each in found.items():
        row[way] = float(np.median(each["seconds"]))
        row[f"{way} samples"] = each["seconds"]
    return row


def measure(name: str, jobs: Jobs) -> dict[str, Any]:
    """Return a program's row, of the last round."""
    row: dict[str, Any] = {}
    for _ in range(jobs.options.rounds):
        row = compare({way: jobs.workload(name, way) for way in WAYS})
        device, host = (row[way] for way in WAYS)
        row["factor"] = host / device if device else float("nan")
        print(f"{name:20} {device:10.4f} {host:10.4f} {row['factor']:8.2f}", flush=True)
    return row


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.packages")
    parser.add_argument("packages", type=Path, help="the folder of the packages")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--only", help="programs, with commas", type=names)
    parser.add_argument("--rounds", type=int, default=2, help="default 2")
    parser.add_argument("--seconds", type=float, default=240, help="of a job, at most")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--simulate", action="store_true", help="NumPy, no GPU")
    options = parser.parse_args(words)
    options.packages = options.packages.resolve()
    for wanted in ("pylops_mpi-*", *OTHERS):
        if not list(options.packages.glob(wanted)):
            parser.error(f"{options.packages} has no {wanted}; see --help")
    return options


def names(text: str) -> list[str]:
    """Return the programs that a word names."""
    found = text.split(",")
    for name in found:
        if name not in PROGRAMS:
            raise argparse.ArgumentTypeError(f"expected of {PROGRAMS}, got {name!r}")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a line for each round, and write the file."""
    options = options_of(words)
    jobs, rows, failed = Jobs(options), {}, 0
    print(f"{'program':20} {'device s':>10} {'host s':>10} {'factor':>8}", flush=True)
    for name in options.only or PROGRAMS:
        began = time.monotonic()
        try:
            rows[name] = measure(name, jobs)
        except (JobFailed, AssertionError) as error:
            rows[name], failed = {"error": str(error)}, failed + 1
            print(f"{name:20} failed: {error}", flush=True)
        rows[name]["wall"] = time.monotonic() - began
        if options.json:
            options.json.write_text(json.dumps(described(options, rows), indent=1))
    return 1 if failed else 0


def described(options: argparse.Namespace, rows: dict[str, Any]) -> dict[str, Any]:
    """Return the results with what they depend on."""
    versions = {name: version(name) for name in ("numba-cuda", "numpy", "mpi4py")}
    versions["Python"] = platform.python_version()
    return {
        "command": sys.argv,
        "commit": commit(HERE),
        "packages": sorted(path.name for path in options.packages.iterdir()),
        "ranks": options.ranks,
        "versions": versions,
        "programs": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
