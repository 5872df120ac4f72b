"""Try the library on several nodes, and collect everything in one file.

    python3 -m tests.nodes_report 'mpirun -n 16 --hostfile hosts'

`make two-nodes LAUNCH='…'` runs it: docs/two-nodes.md. The words start a command on all
ranks. All nodes must see this folder, where the ranks write, and this Python. A step
that fails or does not end in time does not keep the others from running.

The exit code is 1 if a step failed.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "operations": "operations/test_reduce.py operations/test_exchange.py "
    "operations/test_scan.py",
    "bits": "operations/test_bits.py",
    "messages": "messages/test_messages.py",
    "mpi4py": "mpi/test_mpi_islands.py",
}
"""Files of tests/ranks that pass on any number of nodes."""

BENCHMARKS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    *("reduce", "sendrecv", "barrier"),
)
SIZES = "-b 1K -e 256M -f 4 --against nccl"
SIMULATED = "-b 1K -e 4K -f 4 -n 2 -w 1 -G 2 --against mpi"
SECONDS = 600
"""The most that a step may take."""


def steps(folder, simulate):
    """Return the command of each step, without the launcher, by its name."""
    python, numba_symm = sys.executable, str(Path(sys.executable).parent / "numba-symm")
    found = {"info": [numba_symm, "info"], "doctor": [numba_symm, "doctor"]}
    for name, files in TESTS.items():
        words = [python, "-m", "mpi4py", "-m", "pytest", "-q", "--color=no"]
        words += ["-pno:cacheprovider"]
        found[name] = [*words, *(f"tests/ranks/{file}" for file in files.split())]
    for operation in BENCHMARKS:
        sizes = SIMULATED if simulate else SIZES
        if operation == "barrier":
            sizes = sizes.partition("--")[2] and "--" + sizes.partition("--")[2]
        words = [python, "-m", "mpi4py", "-m", "numba_symm.bench", operation]
        json = ["--json", str(folder / f"{operation}.json")]
        found[f"bench-{operation}"] = [*words, *sizes.split(), *json]
    return found


def run(command, log, seconds):
    """Run a command; its output goes to a file. Return how it ended."""
    begun = time.monotonic()
    with log.open("w") as output:
        print("$", shlex.join(command), file=output, flush=True)
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            print(error, file=output)
            return f"cannot start: {error}"
        try:
            code = process.wait(seconds)
            ended = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"did not end in {seconds} s"
            process.terminate()  # mpirun ends its ranks then
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return f"{ended} ({time.monotonic() - begun:.0f} s)"


def main(argv=None):
    """Run all steps, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make two-nodes", description=__doc__)
    parser.add_argument("launch", help="what starts a command on all ranks")
    parser.add_argument("--simulate", action="store_true", help="without GPUs")
    parser.add_argument("--only", help="names of steps, with commas between them")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of a step")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/nodes")
    asked = parser.parse_args(argv)
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    variables = {"NUMBA_SYMM_SETUP_TIMEOUT": "120", "NUMBA_SYMM_SHOW_ISLANDS": "1"}
    # tests/isolation.py would remove the user's settings from the ranks.
    variables |= {"NUMBA_SYMM_TEST_ISOLATED": "1"}
    if asked.simulate:
        variables["NUMBA_ENABLE_CUDASIM"] = "1"
    launch = [*shlex.split(asked.launch), "env"]
    launch += [f"{name}={value}" for name, value in variables.items()]
    every = steps(folder, asked.simulate)
    chosen = asked.only.split(",") if asked.only else list(every)
    outcomes = {}
    for name in chosen:
        print(f"{name:22}", end="", flush=True)
        command = [*launch, *every[name]]
        outcomes[name] = run(command, folder / f"{name}.txt", asked.seconds)
        print(outcomes[name], flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [f"{name}: {outcome}" for name, outcome in outcomes.items()]
    about = [asked.launch, f"commit {commit.stdout.strip() or 'unknown'}", *lines]
    (folder / "summary.txt").write_text("\n".join([*about, ""]))
    report = folder.with_name(f"numba-symm-nodes-{time.strftime('%Y-%m-%d')}.zip")
    with zipfile.ZipFile(report, "w", zipfile.ZIP_DEFLATED) as files:
        for file in sorted(folder.glob("*")):
            files.write(file, file.name)
    print(f"\nSend back this file: {os.path.relpath(report)}")
    return 0 if all(each.startswith("passed") for each in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
