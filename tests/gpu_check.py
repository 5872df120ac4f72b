"""What a change may have broken or slowed down on GPUs, in at most ten minutes.

    python3 -m tests.gpu_check [--record] [--only NAME ...] [--seconds N]

`make gpu` runs it, on a node with one GPU, which two ranks share under MPS, or more.
First it measures: graphs, eager calls, messages, and calls beside a product. Every
figure is another library's time divided by ours, in the same run: NCCL's, or on one GPU
that of an empty kernel's launch. The recorded quotients of such a machine stand beside
it, and at the end the figures that fell by more than 5 % are named; their runs are
repeated first. Then it runs the tests that matter most, by tests/on_one_gpu.sh.

NUMBA_SYMM_TEST_LOGS is a folder for the output of all ranks (default build/gpu).
--record writes the figures to tests/gpu_recorded.json.

The exit code is 1 if a result was wrong or a run or a test failed, 2 if figures fell.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.isolation import NOWHERE

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("gpu_recorded.json")
LOGS = "NUMBA_SYMM_TEST_LOGS"

SECONDS = 570
"""Of all, by default."""

LONGEST = 120
"""Seconds of a run of the benchmark; most take 15."""

TOLERATED = 0.05

RANKS = 2

OURS = "numba_symm"
NCCL = ("nccl-cupy", "nccl")
RIVALS = (NCCL, ("mpi",), ("launch",))
"""Whose times are divided by ours: the fastest of the first of these that ran."""

ARRAYS = ("on-torch", "on-cupy")

KINDS = {"issue": "to enqueue", "alone": "one at a time"}
"""The times of eager calls that are figures."""

GRAPHS = "-n 10 -w 3 -G 10"
EAGER = "--eager -G 10"
RUNS = {
    "eager": f"all_reduce {EAGER} -b 1K -e 16M -f 128",
    "eager-messages": f"sendrecv {EAGER} -b 8K -e 8M -f 1024 --algorithm all",
    "all_reduce": f"all_reduce {GRAPHS} -b 1K -e 64M -f 16",
    "messages": f"sendrecv {GRAPHS} -b 1K -e 64M -f 256",
    "all_gather": f"all_gather {GRAPHS} -b 1K -e 64M -f 256",
    "reduce_scatter": f"reduce_scatter {GRAPHS} -b 1K -e 64M -f 256",
    "all_to_all": f"all_to_all {GRAPHS} -b 1K -e 64M -f 256",
    "broadcast": f"broadcast {GRAPHS} -b 1K -e 64M -f 256",
    "overlap": "all_reduce -n 10 -G 10 --overlap -b 1M -e 64M -f 64",
}
"""The runs of the benchmark, in their order."""

SIMULATED = "-b 1K -e 1K -n 2 -G 2 --against mpi"

TESTS = [
    "tests/ranks/operations/test_bits.py",
    "tests/gpu/test_graphs.py",
    "tests/gpu/test_stream_order.py",
    "tests/ranks/messages/test_messages.py",
    "tests/gpu/test_array_libraries.py",
    "tests/gpu/test_nccl.py",
    "tests/gpu/test_concurrency.py",
    "tests/gpu/test_mpi_on_gpus.py",
    "tests/gpu/test_survival.py",
]
"""The files of tests, those that matter most first."""


class Figure(NamedTuple):
    """Two times of the same work, in microseconds: ours, and another library's."""

    ours: float
    rival: float

    @property
    def quotient(self):
        return self.rival / self.ours


def figures(run):
    """Return the figures of a recorded run of the benchmark, by name."""
    found = {}
    for row in run["rows"]:
        records = [each for each in row if "skipped" not in each]
        for record in records:
            column, way, place = record["column"], record["way"], record["in_place"]
            if column not in (OURS, "group", *ARRAYS):
                continue
            beside = [each for each in records if each["in_place"] == place]
            for key, words in times_of(record):
                name = f"{run['operation']} {size(record['bytes'])} {words}"
                rival = rival_of(beside, key)
                if rival is None and key == "by_products":
                    rival = 1.0  # the least that is possible
                ours, end = value(record, key), name_of(column, way, key)
                if None not in (rival, ours, end):
                    found[name + end + ", in place" * place] = Figure(ours, rival)
    return found


