"""The ``numba-symm`` command, with ``explore``.

- ``run`` starts a Python program on several ranks of this node.
- ``bench`` measures collectives.
- ``compile`` compiles kernels into the disk cache.
- ``tune`` measures which algorithms are the fastest here.
- ``status`` shows what the ranks of running jobs do, and can abort them.
- ``info`` shows what a bug report needs: versions, GPUs, MPI, settings.
- ``doctor`` checks this machine, and says what to do.
- ``soak`` makes calls for minutes while ranks fail, and checks everything.
- ``explore`` runs a program in all orders of its communication, without a GPU.
"""

import argparse
import errno
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import numba_symm
from numba_symm import environment, explore
from numba_symm.arguments import Parser, at_least
from numba_symm.collectives import tuned
from numba_symm.command import launcher
from numba_symm.environment import SIMULATED, allow_overlapping_devices
from numba_symm.errors import DeviceError, SymmError
from numba_symm.explore.findings import show_trace
from numba_symm.launch import info, ranks
from numba_symm.launch.devices import visible_gpus

INCOMPLETE, UNEXPLORED = 2, 3


def _explore_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments, those before ``--``."""
    found = argparse.ArgumentParser(
        prog="numba-symm explore",
        usage="numba-symm explore [-h] [-n RANKS] [--seconds S] [--complete] [--json] "
        "program [-- arguments ...]\n       numba-symm explore --replay FILE",
        description="Run a program in all orders in which its ranks may communicate, "
        "without MPI and without a GPU. Report the first race, deadlock or wrong "
        "result. If there are too many orders, explore as many as there is time for, "
        "then random ones, and say so.",
        epilog="Exit code: 0: no fault was found. 1: a fault. 2: not all orders were "
        "explored, with --complete. 3: the program cannot be explored.",
        allow_abbrev=False,
    )
    found.add_argument("program", nargs="?", help="a script")
    found.add_argument(
        "-n",
        dest="ranks",
        type=_numbers,
        default=[2],
        metavar="RANKS",
        help="how many ranks, one or more numbers: 2,3,4 (default 2)",
    )
    found.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="the time for all numbers of ranks together (default 60)",
    )
    found.add_argument(
        "--complete",
        action="store_true",
        help="exit with 2 unless all orders were explored",
    )
    found.add_argument(
        "--json", action="store_true", help="print the report as one object of JSON"
    )
    found.add_argument(
        "--replay",
        metavar="FILE",
        help="repeat the execution of a fault, and print all its atomic accesses; the "
        "file has the output of --json",
    )
    return found


def _numbers(text: str) -> list[int]:
    """Return the numbers in a text like 2,3,4."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"expected numbers like 2,3,4, got {text!r}")
    return [int(each) for each in text.split(",")]


def _explore(argv: Sequence[str], console: Console) -> int:
    """Run the command; return the exit code."""
    words, arguments = list(argv), list[str]()
    if "--" in words:
        at = words.index("--")
        words, arguments = words[:at], words[at + 1 :]
    options = _explore_parser().parse_args(words)
    if options.replay is not None:
        show_trace(explore.replay(options.replay), console)
        return 0
    if options.program is None:
        raise SymmError("explore: expected a program or --replay FILE, got neither")
    report = explore.run(options.program, options.ranks, options.seconds, arguments)
    if options.json:
        print(report.json())
    else:
        report.show(console)
    if report.fault is not None:
        return 1
    return INCOMPLETE if options.complete and not report.complete else 0


BENCH = "numba-symm bench"

