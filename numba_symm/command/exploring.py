"""``numba-symm explore``: all orders of a program's communication, without a GPU."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from numba_symm import explore
from numba_symm.errors import SymmError
from numba_symm.explore.report import show_trace

INCOMPLETE = 2


def parser() -> argparse.ArgumentParser:
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
        "explored, with --complete.",
        allow_abbrev=False,
    )
    found.add_argument("program", nargs="?", help="a script")
    found.add_argument(
        "-n",
        dest="ranks",
        type=numbers,
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


def numbers(text: str) -> list[int]:
    """Return the numbers in a text like 2,3,4."""
    return [int(each) for each in text.split(",")]


def run(argv: Sequence[str], console: Console) -> int:
    """Run the command; return the exit code."""
    words, arguments = list(argv), list[str]()
    if "--" in words:
        at = words.index("--")
        words, arguments = words[:at], words[at + 1 :]
    options = parser().parse_args(words)
    if options.replay is not None:
        show_trace(explore.replay(options.replay), console)
        return 0
    if options.program is None:
        raise SymmError("explore: expected a program or --replay FILE, got neither")
    try:
        report = explore.run(options.program, options.ranks, options.seconds, arguments)
    except KeyboardInterrupt:
        console.print("numba-symm explore: interrupted", highlight=False)
        return 130
    if options.json:
        print(report.json())
    else:
        report.show(console)
    return _code(report, options)


def _code(report: explore.ExploreReport, options: Any) -> int:
    if report.fault is not None:
        return 1
    return INCOMPLETE if options.complete and not report.complete else 0