def times_of(record):
    """Return the times of a record that are figures, with the words for each."""
    if "by_products" in record:
        return [("by_products", "beside products")]
    if "alone" in record:
        return list(KINDS.items())
    return [("graph", "in a graph")]


def name_of(column, way, key):
    """Return what distinguishes one way of ours from others, None if it has no figure.

    Graphs have plans only. An operation without plans has the same call twice.
    """
    if key not in KINDS:
        return "" if way == "plan" else None
    return f", {column if column != OURS else way}"


def value(record, key):
    found = record.get(key)
    return found["median"] if isinstance(found, dict) else found


def rival_of(records, key):
    """Return the time of the fastest rival of a kind, None if none has one."""
    for names in RIVALS[: 2 if key == "by_products" else 3]:
        times = [value(each, key) for each in records if each["column"] in names]
        if times := [each for each in times if each is not None]:
            return min(times)
    return None


def size(nbytes):
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)


def fallen(found, recorded):
    """Return the names of the figures that are worse than recorded, with the change."""
    changes = {
        name: figure.quotient / Figure(*recorded[name]).quotient - 1
        for name, figure in found.items()
        if name in recorded
    }
    return {name: each for name, each in changes.items() if each < -TOLERATED}


def better(first, second):
    """Return the better figure of each name in two runs."""
    return {
        name: max(first.get(name, figure), figure, key=lambda each: each.quotient)
        for name, figure in (first | second).items()
    }


def line(name, figure, recorded):
    known = recorded.get(name)
    text = f"{name:46}{figure.ours:10.2f}{figure.rival:10.2f}{figure.quotient:9.2f}"
    if known is None:
        return f"{text}{'-':>10}"
    before = Figure(*known).quotient
    return f"{text}{before:10.2f}{100 * (figure.quotient / before - 1):+8.0f} %"


class Machine:
    """This node: its GPUs, and how jobs of two ranks run on them.

    Args:
        logs: a folder for all output.
        until: when everything ends, on the clock of time.monotonic.
    """

    def __init__(self, logs, until):
        self.logs = logs
        self.until = until
        self.gpus = visible_gpus()
        self.simulated = not self.gpus
        self.shared = len(self.gpus) == 1

    @property
    def name(self):
        if self.simulated:
            return "simulator"
        return f"{min(RANKS, len(self.gpus))} x {self.gpus[0]}"

    @property
    def left(self):
        return self.until - time.monotonic()

    @contextlib.contextmanager
    def ready(self):
        """Yield the environment of jobs, with MPS if the ranks share a GPU."""
        environ = dict(os.environ)
        paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        environ["XDG_DATA_HOME"] = NOWHERE  # limits that a user has measured
        if not self.shared:
            yield environ
            return
        with tempfile.TemporaryDirectory(prefix="mps", dir="/tmp") as folder:
            environ |= {
                "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "8",
                "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
                "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
            }
            for name in ("pipe", "log"):
                Path(folder, name).mkdir()
            control = "nvidia-cuda-mps-control"
            subprocess.run([control, "-d"], env=environ, check=True)
            try:
                yield environ
            finally:
                subprocess.run([control], env=environ, input=b"quit\n", check=False)

    def against(self, words):
        """Return the libraries to compare with in a run."""
        if self.simulated:
            return SIMULATED
        names = ["launch"]
        if "--eager" in words:
            names += ARRAYS if words.startswith("all_reduce") else []
        if not self.shared:
            names += NCCL if "--eager" in words else NCCL[1:]
        return f"--against {','.join(names)}"

    def measure(self, name, environ):
        """Return a run of the benchmark and its exit code; None without a result."""
        file, text = (self.logs / f"{name}.{suffix}" for suffix in ("json", "txt"))
        file.unlink(missing_ok=True)
        words = f"{RUNS[name]} {self.against(RUNS[name])} --json {file}"
        if self.simulated:  # of small messages; the later of two options counts
            words = words.replace(" -f ", " -f 1")
        seconds = max(1, min(LONGEST, self.left))
        with text.open("w") as output:
            command = ["timeout", "-k", "10", f"{seconds:.0f}", sys.executable, "-m"]
            command += ["numba_symm.command.cli", "run", "-n", str(RANKS), "-m"]
            ended = subprocess.run(
                [*command, "numba_symm.bench", *words.split()],
                **{"cwd": ROOT, "env": environ, "check": False},
                **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output},
            )
        run = json.loads(file.read_text()) if file.exists() else None
        return run, ended.returncode

    def test(self, environ):
        """Run the tests, and return how many jobs failed or found no time."""
        environ = environ | {"PYTHON": sys.executable, "LATEST": f"{self.left:.0f}"}
        if not self.shared:
            environ |= {"MPS": "0", "TOGETHER": "1"}
        script = [str(ROOT / "tests/on_one_gpu.sh"), str(self.logs / "tests")]
        seconds = f"{max(30, min(150, self.left)):.0f}"
        tests = TESTS[:1] if self.simulated else TESTS
        command = ["bash", *script, str(RANKS), seconds, *tests]
        return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


