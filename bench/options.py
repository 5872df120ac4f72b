"""The command line. Letters, suffixes and type names are those of nccl-tests."""

import argparse
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from numba_symm.arguments import Parser, at_least, meant
from numba_symm.bench.bench_operations import (
    NO_REDUCTION,
    OPERATIONS,
    BenchOperation,
)
from numba_symm.bench.contenders import CONTENDERS, EAGER
from numba_symm.environment import SIMULATED

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

DESCRIPTION = """Time a collective for several message sizes, compare it with other
libraries, and check every result. Start the benchmark on several ranks:
numba-symm run -n 4 -m numba_symm.bench all_reduce -e 1G"""

MODULE = "python -m numba_symm.bench"
"""The benchmark's name in its usage, unless ``numba-symm bench`` starts it."""

EAGER_CALLS = 200
"""The default of ``-n`` with ``--eager``."""

SIDE = 8192
"""The default of ``--side``: large programs have such matrices."""


class _Noted(argparse.Action):
    """Stores a value, and adds the option's name to ``given``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given += (self.option_strings[0],)


def parse(argv: Sequence[str], name: str = MODULE) -> argparse.Namespace:
    """Return the options, or show help or usage and raise SystemExit.

    Args:
        argv: the arguments.
        name: the command's name in its usage.

    Returns:
        ``types``, ``reductions``, ``against`` and ``algorithms`` are tuples of names.
    """
    made, commands = parser(name)
    options = made.parse_args(argv)
    _complete(commands.choices[options.command], options)
    return options


def parser(name: str) -> tuple[Parser, "argparse._SubParsersAction[Parser]"]:
    """Return the parser of the command line, and its operations."""
    made = Parser(name, description=DESCRIPTION)
    commands = made.add_subparsers(dest="command", metavar="OPERATION", required=True)
    for each in OPERATIONS.values():
        _add(commands, each)
    return made, commands


def same_on_all(ranks: Any, parse: Callable[[], argparse.Namespace]) -> Any:
    """Parse the arguments on rank 0 and broadcast them, or exit on all ranks.

    Args:
        ranks: the mpi4py communicator.
        parse: returns the options, or raises SystemExit.
    """
    parsed: Any = None
    if ranks.rank == 0:
        try:
            parsed = parse()
        except SystemExit as ended:
            parsed = ended.code
    parsed = ranks.bcast(parsed)
    if not isinstance(parsed, argparse.Namespace):
        raise SystemExit(parsed)
    return parsed


def _add(
    commands: "argparse._SubParsersAction[Parser]",
    operation: BenchOperation,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        operation.name,
        help=f"measure {operation.name}",
        description=f"Measure {operation.name}. Sizes are in bytes, with binary "
        "suffixes K, M and G.",
    )
    parser.register("action", None, _Noted)  # of all options below that take a value
    parser.set_defaults(given=())
    _add_messages(parser, operation)
    _add_repetitions(parser)
    _add_ways(parser, operation)
    return parser


def _add_messages(parser: argparse.ArgumentParser, operation: BenchOperation) -> None:
    """Add what the messages are: sizes, types and reductions."""
    parser.set_defaults(types=("float",), reductions=(NO_REDUCTION,), window=1)
    if not operation.sized:
        defaults = {"first": 1, "last": 1, "factor": 2, "step": None}
        parser.set_defaults(**defaults)
        return
    add = parser.add_argument
    largest = "16K" if SIMULATED else "64M"
    add(
        "-b",
        dest="first",
        metavar="SIZE",
        type=nbytes,
        default="1K",
        help="smallest size (default %(default)s)",
    )
    add(
        "-e",
        dest="last",
        metavar="SIZE",
        type=nbytes,
        default=largest,
        help="largest size (default %(default)s)",
    )
    next_size = parser.add_mutually_exclusive_group()
    next_size.add_argument(
        "-f",
        dest="factor",
        metavar="F",
        type=at_least(2),
        default=4,
        help="factor from one size to the next (default %(default)s)",
    )
    next_size.add_argument(
        "-i",
        dest="step",
        metavar="SIZE",
        type=nbytes,
        help="instead of a factor, the bytes between one size and the next",
    )
    add(
        "-d",
        dest="types",
        metavar="TYPE,…",
        type=_names(operation.types),
        default=("float",),
        help=f"element types: some of {', '.join(operation.types)}, or all "
        "(default float)",
    )
    if operation.reductions:
        add(
            "-o",
            dest="reductions",
            metavar="OP,…",
            default=("sum",),
            type=_names(operation.reductions),
            help=f"reductions: some of {', '.join(operation.reductions)}, or all "
            "(default sum)",
        )
    if operation.windowed:
        add(
            "--window",
            metavar="N",
            type=at_least(1),
            help="messages that each rank sends in a call, in one group (default "
            "%(default)s); sizes are those of one message",
        )


def _add_repetitions(parser: argparse.ArgumentParser) -> None:
    """Add how often calls are repeated, and whether results are checked."""
    add = parser.add_argument
    add(
        "-n",
        dest="calls",
        metavar="N",
        type=at_least(1),
        default=20,
        help="the least calls in a graph and the most in an eager sample; both are "
        "smaller if so many calls take more than 4 ms (default %(default)s; with "
        f"--eager: {EAGER_CALLS})",
    )
    add(
        "-w",
        dest="warmups",
        metavar="N",
        type=at_least(0),
        default=5,
        help="untimed calls before the timed ones (default %(default)s)",
    )
    add(
        "-G",
        dest="replays",
        metavar="N",
        type=at_least(0),
        default=20,
        help="timed replays of each graph, 0: eager calls only; with --eager: samples "
        "of each row (default %(default)s)",
    )
    add(
        "-c",
        dest="check",
        type=int,
        choices=(0, 1),
        default=1,
        help="1: check all results (default %(default)s)",
    )


def _add_ways(parser: argparse.ArgumentParser, operation: BenchOperation) -> None:
    """Add what is measured, and where the measurements go."""
    add = parser.add_argument
    add(
        "--against",
        metavar="NAME,…",
        type=_names(CONTENDERS),
        default="mpi" if SIMULATED else "nccl,nccl-symm,torch",
        help=f"contenders: some of {', '.join(CONTENDERS)}, or all "
        f"(default %(default)s; with --eager on GPUs: {EAGER})",
    )
    parser.set_defaults(algorithms=())
    if operation.algorithms:
        add(
            "--algorithm",
            dest="algorithms",
            metavar="NAME,…",
            type=_names(operation.algorithms),
            help="one name: measure this algorithm instead of the one chosen by size; "
            "several names, or all: measure each algorithm in its own column; "
            f"some of {', '.join(operation.algorithms)}",
        )
    add(
        "--plain",
        action="store_true",
        help="use ordinary device memory for numba_symm's arrays, not symmetric memory",
    )
    add(
        "--islands",
        metavar="N",
        type=at_least(1),
        help="divide each node into islands of at most N ranks; between them, NCCL "
        "uses its network transport, as the engine and as a contender",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--eager",
        action="store_true",
        help="time calls as a program makes them, without graphs: until a call is "
        "enqueued, until many are done, and one at a time with a wait for each",
    )
    kind.add_argument(
        "--overlap",
        action="store_true",
        help="time the calls, matrix products that take three times as long, and both "
        "together, enqueued in both orders, on ordinary streams; torch computes the "
        "products if it is installed",
    )
    add(
        "--side",
        metavar="N",
        type=at_least(1),
        help="with --overlap and torch: the matrices' rows and columns "
        f"(default {SIDE})",
    )
    add("--seed", type=at_least(0), help="seed of the random numbers (default random)")
    add("--json", type=Path, metavar="FILE", help="write all measurements to a file")


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse contradictory options, and set those that depend on others."""
    if options.first > options.last:
        parser.error(
            f"expected -b of at most -e, got -b {options.first} -e {options.last}"
        )
    if options.eager:
        _complete_eager(parser, options)
    if options.overlap:
        _complete_overlap(parser, options)
    elif options.side:
        parser.error("--side needs --overlap")
    if options.json:
        _check_file(parser, options.json)
    if options.seed is None:
        options.seed = secrets.randbits(32)