OWN_FLAGS = ("-h", "--help", "-n", "-m", "--simulate", "--as-mpi4py", "--survive")
"""Flags of ``run``; all others before the program are mpirun's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: the arguments after the command's name; None: those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _tell(f"numba-symm {' '.join(argv[:1])}: interrupted")
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        # Python writes at its exit what is left, and would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _tell(f"[red]numba-symm:[/] cannot write the output: {error.strerror}")
        return 1


_UNWRITABLE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE


def _main(argv: Sequence[str]) -> int:
    if argv[:1] == ["bench"]:  # all other arguments are the benchmark's, -h too
        return _bench(argv[1:])
    words, flags = split_flags(argv)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "info": _info,
        "doctor": _doctor,
        "status": _status,
        "tune": _tune,
        "run": lambda options: _run(options, flags),
    }
    try:
        if argv[:1] == ["compile"]:
            return _compile(argv[1:])
        if argv[:1] == ["soak"]:
            return _soak(argv[1:])
        if argv[:1] == ["explore"]:
            return _explore(argv[1:], Console())
        options = _parser().parse_args(words)
        return commands[options.command](options)
    except SymmError as error:
        _tell(f"[red]numba-symm:[/] {escape(str(error))}")
        return UNEXPLORED if argv[:1] == ["explore"] else 1


def _tell(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="numba-symm", description="Collectives between GPUs in Numba CUDA."
    )
    parser.add_argument(
        "--version", action="version", version=f"numba-symm {numba_symm.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="start a Python program on several ranks of this node",
        usage="numba-symm run [-h] -n RANKS [--simulate] [--as-mpi4py] [--survive] "
        "[mpirun's flags --] [-m] program ...",
        description="Start a Python program on several ranks of this node. Without "
        "GPUs, or with --simulate, kernels run in Numba's CUDA simulator. An error "
        "that several ranks raise at the same line is printed once.",
        epilog="Pass flags for mpirun before `--`: "
        "numba-symm run -n 4 --bind-to core -- program.py",
        allow_abbrev=False,
    )
    run.add_argument(
        "-n",
        dest="ranks",
        type=at_least(1),
        required=True,
        metavar="RANKS",
        help="how many ranks to start",
    )
    run.add_argument(
        "--simulate", action="store_true", help="use the simulator instead of GPUs"
    )
    run.add_argument(
        "--survive",
        action="store_true",
        help="let the other ranks continue after one rank has failed, so that they "
        "can call comm.rebuild(); needs Open MPI 5 (--with-ft ulfm)",
    )
    run.add_argument(
        "--as-mpi4py",
        action="store_true",
        help="replace mpi4py.MPI with numba_symm.mpi, so that an unchanged mpi4py "
        "program, and the packages that it imports, can pass device arrays",
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module")
    run.add_argument("program", help="a script, or with -m the name of a module")
    rest = run.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the program's arguments"
    )
    rest.required = False  # otherwise the error for no program lists it, too
    shown = commands.add_parser(
        "info",
        help="show versions, GPUs, MPI, settings and the cache, for bug reports",
        description="Show what a bug report needs: the versions of the system, the "
        "packages and MPI, the GPUs with their peer access, and the backend. Also show "
        "the environment variables of numba_symm, MPI and launchers, errors in these, "
        "the measured limits, and the cache of kernels.",
        allow_abbrev=False,
    )
    shown.add_argument("--json", action="store_true", help="print one object of JSON")
    _add_doctor(commands)
    _add_status(commands)
    commands.add_parser(
        "compile", help="compile kernels into the disk cache, with or without a GPU"
    )
    commands.add_parser(
        "soak",
        help="make random calls for minutes while ranks fail, and check everything",
    )
    _add_tune(commands)
    _add_others(commands)
    return parser


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure which algorithms are the fastest on this node, and use these",
        description="Measure for which message sizes each algorithm is the fastest on "
        "this node. The command takes a few minutes, and nothing else may use the "
        "GPUs. Later communicators of the same number of ranks use these limits, "
        "until the GPUs or the library's version change. They are stored in "
        "numba-symm/limits.json in the user's data folder ($XDG_DATA_HOME, by default "
        "~/.local/share), but not those of the simulator.",
        allow_abbrev=False,
    )
    tune.add_argument(
        "--reset",
        action="store_true",
        help="only remove the stored limits, so that the built-in ones are used",
    )
    tune.add_argument(
        "-n",
        dest="ranks",
        type=at_least(1),
        metavar="RANKS",
        help="default: the number of GPUs",
    )
    tune.add_argument(
        "--simulate", action="store_true", help="use the simulator instead of GPUs"
    )
    tune.add_argument(
        "--largest", metavar="SIZE", help="the largest message (default 256M)"
    )


def _add_others(commands: Any) -> None:
    """Add what parses its arguments itself."""
    commands.add_parser(
        "explore",
        help="find races, deadlocks and missing fences in a program, without a GPU",
    )
    commands.add_parser(
        "bench",
        help="measure collectives on the ranks of the mpirun that started it; "
        "`run -n 4 -m numba_symm.bench` also starts the ranks",
    )


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, and print remedies",
        description="Check MPI, the GPUs, the limits, the folders and the variables "
        "of this node. Then start a rank for each GPU, or two ranks in "
        "the simulator. The ranks store into each other's memory, check the stored "
        "data, and measure every pair of ranks. If a launcher starts the command, "
        "check and compare the nodes of its ranks instead: mpirun -n 16 numba-symm "
        "doctor. The exit code is 1 if a finding is `wrong`, otherwise 0. The command "
        "changes nothing.",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "-n",
        dest="ranks",
        type=at_least(1),
        metavar="RANKS",
        help="default: the number of GPUs",
    )
    doctor.add_argument(
        "--simulate", action="store_true", help="use the simulator instead of GPUs"
    )
    doctor.add_argument("--json", action="store_true", help="print one object of JSON")


def _add_status(commands: Any) -> None:
    status = commands.add_parser(
        "status",
        help="show what the ranks of running jobs do, without stopping them",
        description="For each communicator, show the job, its program and when it "
        "began. For each rank, show the last call and the time since this call. Also "
        "show failures, and the ranks that have made fewer calls than others. The "
        "command reads the memory of your running jobs on this node, and does not stop "
        "them.",
        allow_abbrev=False,
    )
    status.add_argument(
        "pid",
        nargs="?",
        type=at_least(1),
        metavar="PID",
        help="a process of the job: a rank, mpirun, or `numba-symm run`; default: all "
        "jobs of this user",
    )
    status.add_argument("--json", action="store_true", help="print an array of JSON")
    status.add_argument(
        "--abort",
        action="store_true",
        help="end the job's communicators on all ranks; later calls raise errors",
    )
    status.add_argument(
        "--reason", metavar="TEXT", help="with --abort, a text for the errors"
    )


def _status(options: argparse.Namespace) -> int:
    from numba_symm.command import doctor  # imports many packages

    if options.abort and options.pid is None:
        raise SymmError(
            "status: expected the number of a process with --abort, got none; pass a "
            "rank's, or mpirun's"
        )
    if options.reason is not None and not options.abort:
        raise SymmError("status: expected --reason with --abort only, got it alone")
    reason = (options.reason or "no reason was given") if options.abort else None
    doctor.run(options.pid, options.json, reason, Console())
    return 0


def _bench(argv: Sequence[str]) -> int:
    from numba_symm.bench.__main__ import program  # imports many packages

    return program(argv, BENCH)


def _compile(argv: Sequence[str]) -> int:
    for text in environment.unknown():
        _tell(f"numba-symm: {escape(text)}")
    try:
        from numba_symm.command import compiling  # imports many packages

        compiling.run(compiling.parser().parse_args(argv), Console())
    except KeyboardInterrupt:
        _tell("numba-symm compile: interrupted; the compiled kernels are in the cache")
        return 130
    return 0


def _tune(options: argparse.Namespace) -> int:
    """Start the measurement on the ranks, as ``run`` does."""
    from numba_symm.bench import tune  # imports many packages

    if options.reset:
        tuned.file().unlink(missing_ok=True)
        print(f"There is no {tuned.file()} any more; the built-in limits are used")
        return 0
    options.ranks = options.ranks or len(visible_gpus())
    if options.ranks < 2:
        raise SymmError(
            f"tune: expected 2 ranks or more, got {options.ranks}; one rank sends "
            "nothing; pass -n, and --simulate without GPUs"
        )
    options.module, options.program = True, "numba_symm.bench.tune"
    options.as_mpi4py = options.survive = False
    largest = options.largest
    options.arguments = [f"--largest={largest}"] if largest else []
    tune.parse(options.arguments)  # before ranks start, which parse them again
    return _run(options, [])


def _info(options: argparse.Namespace) -> int:
    from numba_symm.command import compiling  # import many packages
    from numba_symm.engines import nccl

    alone = ranks.launched_size() < 2
    if not alone and ranks.launched_rank():
        return 0
    try:
        mpirun = launcher.find_mpirun()
    except SymmError:
        mpirun = None
    found: dict[str, Any] = {"nccl": nccl.found().version or nccl.found().missing}
    found |= info.facts(mpirun) | compiling.facts()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    # Open MPI's ranks have a terminal even if their output goes to a file.
    console = Console(force_terminal=None if alone else False)
    info.show(found, console)
    compiling.show(found, console)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from numba_symm.command import doctor  # imports many packages

    found = doctor.checked(options)
    if found is None:
        return 0
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        alone = ranks.launched_size() < 2
        doctor.show(found, Console(force_terminal=None if alone else False))
    return 0 if found["fits"] else 1


def _soak(argv: Sequence[str]) -> int:
    from numba_symm.command import soak  # imports many packages

    options = soak.parser().parse_args(argv)
    number = options.ranks or (0 if options.simulate else len(visible_gpus())) or 4
    if number < 2:
        raise SymmError(
            f"soak: expected 2 ranks or more, got {number}; pass -n, and --simulate "
            "without GPUs"
        )
    goal = soak.goal(options, number, simulation_needed(number, ask=options.simulate))
    return soak.run(goal, options.json, Console())


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without mpirun's flags, and those flags.

    mpirun's flags begin with the first one that ``run`` does not have, and end before
    the next ``--``.

    Raises:
        SystemExit: no ``--`` follows them.
    """
    words = list(argv)
    at = 1
    while words[:1] == ["run"] and words[at : at + 1] and words[at].startswith("-"):
        if words[at] in OWN_FLAGS or re.fullmatch(r"-n\d+", words[at]):
            at += 2 if words[at] == "-n" else 1
            continue
        if "--" not in words[at:]:
            _tell(
                f"numba-symm run: expected `--` after mpirun's flags ({words[at]}), "
                "got none; write: numba-symm run -n RANKS FLAGS -- program.py"
            )
            raise SystemExit(2)
        end = words.index("--", at)
        return words[:at] + words[end + 1 :], words[at:end]
    return words, []