def visible_gpus():
    """Return the names of the GPUs that CUDA may use here, without starting CUDA."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    names = re.findall(r"^GPU \d+: (.*?) \(UUID", listed, re.MULTILINE)
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return names
    return names[: len(list(filter(None, allowed.split(","))))]


def measured(machine, names, environ, recorded):
    """Measure, show each figure, and return the figures by run, and the failed runs."""
    found, failed = {}, []
    for name in names:
        if machine.left < 30:
            print(f"# {name}: not run, no time is left", flush=True)
            failed.append(name)
            continue
        began = time.monotonic()
        run, code = machine.measure(name, environ)
        took = f"{time.monotonic() - began:.0f} s"
        print(f"# {name}, {took}: {RUNS[name]}", flush=True)
        if run is None or code:
            failed.append(name)
            print(f"# {name} FAILED, exit code {code}: {machine.logs}/{name}.txt")
        if run is not None:
            for each, why in run["missing"].items():
                print(f"# {each}: missing, {why}")
            found[name] = figures(run)
        for each, figure in found.get(name, {}).items():
            print(line(each, figure, recorded), flush=True)
    return found, failed


def check(machine, names, record):
    """Measure and test; return the exit code."""
    recorded = json.loads(RECORDED.read_text())
    before = recorded.get(machine.name, {}).get("figures", {})
    print(f"# {machine.name}; recorded: {len(before)} figures")
    print(f"{'':46}{'ours us':>10}{'other us':>10}{'quotient':>9}{'recorded':>10}")
    with machine.ready() as environ:
        found, failed = measured(machine, names, environ, before)
        again = [name for name in found if fallen(found[name], before)]
        if again:
            print("# once more, as figures fell:", ", ".join(again))
            more, _ = measured(machine, again, environ, before)
            found |= {each: better(found[each], more.get(each, {})) for each in again}
    every = {name: each for several in found.values() for name, each in several.items()}
    fell = fallen(every, before)
    for name, change in fell.items():
        print(f"# FELL by {-100 * change:.0f} %: {name}")
    if record:
        write(recorded, machine.name, every)
    jobs = machine.test(dict(os.environ)) if machine.left > 30 else len(TESTS)
    verdict = [f"{len(failed)} runs and {jobs} jobs of tests failed or were not run"]
    verdict.append(f"{len(fell)} of {len(every)} figures fell by more than 5 %")
    print("#", "; ".join(verdict), flush=True)
    return 1 if failed or jobs else 2 if fell else 0


def write(recorded, name, found):
    """Write the figures of a machine in the place of its earlier ones."""
    kept = {each: [round(time, 3) for time in figure] for each, figure in found.items()}
    whole = recorded.get(name, {}).get("figures", {}) | kept
    recorded[name] = {"date": time.strftime("%Y-%m-%d"), "figures": whole}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser("python3 -m tests.gpu_check")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seconds", type=int, default=SECONDS)
    asked = parser.parse_args(argv)
    logs = Path(os.environ.get(LOGS) or ROOT / "build/gpu").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    machine = Machine(logs, time.monotonic() + asked.seconds)
    return check(machine, asked.only, asked.record)


if __name__ == "__main__":
    sys.exit(main())