def torch_multiplies() -> bool:
    """Return whether the product beside the calls is torch's."""
    return not SIMULATED and importlib.util.find_spec("torch") is not None


def _complete_eager(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    if not options.replays:
        parser.error("--eager takes samples; pass -G 1 or more")
    if "-n" not in options.given:
        options.calls = EAGER_CALLS
    if "--against" not in options.given and not SIMULATED:
        options.against = tuple(EAGER.split(","))


def _complete_overlap(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    if not options.replays:
        parser.error("--overlap replays graphs; pass -G 1 or more")
    if "-w" in options.given:
        parser.error("--overlap does not use -w; omit -w")
    if options.side and not torch_multiplies():
        parser.error("--side needs torch and a GPU; omit it")


def _check_file(parser: argparse.ArgumentParser, file: Path) -> None:
    """Refuse a file that cannot be written, before a run of minutes."""
    place = file if file.exists() else file.absolute().parent
    if file.is_dir() or not os.access(place, os.W_OK):
        parser.error(f"expected a file that you can write, got {file}")


def nbytes(text: str) -> int:
    """Parse a size such as ``64K``; suffixes are binary, as in nccl-tests."""
    unit = UNITS.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"expected bytes such as 512, 64K, 16M or 1G, got {text!r}"
        )
    return int(number) * unit


def sizes(options: argparse.Namespace) -> Iterator[int]:
    """Yield message sizes in bytes."""
    nbytes = options.first
    while nbytes <= options.last:
        yield nbytes
        nbytes = nbytes + options.step if options.step else nbytes * options.factor


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names in ``known``, or ``all``."""
    known = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        if text == "all":
            return known
        found = tuple(dict.fromkeys(filter(None, text.split(","))))
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}, or all, got {text!r}"
                f"{meant(''.join(unknown[:1]), known)}"
            )
        return found

    return names