def _run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Start the ranks by mpirun, and return its exit code.

    With ``--survive``, that is 0 even if no rank ends well.
    """
    from numba_symm.command.runner import FOLDER, IN_PLACE, SURVIVE, WELL  # and mpi4py

    simulate = simulation_needed(options.ranks, ask=options.simulate)
    mpirun = launcher.find_mpirun()
    if not options.module and not Path(options.program).is_file():
        raise SymmError(
            f"run: expected a Python script, got {options.program!r}, which "
            "is not a file; omit `python` before the script, or pass -m and a module"
        )
    if simulate and not (options.simulate or SIMULATED):
        _tell("numba-symm: no GPU here; kernels run in Numba's CUDA simulator")
    sys.stdout.flush()
    environ = launcher.job_environment(os.environ, simulate=simulate)
    launcher.check_sessions(environ)
    environ.setdefault("NUMBA_SYMM_SHOW_ISLANDS", "1")
    if not sys.stdout.isatty():
        environ["TERM"] = "dumb"  # Open MPI's ranks have a terminal in any case
    runner = Path(__file__).with_name("runner.py")
    program = [str(runner), str(os.getpid()), str(options.ranks)]
    program += [SURVIVE] * options.survive + [IN_PLACE] * options.as_mpi4py
    program += ["-m"] * options.module + [options.program, *options.arguments]
    if options.survive:
        flags = ["--with-ft", "ulfm", *flags]
    command = launcher.mpirun_command(options.ranks, program, mpirun, flags)
    with tempfile.TemporaryDirectory(prefix="numba-symm-run-") as folder:
        code = launcher.code_of(command, environ | {FOLDER: folder})
        if options.survive and code == 0 and not Path(folder, WELL).exists():
            _tell("numba-symm run: no rank has ended without an error")
            return 1
    return code


def simulation_needed(ranks: int, *, ask: bool = False) -> bool:
    """Return whether ``ranks`` ranks of this node must run in the simulator.

    Args:
        ranks: the number of ranks to start.
        ask: whether the user requests the simulator.

    Raises:
        DeviceError: there are GPUs, but fewer than ranks, and sharing is not allowed.
    """
    if ask or SIMULATED:
        return True
    gpus = len(visible_gpus())
    if 0 < gpus < ranks and not allow_overlapping_devices():
        raise DeviceError(
            f"run: expected {ranks} GPUs for {ranks} ranks, got {gpus}; "
            "start fewer ranks, pass --simulate, or let ranks share GPUs under MPS: "
            "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES=1, and nvidia-cuda-mps-control -d "
            "before the job"
        )
    return gpus == 0


if __name__ == "__main__":
    sys.exit(main())
