"""Draw the trace of calls that one rank makes late.

By hand: ``numba-symm run -n 3 --simulate docs/drawings/trace.py FILE``.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from mpi4py import MPI
from numba import cuda

import numba_symm as ns

COLORS = {
    "all_reduce": "#4c78a8",
    "all_gather": "#f58518",
    "barrier": "#54a24b",
    "step": "#dddddd",
}
LATE, SECONDS = 2, 0.02


def calls(comm):
    """Make two steps of calls; rank LATE computes for longer in each."""
    x = cuda.to_device(np.ones(64, np.float32))
    for step in range(1, 3):
        with comm.tag(f"step {step}"):
            comm.all_reduce(x)
            time.sleep(SECONDS * (comm.rank == LATE))
            comm.all_gather(x)
            comm.barrier()
    comm.synchronize()


def draw(events, file):
    """Draw a row for each rank's tags, and one for its calls."""
    slices = [each for each in events if each["ph"] == "X"]
    began = min(each["ts"] for each in slices)
    rows = sorted({(each["pid"], each["tid"]) for each in slices})
    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    for each in slices:
        name = each["name"].partition(" ")[0]
        span = (each["ts"] - began) / 1000, each["dur"] / 1000
        row = rows.index((each["pid"], each["tid"]))
        axes.broken_barh(
            [span], (row - 0.4, 0.8), facecolors=COLORS[name], edgecolor="white"
        )
        if span[1] > 5:
            text = each["name"] if name == "step" else name
            axes.text(
                span[0] + span[1] / 2, row, text, ha="center", va="center", size=8
            )
    names = [f"rank {rank}" + (": tags" if not tid else "") for rank, tid in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    figure.savefig(file, metadata={"Date": None})


def main(file):
    """Draw the trace of calls that follow others, so that kernels are loaded."""
    with ns.Communicator(MPI.COMM_WORLD) as comm:
        calls(comm)
    with ns.Communicator(MPI.COMM_WORLD) as comm, tempfile.TemporaryDirectory() as made:
        calls(comm)
        MPI.COMM_WORLD.Barrier()
        comm.trace(f"{made}/trace.json")
        if comm.rank == 0:
            found = json.loads(Path(made, "trace.json").read_text())
            draw(found["traceEvents"], file)


if __name__ == "__main__":
    main(*sys.argv[1:])
