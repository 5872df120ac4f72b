"""``numba-symm doctor``: finds problems of this machine, and states remedies.

Alone, it checks the node, and starts a job with a rank for each GPU. Under mpirun, the
ranks check their nodes, compare them, and check each other.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from numba_symm.command import launcher, node_checks, pair_checks
from numba_symm.command.node_checks import FITS, LOOK, WRONG, Finding
from numba_symm.engines import nccl
from numba_symm.environment import SIMULATED
from numba_symm.errors import CollectiveError, SymmError
from numba_symm.launch import devices, duplicates, info, nodes, ranks, tagged, waiting
from numba_symm.launch.waiting import Wait

PATIENCE = 25.0
"""Seconds that the job may take."""

MEET, MAKE, MEASURE, LIMIT = 10.0, 16.0, 19.0, 22.0
"""Seconds after which the ranks of a job give up: waiting for what all ranks find out
about their nodes; making a communicator; measuring more pairs; everything."""

COMPARED = ("system", "python", "packages", "driver", "gpus", "variables")
"""The facts that should be equal on all nodes."""

_STYLES = {FITS: "green", LOOK: "yellow", WRONG: "bold red"}


def checked(options: Any) -> dict[str, Any] | None:
    """Return the report; under mpirun None on all ranks but rank 0. Collective.

    Args:
        options: of the command line: ``ranks``, ``simulate``.
    """
    if ranks.launched_size() > 1:
        return of_ranks()
    try:
        mpirun = launcher.find_mpirun()
    except SymmError:
        mpirun = None
    facts = info.facts(mpirun)
    findings = node_checks.all_of(facts)
    measured: dict[str, Any] = {}
    if mpirun is not None and not any(
        each.state == WRONG and each.check in ("MPI", "packages") for each in findings
    ):
        found, measured = _of_a_job(options, mpirun, len(facts["gpus"]))
        findings += found
    return report(findings, measured)


def report(findings: Sequence[Finding], measured: dict[str, Any]) -> dict[str, Any]:
    """Return the report, of the types that JSON has."""
    fits = all(each.state != WRONG for each in findings)
    return {
        "fits": fits,
        "findings": [each._asdict() for each in findings],
        **measured,
    }


def of_ranks() -> dict[str, Any] | None:
    """Check the nodes of a job and its ranks; return the report on rank 0.

    Each wait ends at a time of its own, so that the report says what was not checked.
    Only a rank that hangs in the driver or in a file system reaches ``LIMIT``.
    """
    file = sys.__stderr__ or sys.stderr
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=file)
    try:
        return _of_ranks(time.monotonic())
    finally:
        faulthandler.cancel_dump_traceback_later()


def _of_ranks(began: float) -> dict[str, Any] | None:
    from mpi4py import MPI
    from mpi4py.run import set_abort_status

    world = MPI.COMM_WORLD
    try:
        found = _of_all_nodes(world, began + MEET)
    except CollectiveError as error:
        if world.rank:
            return None
        set_abort_status(1)  # otherwise MPI would wait for the late rank at the end
        text = "nodes were not compared, and the memory of no pair was checked"
        return report([late(error), Finding("skipped", LOOK, text, _AFTER)], {})
    findings, measured = pair_checks.all_of(world, began + MAKE, began + MEASURE)
    return None if world.rank else report(found + findings, measured)


def _of_all_nodes(world: Any, end: float) -> list[Finding]:
    """Return the findings about all nodes, the same on all ranks. Collective.

    Raises:
        CollectiveError: a rank has not come by ``end``, a moment of ``monotonic``.
    """
    mine = duplicates.duplicate(world, _wait(world.rank, end))
    duplicates.claim(mine)
    here = nodes.here()
    place, _ = nodes.place(world.rank, _gathered(mine, here, end))
    moment = time.time()  # of all ranks the same, but for the time of a message
    facts, own = {}, []
    if place.local_rank == 0:
        facts = info.facts(None)
        # The launcher has started this process, whatever is on PATH.
        facts["mpirun"] = {"path": "mpirun", "version": facts["mpi"]["library"]}
        facts["nccl"] = nccl.found().version
        own = node_checks.all_of(facts)
    given = here[1], facts, own, moment, _place()
    everyone = _gathered(mine, given, end)
    tagged.release(mine)
    first = everyone[0][3]
    found = [(*each[:3], each[3] - first) for each in everyone if each[1]]
    return of_nodes(found) + of_places([each[4] for each in everyone])


def _gathered(mine: Any, value: Any, end: float) -> list[Any]:
    return waiting.all_gather(mine, value, _wait(mine.rank, end))


def _wait(rank: int, end: float) -> Wait:
    # Above 0, because 0 is a wait without an end.
    return Wait("doctor", rank, max(0.1, end - time.monotonic()), "the doctor's limit")


def late(error: CollectiveError) -> Finding:
    """Return the finding of a rank that has not come."""
    return Finding(
        "job",
        WRONG,
        str(error),
        "look at the process of that rank (py-spy dump, nvidia-smi, dmesg), and "
        "whether its node can read the files of this Python",
    )


_AFTER = "correct the above, and call numba-symm doctor again"


class Surroundings(NamedTuple):
    """Where a rank runs.

    Attributes:
        machine: the boot id of its Linux kernel, or its first bytes.
        namespaces: by kind, the namespace.
        gpus: the UUIDs of the GPUs that it sees.
    """

    machine: bytes
    namespaces: dict[str, str]
    gpus: tuple[str, ...]


def _place() -> Surroundings:
    seen = () if SIMULATED else tuple(gpu.uuid for gpu in devices.visible_gpus())
    kinds = {}
    for kind in ("ipc", "net", "pid"):
        with suppress(OSError):
            kinds[kind] = str(Path(f"/proc/self/ns/{kind}").readlink())
    return Surroundings(nodes.here()[0], kinds, seen)


def of_places(places: Sequence[Surroundings]) -> list[Finding]:
    """Return what ranks of one machine should have in common, and have not."""
    found = []
    for machine in dict.fromkeys(each.machine for each in places):
        here = [rank for rank, each in enumerate(places) if each.machine == machine]
        first = places[here[0]]
        apart = {
            kind: rank
            for rank in here
            for kind, name in places[rank].namespaces.items()
            if name != first.namespaces.get(kind)
        }
        if apart:
            found.append(
                Finding(
                    "containers",
                    LOOK,
                    f"ranks {here[0]} and {max(apart.values())} are on one machine, in "
                    f"different namespaces ({', '.join(sorted(apart))})",
                    "start all ranks of a machine in one container, or with "
                    "--network=host --ipc=host --pid=host",
                )
            )
        other = next((r for r in here if places[r].gpus != first.gpus), None)
        if other is not None:
            found.append(
                Finding(
                    "GPUs",
                    LOOK,
                    f"ranks {here[0]} and {other} are on one machine, and see "
                    "different GPUs, so peer access cannot be checked beforehand",
                    "let each rank see all GPUs of the job; with Slurm, "
                    "--gpus-per-node instead of --gpus-per-task",
                )
            )
    return found


Node = tuple[str, dict[str, Any], list[Finding], float]
"""Its name, its facts, its findings, and how far its clock is ahead in seconds."""


def of_nodes(nodes: Sequence[Node]) -> list[Finding]:
    """Return the findings of all nodes, and where nodes differ."""
    by_finding: dict[Finding, list[str]] = {}
    for name, _, own, _ in nodes:
        for finding in own:
            by_finding.setdefault(finding, []).append(name)
    found = [
        finding
        if len(names) == len(nodes)
        else finding._replace(text=f"on {', '.join(names)}: {finding.text}")
        for finding, names in by_finding.items()
    ]
    found += _differences(nodes)
    return found


def _differences(nodes: Sequence[Node]) -> list[Finding]:
    found = []
    for fact in COMPARED:
        texts: dict[str, list[str]] = {}
        for name, facts, _, _ in nodes:
            texts.setdefault(json.dumps(_comparable(fact, facts[fact])), []).append(
                name
            )
        if len(texts) > 1:
            words = "; ".join(f"{', '.join(n)}: {text}" for text, n in texts.items())
            found.append(
                Finding(
                    "nodes",
                    LOOK if fact == "system" else WRONG,
                    f"{fact} differ between nodes: {words}",
                    "start all ranks with one environment and on equal nodes",
                )
            )
    ahead = {name: seconds for name, _, _, seconds in nodes if abs(seconds) > 1}
    if ahead:
        text = ", ".join(f"{name} by {each:.1f} s" for name, each in ahead.items())
        advice = "synchronize the nodes' clocks (chrony)"
        found.append(
            Finding("clock", LOOK, f"clocks differ from rank 0's: {text}", advice)
        )
    return found


def _comparable(fact: str, value: Any) -> Any:
    """Return what should be equal on all nodes."""
    if fact == "gpus":
        return sorted(gpu["name"] for gpu in value)
    if fact == "variables":
        shared = ("NUMBA_", "NCCL_", "CUDA_MODULE_", "UCX_", "FI_", "OMPI_MCA_")
        return {k: v for k, v in value.items() if k.startswith(shared)}
    return value


def _of_a_job(
    options: Any, mpirun: str, seen: int
) -> tuple[list[Finding], dict[str, Any]]:
    """Start a job of this node's ranks; return its findings and measurements."""
    simulate = options.simulate or SIMULATED or not seen
    number = options.ranks or (2 if simulate else seen)
    command = launcher.mpirun_command(
        number, ["-m", "numba_symm.command.doctor"], mpirun, ()
    )
    environ = launcher.job_environment(os.environ, simulate=simulate)
    with launcher.started(  # waits for it, and closes its pipes, in any case
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            output, errors = job.communicate(timeout=PATIENCE)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return [_lost(command, f"has not ended after {PATIENCE:g} s")], {}
    try:
        found = json.loads(output.splitlines()[-1])
        findings = [Finding(**each) for each in found.pop("findings")]
    except (IndexError, ValueError, KeyError, TypeError):
        lines = [each for each in (errors + output).splitlines() if each.strip()]
        last = lines[-1] if lines else "nothing was printed"
        return [_lost(command, f"ended with code {job.returncode}: {last}")], {}
    del found["fits"]
    # This process has checked the node.
    new = [each for each in findings if each.check in _OF_JOBS or each.state == WRONG]
    text = f"{number} ranks started{' in the simulator' * simulate}"
    return [Finding("job", FITS, text), *new], found


_OF_JOBS = ("islands", pair_checks.CHECK, "links")


def _lost(command: Sequence[str], how: str) -> Finding:
    return Finding(
        "job",
        WRONG,
        f"`{' '.join(command[:3])} …` {how}",
        "run `numba-symm run -n 2 --simulate` with a small program of mpi4py, and "
        "correct what it prints",
    )


def show(found: dict[str, Any], console: Console) -> None:
    """Print a report."""
    table = Table("", "Check", "Found", title="numba-symm doctor", title_justify="left")
    for each in map(lambda one: Finding(**one), found["findings"]):
        text = escape(each.text)
        if each.advice:
            text += f"\n[bold]→ {escape(each.advice)}[/]"
        table.add_row(f"[{_STYLES[each.state]}]{each.state}[/]", each.check, text)
    console.print(table)
    for name, unit in (("latency", "µs"), ("bandwidth", "GB/s")):
        rows = found.get(name, [])
        if len(rows) > 1:
            console.print(_matrix(rows, f"{name.capitalize()} in {unit}"))
    states = [each["state"] for each in found["findings"]]
    wrong, look = states.count(WRONG), states.count(LOOK)
    verdict = "fits" if found["fits"] else "does not fit"
    console.print(f"This machine {verdict}: {wrong} wrong, {look} to look at.")


def _matrix(rows: Sequence[Sequence[float | None]], title: str) -> Table:
    table = Table("from \\ to", *map(str, range(len(rows))), title=title)
    for rank, row in enumerate(rows):
        table.add_row(str(rank), *("-" if x is None else f"{x:.1f}" for x in row))
    return table


def check_drawable(file: str) -> None:
    """Raise SymmError if a picture cannot be drawn into a file."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SymmError(
            'doctor: --plot needs matplotlib; pip install "numba-symm[bench]"'
        ) from error
    if not os.access(Path(file).resolve().parent, os.W_OK):
        raise SymmError(f"doctor: --plot={file}: its folder cannot be written")


def draw(found: dict[str, Any], file: Path) -> None:
    """Draw the latency and the bandwidth of every pair.

    Raises:
        SymmError: there are less than two ranks.
    """
    from matplotlib.figure import Figure

    if len(found.get("bandwidth", [])) < 2:
        raise SymmError("doctor: --plot needs measurements of 2 ranks or more")
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axes, (name, unit, colors) in zip(
        figure.subplots(1, 2),
        (("latency", "µs", "viridis_r"), ("bandwidth", "GB/s", "viridis")),
        strict=True,
    ):
        values = [
            [float("nan") if x is None else x for x in row] for row in found[name]
        ]
        image = axes.imshow(values, cmap=colors)
        for one, row in enumerate(found[name]):
            for other, value in enumerate(row):
                if value is not None:
                    axes.text(
                        *(other, one, f"{value:.1f}"),
                        ha="center",
                        va="center",
                        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0},
                    )
        axes.set(title=f"{name} in {unit}", xlabel="to rank", ylabel="from rank")
        numbers = range(len(values))
        axes.set_xticks(numbers)
        axes.set_yticks(numbers)
        figure.colorbar(image, ax=axes)
    figure.savefig(file)


if __name__ == "__main__":  # a rank of the job that the command has started
    result = of_ranks()
    if result is not None:
        print(json.dumps(result), flush=True)
    sys.exit(0)
